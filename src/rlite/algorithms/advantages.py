"""Advantages from rewards: one scalar per completion (`[B]`), for the whole generation batch at once, in fp64.

Shape legend: B completions, N trained tokens of all completions laid end to end, K rewards. Standard deviations divide
by (n - 1). A NaN reward means "no verdict": it leaves every statistic and its advantage is 0. A group whose rewards
are all equal gets exactly 0, tested by `max == min`: a rounded mean divided by eps would push all its members one way.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlite.algorithms.registry import ADVANTAGES, register_advantage
from rlite.algorithms.rows import row_index, row_sum

if TYPE_CHECKING:
    from rlite.algorithms.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """A generation batch of complete prompt groups."""

    rewards_B: Tensor
    """fp64, NaN where the completion was not judged."""
    group_B: Tensor
    """int64, 0 <= group < number of groups."""
    lengths_B: Tensor
    """int64, trained tokens of each completion."""
    reward_table_BK: Tensor | None = None
    """fp64, every reward on its own; NaN where it abstained."""
    weights_K: Tensor | None = None
    """fp64, weights of the rewards; None: all 1."""
    token_kl_N: Tensor | None = None
    """fp64, KL penalty (already times its coefficient) of each token, for estimators with rewards per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Statistics of each row's own group over its judged rows, `[B]` each."""

    count: Tensor
    total: Tensor
    mean: Tensor
    std: Tensor
    varied: Tensor
    """bool: this row is judged and its group has two different rewards; elsewhere the advantage must be 0."""

    @classmethod
    def of(cls, values_B: Tensor, group_B: Tensor) -> "GroupStatistics":
        judged = ~torch.isnan(values_B)
        groups, index = torch.unique(group_B, return_inverse=True)
        clean = torch.where(judged, values_B, 0.0)
        count = row_sum(judged.double(), index, len(groups))
        total = row_sum(clean, index, len(groups))
        mean = total / count.clamp(min=1)
        squares = row_sum(torch.where(judged, (clean - mean[index]).square(), 0.0), index, len(groups))
        highest = torch.full_like(mean, -torch.inf).scatter_reduce(0, index[judged], clean[judged], "amax")
        lowest = torch.full_like(mean, torch.inf).scatter_reduce(0, index[judged], clean[judged], "amin")
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        return cls(
            count=count[index],
            total=total[index],
            mean=mean[index],
            std=std[index],
            varied=judged & (highest > lowest)[index],
        )


def compute_advantages(
    rewards_B: Tensor,
    group_B: Tensor,
    lengths_B: Tensor,
    config: "AlgorithmConfig",
    *,
    reward_table: Tensor | None = None,
    weights: Tensor | None = None,
    token_kl_N: Tensor | None = None,
) -> Tensor:
    """fp64 `[B]`, or flat `[N]` for estimators that work per token (`expand_rows` turns the one into the other).

    `rewards_B` has NaN where nothing judged the completion; `group_B` are any ints, equal within a prompt group;
    `reward_table` `[B, K]` and `weights` `[K]` are only read by `gdpo`; `token_kl_N` is `kl_coef * k1(old, ref)`, given
    when `kl_in_reward` is set. Raises ValueError for infinite rewards and for wrong shapes.
    """
    rewards_B = rewards_B.double()
    for name, value in (("rewards", rewards_B), ("group", group_B), ("lengths", lengths_B)):
        if value.shape != rewards_B.shape or value.dim() != 1:
            raise ValueError(f"{name}: shape {tuple(value.shape)}, expected ({len(rewards_B)},), one per completion")
    if torch.isinf(rewards_B).any():
        row = int(torch.isinf(rewards_B).nonzero()[0, 0])
        raise ValueError(
            f"reward of completion {row} is {rewards_B[row].item()}: return a finite number, or None to abstain"
        )
    if token_kl_N is not None and token_kl_N.shape != (int(lengths_B.sum()),):
        raise ValueError(
            f"token_kl: shape {tuple(token_kl_N.shape)}, expected ({int(lengths_B.sum())},), one per trained token"
        )
    batch = AdvantageInputs(
        rewards_B=rewards_B,
        group_B=group_B,
        lengths_B=lengths_B,
        reward_table_BK=None if reward_table is None else reward_table.double(),
        weights_K=None if weights is None else weights.double(),
        token_kl_N=None if token_kl_N is None else token_kl_N.double(),
    )
    return ADVANTAGES.bind(config.advantage, config.advantage_args)(batch)


def penalised_rewards(batch: AdvantageInputs) -> Tensor:
    """`[B]` rewards minus the KL penalty summed over the completion, as RLOO has it."""
    if batch.token_kl_N is None:
        return batch.rewards_B
    return batch.rewards_B - row_sum(batch.token_kl_N, row_index(batch.lengths_B), len(batch.lengths_B))


def _centred(batch: AdvantageInputs) -> tuple[Tensor, GroupStatistics]:
    rewards_B = penalised_rewards(batch)
    stats = GroupStatistics.of(rewards_B, batch.group_B)
    return torch.where(stats.varied, rewards_B - stats.mean, 0.0), stats


def _batch_std(values_B: Tensor) -> Tensor:
    judged = values_B[~torch.isnan(values_B)]
    return judged.std(correction=1) if len(judged) > 1 else values_B.new_zeros(())


