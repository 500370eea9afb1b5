"""Which groups a step trains on when some of those sampled teach nothing."""

import math

import pytest

from rlite.callbacks.dynamic_sampling import GroupPool, is_varied
from rlite.types import Completion, Prompt, Rollout


def group(uid: int, *rewards: float) -> list[Rollout]:
    prompt = Prompt(uid=uid, token_ids=(1,), text="")
    completion = Completion(token_ids=(2,), logprobs=(-1.0,), finish_reason="stop")
    return [
        Rollout(prompt=prompt, completion=completion, sample_index=i, reward=reward) for i, reward in enumerate(rewards)
    ]


def uids(groups: list) -> list[int]:
    return [g[0].prompt.uid for g in groups]


@pytest.mark.parametrize(
    ("rewards", "varied"),
    [((0, 1), True), ((1, 1), False), ((0, math.nan), False), ((0, math.nan, 1), True), ((math.nan, math.nan), False)],
)
def test_a_group_is_varied_when_two_verdicts_differ(rewards: tuple[float, ...], varied: bool) -> None:
    assert is_varied(group(0, *rewards)) is varied


def test_varied_groups_replace_uniform_ones_in_the_global_order_of_prompts() -> None:
    pool = GroupPool(4)
    pool.add([[group(0, 0, 1), group(2, 1, 1)], [group(1, 0, 0), group(3, 0, 1)]])
    assert not pool.is_full
    pool.add([[group(4, 0, 1), group(6, 0, 1)], [group(5, 1, 1), group(7, 0, 1)]])
    assert pool.is_full
    assert uids(pool.share(0, num_ranks=2)) == [0, 4]
    assert uids(pool.share(1, num_ranks=2)) == [3, 6]


def test_the_batch_does_not_depend_on_the_number_of_ranks() -> None:
    groups = [group(uid, 0, uid % 3) for uid in range(8)]
    one, two = GroupPool(4), GroupPool(4)
    one.add([groups])
    two.add([groups[0::2], groups[1::2]])
    shares = [two.share(rank, num_ranks=2) for rank in range(2)]
    interleaved = [g for pair in zip(*shares, strict=True) for g in pair]
    assert uids(interleaved) == uids(one.share(0, num_ranks=1)) == [1, 2, 4, 5]


def test_when_the_rounds_are_used_up_uniform_groups_fill_the_batch() -> None:
    pool = GroupPool(2)
    pool.add([[group(0, 1, 1), group(1, 0, 0)]])
    pool.add([[group(2, 0, 0), group(3, 0, 1)]])
    assert not pool.is_full
    assert uids(pool.share(0, num_ranks=1)) == [3, 0]


def test_metrics_count_rounds_dropped_groups_and_the_reward_of_everything_sampled() -> None:
    pool = GroupPool(2)
    pool.add([[group(0, 1, 1), group(1, 0, 0)]])
    pool.add([[group(2, 0, 1), group(3, 0, 1)]])
    assert pool.metrics() == {
        "sampling/rounds": 2.0,
        "sampling/dropped_groups": 2.0,
        "sampling/reward_mean": 0.5,
    }
