"""What a policy loss sees (`LossInputs`) and what it divides by (`Counts`).

Shape legend: N trained tokens of all rows laid end to end, B rows (sequences).
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rlite.algorithms.rows import row_sum

LOGPROB_TOLERANCE = 1e-4
"""A log-probability may exceed 0 by rounding of `logit - logsumexp`, but not by more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The trained tokens of some rows. Only `logprobs_N` and `entropy_N` carry a gradient.

    Rows must be whole: a sequence-level ratio needs every token of its row. Raises ValueError when shapes disagree.
    """

    logprobs_N: Tensor
    """Log-probabilities under the weights being trained (live)."""
    advantages_N: Tensor
    row_N: Tensor
    """int64, which row each token belongs to: 0 <= row_N < B."""
    lengths_B: Tensor
    """int64, trained tokens of each row; 0 is allowed."""
    old_logprobs_N: Tensor | None = None
    """Trainer's log-probabilities before the first update on this rollout. None: on-policy, equal to the live ones."""
    rollout_logprobs_N: Tensor | None = None
    """Log-probabilities as the engine sampled them. NaN where it recorded none: taken as equal to the old ones."""
    ref_logprobs_N: Tensor | None = None
    """Log-probabilities under the frozen reference model."""
    entropy_N: Tensor | None = None
    """Entropy of the live distribution at each token, in nats."""
    group_tokens_B: Tensor | None = None
    """int64, trained tokens of the whole prompt group of each row (`group_token_counts`); only `prompt_mean_token_mean`
    needs it."""
    keep_B: Tensor | None = None
    """bool, rows that are trained on (`trainable_rows`); the others leave numerators and denominators. None: all."""

    def __post_init__(self) -> None:
        num_tokens, num_rows = len(self.row_N), len(self.lengths_B)
        for spec in fields(self):
            value = getattr(self, spec.name)
            expected = num_tokens if spec.name.endswith("_N") else num_rows
            if value is not None and value.shape != (expected,):
                raise ValueError(
                    f"LossInputs.{spec.name} has shape {tuple(value.shape)}, expected ({expected},): "
                    f"one value per trained token for *_N (like row_N), one per row for *_B (like lengths_B)"
                )

    def select_tokens(self, keep_N: Tensor) -> "LossInputs":
        """The tokens where `keep_N` (bool `[N]`) is true; lengths shrink, rows keep their numbers."""
        kept = {
            spec.name: getattr(self, spec.name)[keep_N]
            for spec in fields(self)
            if spec.name.endswith("_N") and getattr(self, spec.name) is not None
        }
        return replace(self, lengths_B=row_sum(keep_N.to(torch.int64), self.row_N, len(self.lengths_B)), **kept)

    def validate(self) -> None:
        """Raises ValueError naming row and token of the first value that cannot come from a healthy run.

        Reads values back from the device: call it once per rollout step on the recorded tensors, not in the hot loop. A
        live NaN is the strategy's business (it skips the step on all ranks).
        """
        counted = row_sum(torch.ones_like(self.row_N), self.row_N, len(self.lengths_B))
        if not torch.equal(counted, self.lengths_B):
            raise ValueError(f"LossInputs.lengths_B = {self.lengths_B.tolist()} but row_N counts {counted.tolist()}")
        for name in ("logprobs_N", "old_logprobs_N", "rollout_logprobs_N", "ref_logprobs_N"):
            value = getattr(self, name)
            if value is not None:
                may_be_nan = torch.isnan(value) & (name == "rollout_logprobs_N")
                self._reject(name, value, ~(torch.isfinite(value) & (value <= LOGPROB_TOLERANCE)) & ~may_be_nan)
        self._reject("advantages_N", self.advantages_N, ~torch.isfinite(self.advantages_N))

    def _reject(self, name: str, value_N: Tensor, bad_N: Tensor) -> None:
        if bad_N.any():
            index = int(bad_N.nonzero()[0, 0])
            row = int(self.row_N[index])
            token = int((self.row_N[:index] == row).sum())
            raise ValueError(
                f"LossInputs.{name}: {value_N[index].item()} at row {row}, trained token {token} "
                f"(and {int(bad_N.sum()) - 1} more); log-probabilities must be finite and <= 0, advantages finite. "
                f"-inf from the engine: the token was outside the sampled set, train without top_p, top_k and min_p."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Denominators of one optimizer step, global over micro-batches and data-parallel ranks.

    Additive: count the rows of each rank, sum `to_tensor()` over ranks once before the first micro-batch.
    """

    tokens: float
    sequences: float
    """Rows with at least one trained token."""
    prompts: float
    """Prompt groups with at least one trained token. A row adds `length / tokens of its group`, so that groups may be
    split over ranks or optimizer steps. 0 when `group_tokens_B` was not given."""
    weight_sum: float = 0.0
    """Sum of the train/infer correction weights, for `correction_normalize: batch`."""
    weight_count: float = 0.0

    @classmethod
    def of(cls, lengths_B: Tensor, group_tokens_B: Tensor | None = None, *, keep_B: Tensor | None = None) -> "Counts":
        """Counts of local rows: `lengths_B` and `group_tokens_B` int64 `[B]`, `keep_B` bool `[B]`."""
        lengths = lengths_B.cpu() if keep_B is None else torch.where(keep_B, lengths_B, 0).cpu()
        prompts = 0.0
        if group_tokens_B is not None:
            prompts = float((lengths.double() / group_tokens_B.cpu().clamp(min=1)).sum())
        return cls(tokens=float(lengths.sum()), sequences=float((lengths > 0).sum()), prompts=prompts)

    def to_tensor(self) -> Tensor:
        """fp64 `[5]` on the CPU, to be all-reduced with SUM over the data-parallel ranks (not over tp, cp or pp)."""
        return torch.tensor([getattr(self, spec.name) for spec in fields(self)], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, values: Tensor) -> "Counts":
        return cls(**dict(zip((spec.name for spec in fields(cls)), values.tolist(), strict=True)))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts.from_tensor(self.to_tensor() + other.to_tensor())


def group_token_counts(lengths_B: Tensor, group_B: Tensor, *, keep_B: Tensor | None = None) -> Tensor:
    """int64 `[B]`: trained tokens of each row's whole prompt group. Call it where the groups are complete."""
    lengths = lengths_B if keep_B is None else torch.where(keep_B, lengths_B, 0)
    groups, index = torch.unique(group_B, return_inverse=True)
    return row_sum(lengths, index, len(groups))[index]