@register_advantage("grpo")
def grpo(batch: AdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """(R - mean_group) / (std_group + eps) (DeepSeekMath, arXiv 2402.03300)."""
    centred_B, stats = _centred(batch)
    return centred_B / (stats.std + eps)


@register_advantage("dr_grpo")
def dr_grpo(batch: AdvantageInputs) -> Tensor:
    """R - mean_group (Dr. GRPO, arXiv 2503.20783; DeepSeek-V3.2)."""
    return _centred(batch)[0]


@register_advantage("batch_std")
def batch_std(batch: AdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """(R - mean_group) / (std_batch(R) + eps) (Lite PPO, arXiv 2508.08221)."""
    return _centred(batch)[0] / (_batch_std(penalised_rewards(batch)) + eps)


@register_advantage("scale_rl")
def scale_rl(batch: AdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """c / (std_batch(c) + eps) with c = R - mean_group (ScaleRL, arXiv 2510.13786)."""
    centred_B, stats = _centred(batch)
    judged_B = torch.where(stats.varied | ~torch.isnan(batch.rewards_B), centred_B, torch.nan)
    return centred_B / (_batch_std(judged_B) + eps)


@register_advantage("rloo")
def rloo(batch: AdvantageInputs) -> Tensor:
    """R_i - mean of the others in the group = G / (G - 1) (R_i - mean_group) (arXiv 2402.14740)."""
    centred_B, stats = _centred(batch)
    return centred_B * stats.count / (stats.count - 1).clamp(min=1)


@register_advantage("loo_std")
def loo_std(batch: AdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """(R_i - mean_others) / (std_others + eps), undivided where the others are all equal (NeMo-RL).

    With small groups the standard deviation of the few others is wild: use groups of 8 and more.
    """
    rewards_B = penalised_rewards(batch)
    advantages_B = torch.zeros_like(rewards_B)
    varied = GroupStatistics.of(rewards_B, batch.group_B).varied
    for row in varied.nonzero().flatten().tolist():
        others = (batch.group_B == batch.group_B[row]) & ~torch.isnan(rewards_B)
        others[row] = False
        rest = rewards_B[others]
        scale = rest.std(correction=1) + eps if rest.max() > rest.min() else 1.0
        advantages_B[row] = (rewards_B[row] - rest.mean()) / scale
    return advantages_B


@register_advantage("opo")
def opo(batch: AdvantageInputs) -> Tensor:
    """R - length-weighted mean of the group (OPO, arXiv 2505.23585)."""
    rewards_B = penalised_rewards(batch)
    stats = GroupStatistics.of(rewards_B, batch.group_B)
    lengths_B = torch.where(torch.isnan(rewards_B), 0, batch.lengths_B).double()
    weighted = GroupStatistics.of(lengths_B * torch.nan_to_num(rewards_B), batch.group_B).total
    baseline_B = weighted / GroupStatistics.of(lengths_B, batch.group_B).total.clamp(min=1)
    return torch.where(stats.varied, rewards_B - baseline_B, 0.0)


@register_advantage("gpg")
def gpg(batch: AdvantageInputs, *, divide_by_std: bool = False, eps: float = 1e-6) -> Tensor:
    """alpha (R - mean_group) / F with F = 1 or the group's std (GPG, arXiv 2504.02546).

    alpha = completions / completions of groups that vary makes up for the groups without a gradient.
    """
    centred_B, stats = _centred(batch)
    judged = (~torch.isnan(batch.rewards_B)).sum()
    alpha = judged / stats.varied.sum().clamp(min=1)
    return alpha * centred_B / ((stats.std + eps) if divide_by_std else 1.0)


@register_advantage("pass_at_k")
def pass_at_k(batch: AdvantageInputs, *, divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Only the best of a group: R_max - R_second, over the group's std (arXiv 2503.19595); a tie at the top gives 0."""
    rewards_B = penalised_rewards(batch)
    stats = GroupStatistics.of(rewards_B, batch.group_B)
    advantages_B = torch.zeros_like(rewards_B)
    for group in torch.unique(batch.group_B[stats.varied]).tolist():
        members = ((batch.group_B == group) & stats.varied).nonzero().flatten()
        best, second = rewards_B[members].topk(2).values
        winner = members[rewards_B[members].argmax()]
        advantages_B[winner] = (best - second) / ((stats.std[winner] + eps) if divide_by_std else 1.0)
    return advantages_B


@register_advantage("gdpo")
def gdpo(batch: AdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """Normalise each reward within its group, add them with their weights, then normalise over the batch (GDPO).

    As TRL's `normalize_then_sum`. Raises ValueError without a reward table.
    """
    if batch.reward_table_BK is None:
        raise ValueError("model.algorithm.advantage = gdpo needs the table of single rewards (reward_table)")
    table_BK = batch.reward_table_BK
    weights_K = table_BK.new_ones(table_BK.shape[1]) if batch.weights_K is None else batch.weights_K
    total_B = torch.zeros_like(batch.rewards_B)
    for k in range(table_BK.shape[1]):
        stats = GroupStatistics.of(table_BK[:, k], batch.group_B)
        normalised_B = (table_BK[:, k] - stats.mean) / (stats.std + eps)
        total_B += weights_K[k] * torch.where(stats.varied, normalised_B, 0.0)
    judged = ~torch.isnan(table_BK).all(dim=1)
    whole = GroupStatistics.of(torch.where(judged, total_B, torch.nan), torch.zeros_like(batch.group_B))
    return torch.where(whole.varied, (total_B - whole.mean) / (whole.std + eps), 0.0)
