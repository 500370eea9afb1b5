"""LossInputs, Counts and the flat layout."""

from dataclasses import replace

import pytest
import torch

from rlite import algorithms as alg
from tests.algorithms.batches import random_inputs


def test_flatten_and_back():
    mask_BT = torch.tensor([[0, 1, 1], [1, 0, 0]]).bool()
    values_BT = torch.arange(6.0).reshape(2, 3)
    flat_N = alg.flatten_padded(values_BT, mask_BT)
    assert flat_N.tolist() == [1.0, 2.0, 3.0]
    assert alg.unflatten_padded(flat_N, mask_BT, fill=-1.0).tolist() == [[-1.0, 1.0, 2.0], [3.0, -1.0, -1.0]]
    assert alg.row_index(mask_BT.sum(dim=1)).tolist() == [0, 0, 1]


def test_wrong_shape_names_the_field():
    inputs = random_inputs(0, lengths=[2, 1], groups=[0, 0])
    with pytest.raises(ValueError, match=r"LossInputs.ref_logprobs_N has shape \(2, 3\), expected \(3,\)"):
        replace(inputs, ref_logprobs_N=torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["logprobs_N", "old_logprobs_N", "rollout_logprobs_N", "ref_logprobs_N"])
@pytest.mark.parametrize("value", [float("-inf"), float("inf"), 0.5])
def test_impossible_logprob_names_row_and_token(name, value):
    inputs = random_inputs(0, lengths=[2, 3], groups=[0, 0])
    getattr(inputs, name)[3] = value
    with pytest.raises(ValueError, match=rf"LossInputs.{name}: {value} at row 1, trained token 1"):
        inputs.validate()


def test_nan_is_only_allowed_where_the_engine_recorded_nothing():
    inputs = random_inputs(0, lengths=[2, 3], groups=[0, 0])
    inputs.rollout_logprobs_N[0] = torch.nan
    inputs.validate()
    inputs.old_logprobs_N[4] = torch.nan
    with pytest.raises(ValueError, match=r"LossInputs.old_logprobs_N: nan at row 1, trained token 2"):
        inputs.validate()


def test_lengths_must_agree_with_rows():
    inputs = random_inputs(0, lengths=[2, 3], groups=[0, 0])
    with pytest.raises(ValueError, match=r"lengths_B = \[3, 2\] but row_N counts \[2, 3\]"):
        replace(inputs, lengths_B=torch.tensor([3, 2])).validate()


def test_counts_add_up_over_ranks_through_their_tensor():
    parts = [
        alg.Counts.of(torch.tensor([3, 0]), torch.tensor([5, 5])),
        alg.Counts.of(torch.tensor([2, 4]), torch.tensor([5, 4])),
    ]
    reduced = alg.Counts.from_tensor(sum(part.to_tensor() for part in parts))
    assert reduced == parts[0] + parts[1]
    assert (reduced.tokens, reduced.sequences) == (9.0, 3.0)
    assert reduced.prompts == pytest.approx(2.0, abs=1e-15, rel=0)


def test_token_counts_are_exact_far_beyond_fp32():
    counts = alg.Counts.of(torch.tensor([2**24 + 1, 2**24 + 2]))
    assert counts.tokens == 2**25 + 3


def test_group_tokens_without_dropped_rows():
    counted_B = alg.group_token_counts(
        torch.tensor([3, 2, 4]), torch.tensor([7, 7, 1]), keep_B=torch.tensor([True, False, True])
    )
    assert counted_B.tolist() == [3, 3, 4]
