"""Facts about a whole rollout step that ranks tell each other, and the metrics of its rewards and lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlite.algorithms import summarize_metrics
from rlite.algorithms.rollout_metrics import completion_metrics, reward_metrics, reward_table_metrics
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
    def of(cls, rollouts: Sequence[Rollout], *, num_rewards: int, token_kl_N: Tensor | None = None) -> "StepFacts":
        table = [[math.nan if v is None else v for v in r.rewards.values()] for r in rollouts]
        return cls(
            rewards_B=torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
            reward_table_BK=torch.tensor(table, dtype=torch.float64).view(len(rollouts), num_rewards),
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


def step_metrics(facts: StepFacts, groups_B: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Rewards and lengths of a whole step, by the names that are logged. `names` are those of the rewards."""
    return summarize_metrics(
        reward_metrics(facts.rewards_B, groups_B)
        | reward_table_metrics(facts.reward_table_BK, names)
        | completion_metrics(facts.lengths_B, facts.truncated_B)
    )


def difference_sums(differences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Sums for `rollout/logprob_diff_{mean,max}` over every sampled token, whether it is trained on or not."""
    values = torch.cat([torch.zeros(0), *differences])
    return {
        "count:compared": torch.tensor(float(len(values))),
        "compared:rollout/logprob_diff_mean": values.sum(),
        "max:rollout/logprob_diff_max": values.max() if len(values) else torch.tensor(-torch.inf),
    }
