"""Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are replaced by groups of further prompts."""

import math
from collections.abc import Sequence

from rlite.types import Rollout

Group = Sequence[Rollout]


def is_varied(group: Group) -> bool:
    """Whether the group holds two different task rewards; completions without a verdict (NaN) do not count."""
    judged = [rollout.reward for rollout in group if not math.isnan(rollout.reward)]
    return bool(judged) and max(judged) != min(judged)


class GroupPool:
    """The scored groups of one rollout step, of all data-parallel ranks, until enough of them are varied.

    Every rank holds the same pool, so all of them decide the same. The order of groups is that of the prompts in the
    global order of the data, whatever the number of ranks.

    Args:
        wanted: groups of a batch, all data-parallel ranks together.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.rounds = 0
        self._varied: list[Group] = []
        self._uniform: list[Group] = []

    def add(self, groups_by_rank: Sequence[Sequence[Group]]) -> None:
        """Groups of one sampling round; prompt i of rank r is number `i * ranks + r` of the global order."""
        self.rounds += 1
        for i in range(max(len(groups) for groups in groups_by_rank)):
            for groups in groups_by_rank:
                if i < len(groups):
                    (self._varied if is_varied(groups[i]) else self._uniform).append(groups[i])

    @property
    def is_full(self) -> bool:
        return len(self._varied) >= self.wanted

    def share(self, rank: int, *, num_ranks: int) -> list[Group]:
        """Groups that data-parallel rank `rank` trains on: varied ones first, then, when they are too few, the others."""
        return [*self._varied, *self._uniform][: self.wanted][rank::num_ranks]

    def metrics(self) -> dict[str, float]:
        """`sampling/rounds`; `sampling/dropped_groups`, sampled but not trained on; `sampling/reward_mean` of everything
        sampled: the reward of the policy, where `reward/mean` is that of the groups that were kept."""
        groups = [*self._varied, *self._uniform]
        judged = [r.reward for group in groups for r in group if not math.isnan(r.reward)]
        mean = {"sampling/reward_mean": sum(judged) / len(judged)} if judged else {}
        return {
            "sampling/rounds": float(self.rounds),
            "sampling/dropped_groups": float(max(0, len(groups) - self.wanted)),
            **mean,
        }
