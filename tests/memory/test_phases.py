"""The phase machine: who is on the device when, in which order things move, and what is refused."""

import pytest
import torch

from rlite.memory import CallableResident, FlatBuffers, Ledger, OffloadPolicy, Phase, PhaseError, PhaseMachine
from rlite.memory.phases import ENGINE, GRADIENTS, HOLDS, KV_CACHE, OPTIMIZER, POLICY, REFERENCE

EVERYTHING = frozenset({POLICY, GRADIENTS, OPTIMIZER, ENGINE, KV_CACHE})
FULL, NOTHING = OffloadPolicy(name="full"), OffloadPolicy(name="none")


class FakeEngine:
    """Counts its own memory, and writes what happens to it into a diary."""

    def __init__(self, diary: list[str]) -> None:
        self.diary, self.weights, self.kv = diary, False, False
        self.fail_on_kv = False

    def wake_weights(self) -> None:
        self.diary.append("wake weights")
        self.weights = True

    def wake_kv(self) -> None:
        if self.fail_on_kv:
            raise MemoryError("no room for the KV cache")
        self.diary.append("wake kv")
        self.kv = True

    def sleep(self) -> None:
        self.diary.append("sleep")
        self.weights = self.kv = False


def machine(offload: OffloadPolicy = FULL, *, reference: bool = False) -> tuple[PhaseMachine, FakeEngine, list[str]]:
    diary: list[str] = []
    engine, phases = FakeEngine(diary), PhaseMachine(Ledger())
    policy = FlatBuffers(POLICY, [torch.ones(4)])
    phases.register(policy)
    phases.register(FlatBuffers(GRADIENTS, [torch.ones(4)], contents="scratch"))
    phases.register(FlatBuffers(OPTIMIZER, [torch.ones(8)]))
    if reference:
        phases.register(policy.frozen_copy(REFERENCE))
    for name, wake, awake, size in (
        (ENGINE, engine.wake_weights, lambda: engine.weights, 100),
        (KV_CACHE, engine.wake_kv, lambda: engine.kv, 1000),
    ):
        phases.register(
            CallableResident(
                name, onload=wake, offload=engine.sleep, device_bytes=lambda size=size: size, on_device=awake
            )
        )
    phases.set_conversion(lambda: diary.append("convert"))
    phases.offload_policy = offload
    return phases, engine, diary


def on_device(phases: PhaseMachine) -> set[str]:
    return {name for name, resident in phases.residents.items() if resident.on_device}


def test_each_phase_holds_what_the_table_says() -> None:
    phases, _, _ = machine(reference=True)
    for phase in (Phase.GENERATE, Phase.REFERENCE, Phase.LOGPROB, Phase.TRAIN, Phase.GENERATE, Phase.TRAIN, Phase.IDLE):
        phases.enter(phase)
        assert on_device(phases) == HOLDS[phase], phase


def test_nothing_of_training_is_on_the_device_while_generating() -> None:
    phases, _, _ = machine()
    phases.enter(Phase.GENERATE)
    held = phases.ledger.entries[-1].device_bytes
    assert {name: held[name] for name in (POLICY, GRADIENTS, OPTIMIZER)} == {POLICY: 0, GRADIENTS: 0, OPTIMIZER: 0}


def test_engine_weights_wake_before_the_conversion_and_the_kv_cache_after_it() -> None:
    phases, _, diary = machine()
    phases.enter(Phase.GENERATE)
    assert diary == ["wake weights", "convert", "wake kv"]


def test_the_kv_cache_and_the_policy_are_never_on_the_device_together() -> None:
    phases, engine, _ = machine()
    phases.residents[KV_CACHE]._onload = lambda: (
        pytest.fail("the policy is still on the device") if phases.residents[POLICY].on_device else engine.wake_kv()
    )
    phases.enter(Phase.GENERATE)
    assert phases.residents[KV_CACHE].on_device


def test_with_nothing_movable_everything_stays_and_weights_are_still_converted() -> None:
    phases, _, diary = machine(NOTHING)
    phases.enter(Phase.GENERATE)
    phases.enter(Phase.TRAIN)
    phases.enter(Phase.GENERATE)
    assert diary == ["wake weights", "convert", "wake kv", "convert"]
    assert on_device(phases) == EVERYTHING


def test_the_reference_takes_the_policys_place_even_when_nothing_else_moves() -> None:
    phases, _, _ = machine(NOTHING, reference=True)
    phases.enter(Phase.REFERENCE)
    assert phases.residents[REFERENCE].on_device and not phases.residents[POLICY].on_device
    phases.enter(Phase.LOGPROB)
    assert phases.residents[POLICY].on_device and not phases.residents[REFERENCE].on_device


@pytest.mark.parametrize(
    ("path", "illegal"),
    [
        ([], Phase.IDLE),
        ([Phase.GENERATE], Phase.GENERATE),
        ([Phase.TRAIN], Phase.LOGPROB),
        ([Phase.TRAIN], Phase.TRAIN),
        ([Phase.LOGPROB], Phase.LOGPROB),
        ([Phase.REFERENCE], Phase.GENERATE),
    ],
)
def test_an_illegal_transition_names_both_phases(path: list[Phase], illegal: Phase) -> None:
    phases, _, _ = machine(reference=True)
    for phase in path:
        phases.enter(phase)
    with pytest.raises(PhaseError, match=f"illegal phase transition {phases.phase} -> {illegal}"):
        phases.enter(illegal)


