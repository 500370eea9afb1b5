"""PPO with a critic in whole runs: one completion of a prompt, two models that take turns on the devices."""

from pathlib import Path

import pytest

from tests.integration.ledgers import TRACE, assert_plan_agrees
from tests.integration.runs import logger, metrics, rlite, samples

COMMON = (
    "fit", "--config", "configs/ppo_demo_cpu.yaml",
    "--model.init_from=null", "--model.optimizer.lr=1e-3", "--data.batch_size=8",
    "--model.batch={group_size: 1, minibatches: 2}",
    "--model.critic_optimizer={lr: 1.0e-2, warmup_steps: 2}",
    "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]",
)  # fmt: skip


def run(folder: Path, rollouts: int, *overrides: str) -> Path:
    rlite(*COMMON, f"--trainer.limit_train_batches={rollouts}", logger(folder), *overrides)
    return folder


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("ppo") / "run", 3, TRACE)


def test_the_plan_counts_the_critic_as_the_run_does(ppo: Path) -> None:
    assert_plan_agrees(ppo)


def test_the_critic_values_learns_and_leaves_the_device(ppo: Path) -> None:
    rows = metrics(ppo)
    assert len(rows) == 3
    assert rows[0]["critic/value_mean"] == 0, "the head starts at zero"
    assert rows[1]["critic/value_mean"] != 0
    assert rows[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert all(row["critic/grad_norm"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert all(row["critic/loss"] >= 0 for row in rows)
    assert "frac_reward_zero_std" not in rows[0], "every group is one completion"
    assert {"perf/phase/critic/device_peak_bytes", "timing_s/critic"} <= rows[0].keys()


def test_advantages_are_whitened_over_the_step(ppo: Path) -> None:
    for row in metrics(ppo):
        assert row["advantage/mean"] == pytest.approx(0, abs=1e-6)
        assert row["advantage/min"] < 0 < row["advantage/max"]


def test_a_resumed_run_continues_policy_and_critic(ppo: Path, tmp_path: Path) -> None:
    saving = "{every_n_rollouts: 1, asynchronous: true}"
    saves = f"--trainer.callbacks+={{class_path: rlite.callbacks.RolloutCheckpoint, init_args: {saving}}}"
    first = run(tmp_path / "first", 2, saves)
    second = run(tmp_path / "second", 3, f"--ckpt_path={first / 'checkpoints' / 'last.ckpt'}")
    assert samples(first) + samples(second) == samples(ppo)
    for key in ("critic/value_mean", "critic/loss", "critic/grad_norm", "loss", "grad_norm"):
        assert metrics(second)[0][key] == metrics(ppo)[2][key], key


def test_another_advantage_estimator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="PPOModule estimates advantages with its critic"):
        run(tmp_path / "run", 1, "--model.algorithm=rloo")
