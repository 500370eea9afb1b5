"""`PendingSave`: a checkpoint on its way to the disk. It gets its name only when the files of every rank are there."""

import io
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlite.files import write_durably

if TYPE_CHECKING:
    from rlite.megatron.shard_files import ShardFiles

_POLL_S = 0.05


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. What was saved before is as it was."""


class PendingSave:
    """One on each rank. The constructor, `is_written` and `commit` are collective.

    Args:
        path: of the finished checkpoint.
        trainer_state: Lightning's part; rank 0 writes it now.
        facts: contents of the marker.
        asynchronous: the files are written by a thread, from copies; otherwise in `add`, by the caller.

    Raises:
        CheckpointError: the directory or `trainer.pt` could not be written. On every rank.
    """

    def __init__(
        self, path: Path, trainer_state: Mapping[str, Any], *, facts: Mapping[str, Any], asynchronous: bool
    ) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        self.facts, self.asynchronous = facts, asynchronous
        self.then: list[Callable[[], None]] = []
        """What rank 0 does with other files once this checkpoint is complete: links, removals."""
        self._files: list[ShardFiles] = []
        self._written: list[Any] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._agree(self._on_rank_0(lambda: self._prepare(trainer_state)))

    def _prepare(self, trainer_state: Mapping[str, Any]) -> None:
        if (self.partial / "COMPLETE").is_file():
            put_in_place(self.partial, self.path)  # an earlier save was killed just before
        folder = self.path.parent
        for left in (self.partial, *folder.glob(".*.ckpt.partial"), *folder.glob(".*.ckpt.old")):
            if left.is_dir() and not (left / "COMPLETE").is_file():
                shutil.rmtree(left)
        self.partial.mkdir(parents=True)
        buffer = io.BytesIO()  # into a file torch would report a full disk as "iostream error"
        torch.save(dict(trainer_state), buffer)
        write_durably(self.partial / "trainer.pt", buffer.getbuffer())

    # -- writing -----------------------------------------------------------------------------------------------------

    def add(self, files: "ShardFiles") -> None:
        """Takes over a part. When this returns, the tensors that it is made of may change or go."""
        self._files.append(files)
        if self.asynchronous:
            files.copy_to_host()
        else:
            self._try(lambda: self._written.append(files.write()))

    def start(self) -> None:
        """After the last part: an asynchronous save begins to write."""
        if self.asynchronous:
            self._thread = threading.Thread(target=self._try, args=(self._write,), name="rlite-checkpoint", daemon=True)
            self._thread.start()
        else:
            self._try(self._record)

    def _write(self) -> None:
        for files in self._files:
            self._written.append(files.write())
        self._record()

    def _record(self) -> None:
        """What rank 0 has to know of these files. A file and no message: rank 0 must get it when others are gone too."""
        record = self._record_of(dist.get_rank())
        unfinished = record.with_suffix(".unfinished")
        write_durably(unfinished, pickle.dumps(self._written))
        unfinished.rename(record)

    def _record_of(self, rank: int) -> Path:
        return self.partial / f"rank-{rank}.written"

    def _try(self, action: Callable[[], None]) -> None:
        if self._error is None:
            try:
                action()
            except Exception as error:  # raised by `commit`, on every rank
                self._error = error

    # -- completing --------------------------------------------------------------------------------------------------

    def is_written(self) -> bool:
        """Whether every rank has done its part, or failed to. Does not wait for any."""
        is_busy = self._thread is not None and self._thread.is_alive()
        flags: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(flags, is_busy)
        return not any(flags)

    def commit(self) -> None:
        """Waits for the files of every rank, then gives the checkpoint its name and does what was left for `then`.

        Raises:
            CheckpointError: a rank could not write. On every rank; the unfinished directory is removed.
        """
        self._join()
        self._agree(self._error)
        self._agree(self._on_rank_0(self._complete))
        self._agree(
            self._on_rank_0(self._follow_up), outcome="was written, but not linked, or an older one not removed"
        )

    def commit_alone(self, *, wait_s: float) -> bool:
        """The same after an error, when other ranks may be gone; every rank calls it and rank 0 waits for their files.

        Returns false when the checkpoint was not completed: a rank failed, or did not finish within `wait_s` of this one.
        """
        self._join()
        if dist.get_rank() != 0:
            return self._error is None
        deadline = time.monotonic() + wait_s
        records = [self._record_of(rank) for rank in range(dist.get_world_size())]
        while self._error is None and not all(record.exists() for record in records):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        self._try(self._complete)
        self._try(self._follow_up)
        return self._error is None

    def _complete(self) -> None:
        by_rank = [pickle.loads(self._record_of(rank).read_bytes()) for rank in range(dist.get_world_size())]
        for index, files in enumerate(self._files):
            files.finish([written[index] for written in by_rank])
        for rank in range(len(by_rank)):
            self._record_of(rank).unlink()
        for file in self.partial.rglob("*"):
            _sync(file)
        write_durably(self.partial / "COMPLETE", json.dumps(dict(self.facts)).encode())
        _sync(self.partial)
        put_in_place(self.partial, self.path)
        _sync(self.path.parent)

    def _follow_up(self) -> None:
        for action in self.then:
            action()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _on_rank_0(self, action: Callable[[], None]) -> Exception | None:
        if dist.get_rank() == 0:
            self._try(action)
        return self._error

    def _agree(self, error: Exception | None, *, outcome: str = "was not written") -> None:
        """Raises on every rank when one has an error."""
        faults: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, None if error is None else f"{type(error).__name__}: {error}")
        first = next((rank for rank, fault in enumerate(faults) if fault is not None), None)
        if first is None:
            return
        if dist.get_rank() == 0:
            shutil.rmtree(self.partial, ignore_errors=True)  # a full disk gets its room back
        raise CheckpointError(
            f"checkpoint {self.path} {outcome}. Rank {first}: {faults[first]}. What was complete before is untouched"
        ) from error


def put_in_place(new: Path, path: Path) -> None:
    """Gives `new` the name `path`; at every moment what was there before, or `new`, is whole on the disk."""
    old = path.with_name(f".{path.name}.old")
    remove_directory(old)
    if new.is_symlink() and (path.is_symlink() or not path.exists()):
        new.replace(path)
        return
    if path.is_symlink():
        path.unlink()  # `last.ckpt` as a link: what it points to stays
    elif path.exists():
        path.rename(old)
    new.rename(path)
    remove_directory(old)


def remove_directory(directory: Path) -> None:
    """The marker goes first: a directory that is half removed must not be taken for a checkpoint. Then its name: the next
    save clears away what is left under a hidden one."""
    (directory / "COMPLETE").unlink(missing_ok=True)
    if directory.is_dir() and not directory.name.startswith("."):
        hidden = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        directory = directory.rename(hidden)
    shutil.rmtree(directory, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
