"""What a model is made of: the few integers of a Hugging Face `config.json` that decide tensor names and shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""

    q_lora_rank: int | None
    """Rank of the query projection; None where queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Mixture-of-experts feed-forward layers."""

    num_experts: int
    intermediate_size: int
    """Of one routed expert."""
    shared_intermediate_size: int
    """Of all shared experts together; 0 without."""
    layers: tuple[int, ...]
    """Layers that are MoE; the others are dense."""
    router_bias: bool
    """Auxiliary-loss-free balancing: a fp32 bias for each expert, added only for the choice of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes of a causal language model with gated feed-forward layers and RMS norms."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries, keys and values; unused with MLA."""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    mla: MLA | None = None
    moe: MoE | None = None
    num_mtp_layers: int = 0
    """Multi-token-prediction layers in the checkpoint, behind the last decoder layer."""

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> "Architecture":
        """Reads a `config.json`. Raises ValueError for a model type or an option that rlite does not train."""
        config = _Config(hf_config)
        model_type = config["model_type"]
        if model_type not in SUPPORTED_MODEL_TYPES:
            known = ", ".join(SUPPORTED_MODEL_TYPES)
            raise ValueError(f"config.json: model_type = {model_type!r} is not supported; use one of {known}")
        for option in ("attention_bias", "mlp_bias"):
            if config.get(option, False):
                raise ValueError(f"config.json: {option} = true is not supported for model_type {model_type!r}")
        num_heads = config["num_attention_heads"]
        return cls(
            model_type=model_type,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads", num_heads),
            head_dim=config.get("head_dim", config["hidden_size"] // num_heads),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            tied_embeddings=config.get("tie_word_embeddings", False),
            mla=_mla(config) if model_type.startswith("deepseek") else None,
            moe=_moe(config),
            num_mtp_layers=config.get("num_nextn_predict_layers", 0) if model_type == "deepseek_v3" else 0,
        )

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.layers


class _Config:
    """`config.json` where null means absent and a missing key is an error with a name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __getitem__(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise ValueError(f"config.json: {key} is missing; it decides the shapes of the weights")
        return self.values[key]

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _mla(config: _Config) -> MLA:
    return MLA(
        q_lora_rank=config.get("q_lora_rank", None),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
    )


def _moe(config: _Config) -> MoE | None:
    model_type, num_layers = config["model_type"], config["num_hidden_layers"]
    shared, router_bias = 0, False
    if model_type == "mixtral":
        num_experts, size = config["num_local_experts"], config["intermediate_size"]
        layers = range(num_layers)
    elif model_type == "qwen3_moe":
        # transformers 5 writes `num_local_experts` where the published checkpoints say `num_experts`.
        num_experts = config.get("num_experts", config.get("num_local_experts", 0))
        size, step = config["moe_intermediate_size"], config.get("decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers", [])
        layers = [i for i in range(num_layers) if i not in dense and (i + 1) % step == 0]
    elif model_type.startswith("deepseek"):
        num_experts = config.get("n_routed_experts", 0)
        size = config.get("moe_intermediate_size", 0)
        shared = size * config.get("n_shared_experts", 0)
        first, step = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
        layers = [i for i in range(num_layers) if i >= first and i % step == 0]
        router_bias = model_type == "deepseek_v3" or config.get("topk_method", None) == "noaux_tc"
    else:
        return None
    if not num_experts or not layers:
        return None
    return MoE(
        num_experts=num_experts,
        intermediate_size=size,
        shared_intermediate_size=shared,
        layers=tuple(layers),
        router_bias=router_bias,
    )
