"""Losses that weigh the score function, -weight * A * x, and soft trust regions. Each is `[N]`, to be minimised."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from rlite.algorithms.inputs import LossInputs
from rlite.algorithms.losses.base import PolicyLoss, log_ratio, raw_log_ratio, unclipped
from rlite.algorithms.registry import register_loss
from rlite.algorithms.rows import row_sum

VESPO_LOG_WEIGHT_MIN, VESPO_LOG_WEIGHT_MAX = math.log(1e-8), 20.0


@register_loss("reinforce")
def reinforce(inputs: LossInputs) -> PolicyLoss:
    """-A x: REINFORCE, GPG, OPO and strictly on-policy RLOO."""
    return unclipped(-inputs.advantages_N * inputs.logprobs_N)


@register_loss("cispo")
def cispo(inputs: LossInputs, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> PolicyLoss:
    """-sg(clip(r, ratio_min, ratio_max)) A x (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    Both bounds are absolute ratios, not distances from 1. ScaleRL uses [0, 5].
    """
    ratio_N = log_ratio(inputs).detach().exp()
    raw_N = raw_log_ratio(inputs).detach().exp()
    return replace(
        unclipped(-ratio_N.clamp(ratio_min, ratio_max) * inputs.advantages_N * inputs.logprobs_N),
        clipped_low_N=raw_N < ratio_min,
        clipped_high_N=raw_N > ratio_max,
    )


@register_loss("sapo")
def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft trust region (arXiv 2511.20347). At r = 1 its value is -2 A / tau."""
    tau_N = _by_sign(inputs.advantages_N > 0, tau_pos, tau_neg, like=inputs.logprobs_N)
    gate_N = torch.sigmoid(tau_N * (log_ratio(inputs).exp() - 1.0))
    return unclipped(-(4.0 / tau_N) * gate_N * inputs.advantages_N)


@register_loss("vespo")
def vespo(
    inputs: LossInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> PolicyLoss:
    """-sg(phi(W)) A x with W the sequence ratio and phi(W) = W^k exp(lambda (1 - W)), as in TRL."""
    total_B = row_sum(log_ratio(inputs).detach(), inputs.row_N, len(inputs.lengths_B))
    log_weight_N = total_B.clamp(VESPO_LOG_WEIGHT_MIN, VESPO_LOG_WEIGHT_MAX)[inputs.row_N]
    positive_N = inputs.advantages_N >= 0
    k_N = _by_sign(positive_N, k_pos, k_neg, like=log_weight_N)
    lambda_N = _by_sign(positive_N, lambda_pos, lambda_neg, like=log_weight_N)
    phi_N = torch.exp(k_N * log_weight_N + lambda_N * (1.0 - log_weight_N.exp()))
    return unclipped(-phi_N * inputs.advantages_N * inputs.logprobs_N)


@register_loss("dro")
def dro(inputs: LossInputs, *, beta: float = 0.5) -> PolicyLoss:
    """-(A x - beta / 2 (x - old)^2): a quadratic pull to the old policy (arXiv 2405.19107)."""
    return unclipped(-(inputs.advantages_N * inputs.logprobs_N - 0.5 * beta * raw_log_ratio(inputs).square()))


@register_loss("dppo_tv")
def dppo_tv(
    inputs: LossInputs, *, delta_low: float = 0.05, delta_high: float = 0.06, ratio_max: float = 20.0
) -> PolicyLoss:
    """-A sg(min(r, ratio_max)) x, dropped where p - p_old left [-delta_low, delta_high] (DPPO, arXiv 2602.04879)."""
    moved_N = inputs.logprobs_N.detach().exp() - _old_probs(inputs)
    return _divergence_masked(
        inputs, too_low_N=moved_N < -delta_low, too_high_N=moved_N > delta_high, ratio_max=ratio_max
    )


@register_loss("dppo_kl")
def dppo_kl(
    inputs: LossInputs, *, delta_low: float = 0.02, delta_high: float = 0.04, ratio_max: float = 20.0
) -> PolicyLoss:
    """As `dppo_tv`, measuring the move by the KL of the two-way choice "this token or another", old to live."""
    old_N, new_N = _old_probs(inputs), inputs.logprobs_N.detach().exp()
    tiny = torch.finfo(old_N.dtype).tiny
    other_N = (1.0 - old_N) * (torch.log((1.0 - old_N).clamp(min=tiny)) - torch.log((1.0 - new_N).clamp(min=tiny)))
    kl_N = other_N - old_N * raw_log_ratio(inputs).detach()
    return _divergence_masked(
        inputs,
        too_low_N=(kl_N > delta_low) & (new_N < old_N),
        too_high_N=(kl_N > delta_high) & (new_N > old_N),
        ratio_max=ratio_max,
    )


def _by_sign(positive_N: Tensor, if_positive: float, otherwise: float, *, like: Tensor) -> Tensor:
    return torch.where(positive_N, like.new_tensor(if_positive), like.new_tensor(otherwise))


def _old_probs(inputs: LossInputs) -> Tensor:
    old_N = inputs.logprobs_N if inputs.old_logprobs_N is None else inputs.old_logprobs_N
    return old_N.detach().exp()


def _divergence_masked(inputs: LossInputs, *, too_low_N: Tensor, too_high_N: Tensor, ratio_max: float) -> PolicyLoss:
    positive_N = inputs.advantages_N > 0
    low_N, high_N = too_low_N & ~positive_N, too_high_N & positive_N
    weight_N = log_ratio(inputs).detach().exp().clamp(max=ratio_max) * ~(low_N | high_N)
    return replace(
        unclipped(-weight_N * inputs.advantages_N * inputs.logprobs_N), clipped_low_N=low_N, clipped_high_N=high_N
    )
