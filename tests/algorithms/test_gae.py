"""GAE and the clipped value loss against values worked out by hand."""

import math

import pytest
import torch

from rlite.algorithms.gae import gae, token_rewards, value_loss


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_completions_by_hand() -> None:
    """Row 0: rewards 0, 0, 1, values .5, .4, .8; row 1: reward 2, value 1.5. gamma .9, lambda .8.

    delta = (0 + .9*.4 - .5, 0 + .9*.8 - .4, 1 - .8) = (-.14, .32, .2)
    A_2 = .2,  A_1 = .32 + .72*.2 = .464,  A_0 = -.14 + .72*.464 = .19408
    """
    lengths = torch.tensor([3, 1])
    result = gae(tensor(0, 0, 1, 2), tensor(0.5, 0.4, 0.8, 1.5), lengths, gamma=0.9, lam=0.8)
    torch.testing.assert_close(result.advantages_N, tensor(0.19408, 0.464, 0.2, 0.5), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.returns_N, tensor(0.69408, 0.864, 1.0, 2.0), rtol=0, atol=1e-12)


def test_lambda_one_is_return_minus_value_and_lambda_zero_is_the_td_error() -> None:
    rewards, values, lengths = tensor(1, 2, 3), tensor(5, 7, 11), torch.tensor([3])
    monte_carlo = gae(rewards, values, lengths, gamma=1.0, lam=1.0)
    assert monte_carlo.returns_N.tolist() == [6, 5, 3]
    assert monte_carlo.advantages_N.tolist() == [1, -2, -8]
    one_step = gae(rewards, values, lengths, gamma=1.0, lam=0.0)
    assert one_step.advantages_N.tolist() == [1 + 7 - 5, 2 + 11 - 7, 3 - 11]


def test_rows_do_not_leak_into_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 0, 5, 1])
    rewards, values = (torch.randn(8, generator=generator).double() for _ in range(2))
    together = gae(rewards, values, lengths, gamma=0.99, lam=0.95).advantages_N
    alone = [
        gae(r, v, torch.tensor([len(r)]), gamma=0.99, lam=0.95).advantages_N
        for r, v in zip(rewards.split(lengths.tolist()), values.split(lengths.tolist()), strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_reward_is_paid_at_the_last_token_and_kl_at_each() -> None:
    lengths = torch.tensor([2, 0, 1])
    assert token_rewards(tensor(1, 9, 3), lengths).tolist() == [0, 1, 3]
    assert token_rewards(tensor(1, 9, 3), lengths, token_kl_N=tensor(0.5, 0.25, 1)).tolist() == [-0.5, 0.75, 2]


def test_a_completion_without_a_verdict_stays_nan_and_alone() -> None:
    lengths = torch.tensor([2, 1])
    result = gae(token_rewards(tensor(math.nan, 1), lengths), tensor(0, 0, 0), lengths, gamma=1.0, lam=1.0)
    assert result.advantages_N.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        (0.1, 0.5 * 0.9**2, -0.9, False),  # inside the range
        (0.5, 0.5 * 0.8**2, 0.0, True),  # towards the return, but further than the clip allows: no gradient
        (-0.5, 0.5 * 1.5**2, -1.5, False),  # away from the return: pulled back
    ],
)
def test_value_clipping_only_holds_back_steps_towards_the_return(
    value: float, loss: float, slope: float, clipped: bool
) -> None:
    values = tensor(value).requires_grad_()
    losses, flags = value_loss(values, tensor(0.0), tensor(1.0), clip=0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)
    assert flags.tolist() == [clipped]


def test_without_clipping_it_is_half_the_squared_error() -> None:
    losses, flags = value_loss(tensor(3.0), tensor(0.0), tensor(1.0))
    assert losses.tolist() == [2.0]
    assert flags.tolist() == [False]
