import os

import pytest
import torch
import torch.distributed as dist

from tests.helpers.world import run_world


def _sum_of_ranks(offset: int) -> int:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value)


def _second_rank_fails() -> None:
    if dist.get_rank() == 1:
        raise KeyError("broken on purpose")
    dist.barrier()


def _second_rank_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)


def test_results_come_back_by_rank():
    assert run_world(2, _sum_of_ranks, 10) == [21, 21]


def test_failure_carries_the_traceback_of_the_rank_that_failed():
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed first:(.|\n)*broken on purpose"):
        run_world(2, _second_rank_fails)


def test_killed_rank_is_reported():
    with pytest.raises(AssertionError):
        run_world(2, _second_rank_dies, timeout_s=20)
