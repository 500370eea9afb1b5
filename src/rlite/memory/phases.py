"""The phase machine: what may live on the device now, and the one safe order in which it changes.

```
IDLE ──> VACANT ──> GENERATE ──> REFERENCE ──> LOGPROB ──> CRITIC ──> TRAIN ──> GENERATE ...
```
Entering a phase moves exactly the difference between what is on the device and what the phase may hold. Entering GENERATE:
free gradients, optimizer to the host, wake engine weights, convert the policy's weights into them, policy off, wake the
KV cache. Weights come before the KV cache always, or both would have to fit beside the training weights.

The state of an optimizer is read first by its step. So TRAIN and CRITIC begin while it is still on its way, into memory that
it has from the beginning of the phase; `join` waits for it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rlite.memory.budget import DeviceBudget
from rlite.memory.ledger import Ledger, Move
from rlite.memory.residents import BackgroundResident, Resident


class Phase(StrEnum):
    """A state of the machine."""

    IDLE = "idle"
    """Training state on the device, no gradients, engine asleep: start-up and checkpoints."""
    VACANT = "vacant"
    """Nothing that may leave is on the device: an engine that is being built takes what it likes."""
    GENERATE = "generate"
    REFERENCE = "reference"
    """Reference weights in the place of the policy's."""
    LOGPROB = "logprob"
    CRITIC = "critic"
    """Values and updates of PPO's critic, without the policy."""
    TRAIN = "train"


class PhaseError(RuntimeError):
    """An illegal move, or a transition that failed half way."""


POLICY, GRADIENTS, OPTIMIZER, REFERENCE = "policy_weights", "gradients", "optimizer_state", "reference_weights"
ENGINE, KV_CACHE = "engine_weights", "kv_cache"
CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER = "critic_weights", "critic_gradients", "critic_optimizer_state"

HOLDS: dict[Phase, frozenset[str]] = {
    Phase.IDLE: frozenset({POLICY, OPTIMIZER}),
    Phase.VACANT: frozenset(),
    Phase.GENERATE: frozenset({ENGINE, KV_CACHE}),
    Phase.REFERENCE: frozenset({REFERENCE}),
    Phase.LOGPROB: frozenset({POLICY}),
    Phase.CRITIC: frozenset({CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER}),
    Phase.TRAIN: frozenset({POLICY, GRADIENTS, OPTIMIZER}),
}
"""What each phase may hold when everything may be offloaded."""

NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.VACANT, Phase.GENERATE, Phase.REFERENCE, Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN}),
    Phase.VACANT: frozenset({Phase.IDLE, Phase.GENERATE}),
    Phase.GENERATE: frozenset({Phase.IDLE, Phase.REFERENCE, Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN}),
    Phase.REFERENCE: frozenset({Phase.IDLE, Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN}),
    Phase.LOGPROB: frozenset({Phase.IDLE, Phase.GENERATE, Phase.REFERENCE, Phase.CRITIC, Phase.TRAIN}),
    Phase.CRITIC: frozenset({Phase.IDLE, Phase.TRAIN}),
    Phase.TRAIN: frozenset({Phase.IDLE, Phase.GENERATE, Phase.CRITIC}),
}
"""Legal moves."""

LATE: dict[Phase, str] = {Phase.TRAIN: OPTIMIZER, Phase.CRITIC: CRITIC_OPTIMIZER}
"""What a phase needs only after its first backward pass."""

_CRITIC = (CRITIC_GRADIENTS, CRITIC_OPTIMIZER, CRITIC)
_LEAVE_ORDER = (KV_CACHE, ENGINE, GRADIENTS, *_CRITIC, OPTIMIZER, REFERENCE, POLICY)
_ENTER_ORDER = (ENGINE, REFERENCE, POLICY, OPTIMIZER, GRADIENTS, *reversed(_CRITIC), KV_CACHE)


MOVABLE: dict[str, frozenset[str]] = {
    "full": frozenset({POLICY, GRADIENTS, OPTIMIZER, CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER, ENGINE, KV_CACHE}),
    "budget": frozenset({ENGINE, KV_CACHE}),  # and of the training state as much as the budget asks for
    "optimizer_only": frozenset({GRADIENTS, OPTIMIZER, CRITIC_GRADIENTS, CRITIC_OPTIMIZER}),
    "none": frozenset(),
}
"""Residents that may leave the device under each policy."""

