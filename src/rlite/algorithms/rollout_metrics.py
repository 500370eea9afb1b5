"""Metrics of a generation batch: rewards, groups, completion lengths, pass@k; additive sums as in `metrics`.

Shape legend: B completions, K rewards.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlite.algorithms.advantages import GroupStatistics
from rlite.algorithms.metrics import extremes


def reward_metrics(rewards_B: Tensor, group_B: Tensor) -> dict[str, Tensor]:
    """fp64 sums for `reward/mean|std|group_std_mean` and `frac_reward_zero_std` (over groups). Complete groups only."""
    rewards_B = rewards_B.double()
    stats = GroupStatistics.of(rewards_B, group_B)
    judged = rewards_B[~torch.isnan(rewards_B)]
    first_B = _first_of_group(group_B, stats.count > 0)
    varies_B = torch.isin(group_B, group_B[stats.varied])
    return {
        "count:judged": torch.tensor(float(len(judged)), dtype=torch.float64),
        "judged:reward/mean": judged.sum(),
        "judged:moment/reward_square": judged.square().sum(),
        "count:groups": first_B.double().sum(),
        "groups:reward/group_std_mean": stats.std[first_B].sum(),
        "groups:frac_reward_zero_std": (~varies_B[first_B]).double().sum(),
    }


def reward_table_metrics(reward_table_BK: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """fp64 sums for `rewards/<name>/mean`, each over the completions that this reward judged."""
    sums: dict[str, Tensor] = {}
    for name, values_B in zip(names, reward_table_BK.double().unbind(dim=1), strict=True):
        judged = values_B[~torch.isnan(values_B)]
        sums[f"count:judged_{name}"] = torch.tensor(float(len(judged)), dtype=torch.float64)
        sums[f"judged_{name}:rewards/{name}/mean"] = judged.sum()
    return sums


def completion_metrics(lengths_B: Tensor, truncated_B: Tensor) -> dict[str, Tensor]:
    """fp64 sums for `completions/*`, from token counts and from which completions hit the length limit."""
    lengths_B, truncated_B = lengths_B.double(), truncated_B.bool()
    terminated = lengths_B[~truncated_B]
    return {
        "count:completions": torch.tensor(float(len(lengths_B)), dtype=torch.float64),
        "completions:completions/mean_length": lengths_B.sum(),
        "completions:completions/clipped_ratio": truncated_B.double().sum(),
        "count:terminated": torch.tensor(float(len(terminated)), dtype=torch.float64),
        "terminated:completions/mean_terminated_length": terminated.sum(),
        **{f"{key}_length": value for key, value in extremes("completions", lengths_B).items()},
    }


def advantage_metrics(advantages: Tensor) -> dict[str, Tensor]:
    """fp64 sums for `advantage/*` over completions (`[B]`) or tokens (`[N]`), whatever the estimator gives."""
    advantages = advantages.double()
    return {
        "count:advantages": torch.tensor(float(len(advantages)), dtype=torch.float64),
        "advantages:advantage/mean": advantages.sum(),
        "advantages:advantage/abs_mean": advantages.abs().sum(),
        **extremes("advantage", advantages),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right), 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).

    Raises ValueError unless 1 <= k <= num_samples and 0 <= num_correct <= num_samples.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@k with k = {k}, {num_correct} correct of {num_samples}: need 1 <= k <= samples")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _first_of_group(group_B: Tensor, counted_B: Tensor) -> Tensor:
    """bool `[B]`: one row of each group that counts."""
    groups, index = torch.unique(group_B, return_inverse=True)
    position = torch.arange(len(group_B))
    first = torch.full((len(groups),), len(group_B)).scatter_reduce(0, index, position, "amin")
    return (position == first[index]) & counted_B
