"""`GracefulPreemption`: SIGTERM or SIGUSR1 stops the run at the next rollout boundary, saved, with exit code 143."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rlite.callbacks.checkpoint import RolloutCheckpoint
from rlite.messages import announce

EXIT_CODE = 128 + signal.SIGTERM


class GracefulPreemption(Callback):
    """Ends a run cleanly when the scheduler takes its devices away.

    The handler only sets a flag; ranks agree on it at the end of the rollout step, save, and stop. A rank that sits in a
    collective never runs Python's handler, so a watcher thread, woken through the signal wake-up pipe, exits the process
    after the grace period.

    Args:
        grace_s: how long the current rollout step may take to finish after the signal.
    """

    def __init__(self, *, grace_s: float = 300.0) -> None:
        self.grace_s = grace_s
        self.requested = False
        self.stopped = False
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup_fd = -1
        self._write_fd: int | None = None
        self._finished = threading.Event()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.requested = self.stopped = False
        self._finished = threading.Event()
        read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # In the place of Lightning's, which it installs before this hook: under SLURM that one would save within the handler.
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            self._old_handlers[signum] = signal.signal(signum, self._handle)
        threading.Thread(
            target=self._watch, args=(read_fd, self._finished), name="rlite-preemption", daemon=True
        ).start()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True

    def _watch(self, read_fd: int, finished: threading.Event) -> None:
        try:
            while data := os.read(read_fd, 1):
                if data[0] in (signal.SIGTERM, signal.SIGUSR1):
                    self.requested = True
                    if not finished.wait(self.grace_s):
                        os._exit(EXIT_CODE)
                    return
        finally:
            os.close(read_fd)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        flag = torch.tensor(float(self.requested), device=trainer.strategy.root_device)
        if float(trainer.strategy.reduce(flag, reduce_op="sum")) == 0:
            return
        announce(f"preempted: saving after rollout step {batch_idx} and stopping")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, RolloutCheckpoint):
                callback.save(trainer)
        self.stopped = True
        trainer.should_stop = True

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        self._old_handlers.clear()
        if self._write_fd is not None:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            self._finished.set()
            os.close(self._write_fd)  # the watcher reads the end
            self._write_fd = None
