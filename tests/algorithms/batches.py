"""Batches for the algorithm tests: random ones, and any batch cut into parts."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from rlite.algorithms import LossInputs, group_token_counts, row_index


def random_inputs(seed: int, *, lengths: list[int], groups: list[int], spread: float = 0.5) -> LossInputs:
    """fp64 inputs with every optional tensor; `spread` is the distance of old, rollout and ref from the live policy."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B, group_B = torch.tensor(lengths), torch.tensor(groups)
    num_tokens = sum(lengths)

    def near(logprobs_N: Tensor) -> Tensor:
        noise_N = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
        return (logprobs_N + spread * noise_N).clamp(max=-1e-3)

    live_N = -torch.rand(num_tokens, generator=generator, dtype=torch.float64) * 3 - 0.01
    advantages_B = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return LossInputs(
        logprobs_N=live_N,
        old_logprobs_N=near(live_N),
        rollout_logprobs_N=near(live_N),
        ref_logprobs_N=near(live_N),
        entropy_N=torch.rand(num_tokens, generator=generator, dtype=torch.float64) * 2,
        advantages_N=advantages_B.repeat_interleave(lengths_B),
        row_N=row_index(lengths_B),
        lengths_B=lengths_B,
        group_tokens_B=group_token_counts(lengths_B, group_B),
    )


def take_rows(inputs: LossInputs, rows: list[int]) -> LossInputs:
    """The given rows in the given order as a batch of their own; gradients flow back to `inputs`."""
    token_order = torch.cat([(inputs.row_N == row).nonzero().flatten() for row in rows] + [torch.tensor([], dtype=int)])
    changes = {}
    for spec in fields(inputs):
        value = getattr(inputs, spec.name)
        if value is not None:
            changes[spec.name] = value[token_order] if spec.name.endswith("_N") else value[rows]
    return replace(inputs, **changes | {"row_N": row_index(inputs.lengths_B[rows])})


def with_leaf(inputs: LossInputs) -> LossInputs:
    """A copy whose live log-probabilities are a leaf that collects the gradient."""
    return replace(inputs, logprobs_N=inputs.logprobs_N.detach().clone().requires_grad_())
