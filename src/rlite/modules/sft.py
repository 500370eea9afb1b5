"""Supervised fine-tuning through the same strategy: reinforcement learning needs a policy that sometimes succeeds."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from rlite.algorithms import summarize_metrics
from rlite.memory import Phase
from rlite.modules.base import PolicyModule
from rlite.types import LossOutput, TokenRow, TokenScores


class SFTModule(PolicyModule):
    """Next-token loss on completions, the mean over all completion tokens of the global batch.

    Args are those of `PolicyModule`. Batches are lists of `TokenRow` (`SFTDataModule`).
    """

    @override
    def on_train_start(self) -> None:
        self.strategy.enter(Phase.TRAIN)

    @override
    def training_step(self, batch: Sequence[TokenRow], batch_idx: int) -> None:
        rows = list(batch)
        num_tokens = sum(self.strategy.gather_data_parallel(sum(row.num_loss_tokens for row in rows)))

        def loss_fn(indices: Sequence[int], scores: TokenScores) -> LossOutput:
            loss = -scores.logprobs.sum() / num_tokens
            sums = {"sum:loss": loss.detach(), "sum:entropy": scores.entropy.detach().sum() / num_tokens}
            return LossOutput(loss=loss, metric_sums=sums)

        with self.strategy.stopwatch.timed("update"):
            result = self.strategy.update(rows, loss_fn, temperature=1.0)
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.step_schedules()
        values = {**summarize_metrics(result.metric_sums), "grad_norm": result.grad_norm, "lr": lr}
        values |= self.strategy.drain_metrics() | {"rollout_step": float(batch_idx)}
        self.log_values(values, batch_size=len(rows))

    @override
    def validation_step(self, batch: Sequence[TokenRow], batch_idx: int) -> None:
        scores = self.strategy.score(list(batch), temperature=1.0)
        sums = torch.tensor([sum(-s.logprobs.sum() for s in scores), sum(len(s.logprobs) for s in scores)])
        total: Tensor = sum(self.strategy.gather_data_parallel(sums))
        self.log("val/loss", total[0] / total[1], batch_size=len(batch), on_epoch=True)
