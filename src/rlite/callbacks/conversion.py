"""`EP2TPConversion`: every rollout, the policy's training layout becomes the engine's layout by one planned exchange."""

import dataclasses

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rlite.reshard.plan import DEFAULT_STAGING_BUDGET_BYTES, plan_transfer
from rlite.reshard.routes import Topology
from rlite.reshard.transfer import Transfer, TransferStats
from rlite.strategies.colocated import ColocatedRLStrategy, colocated


class EP2TPConversion(Callback):
    """Writes the policy's weights into the engine's parameters when the phase machine enters GENERATE.

    Each rank receives exactly the bytes that it lacks; no rank ever holds a full expert set. The plan is made once, from
    the two layouts alone, before any weight moves.

    Args:
        staging_budget_bytes: most memory for packing slices; anything larger is split.
        node_size: ranks on one node, for choosing near sources; by default all ranks the launcher started on this node.
    """

    def __init__(
        self, *, staging_budget_bytes: int = DEFAULT_STAGING_BUDGET_BYTES, node_size: int | None = None
    ) -> None:
        if staging_budget_bytes < 1:
            raise ValueError(f"staging_budget_bytes = {staging_budget_bytes}: must be at least 1")
        self.staging_budget_bytes = staging_budget_bytes
        self.node_size = node_size
        self.stats: TransferStats | None = None
        """Of the last conversion."""
        self._transfer: Transfer | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = colocated(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        strategy.phases.set_conversion(lambda: self._convert(strategy, policy_version=progress.current.completed))

    def _convert(self, strategy: ColocatedRLStrategy, *, policy_version: int) -> None:
        """`policy_version`: rollout steps that the weights have learned from."""
        engine, policy = strategy.engine, strategy.policy
        assert engine is not None
        if self._transfer is None:
            plan = plan_transfer(
                policy.placement,
                strategy.engine_placement(policy.architecture),
                topology=Topology(node_size=self.node_size or strategy.num_processes),
                rank=strategy.global_rank,
                staging_budget_bytes=self.staging_budget_bytes,
            )
            self._transfer = Transfer(plan)
        self.stats = self._transfer.run(policy.local_tensors(), engine.weights())
        engine.finish_weight_update(policy_version)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Logs `perf/reshard/*` of the last conversion."""
        if self.stats is not None:
            for name, value in dataclasses.asdict(self.stats).items():
                pl_module.log(f"perf/reshard/{name}", float(value), on_step=True, on_epoch=False, batch_size=1)
