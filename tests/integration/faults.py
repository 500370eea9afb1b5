"""Things that go wrong in the second rollout step of a run, named in a config by their dotted paths."""

import os
import signal
from typing import Any

from lightning.pytorch.callbacks import Callback

_calls = 0


def length_and_sigterm(completion_ids: list[list[int]]) -> list[float]:
    """A reward; the second call asks the process to stop."""
    global _calls
    _calls += 1
    if _calls == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return [-float(len(ids)) for ids in completion_ids]


class Signal(Callback):
    """Sends SIGTERM to rank `rank` in rollout step 1, while generating or while updating."""

    def __init__(self, where: str, rank: int = 0) -> None:
        self.where, self.rank = where, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = batch_idx
        self._send(trainer, "generate", phase="generate")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._send(trainer, "update", phase="train")

    def _send(self, trainer: Any, where: str, *, phase: str) -> None:
        if self._step == 1 and self.where == where and trainer.global_rank == self.rank:
            assert trainer.strategy.phases.phase == phase
            os.kill(os.getpid(), signal.SIGTERM)


def raising(completions: list[str]) -> list[float]:
    return [1 / 0 for _ in completions]


def nan(completions: list[str]) -> list[float]:
    return [float("nan") for _ in completions]
