"""`rlite report`: one HTML page about a run, readable without rlite and without a network."""

from pathlib import Path

from rlite.report.page import page
from rlite.report.run import Run, read_run

__all__ = ["Run", "read_run", "write_report"]


def write_report(run_dir: Path | str) -> Path:
    """Writes `report.html` into a run directory (the one with `metrics.csv`) and returns its path.

    Raises:
        ValueError: not a run directory, or a file in it that is not what a run writes.
    """
    run = read_run(Path(run_dir))
    path = run.directory / "report.html"
    path.write_text(page(run), encoding="utf-8")
    return path
