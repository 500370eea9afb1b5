"""`HealthWarnings`: says in one line what looks wrong in a run, and what to do about it."""

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm
from typing_extensions import override

from rlite.algorithms.health import HealthMonitor


class HealthWarnings(Callback):
    """Reads the logged metrics after each rollout step and prints a warning with its remedy (`rlite.algorithms.health`).

    Entropy collapse, an engine that samples from another policy than the one trained, groups without a difference in
    reward, clipping, truncation, skipped updates.

    Args:
        every_n_steps: a warning that stays true is repeated after so many rollout steps.
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"HealthWarnings.every_n_steps = {every_n_steps}: must be at least 1")
        self.every_n_steps = every_n_steps
        self._monitor = HealthMonitor()
        self._last_step: dict[str, int] = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for finding in self._monitor.check(metrics):
            last = self._last_step.get(finding.name)
            if last is not None and batch_idx - last < self.every_n_steps:
                continue
            self._last_step[finding.name] = batch_idx
            if trainer.is_global_zero:
                tqdm.write(f"warning, rollout {batch_idx + 1}: {finding.text}", file=sys.stdout)
                sys.stdout.flush()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"peak_entropy": self._monitor.peak_entropy, "last_step": dict(self._last_step)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._monitor.peak_entropy = state_dict["peak_entropy"]
        self._last_step = dict(state_dict["last_step"])
