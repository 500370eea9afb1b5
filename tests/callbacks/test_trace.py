"""The time line of a run, from the ledger."""

import json
from pathlib import Path

import pytest

from rlite.callbacks.trace import Trace, trace_events, write_trace
from rlite.memory import Move, PhaseEntry

MOVE = Move(resident="optimizer_state", direction="offload", copied_bytes=8, started_s=10.5, seconds=0.25, held_bytes=4)
ENTRIES = [
    PhaseEntry(phase="generate", started_s=10.0, transition_s=1.0, moves=[MOVE], device_bytes={"kv_cache": 4}),
    PhaseEntry(phase="train", started_s=13.0, transition_s=0.5, device_bytes={"kv_cache": 0}, rss_bytes=7),
]


def _named(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["name"] == name]


def test_a_phase_lasts_until_the_next_one_begins() -> None:
    events = trace_events(ENTRIES, rank=3)
    (generate,), (train,) = _named(events, "generate"), _named(events, "train")
    assert generate["dur"] == pytest.approx(3e6)
    assert train["ts"] - generate["ts"] == pytest.approx(3e6, abs=1)
    assert {event["pid"] for event in events} == {3}


def test_transfers_and_memory_stand_where_they_happened() -> None:
    events = trace_events(ENTRIES, rank=0)
    (start,) = _named(events, "generate")
    (transfer,) = _named(events, "offload optimizer_state")
    assert transfer["ts"] - start["ts"] == pytest.approx(0.5e6, abs=1)
    assert (transfer["dur"], transfer["args"]) == (pytest.approx(0.25e6), {"copied_bytes": 8})
    counters = _named(events, "residents")
    assert [counter["args"] for counter in counters] == [{"kv_cache": 4}, {"kv_cache": 0}]
    assert counters[0]["ts"] - start["ts"] == pytest.approx(1e6, abs=1)


def test_the_file_starts_at_zero_and_names_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trace.json"
    write_trace(path, trace_events(ENTRIES, rank=0) + trace_events(ENTRIES, rank=1))
    events = json.loads(path.read_text())["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert [event["args"]["name"] for event in _named(events, "process_name")] == ["rank 0", "rank 1"]


def test_only_the_last_phases_are_kept() -> None:
    trace = Trace(max_phases=1)
    for entry in ENTRIES:
        trace.entries.append(entry)
    assert [entry.phase for entry in trace.entries] == ["train"]
    with pytest.raises(ValueError, match=r"Trace\.max_phases = 0"):
        Trace(max_phases=0)
