"""What a run left in its directory: `metrics.csv`, `samples.jsonl` and `config.yaml`, read into plain values."""

import csv
import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]
"""(rollout step, value), in order of the steps."""
Sample = Mapping[str, Any]
"""A line of `samples.jsonl`, see `rlite.callbacks.SampleLog`."""

_SAMPLE_KEYS = ("rollout_step", "prompt", "completion", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A few completions that are worth reading."""

    step: int
    """Rollout step of `best` and `worst`: the last one that was recorded."""
    total: int
    """Completions recorded in the whole run."""
    best: tuple[Sample, ...]
    worst: tuple[Sample, ...]
    """By reward, each of another prompt."""
    strangest: tuple[Sample, ...]
    """Of the whole run, by the difference between trainer and engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory."""

    directory: Path
    metrics: Mapping[str, Points]
    """By name; only finite values."""
    samples: Samples | None
    """None when the run recorded none."""
    config: str
    """`config.yaml` as text; empty without one."""
    traces: tuple[str, ...] = ()
    """Files that `rlite.callbacks.Trace` wrote into the run directory."""

    def last(self, name: str) -> float | None:
        """Latest value of a metric."""
        points = self.metrics.get(name)
        return points[-1][1] if points else None


def read_run(directory: Path, *, num_samples: int = 4) -> Run:
    """Reads a run directory, `num_samples` completions of each kind.

    Raises:
        ValueError: not a run directory, or a file in it that is not what a run writes.
    """
    path = directory / "metrics.csv"
    if not path.is_file():
        raise ValueError(f"{directory}: {_why_no_run(directory)}")
    metrics = read_metrics(path)
    if not metrics:
        raise ValueError(f"{path} holds no metrics yet: the run has not finished its first rollout step")
    samples, config = directory / "samples.jsonl", directory / "config.yaml"
    return Run(
        directory=directory,
        metrics=metrics,
        samples=read_samples(samples, count=num_samples) if samples.is_file() else None,
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        traces=tuple(sorted(path.name for path in directory.glob("trace*.json"))),
    )


def read_metrics(path: Path) -> dict[str, Points]:
    """Columns of `metrics.csv`. Rows without `rollout_step` (validation) belong to the step before them."""
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    step = 0.0
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = {name: value for name, text in row.items() if name and (value := _number(text)) is not None}
            step = values.get("rollout_step", step)
            for name, value in values.items():
                if name not in ("rollout_step", "step", "epoch"):
                    columns[name].append((step, value))
    return dict(columns)


def read_samples(path: Path, *, count: int) -> Samples | None:
    """Picks completions without keeping the file in memory. None when it is empty.

    Raises:
        ValueError: a line that is not a completion, with its number. A last line that a dying run cut off is left out.
    """
    total, step = 0, -1
    latest: list[Sample] = []
    strangest: list[tuple[float, int, Sample]] = []
    for sample in _lines(path):
        total += 1
        if sample["rollout_step"] != step:
            step, latest = sample["rollout_step"], []
        latest.append(sample)
        difference = sample.get("logprob_diff") or 0.0
        push = heapq.heappush if len(strangest) < count else heapq.heappushpop
        push(strangest, (difference, total, sample))
    if not total:
        return None
    scored = sorted((s for s in latest if s["reward"] is not None), key=lambda s: s["reward"])
    return Samples(
        step=step,
        total=total,
        best=_of_different_prompts(reversed(scored), count),
        worst=_of_different_prompts(iter(scored), count),
        strangest=tuple(sample for difference, _, sample in sorted(strangest, reverse=True) if difference > 0),
    )


def _of_different_prompts(samples: Iterator[Sample], count: int) -> tuple[Sample, ...]:
    chosen: dict[str, Sample] = {}
    for sample in samples:
        if len(chosen) < count:
            chosen.setdefault(sample["prompt"], sample)
    return tuple(chosen.values())


def _lines(path: Path) -> Iterator[Sample]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # a run that was killed while it wrote
            try:
                sample = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            missing = [key for key in _SAMPLE_KEYS if key not in sample]
            if missing:
                raise ValueError(f"{path}:{number}: {missing[0]!r} is missing; SampleLog writes it in every line")
            yield sample


def _number(text: str | None) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None  # a column of text
    return value if math.isfinite(value) else None


def _why_no_run(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    runs = sorted(path.parent.name for path in directory.glob("*/metrics.csv"))
    if runs:
        return f"holds several runs, report one of them: {', '.join(runs[-5:])}"
    return "is not a run directory: no metrics.csv in it (use the CSVLogger, as the example configs do)"
