"""`RunLogger`: what becomes of a `metrics.csv` that is there already, and which run `--ckpt_path last` goes on with."""

import csv
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonargparse import Namespace

from rlite.cli.app import RLiteCLI
from rlite.loggers import RunLogger


def _log(folder: Path, *rows: tuple[int, dict[str, float]]) -> None:
    logger = RunLogger(str(folder), "runs", version=0)
    for step, metrics in rows:
        logger.log_metrics(metrics, step)
    logger.finalize("success")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    _log(tmp_path, *((step, {"rollout_step": step, "loss": step / 10}) for step in range(3)))
    return tmp_path


def _read(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_that_goes_on_replaces_the_steps_that_it_does_again(trained: Path) -> None:
    _log(trained, (1, {"rollout_step": 1, "loss": 7.0, "new": 1.0}))
    assert [(row["step"], row["loss"], row["new"]) for row in _read(trained)] == [("0", "0.0", ""), ("1", "7.0", "1.0")]


def test_validation_in_the_directory_of_a_run_keeps_its_rows(trained: Path) -> None:
    _log(trained, (0, {"val/reward/mean": 0.5}))
    rows = _read(trained)
    assert [row["loss"] for row in rows] == ["0.0", "0.1", "0.2", ""]
    assert rows[-1]["val/reward/mean"] == "0.5"


def test_a_row_that_was_cut_when_the_run_was_killed_is_no_obstacle(trained: Path) -> None:
    with (trained / "runs" / "version_0" / "metrics.csv").open("a") as file:
        file.write("0.3")
    _log(trained, (3, {"rollout_step": 3, "loss": 0.3}))
    assert [row["step"] for row in _read(trained)] == ["0", "1", "2", "3"]


def test_the_last_checkpoint_is_that_of_the_run_saved_last_whatever_the_runs_are_called(tmp_path: Path) -> None:
    for age, name in enumerate(("20261129-190854", "version_3")):
        marker = tmp_path / "demo" / name / "checkpoints" / "last.ckpt" / "COMPLETE"
        marker.parent.mkdir(parents=True)
        marker.touch()
        os.utime(marker, (1000 - age, 1000 - age))
    found = RunLogger(save_dir=str(tmp_path), name="demo").last_checkpoint()
    assert found is not None and found.parent.parent.name == "20261129-190854"
    assert RunLogger(save_dir=str(tmp_path), name="nothing").last_checkpoint() is None


def _resume_last(**trainer: object) -> Namespace:
    cli = SimpleNamespace(config={"fit": Namespace(ckpt_path="last", trainer=Namespace(**trainer))}, subcommand="fit")
    RLiteCLI._find_last_checkpoint(cli)
    return cli.config["fit"]


@pytest.mark.parametrize("explicit", [False, True])
def test_ckpt_path_last_goes_on_in_the_directory_of_the_run_with_and_without_a_logger_in_the_config(
    explicit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    last = Path("runs") / "rlite" / "version_3" / "checkpoints" / "last.ckpt"
    last.mkdir(parents=True)
    (last / "COMPLETE").touch()
    logger = Namespace(class_path="rlite.loggers.RunLogger", init_args=Namespace(save_dir="runs", version=None))
    config = _resume_last(logger=logger if explicit else None)
    assert config.ckpt_path == str(last)
    assert config.trainer.logger.init_args.version == "version_3"


def test_ckpt_path_last_without_a_run_logger_asks_for_the_path() -> None:
    with pytest.raises(ValueError, match=r"--ckpt_path last: .* this config has none; give the path"):
        _resume_last(logger=Namespace(class_path="lightning.pytorch.loggers.WandbLogger", init_args=Namespace()))
