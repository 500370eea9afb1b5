"""Rows become micro-batches: rectangles of token ids, padded on the right, at most a token budget each.

Shape legend: B rows, S padded length, N trained tokens of the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.types import NATIVE_EXPERT, TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows as one rectangle, and where their trained tokens are predicted."""

    row_indices: tuple[int, ...]
    """Which rows of the call, in the order of the rectangle; empty for a dummy."""
    tokens_BS: Tensor
    """int64; 0 where padded."""
    predict_N: Tensor
    """int64, flat index `s * B + b` into `[S, B]` of the position whose hidden state predicts each trained token."""
    targets_N: Tensor
    """int64, the trained tokens, row after row."""
    num_tokens_per_row: tuple[int, ...]
    """Trained tokens of each row; sums to N."""
    experts_SBLK: Tensor | None = None
    """int32 `[S, B, MoE layers, experts a token]` to replay; `NATIVE_EXPERT`, or None everywhere: the router chooses."""


def plan_microbatches(lengths: Sequence[int], *, max_tokens: int, multiple_of: int = 1) -> list[list[int]]:
    """Row indices of each micro-batch: rows sorted by length, so that little of a rectangle is padding.

    A row longer than the budget gets a micro-batch of its own. Deterministic.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    capacity = 0
    for row in order:
        if not batches or len(batches[-1]) >= capacity:
            batches.append([])
            capacity = max(1, max_tokens // _round_up(lengths[row], multiple_of))
        batches[-1].append(row)
    return batches


def make_microbatch(
    rows: Sequence[TokenRow], row_indices: Sequence[int], *, multiple_of: int, device: torch.device
) -> MicroBatch:
    """The micro-batch of `rows[i] for i in row_indices`, padded to a multiple of `multiple_of` tokens.

    Without row indices it is a dummy: token 0, no trained tokens.

    Raises:
        ValueError: a row is empty or trains on its first token, which nothing predicts.
    """
    chosen = [rows[index] for index in row_indices]
    for index, row in zip(row_indices, chosen, strict=True):
        if row.token_ids.numel() == 0 or bool(row.loss_mask[0]):
            raise ValueError(f"row {index}: needs at least one token, and loss_mask[0] must be false")
    longest = max((row.token_ids.numel() for row in chosen), default=1)
    batch, length = max(len(chosen), 1), _round_up(longest, multiple_of)
    tokens_BS = torch.zeros(batch, length, dtype=torch.int64)
    predict, targets = [], []
    for b, row in enumerate(chosen):
        tokens_BS[b, : row.token_ids.numel()] = row.token_ids
        trained = row.loss_mask.nonzero()[:, 0]
        predict.append((trained - 1) * batch + b)
        targets.append(row.token_ids[trained])
    empty = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        row_indices=tuple(row_indices),
        tokens_BS=tokens_BS.to(device),
        predict_N=torch.cat([empty, *predict]).to(device),
        targets_N=torch.cat([empty, *targets]).to(device),
        num_tokens_per_row=tuple(row.num_loss_tokens for row in chosen),
        experts_SBLK=_experts(chosen, length, device),
    )


def _experts(rows: Sequence[TokenRow], length: int, device: torch.device) -> Tensor | None:
    given = [(b, row) for b, row in enumerate(rows) if row.experts is not None]
    if not given:
        return None
    shape = (length, len(rows), *given[0][1].experts.shape[1:])
    experts_SBLK = torch.full(shape, NATIVE_EXPERT, dtype=torch.int32)
    for b, row in given:
        experts_SBLK[: row.token_ids.numel(), b] = row.experts.to(torch.int32)
    return experts_SBLK.to(device)


def agree_on_count(num_microbatches: int, *, multiple_of: int = 1) -> int:
    """The largest number of micro-batches on any rank (at least 1), rounded up: all ranks run the same schedule.

    Expert-parallel groups span data-parallel ranks, so a rank that stopped early would leave the others waiting.
    """
    count = torch.tensor(max(num_microbatches, 1))
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return _round_up(int(count), multiple_of)


def _round_up(value: int, multiple_of: int) -> int:
    return -(-value // multiple_of) * multiple_of