def test_gradients_that_were_not_stepped_block_every_way_out_of_training() -> None:
    phases, _, _ = machine()
    phases.enter(Phase.TRAIN)
    phases.has_unstepped_gradients = lambda: True
    with pytest.raises(PhaseError, match="train -> generate: gradients are accumulated but not stepped"):
        phases.enter(Phase.GENERATE)


@pytest.mark.parametrize(
    ("drop", "message"), [("engine", "the engine .* is missing"), ("conversion", "the weight conversion .* is missing")]
)
def test_generating_needs_an_engine_and_a_conversion(drop: str, message: str) -> None:
    phases, _, _ = machine()
    if drop == "engine":
        del phases.residents[ENGINE]
    else:
        phases._convert = None
    with pytest.raises(PhaseError, match=message):
        phases.enter(Phase.GENERATE)


def test_a_transition_that_fails_half_way_tells_the_truth_and_can_be_left() -> None:
    phases, engine, _ = machine()
    engine.fail_on_kv = True
    with pytest.raises(PhaseError, match="idle -> generate failed: MemoryError: no room for the KV cache") as error:
        phases.enter(Phase.GENERATE)
    assert "engine_weights" in str(error.value), "the table of residents is part of the message"
    assert on_device(phases) == {ENGINE}
    assert "failed half way" in phases.describe()
    with pytest.raises(PhaseError, match="failed half way"):
        phases.require(Phase.IDLE, action="saving")
    phases.enter(Phase.IDLE)
    assert (phases.describe(), on_device(phases)) == ("idle", HOLDS[Phase.IDLE])


def test_a_failed_transition_can_be_tried_again_and_moves_only_the_rest() -> None:
    phases, engine, diary = machine()
    engine.fail_on_kv = True
    with pytest.raises(PhaseError):
        phases.enter(Phase.GENERATE)
    engine.fail_on_kv = False
    diary.clear()
    phases.enter(Phase.GENERATE)
    assert "wake weights" not in diary
    assert on_device(phases) == HOLDS[Phase.GENERATE]


def test_an_action_in_the_wrong_phase_says_which_one_it_needs() -> None:
    phases, _, _ = machine()
    with pytest.raises(PhaseError, match="an optimizer step needs phase train, but the machine is in idle"):
        phases.require(Phase.TRAIN, action="an optimizer step")


def test_a_vacant_device_holds_nothing_that_may_leave_and_leads_to_generation() -> None:
    phases, _, _ = machine()
    registered = {name: phases.residents.pop(name) for name in (ENGINE, KV_CACHE)}
    phases.enter(Phase.VACANT)
    assert phases.held_bytes() == 0, "an engine is built now"
    phases.residents |= registered
    phases.enter(Phase.GENERATE)
    assert on_device(phases) == HOLDS[Phase.GENERATE]


def test_a_vacant_device_keeps_what_may_not_leave() -> None:
    phases, _, _ = machine(NOTHING)
    phases.enter(Phase.VACANT)
    assert on_device(phases) == {POLICY, GRADIENTS, OPTIMIZER}


@pytest.mark.parametrize(
    ("budget_bytes", "stays"),
    [
        (64, {POLICY, GRADIENTS, OPTIMIZER}),
        (63, {POLICY, OPTIMIZER}),
        (48, {POLICY, OPTIMIZER}),
        (47, {POLICY}),
        (15, set()),
    ],
)
def test_a_budget_moves_gradients_then_optimizer_then_policy(budget_bytes: int, stays: set[str]) -> None:
    phases, _, _ = machine(OffloadPolicy(name="budget", budget_bytes=budget_bytes))
    for _ in range(2):  # the choice depends on sizes, not on where things are
        phases.enter(Phase.GENERATE)
        assert on_device(phases) == stays | {ENGINE, KV_CACHE}
        phases.enter(Phase.TRAIN)


@pytest.mark.parametrize("settings", [{"name": "some"}, {"name": "budget"}, {"name": "full", "budget_bytes": 1}])
def test_an_offload_policy_that_makes_no_sense_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"MemoryOffload\.policy = "):
        OffloadPolicy(**settings)


def test_the_ledger_books_moved_bytes_and_the_peak_of_a_transition() -> None:
    phases, _, _ = machine()
    phases.enter(Phase.GENERATE)
    entry = phases.ledger.drain()[0]
    assert entry.moved_bytes == 16 + 32, "policy and optimizer state to the host; gradients are dropped"
    assert entry.device_bytes[ENGINE] + entry.device_bytes[KV_CACHE] == 1100 == entry.total_device_bytes
    assert entry.transition_peak_bytes == 1100
    assert phases.ledger.entries == []


def test_every_move_is_booked_in_order_with_what_was_held_after_it() -> None:
    phases, _, _ = machine()
    phases.enter(Phase.GENERATE)
    moves = phases.ledger.drain()[0].moves
    assert [(m.resident, m.direction, m.copied_bytes, m.held_bytes) for m in moves] == [
        (GRADIENTS, "offload", 0, 48),
        (OPTIMIZER, "offload", 32, 16),
        (ENGINE, "onload", 0, 116),
        (POLICY, "offload", 16, 100),
        (KV_CACHE, "onload", 0, 1100),
    ]
