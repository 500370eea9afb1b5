"""Working memory of training and scoring: activations kept for the backward pass, logits, the optimizer step.

Counts follow Korthikanti et al. 2022 (arXiv 2205.05198), for gated feed-forward layers, latent attention and experts, and
for attention kernels that never store the score matrix. With sequence parallelism everything is divided by `tp`, and
context parallelism divides the tokens. Routing is taken as balanced: every rank's experts see `top_k` tokens for each
of its own. Elements are in compute dtype unless said otherwise.
"""

from dataclasses import dataclass

from rlite.layout.megatron import padded_vocab
from rlite.plan.job import PlanJob
from rlite.plan.sizes import DTYPE_BYTES
from rlite.plan.training import Stage, TrainingBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingBytes:
    """Of one rank."""

    train_activations: int
    score_activations: int
    """Without gradient: one layer at a time."""
    train_logits: int
    """One chunk of logits with its gradient, and the fp32 gradient of the LM head that the chunks add up."""
    score_logits: int


def optimizer_step_bytes(held: TrainingBytes) -> int:
    """Two fp32 temporaries of one weight at a time: the denominator of AdamW, and its root."""
    return 2 * 4 * held.largest_shard


def working_bytes(job: PlanJob, stage: Stage, stage_index: int) -> WorkingBytes:
    """Of a rank on pipeline stage number `stage_index`."""
    itemsize, tokens = DTYPE_BYTES[job.train_dtype], job.microbatch_tokens / job.layout.cp
    layer = {"dense": layer_elements(job, moe=False), "moe": 0.0}
    if job.architecture.moe is not None:
        layer["moe"] = layer_elements(job, moe=True)
    counts = {"dense": sum(c.dense_layers for c in stage), "moe": sum(c.moe_layers for c in stage)}
    largest = max((layer[kind] for kind, count in counts.items() if count), default=0.0)
    hidden = job.architecture.hidden_size / job.layout.tp
    stored = {kind: hidden if job.megatron.recompute == "full" else layer[kind] for kind in layer}
    per_microbatch = sum(count * stored[kind] for kind, count in counts.items())
    train = microbatches_in_flight(job, stage_index) * per_microbatch
    if job.megatron.recompute == "full":
        train += largest  # the layer that is being recomputed
    head = 4 * job.architecture.hidden_size if any(chunk.has_head for chunk in stage) else 0
    return WorkingBytes(
        train_activations=int(tokens * itemsize * (train + head)),
        score_activations=int(tokens * itemsize * (largest + head)),
        train_logits=_logits_bytes(job, train=True) if head else 0,
        score_logits=_logits_bytes(job, train=False) if head else 0,
    )


def microbatches_in_flight(job: PlanJob, stage_index: int) -> float:
    """Micro-batches whose activations a stage holds at once, in the 1F1B schedule.

    Interleaved (`vpp`), the unit of the schedule is one of `vpp` chunks; the count is in whole stages, so a fraction.
    """
    pp, vpp, total = job.layout.pp, job.layout.vpp, job.num_microbatches
    if vpp == 1:
        return min(total, pp - stage_index)
    warmup = 2 * (pp - stage_index - 1) + (vpp - 1) * pp
    return min(total * vpp, warmup + 1) / vpp


def layer_elements(job: PlanJob, *, moe: bool) -> float:
    """Elements that one layer keeps for one token, on one rank."""
    arch = job.architecture
    norms = 4 * arch.hidden_size  # input and output of two norms; the residual stream is such an input
    feed_forward = _moe_elements(job) if moe else 4 * arch.intermediate_size
    return (norms + _attention_elements(job) + feed_forward) / job.layout.tp


def _attention_elements(job: PlanJob) -> float:
    """Projections before and after rotation, what the kernel keeps, and the input of the output projection."""
    arch = job.architecture
    if arch.mla is None:
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        # Keys and values are repeated for every query head; `selective` computes the core attention again.
        repeated = 2 * q if kv < q and job.megatron.recompute == "none" else 0
        return (q + 2 * kv) + (q + kv) + repeated + q
    mla, heads = arch.mla, arch.num_heads
    q = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = heads * mla.v_head_dim
    compressed = 2 * (mla.q_lora_rank or 0) + 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
    return compressed + 2 * q + (heads * mla.qk_nope_head_dim + value) + q + value + value


def _moe_elements(job: PlanJob) -> float:
    """Router in fp32, the tokens sent to experts and back, and the inner activations of experts."""
    moe, top_k = job.architecture.moe, job.hf_config["num_experts_per_tok"]
    assert moe is not None
    router = 3 * moe.num_experts * 4 / DTYPE_BYTES[job.train_dtype]
    dispatched = 2 * top_k * job.architecture.hidden_size * job.layout.etp
    inner = 4 * (top_k * moe.intermediate_size + moe.shared_intermediate_size)
    return router + dispatched + inner + job.architecture.hidden_size


def _logits_bytes(job: PlanJob, *, train: bool) -> int:
    itemsize = DTYPE_BYTES[job.train_dtype]
    rows = padded_vocab(job.architecture, job.layout) // job.layout.tp
    tokens = min(job.megatron.logprob_chunk_tokens, job.microbatch_tokens)
    # Two fp32 matrices at a time, beside the product in compute dtype.
    chunk = tokens * rows * (8 + (itemsize if itemsize < 4 else 0))
    head_gradient = rows * job.architecture.hidden_size * (4 + itemsize) if train else 0
    return chunk + head_gradient
