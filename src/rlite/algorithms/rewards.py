"""Reward arithmetic before the advantages: weighting, length terms, and which rows train.

Shape legend: B completions, K rewards.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlite.algorithms.advantages import GroupStatistics

if TYPE_CHECKING:
    from rlite.algorithms.config import AlgorithmConfig


def weighted_sum(reward_table_BK: Tensor, weights_K: Tensor | None = None) -> Tensor:
    """fp64 `[B]`: sum of weight * reward over the rewards that gave a verdict (not NaN); NaN when none did.

    Raises ValueError for infinite rewards and when the number of weights is wrong.
    """
    table_BK = reward_table_BK.double()
    weights_K = table_BK.new_ones(table_BK.shape[1]) if weights_K is None else weights_K.double()
    if weights_K.shape != (table_BK.shape[1],):
        raise ValueError(f"reward weights: {len(weights_K)} for {table_BK.shape[1]} rewards; give one for each")
    if torch.isinf(table_BK).any():
        row, reward = torch.isinf(table_BK).nonzero()[0].tolist()
        raise ValueError(
            f"reward {reward} of completion {row} is {table_BK[row, reward].item()}: "
            f"return a finite number, or None to abstain"
        )
    silent_B = torch.isnan(table_BK).all(dim=1)
    return (torch.nan_to_num(table_BK) * weights_K).sum(dim=1).masked_fill(silent_B, torch.nan)


def soft_overlong(lengths_B: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """fp64 `[B]` in [-1, 0]: falls from 0 to -1 over the last `buffer_tokens` before `max_tokens` (DAPO eq. 13).

    Raises ValueError unless 0 < buffer_tokens <= max_tokens.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"model.algorithm.overlong_buffer_tokens = {buffer_tokens}: "
            f"must be in 1..{max_tokens} (the rollout's max_tokens)"
        )
    return ((max_tokens - buffer_tokens - lengths_B.double()) / buffer_tokens).clamp(-1.0, 0.0)


def stop_properly(rewards_B: Tensor, truncated_B: Tensor, *, scale: float) -> Tensor:
    """`[B]` truncated completions get reward * scale (0 <= scale <= 1); a negative scale replaces their reward."""
    punished_B = rewards_B * scale if scale >= 0 else torch.full_like(rewards_B, scale)
    return torch.where(truncated_B.bool() & ~torch.isnan(rewards_B), punished_B, rewards_B)


def shape_rewards(
    rewards_B: Tensor, lengths_B: Tensor, truncated_B: Tensor, config: "AlgorithmConfig", *, max_tokens: int
) -> Tensor:
    """fp64 `[B]`: the configured length terms on top of the task reward; NaN stays NaN.

    `lengths_B` are completion tokens, `max_tokens` the most the rollout allows.
    """
    rewards_B = rewards_B.double()
    if config.truncation_reward_scale is not None:
        return stop_properly(rewards_B, truncated_B, scale=config.truncation_reward_scale)
    if config.overlong_buffer_tokens > 0:
        penalty_B = soft_overlong(lengths_B, max_tokens=max_tokens, buffer_tokens=config.overlong_buffer_tokens)
        return rewards_B + config.overlong_penalty * penalty_B
    return rewards_B


def varied_groups(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """bool `[B]`: the row's group holds two different rewards (NaN ignored), so that its rows can teach something.

    Pass the task reward, not the shaped one: length terms hide groups that are all right or all wrong.
    """
    stats = GroupStatistics.of(rewards_B.double(), group_B)
    return torch.isin(group_B, group_B[stats.varied])


def trainable_rows(rewards_B: Tensor, group_B: Tensor, truncated_B: Tensor, config: "AlgorithmConfig") -> Tensor:
    """bool `[B]` for `LossInputs.keep_B`: what the overlong filter and the zero-variance filter leave.

    Complete groups and unshaped rewards, as for `compute_advantages`.
    """
    keep_B = torch.ones_like(group_B, dtype=torch.bool)
    if config.overlong_filter:
        keep_B &= ~truncated_B.bool()
    if config.drop_zero_variance:
        keep_B &= varied_groups(rewards_B, group_B)
    return keep_B
