"""Train/infer weights by hand, and their properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite import algorithms as alg
from tests.algorithms.batches import random_inputs

LOG_W = [math.log(0.5), math.log(4.0), 0.0, math.log(3.0)]
"""Two rows of two tokens: w = 0.5, 4 | 1, 3; W = 2 | 3; g = sqrt(2) | sqrt(3)."""


def weights(mode, log_w=LOG_W, **bounds):
    inputs = alg.LossInputs(
        logprobs_N=torch.full((4,), -9.0, dtype=torch.float64),
        old_logprobs_N=torch.tensor(log_w, dtype=torch.float64) - 9.0,
        rollout_logprobs_N=torch.full((4,), -9.0, dtype=torch.float64),
        advantages_N=torch.ones(4, dtype=torch.float64),
        row_N=torch.tensor([0, 0, 1, 1]),
        lengths_B=torch.tensor([2, 2]),
    )
    return alg.correction_weights(inputs, mode, **bounds).weight_N.tolist()


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", {"high": 2.0}, [0.5, 2.0, 1.0, 2.0]),
        ("token_truncate", {"low": 0.8, "high": 2.0}, [0.8, 2.0, 1.0, 2.0]),
        ("token_mask", {"high": 3.5}, [0.5, 0.0, 1.0, 3.0]),
        ("sequence_truncate", {"high": 2.5}, [2.0, 2.0, 2.5, 2.5]),
        ("sequence_mask", {"high": 2.5}, [2.0, 2.0, 0.0, 0.0]),
        ("geo_mask", {"high": 1.5}, [1.0, 1.0, 0.0, 0.0]),
        ("geo_mask_token", {"low": 1.5}, [0.0, 0.0, 1.0, 3.0]),
        ("k3_rs", {"high": 0.5}, [0.0, 0.0, 1.0, 1.0]),
        ("none", {"veto_ratio": 0.6}, [0.0, 0.0, 1.0, 1.0]),
        ("token_truncate", {"high": 2.0, "veto_ratio": 0.6}, [0.0, 0.0, 1.0, 2.0]),
    ],
)
def test_weights_by_hand(mode, bounds, expected):
    assert weights(mode, **bounds) == pytest.approx(expected, rel=1e-12)


def test_huge_mismatch_stays_finite():
    assert all(map(math.isfinite, weights("sequence_truncate", log_w=[800.0, 800.0, -800.0, 0.0], high=2.0)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(alg.CORRECTIONS), high=st.floats(0.5, 5.0))
def test_weights_lie_between_zero_and_the_bound(seed, mode, high):
    inputs = random_inputs(seed, lengths=[3, 0, 5], groups=[0, 0, 0], spread=2.0)
    correction = alg.correction_weights(inputs, mode, high=None if mode == "none" else high)
    assert (correction.weight_N >= 0).all()
    assert not correction.weight_N[correction.rejected_N].any()
    if mode not in ("none", "geo_mask", "geo_mask_token", "k3_rs"):
        assert (correction.weight_N <= high).all()


def test_engine_logprobs_decide_the_sequence_mask_where_they_exist():
    inputs = random_inputs(0, lengths=[2], groups=[0])
    shared = dict(row_N=inputs.row_N, lengths_B=inputs.lengths_B, advantages_N=-torch.ones(2, dtype=torch.float64))
    live_N = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    drifted = alg.LossInputs(logprobs_N=live_N, old_logprobs_N=live_N, rollout_logprobs_N=live_N + 1.0, **shared)
    close = alg.LossInputs(logprobs_N=live_N, old_logprobs_N=live_N + 1.0, rollout_logprobs_N=live_N, **shared)
    assert alg.opsm_mask(drifted, 0.5).tolist() == [False, False]
    assert alg.opsm_mask(close, 0.5).tolist() == [True, True]
