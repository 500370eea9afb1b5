"""Weights for the difference between the policy that sampled (engine) and the one that trains: constants, `[N]`.

Shape legend: N trained tokens of all rows laid end to end, B rows. o is the trainer's old, m the engine's
log-probability; w = exp(o - m) of a token, W = exp(sum of o - m) of a row, g = exp(mean of o - m) of a row.

| mode              | weight                                   | known as                     |
|-------------------|------------------------------------------|------------------------------|
| token_truncate    | w clipped to [min, max]                  | TIS, max 2                   |
| token_mask        | w inside [min, max], else 0              | IcePop, MIS; 0.5 to 5        |
| sequence_truncate | W clipped to [min, max]                  | sequence TIS                 |
| sequence_mask     | W inside [min, max], else 0              | sequence MIS, max 3 (TRL)    |
| geo_mask_token    | w where g is inside [min, max], else 0   | seq-mask-tis, 0.999 to 1.002 |
| geo_mask          | 1 where g is inside [min, max], else 0   | Geo-RS                       |
| k3_rs             | 1 where mean(w - 1 - log w) <= max       | K3-RS                        |

Sequence ratios grow with length and reject long rows first; token and geometric modes do not.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlite.algorithms.inputs import LossInputs
from rlite.algorithms.kl import LOG_RATIO_BOUND
from rlite.algorithms.rows import row_mean, row_sum

CorrectionMode = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geo_mask_token",
    "geo_mask",
    "k3_rs",
]
CORRECTIONS: tuple[str, ...] = get_args(CorrectionMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights of the tokens and what was done to them."""

    weight_N: Tensor
    """0 where rejected."""
    rejected_N: Tensor
    """bool: weight set to 0 by a mask or a veto."""
    out_of_bounds_N: Tensor
    """bool: the ratio of this token (or of its row) was outside [min, max], clipped or rejected."""
    per_row: bool
    """The ratio is one per row."""


def mismatch_log_ratio(old_N: Tensor, rollout_N: Tensor) -> Tensor:
    """`[N]` o - m clamped to +-20, and 0 where the engine recorded nothing (NaN)."""
    difference_N = torch.where(torch.isnan(rollout_N), torch.zeros_like(old_N), old_N - rollout_N)
    return difference_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def correction_weights(
    inputs: LossInputs,
    mode: str,
    *,
    low: float | None = None,
    high: float | None = None,
    veto_ratio: float | None = None,
) -> Correction:
    """Weights from `old_logprobs_N` and `rollout_logprobs_N` (both needed); see the module's table. No gradient.

    `veto_ratio` rejects every row with a token whose w is below it.
    """
    assert inputs.old_logprobs_N is not None and inputs.rollout_logprobs_N is not None
    log_w_N = mismatch_log_ratio(inputs.old_logprobs_N.detach(), inputs.rollout_logprobs_N)
    ratio_N = _ratio(log_w_N, inputs, mode)
    low = float("-inf") if low is None else low
    high = float("inf") if high is None else high
    outside_N = (ratio_N < low) | (ratio_N > high)
    rejected_N = torch.zeros_like(outside_N) if mode == "none" or mode.endswith("truncate") else outside_N
    if veto_ratio is not None:
        vetoes_B = row_sum((log_w_N.exp() < veto_ratio).to(log_w_N.dtype), inputs.row_N, len(inputs.lengths_B))
        rejected_N = rejected_N | (vetoes_B > 0)[inputs.row_N]
    if mode.endswith("truncate"):
        weight_N = ratio_N.clamp(low, high)
    elif mode in ("none", "geo_mask", "k3_rs"):
        weight_N = torch.ones_like(ratio_N)
    else:
        weight_N = log_w_N.exp() if mode == "geo_mask_token" else ratio_N
    return Correction(
        weight_N=weight_N.masked_fill(rejected_N, 0.0),
        rejected_N=rejected_N,
        out_of_bounds_N=outside_N,
        per_row=not mode.startswith("token") and mode != "none",
    )


def _ratio(log_w_N: Tensor, inputs: LossInputs, mode: str) -> Tensor:
    """`[N]` the quantity that [low, high] bounds."""
    if mode == "none" or mode.startswith("token"):
        return log_w_N.exp()
    if mode.startswith("sequence"):
        total_B = row_sum(log_w_N, inputs.row_N, len(inputs.lengths_B)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return total_B.exp()[inputs.row_N]
    if mode.startswith("geo"):
        return row_mean(log_w_N, inputs.row_N, inputs.lengths_B).exp()[inputs.row_N]
    if mode == "k3_rs":
        return row_mean(log_w_N.exp() - 1.0 - log_w_N, inputs.row_N, inputs.lengths_B)[inputs.row_N]
    raise ValueError(f"model.algorithm.correction = {mode!r}: choose one of {', '.join(CORRECTIONS)}")


def weight_mass(correction: Correction, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """(sum of the weights, their number) over tokens, or rows for row-level ratios: additive over micro-batches."""
    if not correction.per_row:
        return correction.weight_N.sum(), torch.tensor(float(len(correction.weight_N)))
    row_weight_B = row_mean(correction.weight_N, inputs.row_N, inputs.lengths_B)
    return row_weight_B.sum(), (inputs.lengths_B > 0).sum()


def opsm_mask(inputs: LossInputs, delta: float) -> Tensor:
    """bool `[N]`, false for the rows that off-policy sequence masking drops (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    A row is dropped when its advantage is negative and mean_t(behaviour - live) > delta; behaviour is the engine's
    log-probability when there is one, else the old policy's. Depends on the live policy: recompute every micro-batch.
    """
    live_N = inputs.logprobs_N.detach()
    old_N = live_N if inputs.old_logprobs_N is None else inputs.old_logprobs_N
    behaviour_N = old_N
    if inputs.rollout_logprobs_N is not None:
        behaviour_N = torch.where(torch.isnan(inputs.rollout_logprobs_N), old_N, inputs.rollout_logprobs_N)
    drift_B = row_mean(behaviour_N - live_N, inputs.row_N, inputs.lengths_B)
    return ~((inputs.advantages_N < 0) & (drift_B > delta)[inputs.row_N])
