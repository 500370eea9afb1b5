"""An independent reference: builds every rank's tensors from full canonical ones by gathering, fusing and slicing whole
tensors with torch, in the words of each framework. Shares no code with `rlite.layout`.
"""

import torch
from torch import Tensor

from rlite.layout.parallel import EngineLayout, ParallelLayout

Weights = dict[str, Tensor]


def random_weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Weights:
    """Distinct values everywhere; the router bias stays fp32 and is not zero."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if "correction_bias" in name else dtype)
        for name, shape in shapes.items()
    }


def _chunk(tensor: Tensor, size: int, index: int, dim: int) -> Tensor:
    assert tensor.shape[dim] % size == 0
    return tensor.chunk(size, dim)[index]


def _pad_rows(tensor: Tensor, multiple: int) -> Tensor:
    rows = -(-tensor.shape[0] // multiple) * multiple
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _names(config: dict) -> tuple[str, str, str, str]:
    if config["model_type"] == "mixtral":
        return "block_sparse_moe", "w1", "w3", "w2"
    return "mlp", "gate_proj", "up_proj", "down_proj"


def megatron_reference(config: dict, weights: Weights, layout: ParallelLayout, world_size: int, rank: int) -> Weights:
    """What Megatron-core's GPTModel holds on `rank` after loading `weights`, without virtual pipeline stages."""
    at = layout.coordinates(rank, world_size)
    num_layers, tied = config["num_hidden_layers"], config.get("tie_word_embeddings", False)
    first = layout.first_stage_layers or num_layers // layout.pp
    bounds = [0, first, num_layers] if layout.pp == 2 else [0, num_layers]
    out: Weights = {}
    if at.pp == 0:
        embed = _pad_rows(weights["model.embed_tokens.weight"], layout.tp)
        out["0.embedding.word_embeddings.weight"] = _chunk(embed, layout.tp, at.tp, 0)
    for index, layer in enumerate(range(bounds[at.pp], bounds[at.pp + 1])):
        local = _megatron_layer(config, weights, f"model.layers.{layer}.", layout, at)
        out |= {f"0.decoder.layers.{index}.{name}": tensor for name, tensor in local.items()}
    if at.pp == layout.pp - 1:
        out["0.decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if not tied or layout.pp > 1:
            head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
            out["0.output_layer.weight"] = _chunk(_pad_rows(head, layout.tp), layout.tp, at.tp, 0)
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _megatron_layer(config: dict, weights: Weights, prefix: str, layout: ParallelLayout, at) -> Weights:
    get = lambda name: weights[prefix + name]  # noqa: E731
    moe, gate, up, down = _names(config)
    out = {
        "input_layernorm.weight": get("input_layernorm.weight"),
        "pre_mlp_layernorm.weight": get("post_attention_layernorm.weight"),
        "self_attention.linear_proj.weight": _chunk(get("self_attn.o_proj.weight"), layout.tp, at.tp, 1),
    }
    renamed = {
        "q_a_proj": ("linear_q_down_proj", None),
        "q_a_layernorm": ("q_layernorm", None),
        "q_b_proj": ("linear_q_up_proj", 0),
        "kv_a_proj_with_mqa": ("linear_kv_down_proj", None),
        "kv_a_layernorm": ("kv_layernorm", None),
        "kv_b_proj": ("linear_kv_up_proj", 0),
        "q_norm": ("q_layernorm", None),
        "k_norm": ("k_layernorm", None),
    }
    if "kv_lora_rank" in config and config.get("q_lora_rank") is None:
        renamed["q_proj"] = ("linear_q_proj", 0)
    for theirs, (ours, dim) in renamed.items():
        if f"{prefix}self_attn.{theirs}.weight" in weights:
            full = get(f"self_attn.{theirs}.weight")
            out[f"self_attention.{ours}.weight"] = full if dim is None else _chunk(full, layout.tp, at.tp, dim)
    for kind in ("weight", "bias") if "kv_lora_rank" not in config else ():
        if f"{prefix}self_attn.q_proj.{kind}" in weights:
            groups = config["num_key_value_heads"]
            parts = [get(f"self_attn.{x}_proj.{kind}") for x in "qkv"]
            fused = torch.cat([x.reshape(groups, -1, *x.shape[1:]) for x in parts], dim=1)
            out[f"self_attention.linear_qkv.{kind}"] = _chunk(fused, layout.tp, at.tp, 0).reshape(
                -1, *parts[0].shape[1:]
            )

    def feed_forward(ours: str, theirs: str, names: tuple[str, str, str], size: int, index: int) -> None:
        halves = [_chunk(get(f"{theirs}{name}.weight"), size, index, 0) for name in names[:2]]
        out[f"{ours}linear_fc1.weight"] = torch.cat(halves)
        out[f"{ours}linear_fc2.weight"] = _chunk(get(f"{theirs}{names[2]}.weight"), size, index, 1)

    if f"{prefix}{moe}.gate.weight" not in weights:
        feed_forward("mlp.", "mlp.", ("gate_proj", "up_proj", "down_proj"), layout.tp, at.tp)
        return out
    out["mlp.router.weight"] = get(f"{moe}.gate.weight")
    if f"{prefix}{moe}.gate.e_score_correction_bias" in weights:
        out["mlp.router.expert_bias"] = get(f"{moe}.gate.e_score_correction_bias")
    if f"{prefix}{moe}.shared_experts.gate_proj.weight" in weights:
        shared = ("gate_proj", "up_proj", "down_proj")
        feed_forward("mlp.shared_experts.", f"{moe}.shared_experts.", shared, layout.tp, at.tp)
    count = out["mlp.router.weight"].shape[0] // layout.ep
    for i in range(count):
        theirs = f"{moe}.experts.{at.ep * count + i}."
        feed_forward(f"mlp.experts.local_experts.{i}.", theirs, (gate, up, down), layout.etp, at.etp)
    return out


def vllm_reference(config: dict, weights: Weights, engine: EngineLayout, rank: int) -> Weights:
    """What vLLM holds on `rank` after loading `weights`; vocabulary padding is zero."""
    tp, at = engine.tp, rank % engine.tp
    out = {"model.norm.weight": weights["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            out[name] = _chunk(_pad_rows(weights[name], 64), tp, at, 0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        out |= {prefix + name: tensor for name, tensor in _vllm_layer(config, weights, prefix, engine, at).items()}
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _vllm_layer(config: dict, weights: Weights, prefix: str, engine: EngineLayout, at: int) -> Weights:
    get, tp = lambda name: weights[prefix + name], engine.tp
    moe, gate, up, down = _names(config)
    out = {name: get(name) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    out["self_attn.o_proj.weight"] = _chunk(get("self_attn.o_proj.weight"), tp, at, 1)
    for name in ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm"):
        if f"{prefix}self_attn.{name}.weight" in weights:
            out[f"self_attn.{name}.weight"] = get(f"self_attn.{name}.weight")
    if "kv_lora_rank" in config:
        out["self_attn.kv_b_proj.weight"] = _chunk(get("self_attn.kv_b_proj.weight"), tp, at, 0)
        kv_a = get("self_attn.kv_a_proj_with_mqa.weight")
        if config.get("q_lora_rank") is None:
            out["self_attn.q_proj.weight"] = _chunk(get("self_attn.q_proj.weight"), tp, at, 0)
            out["self_attn.kv_a_proj_with_mqa.weight"] = kv_a
        else:
            out["self_attn.q_b_proj.weight"] = _chunk(get("self_attn.q_b_proj.weight"), tp, at, 0)
            out["self_attn.fused_qkv_a_proj.weight"] = torch.cat([get("self_attn.q_a_proj.weight"), kv_a])
    else:
        kv_heads = config["num_key_value_heads"]
        for kind in ("weight", "bias"):
            if f"{prefix}self_attn.q_proj.{kind}" in weights:
                q, k, v = (get(f"self_attn.{x}_proj.{kind}") for x in "qkv")
                # With more ranks than KV heads every head is repeated for the ranks that share it.
                copies = max(1, tp // kv_heads)
                repeat = lambda x: torch.cat([h for h in x.chunk(kv_heads) for _ in range(copies)])  # noqa: B023, E731
                parts = [q, repeat(k), repeat(v)]
                out[f"self_attn.qkv_proj.{kind}"] = torch.cat([_chunk(part, tp, at, 0) for part in parts])

    def feed_forward(name: str) -> None:
        parts = [_chunk(get(f"{name}{x}_proj.weight"), tp, at, 0) for x in ("gate", "up")]
        out[f"{name}gate_up_proj.weight"] = torch.cat(parts)
        out[f"{name}down_proj.weight"] = _chunk(get(f"{name}down_proj.weight"), tp, at, 1)

    if f"{prefix}{moe}.gate.weight" not in weights:
        feed_forward("mlp.")
        return out
    for name in (f"{moe}.gate.weight", f"{moe}.gate.e_score_correction_bias"):
        if prefix + name in weights:
            out[name] = get(name)
    if f"{prefix}{moe}.shared_experts.gate_proj.weight" in weights:
        feed_forward(f"{moe}.shared_experts.")
    experts = range(out[f"{moe}.gate.weight"].shape[0])
    size, index = tp, at
    if engine.expert_parallel:
        # Contiguous runs; the first ranks take one more when they do not divide.
        base, extra = divmod(len(experts), tp)
        first = at * base + min(at, extra)
        experts, size, index = range(first, first + base + (at < extra)), 1, 0
    stack = lambda name, dim: torch.stack(  # noqa: E731
        [_chunk(get(f"{moe}.experts.{e}.{name}.weight"), size, index, dim) for e in experts]
    )
    out[f"{moe}.experts.w13_weight"] = torch.cat([stack(gate, 0), stack(up, 0)], dim=1)
    out[f"{moe}.experts.w2_weight"] = stack(down, 1)
    return out
