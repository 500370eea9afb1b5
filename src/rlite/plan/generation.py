"""Bytes of the generation engine on each of its ranks: weights, KV cache, working memory."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rlite.layout.architecture import Architecture
from rlite.layout.catalogue import catalogue
from rlite.layout.hf import hf_boxes
from rlite.layout.parallel import EngineLayout
from rlite.layout.vllm import VLLMPlacement
from rlite.plan.job import PlanJob
from rlite.plan.sizes import DTYPE_BYTES
from rlite.plan.training import two_layers
from rlite.rollout.config import VLLMConfig

BATCHED_TOKENS = 8192
"""Least number of tokens that the engine computes in one step of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Of one rank."""

    nbytes: int
    bytes_per_token: int
    """Over all layers. Tensor parallelism shares KV heads out; the latent vector of MLA is on every rank."""
    tokens: int
    sequences: int
    """Of the longest length (`engine.max_model_len`), at once."""
    least_bytes: int
    """What one such sequence takes."""


def engine_positions(job: PlanJob) -> list[int]:
    """One engine rank of every kind: whole experts may not divide, then the first ranks have one more."""
    arch, engine = job.architecture, job.engine_layout
    if engine.expert_parallel and arch.moe is not None and arch.moe.num_experts % engine.tp:
        return [0, engine.tp - 1]
    return [0]


def engine_position(job: PlanJob, rank: int) -> int:
    """Which of `engine_positions` the global `rank` is like."""
    positions = engine_positions(job)
    if len(positions) == 1:
        return positions[0]
    moe, tp = job.architecture.moe, job.engine_layout.tp
    assert moe is not None
    return positions[rank % tp >= moe.num_experts % tp]


def engine_weight_bytes(job: PlanJob, position: int) -> int:
    """Weights of the engine on its rank `position`.

    The absorbed projections that vLLM derives from `kv_b_proj` are views of it, as long as weights are not quantised.
    """
    arch = job.architecture
    sizes = _bytes_by_part(arch, job.engine.dtype, job.engine_layout if _is_vllm(job) else None, position)
    moe_layers = len(arch.moe.layers) if arch.moe else 0
    counts = {"0": arch.num_layers - moe_layers, "1": moe_layers, "": 1}
    return sum(counts[part] * size for part, size in sizes.items())


def kv_cache(job: PlanJob, room_bytes: int | None = None) -> KVCache:
    """What `engine.kv_cache_memory_bytes` holds; with `room_bytes`, a cache that is sized anew and takes all of it."""
    per_token = kv_bytes_per_token(job)
    tokens = (job.engine.kv_cache_memory_bytes if room_bytes is None else room_bytes) // per_token
    nbytes = job.engine.kv_cache_memory_bytes if room_bytes is None else tokens * per_token
    sequences = min(job.engine.max_num_seqs, tokens // job.engine.max_model_len)
    return KVCache(
        nbytes=nbytes,
        bytes_per_token=per_token,
        tokens=tokens,
        sequences=sequences,
        least_bytes=job.engine.max_model_len * per_token,
    )


def kv_bytes_per_token(job: PlanJob) -> int:
    arch, itemsize = job.architecture, DTYPE_BYTES[job.engine.dtype]
    if arch.mla is not None and _is_vllm(job):
        width = arch.mla.kv_lora_rank + arch.mla.qk_rope_head_dim
    elif arch.mla is not None:  # transformers caches the keys and values of every head
        mla = arch.mla
        width = arch.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    else:
        width = 2 * max(1, arch.num_kv_heads // job.engine_layout.tp) * arch.head_dim
    return arch.num_layers * width * itemsize


def engine_working_bytes(job: PlanJob) -> int:
    """One step of prompts through the widest layer, and fp32 logits and log-probabilities of the sequences."""
    arch, tp, itemsize = job.architecture, job.engine_layout.tp, DTYPE_BYTES[job.engine.dtype]
    heads = arch.num_heads * (arch.mla.qk_nope_head_dim + arch.mla.qk_rope_head_dim if arch.mla else arch.head_dim)
    feed_forward = 3 * arch.intermediate_size / tp
    if arch.moe is not None:
        top_k = job.hf_config["num_experts_per_tok"]
        feed_forward = max(feed_forward, top_k * (3 * arch.moe.intermediate_size / tp + arch.hidden_size))
    per_token = 4 * arch.hidden_size + 3 * heads / tp + feed_forward
    logits = job.engine.max_num_seqs * arch.vocab_size * (itemsize + 8)
    return int(max(job.engine.max_model_len, BATCHED_TOKENS) * per_token * itemsize) + logits


@lru_cache(maxsize=64)
def _bytes_by_part(arch: Architecture, dtype: str, engine: EngineLayout | None, position: int) -> Counter[str]:
    """Bytes of a dense layer "0", a MoE layer "1" and everything else ""; without `engine` the whole model on a rank."""
    arch = two_layers(arch)
    if engine is not None:
        tensors = VLLMPlacement(arch, engine, engine.tp, dtype=dtype).local(position).tensors
    else:
        tensors = hf_boxes(catalogue(arch).values(), dtype=dtype).tensors
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        part = tensor.name.split(".")[2] if tensor.name.startswith("model.layers.") else ""
        sizes[part] += prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    return sizes


def _is_vllm(job: PlanJob) -> bool:
    return isinstance(job.engine, VLLMConfig)
