"""Rows become micro-batches: sequences of any length packed end to end, at most a token budget each.

Shape legend: T packed tokens of the micro-batch, N trained tokens, L MoE layers, K experts a token.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.types import NATIVE_EXPERT, TokenRow


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some rows end to end, and where their trained tokens are predicted."""

    row_indices: tuple[int, ...]
    """Which rows of the call, in their order here; empty for a dummy."""
    tokens_T: Tensor
    """int64; 0 where padded."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, padding included; sums to T."""
    row_lengths: tuple[int, ...]
    """Tokens of each row, without padding; empty for a dummy."""
    predict_N: Tensor
    """int64, position in T whose hidden state predicts each trained token."""
    targets_N: Tensor
    """int64, the trained tokens, row after row."""
    num_tokens_per_row: tuple[int, ...]
    """Trained tokens of each row; sums to N."""
    experts_TLK: Tensor | None = None
    """int32, to replay; `NATIVE_EXPERT`, or None everywhere: the router chooses."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each sequence begins in T."""
        return tuple(itertools.accumulate(self.lengths[:-1], initial=0))


def pack_rows(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Row indices of each micro-batch, longest row first: few micro-batches of at most `max_tokens` (first fit decreasing).

    A row longer than the budget gets a micro-batch of its own. Deterministic.
    """
    bins: list[list[int]] = []
    used: list[int] = []
    for row in _longest_first(lengths):
        fitting = next((number for number, tokens in enumerate(used) if tokens + lengths[row] <= max_tokens), None)
        if fitting is None:
            bins.append([])
            used.append(0)
            fitting = len(bins) - 1
        bins[fitting].append(row)
        used[fitting] += lengths[row]
    return bins


def spread_rows(lengths: Sequence[int], *, count: int, max_tokens: int) -> list[list[int]]:
    """Row indices of exactly `count` micro-batches with about equal tokens, the largest first.

    Ranks wait for each other in every micro-batch (experts are shared), so each should be as long as the next rank's.
    `count` is at least `len(pack_rows(...))`; rows that cannot be spread within the budget are packed as that does.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    used = [0] * count
    for row in _longest_first(lengths):  # to the emptiest: longest processing time first
        emptiest = used.index(min(used))
        bins[emptiest].append(row)
        used[emptiest] += lengths[row]
    if any(tokens > max_tokens and len(rows) > 1 for tokens, rows in zip(used, bins, strict=True)):
        bins = pack_rows(lengths, max_tokens=max_tokens)
        bins += [[] for _ in range(count - len(bins))]
    return sorted(bins, key=lambda rows: -sum(lengths[row] for row in rows))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def make_microbatch(
    rows: Sequence[TokenRow],
    row_indices: Sequence[int],
    *,
    row_multiple: int = 1,
    total_multiple: int = 1,
    device: torch.device,
) -> MicroBatch:
    """The micro-batch of `rows[i] for i in row_indices`.

    Each row is padded to a multiple of `row_multiple`, the last one further, to a total of a multiple of
    `total_multiple` (itself a multiple of `row_multiple`). Without row indices it is a dummy: token 0, nothing trained.

    Raises:
        ValueError: a row is empty or trains on its first token, which nothing predicts.
    """
    chosen = [rows[index] for index in row_indices]
    for index, row in zip(row_indices, chosen, strict=True):
        if row.token_ids.numel() == 0 or bool(row.loss_mask[0]):
            raise ValueError(f"row {index}: needs at least one token, and loss_mask[0] must be false")
    lengths = [round_up(row.token_ids.numel(), row_multiple) for row in chosen] or [row_multiple]
    lengths[-1] += round_up(sum(lengths), total_multiple) - sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens_T = torch.zeros(starts[-1], dtype=torch.int64)
    predict, targets = [], []
    for start, row in zip(starts, chosen, strict=False):
        tokens_T[start : start + row.token_ids.numel()] = row.token_ids
        trained = row.loss_mask.nonzero()[:, 0]
        predict.append(start + trained - 1)
        targets.append(row.token_ids[trained])
    empty = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        row_indices=tuple(row_indices),
        tokens_T=tokens_T.to(device),
        lengths=tuple(lengths),
        row_lengths=tuple(row.token_ids.numel() for row in chosen),
        predict_N=torch.cat([empty, *predict]).to(device),
        targets_N=torch.cat([empty, *targets]).to(device),
        num_tokens_per_row=tuple(row.num_loss_tokens for row in chosen),
        experts_TLK=_experts(chosen, starts, device),
    )


def _experts(rows: Sequence[TokenRow], starts: Sequence[int], device: torch.device) -> Tensor | None:
    given = [(start, row) for start, row in zip(starts, rows, strict=False) if row.experts is not None]
    if not given:
        return None
    experts_TLK = torch.full((starts[-1], *given[0][1].experts.shape[1:]), NATIVE_EXPERT, dtype=torch.int32)
    for start, row in given:
        experts_TLK[start : start + row.token_ids.numel()] = row.experts.to(torch.int32)
    return experts_TLK.to(device)


def agree_on_count(num_microbatches: int, *, multiple_of: int = 1) -> int:
    """The largest number of micro-batches on any rank (at least 1), rounded up: all ranks run the same schedule.

    Expert-parallel groups span data-parallel ranks, so a rank that stopped early would leave the others waiting.
    """
    count = torch.tensor(max(num_microbatches, 1))
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return round_up(int(count), multiple_of)


def round_up(value: int, multiple_of: int) -> int:
    return -(-value // multiple_of) * multiple_of
