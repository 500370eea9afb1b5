"""gloo has no all-gather or reduce-scatter of uneven pieces; expert tensor parallelism needs both."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def even_gather(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps Megatron's gather along dim 0: uneven pieces are padded to the largest one on the way."""

    def gather_along_first_dim(
        tensor: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if _is_even(output_split_sizes) or group.size() == 1:
            return gather(tensor, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.size(0)] = tensor
        gathered = tensor.new_empty((longest * group.size(), *tensor.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        pieces = zip(gathered.split(longest), output_split_sizes, strict=True)
        return torch.cat([piece[:size] for piece, size in pieces])

    return gather_along_first_dim


def even_reduce_scatter(reduce_scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps Megatron's reduce-scatter along dim 0, the transpose of `even_gather`."""

    def reduce_scatter_along_first_dim(
        tensor: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if _is_even(input_split_sizes) or group.size() == 1:
            return reduce_scatter(tensor, group, input_split_sizes, use_global_buffer)
        longest = max(input_split_sizes)
        padded = tensor.new_zeros((longest * group.size(), *tensor.shape[1:]))
        for slot, piece in zip(padded.split(longest), tensor.split(list(input_split_sizes)), strict=True):
            slot[: piece.size(0)] = piece
        scattered = tensor.new_empty((longest, *tensor.shape[1:]))
        torch.distributed.reduce_scatter_tensor(scattered, padded, group=group)
        return scattered[: input_split_sizes[group.rank()]].contiguous()

    return reduce_scatter_along_first_dim


def _is_even(split_sizes: Sequence[int] | None) -> bool:
    return split_sizes is None or len(set(split_sizes)) == 1
