"""Validation: inside fit every few rollouts, and on its own from a checkpoint."""

import re
from pathlib import Path

import pytest

from tests.integration.runs import logger, metrics, rlite, samples

COMMON = (
    "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=4",
    "--model.init_from=null", "--data.val={kind: arithmetic, size: 11, seed: 5}",
    "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]",
)  # fmt: skip


def test_fit_validates_and_validate_on_its_checkpoint_finds_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rlite(
        "fit", *COMMON, "--trainer.limit_train_batches=2", "--trainer.val_check_interval=1", "--model.optimizer.lr=1e-2",
        logger(run),
    )  # fmt: skip
    inside = [row["val/reward/mean"] for row in metrics(run) if "val/reward/mean" in row]
    assert len(inside) == 2, "after each rollout"
    assert len(samples(run, "val_samples.jsonl")) == 2 * 11, "every row once, whatever the number of ranks"
    output = rlite("validate", *COMMON, logger(tmp_path / "alone"), f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
    alone = float(re.search(r"val/reward/mean[^-\d]+(-?[\d.]+)", output)[1])
    assert alone == pytest.approx(inside[-1], rel=1e-4)
