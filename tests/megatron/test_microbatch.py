"""Rows become packed micro-batches; worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.megatron.microbatch import make_microbatch, pack_rows, spread_rows
from rlite.types import TokenRow

CPU = torch.device("cpu")


def _row(tokens: list[int], mask: list[int]) -> TokenRow:
    return TokenRow(token_ids=torch.tensor(tokens), loss_mask=torch.tensor(mask, dtype=torch.bool))


def test_rows_fill_the_budget_longest_first() -> None:
    # 8 | 7 | 4 fits neither, then 3 with the 7 (budget 10), 1 with the 8
    assert pack_rows([3, 7, 4, 8, 1], max_tokens=10) == [[3, 4], [1, 0], [2]]


def test_a_row_over_the_budget_stands_alone() -> None:
    assert pack_rows([100, 3, 2], max_tokens=6) == [[0], [1, 2]]


def test_no_rows_need_no_micro_batches() -> None:
    assert pack_rows([], max_tokens=6) == []


def test_rows_are_spread_evenly_over_more_micro_batches_than_they_need() -> None:
    # 9 -> A, 6 -> B, 4 -> B (10), 3 -> A (12): largest micro-batch first
    assert spread_rows([4, 9, 3, 6], count=2, max_tokens=100) == [[1, 2], [3, 0]]


def test_rows_that_cannot_be_spread_within_the_budget_are_packed() -> None:
    # to the emptiest: 3 2 2 = 7 and 3 2 = 5; packed: 3 3 and 2 2 2
    assert spread_rows([3, 3, 2, 2, 2], count=2, max_tokens=7) == [[0, 2, 4], [1, 3]]
    assert spread_rows([3, 3, 2, 2, 2], count=2, max_tokens=6) == [[0, 1], [2, 3, 4]]


def test_a_rank_with_fewer_rows_gets_dummies() -> None:
    assert spread_rows([3], count=3, max_tokens=10) == [[0], [], []]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60), st.integers(0, 4))
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths: list[int], max_tokens: int, more: int) -> None:
    count = max(1, len(pack_rows(lengths, max_tokens=max_tokens))) + more
    bins = spread_rows(lengths, count=count, max_tokens=max_tokens)
    assert len(bins) == count
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in rows) for rows in bins]
    assert tokens == sorted(tokens, reverse=True)
    assert all(total <= max_tokens or len(rows) == 1 for total, rows in zip(tokens, bins, strict=True))


def test_positions_predict_the_next_token() -> None:
    rows = [_row([5, 6, 7], [0, 1, 1]), _row([1, 2, 3, 4], [0, 0, 0, 1])]
    batch = make_microbatch(rows, [1, 0], device=CPU)
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.lengths == (4, 3) and batch.starts == (0, 4)
    assert batch.targets_N.tolist() == [4, 6, 7]
    assert batch.predict_N.tolist() == [2, 4, 5]
    assert batch.num_tokens_per_row == (1, 2)


def test_rows_and_their_total_are_padded_to_their_multiples() -> None:
    rows = [_row([5, 6, 7], [0, 1, 1]), _row([1, 2, 3, 4, 8], [0, 0, 0, 1, 0])]
    batch = make_microbatch(rows, [0, 1], row_multiple=2, total_multiple=8, device=CPU)
    assert batch.lengths == (4, 12)
    assert batch.tokens_T.tolist() == [5, 6, 7, 0, 1, 2, 3, 4, 8, 0, 0, 0, 0, 0, 0, 0]


def test_a_dummy_has_tokens_but_nothing_to_train() -> None:
    batch = make_microbatch([], [], row_multiple=2, total_multiple=4, device=CPU)
    assert batch.tokens_T.tolist() == [0, 0, 0, 0] and batch.lengths == (4,)
    assert batch.row_indices == () and batch.targets_N.numel() == 0


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0"):
        make_microbatch([_row([5, 6], [1, 1])], [0], device=CPU)
