"""Every value and gradient of the golden file, which an independent numpy script made (gradients by complex step)."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.golden import Golden, advantage_checks, all_checks, golden_loss, loss_checks, to_tensor
from rlite import algorithms as alg
from rlite.algorithms.objective import PolicyObjective
from tests.algorithms.batches import take_rows

FILE = Path(__file__).parents[1] / "golden" / "losses.json"
GOLDEN = Golden(FILE)
DATA = GOLDEN.data
CHECKS = list(all_checks(FILE))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_matches_golden(check):
    assert check.error <= check.tolerance, (check.got, check.want)


def test_benchmark_checks_everything_in_the_file():
    assert len(CHECKS) == len(DATA["advantages"]) + 2 * 2 * len(DATA["losses"])


def test_a_wrong_value_is_a_mismatch():
    golden = Golden(FILE)
    golden.data["losses"] = {"dapo/token_mean": DATA["losses"]["dapo/token_mean"] | {"value": 0.22422504}}
    golden.data["advantages"] = {"grpo_eps1e-6": [0.0] * 6}
    value, grad = loss_checks(golden)
    assert value.error > value.tolerance and grad.error <= grad.tolerance
    assert next(advantage_checks(golden)).error > 1.0


@pytest.mark.parametrize("name", DATA["losses"])
def test_row_order_does_not_matter(name, monkeypatch):
    """Packed in another order (rows 4, 0, 5, 2, 3, 1) every loss keeps its value and every token its gradient."""
    golden, rows = Golden(FILE), [4, 0, 5, 2, 3, 1]
    build = golden.inputs
    leaves = []

    def permuted(**options):
        inputs = build(**options)
        leaves.append(inputs.logprobs_N)
        return take_rows(inputs, rows)

    monkeypatch.setattr(golden, "inputs", permuted)
    entry = DATA["losses"][name]
    loss = golden_loss(golden, name, entry["config"])[1]
    loss.backward()
    assert abs(loss.item() - entry["value"]) <= 1e-12
    gradient_BT = alg.unflatten_padded(leaves[0].grad, golden.mask_BT)
    torch.testing.assert_close(gradient_BT, to_tensor(entry["grad"]), rtol=0, atol=1e-12)


def test_sequence_and_geometric_ratios():
    inputs = GOLDEN.inputs(rollout=True)
    for mode, name in (("sequence_truncate", "seq_ratio"), ("geo_mask", "geo_ratio")):
        want_B = to_tensor(DATA["masks"][name])
        for row, want in enumerate(want_B.tolist()):
            correction = alg.correction_weights(inputs, mode, low=want - 1e-9, high=want + 1e-9)
            assert not correction.out_of_bounds_N[inputs.row_N == row].any(), (mode, row)


@pytest.mark.parametrize(("delta", "name"), [(0.1, "opsm_old_0.1"), (0.2, "opsm_roll_0.2")])
def test_off_policy_sequence_mask(delta, name):
    mask_N = alg.opsm_mask(GOLDEN.inputs(rollout="roll" in name), delta)
    assert torch.equal(mask_N, alg.flatten_padded(to_tensor(DATA["masks"][name]), GOLDEN.mask_BT).bool())


def test_high_entropy_mask():
    entropy_N = GOLDEN.flat("entropy")
    mask_N = alg.high_entropy_mask(entropy_N, alg.high_entropy_threshold(entropy_N, 0.2))
    assert torch.equal(mask_N, alg.flatten_padded(to_tensor(DATA["masks"]["high_entropy_0.2"]), GOLDEN.mask_BT).bool())


INVARIANCE = {name: case for name, case in DATA["invariance"]["cases"].items() if "WRONG" not in name}


@pytest.mark.parametrize("name", INVARIANCE)
def test_partial_losses_of_a_split_batch(name):
    aggregation, split = name.split("/")
    config = alg.AlgorithmConfig(aggregation=aggregation, clip_low=0.2, clip_high=0.28)
    objective = PolicyObjective(config, max_completion_tokens=8)
    inputs = GOLDEN.inputs()
    counts = objective.counts(inputs)
    for part, want in zip(split.split("|"), INVARIANCE[name]["partials"], strict=True):
        rows = [int(row) for row in part.split(",")]
        assert abs(objective(take_rows(inputs, rows), counts).loss.item() - want) <= 1e-12


def test_counts():
    want = DATA["invariance"]["global_counts"]
    inputs = GOLDEN.inputs()
    counts = alg.Counts.of(inputs.lengths_B, inputs.group_tokens_B)
    assert (counts.tokens, counts.sequences) == (want["n_tok"], want["n_seq"])
    assert abs(counts.prompts - want["n_prompt"]) < 1e-12
    assert inputs.group_tokens_B.tolist() == [want["prompt_tok"][str(int(group))] for group in GOLDEN.group_B]


def edge_case_loss(mask_BT, aggregation):
    """DAPO on the golden batch with another mask."""
    golden = Golden(FILE)
    golden.mask_BT, golden.lengths_B = mask_BT, mask_BT.sum(dim=1)
    inputs = golden.inputs()
    config = alg.AlgorithmConfig(aggregation=aggregation, clip_low=0.2, clip_high=0.28)
    objective = PolicyObjective(config, max_completion_tokens=8)
    return objective(inputs, objective.counts(inputs)).loss, inputs.logprobs_N


@pytest.mark.parametrize("aggregation", alg.AGGREGATIONS)
def test_empty_completion_leaves_the_denominators(aggregation):
    mask_BT = GOLDEN.mask_BT.clone()
    mask_BT[1] = False
    want = DATA["edge_cases"]["empty_completion_row1"][aggregation]
    assert abs(edge_case_loss(mask_BT, aggregation)[0].item() - want) <= 1e-12


@pytest.mark.parametrize("aggregation", alg.AGGREGATIONS)
def test_everything_masked_is_zero_with_a_graph(aggregation):
    loss, live_N = edge_case_loss(torch.zeros_like(GOLDEN.mask_BT), aggregation)
    loss.backward()
    assert loss.item() == 0.0 and live_N.grad.shape == (0,)


def test_extreme_log_ratio_is_clamped_and_has_no_gradient():
    want = DATA["edge_cases"]["log_ratio_minus60_at_0,0"]
    golden = Golden(FILE)
    golden.data["inputs"]["lp_new"][0][0] = golden.data["inputs"]["lp_old"][0][0] - 60.0
    live_N, loss = golden_loss(golden, "dapo/token_mean", {"eps_low": 0.2, "eps_high": 0.28})
    loss.backward()
    assert abs(loss.item() - want["value"]) <= 1e-12
    assert live_N.grad[0].item() == want["grad_0_0"]


def test_benchmark_takes_batches_of_any_size(tmp_path):
    """The golden batch twice over: every loss is a mean and stays, every gradient halves."""
    data = json.loads(FILE.read_text())
    for name in ("lengths", "rewards", "mask", "lp_new", "lp_old", "lp_roll", "lp_ref", "entropy", "truncated", "adv"):
        data["inputs"][name] *= 2
    data["inputs"]["reward_table"] *= 2
    data["inputs"]["group"] += [group + 2 for group in data["inputs"]["group"]]
    del data["losses"]["dapo+top_entropy_0.2/token_mean"]  # the quantile interpolates between other neighbours
    for entry in data["losses"].values():
        entry["grad"] = [[value / 2 for value in row] for row in entry["grad"]] * 2
    within_group = ("grpo_eps1e-6", "dr_grpo", "rloo", "loo_mean_loo_std_eps1e-6", "opo", "multi_weighted_sum")
    data["advantages"] = {name: data["advantages"][name] * 2 for name in within_group}
    path = tmp_path / "doubled.json"
    path.write_text(json.dumps(data))
    assert [check.name for check in all_checks(path) if not check.error <= check.tolerance] == []
