"""`plan_memory`: what every phase holds on every kind of rank.

The plan does not repeat the rules of the phase machine: it runs the machine itself, with residents that only know their
size. So order, transition peaks and moved bytes are those of a run.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlite.device import DeviceKind
from rlite.memory.budget import DeviceBudget
from rlite.memory.ledger import Ledger, PhaseEntry
from rlite.memory.phases import CRITIC, ENGINE, KV_CACHE, POLICY, Phase, PhaseMachine
from rlite.plan.activations import WorkingBytes, optimizer_step_bytes, working_bytes
from rlite.plan.generation import (
    KVCache,
    engine_position,
    engine_positions,
    engine_weight_bytes,
    engine_working_bytes,
    kv_cache,
)
from rlite.plan.job import PlanJob
from rlite.plan.residents import STAGING, engine_residents, training_residents
from rlite.plan.sizes import DTYPE_BYTES
from rlite.plan.training import Stage, TrainingBytes, TrainingModel, stages

ACTIVATIONS, LOGITS, ENGINE_WORK = "activations", "logits", "engine_workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One phase on one rank."""

    phase: Phase
    residents: dict[str, int]
    """Bytes on the device by resident, once the phase was entered."""
    working: dict[str, int]
    """Bytes that computing takes on top."""
    transition_peak_bytes: int
    """Most that residents and staging hold together on the way into the phase."""
    step_peak_bytes: int
    """In TRAIN and CRITIC: residents and what the optimizer step takes, when the activations are gone. Else 0."""
    moved_bytes: int
    """Copied between host and device on the way into the phase."""
    background_bytes: int
    """The part of them that the first forward and backward pass do not wait for."""
    gathered_bytes: int
    """Of weights that are made anew: what this rank gets from those that share its optimizer state."""
    host_bytes: int

    @property
    def held_bytes(self) -> int:
        return sum(self.residents.values()) + sum(self.working.values())

    @property
    def peak_bytes(self) -> int:
        return max(self.held_bytes, self.transition_peak_bytes, self.step_peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that hold equally many bytes in every phase."""

    content: str
    """For example `4 MoE layers`."""
    stages: tuple[int, ...]
    """Pipeline stages that they are on."""
    ranks: tuple[int, ...]
    phases: tuple[PhasePlan, ...]

    @property
    def name(self) -> str:
        return f"{stage_span(self.stages)}: {self.content}"

    @property
    def peak_bytes(self) -> int:
        return max(phase.peak_bytes for phase in self.phases)

    def phase(self, phase: Phase) -> PhasePlan:
        return next(planned for planned in self.phases if planned.phase is phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All rank classes, the fullest first."""

    classes: tuple[RankClass, ...]
    usable_bytes: int
    """Of a device."""
    kv: KVCache
    budget: DeviceBudget | None
    """Of the run."""

    @property
    def peak_bytes(self) -> int:
        return self.classes[0].peak_bytes

    @property
    def headroom_bytes(self) -> int:
        """Negative: what is missing on the fullest rank."""
        return self.usable_bytes - self.peak_bytes

    @property
    def over_budget_bytes(self) -> int:
        """By how much residents exceed the run's own limit, with its reserve in GENERATE."""
        if self.budget is None or self.budget.limit_bytes is None:
            return 0
        phases = [phase for rank_class in self.classes for phase in rank_class.phases]
        entering = max(phase.transition_peak_bytes for phase in phases)
        reserve = {Phase.GENERATE: self.budget.reserve_bytes}
        held = max(sum(phase.residents.values()) + reserve.get(phase.phase, 0) for phase in phases)
        return max(entering - self.budget.limit_bytes, held - self.budget.limit_bytes, 0)

    @property
    def shortage_bytes(self) -> int:
        """How far the plan is from fitting; 0 when it does."""
        missing = max(-self.headroom_bytes, 0) + max(self.kv.least_bytes - self.kv.nbytes, 0)
        return missing + self.over_budget_bytes

    @property
    def fits(self) -> bool:
        """Memory suffices, and the KV cache holds at least one sequence of the longest length (engines demand it)."""
        return self.shortage_bytes == 0


class Held(NamedTuple):
    """What ranks of one stage hold for training."""

    policy: TrainingBytes
    critic: TrainingBytes | None
    working: WorkingBytes


def plan_memory(job: PlanJob) -> MemoryPlan:
    """Plans every kind of rank of `job`; costs the same for 2 ranks and for 2000, for 3 layers and for 61.

    Raises:
        ValueError: a layout that does not divide the model.
    """
    policy, all_stages = TrainingModel(job), stages(job.architecture, job.layout)
    critic = TrainingModel(job, critic=True) if job.has_critic else None
    of_stage = [
        Held(policy.stage_bytes(stage), critic.stage_bytes(stage) if critic else None, working_bytes(job, stage, index))
        for index, stage in enumerate(all_stages)
    ]
    alike: dict[tuple[Held, int], list[int]] = defaultdict(list)
    for rank in range(job.cluster.world_size):
        stage_index = job.layout.coordinates(rank, job.cluster.world_size).pp
        alike[of_stage[stage_index], engine_position(job, rank)].append(rank)
    engine_bytes = {position: engine_weight_bytes(job, position) for position in engine_positions(job)}
    kv = kv_cache(job, _kv_room(job, [(held, engine_bytes[position]) for held, position in alike]))
    classes = []
    for (held, position), ranks in alike.items():
        indices = sorted({job.layout.coordinates(rank, job.cluster.world_size).pp for rank in ranks})
        content = _content(all_stages[indices[0]])
        if len(engine_bytes) > 1:
            content += f", engine rank like {position}"
        phases = _phases(job, held, engine_bytes=engine_bytes[position], kv_bytes=kv.nbytes)
        classes.append(RankClass(content=content, stages=tuple(indices), ranks=tuple(ranks), phases=phases))
    classes.sort(key=lambda rank_class: (-rank_class.peak_bytes, -sum(p.peak_bytes for p in rank_class.phases)))
    return MemoryPlan(classes=tuple(classes), usable_bytes=job.cluster.usable_bytes, kv=kv, budget=job.budget)


def _kv_room(job: PlanJob, ranks: Sequence[tuple[Held, int]]) -> int | None:
    """What a KV cache that is sized anew can have on the rank that has least; None where it keeps its size."""
    if job.budget is None or job.limit_bytes is None or not job.on_cpu:
        return None
    held = 0
    for training, engine_bytes in ranks:
        (_, generate, *_) = _phases(job, training, engine_bytes=engine_bytes, kv_bytes=0)
        held = max(held, sum(generate.residents.values()))
    return job.budget.free_bytes(DeviceKind.CPU, held_bytes=held)


def _phases(job: PlanJob, held: Held, *, engine_bytes: int, kv_bytes: int) -> tuple[PhasePlan, ...]:
    """VACANT, and the second of two rounds through the other phases: the first one starts with a new engine."""
    machine = PhaseMachine(Ledger())
    machine.offload_policy = job.offload
    for resident in (
        *training_residents(job, held.policy, held.critic),
        *engine_residents(job, engine_bytes=engine_bytes, kv_bytes=kv_bytes, policy_bytes=held.policy.weights),
    ):
        machine.register(resident)
    staging = machine.residents[STAGING]

    def convert() -> None:
        staging.onload()
        machine.ledger.observe(machine.residents)
        staging.offload()

    machine.set_conversion(convert)
    order = _order(job)
    for phase in (Phase.VACANT, *order, *order):
        machine.enter(phase)
        machine.join()
    vacant, *entries = machine.ledger.drain()
    return tuple(_phase(job, entry, held, engine_bytes) for entry in (vacant, *entries[len(order) :]))


def _order(job: PlanJob) -> list[Phase]:
    """The phases of a rollout step."""
    used = {
        Phase.GENERATE: True,
        Phase.REFERENCE: job.needs_reference,
        Phase.LOGPROB: job.scores_policy,
        Phase.CRITIC: job.has_critic,
        Phase.TRAIN: True,
    }
    return [phase for phase, is_used in used.items() if is_used]


def _phase(job: PlanJob, entry: PhaseEntry, held: Held, engine_bytes: int) -> PhasePlan:
    phase = Phase(entry.phase)
    residents = {name: nbytes for name, nbytes in entry.device_bytes.items() if nbytes}
    stepping = {Phase.TRAIN: held.policy, Phase.CRITIC: held.critic}.get(phase)
    step = sum(residents.values()) + optimizer_step_bytes(stepping) if stepping is not None else 0
    returned = {move.resident for move in entry.moves if move.direction == "onload"}
    models = {POLICY: held.policy, CRITIC: held.critic}
    gathered = [model for name, model in models.items() if model and name in returned and job.offload.rebuild_weights]
    return PhasePlan(
        phase=phase,
        residents=residents,
        working={name: nbytes for name, nbytes in _working(job, phase, held.working, engine_bytes).items() if nbytes},
        transition_peak_bytes=entry.transition_peak_bytes,
        step_peak_bytes=step,
        moved_bytes=entry.moved_bytes,
        background_bytes=entry.background_bytes,
        gathered_bytes=sum(model.weights - DTYPE_BYTES[job.train_dtype] * model.owned for model in gathered),
        host_bytes=sum(entry.host_bytes.values()),
    )


def _working(job: PlanJob, phase: Phase, working: WorkingBytes, engine_bytes: int) -> dict[str, int]:
    """What computing takes on top of residents; in VACANT the engine that is being built, which is none yet."""
    reserve = job.budget.reserve_bytes if job.budget is not None and not job.on_cpu else 0
    engine_work = {ENGINE_WORK: max(engine_working_bytes(job), reserve)}
    if phase is Phase.VACANT:
        return engine_work | {ENGINE: engine_bytes, KV_CACHE: job.engine.kv_cache_memory_bytes}
    if phase is Phase.GENERATE:
        return engine_work
    if phase is Phase.CRITIC:
        return {ACTIVATIONS: working.train_activations}
    if phase is Phase.TRAIN:
        return {ACTIVATIONS: working.train_activations, LOGITS: working.train_logits}
    return {ACTIVATIONS: working.score_activations, LOGITS: working.score_logits}


def _content(stage: Stage) -> str:
    """What a pipeline stage is made of, in words."""
    parts = ["embedding"] if any(chunk.has_embedding for chunk in stage) else []
    for kind, count in (("dense", sum(c.dense_layers for c in stage)), ("MoE", sum(c.moe_layers for c in stage))):
        parts += [f"{count} {kind} layer{'s' * (count > 1)}"] if count else []
    return ", ".join(parts + (["head"] if any(chunk.has_head for chunk in stage) else []))


def stage_span(indices: Sequence[int]) -> str:
    """`stage 3`, `stages 1-14` or `stages 1, 3`."""
    if len(indices) == 1:
        return f"stage {indices[0]}"
    in_a_row = list(indices) == list(range(indices[0], indices[-1] + 1))
    return f"stages {indices[0]}-{indices[-1]}" if in_a_row else f"stages {', '.join(map(str, indices))}"
