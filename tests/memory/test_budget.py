"""What is free for the KV cache."""

import pytest

from rlite import device
from rlite.device import DeviceKind
from rlite.memory import DeviceBudget


def test_a_cpu_without_a_limit_plans_nothing() -> None:
    assert DeviceBudget(reserve_bytes=10).free_bytes(DeviceKind.CPU, held_bytes=5) is None


def test_a_limit_less_what_is_held_less_the_reserve_is_free() -> None:
    budget = DeviceBudget(limit_bytes=100, reserve_bytes=10)
    assert budget.free_bytes(DeviceKind.CPU, held_bytes=30) == 60
    assert budget.free_bytes(DeviceKind.CPU, held_bytes=95) == 0


@pytest.mark.parametrize(("limit_bytes", "free"), [(None, 40), (200, 40), (60, 20)])
def test_on_an_accelerator_the_drivers_free_memory_counts(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None, free: int
) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda kind: 50)
    monkeypatch.setattr(device, "empty_cache", lambda kind: None)
    budget = DeviceBudget(limit_bytes=limit_bytes, reserve_bytes=10)
    assert budget.free_bytes(DeviceKind.CUDA, held_bytes=30) == free
