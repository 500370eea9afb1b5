"""`MemoryOffload`: which residents leave the device in the phases that do not need them, and who may have the room."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rlite import device
from rlite.memory import DeviceBudget, LeakCheck, OffloadPolicy
from rlite.strategies.colocated import ColocatedRLStrategy, colocated

GIB = 2**30


class MemoryOffload(Callback):
    """Frees the device of training state while generating, and of the engine while training.

    Every rollout the KV cache gets what is free then, less the reserve. Logs `perf/leak/{device,rss}_growth`: fractions by
    which device bytes and resident set exceed those of the fifth rollout, on the rank where they grew most.

    Args:
        policy: `full` moves everything that a phase does not need; `optimizer_only` moves gradients and optimizer state
            and leaves both sets of weights and the KV cache in place; `budget` moves the engine, and of the training state
            as much as `budget_gib` asks for; `none` moves nothing.
        budget_gib: with policy `budget`, training state that may stay on the device of a rank in every phase.
        device_budget_gib: what residents of a rank may hold together; None is all that the device has. A CPU has no memory
            of its own: without this setting its KV cache keeps the size of `engine.kv_cache_memory_bytes`.
        reserve_gib: kept free when the KV cache is sized.
        max_growth: the run stops when a growth exceeds this fraction; None only reports it.
        overlap: training begins while the optimizer state, which only the step reads, is still on its way back.
        rebuild_weights: weights in bf16 leave without a copy on the host and are made anew from the fp32 main weights there:
            2 bytes a weight less host memory, for an all-gather over data-parallel ranks whenever they return.

    Raises:
        ValueError: an unknown policy, or sizes that make no sense.
    """

    def __init__(
        self,
        *,
        policy: Literal["full", "optimizer_only", "budget", "none"] = "full",
        budget_gib: float = 0.0,
        device_budget_gib: float | None = None,
        reserve_gib: float = 1.0,
        max_growth: float | None = None,
        overlap: bool = True,
        rebuild_weights: bool = False,
    ) -> None:
        self.policy = OffloadPolicy(
            name=policy, budget_bytes=int(budget_gib * GIB), overlap=overlap, rebuild_weights=rebuild_weights
        )
        limit = None if device_budget_gib is None else int(device_budget_gib * GIB)
        if reserve_gib < 0 or (device_budget_gib is not None and device_budget_gib <= reserve_gib):
            raise ValueError(
                f"MemoryOffload.reserve_gib = {reserve_gib}: must not be negative, and less than device_budget_gib = "
                f"{device_budget_gib}"
            )
        if max_growth is not None and max_growth <= 0:
            raise ValueError(
                f"MemoryOffload.max_growth = {max_growth}: must be positive, or null to only report growth"
            )
        self.budget = DeviceBudget(limit_bytes=limit, reserve_bytes=int(reserve_gib * GIB))
        self.max_growth = max_growth
        self._leaks = LeakCheck()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        phases = colocated(trainer).phases
        phases.offload_policy, phases.budget = self.policy, self.budget

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        growth = self._growth(colocated(trainer))
        for name, fraction in growth.items():
            pl_module.log(f"perf/leak/{name}_growth", fraction, on_step=True, on_epoch=False, batch_size=1)
        worst = max(growth, key=growth.__getitem__)
        if self.max_growth is not None and growth[worst] > self.max_growth:
            raise RuntimeError(
                f"{worst} memory is {growth[worst]:.1%} above that of rollout {self._leaks.warmup}, more than "
                f"MemoryOffload.max_growth = {self.max_growth:.1%}: something is kept from rollout to rollout"
            )

    def _growth(self, strategy: ColocatedRLStrategy) -> dict[str, float]:
        """Largest over all ranks. Looked at in the phase that ends every rollout step."""
        kind = device.DeviceKind(strategy.root_device.type)
        held = device.allocated_bytes(kind) if kind.is_accelerator else strategy.phases.held_bytes()
        growth = self._leaks.growth({"device": float(held), "rss": float(device.resident_bytes())})
        if strategy.world_size > 1:
            values = torch.tensor(list(growth.values()), dtype=torch.float64)
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
            growth = dict(zip(growth, values.tolist(), strict=True))
        return growth
