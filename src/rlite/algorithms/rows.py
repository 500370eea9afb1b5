"""Sums and means over the rows of a flat token layout.

Shape legend: N trained tokens of all rows laid end to end, B rows, T padded length. `row_N` says which row a token
belongs to.
"""

import torch
from torch import Tensor


def row_sum(values_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """`[N] -> [B]`: sum of the tokens of each row; 0 for a row without tokens."""
    return values_N.new_zeros(num_rows).index_add(0, row_N, values_N)


def row_mean(values_N: Tensor, row_N: Tensor, lengths_B: Tensor) -> Tensor:
    """`[N] -> [B]`: mean over the tokens of each row; 0 for a row without tokens."""
    return row_sum(values_N, row_N, len(lengths_B)) / lengths_B.clamp(min=1).to(values_N.dtype)


def row_index(lengths_B: Tensor) -> Tensor:
    """`[B] -> [N]` int64: the row of every token, rows in order."""
    return torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)


def expand_rows(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """`[B] -> [N]`: repeats the value of a row for each of its tokens."""
    return torch.repeat_interleave(values_B, lengths_B)


def flatten_padded(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`[B, T] -> [N]`: keeps what the mask selects. A NaN in the padding is gone before any maths."""
    return values_BT[mask_BT.bool()]


def unflatten_padded(values_N: Tensor, mask_BT: Tensor, *, fill: float = 0.0) -> Tensor:
    """`[N] -> [B, T]`: the inverse of `flatten_padded`, with `fill` where the mask is false."""
    mask_BT = mask_BT.bool()
    return values_N.new_full(mask_BT.shape, fill).masked_scatter(mask_BT, values_N)
