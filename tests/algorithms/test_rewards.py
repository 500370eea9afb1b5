"""Reward sums, length terms and row filters."""

from pathlib import Path

import pytest
import torch

from benchmarks.golden import Golden, to_tensor
from rlite import algorithms as alg

GOLDEN = Golden(Path(__file__).parents[1] / "golden" / "losses.json")


def test_weighted_sum_skips_abstentions():
    table_BK = to_tensor([[1.0, None], [None, None], [0.5, 2.0]])
    got_B = alg.weighted_sum(table_BK, torch.tensor([1.0, 0.5]))
    assert got_B[[0, 2]].tolist() == [1.0, 1.5] and torch.isnan(got_B[1])


def test_weighted_sum_rejects_infinite_rewards_and_wrong_weights():
    with pytest.raises(ValueError, match="reward 1 of completion 0 is inf"):
        alg.weighted_sum(torch.tensor([[0.0, torch.inf]]))
    with pytest.raises(ValueError, match="reward weights: 3 for 2 rewards"):
        alg.weighted_sum(torch.zeros(1, 2), torch.ones(3))


def test_soft_overlong_golden():
    want = GOLDEN.data["rewards"]["soft_overlong(L_max=20,cache=5)"]
    lengths_B = torch.tensor([int(length) for length in want])
    got_B = alg.soft_overlong(lengths_B, max_tokens=20, buffer_tokens=5)
    assert got_B.tolist() == pytest.approx(list(want.values()), abs=1e-12, rel=0)


def test_stop_properly_golden():
    case = GOLDEN.data["rewards"]["stop_properly"]
    got_B = alg.stop_properly(to_tensor(case["reward"]), to_tensor(case["truncated"]), scale=case["coef"])
    assert got_B.tolist() == pytest.approx(case["scaled"], abs=1e-12, rel=0)


def test_stop_properly_with_a_negative_scale_replaces_the_reward():
    got_B = alg.stop_properly(to_tensor([1.0, 1.0, None]), torch.tensor([1, 0, 1]), scale=-0.5)
    assert got_B[:2].tolist() == [-0.5, 1.0] and torch.isnan(got_B[2])


def test_overlong_buffer_must_fit():
    with pytest.raises(ValueError, match=r"model.algorithm.overlong_buffer_tokens = 30: must be in 1..20"):
        alg.soft_overlong(torch.tensor([1]), max_tokens=20, buffer_tokens=30)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1.0, 1.0]),
        ({"overlong_buffer_tokens": 4, "overlong_penalty": 0.5}, [1.0, 0.5]),
        ({"truncation_reward_scale": 0.25}, [1.0, 0.25]),
    ],
)
def test_shape_rewards_applies_what_is_configured(fields, expected):
    rewards_B, lengths_B, truncated_B = torch.tensor([1.0, 1.0]), torch.tensor([3, 8]), torch.tensor([False, True])
    got_B = alg.shape_rewards(rewards_B, lengths_B, truncated_B, alg.AlgorithmConfig(**fields), max_tokens=8)
    assert got_B.tolist() == expected


def test_trainable_rows():
    rewards_B, group_B = to_tensor([1.0, 1.0, 0.0, 1.0, None, None]), torch.tensor([0, 0, 1, 1, 1, 2])
    truncated_B = torch.tensor([0, 1, 0, 1, 0, 0])

    def kept(**fields):
        return alg.trainable_rows(rewards_B, group_B, truncated_B, alg.AlgorithmConfig(**fields)).int().tolist()

    assert kept() == [1, 1, 1, 1, 1, 1]
    assert kept(overlong_filter=True) == [1, 0, 1, 0, 1, 1]
    assert kept(drop_zero_variance=True) == [0, 0, 1, 1, 1, 0]
    assert kept(drop_zero_variance=True, overlong_filter=True) == [0, 0, 1, 0, 1, 0]
