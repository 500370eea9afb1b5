"""Every move of every transition fails once: the machine tells the truth, loses nothing, and finds its way home."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.memory import CallableResident, DerivedBuffers, FlatBuffers, Ledger, OffloadPolicy, Phase, PhaseError, copies
from rlite.memory import PhaseMachine as Machine
from rlite.memory.phases import (
    CRITIC,
    CRITIC_OPTIMIZER,
    ENGINE,
    GRADIENTS,
    HOLDS,
    KV_CACHE,
    OPTIMIZER,
    POLICY,
    REFERENCE,
)
from rlite.rollout.storages import StorageSleeper, storage_bytes

CYCLE = (Phase.GENERATE, Phase.REFERENCE, Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN)


class Run:
    """A machine with real storages, weights that are the cast of main weights, and an engine of two tensors."""

    def __init__(self, *, rebuild: bool) -> None:
        self.main, self.weights = torch.arange(6.0), torch.arange(6.0).bfloat16()
        self.moments, self.critic, self.critic_state = torch.arange(9.0), torch.ones(3), torch.arange(4.0)
        self.engine, self.kv = [torch.ones(5), torch.ones(7)], [torch.ones(8)]
        self.kept = {name: t.clone() for name, t in vars(self).items() if isinstance(t, Tensor)}
        self.machine = Machine(Ledger())
        self.machine.offload_policy = OffloadPolicy(name="full", rebuild_weights=rebuild)
        state = FlatBuffers(OPTIMIZER, [self.main, self.moments])

        def cast() -> int:
            self.weights.copy_(state.content_of(self.main))
            return 0

        policy = (
            DerivedBuffers(POLICY, [self.weights], rebuild=cast) if rebuild else FlatBuffers(POLICY, [self.weights])
        )
        self.buffers: dict[str, list[Tensor]] = {
            POLICY: [self.weights], OPTIMIZER: [self.main, self.moments], CRITIC: [self.critic],
            CRITIC_OPTIMIZER: [self.critic_state], ENGINE: self.engine, KV_CACHE: self.kv,
        }  # fmt: skip
        for resident in (
            *(
                policy,
                state,
                FlatBuffers(GRADIENTS, [torch.ones(6)], contents="scratch"),
                policy.frozen_copy(REFERENCE),
            ),
            *(FlatBuffers(CRITIC, [self.critic]), FlatBuffers(CRITIC_OPTIMIZER, [self.critic_state])),
            *(_sleeping(ENGINE, self.engine), _sleeping(KV_CACHE, self.kv)),
        ):
            self.machine.register(resident)
        self.machine.set_conversion(lambda: None)

    def check(self) -> None:
        """The books against the storages, and what must survive."""
        residents = self.machine.residents
        for name, tensors in self.buffers.items():
            shared = name == POLICY and residents[REFERENCE].on_device
            assert (storage_bytes(tensors) > 0) == (residents[name].on_device or shared), name
            assert residents[name].device_bytes() in (0, storage_bytes(tensors)), name
        self.machine.enter(Phase.IDLE)
        assert {n for n, r in residents.items() if r.on_device} == HOLDS[Phase.IDLE]
        self.machine.enter(Phase.CRITIC)
        self.machine.join()
        assert torch.equal(self.critic, self.kept["critic"]) and torch.equal(
            self.critic_state, self.kept["critic_state"]
        )
        self.machine.enter(Phase.TRAIN)
        self.machine.join()
        for name in ("main", "weights", "moments"):
            assert torch.equal(getattr(self, name), self.kept[name]), name


def _sleeping(name: str, tensors: list[Tensor]) -> CallableResident:
    sleeper = StorageSleeper()
    sleeper.free(tensors)
    return CallableResident(
        name,
        onload=sleeper.restore,
        offload=lambda: sleeper.free(tensors),
        device_bytes=lambda: storage_bytes(tensors),
        on_device=lambda: storage_bytes(tensors) > 0,
    )


class Countdown:
    """Raises at the n-th of all calls that it wraps."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("injected")
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("rebuild", [False, True])
def test_whatever_fails_the_books_are_right_and_nothing_is_lost(rebuild: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations, copies in both directions, casts, the engine: a run for every call of two rollout steps."""
    for calls in range(1, 200):
        run, countdown = Run(rebuild=rebuild), Countdown(calls)
        with monkeypatch.context() as patch:
            for name in ("_allocate", "_fill", "_copy_to_host", "_pairs_from_host"):
                patch.setattr(FlatBuffers, name, countdown.wrap(getattr(FlatBuffers, name)))
            patch.setattr(copies, "copy_all", countdown.wrap(copies.copy_all))
            patch.setattr(StorageSleeper, "restore", countdown.wrap(StorageSleeper.restore))
            try:
                for phase in (*CYCLE, *CYCLE):
                    run.machine.enter(phase)
                run.machine.join()
            except PhaseError as error:
                assert "injected" in str(error) and run.machine.has_failed
        run.check()
        if countdown.left > 0:
            break
    assert calls > 40 and countdown.left > 0, "every call had its turn"
