"""A Hugging Face `config.json` and a layout become a Megatron-core configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from rlite.layout.architecture import MLA, Architecture
from rlite.layout.megatron import padded_vocab, pipeline_places
from rlite.layout.parallel import ParallelLayout
from rlite.megatron.bootstrap import capabilities
from rlite.megatron.options import MegatronOptions

HfConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What `build_policy` needs."""

    transformer: TransformerConfig
    gpt_kwargs: dict[str, Any]
    """Arguments of `GPTModel` that do not depend on the pipeline stage."""
    vocab_size: int
    """Without padding."""
    init_std: float


def model_config(
    hf_config: HfConfig,
    layout: ParallelLayout,
    *,
    options: MegatronOptions,
    params_dtype: torch.dtype = torch.float32,
) -> ModelConfig:
    """Megatron-core configuration of the model that `hf_config` describes.

    MoE runs without dropping tokens; its auxiliary loss and the update of the router bias are not Megatron-core's but those
    of `rlite.megatron.balance`. Dropout is 0.

    Raises:
        ValueError: an architecture or feature that Megatron-core would compute differently, sizes that the layout does
            not divide, or options that this model or this installation does not have.
    """
    arch = Architecture.from_config(hf_config)
    refuse_unsupported(hf_config)
    validate_divisibility(arch, layout)
    refuse_options(arch, options)
    fields = _common_fields(arch, hf_config, params_dtype) | _layout_fields(layout) | _runtime_fields(options)
    fields |= {"num_query_groups": arch.num_kv_heads, "kv_channels": arch.head_dim} if arch.mla is None else {}
    fields |= _mla_fields(arch.mla, rope_parameters(hf_config)) if arch.mla is not None else {}
    # Set for dense models too: Megatron-core's default dispatcher forbids pipelines with micro-batches of any length.
    fields |= {"moe_token_dispatcher_type": "alltoall"}
    fields |= _moe_fields(arch, hf_config) if arch.moe is not None else {}
    return ModelConfig(
        transformer=TransformerConfig(**fields) if arch.mla is None else MLATransformerConfig(**fields),
        gpt_kwargs=_gpt_kwargs(arch, hf_config, layout),
        vocab_size=arch.vocab_size,
        init_std=hf_config.get("initializer_range", 0.02),
    )


