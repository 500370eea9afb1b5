"""Groups of completions: which of them share an optimizer step, and on which data-parallel rank each is trained on.

Ranks wait for each other in every step, so the one with the most tokens sets the pace: whole groups change ranks until
all have about as many. Which groups an optimizer step uses does not change, so neither do its loss and gradients.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlite.types import Rollout, RolloutBatch

Group = list[Rollout]


def minibatches_of(num_groups: int, parts: int) -> list[range]:
    """The groups of each optimizer step on a rank.

    Raises:
        ValueError: fewer groups than optimizer steps.
    """
    if num_groups < parts:
        raise ValueError(
            f"model.batch.minibatches = {parts} is more than the {num_groups} prompts on this data-parallel rank: "
            "lower it or raise data.batch_size"
        )
    return [range(k * num_groups // parts, (k + 1) * num_groups // parts) for k in range(parts)]


def group_tokens(group: Group) -> int:
    """Tokens that training sees: every completion with its prompt."""
    return sum(len(rollout.prompt.token_ids) + len(rollout.completion.token_ids) for rollout in group)


def balanced_ranks(tokens: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """A rank for each item: every rank gets as many items as it has in `ranks`, with about equal tokens.

    Largest item first, to the rank with the fewest tokens that has room. Items stay where they are unless the fullest
    rank gets lighter. Deterministic.

    Args:
        tokens: of each item.
        ranks: where each item is now.
    """
    room = {rank: ranks.count(rank) for rank in sorted(set(ranks))}
    load = dict.fromkeys(room, 0)
    chosen = list(ranks)
    for item in sorted(range(len(tokens)), key=lambda item: (-tokens[item], item)):
        rank = min((rank for rank in room if room[rank]), key=lambda rank: (load[rank], rank))
        chosen[item] = rank
        load[rank] += tokens[item]
        room[rank] -= 1
    fullest = max((sum(t for t, r in zip(tokens, ranks, strict=True) if r == rank) for rank in load), default=0)
    return chosen if max(load.values(), default=0) < fullest else list(ranks)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Where the groups of a rollout step are trained on; the same on every rank."""

    tokens: Sequence[Sequence[int]]
    """Of each group of each data-parallel rank."""
    minibatches: int

    @cached_property
    def _moves(self) -> list[list[tuple[int, int]]]:
        """(minibatch, destination) of each group of each rank."""
        parts = [minibatches_of(len(groups), self.minibatches) for groups in self.tokens]
        moves: list[list[tuple[int, int]]] = [[] for _ in self.tokens]
        for part in range(self.minibatches):
            members = [(rank, group) for rank in range(len(parts)) for group in parts[rank][part]]
            to = balanced_ranks([self.tokens[rank][group] for rank, group in members], [rank for rank, _ in members])
            for (rank, _), destination in zip(members, to, strict=True):
                moves[rank].append((part, destination))
        return moves

    def outgoing(self, rank: int, groups: Sequence[Group]) -> list[list[tuple[int, Group]]]:
        """What `rank` gives to each rank, itself included: (minibatch, group)."""
        to: list[list[tuple[int, Group]]] = [[] for _ in self.tokens]
        for (part, destination), group in zip(self._moves[rank], groups, strict=True):
            to[destination].append((part, group))
        return to

    def metrics(self) -> dict[str, float]:
        """`global_seqlen/{min,max,balanced_min,balanced_max}` (verl's names): tokens of the emptiest and the fullest rank,
        summed over optimizer steps."""
        before, after = Counter(), Counter()
        for rank, (moves, tokens) in enumerate(zip(self._moves, self.tokens, strict=True)):
            for (part, destination), count in zip(moves, tokens, strict=True):
                before[part, rank] += count
                after[part, destination] += count
        steps = [[(part, rank) for rank in range(len(self.tokens))] for part in range(self.minibatches)]
        return {
            f"global_seqlen/{name}": float(sum(extreme(load[key] for key in step) for step in steps))
            for name, load, extreme in (
                ("min", before, min),
                ("max", before, max),
                ("balanced_min", after, min),
                ("balanced_max", after, max),
            )
        }


def receive(batch: RolloutBatch, received: Sequence[Sequence[tuple[int, Group]]]) -> None:
    """`batch` holds what the ranks sent, in the order of minibatches."""
    arrived = [item for from_rank in received for item in from_rank]
    batch.hold([group for _, group in sorted(arrived, key=lambda item: item[0])])
