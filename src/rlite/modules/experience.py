"""`Experience`: the rollouts of one step on this data-parallel rank, as the loss will see them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlite.algorithms import LossInputs
from rlite.types import Rollout, TokenRow, TokenScores


@dataclass(slots=True, kw_only=True)
class Experience:
    """Rows with everything about them that does not change while they are trained on.

    Lists have one entry for each row; their tensors are fp32 `[tokens of the row]`.
    """

    rows: list[TokenRow]
    lengths_B: Tensor
    """int64, completion tokens."""
    rollout_logprobs: list[Tensor]
    """As the engine sampled them."""
    logprob_diff_B: Tensor
    """fp32, mean |trainer - engine| log-probability of each row; filled where losses are computed."""
    old_logprobs: list[Tensor] | None = None
    """The trainer's, before the first update; None when there is only one and it is on-policy."""
    ref_logprobs: list[Tensor] | None = None
    advantages: list[Tensor] = field(default_factory=list)
    keep_B: Tensor | None = None
    """bool, rows that are trained on."""
    group_tokens_B: Tensor | None = None
    """int64, kept completion tokens of the row's whole group."""

    entropy_threshold: float | None = None
    """Only tokens with at least this entropy are trained on (`entropy_top_fraction`)."""

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> "Experience":
        return cls(
            rows=[TokenRow.from_rollout(rollout) for rollout in rollouts],
            lengths_B=torch.tensor([len(r.completion.token_ids) for r in rollouts], dtype=torch.int64),
            logprob_diff_B=torch.zeros(len(rollouts)),
            rollout_logprobs=[torch.tensor(r.completion.logprobs, dtype=torch.float32) for r in rollouts],
        )

    def logprob_problem(self) -> ValueError | None:
        """Names row and token of a recorded log-probability that no healthy run gives."""
        placeholder = replace(self, advantages=[torch.zeros_like(values) for values in self.rollout_logprobs])
        try:
            placeholder.loss_inputs(range(len(self.rows))).validate()
        except ValueError as error:
            return error
        return None

    def loss_inputs(self, indices: Sequence[int], scores: TokenScores | None = None) -> LossInputs:
        """The rows `indices`, in that order, with their live scores; without scores, the recorded ones take their place."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        live = (
            scores.logprobs if scores is not None else self._flat(self.old_logprobs or self.rollout_logprobs, indices)
        )
        device, lengths_B = live.device, self.lengths_B[chosen].to(live.device)

        def per_token(parts: list[Tensor] | None) -> Tensor | None:
            return None if parts is None else self._flat(parts, indices).to(device)

        return LossInputs(
            logprobs_N=live,
            entropy_N=scores.entropy if scores is not None else None,
            advantages_N=per_token(self.advantages),
            old_logprobs_N=per_token(self.old_logprobs),
            rollout_logprobs_N=per_token(self.rollout_logprobs),
            ref_logprobs_N=per_token(self.ref_logprobs),
            row_N=torch.repeat_interleave(torch.arange(len(indices), device=device), lengths_B),
            lengths_B=lengths_B,
            group_tokens_B=None if self.group_tokens_B is None else self.group_tokens_B[chosen].to(device),
            keep_B=None if self.keep_B is None else self.keep_B[chosen].to(device),
        )

    def engine_differences(self, indices: Sequence[int], live_N: Tensor) -> list[Tensor]:
        """|trainer - engine| log-probabilities of the rows `indices`, on the CPU: the recorded ones of the trainer, or where
        only the live ones are known (one update, or `old_policy` = rollout) those."""
        if self.old_logprobs is not None:
            trainer = [self.old_logprobs[i].cpu() for i in indices]
        else:
            trainer = list(live_N.detach().cpu().split([int(self.lengths_B[i]) for i in indices]))
        return [(mine - self.rollout_logprobs[i]).abs() for mine, i in zip(trainer, indices, strict=True)]

    @staticmethod
    def _flat(parts: list[Tensor], indices: Sequence[int]) -> Tensor:
        return torch.cat([torch.empty(0), *(parts[i].cpu() for i in indices)])
