"""Things that go wrong in the second rollout step of a run, named in a config by their dotted paths."""

import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from rlite.strategies.checkpoint import RunCheckpoint

_calls = 0


def length_and_sigterm(completion_ids: list[list[int]]) -> list[float]:
    """A reward; the second call asks the process to stop."""
    global _calls
    _calls += 1
    if _calls == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return [-float(len(ids)) for ids in completion_ids]


class Signal(Callback):
    """Sends a signal to rank `rank` in a rollout step: while generating, updating or saving."""

    def __init__(self, where: str, rank: int = 0, step: int = 1, signum: int = int(signal.SIGTERM)) -> None:
        self.where, self.rank, self.step, self.signum = where, rank, step, signum

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.where == "save":
            replace = RunCheckpoint._replace

            def killed(checkpoint: RunCheckpoint, partial: Path) -> None:
                self._send(trainer, "save", phase="train")
                replace(checkpoint, partial)

            RunCheckpoint._replace = killed

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = batch_idx
        self._send(trainer, "generate", phase="generate")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._send(trainer, "update", phase="train")

    def _send(self, trainer: Any, where: str, *, phase: str) -> None:
        if self._step == self.step and self.where == where and trainer.global_rank == self.rank:
            assert trainer.strategy.phases.phase == phase
            os.kill(os.getpid(), self.signum)


def raising(completions: list[str]) -> list[float]:
    return [1 / 0 for _ in completions]


def nan(completions: list[str]) -> list[float]:
    return [float("nan") for _ in completions]
