"""Changes of a configuration that make a run fit, cheapest first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlite.plan.generation import kv_bytes_per_token
from rlite.plan.job import GIB, PlanJob
from rlite.plan.memory import MemoryPlan, plan_memory
from rlite.rollout.config import VLLMConfig

_LEAST_LOGITS_TOKENS = 128
_LEAST_STAGING_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New values of some settings, and the job that results."""

    settings: dict[str, str | int | float]
    """By config key; callbacks by their class."""
    cost: float
    """About the part of a rollout step that it adds; only its order between changes matters."""
    job: PlanJob

    def __str__(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.settings.items())


def changes_that_fit(job: PlanJob, *, most: int = 3) -> list[Change]:
    """At most `most` changes of one setting under which the run fits, cheapest first.

    When no single one is enough: the cheapest ones together, as many as it takes. Empty when nothing helps.
    """
    memory = plan_memory(job)
    fitting: dict[str, Change] = {}
    for change in single_changes(job, memory):
        (key,) = change.settings
        planned = _planned(change.job) if key not in fitting else None
        if planned is not None and planned.fits:
            fitting[key] = change
        if len(fitting) == most:
            break
    return list(fitting.values()) or _together(job, memory)


def single_changes(job: PlanJob, memory: MemoryPlan) -> list[Change]:
    """Changes of one setting that are legal, cheapest first; `memory` is the plan of `job`."""
    changes = [
        *_budget(job, memory),
        *_offload(job),
        *_engine(job, memory),
        *_trainer(job),
        *_layout(job),
        *_devices(job),
    ]
    return sorted(changes, key=lambda change: change.cost)


def _together(job: PlanJob, memory: MemoryPlan) -> list[Change]:
    """The cheapest set of changes that a greedy search finds, also when it may not touch one of the settings it liked."""
    best = _greedy(job, memory, barred=frozenset())
    barred: frozenset[str] = frozenset()
    for key in best.settings if best else ():
        other = _greedy(job, memory, barred=barred | {key})
        if best and other and other.cost < best.cost:
            best, barred = other, barred | {key}
    return [best] if best else []


def _greedy(job: PlanJob, memory: MemoryPlan, *, barred: frozenset[str]) -> Change | None:
    """Takes, again and again, the cheapest change that brings the run closer to fitting. None when it gets stuck."""
    settings: dict[str, str | int | float] = {}
    cost = 0.0
    while not memory.fits:
        step = next(_closer(job, memory, barred), None)
        if step is None:
            return None
        change, memory = step
        settings |= change.settings
        cost, job = cost + change.cost, change.job
    return Change(settings=settings, cost=cost, job=job)


def _closer(job: PlanJob, memory: MemoryPlan, barred: frozenset[str]) -> Iterator[tuple[Change, MemoryPlan]]:
    for change in single_changes(job, memory):
        planned = _planned(change.job) if not barred & change.settings.keys() else None
        if planned is not None and planned.shortage_bytes < memory.shortage_bytes:
            yield change, planned


def _planned(job: PlanJob) -> MemoryPlan | None:
    """None when the new layout does not divide the model."""
    try:
        return plan_memory(job)
    except ValueError:
        return None


def _change(job: PlanJob, key: str, value: str | int | float, cost: float, **fields: object) -> Iterator[Change]:
    """The change, unless the new layout does not cover the world."""
    try:
        changed = replace(job, **fields)
    except ValueError:
        return
    yield Change(settings={key: value}, cost=cost, job=changed)


def _budget(job: PlanJob, memory: MemoryPlan) -> Iterator[Change]:
    """The run's own limit, raised as far as the device goes: it costs nothing."""
    missing = max(memory.over_budget_bytes, memory.kv.least_bytes - memory.kv.nbytes)
    if job.budget is None or job.limit_bytes is None or missing <= 0:
        return
    gib = math.ceil((job.limit_bytes + missing) / GIB * 1e4) / 1e4
    if gib * GIB <= job.cluster.usable_bytes:
        changed = replace(job.budget, limit_bytes=int(gib * GIB))
        yield from _change(job, "MemoryOffload.device_budget_gib", gib, 0.0, budget=changed)


