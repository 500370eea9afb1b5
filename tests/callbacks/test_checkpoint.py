"""`RolloutCheckpoint` in a plain Lightning trainer."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from rlite.callbacks import RolloutCheckpoint


class FallingReward(pl.LightningModule):
    """Its first rollout step is its best."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("rollout_step", float(batch_idx))
        self.log("reward/mean", -float(batch_idx))
        return self.weight * 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(folder: Path, **settings: object) -> None:
    checkpoint = RolloutCheckpoint(every_n_rollouts=1, dirpath=str(folder), **settings)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=3, callbacks=[checkpoint], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(FallingReward(), DataLoader(torch.zeros(3)))


@pytest.mark.parametrize("settings", [{}, {"monitor": "reward/mean"}, {"monitor": "reward/mean", "save_top_k": 2}])
def test_last_is_the_newest_state_whether_it_is_among_the_best_or_not(settings: dict, tmp_path: Path) -> None:
    _fit(tmp_path, **settings)
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3
    best = sorted(path.name for path in tmp_path.glob("rollout-*"))
    assert (
        best == {0: ["rollout-2.ckpt"], 1: ["rollout-0.ckpt"], 2: ["rollout-0.ckpt", "rollout-1.ckpt"]}[len(settings)]
    )