def rope_parameters(hf: HfConfig) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and scaling, from the current (`rope_parameters`) or the older keys."""
    rope = dict(hf.get("rope_parameters") or {})
    if "rope_theta" not in rope:
        rope = {**(hf.get("rope_scaling") or {}), **rope, "rope_theta": hf.get("rope_theta", 10000.0)}
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _common_fields(arch: Architecture, hf: HfConfig, params_dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "ffn_hidden_size": arch.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm or arch.mla is not None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype is torch.bfloat16,
        # `initialize` draws the weights; the method still has to run, because it tags weights as tensor parallel.
        "init_method": _keep,
        "output_layer_init_method": _keep,
        "embedding_init_method": _keep,
    }


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _layout_fields(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "variable_seq_lengths": layout.pp > 1,
        # Without it, Megatron-core 0.16.1 crosses the two neighbours' messages when pp = 2 (previous = next rank).
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1 and capabilities().device.is_accelerator,
        "batch_p2p_sync": False,
    }


def _runtime_fields(options: MegatronOptions) -> dict[str, Any]:
    has_te = capabilities().transformer_engine
    recompute: dict[str, Any] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": list(options.recompute_modules)},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[options.recompute]
    return recompute | {
        "transformer_impl": "transformer_engine" if has_te else "local",
        "use_cpu_initialization": not capabilities().device.is_accelerator,
        # Gradients of partial losses are summed; nothing divides by tokens, micro-batches or data-parallel size.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": options.gradient_accumulation_fusion,
        "masked_softmax_fusion": False,
        "persist_layer_norm": has_te,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }


def _mla_fields(mla: MLA, rope: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": 1.0,
    }
    if rope["rope_type"] != "yarn":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "mscale": rope.get("mscale", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
    }


def _moe_fields(arch: Architecture, hf: HfConfig) -> dict[str, Any]:
    assert arch.moe is not None
    has_te = capabilities().transformer_engine
    fields = {
        "num_moe_experts": arch.moe.num_experts,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": arch.moe.intermediate_size,
        "moe_layer_freq": [int(layer in arch.moe.layers) for layer in range(arch.num_layers)],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_te,
        "moe_permute_fusion": has_te,
        "moe_router_fusion": False,
        # Softmax over the chosen experts == over all, renormalised; without renormalisation it comes before top-k.
        "moe_router_pre_softmax": hf["model_type"] != "mixtral" and not hf.get("norm_topk_prob", False),
    }
    if arch.moe.shared_intermediate_size:
        fields["moe_shared_expert_intermediate_size"] = arch.moe.shared_intermediate_size
    if arch.model_type.startswith("deepseek"):
        fields |= _deepseek_router_fields(hf)
    return fields


def _deepseek_router_fields(hf: HfConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0)}
    if (hf.get("n_group") or 1) > 1:
        fields |= {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}
    if hf["model_type"] == "deepseek_v3":
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
        }
    return fields


def _gpt_kwargs(arch: Architecture, hf: HfConfig, layout: ParallelLayout) -> dict[str, Any]:
    rope = rope_parameters(hf)
    kwargs = {
        "vocab_size": padded_vocab(arch, layout),
        "max_sequence_length": hf.get("max_position_embeddings", 2048),
        "share_embeddings_and_output_weights": arch.tied_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
    }
    if rope["rope_type"] == "llama3":
        kwargs |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return kwargs


def refuse_unsupported(hf: HfConfig) -> None:
    """Raises ValueError for features that Megatron-core would silently compute in another way than transformers."""
    model_type, rope = hf["model_type"], rope_parameters(hf)
    llama3 = (rope.get("low_freq_factor"), rope.get("high_freq_factor"), rope.get("original_max_position_embeddings"))
    allowed_rope = ("default", "yarn") if model_type.startswith("deepseek") else ("default", "llama3")
    refusals = {
        f"hidden_act = {hf.get('hidden_act')!r} (only 'silu')": hf.get("hidden_act", "silu") != "silu",
        "attention_bias = true": bool(hf.get("attention_bias")),
        "mlp_bias = true": bool(hf.get("mlp_bias")),
        "use_sliding_window = true": bool(hf.get("use_sliding_window")),
        "sliding_window with mixtral": model_type == "mixtral" and bool(hf.get("sliding_window")),
        f"rope_type = {rope['rope_type']!r} (only {allowed_rope})": rope["rope_type"] not in allowed_rope,
        f"llama3 rope with (low, high, original) = {llama3}; Megatron-core has (1, 4, 8192) built in": (
            rope["rope_type"] == "llama3" and llama3 != (1.0, 4.0, 8192)
        ),
        "rope_interleave = false": model_type == "deepseek_v3" and not hf.get("rope_interleave", True),
        "norm_topk_prob = false with deepseek_v3": model_type == "deepseek_v3" and not hf.get("norm_topk_prob", True),
        "norm_topk_prob = true with deepseek_v2": model_type == "deepseek_v2" and bool(hf.get("norm_topk_prob")),
    }
    for feature, refused in refusals.items():
        if refused:
            raise ValueError(f"{model_type}: {feature} is not supported by the Megatron-core trainer")
    _refuse_other_group_scores(hf)


def refuse_options(arch: Architecture, options: MegatronOptions) -> None:
    """Raises ValueError for options that mean nothing to this model, or need what is not installed."""
    key, balancing = "trainer.strategy.megatron", options.moe_router_load_balancing_type
    if arch.moe is None and balancing != "none":
        raise ValueError(
            f"{key}.moe_router_load_balancing_type = {balancing}: {arch.model_type} has no experts, use none"
        )
    if options.moe_router_bias_update_rate and arch.model_type != "deepseek_v3":
        raise ValueError(
            f"{key}.moe_router_bias_update_rate = {options.moe_router_bias_update_rate}: {arch.model_type} has no router bias "
            "(deepseek_v3 has), set it to 0"
        )
    if options.gradient_accumulation_fusion and not capabilities().gradient_accumulation_fusion:
        raise ValueError(
            f"{key}.gradient_accumulation_fusion = true needs CUDA and Transformer Engine, or APEX's "
            "fused_weight_gradient_mlp_cuda; neither is here, set it to false"
        )
    if options.recompute == "selective":
        _refuse_recompute(arch, options.recompute_modules, key=f"{key}.recompute_modules")


def _refuse_recompute(arch: Architecture, modules: Sequence[str], *, key: str) -> None:
    has = {
        "moe": arch.moe is not None,
        "shared_experts": arch.moe is not None and arch.moe.shared_intermediate_size > 0,
        "mla_up_proj": arch.mla is not None,
    }
    for module in modules:
        if not has.get(module, True):
            raise ValueError(f"{key}: {arch.model_type} has no {module}, take it out")
        if module in ("layernorm", "mla_up_proj") and not capabilities().transformer_engine:
            raise ValueError(f"{key}: {module} needs Transformer Engine, which is not here; take it out")


def _refuse_other_group_scores(hf: HfConfig) -> None:
    if (hf.get("n_group") or 1) <= 1 or (hf["model_type"] == "deepseek_v2" and hf.get("topk_method") == "greedy"):
        return
    per_group, reference = hf["num_experts_per_tok"] // hf["topk_group"], 2 if hf["model_type"] == "deepseek_v3" else 1
    if per_group != reference:
        raise ValueError(
            f"num_experts_per_tok // topk_group = {hf['num_experts_per_tok']} // {hf['topk_group']} = {per_group}: "
            f"{hf['model_type']} scores a group by its best {reference} experts, Megatron-core by its best {per_group}"
        )


def validate_divisibility(arch: Architecture, layout: ParallelLayout) -> None:
    """Raises ValueError with the equation when the layout does not divide the model."""
    checks = [
        ("num_attention_heads", arch.num_heads, "tp", layout.tp),
        ("intermediate_size", arch.intermediate_size, "tp", layout.tp),
    ]
    if arch.mla is None:
        checks.append(("num_key_value_heads", arch.num_kv_heads, "tp", layout.tp))
    if arch.moe is not None:
        checks += [
            ("number of experts", arch.moe.num_experts, "ep", layout.ep),
            ("expert size", arch.moe.intermediate_size, "etp", layout.etp),
            ("shared expert size", arch.moe.shared_intermediate_size, "tp", layout.tp),
        ]
    elif layout.ep > 1:
        raise ValueError(f"trainer.strategy.layout.ep = {layout.ep}: {arch.model_type} has no experts, set ep = 1")
    for name, size, axis, ranks in checks:
        if size % ranks:
            raise ValueError(
                f"trainer.strategy.layout.{axis} = {ranks} does not divide {name} = {size} ({arch.model_type})"
            )
    pipeline_places(arch.num_layers, layout)
