"""Stopping and going on: a resumed run samples, trains and logs what an uninterrupted one does."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.runs import logger, metrics, rlite, samples

COMMON = (
    "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=4",
    "--model.init_from=null", "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]",
    "--model.batch.minibatches=2", "--model.optimizer={lr: 1.0e-3, warmup_steps: 3, schedule: linear, total_steps: 8}",
)  # fmt: skip


def run(folder: Path, rollouts: int, *overrides: str) -> None:
    rlite(*COMMON, f"--trainer.limit_train_batches={rollouts}", logger(folder), *overrides)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, 4)
    return folder


def test_two_and_two_rollouts_equal_four(uninterrupted: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, 2)
    run(second, 4, f"--ckpt_path={first / 'checkpoints' / 'last.ckpt'}")
    expected = samples(uninterrupted)
    assert [s["rollout_step"] for s in samples(second)] == [2] * 16 + [3] * 16
    assert samples(first) + samples(second) == expected, "same prompts, completions, rewards and advantages"
    for ours, theirs in zip(metrics(second), metrics(uninterrupted)[2:], strict=True):
        for key in ("loss", "grad_norm", "lr", "entropy", "rollout_step"):
            assert ours[key] == theirs[key], key


def test_ckpt_path_last_goes_on_in_the_newest_run_directory_and_loses_no_row(tmp_path: Path) -> None:
    place = f"--trainer.logger.init_args={{save_dir: {tmp_path}, name: runs}}"
    rlite(*COMMON, "--trainer.limit_train_batches=1", place)
    rlite(*COMMON, "--trainer.limit_train_batches=2", place, "--ckpt_path=last")
    folder = tmp_path / "runs" / "version_0"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]
    assert [row["rollout_step"] for row in metrics(folder)] == [0, 1]
    assert [s["rollout_step"] for s in samples(folder)] == [0] * 16 + [1] * 16


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank"), [("generate", 0), ("update", 1), ("reward", 0)])
def test_sigterm_in_any_phase_saves_exits_143_and_resumes_as_if_nothing_happened(
    where: str, rank: int, uninterrupted: Path, tmp_path: Path
) -> None:
    place = f"--trainer.logger.init_args={{save_dir: {tmp_path}, name: runs}}"
    if where == "reward":
        fault = ["--model.rewards=[tests.integration.faults.length_and_sigterm]"]
    else:
        settings = f"{{where: {where}, rank: {rank}}}"
        fault = [f"--trainer.callbacks+={{class_path: tests.integration.faults.Signal, init_args: {settings}}}"]
    with pytest.raises(AssertionError, match="exit code 143"):
        rlite(*COMMON, "--trainer.limit_train_batches=4", place, *fault)
    folder = tmp_path / "runs" / "version_0"
    assert [row["rollout_step"] for row in metrics(folder)] == [0, 1], "the step under way is finished, then saved"
    if where == "reward":
        return
    rlite(*COMMON, "--trainer.limit_train_batches=4", place, "--ckpt_path=last")
    assert samples(folder) == samples(uninterrupted)
    assert [row["loss"] for row in metrics(folder)] == [row["loss"] for row in metrics(uninterrupted)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "rank", "asynchronous"),
    [("generate", 1, "true"), ("update", 0, "false"), ("save", 0, "false"), ("write", 1, "true")],
)
def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(
    where: str, rank: int, asynchronous: str, uninterrupted: Path, tmp_path: Path
) -> None:
    place = f"--trainer.logger.init_args={{save_dir: {tmp_path}, name: runs}}"
    saving = f"{{every_n_rollouts: 1, asynchronous: {asynchronous}}}"
    often = (
        f"--trainer.callbacks+={{class_path: rlite.callbacks.RolloutCheckpoint, init_args: {saving}}}",
        f"--trainer.callbacks+={{class_path: tests.integration.faults.Signal, init_args: "
        f"{{where: {where}, rank: {rank}, step: 2, signum: {signal.SIGKILL:d}}}}}",
    )
    with pytest.raises(AssertionError):
        rlite(*COMMON, "--trainer.limit_train_batches=4", place, *often)
    folder = tmp_path / "runs" / "version_0"
    assert metrics(folder)[-1]["rollout_step"] in (1, 2)
    rlite(*COMMON, "--trainer.limit_train_batches=4", place, often[0], "--ckpt_path=last")
    assert samples(folder) == samples(uninterrupted)
    assert [row["loss"] for row in metrics(folder)] == [row["loss"] for row in metrics(uninterrupted)]
    assert (folder / "checkpoints" / "last.ckpt").resolve().name == "rollout-3.ckpt"
    assert not list((folder / "checkpoints").glob(".*")), "what the killed save left is gone"


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_full_disk_ends_the_run_with_the_path_and_the_checkpoint_before_goes_on(
    asynchronous: str, tmp_path: Path
) -> None:
    sft = ("fit", "--config", "configs/sft_demo_cpu.yaml", "--trainer.limit_train_batches=4", logger(tmp_path / "run"))
    saving = f"{{every_n_rollouts: 1, save_top_k: 2, asynchronous: {asynchronous}}}"
    saves = f"--trainer.callbacks+={{class_path: rlite.callbacks.RolloutCheckpoint, init_args: {saving}}}"
    full = "{class_path: tests.integration.faults.FullDisk, init_args: {rank: 1, step: 1, limit_bytes: 20000}}"
    message = rf"checkpoint {tmp_path}/run/checkpoints/rollout-1.ckpt was not written. Rank 1: .*File too large"
    with pytest.raises(AssertionError, match=message):
        rlite(*sft, saves, f"--trainer.callbacks+={full}")
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["last.ckpt", "rollout-0.ckpt"]
    if asynchronous == "true":
        rlite(*sft, saves, "--ckpt_path=last")
        assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: (path / "COMPLETE").unlink(), "no COMPLETE marker"),
        (lambda path: (path / "COMPLETE").write_text('{"format": 99}'), "has format 99"),
    ],
)
def test_a_broken_checkpoint_is_refused_with_the_reason(
    break_it: Callable[[Path], object], message: str, uninterrupted: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.ckpt"
    shutil.copytree((uninterrupted / "checkpoints" / "last.ckpt").resolve(), copy)
    break_it(copy)
    with pytest.raises(AssertionError, match=message):
        rlite(*COMMON, "--trainer.limit_train_batches=5", logger(tmp_path / "run"), f"--ckpt_path={copy}")
