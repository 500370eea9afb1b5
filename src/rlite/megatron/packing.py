"""How packed sequences lie on context-parallel ranks, and what Megatron-core's attention is told of them.

Shape legend: T packed tokens of all context-parallel ranks together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlite.megatron.bootstrap import capabilities
from rlite.megatron.microbatch import MicroBatch


class Run(NamedTuple):
    """Neighbouring sequences of the same length: attention takes them in one call."""

    start: int
    """In T."""
    count: int
    length: int


@dataclass
class Packing(PackedSeqParams):
    """Megatron-core's description of the sequences, with their lengths as numbers for our own attention."""

    lengths: tuple[int, ...] = ()
    """Of the sequences over all context-parallel ranks, padding included."""

    @classmethod
    def of(cls, batch: MicroBatch) -> "Packing":
        # Without Transformer Engine only the rotary embedding reads the bounds, as numbers: from a device it would wait.
        device = batch.tokens_T.device if capabilities().transformer_engine else "cpu"
        bounds = torch.tensor([*batch.starts, batch.tokens_T.numel()], dtype=torch.int32, device=device)
        longest = max(batch.lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=batch.lengths,
        )

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The sequences in order, equal neighbours together."""
        return tuple(_runs(self.lengths))


def _runs(lengths: Sequence[int]) -> Iterator[Run]:
    start = count = 0
    for number, length in enumerate(lengths):
        count += 1
        if number + 1 == len(lengths) or lengths[number + 1] != length:
            yield Run(start, count, length)
            start, count = start + count * length, 0


@lru_cache(maxsize=64)
def context_order(lengths: tuple[int, ...], cp: int) -> Tensor:
    """int64 `[T]` on the CPU: puts what the context-parallel ranks hold, one rank after the other, in the order of T."""
    return torch.argsort(context_positions(lengths, cp).flatten())


@lru_cache(maxsize=64)
def context_positions(lengths: tuple[int, ...], cp: int) -> Tensor:
    """int64 `[cp, T / cp]` on the CPU: positions in T that each context-parallel rank holds, in its order.

    Megatron's zigzag in every sequence: of `2 * cp` equal pieces, rank r holds number r and number `2 * cp - 1 - r`.
    """
    parts, start = [], 0
    for length in lengths:
        pieces = torch.arange(start, start + length).view(2 * cp, -1)
        parts.append(torch.cat([pieces[:cp], pieces[cp:].flip(0)], dim=1))
        start += length
    return torch.cat(parts, dim=1)
