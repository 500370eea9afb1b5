"""Facts about a whole rollout step that ranks tell each other, and the metrics of its completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlite.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What advantages need to know of some rollouts, prompt-major."""

    rewards_B: Tensor
    """fp64, weighted sum; NaN where all rewards abstained."""
    reward_table_BK: Tensor
    """fp64, each reward; NaN where it abstained."""
    lengths_B: Tensor
    """int64, completion tokens."""
    truncated_B: Tensor
    """bool, ended at a length limit."""
    token_kl_N: Tensor | None = None
    """fp64, KL penalty of every completion token."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], token_kl_N: Tensor | None) -> "StepFacts":
        table = [[math.nan if v is None else v for v in r.rewards.values()] for r in rollouts]
        return cls(
            rewards_B=torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
            reward_table_BK=torch.tensor(table, dtype=torch.float64),
            lengths_B=torch.tensor([len(r.completion.token_ids) for r in rollouts], dtype=torch.int64),
            truncated_B=torch.tensor([r.completion.finish_reason == "length" for r in rollouts], dtype=torch.bool),
            token_kl_N=token_kl_N,
        )

    @classmethod
    def concatenate(cls, parts: Sequence["StepFacts"]) -> "StepFacts":
        def joined(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        names = ("rewards_B", "reward_table_BK", "lengths_B", "truncated_B")
        kl = joined("token_kl_N") if parts[0].token_kl_N is not None else None
        return cls(**{name: joined(name) for name in names}, token_kl_N=kl)


def rollout_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Rewards, advantages and lengths of a whole step. `rollouts` are those of all ranks, groups contiguous.

    Standard deviations divide by (n - 1). Rewards that abstained leave their statistics.
    """
    metrics: dict[str, float] = {}
    for name in rollouts[0].rewards if rollouts else ():
        values = torch.tensor([r.rewards[name] for r in rollouts if r.rewards[name] is not None], dtype=torch.float64)
        metrics |= _moments(f"rewards/{name}", values)
    rewards_PG = torch.tensor([r.reward for r in rollouts], dtype=torch.float64).view(-1, group_size)
    judged = rewards_PG[~rewards_PG.isnan()]
    metrics |= _moments("reward", judged)
    if group_size > 1 and len(judged):
        spans = [group[~group.isnan()] for group in rewards_PG]
        metrics["frac_reward_zero_std"] = sum(len(g) < 2 or bool(g.max() == g.min()) for g in spans) / len(spans)
        stds = [float(g.std()) for g in spans if len(g) > 1]
        metrics["reward/group_std_mean"] = sum(stds) / max(1, len(stds))
    advantages = torch.tensor([r.advantage for r in rollouts], dtype=torch.float64)
    metrics |= {"advantage/abs_mean": float(advantages.abs().mean()), "advantage/max": float(advantages.max())}
    return metrics | _length_metrics(rollouts)


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(r.completion.token_ids) for r in rollouts]
    ended = [n for n, r in zip(lengths, rollouts, strict=True) if r.completion.finish_reason == "stop"]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "completions/mean_terminated_length": sum(ended) / len(ended) if ended else 0.0,
        "prompts/mean_length": sum(len(r.prompt.token_ids) for r in rollouts) / len(rollouts),
    }


def _moments(name: str, values: Tensor) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/std": float(values.std()) if len(values) > 1 else 0.0}
