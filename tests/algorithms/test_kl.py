"""KL estimators: gradient identities, behaviour beyond the clamp, unbiasedness."""

import pytest
import torch

from rlite.algorithms import KL_ESTIMATORS, kl_estimate


def value_and_gradient(estimator, live, ref, log_ratio=None):
    live_N = torch.tensor(live, dtype=torch.float64, requires_grad=True)
    ratio_N = None if log_ratio is None else torch.tensor(log_ratio, dtype=torch.float64)
    kl_N = kl_estimate(live_N, torch.tensor(ref, dtype=torch.float64), estimator, log_ratio_N=ratio_N)
    kl_N.sum().backward()
    return kl_N.detach(), live_N.grad


def test_straight_through_estimators_have_the_k2_gradient_and_the_k3_value():
    live, ref = [-1.0, -0.5, -3.0], [-1.5, -0.1, -3.0]
    k3, _ = value_and_gradient("k3", live, ref)
    _, k2_gradient = value_and_gradient("k2", live, ref)
    for estimator in ("k3+", "k3s", "k3u"):
        value, gradient = value_and_gradient(estimator, live, ref)
        assert torch.equal(value, k3) and torch.equal(gradient, k2_gradient)


def test_k3u_weighs_value_and_gradient_with_the_ratio():
    value, gradient = value_and_gradient("k3u", [-1.0], [-1.5], log_ratio=[0.3])
    plain, plain_gradient = value_and_gradient("k3s", [-1.0], [-1.5])
    scale = torch.tensor([0.3], dtype=torch.float64).exp()
    torch.testing.assert_close(value, scale * plain)
    torch.testing.assert_close(gradient, scale * plain_gradient)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("gap", [-50.0, 50.0])
def test_beyond_the_clamp_the_value_is_finite_and_the_gradient_zero(estimator, gap):
    value, gradient = value_and_gradient(estimator, [-60.0], [-60.0 + gap], log_ratio=[0.0])
    assert torch.isfinite(value).all() and gradient.item() == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_is_the_kl(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = (policy * (policy / reference).log()).sum()
    assert (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum().item() == pytest.approx(
        expected.item()
    )


def test_unknown_estimator():
    with pytest.raises(ValueError, match=r"model.algorithm.kl_estimator = 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
