"""Groups change data-parallel ranks; worked by hand, and properties of any batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.modules.groups import Balance, balanced_ranks, group_tokens, minibatches_of, receive
from rlite.types import Completion, Prompt, Rollout, RolloutBatch


def test_the_longest_items_are_apart() -> None:
    assert balanced_ranks([9, 8, 2, 1], ranks=[0, 0, 1, 1]) == [0, 1, 1, 0]


def test_nothing_moves_when_no_rank_gets_lighter() -> None:
    assert balanced_ranks([5, 1, 1, 5], ranks=[1, 1, 0, 0]) == [1, 1, 0, 0]
    assert balanced_ranks([], ranks=[]) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=20))
def test_ranks_keep_their_number_of_items_and_the_fullest_gets_no_heavier(items: list[tuple[int, int]]) -> None:
    tokens, ranks = [t for t, _ in items], [r for _, r in items]
    chosen = balanced_ranks(tokens, ranks)
    assert sorted(chosen) == sorted(ranks)

    def heaviest(where: list[int]) -> int:
        return max(sum(t for t, r in zip(tokens, where, strict=True) if r == rank) for rank in range(4))

    assert heaviest(chosen) <= heaviest(ranks)


def test_minibatches_hold_whole_groups_and_too_few_groups_are_refused() -> None:
    assert [list(part) for part in minibatches_of(5, 2)] == [[0, 1], [2, 3, 4]]
    with pytest.raises(ValueError, match=r"model\.batch\.minibatches = 3 is more than the 2 prompts"):
        minibatches_of(2, 3)


def test_a_group_stays_in_its_optimizer_step() -> None:
    groups = [[["a"], ["b"]], [["c"], ["d"]]]  # two ranks, two groups each; minibatch 0 holds a and c
    balance = Balance(tokens=[[9, 8], [1, 2]], minibatches=2)
    sent = [balance.outgoing(rank, groups[rank]) for rank in range(2)]
    assert sent == [
        [[(0, ["a"]), (1, ["b"])], []],
        [[], [(0, ["c"]), (1, ["d"])]],
    ]  # one group a rank: nothing to even out
    assert balance.metrics()["global_seqlen/max"] == balance.metrics()["global_seqlen/balanced_max"] == 9 + 8
    balance = Balance(tokens=[[9, 8], [1, 2]], minibatches=1)
    sent = [balance.outgoing(rank, groups[rank]) for rank in range(2)]
    assert sent == [[[(0, ["a"])], [(0, ["b"])]], [[(0, ["c"])], [(0, ["d"])]]]
    assert balance.metrics() == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 17,
        "global_seqlen/balanced_min": 10,
        "global_seqlen/balanced_max": 10,
    }


def _rollouts(uid: int, lengths: list[int]) -> list[Rollout]:
    prompt = Prompt(uid=uid, token_ids=(1, 2), text=str(uid))
    completions = [Completion(token_ids=(7,) * n, logprobs=(-1.0,) * n, finish_reason="stop") for n in lengths]
    return [Rollout(prompt=prompt, completion=c, sample_index=i) for i, c in enumerate(completions)]


def test_a_batch_holds_what_arrived_in_the_order_of_optimizer_steps() -> None:
    first, second, third = _rollouts(0, [1, 2]), _rollouts(1, [3, 4]), _rollouts(2, [5, 6])
    batch = RolloutBatch(prompts=[])
    receive(batch, [[(0, first), (1, second)], [(0, third)]])
    assert batch.rollouts == [*first, *third, *second]
    assert [prompt.uid for prompt in batch.prompts] == [0, 2, 1]


def test_tokens_of_a_group_count_its_prompt_with_every_completion() -> None:
    assert group_tokens(_rollouts(0, [3, 5])) == (2 + 3) + (2 + 5)


def test_groups_are_split_in_order() -> None:
    rollouts = [*_rollouts(4, [1, 2]), *_rollouts(5, [3, 4])]
    assert RolloutBatch(prompts=[], rollouts=rollouts).groups(2) == [rollouts[:2], rollouts[2:]]