def _offload(job: PlanJob) -> Iterator[Change]:
    if job.offload.name != "full":
        full = replace(job.offload, name="full", budget_bytes=0)
        yield from _change(job, "MemoryOffload.policy", "full", 0.01, offload=full)
    half = job.staging_budget_bytes // 2
    if half >= _LEAST_STAGING_BYTES:
        yield from _change(job, "EP2TPConversion.staging_budget_bytes", half, 0.02, staging_budget_bytes=half)


def _trainer(job: PlanJob) -> Iterator[Change]:
    options, key = job.megatron, "trainer.strategy.megatron."
    half = options.logprob_chunk_tokens // 2
    if half >= _LEAST_LOGITS_TOKENS:
        changed = replace(options, logprob_chunk_tokens=half)
        yield from _change(job, key + "logprob_chunk_tokens", half, 0.02, megatron=changed)
    tokens, cost = options.max_tokens_per_microbatch // 2, 0.04
    while tokens >= job.row_tokens:
        changed = replace(options, max_tokens_per_microbatch=tokens)
        yield from _change(job, key + "max_tokens_per_microbatch", tokens, cost, megatron=changed)
        tokens, cost = tokens // 2, cost + 0.04
    for recompute, cost in (("selective", 0.10), ("full", 0.30)):
        if recompute != options.recompute != "full":
            changed = replace(options, recompute=recompute)  # type: ignore[arg-type]
            yield from _change(job, key + "recompute", recompute, cost, megatron=changed)


def _engine(job: PlanJob, memory: MemoryPlan) -> Iterator[Change]:
    engine, key = job.engine, f"{'VLLM' if isinstance(job.engine, VLLMConfig) else 'Transformers'}Rollout.engine."
    one_sequence = engine.max_model_len * kv_bytes_per_token(job)
    wanted = max(engine.kv_cache_memory_bytes + min(memory.headroom_bytes, 0), one_sequence)
    nbytes = max(_rounded_down(wanted), one_sequence)
    if nbytes != engine.kv_cache_memory_bytes:
        lost = 1.0 - nbytes / engine.kv_cache_memory_bytes
        changed = replace(engine, kv_cache_memory_bytes=nbytes)
        yield from _change(job, key + "kv_cache_memory_bytes", nbytes, 0.05 + 0.2 * max(lost, 0.0), engine=changed)
    if engine.max_num_seqs >= 32:
        changed = replace(engine, max_num_seqs=engine.max_num_seqs // 2)
        yield from _change(job, key + "max_num_seqs", changed.max_num_seqs, 0.15, engine=changed)
    if isinstance(engine, VLLMConfig):
        changed = replace(engine, tp=2 * engine.tp)
        yield from _change(job, key + "tp", changed.tp, 0.20, engine=changed)


def _layout(job: PlanJob) -> Iterator[Change]:
    for axis, cost in (("ep", 0.22), ("pp", 0.32), ("tp", 0.35)):
        value = 2 * getattr(job.layout, axis)
        if axis != "ep" or job.architecture.moe is not None:
            changed = replace(job.layout, **{axis: value})
            yield from _change(job, f"trainer.strategy.layout.{axis}", value, cost, layout=changed)


def _devices(job: PlanJob) -> Iterator[Change]:
    cluster = job.cluster
    whole_nodes = cluster.world_size % cluster.node_size == 0
    for factor, cost in ((2, 1.0), (4, 3.0)):
        world_size = factor * cluster.world_size
        key = "trainer.num_nodes" if whole_nodes else "trainer.devices"
        value = world_size // cluster.node_size if whole_nodes else world_size
        yield from _change(job, key, value, cost, cluster=replace(cluster, world_size=world_size))


def _rounded_down(nbytes: int) -> int:
    """To five leading bits: a number that people can read."""
    unit = 2 ** max(nbytes.bit_length() - 5, 0)
    return nbytes // unit * unit
