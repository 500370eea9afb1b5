"""A user's loss, as `docs/algorithms.md` says how to write one."""

import torch

from rlite.algorithms import LossInputs, PolicyLoss


class ScaledReinforce:
    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, inputs: LossInputs) -> PolicyLoss:
        never_N = torch.zeros_like(inputs.logprobs_N, dtype=torch.bool)
        loss_N = -self.scale * inputs.advantages_N * inputs.logprobs_N
        return PolicyLoss(loss_N=loss_N, clipped_low_N=never_N, clipped_high_N=never_N, dual_clipped_N=never_N)
