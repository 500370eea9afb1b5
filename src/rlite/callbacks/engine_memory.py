"""The engine's weights and KV cache as residents of the phase machine; the KV cache is sized anew whenever it wakes."""

import torch
import torch.distributed as dist

from rlite import device
from rlite.memory import CallableResident, PhaseMachine
from rlite.memory.phases import ENGINE, KV_CACHE, MOVABLE
from rlite.rollout.engine import EngineError, RolloutEngine

MIB = 2**20


class EngineMemory:
    """Registers a new engine, still awake, and puts it to sleep.

    Args:
        engine: as it was built.
        phases: the machine of this rank.
        kind: of the device.
        max_model_len: of the engine: longest sequence, which the KV cache must hold.
    """

    def __init__(
        self, engine: RolloutEngine, phases: PhaseMachine, *, kind: device.DeviceKind, max_model_len: int
    ) -> None:
        self.engine, self.phases, self.kind, self.max_model_len = engine, phases, kind, max_model_len
        self.planned_bytes = engine.kv_cache_bytes
        self.bytes_per_token = engine.kv_cache_bytes / engine.kv_tokens
        engine.sleep()
        phases.register(
            CallableResident(
                ENGINE,
                onload=engine.wake_weights,
                offload=engine.sleep,
                device_bytes=lambda: engine.weight_bytes,
                on_device=lambda: engine.weight_bytes > 0,
            )
        )
        phases.register(
            CallableResident(
                KV_CACHE,
                onload=self.wake_kv_cache,
                offload=engine.sleep,  # vLLM sleeps whole
                device_bytes=lambda: engine.kv_cache_bytes,
                on_device=lambda: engine.kv_cache_bytes > 0,
            )
        )

    def wake_kv_cache(self) -> None:
        """With what is free on the rank that has least of it. Collective.

        Raises:
            MemoryError: on every rank, when that does not hold one longest sequence, or the engine cannot take it.
        """
        budget_bytes = self._budget_bytes()
        if budget_bytes is not None and budget_bytes < self._least_bytes:
            raise MemoryError(self._advice(budget_bytes))
        try:
            self.engine.wake_kv_cache(budget_bytes)
        except EngineError:
            raise
        except (ValueError, RuntimeError, MemoryError) as error:
            raise MemoryError(f"{error}. {self._advice(budget_bytes)}") from error

    @property
    def _least_bytes(self) -> float:
        return self.max_model_len * self.bytes_per_token

    def _budget_bytes(self) -> int | None:
        """None keeps the size that the cache had."""
        if self.phases.budget is None:
            return None
        free = self.phases.budget.free_bytes(self.kind, held_bytes=self.phases.held_bytes())
        if free is None or not dist.is_initialized() or dist.get_world_size() == 1:
            return free
        least = torch.tensor(free, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def _advice(self, budget_bytes: int | None) -> str:
        """What is missing, and the two settings that would make it fit: one that gives room, one that needs less."""
        free = self.planned_bytes if budget_bytes is None else budget_bytes
        wanted = self._least_bytes if free < self._least_bytes else self.planned_bytes
        room = self._setting_that_gives(max(wanted - free, 0.0) + self._overdraft_bytes)
        if free >= self._least_bytes:
            less = f"lower engine.kv_cache_memory_bytes to {free if free < self.planned_bytes else self.planned_bytes // 2}"
        elif free >= self.bytes_per_token:
            less = f"lower engine.max_model_len to {int(free / self.bytes_per_token)}"
        else:
            less = "raise engine.tp, which cuts the engine's weights on each device"
        return (
            f"The KV cache can have {free / MIB:.1f} MiB; {self.max_model_len} tokens (engine.max_model_len), the longest "
            f"sequence, take {self._least_bytes / MIB:.1f} MiB. Either {room}, or {less}"
        )

    @property
    def _overdraft_bytes(self) -> int:
        """By how much residents and reserve exceed the limit already."""
        budget = self.phases.budget
        if budget is None or budget.limit_bytes is None:
            return 0
        return max(0, self.phases.held_bytes() + budget.reserve_bytes - budget.limit_bytes)

    def _setting_that_gives(self, missing_bytes: float) -> str:
        phases, budget = self.phases, self.phases.budget
        stays = MOVABLE["full"] - {ENGINE, KV_CACHE}
        movable = sum(r.device_bytes() for name, r in phases.residents.items() if name in stays)
        if movable and movable >= missing_bytes:
            return f"set MemoryOffload.policy to full, which frees {movable / MIB:.1f} MiB"
        if budget is not None and budget.reserve_bytes >= missing_bytes > 0:
            return f"lower MemoryOffload.reserve_gib to {(budget.reserve_bytes - missing_bytes) / 2**30:.4g}"
        if budget is not None and budget.limit_bytes is not None:
            return f"raise MemoryOffload.device_budget_gib to {(budget.limit_bytes + missing_bytes) / 2**30 + 5e-5:.4f}"
        return "raise engine.tp, which cuts the engine's weights on each device"
