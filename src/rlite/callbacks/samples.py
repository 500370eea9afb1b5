"""`SampleLog`: every completion of every rollout step, in a file that people and programs can read."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from rlite.strategies.colocated import colocated
from rlite.types import Rollout, RolloutBatch


class SampleLog(Callback):
    """Appends to `samples.jsonl` in the run directory, and shows a best and a worst completion now and then.

    A line holds: rollout_step, uid, sample, prompt, completion, finish_reason, num_tokens, rewards, reward, advantage,
    logprob_diff.

    Args:
        show_every_n_rollouts: how often the console shows the best and the worst; 0 never.
        save_every_n_rollouts: how often a step's completions are written; 0 never.
    """

    def __init__(self, *, show_every_n_rollouts: int = 10, save_every_n_rollouts: int = 1) -> None:
        self.show_every_n_rollouts = show_every_n_rollouts
        self.save_every_n_rollouts = save_every_n_rollouts
        self._begun: set[Path] = set()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        self._record(trainer, batch, batch_idx, "samples.jsonl")

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int, *_: Any
    ) -> None:
        step = trainer.fit_loop.epoch_loop.batch_idx if trainer.state.fn == "fit" else 0
        self._record(trainer, batch, step, "val_samples.jsonl", show=False)

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int, *_: Any
    ) -> None:
        self._record(trainer, batch, batch_idx, "predictions.jsonl", show=False)

    def _record(self, trainer: Trainer, batch: Any, step: int, filename: str, *, show: bool = True) -> None:
        if not isinstance(batch, RolloutBatch):
            return
        save = self.save_every_n_rollouts and step % self.save_every_n_rollouts == 0
        show = show and bool(self.show_every_n_rollouts) and (step + 1) % self.show_every_n_rollouts == 0
        if not (save or show):
            return
        log_dir = trainer.log_dir or trainer.default_root_dir  # a collective: every rank asks
        everyone = colocated(trainer).gather_data_parallel(batch.rollouts)
        if not trainer.is_global_zero:
            return
        rollouts = [rollout for rank in everyone for rollout in rank]
        if save:
            path = Path(log_dir) / filename
            path.parent.mkdir(parents=True, exist_ok=True)
            if trainer.state.fn == "fit" and path not in self._begun and path.exists():
                _keep_lines_before(path, step)
            self._begun.add(path)
            with path.open("a") as file:
                file.writelines(json.dumps(_line(rollout, step), ensure_ascii=False) + "\n" for rollout in rollouts)
        if show and rollouts:
            _show(rollouts, step)


def _keep_lines_before(path: Path, step: int) -> None:
    """A run that resumes does some steps again: their old lines go, and one that was cut when the run was killed."""
    kept = path.with_name(f".{path.name}.partial")
    with path.open() as old, kept.open("w") as new:  # not `splitlines`: it breaks at U+2028 too, which texts may hold
        new.writelines(line for line in old if line.endswith("\n") and json.loads(line)["rollout_step"] < step)
    kept.replace(path)


def _line(rollout: Rollout, step: int) -> dict[str, Any]:
    completion = rollout.completion
    return {
        "rollout_step": step,
        "uid": rollout.prompt.uid,
        "sample": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.token_ids),
        "rewards": rollout.rewards,
        "reward": rollout.reward if rollout.reward == rollout.reward else None,
        "advantage": rollout.advantage,
        "logprob_diff": rollout.logprob_diff,
    }


def _show(rollouts: list[Rollout], step: int) -> None:
    scored = [rollout for rollout in rollouts if rollout.reward == rollout.reward]
    if not scored:
        return
    table = Table(title=f"rollout {step}: best and worst completion", title_justify="left", show_lines=True)
    for header in ("", "reward", "prompt", "completion"):
        table.add_column(header, overflow="fold", max_width=60)
    best, worst = max(scored, key=lambda r: r.reward), min(scored, key=lambda r: r.reward)
    for name, rollout in (("best", best), ("worst", worst)):
        table.add_row(name, f"{rollout.reward:.3f}", _clip(rollout.prompt.text), _clip(rollout.completion.text))
    Console().print(table, markup=False)


def _clip(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
