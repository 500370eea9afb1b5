"""The ledger: seconds, moved bytes and bytes held, for each phase, from real allocations."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlite import device
from rlite.device import DeviceKind
from rlite.memory.residents import Resident


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One resident that came to the device or left it."""

    resident: str
    direction: Literal["onload", "offload"]
    copied_bytes: int
    """Between host and device; 0 where content is dropped or made anew."""
    started_s: float
    seconds: float
    held_bytes: int
    """What all residents hold on the device afterwards."""
    in_background: bool = False
    """The phase was already computing meanwhile."""


@dataclass(slots=True, kw_only=True)
class PhaseEntry:
    """One phase that was entered, and what the device held in it."""

    phase: str
    started_s: float = 0.0
    """When the transition into it began, by `time.perf_counter`."""
    seconds: float = 0.0
    """From the beginning of the transition into it to the beginning of the one out of it."""
    transition_s: float = 0.0
    sync_s: float = 0.0
    """The part of the transition that wrote weights into the engine."""
    waited_s: float = 0.0
    """Waited in the phase for residents that were still on their way."""
    hidden_s: float = 0.0
    """Copied in the background while nobody waited."""
    moves: list[Move] = field(default_factory=list)
    device_bytes: dict[str, int] = field(default_factory=dict)
    """By resident, once the phase was entered."""
    host_bytes: dict[str, int] = field(default_factory=dict)
    transition_peak_bytes: int = 0
    """Most bytes that residents held together on the device during the transition."""
    measured_peak_bytes: int = 0
    """Most that tensors held on the device in transition and phase, by its allocator; 0 on a CPU, which has none."""
    rss_bytes: int = 0
    """Resident set of the process once the phase was entered."""
    rss_peak_bytes: int = 0
    """Largest resident set in transition and phase."""

    @property
    def moved_bytes(self) -> int:
        """Copied between host and device by the transition."""
        return sum(move.copied_bytes for move in self.moves)

    @property
    def background_bytes(self) -> int:
        """The part of `moved_bytes` that the phase did not wait for before it began."""
        return sum(move.copied_bytes for move in self.moves if move.in_background)

    @property
    def total_device_bytes(self) -> int:
        return sum(self.device_bytes.values())

    @property
    def device_peak_bytes(self) -> int:
        """By the allocator where there is one, else by the storages of residents."""
        return max(self.transition_peak_bytes, self.total_device_bytes, self.measured_peak_bytes)


class Ledger:
    """Keeps the entries of the current rollout step; `drain()` hands them over and starts anew.

    Args:
        kind: device whose allocator is asked for peaks; None asks nobody, for planning.
    """

    def __init__(self, kind: DeviceKind | None = None) -> None:
        self.kind = kind
        self.entries: list[PhaseEntry] = []
        self.listeners: list[Callable[[PhaseEntry], None]] = []
        """Called with every entry once its phase was entered; its seconds and peaks still grow then."""
        self._current: PhaseEntry | None = None
        self._last: PhaseEntry | None = None
        """The phase that is running: its time goes on after it was drained."""
        self._started_s = self._counted_s = time.perf_counter()

    def begin(self, phase: str) -> None:
        self._close_running()
        if self.kind is not None:
            device.reset_peak(self.kind)
        self._current = PhaseEntry(phase=str(phase), started_s=self._counted_s)
        self._started_s = self._counted_s

    def _close_running(self) -> None:
        """Books time and peaks of the running phase up to now."""
        now_s = time.perf_counter()
        if self._last is not None:
            self._last.seconds += now_s - self._counted_s
            self._note_peaks(self._last)
        self._counted_s = now_s

    def _note_peaks(self, entry: PhaseEntry) -> None:
        if self.kind is None:
            return
        entry.rss_peak_bytes = max(entry.rss_peak_bytes, device.peak_resident_bytes())
        if self.kind.is_accelerator:
            entry.measured_peak_bytes = max(entry.measured_peak_bytes, device.peak_bytes(self.kind))

    def moved(self, move: Move) -> None:
        if self._current is not None:
            self._current.moves.append(move)
            if move.direction == "onload":  # what has yet to leave is the peak of the phase before
                self._current.transition_peak_bytes = max(self._current.transition_peak_bytes, move.held_bytes)

    def arrived(self, move: Move, *, waited_s: float) -> None:
        """A resident whose onload went on in the background of the phase is there."""
        entry = self._current or self._last
        if entry is not None:
            entry.moves.append(move)
            entry.waited_s += waited_s
            entry.hidden_s += max(move.seconds - waited_s, 0.0)

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
        if self.kind is not None:
            entry.rss_bytes = device.resident_bytes()
            self._note_peaks(entry)
        self.entries.append(entry)
        self._current, self._last = None, entry
        for listener in self.listeners:
            listener(entry)

    def drain(self) -> list[PhaseEntry]:
        """The entries since the last call. The running phase is among them with the time it took so far."""
        self._close_running()
        entries, self.entries = self.entries, []
        return entries
