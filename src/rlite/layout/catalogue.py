"""Canonical tensors: names and shapes exactly as in a Hugging Face checkpoint on disk.

Every place that holds weights describes what it holds in terms of these tensors. `role` says what a tensor is for,
whatever an architecture calls it; layouts map roles, never names.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rlite.layout.architecture import MLA, Architecture


class CanonicalTensor(NamedTuple):
    """One tensor of the checkpoint. `shape` is `[out_features, in_features]` for projections."""

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None
    expert: int | None = None
    dtype: str | None = None
    """A fixed dtype (the router bias is fp32 everywhere); None for the dtype of the model."""


def catalogue(arch: Architecture, *, mtp: bool = False) -> dict[str, CanonicalTensor]:
    """All canonical tensors by name, in order of the layers. Tied embeddings have no `lm_head.weight`.

    `mtp` adds the multi-token-prediction layers, which checkpoints name `model.layers.{num_layers + i}`.
    """
    hidden, vocab = arch.hidden_size, arch.vocab_size
    tensors = [CanonicalTensor("model.embed_tokens.weight", (vocab, hidden), "embed")]
    for layer in range(arch.num_layers):
        tensors.extend(_decoder_layer(arch, layer, is_moe=arch.is_moe_layer(layer)))
    tensors.append(CanonicalTensor("model.norm.weight", (hidden,), "final_norm"))
    if not arch.tied_embeddings:
        tensors.append(CanonicalTensor("lm_head.weight", (vocab, hidden), "lm_head"))
    if mtp:
        for layer in range(arch.num_layers, arch.num_layers + arch.num_mtp_layers):
            tensors.extend(_mtp_layer(arch, layer))
    return {tensor.name: tensor for tensor in tensors}


def _decoder_layer(arch: Architecture, layer: int, *, is_moe: bool) -> Iterator[CanonicalTensor]:
    prefix, hidden = f"model.layers.{layer}.", arch.hidden_size
    yield CanonicalTensor(prefix + "input_layernorm.weight", (hidden,), "input_norm", layer)
    attention = _latent_attention(arch, arch.mla) if arch.mla else _grouped_attention(arch)
    for name, shape, role in attention:
        yield CanonicalTensor(prefix + "self_attn." + name, shape, role, layer)
    yield CanonicalTensor(prefix + "post_attention_layernorm.weight", (hidden,), "post_attention_norm", layer)
    if is_moe:
        yield from _experts(arch, layer)
    else:
        for name, shape, role in _feed_forward(hidden, arch.intermediate_size):
            yield CanonicalTensor(f"{prefix}mlp.{name}_proj.weight", shape, role, layer)


def _grouped_attention(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...], str]]:
    hidden, q_rows, kv_rows = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        yield f"{name}_proj.weight", (rows, hidden), name
        if arch.qkv_bias:
            yield f"{name}_proj.bias", (rows,), f"{name}_bias"
    yield "o_proj.weight", (hidden, q_rows), "o"
    if arch.qk_norm:
        yield "q_norm.weight", (arch.head_dim,), "q_norm"
        yield "k_norm.weight", (arch.head_dim,), "k_norm"


def _latent_attention(arch: Architecture, mla: MLA) -> Iterator[tuple[str, tuple[int, ...], str]]:
    hidden, q_rows = arch.hidden_size, arch.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield "q_proj.weight", (q_rows, hidden), "mla_q"
    else:
        yield "q_a_proj.weight", (mla.q_lora_rank, hidden), "q_a"
        yield "q_a_layernorm.weight", (mla.q_lora_rank,), "q_a_norm"
        yield "q_b_proj.weight", (q_rows, mla.q_lora_rank), "q_b"
    yield "kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden), "kv_a"
    yield "kv_a_layernorm.weight", (mla.kv_lora_rank,), "kv_a_norm"
    kv_rows = arch.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield "kv_b_proj.weight", (kv_rows, mla.kv_lora_rank), "kv_b"
    yield "o_proj.weight", (hidden, arch.num_heads * mla.v_head_dim), "o"


def _feed_forward(hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, int], str]]:
    yield "gate", (intermediate, hidden), "gate"
    yield "up", (intermediate, hidden), "up"
    yield "down", (hidden, intermediate), "down"


def _experts(arch: Architecture, layer: int) -> Iterator[CanonicalTensor]:
    moe, hidden = arch.moe, arch.hidden_size
    assert moe is not None
    is_mixtral = arch.model_type == "mixtral"
    prefix = f"model.layers.{layer}.{'block_sparse_moe' if is_mixtral else 'mlp'}."
    names = {"gate": "w1", "up": "w3", "down": "w2"} if is_mixtral else {k: f"{k}_proj" for k in ("gate", "up", "down")}
    yield CanonicalTensor(prefix + "gate.weight", (moe.num_experts, hidden), "router", layer)
    if moe.router_bias:
        name = prefix + "gate.e_score_correction_bias"
        yield CanonicalTensor(name, (moe.num_experts,), "router_bias", layer, dtype="float32")
    for expert in range(moe.num_experts):
        for name, shape, role in _feed_forward(hidden, moe.intermediate_size):
            full_name = f"{prefix}experts.{expert}.{names[name]}.weight"
            yield CanonicalTensor(full_name, shape, f"expert_{role}", layer, expert)
    if moe.shared_intermediate_size:
        for name, shape, role in _feed_forward(hidden, moe.shared_intermediate_size):
            yield CanonicalTensor(f"{prefix}shared_experts.{name}_proj.weight", shape, f"shared_{role}", layer)


def _mtp_layer(arch: Architecture, layer: int) -> Iterator[CanonicalTensor]:
    """DeepSeek-V3's checkpoint repeats the shared embedding and head in every MTP layer."""
    prefix, hidden, vocab = f"model.layers.{layer}.", arch.hidden_size, arch.vocab_size
    yield from _decoder_layer(arch, layer, is_moe=arch.moe is not None)
    yield CanonicalTensor(prefix + "embed_tokens.weight", (vocab, hidden), "mtp_embed", layer)
    yield CanonicalTensor(prefix + "enorm.weight", (hidden,), "mtp_embed_norm", layer)
    yield CanonicalTensor(prefix + "hnorm.weight", (hidden,), "mtp_hidden_norm", layer)
    yield CanonicalTensor(prefix + "eh_proj.weight", (hidden, 2 * hidden), "mtp_projection", layer)
    yield CanonicalTensor(prefix + "shared_head.norm.weight", (hidden,), "mtp_head_norm", layer)
    yield CanonicalTensor(prefix + "shared_head.head.weight", (vocab, hidden), "mtp_head", layer)
