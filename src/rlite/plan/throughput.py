"""Devices that the same throughput takes when training and generation share them, and when each has its own.

A model of one rollout step from the assumptions in `Throughput`, the same for both deployments. It is for comparing the
two, not for predicting a run.
"""

import math
from dataclasses import dataclass

from rlite.algorithms.flops import ModelShape, forward_flops
from rlite.plan.generation import engine_weight_bytes, kv_bytes_per_token, kv_cache
from rlite.plan.job import PlanJob
from rlite.plan.traffic import ReshardPlan, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCount:
    """One rollout step on `world_size` shared devices, and what replaces them."""

    generate_s: float
    train_s: float
    """Scoring and optimizer steps."""
    switch_s: float
    """Weight conversion, and state to the host and back, less what is copied behind an update."""
    colocated: int
    separated: int
    """Two clusters that take turns on the same data (on-policy) and finish a step in the same time."""
    separated_training: int
    separated_generation: int
    overlapped: int
    """Two clusters that both work all the time, so that training lags generation by one step (off-policy)."""

    @property
    def step_s(self) -> float:
        return self.generate_s + self.train_s + self.switch_s


def count_devices(job: PlanJob, reshard: ReshardPlan, moves: tuple[Transition, ...]) -> DeviceCount:
    """Clusters are rounded up to whole copies of their layout, so that the model fits each of them."""
    world_size = job.cluster.world_size
    generate_s, train_s = generation_seconds(job), training_seconds(job)
    hidden_s = sum(min(move.background_s, update_seconds(job)) for move in moves)
    switch_s = reshard.seconds + sum(move.seconds for move in moves) - hidden_s
    step_s = generate_s + train_s + switch_s
    # Separated and on-policy: minimise g + t subject to generate_s W/g + train_s W/t = step_s.
    root = math.sqrt(generate_s) + math.sqrt(train_s)
    generation = world_size * math.sqrt(generate_s) * root / step_s
    training = world_size * math.sqrt(train_s) * root / step_s
    generation_unit, training_unit = job.engine_layout.tp, _training_unit(job)
    generation, training = _whole(generation, generation_unit), _whole(training, training_unit)
    overlapped = _whole(world_size * generate_s / step_s, generation_unit)
    overlapped += _whole(world_size * train_s / step_s, training_unit)
    return DeviceCount(
        generate_s=generate_s,
        train_s=train_s,
        switch_s=switch_s,
        colocated=world_size,
        separated=generation + training,
        separated_training=training,
        separated_generation=generation,
        overlapped=overlapped,
    )


def generation_seconds(job: PlanJob) -> float:
    """Every completion has `max_completion_tokens` tokens; an engine decodes as many at once as its KV cache holds.

    Prompts are computed once for their group. A decoding step reads all weights and the cached tokens of every sequence,
    or computes, whichever takes longer.
    """
    speed, tp, shape = job.throughput, job.engine_layout.tp, ModelShape.from_hf(job.hf_config)
    replicas = job.engine_layout.replicas(job.cluster.world_size)
    prompts = math.ceil(job.prompts_per_step / replicas)
    sequences = prompts * job.batch.group_size
    completion, context = job.max_completion_tokens, job.row_tokens - job.max_completion_tokens / 2
    cache = kv_cache(job)
    at_once = max(1, min(sequences, job.engine.max_num_seqs, int(cache.tokens // context)))
    flops_per_s = tp * speed.peak_tflops * 1e12 * speed.prefill_mfu
    prefill_s = forward_flops(shape, [job.row_tokens - completion]) * prompts / flops_per_s
    read = engine_weight_bytes(job, 0) + at_once * context * kv_bytes_per_token(job)
    read_s = read / (speed.memory_gb_per_s * 1e9 * speed.decode_bandwidth)
    compute_s = at_once * 2.0 * shape.active_weights / flops_per_s
    return prefill_s + math.ceil(sequences / at_once) * completion * max(read_s, compute_s)


def training_seconds(job: PlanJob) -> float:
    """Scoring passes, then forward and backward over the rows of a step, with recomputation and pipeline bubbles.

    A critic scores and learns as often as the policy.
    """
    passes = job.scores_policy + job.needs_reference + job.batch.epochs * _passes_of_update(job)
    if job.has_critic:
        passes += 1 + job.batch.epochs * _passes_of_update(job)
    return passes * _pass_seconds(job)


def update_seconds(job: PlanJob) -> float:
    """Forward and backward of one update."""
    return _passes_of_update(job) * _pass_seconds(job) / job.batch.minibatches


def _passes_of_update(job: PlanJob) -> float:
    """In forward passes."""
    return 4.0 if job.megatron.recompute == "full" else 3.0


def _pass_seconds(job: PlanJob) -> float:
    """Forward over all rows of a rollout step."""
    speed, rows = job.throughput, job.prompts_per_step * job.batch.group_size
    forward = rows * forward_flops(ModelShape.from_hf(job.hf_config), [job.row_tokens])
    bubble = (job.layout.pp - 1) / (job.layout.vpp * job.num_microbatches)
    flops_per_s = job.cluster.world_size * speed.peak_tflops * 1e12 * speed.train_mfu
    return forward * (1.0 + bubble) / flops_per_s


def _training_unit(job: PlanJob) -> int:
    layout = job.layout
    return math.lcm(layout.model_parallel_size, layout.etp * layout.ep * layout.pp)


def _whole(devices: float, unit: int) -> int:
    return max(1, math.ceil(devices / unit)) * unit