_CHEAPEST_TO_MOVE = (GRADIENTS, *_CRITIC, OPTIMIZER, POLICY)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """Which residents leave the device when a phase does not need them. Raises ValueError for a name that is not known."""

    name: str = "none"
    """A key of `MOVABLE`."""
    budget_bytes: int = 0
    """Under `budget`: training state that may stay on the device in every phase; what is cheapest to move goes first."""
    overlap: bool = True
    """`LATE` residents return in the background."""
    rebuild_weights: bool = False
    """bf16 weights have no copy on the host: fp32 main weights, a part of the optimizer state, make them anew."""

    def __post_init__(self) -> None:
        if self.name not in MOVABLE:
            raise ValueError(f"MemoryOffload.policy = {self.name!r}: use one of {', '.join(MOVABLE)}")
        if (self.name == "budget") != (self.budget_bytes > 0):
            raise ValueError(
                f"MemoryOffload.policy = {self.name!r} with a budget of {self.budget_bytes} bytes: set budget_gib > 0 with "
                "policy 'budget', and only there"
            )

    def movable(self, residents: Mapping[str, Resident]) -> frozenset[str]:
        """Names of the residents that leave. Depends on their sizes, never on where they are now."""
        names = MOVABLE[self.name]
        if self.name != "budget":
            return names
        staying = {name: residents[name].full_bytes() for name in _CHEAPEST_TO_MOVE if name in residents}
        while staying and sum(staying.values()) > self.budget_bytes:
            name = next(iter(staying))
            del staying[name]
            names |= {name}
        return names


