"""Copies between device and host: where they land on the host, and how they go on while the device computes."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

CopyPair = tuple[Tensor, Tensor]
"""(destination, source), equally long."""


class HostArena:
    """Host copies of some storages, allocated once and reused in every cycle; pinned when the device has pinned memory."""

    def __init__(self, sizes_bytes: Iterable[int], *, pinned: bool) -> None:
        self.blocks = [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in sizes_bytes]

    def nbytes(self) -> int:
        return sum(block.numel() for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A copy in the background that has ended."""

    copied_bytes: int
    started_s: float
    seconds: float
    """How long the copy took; not how long anybody waited for it."""


class BackgroundCopy:
    """Copies that were started; `wait` returns when they are done, or raises what went wrong."""

    def __init__(self, started: "Future[float] | tuple[torch.Event, torch.Event]", *, nbytes: int) -> None:
        self._started, self._nbytes, self._started_s = started, nbytes, time.perf_counter()

    def wait(self) -> Arrival:
        if isinstance(self._started, Future):
            seconds = self._started.result()
        else:
            first, last = self._started
            last.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        return Arrival(copied_bytes=self._nbytes, started_s=self._started_s, seconds=seconds)


class Copier:
    """Copies on a side stream where the device has streams; in the background of a CPU, in a thread of its own.

    Args:
        device: of the tensors that are not on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device=device) if device.type != "cpu" else None
        self._worker: ThreadPoolExecutor | None = None

    def run(self, pairs: Sequence[CopyPair]) -> int:
        """Copies, and waits for the end; returns the bytes copied."""
        if self._stream is None:
            copy_all(pairs)
        else:
            self._queue(pairs)
            self._stream.synchronize()
        return _nbytes(pairs)

    def start(self, pairs: Sequence[CopyPair]) -> BackgroundCopy:
        """Returns at once. Nobody may touch either side of a pair before `wait` of the result has returned."""
        if self._stream is None:
            # One thread for all times: every new one would bring its own pool of OpenMP threads along.
            self._worker = self._worker or ThreadPoolExecutor(max_workers=1, thread_name_prefix="onload")
            return BackgroundCopy(self._worker.submit(copy_all, pairs), nbytes=_nbytes(pairs))
        first, last = (torch.Event(self._stream.device, enable_timing=True) for _ in range(2))
        self._queue(pairs, first=first)
        last.record(self._stream)
        return BackgroundCopy((first, last), nbytes=_nbytes(pairs))

    def _queue(self, pairs: Sequence[CopyPair], *, first: torch.Event | None = None) -> None:
        """Behind what the device computes now; `first` is recorded when the copies begin."""
        assert self._stream is not None
        self._stream.wait_stream(torch.accelerator.current_stream())
        if first is not None:
            first.record(self._stream)
        with self._stream:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)


def copy_all(pairs: Sequence[CopyPair]) -> float:
    """Copies one after the other; returns the seconds that it took."""
    started_s = time.perf_counter()
    for destination, source in pairs:
        destination.copy_(source)
    return time.perf_counter() - started_s


def _nbytes(pairs: Sequence[CopyPair]) -> int:
    return sum(source.nbytes for _, source in pairs)
