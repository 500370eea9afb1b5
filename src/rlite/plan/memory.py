"""`plan_memory`: what every phase holds on every kind of rank.

The plan does not repeat the rules of the phase machine: it runs the machine itself, with residents that only know their
size. So order, transition peaks and moved bytes are those of a run.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlite.memory.ledger import Ledger, PhaseEntry
from rlite.memory.phases import ENGINE, GRADIENTS, KV_CACHE, OPTIMIZER, POLICY, REFERENCE, Phase, PhaseMachine
from rlite.memory.residents import Contents
from rlite.plan.activations import WorkingBytes, working_bytes
from rlite.plan.generation import (
    KVCache,
    engine_position,
    engine_positions,
    engine_weight_bytes,
    engine_working_bytes,
    kv_cache,
)
from rlite.plan.job import PlanJob
from rlite.plan.training import Stage, TrainingBytes, TrainingModel, stages

STAGING = "staging"
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
    """In TRAIN: residents and what the optimizer step takes, when the activations are gone. Else 0."""
    moved_bytes: int
    """Copied between host and device on the way into the phase."""
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

    @property
    def peak_bytes(self) -> int:
        return self.classes[0].peak_bytes

    @property
    def headroom_bytes(self) -> int:
        """Negative: what is missing on the fullest rank."""
        return self.usable_bytes - self.peak_bytes

    @property
    def shortage_bytes(self) -> int:
        """How far the plan is from fitting; 0 when it does."""
        return max(-self.headroom_bytes, 0) + max(self.kv.least_bytes - self.kv.nbytes, 0)

    @property
    def fits(self) -> bool:
        """Memory suffices, and the KV cache holds at least one sequence of the longest length (engines demand it)."""
        return self.shortage_bytes == 0


class PlannedResident:
    """A resident of the phase machine that is only a number of bytes. `contents`: see `FlatBuffers`."""

    def __init__(self, name: str, nbytes: int, *, contents: Contents = "mutable", on_device: bool = False) -> None:
        self.name, self.nbytes, self.contents, self._on_device = name, nbytes, contents, on_device
        self._host_bytes = nbytes if contents == "constant" else 0

    @property
    def on_device(self) -> bool:
        return self._on_device

    def onload(self) -> int:
        moved = 0 if self._on_device or self.contents == "scratch" else self.nbytes
        self._on_device = True
        return moved

    def offload(self) -> int:
        moved = self.nbytes if self._on_device and self.contents == "mutable" else 0
        self._host_bytes = max(self._host_bytes, moved)
        self._on_device = False
        return moved

    def device_bytes(self) -> int:
        return self.nbytes if self._on_device else 0

    def full_bytes(self) -> int:
        return self.nbytes

    def host_bytes(self) -> int:
        return self._host_bytes


def plan_memory(job: PlanJob) -> MemoryPlan:
    """Plans every kind of rank of `job`; costs the same for 2 ranks and for 2000, for 3 layers and for 61.

    Raises:
        ValueError: a layout that does not divide the model.
    """
    model, all_stages = TrainingModel(job), stages(job.architecture, job.layout)
    of_stage = []
    for index, stage in enumerate(all_stages):
        held = model.stage_bytes(stage)
        of_stage.append((held, working_bytes(job, stage, index, largest_shard=held.largest_shard)))
    alike: dict[tuple[TrainingBytes, WorkingBytes, int], list[int]] = defaultdict(list)
    for rank in range(job.cluster.world_size):
        stage_index = job.layout.coordinates(rank, job.cluster.world_size).pp
        alike[*of_stage[stage_index], engine_position(job, rank)].append(rank)
    engine_bytes = {position: engine_weight_bytes(job, position) for position in engine_positions(job)}
    classes = []
    for (held, working, position), ranks in alike.items():
        phases = _phases(job, _residents(job, held, engine_bytes[position]), working)
        indices = sorted({job.layout.coordinates(rank, job.cluster.world_size).pp for rank in ranks})
        content = _content(all_stages[indices[0]])
        if len(engine_bytes) > 1:
            content += f", engine rank like {position}"
        classes.append(RankClass(content=content, stages=tuple(indices), ranks=tuple(ranks), phases=phases))
    classes.sort(key=lambda rank_class: (-rank_class.peak_bytes, -sum(p.peak_bytes for p in rank_class.phases)))
    return MemoryPlan(classes=tuple(classes), usable_bytes=job.cluster.usable_bytes, kv=kv_cache(job))


def _residents(job: PlanJob, held: TrainingBytes, engine_bytes: int) -> list[PlannedResident]:
    """As a run registers them: training state on the device, engine asleep."""
    residents = [
        PlannedResident(POLICY, held.policy, on_device=True),
        PlannedResident(GRADIENTS, held.gradients, contents="scratch", on_device=True),
        PlannedResident(OPTIMIZER, held.optimizer, on_device=True),
        PlannedResident(ENGINE, engine_bytes, contents="scratch"),
        PlannedResident(KV_CACHE, kv_cache(job).nbytes, contents="scratch"),
        PlannedResident(STAGING, min(job.staging_budget_bytes, 2 * (held.policy + engine_bytes)), contents="scratch"),
    ]
    if job.needs_reference:
        residents.append(PlannedResident(REFERENCE, held.policy, contents="constant"))
    return residents


def _phases(job: PlanJob, residents: list[PlannedResident], working: WorkingBytes) -> tuple[PhasePlan, ...]:
    """The second of two rounds through the phases: the first one starts from IDLE."""
    machine = PhaseMachine(Ledger())
    machine.offload_policy = job.offload
    for resident in residents:
        machine.register(resident)
    staging = machine.residents[STAGING]

    def convert() -> None:
        staging.onload()
        machine.ledger.observe(machine.residents)
        staging.offload()

    machine.set_conversion(convert)
    used = {
        Phase.GENERATE: True,
        Phase.REFERENCE: job.needs_reference,
        Phase.LOGPROB: job.scores_policy,
        Phase.TRAIN: True,
    }
    order = [phase for phase, is_used in used.items() if is_used]
    for phase in order * 2:
        machine.enter(phase)
    return tuple(_phase(job, entry, working) for entry in machine.ledger.drain()[len(order) :])


def _phase(job: PlanJob, entry: PhaseEntry, working: WorkingBytes) -> PhasePlan:
    phase = Phase(entry.phase)
    residents = {name: nbytes for name, nbytes in entry.device_bytes.items() if nbytes}
    if phase is Phase.GENERATE:
        work = {ENGINE_WORK: engine_working_bytes(job)}
    elif phase is Phase.TRAIN:
        work = {ACTIVATIONS: working.train_activations, LOGITS: working.train_logits}
    else:
        work = {ACTIVATIONS: working.score_activations, LOGITS: working.score_logits}
    return PhasePlan(
        phase=phase,
        residents=residents,
        working={name: nbytes for name, nbytes in work.items() if nbytes},
        transition_peak_bytes=entry.transition_peak_bytes,
        step_peak_bytes=sum(residents.values()) + working.optimizer_step if phase is Phase.TRAIN else 0,
        moved_bytes=entry.moved_bytes,
        host_bytes=sum(entry.host_bytes.values()),
    )


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
