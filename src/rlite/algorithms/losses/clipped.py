"""Losses with a trust region: a clipped ratio to the old policy. Each is `[N]`, to be minimised."""

import torch

from rlite.algorithms.inputs import LossInputs
from rlite.algorithms.kl import LOG_RATIO_BOUND
from rlite.algorithms.losses.base import PolicyLoss, clipped_surrogate, log_ratio, raw_log_ratio
from rlite.algorithms.registry import register_loss
from rlite.algorithms.rows import row_mean, row_sum

GSPO_LOG_RATIO_MAX = 10.0


@register_loss("ppo_clip")
def ppo_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347); GRPO, DAPO (clip_high 0.28) and Dr. GRPO use it.

    `dual_clip` > 1 + clip_high bounds the loss of negative advantages (arXiv 1912.09729); usually 3.
    """
    return clipped_surrogate(
        log_ratio(inputs),
        raw_log_ratio(inputs),
        inputs.advantages_N,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


@register_loss("gspo")
def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """Sequence ratio, normalised by length: s = exp(mean_t(x - old)) (arXiv 2507.18071, the GSPO-token form).

    Value and gradient equal the sequence form's; the advantage may vary over the row. LUSPO is this with
    `seq_mean_token_sum`.
    """
    mean_B = row_mean(raw_log_ratio(inputs).detach(), inputs.row_N, inputs.lengths_B)
    live_N = inputs.logprobs_N - inputs.logprobs_N.detach() + mean_B[inputs.row_N]
    return clipped_surrogate(
        live_N.clamp(-LOG_RATIO_BOUND, GSPO_LOG_RATIO_MAX),
        live_N,
        inputs.advantages_N,
        clip_low=clip_low,
        clip_high=clip_high,
        per_row=True,
    )


@register_loss("rloo_sequence")
def rloo_sequence(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyLoss:
    """RLOO as TRL trains it: clips the whole-sequence ratio exp(sum_t(x - old)). Use `seq_mean_token_mean`."""
    total_N = row_sum(raw_log_ratio(inputs), inputs.row_N, len(inputs.lengths_B))[inputs.row_N]
    return clipped_surrogate(
        total_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
        total_N,
        inputs.advantages_N,
        clip_low=clip_low,
        clip_high=clip_high,
        per_row=True,
    )


@register_loss("gmpo")
def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    """Geometric mean of token ratios, each clipped in LOG space to [-clip_low, clip_high] (arXiv 2507.20673).

    Use `seq_mean_token_mean`.
    """
    advantages_N, ratio_N = inputs.advantages_N, log_ratio(inputs)
    sign_N, raw_N = advantages_N.sign(), raw_log_ratio(inputs).detach()
    pessimistic_N = sign_N * torch.minimum(sign_N * ratio_N, sign_N * ratio_N.clamp(-clip_low, clip_high))
    mean_B = row_mean(pessimistic_N, inputs.row_N, inputs.lengths_B)
    return PolicyLoss(
        loss_N=-advantages_N * mean_B.exp()[inputs.row_N],
        clipped_low_N=(advantages_N < 0) & (raw_N < -clip_low),
        clipped_high_N=(advantages_N > 0) & (raw_N > clip_high),
        dual_clipped_N=torch.zeros_like(raw_N, dtype=torch.bool),
    )
