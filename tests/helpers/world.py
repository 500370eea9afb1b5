"""Real gloo worlds for tests: the parent has imported torch once, every rank is a fork of it (about 0.3 s a world)."""

import datetime
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_GRACE_S = 5.0
"""How long the other ranks may go on after one has failed: enough for them to report why they stopped."""


def run_world(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Runs `fn(*args)` on `world_size` processes joined by gloo and returns the results by rank (pickled).

    Raises AssertionError with the traceback of the rank that failed first, or with the ranks that were still running
    after `timeout_s`. No process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        pids = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(Path(folder), rank, world_size, timeout_s, fn, args)
            pids[pid] = rank
        killed = _wait(pids, timeout_s)
        reports = [_read_report(Path(folder) / str(rank)) for rank in range(world_size)]
    failures = sorted((report["time"], rank, report["error"]) for rank, report in enumerate(reports) if report["error"])
    if failures:
        _, rank, error = failures[0]
        raise AssertionError(f"rank {rank} of {world_size} failed first:\n{error}")
    if killed:
        raise AssertionError(f"ranks {sorted(killed)} of {world_size} did not end within {timeout_s} s (or died)")
    return [report["result"] for report in reports]


def _child(folder: Path, rank: int, world_size: int, timeout_s: float, fn: Callable, args: tuple) -> NoReturn:
    report: dict[str, Any] = {"result": None, "error": "", "time": 0.0}
    gc.freeze()  # what the parent imported is never garbage: looking through it takes 0.3 s, and engines look often
    try:
        torch.set_num_threads(1)
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        store = dist.FileStore(str(folder / "store"), world_size)
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        report["result"] = fn(*args)
        dist.barrier()
    except BaseException:
        report["error"] = traceback.format_exc()
    report["time"] = time.monotonic()
    partial = folder / f"{rank}.partial"
    partial.write_bytes(pickle.dumps(report))
    partial.rename(folder / str(rank))
    # Not sys.exit: the fork must run none of the parent's exit handlers (pytest's among them).
    os._exit(bool(report["error"]))


def _wait(pids: dict[int, int], timeout_s: float) -> set[int]:
    """Waits for all children; returns the ranks that had to be killed or died without a report."""
    deadline, running, lost = time.monotonic() + timeout_s, dict(pids), set()
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = running.pop(pid)
                if status != 0:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                if os.WIFSIGNALED(status):
                    lost.add(rank)
        if running and time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return lost


def _read_report(path: Path) -> dict[str, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else {"result": None, "error": "", "time": 0.0}
