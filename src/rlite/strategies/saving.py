"""`CheckpointSaver`: one save at a time, in the background if asked; links and removals wait until it is complete."""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlite.messages import announce
from rlite.strategies.checkpoint import RunCheckpoint
from rlite.strategies.pending import PendingSave

if TYPE_CHECKING:
    from rlite.megatron.shard_files import ShardFiles


class CheckpointSaver:
    """One on each rank; every rank calls the same methods in the same order."""

    def __init__(self) -> None:
        self._in_background = False
        self._pending: PendingSave | None = None

    @contextmanager
    def background(self) -> Generator[None, None, None]:
        """Saves in this context return as soon as everything is copied; `finish` completes them."""
        self._in_background = True
        try:
            yield
        finally:
            self._in_background = False

    def save(
        self, checkpoint: RunCheckpoint, trainer_state: dict[str, Any], plan: Callable[[Path], Iterable["ShardFiles"]]
    ) -> None:
        """Writes a checkpoint, after the one before is complete.

        Args:
            checkpoint: where to.
            trainer_state: Lightning's part.
            plan: yields the sharded parts, to be written into the given directory; each may go when the next is asked for.

        Raises:
            CheckpointError: it, or the one before, could not be written. On every rank.
        """
        self.finish()
        pending = checkpoint.begin_save(trainer_state, asynchronous=self._in_background)
        for files in plan(pending.partial):
            pending.add(files)
        pending.start()
        self._pending = pending
        if not self._in_background:
            self.finish()

    def finish(self, *, wait: bool = True) -> None:
        """Completes the save that is being written in the background, if one is.

        Args:
            wait: for the files of every rank; otherwise does nothing as long as one is still writing.

        Raises:
            CheckpointError: it could not be written. On every rank.
        """
        pending = self._pending
        if pending is not None and (wait or pending.is_written()):
            self._pending = None
            pending.commit()

    def finish_after_error(self, *, wait_s: float = 60.0) -> None:
        """The same when other ranks may be gone: without collectives, and without an error of its own."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.commit_alone(wait_s=wait_s):
            announce(f"checkpoint {pending.path} was still being written when the run failed: it is not complete")

    def remove(self, path: str) -> None:
        """Removes a checkpoint, once the pending save is complete."""
        self._when_saved(RunCheckpoint(path).remove)

    def link(self, path: str, target: str) -> None:
        """Makes `path` a link to the checkpoint `target`, once that is complete."""
        if os.path.abspath(target) != os.path.abspath(path):
            self._when_saved(lambda: RunCheckpoint(path).link_to(Path(target)))

    def _when_saved(self, action: Callable[[], None]) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if self._pending is not None:
            self._pending.then.append(action)
        else:
            action()
