"""The composed objective: independence of the split, on-policy identities, poisoned values, missing inputs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite import algorithms as alg
from tests.algorithms.batches import random_inputs, take_rows, with_leaf

LENGTHS, GROUPS = [3, 2, 4, 0, 4, 3, 1], [0, 0, 0, 1, 1, 1, 1]

FULL = {
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "kl_coef": 0.1,
    "kl_estimator": "k3u",
    "entropy_coef": 0.01,
    "correction": "token_truncate",
    "correction_max": 2.0,
    "opsm_delta": 0.3,
}
CONFIGS = {
    **{f"preset {name}": {"preset": name} for name in alg.PRESETS},
    **{f"full, {mode}": FULL | {"aggregation": mode} for mode in alg.AGGREGATIONS},
    "batch-normalised rows": {
        "correction": "sequence_truncate",
        "correction_max": 2.0,
        "correction_normalize": "batch",
    },
    "renormalised": {"correction": "token_mask", "correction_max": 1.3, "correction_normalize": "kept"},
    "veto": {"veto_ratio": 0.5, "entropy_top_fraction": 0.4},
    "bypass": {"old_policy": "rollout"},
}


def evaluate(config, inputs, counts, threshold):
    """(loss, gradient, metric sums) of a batch."""
    inputs = with_leaf(inputs)
    output = alg.PolicyObjective(config, max_completion_tokens=8)(inputs, counts, entropy_threshold=threshold)
    output.loss.backward()
    return output.loss.item(), inputs.logprobs_N.grad, output.metric_sums


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(7)), cut=st.lists(st.integers(0, 7), max_size=3))
def test_any_split_and_order_gives_the_same_loss_gradient_and_metrics(name, seed, order, cut):
    config = alg.algorithm_config(CONFIGS[name])
    whole = random_inputs(seed, lengths=LENGTHS, groups=GROUPS)
    threshold = alg.high_entropy_threshold(whole.entropy_N, config.entropy_top_fraction)
    objective = alg.PolicyObjective(config, max_completion_tokens=8)
    loss, gradient_N, sums = evaluate(config, whole, objective.counts(whole), threshold)

    edges = [0, *sorted(cut), 7]
    parts = [order[start:stop] for start, stop in pairwise(edges)]
    counts = sum(
        (objective.counts(take_rows(whole, part)) for part in parts[1:]), objective.counts(take_rows(whole, parts[0]))
    )
    part_results = [evaluate(config, take_rows(whole, part), counts, threshold) for part in parts]

    assert sum(result[0] for result in part_results) == pytest.approx(loss, abs=1e-12, rel=1e-12)
    for part, (_, part_gradient_N, part_sums) in zip(parts, part_results, strict=True):
        expected_N = torch.cat([gradient_N[whole.row_N == row] for row in part] + [gradient_N[:0]])
        torch.testing.assert_close(part_gradient_N, expected_N, rtol=1e-11, atol=1e-12)
        assert part_sums.keys() == sums.keys()
    total = alg.add_metric_sums(result[2] for result in part_results)
    expected = alg.summarize_metrics({key: value.item() for key, value in sums.items()})
    assert alg.summarize_metrics({key: value.item() for key, value in total.items()}) == pytest.approx(
        expected, abs=1e-9, rel=1e-9
    )


@pytest.mark.parametrize(
    "loss", ["ppo_clip", "gspo", "rloo_sequence", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro"]
)
def test_on_policy_every_loss_has_the_reinforce_gradient(loss):
    inputs = replace(random_inputs(1, lengths=LENGTHS, groups=GROUPS), old_logprobs_N=None)
    # A whole-sequence ratio sums its tokens, so TRL's RLOO weighs a row by its length.
    aggregation = "seq_mean_token_sum" if loss == "rloo_sequence" else "seq_mean_token_mean"
    counts = alg.Counts.of(inputs.lengths_B)
    reference = alg.AlgorithmConfig(loss="reinforce", aggregation=aggregation)
    expected_N = evaluate(reference, inputs, counts, None)[1]
    got_N = evaluate(alg.AlgorithmConfig(loss=loss), inputs, counts, None)[1]
    torch.testing.assert_close(got_N, expected_N, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("preset", alg.PRESETS)
def test_first_update_has_ratio_one_and_no_clipping(preset):
    config = alg.algorithm_config(preset)
    inputs = replace(random_inputs(2, lengths=LENGTHS, groups=GROUPS), old_logprobs_N=None)
    objective = alg.PolicyObjective(config, max_completion_tokens=8)
    sums = evaluate(config, inputs, objective.counts(inputs), None)[2]
    metrics = alg.summarize_metrics({key: value.item() for key, value in sums.items()})
    assert metrics["ratio/mean"] == metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert metrics["approx_kl/k3"] == metrics["clip_ratio/region_mean"] == metrics["clip_ratio/dual"] == 0.0


def test_old_logprobs_none_equals_detached_live_ones():
    inputs = random_inputs(3, lengths=LENGTHS, groups=GROUPS)
    config, counts = alg.AlgorithmConfig(**FULL), alg.Counts.of(inputs.lengths_B)
    with_none = evaluate(config, replace(inputs, old_logprobs_N=None), counts, None)
    with_copy = evaluate(config, replace(inputs, old_logprobs_N=inputs.logprobs_N.clone()), counts, None)
    assert with_none[0] == with_copy[0] and torch.equal(with_none[1], with_copy[1])


def test_poisoned_padding_reaches_neither_loss_nor_gradient():
    clean = random_inputs(4, lengths=[3, 1, 2], groups=[0, 0, 0])
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    live_BT = alg.unflatten_padded(clean.logprobs_N, mask_BT, fill=torch.nan).requires_grad_()
    poisoned = {
        name: alg.flatten_padded(alg.unflatten_padded(getattr(clean, name), mask_BT, fill=torch.inf), mask_BT)
        for name in ("old_logprobs_N", "rollout_logprobs_N", "ref_logprobs_N", "advantages_N", "entropy_N")
    }
    config, counts = alg.AlgorithmConfig(**FULL), alg.Counts.of(clean.lengths_B)
    inputs = replace(clean, logprobs_N=alg.flatten_padded(live_BT, mask_BT), **poisoned)
    loss = alg.PolicyObjective(config)(inputs, counts).loss
    loss.backward()
    expected_loss, expected_N, _ = evaluate(config, clean, counts, None)
    assert loss.item() == expected_loss
    assert torch.equal(live_BT.grad, alg.unflatten_padded(expected_N, mask_BT))


def test_token_without_an_engine_logprob_has_weight_one():
    inputs = random_inputs(5, lengths=[2, 3], groups=[0, 0])
    unknown_N, same_N = inputs.rollout_logprobs_N.clone(), inputs.rollout_logprobs_N.clone()
    unknown_N[3], same_N[3] = torch.nan, inputs.old_logprobs_N[3]
    config, counts = alg.AlgorithmConfig(**FULL), alg.Counts.of(inputs.lengths_B)
    with_nan = evaluate(config, replace(inputs, rollout_logprobs_N=unknown_N), counts, None)
    with_old = evaluate(config, replace(inputs, rollout_logprobs_N=same_N), counts, None)
    assert with_nan[0] == with_old[0] and torch.equal(with_nan[1], with_old[1])
    assert {key: value.item() for key, value in with_nan[2].items()} == {
        key: value.item() for key, value in with_old[2].items()
    }


def test_rows_that_are_not_kept_get_no_gradient_and_leave_the_denominator():
    inputs = random_inputs(6, lengths=[2, 3, 1], groups=[0, 0, 0])
    keep_B = torch.tensor([True, False, True])
    filtered = replace(inputs, keep_B=keep_B)
    objective = alg.PolicyObjective(alg.algorithm_config("dapo"))
    assert objective.counts(filtered) == alg.Counts.of(torch.tensor([2, 0, 1]), inputs.group_tokens_B)
    loss, gradient_N, _ = evaluate(objective.config, filtered, objective.counts(filtered), None)
    alone = take_rows(inputs, [0, 2])
    expected, expected_N, _ = evaluate(objective.config, alone, objective.counts(alone), None)
    assert loss == pytest.approx(expected, rel=1e-14)
    assert gradient_N[2:5].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(gradient_N[[0, 1, 5]], expected_N)


def test_zero_advantages_give_exactly_zero():
    inputs = random_inputs(7, lengths=LENGTHS, groups=GROUPS)
    inputs = replace(inputs, advantages_N=torch.zeros_like(inputs.advantages_N))
    for loss in alg.LOSSES.names():
        if loss == "dro":  # its quadratic pull to the old policy does not depend on the advantage
            continue
        value, gradient_N, _ = evaluate(alg.AlgorithmConfig(loss=loss), inputs, alg.Counts.of(inputs.lengths_B), None)
        assert value == 0.0 and not gradient_N.any(), loss


def test_adaptive_coefficients_override_the_configured_ones():
    inputs = random_inputs(8, lengths=LENGTHS, groups=GROUPS)
    counts = alg.Counts.of(inputs.lengths_B)
    configured = alg.PolicyObjective(alg.AlgorithmConfig(kl_coef=0.2, entropy_coef=0.3))(inputs, counts).loss
    overridden = alg.PolicyObjective(alg.AlgorithmConfig(kl_coef=0.1))(
        inputs, counts, kl_coef=0.2, entropy_coef=0.3
    ).loss
    assert configured.item() == overridden.item()


def test_kl_in_reward_is_not_added_to_the_loss():
    inputs = random_inputs(9, lengths=LENGTHS, groups=GROUPS)
    counts = alg.Counts.of(inputs.lengths_B)
    in_reward = alg.PolicyObjective(alg.AlgorithmConfig(kl_coef=0.5, kl_in_reward=True))(inputs, counts)
    without = alg.PolicyObjective(alg.AlgorithmConfig())(inputs, counts)
    assert in_reward.loss.item() == without.loss.item()
    assert "tokens:kl" in in_reward.metric_sums


def test_float32_inputs_give_a_float32_loss():
    inputs = random_inputs(10, lengths=LENGTHS, groups=GROUPS)
    halved = {
        name: getattr(inputs, name).float() for name in inputs.__slots__ if name.endswith("_N") and name != "row_N"
    }
    output = alg.PolicyObjective(alg.AlgorithmConfig(**FULL))(
        replace(inputs, **halved), alg.Counts.of(inputs.lengths_B)
    )
    assert output.loss.dtype == torch.float32
    assert {value.dtype for value in output.metric_sums.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("fields", "missing", "message"),
    [
        ({"kl_coef": 0.1}, "ref_logprobs_N", "model.algorithm.kl_coef"),
        ({"correction": "token_truncate", "correction_max": 2.0}, "rollout_logprobs_N", "model.algorithm.correction"),
        ({"entropy_coef": 0.1}, "entropy_N", "model.algorithm.entropy_coef"),
        ({"entropy_top_fraction": 0.2}, "entropy_N", "model.algorithm.entropy_top_fraction"),
        ({"aggregation": "prompt_mean_token_mean"}, "group_tokens_B", "model.algorithm.aggregation"),
    ],
)
def test_missing_input_names_the_key_that_wants_it(fields, missing, message):
    inputs = replace(random_inputs(11, lengths=LENGTHS, groups=GROUPS), **{missing: None})
    with pytest.raises(ValueError, match=message):
        alg.PolicyObjective(alg.AlgorithmConfig(**fields))(
            inputs, alg.Counts.of(inputs.lengths_B), entropy_threshold=0.5
        )


def test_batch_normalised_weights_need_old_logprobs_before_the_update():
    config = alg.AlgorithmConfig(correction="token_truncate", correction_max=2.0, correction_normalize="batch")
    inputs = replace(random_inputs(12, lengths=LENGTHS, groups=GROUPS), old_logprobs_N=None)
    with pytest.raises(ValueError, match="correction_normalize"):
        alg.PolicyObjective(config).counts(inputs)


def test_dr_grpo_needs_the_completion_limit():
    inputs = random_inputs(13, lengths=LENGTHS, groups=GROUPS)
    with pytest.raises(ValueError, match="max_completion_tokens"):
        alg.PolicyObjective(alg.algorithm_config("dr_grpo"))(inputs, alg.Counts.of(inputs.lengths_B))
