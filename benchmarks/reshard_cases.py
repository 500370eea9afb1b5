"""What the resharding benchmarks share: published and scaled architectures, and layouts written as `pp16,ep16`."""

import re
from typing import Any

from rlite.layout.architecture import Architecture
from rlite.layout.parallel import EngineLayout, ParallelLayout

_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "vocab_size": 151936,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        **_MLA,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
    },
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-235b-a22b": {
        **_QWEN3_30B,
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
}

_SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
_NUM_EXPERTS = 32


def tiny_architecture(name: str, expert_megabytes: int) -> Architecture:
    """A small model whose routed experts take about `expert_megabytes` MB in bf16."""
    deepseek = name == "tiny_dsv3"
    moe_layers = _SMALL["num_hidden_layers"] - int(deepseek)
    rows = expert_megabytes * 1e6 / (2 * moe_layers * _NUM_EXPERTS * 3 * _SMALL["hidden_size"])
    config = {**_SMALL, "moe_intermediate_size": max(16, round(rows / 16) * 16)}
    if deepseek:
        mla = {**_MLA, "q_lora_rank": 192, "kv_lora_rank": 128}
        dense = {"n_routed_experts": _NUM_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
        return Architecture.from_config({**config, **mla, **dense, "model_type": "deepseek_v3"})
    return Architecture.from_config({**config, "model_type": "qwen3_moe", "num_experts": _NUM_EXPERTS})


def training_layout(text: str, num_layers: int) -> ParallelLayout:
    """`tp2,pp16,ep16,etp1`; etp defaults to tp without ep, else to 1. Layers that do not divide over pp go where the
    first and last stage have fewer."""
    sizes = {axis: size for axis, size in _axes(text).items()}
    sizes.setdefault("etp", sizes.get("tp", 1) if sizes.get("ep", 1) == 1 else 1)
    pp = sizes.get("pp", 1)
    ends: dict[str, int | None] = {}
    if num_layers % pp:
        per_stage = -(-num_layers // pp)
        left = num_layers - per_stage * (pp - 2)
        ends = {"first_stage_layers": -(-left // 2), "last_stage_layers": left // 2}
    return ParallelLayout(**sizes, **ends)


def engine_layout(text: str) -> EngineLayout:
    """`tp32`, or `tp8,ep1` for experts that stay whole."""
    sizes = _axes(text)
    return EngineLayout(tp=sizes.get("tp", 1), expert_parallel=bool(sizes.get("ep", 0)))


def _axes(text: str) -> dict[str, int]:
    parts = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in text.split(",")]
    if not all(parts):
        raise SystemExit(f"layout {text!r}: write axes and sizes like pp16,ep16")
    return {match[1]: int(match[2]) for match in parts if match}
