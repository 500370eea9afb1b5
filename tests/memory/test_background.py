"""Optimizer state that returns while the phase already computes: when it is waited for, and what happens when it fails."""

import threading
from concurrent.futures import Future

import pytest
import torch

from rlite.memory import FlatBuffers, Ledger, OffloadPolicy, Phase, PhaseError, PhaseMachine, PhaseMetrics
from rlite.memory.copies import Copier
from rlite.memory.phases import CRITIC, CRITIC_OPTIMIZER, GRADIENTS, OPTIMIZER, POLICY


class Gate:
    """Holds back copies in the background until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        original = Copier.start

        def start(copier: Copier, pairs: list) -> object:
            started = original(copier, [])
            assert isinstance(started._started, Future)
            started._started.result()
            gated = copier._worker.submit(self._copy, pairs)
            started._started, started._nbytes = gated, sum(source.nbytes for _, source in pairs)
            return started

        monkeypatch.setattr(Copier, "start", start)

    def _copy(self, pairs: list) -> float:
        assert self.opened.wait(60)
        for destination, source in pairs:
            destination.copy_(source)
        return 1.5


def trained(overlap: bool = True) -> tuple[PhaseMachine, torch.Tensor]:
    """A machine on the way of training, its optimizer state on the host, and that state."""
    phases, state = PhaseMachine(Ledger()), torch.arange(8.0)
    phases.register(FlatBuffers(POLICY, [torch.ones(4)]))
    phases.register(FlatBuffers(GRADIENTS, [torch.ones(4)], contents="scratch"))
    phases.register(FlatBuffers(OPTIMIZER, [state]))
    phases.offload_policy = OffloadPolicy(name="full", overlap=overlap)
    phases.enter(Phase.LOGPROB)
    assert state.untyped_storage().nbytes() == 0
    return phases, state


def test_training_begins_before_the_optimizer_state_is_there_and_the_step_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, (phases, state) = Gate(monkeypatch), trained()
    phases.enter(Phase.TRAIN)
    assert phases.phase is Phase.TRAIN, "entered while the copy was held back"
    assert phases.ledger.entries[-1].device_bytes == {POLICY: 16, GRADIENTS: 16, OPTIMIZER: 32}, "room from the start"
    gate.opened.set()
    phases.join()
    assert torch.equal(state, torch.arange(8.0))
    entry = phases.ledger.entries[-1]
    assert [m.resident for m in entry.moves if m.in_background] == [OPTIMIZER]
    assert (entry.moved_bytes, entry.background_bytes, entry.transition_peak_bytes) == (32, 32, 64)
    assert entry.waited_s + entry.hidden_s == pytest.approx(1.5)
    assert PhaseMetrics().of([entry])["perf/phase/train/hidden_s"] == entry.hidden_s > 0
    phases.join()
    assert len(entry.moves) == 2, "nothing arrives twice"


@pytest.mark.parametrize("leave", [Phase.IDLE, Phase.CRITIC])
def test_every_other_phase_waits_for_what_is_on_its_way(leave: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, (phases, state) = Gate(monkeypatch), trained()
    phases.enter(Phase.TRAIN)
    gate.opened.set()
    phases.enter(leave)
    phases.enter(Phase.TRAIN)
    phases.join()
    assert torch.equal(state, torch.arange(8.0))


def test_without_overlap_the_transition_waits() -> None:
    phases, state = trained(overlap=False)
    phases.enter(Phase.TRAIN)
    assert torch.equal(state, torch.arange(8.0))
    entry = phases.ledger.entries[-1]
    assert (entry.moved_bytes, entry.background_bytes, entry.waited_s, entry.hidden_s) == (32, 0, 0.0, 0.0)


def test_the_state_of_the_critics_optimizer_comes_in_the_background_too() -> None:
    phases, _ = trained()
    state = torch.ones(3)
    phases.register(FlatBuffers(CRITIC, [torch.ones(2)]))
    phases.register(FlatBuffers(CRITIC_OPTIMIZER, [state]))
    phases.enter(Phase.TRAIN)
    phases.enter(Phase.CRITIC)
    phases.join()
    assert [m.resident for m in phases.ledger.entries[-1].moves if m.in_background] == [CRITIC_OPTIMIZER]
    assert state.tolist() == [1.0, 1.0, 1.0]


def broken(phases: PhaseMachine) -> torch.Tensor:
    """Its copy will fail; returns the host block to put back."""
    arena = phases.residents[OPTIMIZER]._arena
    block, arena.blocks[0] = arena.blocks[0], torch.empty(5, dtype=torch.uint8)
    return block


def test_a_copy_that_fails_is_told_where_it_is_waited_for_and_can_be_made_up_for() -> None:
    phases, state = trained()
    block = broken(phases)
    phases.enter(Phase.TRAIN)
    with pytest.raises(
        PhaseError, match="transition logprob -> train failed: RuntimeError: The size of tensor"
    ) as error:
        phases.join()
    assert "resident" in str(error.value), "the table is part of the message"
    optimizer = phases.residents[OPTIMIZER]
    assert (optimizer.on_device, optimizer.device_bytes(), state.untyped_storage().nbytes()) == (False, 0, 0)
    assert phases.has_failed and "failed half way" in phases.describe()
    with pytest.raises(PhaseError, match="failed half way"):
        phases.require(Phase.TRAIN, action="an optimizer step")
    optimizer._arena.blocks[0] = block
    phases.enter(Phase.TRAIN)
    phases.join()
    assert torch.equal(state, torch.arange(8.0)) and not phases.has_failed


def test_a_transition_that_fails_later_leaves_nothing_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, state = trained()

    def no_memory() -> int:
        raise MemoryError("no room for gradients")

    monkeypatch.setattr(phases.residents[GRADIENTS], "_fill", no_memory)
    with pytest.raises(PhaseError, match="logprob -> train failed: MemoryError: no room for gradients"):
        phases.enter(Phase.TRAIN)
    assert torch.equal(state, torch.arange(8.0)), "it arrived"
    assert {n for n, r in phases.residents.items() if r.on_device} == {POLICY, OPTIMIZER}


def test_a_copy_that_fails_stops_the_next_transition() -> None:
    phases, _ = trained()
    broken(phases)
    phases.enter(Phase.TRAIN)
    with pytest.raises(PhaseError, match="transition logprob -> train failed"):
        phases.enter(Phase.IDLE)
    assert phases.phase is Phase.TRAIN and phases.has_failed


def test_both_faults_are_told_when_two_things_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, _ = trained()
    broken(phases)

    def no_memory() -> int:
        raise MemoryError("no room for gradients")

    monkeypatch.setattr(phases.residents[GRADIENTS], "_fill", no_memory)
    with pytest.raises(PhaseError, match="no room for gradients") as error:
        phases.enter(Phase.TRAIN)
    assert "then, in the background: RuntimeError" in error.value.__cause__.__notes__[0]
    assert {n for n, r in phases.residents.items() if r.on_device} == {POLICY}


def test_an_interrupt_half_way_is_a_fault_too(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, _ = trained()

    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(phases.residents[GRADIENTS], "_fill", interrupt)
    with pytest.raises(KeyboardInterrupt):
        phases.enter(Phase.TRAIN)
    assert phases.has_failed
    assert not phases.residents[GRADIENTS].on_device


def test_moving_a_resident_that_is_on_its_way_waits_for_it_first() -> None:
    state = torch.arange(4.0)
    buffers = FlatBuffers(OPTIMIZER, [state])
    buffers.offload()
    buffers.start_onload()
    assert buffers.offload() == 16
    buffers.start_onload()
    assert buffers.onload() == 0
    assert torch.equal(state, torch.arange(4.0))
    assert buffers.finish_onload() is None
