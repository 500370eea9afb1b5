"""A limit on how long a call may take."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimitReached(BaseException):
    """Derives from BaseException so that an `except Exception` inside the limited call does not swallow it."""


@contextmanager
def time_limit(timeout_s: float | None) -> Iterator[None]:
    """Raises TimeLimitReached inside the block when it runs longer than `timeout_s` seconds.

    Uses SIGALRM: it interrupts Python code, sleeps, sockets and regular expressions where a watching thread could not,
    but only in the main thread. In another thread, and with None, there is no limit. Code in the block that sets an
    alarm of its own replaces this one.
    """
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise TimeLimitReached(f"took longer than {timeout_s:g} s")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
