"""The phase machine: what may live on the device now, and the one safe order in which it changes.

```
IDLE ──> GENERATE ──> REFERENCE ──> LOGPROB ──> CRITIC ──> TRAIN ──> GENERATE ...
```
Entering a phase moves exactly the difference between what is on the device and what the phase may hold. Entering GENERATE:
free gradients, optimizer to the host, wake engine weights, convert the policy's weights into them, policy off, wake the
KV cache. Weights come before the KV cache always, or both would have to fit beside the training weights.
"""

import time
from collections.abc import Callable
from enum import StrEnum

from rlite.memory.ledger import Ledger
from rlite.memory.residents import Resident


class Phase(StrEnum):
    """A state of the machine."""

    IDLE = "idle"
    """Training state on the device, no gradients, engine asleep: start-up and checkpoints."""
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
    Phase.GENERATE: frozenset({ENGINE, KV_CACHE}),
    Phase.REFERENCE: frozenset({REFERENCE}),
    Phase.LOGPROB: frozenset({POLICY}),
    Phase.CRITIC: frozenset({CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER}),
    Phase.TRAIN: frozenset({POLICY, GRADIENTS, OPTIMIZER}),
}
"""What each phase may hold when everything may be offloaded."""

NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.GENERATE, Phase.REFERENCE, Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN}),
    Phase.GENERATE: frozenset({Phase.IDLE, Phase.REFERENCE, Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN}),
    Phase.REFERENCE: frozenset({Phase.IDLE, Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN}),
    Phase.LOGPROB: frozenset({Phase.IDLE, Phase.GENERATE, Phase.REFERENCE, Phase.CRITIC, Phase.TRAIN}),
    Phase.CRITIC: frozenset({Phase.IDLE, Phase.TRAIN}),
    Phase.TRAIN: frozenset({Phase.IDLE, Phase.GENERATE, Phase.CRITIC}),
}
"""Legal moves."""

_CRITIC = (CRITIC_GRADIENTS, CRITIC_OPTIMIZER, CRITIC)
_LEAVE_ORDER = (KV_CACHE, ENGINE, GRADIENTS, *_CRITIC, OPTIMIZER, REFERENCE, POLICY)
_ENTER_ORDER = (ENGINE, REFERENCE, POLICY, OPTIMIZER, GRADIENTS, *reversed(_CRITIC), KV_CACHE)


class PhaseMachine:
    """Owns the phase and the residents. One on each rank; all ranks move together.

    Args:
        ledger: books seconds, moved bytes and device bytes of every transition.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.phase = Phase.IDLE
        self.ledger = ledger
        self.residents: dict[str, Resident] = {}
        self.movable: frozenset[str] = frozenset()
        """Residents that may leave the device; set by `MemoryOffload`. The others stay where they are."""
        self.has_unstepped_gradients: Callable[[], bool] = lambda: False
        """True while gradients are accumulated and not yet stepped."""
        self._convert: Callable[[], None] | None = None
        self._fault: str | None = None

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
        start = self.phase
        self.ledger.begin(phase)
        try:
            if phase is Phase.GENERATE:
                self._enter_generate()
            else:
                self._leave(phase)
                self._bring(phase, _ENTER_ORDER)
        except Exception as error:
            self._fault = f"{start} -> {phase}"
            raise PhaseError(
                f"transition {start} -> {phase} failed: {type(error).__name__}: {error}\n{self.table()}"
            ) from error
        self._fault, self.phase = None, phase
        self.ledger.end(self.residents.values())

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
                self._onload(name)

    def _offload(self, name: str, holds: frozenset[str]) -> None:
        must_leave = name in self.movable or name == REFERENCE  # reference weights share the policy's storages
        if name == POLICY and REFERENCE in holds:
            must_leave = True
        if name in self.residents and name not in holds and must_leave:
            self.ledger.moved(self.residents[name].offload())

    def _onload(self, name: str) -> None:
        if name in self.residents:
            self.ledger.moved(self.residents[name].onload())
            self.ledger.observe(self.residents)

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
