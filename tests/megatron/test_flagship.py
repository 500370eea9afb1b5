"""DeepSeek-V3 671B on 256 ranks, on meta tensors: Megatron-core builds what the layout package describes."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DeepseekV3Config

from rlite.layout.architecture import Architecture
from rlite.layout.megatron import megatron_boxes
from rlite.layout.parallel import ParallelLayout
from rlite.megatron.groups import build_process_groups
from rlite.megatron.model import build_policy, named_local_tensors
from tests.helpers.world import run_world

WORLD_SIZE = 256
LAYOUT = ParallelLayout(tp=2, pp=8, ep=32, etp=1, first_stage_layers=7, last_stage_layers=6)
CONFIG = DeepseekV3Config().to_dict()
Described = dict[str, tuple[tuple[int, ...], str]]


def _build(rank: int) -> tuple[Described, Described, int]:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    build_process_groups(LAYOUT)
    with torch.device("meta"):
        chunks = build_policy(CONFIG, LAYOUT, params_dtype=torch.bfloat16, initialize=False)
    assert all(parameter.is_meta for parameter in chunks.parameters())
    built = {name: (tuple(t.shape), str(t.dtype)) for name, t in named_local_tensors(chunks).items()}
    boxes = megatron_boxes(Architecture.from_config(CONFIG), LAYOUT, WORLD_SIZE, rank, dtype="bfloat16")
    described = {tensor.name: (tensor.shape, f"torch.{tensor.dtype}") for tensor in boxes.tensors}
    return built, described, sum(parameter.numel() for parameter in chunks.parameters())


@pytest.mark.parametrize("rank", [0, 1, 100, 255])
def test_names_shapes_and_dtypes_of_a_rank(rank: int) -> None:
    built, described, num_weights = run_world(1, _build, rank)[0]
    assert built == described
    assert 2e9 < num_weights < 5e9
