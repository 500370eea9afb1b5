"""From per-token losses to the PARTIAL loss of a micro-batch: local numerator over global denominators.

The sum over all micro-batches and data-parallel ranks is the loss, whatever the split. Gradients are therefore summed,
never averaged.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlite.algorithms.inputs import Counts, LossInputs

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean_token_mean"
]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def row_weights(inputs: LossInputs, counts: Counts, mode: str, *, max_completion_tokens: int | None = None) -> Tensor:
    """`[B]` weight of the tokens of a row: `loss = sum_N weight_B[row_N] * loss_N`. Empty denominators count as 1.

    | mode                    | weight                             | known as                       |
    |-------------------------|------------------------------------|--------------------------------|
    | token_mean              | 1 / tokens                         | DAPO                           |
    | seq_mean_token_mean     | 1 / (sequences * length)           | GRPO                           |
    | seq_mean_token_sum      | 1 / sequences                      | LUSPO, MiniRL                  |
    | seq_mean_token_sum_norm | 1 / (sequences * max completion)   | Dr. GRPO (arXiv 2503.20783)    |
    | prompt_mean_token_mean  | 1 / (prompts * tokens of group)    | ScaleRL, DAPO eq. 8 as printed |
    """
    sequences = max(counts.sequences, 1.0)
    lengths = inputs.lengths_B.clamp(min=1).to(inputs.logprobs_N.dtype)
    if mode == "token_mean":
        return torch.full_like(lengths, 1.0 / max(counts.tokens, 1.0))
    if mode == "seq_mean_token_mean":
        return 1.0 / (sequences * lengths)
    if mode == "seq_mean_token_sum":
        return torch.full_like(lengths, 1.0 / sequences)
    if mode == "seq_mean_token_sum_norm":
        if not max_completion_tokens:
            raise ValueError(
                "model.algorithm.aggregation = seq_mean_token_sum_norm divides by the largest completion length: "
                "give max_completion_tokens (the rollout's max_tokens)"
            )
        return torch.full_like(lengths, 1.0 / (sequences * max_completion_tokens))
    if mode == "prompt_mean_token_mean":
        if inputs.group_tokens_B is None:
            raise ValueError("model.algorithm.aggregation = prompt_mean_token_mean needs LossInputs.group_tokens_B")
        prompts = counts.prompts if counts.prompts > 0 else 1.0
        return 1.0 / (prompts * inputs.group_tokens_B.clamp(min=1).to(lengths.dtype))
    raise ValueError(f"model.algorithm.aggregation = {mode!r}: choose one of {', '.join(AGGREGATIONS)}")


def aggregate(
    loss_N: Tensor, inputs: LossInputs, counts: Counts, mode: str, *, max_completion_tokens: int | None = None
) -> Tensor:
    """Scalar partial loss; see `row_weights` for the modes."""
    weights = row_weights(inputs, counts, mode, max_completion_tokens=max_completion_tokens)
    return (loss_N * weights[inputs.row_N]).sum()
