"""Metrics of a rollout step, and growth over rollout steps."""

import pytest

from rlite.memory import LeakCheck, PhaseMetrics
from rlite.memory.ledger import Ledger, PhaseEntry


def entry(phase: str, **values: object) -> PhaseEntry:
    return PhaseEntry(phase=phase, **values)


def test_times_add_up_and_peaks_do_not() -> None:
    entries = [
        entry("train", seconds=1.0, device_bytes={"a": 5}, rss_peak_bytes=7),
        entry("train", seconds=2.0, transition_peak_bytes=9, rss_peak_bytes=6),
    ]
    metrics = PhaseMetrics().of(entries)
    assert metrics["perf/phase/train/seconds"] == 3.0
    assert metrics["perf/phase/train/device_peak_bytes"] == 9
    assert metrics["perf/phase/train/rss_peak_bytes"] == 7


def test_a_phase_that_was_not_entered_again_is_reported_with_zeros() -> None:
    metrics = PhaseMetrics()
    first = metrics.of([entry("logprob", seconds=1.0, host_bytes={"a": 3}), entry("train", seconds=1.0)])
    second = metrics.of([entry("train", seconds=2.0)])
    assert first.keys() == second.keys()
    assert {v for k, v in second.items() if k.startswith("perf/phase/logprob/")} == {0.0}
    assert second["perf/phase/train/seconds"] == 2.0


def test_the_allocators_peak_counts_where_there_is_one() -> None:
    assert entry("train", device_bytes={"a": 5}, measured_peak_bytes=8).device_peak_bytes == 8


def test_the_time_between_two_transitions_belongs_to_the_phase_before() -> None:
    ledger = Ledger()
    for phase in ("generate", "train"):
        ledger.begin(phase)
        ledger.end([])
    first, second = ledger.drain()
    assert first.seconds >= first.transition_s > 0
    assert second.started_s == pytest.approx(first.started_s + first.seconds)


def test_listeners_hear_of_every_phase() -> None:
    ledger, heard = Ledger(), []
    ledger.listeners.append(lambda entry: heard.append(entry.phase))
    ledger.begin("train")
    ledger.end([])
    assert heard == ["train"]


def test_growth_counts_from_the_end_of_the_warm_up() -> None:
    leaks = LeakCheck(warmup=2)
    assert leaks.growth({"rss": 50.0}) == {"rss": 0.0}
    assert leaks.growth({"rss": 100.0}) == {"rss": 0.0}
    assert leaks.growth({"rss": 103.0}) == {"rss": pytest.approx(0.03)}
    assert leaks.growth({"rss": 90.0}) == {"rss": pytest.approx(-0.1)}
