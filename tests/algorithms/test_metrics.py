"""Metric sums and what is logged, against the golden metrics; rewards, completions, pass@k."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.golden import Golden, to_tensor
from rlite import algorithms as alg

GOLDEN = Golden(Path(__file__).parents[1] / "golden" / "losses.json")
METRICS = GOLDEN.data["metrics"]
RENAMED = {
    "logp_abs_mean": "logprob_diff_mean",
    "logp_abs_max": "logprob_diff_max",
    "frac_extreme_tau2": "frac_extreme",
}


def summary(sums):
    return alg.summarize_metrics({key: float(value) for key, value in sums.items()})


@pytest.fixture(scope="module")
def objective_metrics():
    config = alg.AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    inputs = GOLDEN.inputs(rollout=True)
    objective = alg.PolicyObjective(config)
    return summary(objective(inputs, objective.counts(inputs)).metric_sums)


@pytest.mark.parametrize("name", METRICS["clip(eps 0.2/0.28, dual 3)"])
def test_clip_and_ratio_metrics(objective_metrics, name):
    assert objective_metrics[name] == pytest.approx(METRICS["clip(eps 0.2/0.28, dual 3)"][name], abs=1e-12, rel=0)


@pytest.mark.parametrize("name", [name for name in METRICS["mismatch(old vs roll)"] if name != "n_tokens"])
def test_mismatch_metrics(objective_metrics, name):
    short = name.removeprefix("mismatch/")
    got = objective_metrics[f"rollout/{RENAMED.get(short, short)}"]
    assert got == pytest.approx(METRICS["mismatch(old vs roll)"][name], abs=1e-12, rel=0)


def test_entropy_metric(objective_metrics):
    assert objective_metrics["entropy"] == pytest.approx(METRICS["entropy"], abs=1e-12, rel=0)


def test_reward_and_completion_metrics():
    sums = alg.reward_metrics(GOLDEN.raw("rewards"), GOLDEN.group_B)
    sums |= alg.completion_metrics(GOLDEN.lengths_B, GOLDEN.truncated_B)
    got = summary(sums)
    for name, want in METRICS.items():
        if name.startswith(("reward/", "completions/", "frac_")):
            assert got[name] == pytest.approx(want, abs=1e-12, rel=0), name


def test_reward_metrics_of_ranks_add_up():
    rewards_B, group_B = to_tensor([1.0, None, 0.5, 0.0, 0.0, None]), torch.tensor([0, 0, 0, 1, 1, 2])
    whole = alg.reward_metrics(rewards_B, group_B)
    parts = [alg.reward_metrics(rewards_B[part], group_B[part]) for part in (slice(0, 3), slice(3, 6))]
    assert summary(alg.add_metric_sums(parts)) == pytest.approx(summary(whole), abs=1e-15, rel=0)
    # Judged: 1, 0.5, 0, 0. Two judged groups, one of them without variance; the third abstained.
    got = summary(whole)
    assert got["reward/mean"] == 0.375
    assert got["reward/std"] == pytest.approx(torch.tensor([1.0, 0.5, 0.0, 0.0]).double().std().item())
    assert got["frac_reward_zero_std"] == 0.5


def test_each_reward_has_its_own_mean():
    table_BK = to_tensor([[1.0, None], [0.0, 0.5], [0.5, None]])
    got = summary(alg.reward_table_metrics(table_BK, ["accuracy", "format"]))
    assert got == {"rewards/accuracy/mean": 0.5, "rewards/format/mean": 0.5}


def test_advantage_metrics():
    got = summary(alg.advantage_metrics(torch.tensor([-1.0, 0.0, 3.0, 0.0])))
    assert got == {"advantage/mean": 0.5, "advantage/abs_mean": 1.0, "advantage/max": 3.0, "advantage/min": -1.0}


def test_extremes_of_an_empty_micro_batch_do_not_win():
    config = alg.AlgorithmConfig()
    empty = alg.LossInputs(
        logprobs_N=torch.zeros(0, requires_grad=True),
        advantages_N=torch.zeros(0),
        row_N=torch.zeros(0, dtype=int),
        lengths_B=torch.zeros(1, dtype=int),
    )
    sums = alg.PolicyObjective(config)(empty, alg.Counts.of(empty.lengths_B)).metric_sums
    assert "ratio/max" not in summary(sums) and "ratio/mean" not in summary(sums)
    full = {key: torch.tensor(-2.0) for key in sums}
    assert alg.add_metric_sums([sums, full])["max:ratio/max"].item() == -2.0


def test_keys_with_max_take_the_maximum_and_the_rest_the_sum():
    parts = [{"max:a": 1.0, "sum:b": 2.0, "max:-c": -4.0}, {"max:a": 3.0, "sum:b": 5.0, "max:-c": -6.0}]
    total = alg.add_metric_sums(parts)
    assert total == {"max:a": 3.0, "sum:b": 7.0, "max:-c": -4.0}
    assert alg.summarize_metrics(total) == {"a": 3.0, "b": 7.0, "c": 4.0}
    assert [alg.is_max_metric(key) for key in total] == [True, False, True]


def test_perfect_agreement_of_trainer_and_engine():
    inputs = GOLDEN.inputs()
    same = alg.LossInputs(
        **{name: getattr(inputs, name) for name in inputs.__slots__} | {"rollout_logprobs_N": inputs.old_logprobs_N}
    )
    sums = alg.mismatch_metrics(same)
    got = summary(sums | {"count:tokens": len(same.row_N), "count:rows": len(same.lengths_B)})
    assert got["rollout/kl_k1"] == got["rollout/kl_k3"] == got["rollout/logprob_diff_max"] == 0.0
    assert got["rollout/ess"] == got["rollout/is_mean"] == 1.0
    assert got["rollout/prob_pearson"] == pytest.approx(1.0, abs=1e-12, rel=0)


@given(n=st.integers(1, 12), data=st.data())
def test_pass_at_k_grows_with_k_and_matches_the_mean_at_one(n, data):
    correct = data.draw(st.integers(0, n))
    values = [alg.pass_at_k(n, correct, k) for k in range(1, n + 1)]
    assert values == sorted(values) and math.isclose(values[0], correct / n, abs_tol=1e-12)
    assert values[-1] == (1.0 if correct else 0.0)


@pytest.mark.parametrize("name", METRICS["pass_at_k"])
def test_pass_at_k_golden(name):
    n, correct, k = (int(part[1:]) for part in name.split("_"))
    assert alg.pass_at_k(n, correct, k) == pytest.approx(METRICS["pass_at_k"][name], abs=1e-12, rel=0)


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="k = 5"):
        alg.pass_at_k(4, 1, 5)


def test_clip_fractions_of_a_sequence_ratio_count_rows():
    """Three of four tokens are clipped, but that is one of two rows."""
    inputs = alg.LossInputs(
        logprobs_N=torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        old_logprobs_N=torch.tensor([-2.0, -2.0, -2.0, -1.0]),
        advantages_N=torch.ones(4),
        row_N=torch.tensor([0, 0, 0, 1]),
        lengths_B=torch.tensor([3, 1]),
    )
    counts = alg.Counts.of(inputs.lengths_B)
    by_row = summary(alg.PolicyObjective(alg.algorithm_config("gspo"))(inputs, counts).metric_sums)
    by_token = summary(alg.PolicyObjective(alg.algorithm_config("grpo"))(inputs, counts).metric_sums)
    assert by_row["clip_ratio/high_mean"] == by_row["clip_ratio/region_mean"] == 0.5
    assert by_token["clip_ratio/high_mean"] == 0.75
    assert by_row["clip_ratio/high_max"] == by_token["clip_ratio/high_max"] == 1.0
