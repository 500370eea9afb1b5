"""`EP2TPConversion`: every rollout, the policy's training layout becomes the engine's layout by one planned exchange."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rlite.reshard.plan import Topology, plan_transfer
from rlite.strategies.colocated import ColocatedRLStrategy, colocated

DEFAULT_STAGING_BYTES = 256 * 2**20


class EP2TPConversion(Callback):
    """Writes the policy's weights into the engine's parameters when the phase machine enters GENERATE.

    Each rank receives exactly the bytes that it lacks; no rank ever holds a full expert set. The plan is made once, from
    the two layouts alone, before any weight moves.

    Args:
        staging_budget_bytes: most memory for packing slices; anything larger is split.
        node_size: ranks on one node, for choosing near sources; by default all ranks the launcher started on this node.
    """

    def __init__(self, *, staging_budget_bytes: int = DEFAULT_STAGING_BYTES, node_size: int | None = None) -> None:
        if staging_budget_bytes < 1:
            raise ValueError(f"staging_budget_bytes = {staging_budget_bytes}: must be at least 1")
        self.staging_budget_bytes = staging_budget_bytes
        self.node_size = node_size
        self.stats: TransferStats | None = None
        """Of the last conversion."""
        self._transfer: Transfer | None = None
        self._policy_version = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = colocated(trainer)
        strategy.phases.set_conversion(lambda: self._convert(strategy))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._policy_version = batch_idx

    def _convert(self, strategy: ColocatedRLStrategy) -> None:
        engine, policy = strategy.engine, strategy.policy
        assert engine is not None
        if self._transfer is None:
            world = range(strategy.world_size)
            sources = [policy.layout_of(rank) for rank in world]
            destinations = [engine.layout_of(policy.architecture, strategy.world_size, rank) for rank in world]
            plan = plan_transfer(
                sources,
                destinations,
                topology=Topology(node_size=self.node_size or strategy.num_processes),
                rank=strategy.global_rank,
            )
            self._transfer = Transfer(plan, staging_budget_bytes=self.staging_budget_bytes)
        self.stats = self._transfer.run(policy.local_tensors(), engine.weights())
        engine.finish_weight_update(self._policy_version)

    def metrics(self) -> dict[str, float]:
        """`perf/reshard/*` of the last conversion."""
        if self.stats is None:
            return {}
        return {f"perf/reshard/{name}": float(value) for name, value in self.stats.as_dict().items()}
