"""Every preset in turn, in one run: building an engine for each would take most of the time."""

from typing import Any

from lightning.pytorch.callbacks import Callback

from rlite import GRPOModule
from rlite.algorithms import PRESETS

STEPS = 2
"""Rollout steps of each preset."""


class EveryPreset(Callback):
    """From rollout step `STEPS * n` on the module is what `GRPOModule` makes of preset number n."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        preset = list(PRESETS)[batch_idx // STEPS]
        other = GRPOModule(policy=pl_module.policy, algorithm=preset, batch=pl_module.batch, rewards=["exact_match"])
        for part in ("algorithm", "coefficients", "objective"):
            setattr(pl_module, part, getattr(other, part))
