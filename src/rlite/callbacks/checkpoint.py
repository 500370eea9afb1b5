"""`RolloutCheckpoint`: Lightning's ModelCheckpoint, counting rollout steps."""

from contextlib import nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from rlite.strategies.colocated import ColocatedRLStrategy, colocated


class RolloutCheckpoint(ModelCheckpoint):
    """Saves every `every_n_rollouts`, at the end of the run, and when preempted; `--ckpt_path last` finds it.

    Stock ModelCheckpoint counts optimizer steps under manual optimisation and so would save at odd times.

    Args:
        every_n_rollouts: 0 saves only at the end of the run.
        save_top_k: how many to keep; -1 keeps all. With `monitor`, the best ones.
        monitor: a logged metric, for example `reward/mean`. `last.ckpt` is the newest state also when it is none of the best.
        mode: `max` or `min` of `monitor`.
        asynchronous: training goes on while a thread writes what was copied to the host: each rank needs room there for its
            share of weights and optimizer state once more. `last.ckpt` and removals follow when the files of every rank are
            on the disk, looked at after each rollout step; the next save and the end of the run wait for it. A save that
            failed stops the run there.
    """

    def __init__(
        self,
        *,
        every_n_rollouts: int = 50,
        save_top_k: int = 1,
        monitor: str | None = None,
        mode: str = "max",
        dirpath: str | None = None,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename="rollout-{rollout_step:.0f}",
            auto_insert_metric_name=False,
            save_top_k=save_top_k,
            save_last="link",
            monitor=monitor or "rollout_step",
            mode=mode if monitor else "max",
            enable_version_counter=False,
        )
        self.every_n_rollouts = every_n_rollouts
        self.asynchronous = asynchronous

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.asynchronous:
            colocated(trainer).saver.finish(wait=False)
        done = batch_idx + 1
        if done == trainer.limit_train_batches or (self.every_n_rollouts and done % self.every_n_rollouts == 0):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Saves now, unless this step was saved already. Every rank calls it."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        with colocated(trainer).saver.background() if self.asynchronous else nullcontext():
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            if self._last_global_step_saved != trainer.global_step:
                # It is not among the best: `last.ckpt` is no link to one, but saved by itself.
                self._last_checkpoint_saved = ""
            self._save_last_checkpoint(trainer, candidates)

    @override
    def _link_checkpoint(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        if isinstance(trainer.strategy, ColocatedRLStrategy):
            trainer.strategy.saver.link(linkpath, filepath)
        else:
            super()._link_checkpoint(trainer, filepath, linkpath)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self.asynchronous:
            colocated(trainer).saver.finish()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.asynchronous:
            colocated(trainer).saver.finish_after_error()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass  # one epoch is the run

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass  # saved by rollouts only

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # A finished run says that its last batch was the last of the epoch; a larger limit_train_batches would train nothing.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
