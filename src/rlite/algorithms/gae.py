"""Generalised advantage estimation (arXiv 1506.02438) and the value loss of PPO (arXiv 1707.06347).

Shape legend: N trained tokens of all completions laid end to end, B completions, T padded length. The value of a token
is the critic's estimate BEFORE the token is sampled; after the last token of a completion nothing follows, so it is 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlite.algorithms.rows import flatten_padded, unflatten_padded


class GaeResult(NamedTuple):
    """fp64 `[N]` each; NaN in the rows of completions that nothing judged."""

    advantages_N: Tensor
    returns_N: Tensor
    """advantage + value: what the critic should have said."""


def token_rewards(rewards_B: Tensor, lengths_B: Tensor, *, token_kl_N: Tensor | None = None) -> Tensor:
    """fp64 `[N]`: the completion's reward at its last token, minus the KL penalty of every token."""
    rewards_N = torch.zeros(int(lengths_B.sum()), dtype=torch.float64)
    has_tokens_B = lengths_B > 0
    rewards_N[lengths_B.cumsum(0)[has_tokens_B] - 1] = rewards_B.double()[has_tokens_B]
    return rewards_N if token_kl_N is None else rewards_N - token_kl_N.double()


def gae(rewards_N: Tensor, values_N: Tensor, lengths_B: Tensor, *, gamma: float, lam: float) -> GaeResult:
    """A_t = sum_l (gamma lam)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t.

    Args:
        rewards_N: reward of each token; a row with a NaN gets NaN.
        values_N: the critic's values, without gradient.
        lengths_B: int64, tokens of each completion.
        gamma, lam: discount and trace decay, in [0, 1].
    """
    steps = torch.arange(int(lengths_B.max()) if len(lengths_B) else 0)
    mask_BT = steps < lengths_B[:, None]
    rewards_BT = unflatten_padded(rewards_N.double(), mask_BT)
    values_BT = unflatten_padded(values_N.double(), mask_BT)
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = next_advantage_B = values_BT.new_zeros(len(lengths_B))
    for t in reversed(range(len(steps))):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B, advantages_BT[:, t] = values_BT[:, t], next_advantage_B
    advantages_N = flatten_padded(advantages_BT, mask_BT)
    return GaeResult(advantages_N, advantages_N + values_N.double())


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """(loss `[N]`, whether clipping decided it `[N]`): half the squared error, the larger of it with the value and with the
    value kept within `clip` of the old one."""
    error_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * error_N, torch.zeros_like(error_N, dtype=torch.bool)
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    clipped_error_N = (clipped_N - returns_N).square()
    return 0.5 * torch.maximum(error_N, clipped_error_N), clipped_error_N > error_N