class PhaseMachine:
    """Owns the phase and the residents. One on each rank; all ranks move together.

    Args:
        ledger: books seconds, moved bytes and device bytes of every transition.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.phase = Phase.IDLE
        self.ledger = ledger
        self.residents: dict[str, Resident] = {}
        self.offload_policy = OffloadPolicy()
        """Set by `MemoryOffload`; what it does not move stays where it is."""
        self.budget: DeviceBudget | None = None
        """Set by `MemoryOffload`: from it the KV cache is sized anew in every rollout."""
        self.has_unstepped_gradients: Callable[[], bool] = lambda: False
        """True while gradients are accumulated and not yet stepped."""
        self._convert: Callable[[], None] | None = None
        self._fault: str | None = None
        self._arriving: list[str] = []
        self._transition = ""
        """The last one, for messages."""

    @property
    def movable(self) -> frozenset[str]:
        """Residents that leave the device in phases that do not hold them."""
        return self.offload_policy.movable(self.residents)

    @property
    def has_failed(self) -> bool:
        """True after a transition that failed half way, until one succeeds."""
        return self._fault is not None

    def held_bytes(self) -> int:
        """What all residents hold on the device now."""
        return sum(resident.device_bytes() for resident in self.residents.values())

    def register(self, resident: Resident) -> None:
        self.residents[resident.name] = resident

    def set_conversion(self, convert: Callable[[], None]) -> None:
        """`convert()` writes the policy's weights into the engine's; called with both on the device."""
        self._convert = convert

    def require(self, *phases: Phase, action: str) -> None:
        """Raises PhaseError unless the machine is in one of `phases`."""
        if self._fault or self.phase not in phases:
            allowed = " or ".join(phases)
            raise PhaseError(f"{action} needs phase {allowed}, but the machine is in {self.describe()}")

    def enter(self, phase: Phase) -> None:
        """Moves to `phase`.

        A transition that failed may be tried again (the same target, or IDLE to shut down): what already moved stays.

        Raises:
            PhaseError: the move is illegal, gradients were not stepped, the engine has no source of weights, or a
                resident could not move (the cause is chained; `describe()` tells what is where).
        """
        self._check(phase)
        self.join()
        self._transition = f"{self.phase} -> {phase}"
        self.ledger.begin(phase)
        try:
            if phase is Phase.GENERATE:
                self._enter_generate()
            else:
                self._leave(phase)
                self._bring(phase, _ENTER_ORDER)
        except BaseException as error:
            self._fail(error)
            raise
        self._fault, self.phase = None, phase
        self.ledger.end(self.residents.values())

    def join(self) -> None:
        """Waits for residents that are still on their way: before the optimizer step, a save, and every other phase.

        Raises:
            PhaseError: one did not arrive; it is off the device, and the transition into the phase counts as failed.
        """
        try:
            self._collect()
        except BaseException as error:
            self._fail(error)
            raise

    def _collect(self) -> None:
        while self._arriving:
            name = self._arriving[0]
            resident, started_s = self.residents[name], time.perf_counter()
            assert isinstance(resident, BackgroundResident)
            try:
                arrival = resident.finish_onload()
            finally:
                self._arriving.remove(name)
            if arrival is None:
                continue
            move = Move(
                resident=name,
                direction="onload",
                copied_bytes=arrival.copied_bytes,
                started_s=arrival.started_s,
                seconds=arrival.seconds,
                held_bytes=self.held_bytes(),
                in_background=True,
            )
            self.ledger.arrived(move, waited_s=time.perf_counter() - started_s)

    def _fail(self, error: BaseException) -> None:
        """Notes the fault, when nothing moves any more; raises PhaseError unless `error` is an interrupt."""
        self._fault = self._transition
        try:
            self._collect()
        except Exception as another:
            error.add_note(f"then, in the background: {type(another).__name__}: {another}")
        if isinstance(error, Exception):
            raise PhaseError(
                f"transition {self._fault} failed: {type(error).__name__}: {error}\n{self.table()}"
            ) from error

    def _check(self, phase: Phase) -> None:
        if self._fault is None and phase not in NEXT[self.phase]:
            legal = ", ".join(sorted(NEXT[self.phase]))
            raise PhaseError(f"illegal phase transition {self.phase} -> {phase}; from {self.phase} only: {legal}")
        if phase is not Phase.TRAIN and self.has_unstepped_gradients():
            raise PhaseError(
                f"illegal phase transition {self.phase} -> {phase}: gradients are accumulated but not stepped; "
                "finish the optimizer step or zero the gradients first"
            )
        if phase is Phase.GENERATE and (ENGINE not in self.residents or self._convert is None):
            missing = (
                "the engine (VLLMRollout)"
                if ENGINE not in self.residents
                else "the weight conversion (EP2TPConversion)"
            )
            raise PhaseError(
                f"illegal phase transition {self.phase} -> {phase}: {missing} is missing; add it to trainer.callbacks"
            )

    def _enter_generate(self) -> None:
        holds = HOLDS[Phase.GENERATE]
        for name in (GRADIENTS, *_CRITIC, OPTIMIZER, REFERENCE):
            self._offload(name, holds)
        self._onload(ENGINE)
        if POLICY in self.residents:
            self._onload(POLICY)
        assert self._convert is not None
        started = time.perf_counter()
        self._convert()
        self.ledger.note_sync(time.perf_counter() - started)
        self._offload(POLICY, holds)
        self._onload(KV_CACHE)

    def _leave(self, phase: Phase) -> None:
        for name in _LEAVE_ORDER:
            self._offload(name, HOLDS[phase])

    def _bring(self, phase: Phase, order: tuple[str, ...]) -> None:
        for name in order:
            if name in HOLDS[phase]:
                resident = self.residents.get(name)
                if self.offload_policy.overlap and LATE.get(phase) == name and isinstance(resident, BackgroundResident):
                    self._start(resident)
                else:
                    self._onload(name)

    def _offload(self, name: str, holds: frozenset[str]) -> None:
        must_leave = name in self.movable or name == REFERENCE  # reference weights share the policy's storages
        if name == POLICY and REFERENCE in holds:
            must_leave = True
        if name in self.residents and name not in holds and must_leave:
            self._move(name, "offload")

    def _onload(self, name: str) -> None:
        if name in self.residents:
            self._move(name, "onload")

    def _start(self, resident: BackgroundResident) -> None:
        if not resident.on_device:
            resident.start_onload()
            self._arriving.append(resident.name)
            self.ledger.observe(self.residents)

    def _move(self, name: str, direction: Literal["onload", "offload"]) -> None:
        resident, started_s = self.residents[name], time.perf_counter()
        was_on_device = resident.on_device
        copied = resident.onload() if direction == "onload" else resident.offload()
        if resident.on_device != was_on_device:
            seconds = time.perf_counter() - started_s
            held = self.held_bytes()
            self.ledger.moved(
                Move(
                    resident=name,
                    direction=direction,
                    copied_bytes=copied,
                    started_s=started_s,
                    seconds=seconds,
                    held_bytes=held,
                )
            )

    def describe(self) -> str:
        """The phase in a few words, with the transition that failed if one did."""
        return f"{self.phase} (transition {self._fault} failed half way)" if self._fault else str(self.phase)

    def table(self) -> str:
        """Residents with what they hold on device and host, one a line."""
        lines = [f"{'resident':<18}{'on device':>10}{'device MiB':>12}{'host MiB':>12}"]
        for resident in self.residents.values():
            lines.append(
                f"{resident.name:<18}{'yes' if resident.on_device else 'no':>10}"
                f"{resident.device_bytes() / 2**20:>12.1f}{resident.host_bytes() / 2**20:>12.1f}"
            )
        return "\n".join(lines)
