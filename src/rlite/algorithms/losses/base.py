"""What a policy loss returns, and the log-ratio all of them start from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlite.algorithms.inputs import LossInputs
from rlite.algorithms.kl import LOG_RATIO_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token losses to be minimised, before corrections and aggregation. `[N]` each."""

    loss_N: Tensor
    clipped_low_N: Tensor
    """bool: ratio below its range with a negative advantage, so the token has no gradient."""
    clipped_high_N: Tensor
    """bool: ratio above its range with a positive advantage."""
    dual_clipped_N: Tensor
    """bool: ratio above `dual_clip` with a negative advantage."""
    per_row: bool = False
    """The ratio is one per row, so clip fractions count rows, not tokens."""


def raw_log_ratio(inputs: LossInputs) -> Tensor:
    """`[N]` log(live / old), not clamped. `old_logprobs_N` None means on-policy: exactly 0, with the live gradient."""
    old_N = inputs.logprobs_N if inputs.old_logprobs_N is None else inputs.old_logprobs_N
    return inputs.logprobs_N - old_N.detach()


def log_ratio(inputs: LossInputs) -> Tensor:
    """`[N]` log(live / old) clamped to +-20; the gradient is 0 beyond."""
    return raw_log_ratio(inputs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def unclipped(loss_N: Tensor) -> PolicyLoss:
    """For losses without a clip."""
    never_N = torch.zeros_like(loss_N, dtype=torch.bool)
    return PolicyLoss(loss_N=loss_N, clipped_low_N=never_N, clipped_high_N=never_N, dual_clipped_N=never_N)


def clipped_surrogate(
    log_ratio_N: Tensor,
    raw_log_ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    per_row: bool = False,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 at most -dual_clip * A.

    The clip flags compare the ratio before its clamp, so they also count tokens beyond e^20.
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    ratio_N, raw_ratio_N, negative_N = log_ratio_N.exp(), raw_log_ratio_N.detach().exp(), advantages_N < 0
    objective_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    dual_N = torch.zeros_like(negative_N)
    if dual_clip is not None:
        objective_N = torch.where(negative_N, torch.maximum(objective_N, dual_clip * advantages_N), objective_N)
        dual_N = negative_N & (raw_ratio_N > dual_clip)
    return PolicyLoss(
        loss_N=-objective_N,
        clipped_low_N=negative_N & (raw_ratio_N < low),
        clipped_high_N=(advantages_N > 0) & (raw_ratio_N > high),
        dual_clipped_N=dual_N,
        per_row=per_row,
    )
