"""`RunLogger`: Lightning's CSVLogger for runs that stop and go on."""

import csv
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from rlite.strategies.checkpoint import newest_checkpoint


class RunLogger(CSVLogger):
    """Writes `metrics.csv` into the run directory `save_dir/name/version_N`, a row for each rollout step, as it happens.

    A run that resumes in its own directory goes on in the same file: rows of steps that are done again are replaced,
    where Lightning's CSVLogger would delete all of them.

    Args:
        save_dir: where runs lie.
        name: of the experiment.
        version: of the run; the next free number when not given.
    """

    def __init__(self, save_dir: str = "runs", name: str = "rlite", version: int | str | None = None) -> None:
        super().__init__(save_dir=save_dir, name=name, version=version, flush_logs_every_n_steps=1)

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> "_AppendingWriter":
        if self._experiment is None:
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)
            self._experiment = _AppendingWriter(self.log_dir)
        return self._experiment  # type: ignore[return-value]

    def last_checkpoint(self) -> Path | None:
        """The last checkpoint of this run, or, when no version was given, of the newest run that has one."""
        runs = [Path(self.log_dir)] if self._version is not None else Path(self.root_dir).glob("*")
        found = [path for run in runs if (path := newest_checkpoint(run / "checkpoints")) is not None]
        return max(found, key=lambda path: (path / "COMPLETE").stat().st_mtime, default=None)


class _AppendingWriter(_ExperimentWriter):
    """Goes on in an existing `metrics.csv`; the first rollout step that is logged replaces its old rows and all
    later ones."""

    _is_first = True

    @override
    def _check_log_dir_exists(self) -> None:
        pass  # the stock writer deletes what is there

    @override
    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        if self._is_first and Path(self.metrics_file_path).exists():
            # Only training does steps again; what `validate` finds on its own is added.
            self._go_on(before=step or 0 if "rollout_step" in metrics_dict else None)
        self._is_first = False
        super().log_metrics(metrics_dict, step)

    def _go_on(self, *, before: int | None) -> None:
        """Takes over the columns of the file and its rows of steps `before`; None keeps them all."""
        path = Path(self.metrics_file_path)
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            self.metrics_keys = sorted(reader.fieldnames or [])
            whole = (row for row in reader if None not in row.values())  # the last was cut when the run was killed
            rows = [row for row in whole if before is None or int(row["step"]) < before]
        kept = path.with_name(f".{path.name}.partial")
        with kept.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        kept.replace(path)
