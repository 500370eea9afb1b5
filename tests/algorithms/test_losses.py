"""Policy losses one token at a time, by hand; the golden file covers them in bulk."""

import math
from dataclasses import replace

import pytest
import torch

from rlite import algorithms as alg
from rlite.algorithms.losses import cispo, dppo_kl, gspo, ppo_clip, sapo
from tests.algorithms.batches import random_inputs


def one_token(ratio, advantage):
    """A row of one token whose ratio to the old policy is `ratio`."""
    old = -5.0
    return alg.LossInputs(
        logprobs_N=torch.tensor([old + math.log(ratio)], dtype=torch.float64, requires_grad=True),
        old_logprobs_N=torch.tensor([old], dtype=torch.float64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        row_N=torch.tensor([0]),
        lengths_B=torch.tensor([1]),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "flags"),
    [
        (1.1, 2.0, -2.2, -2.2, "   "),
        (1.5, 2.0, -2.4, 0.0, " h "),
        (0.5, 2.0, -1.0, -1.0, "   "),
        (0.5, -2.0, 1.6, 0.0, "l  "),
        (1.5, -2.0, 3.0, 3.0, "   "),
        (4.0, -2.0, 6.0, 0.0, "  d"),
    ],
)
def test_ppo_clip_regions(ratio, advantage, loss, gradient, flags):
    inputs = one_token(ratio, advantage)
    output = ppo_clip(inputs, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    output.loss_N.sum().backward()
    assert output.loss_N.item() == pytest.approx(loss, rel=1e-12)
    assert inputs.logprobs_N.grad.item() == pytest.approx(gradient, rel=1e-12)
    got = (output.clipped_low_N.item(), output.clipped_high_N.item(), output.dual_clipped_N.item())
    assert got == tuple(flag != " " for flag in flags)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    inputs = one_token(8.0, 1.0)
    output = cispo(inputs, ratio_max=5.0)
    output.loss_N.sum().backward()
    assert inputs.logprobs_N.grad.item() == -5.0 and output.clipped_high_N.item()


def test_sapo_on_policy_value_is_not_minus_a():
    inputs = one_token(1.0, 1.0)
    output = sapo(inputs, tau_pos=2.0)
    output.loss_N.sum().backward()
    assert output.loss_N.item() == pytest.approx(-1.0) and inputs.logprobs_N.grad.item() == pytest.approx(-1.0)


@pytest.mark.parametrize(("ratio", "advantage", "dropped"), [(3.0, 1.0, True), (3.0, -1.0, False), (0.1, -1.0, True)])
def test_dppo_drops_only_moves_in_the_direction_of_the_advantage(ratio, advantage, dropped):
    inputs = one_token(ratio, advantage)
    dppo_kl(inputs, delta_low=1e-3, delta_high=1e-3).loss_N.sum().backward()
    assert (inputs.logprobs_N.grad.item() == 0.0) == dropped


def test_clip_flags_count_ratios_beyond_the_clamp():
    inputs = replace(one_token(1.0, 1.0), logprobs_N=torch.tensor([0.0]), old_logprobs_N=torch.tensor([-1000.0]))
    assert ppo_clip(inputs).clipped_high_N.item()


def test_gspo_token_form_equals_the_sequence_form():
    """Autograd through exp(mean_t(x - old)), without any stop-gradient."""
    inputs = random_inputs(0, lengths=[3, 1, 4], groups=[0, 0, 0], spread=1.0)
    inputs = replace(inputs, logprobs_N=inputs.logprobs_N.requires_grad_())
    weights_N = 1.0 / inputs.lengths_B[inputs.row_N]
    (gspo(inputs, clip_low=0.05, clip_high=0.06).loss_N * weights_N).sum().backward()
    live_N = inputs.logprobs_N.detach().clone().requires_grad_()
    loss = 0.0
    for x, old, advantage in zip(
        *(values_N.split([3, 1, 4]) for values_N in (live_N, inputs.old_logprobs_N, inputs.advantages_N)), strict=True
    ):
        ratio = (x - old).mean().exp()
        loss = loss - torch.minimum(ratio * advantage[0], ratio.clamp(0.95, 1.06) * advantage[0])
    loss.backward()
    torch.testing.assert_close(inputs.logprobs_N.grad, live_N.grad, rtol=1e-12, atol=1e-15)
