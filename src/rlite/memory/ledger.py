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
        self._started_s = 0.0

    def begin(self, phase: str) -> None:
        self._current = PhaseEntry(phase=str(phase))
        self._started_s = time.perf_counter()

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
        self._current = None

    def drain(self) -> list[PhaseEntry]:
        entries, self.entries = self.entries, []
        return entries
