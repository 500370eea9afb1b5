"""Rows become micro-batches; worked by hand."""

import pytest
import torch

from rlite.megatron.microbatch import make_microbatch, plan_microbatches
from rlite.types import TokenRow

CPU = torch.device("cpu")


def _row(tokens: list[int], mask: list[int]) -> TokenRow:
    return TokenRow(token_ids=torch.tensor(tokens), loss_mask=torch.tensor(mask, dtype=torch.bool))


def test_rows_are_sorted_by_length_and_fill_the_budget() -> None:
    # padded to 4: lengths 8, 8, 4, 4, 4; budget 16 -> [8, 8], [4, 4, 4]
    assert plan_microbatches([3, 7, 4, 8, 1], max_tokens=16, multiple_of=4) == [[3, 1], [2, 0, 4]]


def test_a_row_over_the_budget_stands_alone() -> None:
    assert plan_microbatches([100, 3, 2], max_tokens=6) == [[0], [1, 2]]


def test_no_rows_need_no_micro_batches() -> None:
    assert plan_microbatches([], max_tokens=6) == []


def test_positions_predict_the_next_token() -> None:
    rows = [_row([5, 6, 7], [0, 1, 1]), _row([1, 2, 3, 4], [0, 0, 0, 1])]
    batch = make_microbatch(rows, [1, 0], multiple_of=2, device=CPU)
    assert batch.tokens_BS.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert batch.targets_N.tolist() == [4, 6, 7]
    # flat index s * B + b: row 1 (b = 0) predicts at s = 2; row 0 (b = 1) at s = 0 and s = 1
    assert batch.predict_N.tolist() == [4, 1, 3]
    assert batch.num_tokens_per_row == (1, 2)


def test_length_is_padded_to_the_multiple() -> None:
    assert make_microbatch([_row([5, 6, 7], [0, 1, 1])], [0], multiple_of=8, device=CPU).tokens_BS.shape == (1, 8)


def test_a_dummy_has_tokens_but_nothing_to_train() -> None:
    batch = make_microbatch([], [], multiple_of=4, device=CPU)
    assert batch.tokens_BS.tolist() == [[0, 0, 0, 0]]
    assert batch.row_indices == () and batch.targets_N.numel() == 0


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0"):
        make_microbatch([_row([5, 6], [1, 1])], [0], multiple_of=1, device=CPU)
