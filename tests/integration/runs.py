"""Whole runs through the command line, in forked worlds: the real strategy, Megatron-core, vLLM and gloo."""

import csv
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.helpers.world import run_world

ROOT = Path(__file__).resolve().parents[2]


def rlite(*arguments: str, world_size: int = 2, timeout_s: float = 300) -> str:
    """Runs the command on `world_size` ranks; returns what rank 0 printed. Raises AssertionError when a rank fails."""
    return run_world(world_size, _command, arguments, timeout_s=timeout_s)[0]


def _command(arguments: tuple[str, ...]) -> str:
    from rlite.cli.app import run

    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            run(list(arguments))
        except SystemExit as stop:
            if stop.code:
                raise AssertionError(f"exit code {stop.code}\n{output.getvalue()}") from stop
    return output.getvalue()


def logger(folder: Path) -> str:
    """Overrides that put a run into `folder`."""
    return f"--trainer.logger.init_args={{save_dir: {folder.parent}, name: {folder.name}, version: ''}}"


def metrics(folder: Path) -> list[dict[str, float]]:
    """Rows of `metrics.csv`, numbers only."""
    with (folder / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def samples(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]
