"""Groups of one layout a process; objects change data-parallel ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.groups import build_process_groups, check_process_groups, exchange_objects
from tests.helpers.world import run_world


def _exchange(layout: ParallelLayout) -> list[Any]:
    build_process_groups(layout)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = layout.coordinates(rank, world).dp
    outgoing = [(mine, to, torch.full((1 + 3 * mine,), to)) for to in range(layout.dp(world))]
    return [(source, to, tensor.tolist()) for source, to, tensor in exchange_objects(outgoing)]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, ParallelLayout()),
        (4, ParallelLayout(tp=2, etp=2)),
        (4, ParallelLayout(pp=2)),
        (4, ParallelLayout(cp=2)),
        (4, ParallelLayout(ep=4)),
    ],
)
def test_every_peer_of_a_data_rank_receives_what_was_meant_for_it(world_size: int, layout: ParallelLayout) -> None:
    dp = layout.dp(world_size)
    for rank, received in enumerate(run_world(world_size, _exchange, layout)):
        mine = layout.coordinates(rank, world_size).dp
        assert received == [(source, mine, [mine] * (1 + 3 * source)) for source in range(dp)]


def _second_layout() -> None:
    build_process_groups(ParallelLayout(ep=2))
    check_process_groups(ParallelLayout(ep=2))
    check_process_groups(ParallelLayout(tp=2, etp=2))


def test_a_second_trainer_with_another_layout_is_refused_in_the_same_process() -> None:
    with pytest.raises(
        AssertionError, match=r"layout = \{'tp': 2.* are those of \{'tp': 1.*'ep': 2.*start a new process"
    ):
        run_world(2, _second_layout)
