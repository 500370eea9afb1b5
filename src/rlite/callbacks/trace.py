"""`Trace`: phases, transfers and memory of every rank on one time line, for Perfetto or chrome://tracing."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rlite.memory import Move, PhaseEntry
from rlite.strategies.colocated import colocated

Event = dict[str, Any]
"""One entry of the Trace Event Format; `ts` and `dur` in microseconds, `pid` is the rank."""

_PHASES, _TRANSFERS, _BACKGROUND = 0, 1, 2
"""Rows (`tid`) of a rank."""


class Trace(Callback):
    """Writes `trace.json` into the run directory when the run ends; after an error each rank writes its own part.

    Args:
        max_phases: keeps the last so many phases of every rank.
    """

    def __init__(self, *, max_phases: int = 2000) -> None:
        if max_phases < 1:
            raise ValueError(f"Trace.max_phases = {max_phases}: must be at least 1")
        self.entries: deque[PhaseEntry] = deque(maxlen=max_phases)
        self._directory = Path()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        colocated(trainer).phases.ledger.listeners.append(self.entries.append)
        self._directory = Path(trainer.log_dir or trainer.default_root_dir)  # `log_dir` is collective

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        listeners = colocated(trainer).phases.ledger.listeners
        if self.entries.append in listeners:
            listeners.remove(self.entries.append)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        events = trace_events(self.entries, rank=trainer.global_rank)
        of_rank: list[list[Event]] = [events]
        if trainer.world_size > 1:
            of_rank = [[] for _ in range(trainer.world_size)]
            dist.all_gather_object(of_rank, events)
        if trainer.is_global_zero:
            write_trace(self._directory / "trace.json", [event for events in of_rank for event in events])

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Other ranks may be gone: no collective.
        rank = trainer.global_rank
        write_trace(self._directory / f"trace_rank{rank}.json", trace_events(self.entries, rank=rank))


def trace_events(entries: Sequence[PhaseEntry], *, rank: int) -> list[Event]:
    """What one rank did. Times are those of the wall clock, so that ranks of other nodes can stand beside them."""
    wall_s = time.time() - time.perf_counter()
    ends_s = [later.started_s for _, later in pairwise(entries)] + [time.perf_counter()]
    events: list[Event] = [{"ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}}]
    for row, name in ((_PHASES, "phases"), (_TRANSFERS, "transfers"), (_BACKGROUND, "background transfers")):
        events.append({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}})
    for entry, end_s in zip(entries, ends_s, strict=True):
        events += _of_phase(entry, end_s)
    for event in events:
        event["pid"] = rank
        if "ts" in event:
            event["ts"] = (event["ts"] + wall_s) * 1e6
    return events


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Time starts at the first event."""
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    shifted = [event | {"ts": event["ts"] - first} if "ts" in event else event for event in events]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": shifted, "displayTimeUnit": "ms"}))


def _of_phase(entry: PhaseEntry, end_s: float) -> Iterator[Event]:
    yield _span(entry.phase, entry.started_s, end_s - entry.started_s, _PHASES) | {
        "args": {"moved_bytes": entry.moved_bytes, "device_peak_bytes": entry.device_peak_bytes}
    }
    yield _span(f"to {entry.phase}", entry.started_s, entry.transition_s, _PHASES)
    for move in entry.moves:
        yield _transfer(move)
        yield _counter("on the device", move.started_s + move.seconds, {"bytes": move.held_bytes})
    entered_s = entry.started_s + entry.transition_s
    yield _counter("residents", entered_s, dict(entry.device_bytes))
    yield _counter("resident set", entered_s, {"bytes": entry.rss_bytes})


def _transfer(move: Move) -> Event:
    row = _BACKGROUND if move.in_background else _TRANSFERS  # spans of one row may not cross
    event = _span(f"{move.direction} {move.resident}", move.started_s, move.seconds, row)
    return event | {"args": {"copied_bytes": move.copied_bytes}}


def _span(name: str, started_s: float, seconds: float, row: int) -> Event:
    return {"ph": "X", "name": name, "ts": started_s, "dur": seconds * 1e6, "tid": row}


def _counter(name: str, at_s: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "name": name, "ts": at_s, "args": values}
