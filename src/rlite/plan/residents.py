"""Residents of the phase machine that only know their size."""

from rlite.memory.copies import Arrival
from rlite.memory.phases import (
    CRITIC,
    CRITIC_GRADIENTS,
    CRITIC_OPTIMIZER,
    ENGINE,
    GRADIENTS,
    KV_CACHE,
    OPTIMIZER,
    POLICY,
    REFERENCE,
)
from rlite.memory.residents import Contents
from rlite.plan.job import PlanJob
from rlite.plan.training import TrainingBytes

STAGING = "staging"
_NAMES = ((POLICY, OPTIMIZER, GRADIENTS), (CRITIC, CRITIC_OPTIMIZER, CRITIC_GRADIENTS))
"""Of a model's weights, optimizer state and gradients."""


class PlannedResident:
    """A number of bytes. `contents`: see `FlatBuffers`."""

    def __init__(self, name: str, nbytes: int, *, contents: Contents = "mutable", on_device: bool = False) -> None:
        self.name, self.nbytes, self.contents, self._on_device = name, nbytes, contents, on_device
        self._host_bytes = nbytes if contents == "constant" else 0
        self._arriving: Arrival | None = None

    @property
    def on_device(self) -> bool:
        return self._on_device

    def onload(self) -> int:
        moved = 0 if self._on_device else self._copied_in()
        self._on_device = True
        return moved

    def _copied_in(self) -> int:
        return self.nbytes if self.contents in ("mutable", "constant") else 0

    def start_onload(self) -> None:
        self._arriving = Arrival(copied_bytes=self.onload(), started_s=0.0, seconds=0.0)

    def finish_onload(self) -> Arrival | None:
        arrival, self._arriving = self._arriving, None
        return arrival

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


class PlannedWeights(PlannedResident):
    """Weights that are made of the fp32 main weights, `main_bytes` of the optimizer state."""

    def __init__(self, name: str, nbytes: int, *, optimizer: PlannedResident, main_bytes: int) -> None:
        super().__init__(name, nbytes, contents="derived", on_device=True)
        self._optimizer, self._main_bytes = optimizer, main_bytes

    def _copied_in(self) -> int:
        return 0 if self._optimizer.on_device else self._main_bytes


def training_residents(job: PlanJob, policy: TrainingBytes, critic: TrainingBytes | None) -> list[PlannedResident]:
    """As a run registers them: on the device."""
    residents: list[PlannedResident] = []
    for held, (weights, optimizer, gradients) in zip((policy, critic), _NAMES, strict=True):
        if held is None:
            continue
        state = PlannedResident(optimizer, held.optimizer, on_device=True)
        if job.offload.rebuild_weights:
            model = PlannedWeights(weights, held.weights, optimizer=state, main_bytes=4 * held.owned)
        else:
            model = PlannedResident(weights, held.weights, on_device=True)
        residents += [model, state, PlannedResident(gradients, held.gradients, contents="scratch", on_device=True)]
    if job.needs_reference:
        residents.append(PlannedResident(REFERENCE, policy.weights, contents="constant"))
    return residents


def engine_residents(job: PlanJob, *, engine_bytes: int, kv_bytes: int, policy_bytes: int) -> list[PlannedResident]:
    """Of an engine that sleeps, and the staging of the conversion."""
    staging = min(job.staging_budget_bytes, 2 * (policy_bytes + engine_bytes))
    sizes = {ENGINE: engine_bytes, KV_CACHE: kv_bytes, STAGING: staging}
    return [PlannedResident(name, nbytes, contents="scratch") for name, nbytes in sizes.items()]
