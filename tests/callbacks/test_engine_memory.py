"""The KV cache gets what is free; when that is too little, the error says which two settings would help."""

import re

import pytest
import torch

from rlite.callbacks.engine_memory import EngineMemory
from rlite.device import DeviceKind
from rlite.memory import DeviceBudget, FlatBuffers, Ledger, OffloadPolicy, Phase, PhaseError, PhaseMachine
from rlite.memory.phases import ENGINE, KV_CACHE, OPTIMIZER, POLICY
from rlite.rollout.engine import EngineStateError

MIB = 2**20
TOKEN = 1024
"""Bytes of the KV cache for one token."""


class FakeEngine:
    """10 MiB of weights; a KV cache of whole tokens."""

    def __init__(self, *, planned_bytes: int = 4 * MIB, dead: bool = False) -> None:
        self.weights_awake, self.kv_bytes, self.dead = True, planned_bytes, dead
        self.planned_bytes = planned_bytes
        self.can_shrink = True

    @property
    def weight_bytes(self) -> int:
        return 10 * MIB if self.weights_awake else 0

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv_bytes

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // TOKEN

    def sleep(self) -> None:
        self.weights_awake, self.kv_bytes = False, 0

    def wake_weights(self) -> None:
        self.weights_awake = True

    def wake_kv_cache(self, budget_bytes: int | None = None) -> None:
        if self.dead:
            raise EngineStateError("the engine is gone")
        if not self.can_shrink and budget_bytes is not None and budget_bytes < self.planned_bytes:
            raise ValueError("cannot shrink")
        self.kv_bytes = self.planned_bytes if budget_bytes is None else budget_bytes // TOKEN * TOKEN


def colocated(
    engine: FakeEngine,
    *,
    policy: str = "full",
    limit_mib: float | None = 16,
    reserve_mib: float = 1,
    max_model_len: int = 1024,
) -> PhaseMachine:
    phases = PhaseMachine(Ledger())
    phases.register(FlatBuffers(POLICY, [torch.ones(MIB // 4)]))
    phases.register(FlatBuffers(OPTIMIZER, [torch.ones(2 * MIB // 4)]))
    phases.set_conversion(lambda: None)
    phases.offload_policy = OffloadPolicy(name=policy)
    limit = None if limit_mib is None else int(limit_mib * MIB)
    phases.budget = DeviceBudget(limit_bytes=limit, reserve_bytes=int(reserve_mib * MIB))
    EngineMemory(engine, phases, kind=DeviceKind.CPU, max_model_len=max_model_len)
    return phases


def test_an_engine_is_asleep_once_it_is_registered() -> None:
    phases = colocated(FakeEngine())
    assert not phases.residents[ENGINE].on_device and not phases.residents[KV_CACHE].on_device


@pytest.mark.parametrize(("policy", "expected_mib"), [("full", 16 - 10 - 1), ("none", 16 - 10 - 3 - 1)])
def test_the_kv_cache_gets_what_is_free_less_the_reserve(policy: str, expected_mib: int) -> None:
    engine = FakeEngine()
    colocated(engine, policy=policy).enter(Phase.GENERATE)
    assert engine.kv_bytes == expected_mib * MIB


def test_it_is_sized_anew_in_every_rollout() -> None:
    engine = FakeEngine()
    phases = colocated(engine)
    phases.enter(Phase.GENERATE)
    phases.enter(Phase.TRAIN)
    phases.budget = DeviceBudget(limit_bytes=13 * MIB)
    phases.enter(Phase.GENERATE)
    assert engine.kv_bytes == 3 * MIB


def test_without_a_limit_a_cpu_keeps_the_planned_size() -> None:
    engine = FakeEngine()
    colocated(engine, limit_mib=None).enter(Phase.GENERATE)
    assert engine.kv_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("settings", "room", "less"),
    [
        (  # 16 - 10 - 3 - 1 = 2 MiB are free, 3 are needed
            {"policy": "none", "max_model_len": 3072},
            "set MemoryOffload.policy to full, which frees 3.0 MiB",
            "lower engine.max_model_len to 2048",
        ),
        (  # 5 MiB are free
            {"max_model_len": 6 * 1024},
            "lower MemoryOffload.reserve_gib to 0",
            "lower engine.max_model_len to 5120",
        ),
        (
            {"max_model_len": 8 * 1024},
            "raise MemoryOffload.device_budget_gib to 0.0186",
            "lower engine.max_model_len to 5120",
        ),
    ],
)
def test_too_little_memory_names_two_settings_and_the_residents(settings: dict, room: str, less: str) -> None:
    phases = colocated(FakeEngine(), **settings)
    with pytest.raises(PhaseError, match="MemoryError: The KV cache can have") as error:
        phases.enter(Phase.GENERATE)
    message = str(error.value)
    assert f"Either {room}, or {less}" in message
    assert re.search(rf"{ENGINE} +yes +10\.0", message) and re.search(rf"{KV_CACHE} +no", message)
    phases.enter(Phase.IDLE)
    assert phases.describe() == "idle"


def test_a_budget_that_weights_alone_exceed_is_to_grow_by_all_that_is_missing() -> None:
    """10 MiB of weights, 1 MiB of reserve, 1 MiB of cache: 12 MiB."""
    with pytest.raises(PhaseError, match=r"device_budget_gib to 0\.0118, or raise engine\.tp"):
        colocated(FakeEngine(), limit_mib=8).enter(Phase.GENERATE)
    colocated(FakeEngine(), limit_mib=0.0118 * 1024).enter(Phase.GENERATE)


def test_both_suggestions_work() -> None:
    """`device_budget_gib` as printed, and `max_model_len` as printed."""
    colocated(FakeEngine(), limit_mib=0.0186 * 1024, max_model_len=8 * 1024).enter(Phase.GENERATE)
    colocated(FakeEngine(), max_model_len=5120).enter(Phase.GENERATE)


def test_an_engine_that_cannot_shrink_its_cache_is_to_be_planned_smaller() -> None:
    engine = FakeEngine(planned_bytes=8 * MIB)
    engine.can_shrink = False
    phases = colocated(engine)
    with pytest.raises(PhaseError, match=f"cannot shrink.*lower engine.kv_cache_memory_bytes to {5 * MIB}"):
        phases.enter(Phase.GENERATE)


def test_a_dead_engine_is_not_mistaken_for_too_little_memory() -> None:
    phases = colocated(FakeEngine(dead=True))
    with pytest.raises(PhaseError, match="EngineStateError: the engine is gone"):
        phases.enter(Phase.GENERATE)
