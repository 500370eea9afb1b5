"""Every preset, and a user's own loss, in whole runs."""

import math
from pathlib import Path

import pytest
import yaml

from rlite.algorithms import PRESETS
from tests.integration.presets import STEPS
from tests.integration.runs import logger, metrics, rlite

COMMON = (
    "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch={group_size: 4, minibatches: 2}",
    "--model.init_from=null", "--trainer.limit_train_batches=2", "--trainer.enable_checkpointing=false",
    "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]",
)  # fmt: skip


LONGER = (
    "--trainer.callbacks=[{class_path: rlite.callbacks.VLLMRollout, init_args: {engine: {tp: 1, dtype: float32, "
    "max_model_len: 32, kv_cache_memory_bytes: 33554432}, sampling: {max_tokens: 24}}}, "
    "{class_path: rlite.callbacks.EP2TPConversion}, {class_path: rlite.callbacks.MemoryOffload}]",
    "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 24, cache_tokens: 24}}]",
)
"""Room for completions of a random policy to end: some presets give those that do not end no reward at all."""


@pytest.mark.slow
def test_every_preset_trains(tmp_path: Path) -> None:
    folder, num_steps = tmp_path / "run", STEPS * len(PRESETS)
    everything = "--trainer.callbacks+={class_path: tests.integration.presets.EveryPreset}"
    keeps_a_reference = "--model.algorithm=grpo_kl"
    rlite(
        *COMMON, *LONGER, everything, keeps_a_reference, f"--trainer.limit_train_batches={num_steps}",
        "--model.optimizer.lr=1e-5", logger(folder), timeout_s=900,
    )  # fmt: skip
    rows = metrics(folder)
    assert len(rows) == num_steps
    for step, row in enumerate(rows):
        preset = list(PRESETS)[step // STEPS]
        assert math.isfinite(row["loss"]), preset
        assert row["grad_norm"] > 0, preset
        assert row["updates_skipped"] == 0, preset
    norms = [row["grad_norm"] for row in rows[::STEPS]]
    assert len({f"{norm:.3e}" for norm in norms}) > len(PRESETS) // 2, "presets differ in what they do"


def test_a_users_loss_by_its_path_in_a_yaml_file(tmp_path: Path) -> None:
    """It is REINFORCE, scaled: twice the scale is twice the gradient."""
    norms = []
    for scale in (1.0, 2.0):
        config = tmp_path / f"loss{scale}.yaml"
        algorithm = {"loss": "tests.integration.losses.ScaledReinforce", "loss_args": {"scale": scale}}
        config.write_text(yaml.safe_dump({"model": {"init_args": {"algorithm": algorithm}}}))
        folder = tmp_path / f"scale{scale}"
        rlite(
            *COMMON,
            "--config",
            str(config),
            "--trainer.limit_train_batches=1",
            "--model.batch.minibatches=1",
            logger(folder),
        )
        norms.append(metrics(folder)[0]["grad_norm"])
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5)
