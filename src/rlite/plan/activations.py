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
    """fp32 copies of gradients in less, and two temporaries of one weight at a time: AdamW's denominator, and its root."""
    return held.gradient_copies + 2 * 4 * held.largest_shard


def working_bytes(job: PlanJob, stage: Stage, stage_index: int) -> WorkingBytes:
    """Of a rank on pipeline stage number `stage_index`."""
    itemsize, tokens = DTYPE_BYTES[job.train_dtype], job.microbatch_tokens / job.layout.cp
    layer = {"dense": layer_elements(job, moe=False), "moe": 0.0}
    if job.architecture.moe is not None:
        layer["moe"] = layer_elements(job, moe=True)
    counts = {"dense": sum(c.dense_layers for c in stage), "moe": sum(c.moe_layers for c in stage)}
    largest = max((layer[kind] for kind, count in counts.items() if count), default=0.0)
    again = {kind: recomputed_elements(job, moe=kind == "moe") if counts[kind] else 0.0 for kind in layer}
    per_microbatch = sum(count * (layer[kind] - again[kind]) for kind, count in counts.items())
    train = microbatches_in_flight(job, stage_index) * per_microbatch
    train += max(again.values())  # of the one layer that is being recomputed
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


def recomputed_elements(job: PlanJob, *, moe: bool) -> float:
    """Those of `layer_elements` that are dropped in the forward pass and made again in the backward pass."""
    arch, options, tp = job.architecture, job.megatron, job.layout.tp
    if options.recompute == "none":
        return 0.0
    if options.recompute == "full":
        return layer_elements(job, moe=moe) - arch.hidden_size / tp  # its input stays
    elements = {"core_attn": _repeated_elements(job), "layernorm": 2.0 * arch.hidden_size}
    elements["mla_up_proj"] = _up_projected_elements(job) if arch.mla is not None else 0.0
    if moe:
        assert arch.moe is not None
        shared = 4 * arch.moe.shared_intermediate_size
        elements |= {"moe": _moe_elements(job)} if "moe" in options.recompute_modules else {"shared_experts": shared}
    else:
        elements["mlp"] = 4 * arch.intermediate_size
    return sum(elements.get(module, 0.0) for module in set(options.recompute_modules)) / tp


def _attention_elements(job: PlanJob) -> float:
    """Projections before and after rotation, what the kernel keeps, and the input of the output projection."""
    arch = job.architecture
    if arch.mla is None:
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        return (q + 2 * kv) + (q + kv) + _repeated_elements(job) + q
    mla, heads = arch.mla, arch.num_heads
    q = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = heads * mla.v_head_dim
    compressed = 2 * (mla.q_lora_rank or 0) + 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
    return compressed + _up_projected_elements(job) + q + value + value


def _repeated_elements(job: PlanJob) -> float:
    """Keys and values, repeated for every query head inside the core attention."""
    arch = job.architecture
    if arch.mla is not None or arch.num_kv_heads == arch.num_heads:
        return 0.0
    return 2.0 * arch.num_heads * arch.head_dim


def _up_projected_elements(job: PlanJob) -> float:
    """Queries before and after rotation, keys and values out of the latent space."""
    mla, heads = job.architecture.mla, job.architecture.num_heads
    assert mla is not None
    q = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return 2.0 * q + heads * (mla.qk_nope_head_dim + mla.v_head_dim)


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
    chunk, head = tokens * rows, rows * job.architecture.hidden_size
    if not train:
        return 8 * chunk  # fp32 logits and their softmax
    # The fp32 gradient of the LM head lies beside them, later beside the gradient of the logits and a product of its size.
    return max(8 * chunk + 4 * head, itemsize * chunk + (4 + itemsize) * head)
