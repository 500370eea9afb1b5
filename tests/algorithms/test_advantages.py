"""Advantage estimators beyond the golden batch: degenerate groups, abstentions, ordering, bad input."""

import pytest
import torch

from rlite import algorithms as alg

NAN = float("nan")


def advantages(rewards, groups, *, lengths=None, **options):
    """`compute_advantages` on lists; `estimator` and `args` pick the config."""
    config = alg.AlgorithmConfig(advantage=options.pop("estimator", "grpo"), advantage_args=options.pop("args", {}))
    lengths_B = torch.tensor(lengths or [1] * len(rewards))
    rewards_B = torch.tensor(rewards, dtype=torch.float64)
    if config.advantage == "gdpo":
        options.setdefault("reward_table", rewards_B[:, None])
    return alg.compute_advantages(rewards_B, torch.tensor(groups), lengths_B, config, **options)


def test_grpo_by_hand():
    # Rewards 0, 0, 1, 1: mean 1/2, sample variance 4 * (1/4) / 3 = 1/3.
    got_B = advantages([0.0, 0.0, 1.0, 1.0], [5, 5, 5, 5], args={"eps": 0.0})
    half = 0.5 * 3**0.5
    torch.testing.assert_close(got_B, torch.tensor([-half, -half, half, half], dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("estimator", alg.ADVANTAGES.names())
@pytest.mark.parametrize("reward", [0.7, 0.1, -3.3])
def test_a_group_of_equal_rewards_gets_exactly_zero(estimator, reward):
    """With a rounded mean and a tiny eps the whole group would be pushed one way."""
    assert not advantages([reward] * 14, [0] * 14, estimator=estimator).any()


def test_degenerate_group_next_to_a_varied_one():
    got_B = advantages([0.7] * 7 + [0.0, 1.0], [0] * 7 + [1] * 2, estimator="grpo")
    assert not got_B[:7].any() and got_B[8] == -got_B[7] > 0.7


@pytest.mark.parametrize("estimator", alg.ADVANTAGES.names())
def test_a_single_completion_gets_zero(estimator):
    assert advantages([0.7], [3], estimator=estimator).tolist() == [0.0]


@pytest.mark.parametrize("estimator", alg.ADVANTAGES.names())
def test_an_abstained_reward_leaves_the_statistics_and_gets_zero(estimator):
    judged = [1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.5]
    groups = [0, 0, 0, 0, 1, 1, 1]
    lengths = [2, 3, 1, 2, 1, 1, 4]
    expected = advantages(judged, groups, lengths=lengths, estimator=estimator)
    extended = advantages(
        [NAN, *judged, NAN, NAN], [0, *groups, 1, 2], lengths=[5, *lengths, 2, 1], estimator=estimator
    )
    if len(extended) == 10:
        kept, extra = extended[1:8], extended[[0, 8, 9]]
    else:
        kept, extra = extended[5:-3], extended[[0, 1, 2, 3, 4, -3, -2, -1]]
    torch.testing.assert_close(kept, expected, rtol=1e-12, atol=1e-14)
    assert not extra.any()


def test_golden_nan_case():
    got = advantages([1.0, NAN, 0.0, NAN, NAN, NAN], [0, 0, 0, 1, 1, 1], args={"eps": 1e-4}).tolist()
    assert got == pytest.approx([0.7070067953266834, 0.0, -0.7070067953266834, 0.0, 0.0, 0.0], abs=1e-12, rel=0)


@pytest.mark.parametrize("estimator", alg.ADVANTAGES.names())
def test_order_and_group_numbers_do_not_matter(estimator):
    rewards, groups = [1.0, 0.0, 0.25, 0.5, 0.0, 1.0], [0, 0, 0, 1, 1, 1]
    order = [3, 0, 5, 1, 4, 2]
    expected = advantages(rewards, groups, estimator=estimator)
    shuffled = advantages([rewards[i] for i in order], [100 - 7 * groups[i] for i in order], estimator=estimator)
    torch.testing.assert_close(shuffled, expected[order], rtol=1e-12, atol=1e-14)


def test_advantages_of_fp32_rewards_are_fp64():
    rewards_B = torch.tensor([0.1, 0.3], dtype=torch.float32)
    got_B = alg.compute_advantages(
        rewards_B, torch.zeros(2, dtype=int), torch.ones(2, dtype=int), alg.AlgorithmConfig()
    )
    assert got_B.dtype == torch.float64


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    assert advantages([1.0, 0.0, 0.5], [0, 0, 0], estimator="rloo").tolist() == pytest.approx([0.75, -0.75, 0.0])


def test_gpg_makes_up_for_groups_without_a_gradient():
    # 6 completions, 4 of them in groups that vary: alpha = 6/4.
    got = advantages([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2], estimator="gpg").tolist()
    assert got == [0.75, -0.75, 0.0, 0.0, -0.75, 0.75]


def test_pass_at_k_rewards_only_the_best_by_its_lead():
    got = advantages([0.2, 1.0, 0.6], [0, 0, 0], estimator="pass_at_k", args={"divide_by_std": False}).tolist()
    assert got == [0.0, 0.4, 0.0]
    assert not advantages([1.0, 1.0, 0.0], [0, 0, 0], estimator="pass_at_k").any()


def test_loo_std_of_a_pair_is_undivided():
    assert advantages([1.0, 0.25], [0, 0], estimator="loo_std").tolist() == [0.75, -0.75]


def test_kl_penalty_is_summed_over_the_completion():
    # Rewards 1 and 1, KL 0.1 + 0.2 in the first row, 0.5 in the second: 0.7 and 0.5, mean 0.6.
    token_kl_N = torch.tensor([0.1, 0.2, 0.5], dtype=torch.float64)
    got = advantages([1.0, 1.0], [0, 0], lengths=[2, 1], estimator="dr_grpo", token_kl_N=token_kl_N).tolist()
    assert got == pytest.approx([0.1, -0.1], abs=1e-15, rel=0)


def test_reinforce_pp_is_white_over_tokens():
    got_N = advantages([1.0, 0.0, 0.5], [0, 0, 0], lengths=[1, 5, 2], estimator="reinforce_pp")
    assert len(got_N) == 8
    assert got_N.mean().item() == pytest.approx(0.0, abs=1e-15, rel=0)
    assert got_N.var(correction=1).item() == pytest.approx(1.0, abs=1e-6)


def test_reinforce_pp_with_an_empty_completion():
    got_N = advantages(
        [1.0, 0.0, 0.5], [0, 0, 0], lengths=[1, 0, 1], estimator="reinforce_pp", token_kl_N=torch.zeros(2)
    )
    assert got_N.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-6)


def test_infinite_reward_is_named():
    with pytest.raises(ValueError, match="completion 1 is inf"):
        advantages([0.0, float("inf")], [0, 0])


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"group: shape \(1,\)"):
        advantages([0.0, 1.0], [0])
    with pytest.raises(ValueError, match=r"token_kl: shape \(1,\), expected \(2,\)"):
        advantages([0.0, 1.0], [0, 0], token_kl_N=torch.zeros(1))


def test_gdpo_without_a_table():
    with pytest.raises(ValueError, match="gdpo needs the table"):
        advantages([0.0, 1.0], [0, 0], estimator="gdpo", reward_table=None)
