"""The ledger: seconds, moved bytes and bytes held, for each phase, from real allocations."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from rlite.memory.residents import Resident


@dataclass(slots=True, kw_only=True)
class PhaseEntry:
    """One phase that was entered, and what the device held in it."""

    phase: str
    seconds: float = 0.0
    """From the beginning of the transition into it to the beginning of the one out of it."""
    transition_s: float = 0.0
    sync_s: float = 0.0
    """The part of the transition that wrote weights into the engine."""
    moved_bytes: int = 0
    """Copied between host and device by the transition."""
    device_bytes: dict[str, int] = field(default_factory=dict)
    """By resident, once the phase was entered."""
    host_bytes: dict[str, int] = field(default_factory=dict)
    transition_peak_bytes: int = 0
    """Most bytes that residents held together on the device during the transition."""
    rss_bytes: int = 0

    @property
    def total_device_bytes(self) -> int:
        return sum(self.device_bytes.values())


class Ledger:
    """Keeps the entries of the current rollout step; `drain()` hands them over and starts anew."""

    def __init__(self) -> None:
        self.entries: list[PhaseEntry] = []
        self._current: PhaseEntry | None = None
        self._last: PhaseEntry | None = None
        """The phase that is running: its time goes on after it was drained."""
        self._started_s = self._counted_s = time.perf_counter()

    def begin(self, phase: str) -> None:
        self._count_time()
        self._current = PhaseEntry(phase=str(phase))
        self._started_s = self._counted_s

    def _count_time(self) -> None:
        now_s = time.perf_counter()
        if self._last is not None:
            self._last.seconds += now_s - self._counted_s
        self._counted_s = now_s

    def moved(self, nbytes: int) -> None:
        if self._current is not None:
            self._current.moved_bytes += nbytes

    def observe(self, residents: Mapping[str, Resident]) -> None:
        """Notes the bytes held in the middle of a transition, for its peak."""
        if self._current is not None:
            held = sum(resident.device_bytes() for resident in residents.values())
            self._current.transition_peak_bytes = max(self._current.transition_peak_bytes, held)

    def note_sync(self, seconds: float) -> None:
        if self._current is not None:
            self._current.sync_s += seconds

    def end(self, residents: Iterable[Resident]) -> None:
        entry = self._current
        assert entry is not None
        entry.transition_s = time.perf_counter() - self._started_s
        for resident in residents:
            entry.device_bytes[resident.name] = resident.device_bytes()
            entry.host_bytes[resident.name] = resident.host_bytes()
        entry.transition_peak_bytes = max(entry.transition_peak_bytes, entry.total_device_bytes)
        entry.rss_bytes = psutil.Process().memory_info().rss
        self.entries.append(entry)
        self._current, self._last = None, entry

    def drain(self) -> list[PhaseEntry]:
        """The entries since the last call. The running phase is among them with the time it took so far."""
        self._count_time()
        entries, self.entries = self.entries, []
        return entries


def phase_metrics(entries: Iterable[PhaseEntry]) -> dict[str, float]:
    """`perf/phase/{name}/{seconds,device_peak_bytes,host_bytes,moved_bytes}` and `perf/rss_bytes` of this rank."""
    metrics: dict[str, float] = {}
    for entry in entries:
        prefix = f"perf/phase/{entry.phase}/"
        metrics[prefix + "seconds"] = metrics.get(prefix + "seconds", 0.0) + entry.seconds
        metrics[prefix + "moved_bytes"] = metrics.get(prefix + "moved_bytes", 0.0) + entry.moved_bytes
        peak = max(entry.transition_peak_bytes, entry.total_device_bytes)
        metrics[prefix + "device_peak_bytes"] = max(metrics.get(prefix + "device_peak_bytes", 0.0), float(peak))
        metrics[prefix + "host_bytes"] = float(sum(entry.host_bytes.values()))
        metrics["perf/rss_bytes"] = float(entry.rss_bytes)
    return metrics
