"""Each side alone: cutting the canonical tensors along the boxes gives what the framework itself would load.

Transfers alone cannot show this: a mistake that both sides make (gate and up exchanged) cancels out.
"""

import pytest
import torch

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import LocalLayout
from rlite.layout.catalogue import catalogue
from rlite.layout.megatron import megatron_boxes
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.layout.vllm import vllm_boxes
from tests.reshard.reference import Weights, megatron_reference, random_weights, vllm_reference
from tests.reshard.tiny import CONFIGS

TRAINING = [
    ParallelLayout(),
    ParallelLayout(tp=2, etp=2),
    ParallelLayout(pp=2, first_stage_layers=2),
    ParallelLayout(ep=4),
    ParallelLayout(tp=2, ep=2),
    ParallelLayout(tp=2, ep=2, etp=2, pp=1),
]
ENGINES = [EngineLayout(), EngineLayout(tp=2), EngineLayout(tp=4), EngineLayout(tp=4, expert_parallel=True)]


def _cut(layout: LocalLayout, weights: Weights) -> Weights:
    local = {t.name: torch.full(t.shape, float("nan"), dtype=getattr(torch, t.dtype)) for t in layout.tensors}
    for box in layout.boxes:
        part = weights[box.tensor][tuple(map(slice, box.start, box.stop))]
        local[box.local][box.local_index(box.start, box.stop)] = part
    for region in layout.padding:
        local[region.local][tuple(map(slice, region.start, region.stop))] = 0
    return local


def _assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


ARCHS = {name: Architecture.from_config(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name, arch in ARCHS.items() for layout in TRAINING if arch.moe or layout.ep == 1],
    ids=str,
)
def test_megatron_boxes_cut_what_megatron_loads(name, layout):
    arch = ARCHS[name]
    weights = random_weights({t.name: t.shape for t in catalogue(arch).values()}, torch.float32)
    for rank in range(4):
        expected = megatron_reference(CONFIGS[name], weights, layout, 4, rank)
        _assert_equal(_cut(megatron_boxes(arch, layout, 4, rank, dtype="float32"), weights), expected)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_boxes_cut_what_vllm_loads(name, engine):
    arch = ARCHS[name]
    weights = random_weights({t.name: t.shape for t in catalogue(arch).values()}, torch.float32)
    for rank in range(4):
        expected = vllm_reference(CONFIGS[name], weights, engine, rank)
        _assert_equal(_cut(vllm_boxes(arch, engine, 4, rank, dtype="float32"), weights), expected)
