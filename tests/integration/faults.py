"""Things that go wrong in the second rollout step of a run, named in a config by their dotted paths."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from rlite.megatron.shard_files import ShardFiles
from rlite.strategies import pending

_calls = 0


def length_and_sigterm(completion_ids: list[list[int]]) -> list[float]:
    """A reward; the second call asks the process to stop."""
    global _calls
    _calls += 1
    if _calls == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return [-float(len(ids)) for ids in completion_ids]


class Signal(Callback):
    """Sends a signal to rank `rank` in a rollout step: while generating, updating, writing (maybe in the background), or when
    all is written and the checkpoint gets its name (`save`)."""

    def __init__(self, where: str, rank: int = 0, step: int = 1, signum: int = int(signal.SIGTERM)) -> None:
        self.where, self.rank, self.step, self.signum = where, rank, step, signum

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        put_in_place, write = pending.put_in_place, ShardFiles.write

        def killed_at_the_end(new: Path, path: Path) -> None:
            self._send(trainer, "save", phase="train")
            put_in_place(new, path)

        def killed(files: ShardFiles) -> Any:
            self._send(trainer, "write", phase=trainer.strategy.phases.phase)
            return write(files)

        pending.put_in_place, ShardFiles.write = killed_at_the_end, killed

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = batch_idx
        self._send(trainer, "generate", phase="generate")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._send(trainer, "update", phase="train")

    def _send(self, trainer: Any, where: str, *, phase: str) -> None:
        if self._step == self.step and self.where == where and trainer.global_rank == self.rank:
            assert trainer.strategy.phases.phase == phase
            os.kill(os.getpid(), self.signum)


class FullDisk(Callback):
    """From rollout step `step` on, rank `rank` cannot write files of more than `limit_bytes`."""

    def __init__(self, rank: int, step: int, limit_bytes: int) -> None:
        self.rank, self.step, self.limit_bytes = rank, step, limit_bytes

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            trainer.strategy.saver.finish()  # the save before is not to fail
        if batch_idx == self.step and trainer.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit_bytes, self.limit_bytes))


def raising(completions: list[str]) -> list[float]:
    return [1 / 0 for _ in completions]


def nan(completions: list[str]) -> list[float]:
    return [float("nan") for _ in completions]
