"""Memory faults in rollout step 1 of a run; a note on the exception says what the machine thinks then."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from rlite.memory.phases import OPTIMIZER


class BreakTransition(Callback):
    """The optimizer state does not arrive: its copy fails in the background of TRAIN."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            optimizer = trainer.strategy.phases.residents[OPTIMIZER]
            optimizer._pairs_from_host = lambda: [(_NoMemory(), torch.empty(1))]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        _tell(trainer, exception)


class KillEngine(Callback):
    """The engine dies while it generates."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.strategy.engine._generate = _dead_engine

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        _tell(trainer, exception)


class _NoMemory:
    def copy_(self, source: torch.Tensor) -> None:
        raise MemoryError("injected: no memory")


def _dead_engine(*_: Any) -> Any:
    raise RuntimeError("injected: the engine died")


def _tell(trainer: Any, exception: BaseException) -> None:
    phases = trainer.strategy.phases
    on_device = sorted(name for name, resident in phases.residents.items() if resident.on_device)
    exception.add_note(f"machine: {phases.describe()}; on device: {', '.join(on_device)}")
