"""Seconds spent on each part of a rollout step."""

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by name until `drain()`."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    @contextmanager
    def timed(self, name: str) -> Generator[None, None, None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def drain(self) -> dict[str, float]:
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
