"""`ConsoleProgress`: a bar over rollout steps and one tidy line for each."""

import math
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.progress import ProgressBar
from tqdm import tqdm
from typing_extensions import override

_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("±", "reward/std", "{:.2f}"),
    ("loss", "loss", "{:.4f}"),
    ("len", "completions/mean_length", "{:.1f}"),
    ("kl", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("clip", "clip_ratio/region_mean", "{:.3f}"),
    ("Δlogp", "rollout/logprob_diff_max", "{:.0e}"),
    ("grad", "grad_norm", "{:.2f}"),
)
_TIMES = (
    ("gen", "generate"),
    ("logp", "logprob"),
    ("critic", "critic"),
    ("upd", "update"),
    ("sync", "sync"),
    ("move", "offload"),
)


class ConsoleProgress(ProgressBar):
    """One line a rollout step: reward, length, KL, entropy, clipping, trainer/engine difference, seconds a phase, tokens/s.

    The bar appears only on a terminal; the lines go to any output.

    Args:
        every_n_steps: print every n-th line.
    """

    def __init__(self, *, every_n_steps: int = 1) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"ConsoleProgress.every_n_steps = {every_n_steps}: must be at least 1")
        self.every_n_steps = every_n_steps
        self._bar: tqdm | None = None
        self._enabled = True

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @property
    def _active(self) -> bool:
        return self._enabled and self.trainer.is_global_zero

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            total = int(trainer.num_training_batches) if math.isfinite(trainer.num_training_batches) else None
            self._bar = tqdm(total=total, unit="step", disable=not sys.stderr.isatty(), leave=False)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._bar is not None:
            self._bar.n = batch_idx
            self._bar.refresh()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._active or (batch_idx + 1) % self.every_n_steps:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        total = f"/{int(trainer.num_training_batches)}" if math.isfinite(trainer.num_training_batches) else ""
        parts = [f"{batch_idx + 1:>4}{total}"]
        parts += [f"{label} {style.format(metrics[key])}" for label, key, style in _COLUMNS if key in metrics]
        times = [f"{label} {metrics[f'timing_s/{key}']:.2f}" for label, key in _TIMES if metrics.get(f"timing_s/{key}")]
        if times:
            parts.append(
                " ".join(times) + (f" of {metrics['timing_s/step']:.2f}s" if "timing_s/step" in metrics else "s")
            )
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{metrics['perf/tokens_per_s']:.0f} tok/s")
        self._print("  ".join(parts))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        if self._active and values:
            self._print("  val   " + "  ".join(f"{name} {value:.4f}" for name, value in sorted(values.items())))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, line: str) -> None:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
