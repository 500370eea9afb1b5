"""The executor on real gloo processes: casts, releases, repeated runs, sub-groups and failures."""

import os

import pytest
import torch
import torch.distributed as dist

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import Box, LocalLayout, LocalTensor
from rlite.layout.catalogue import CanonicalTensor, catalogue
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.layout.placement import ExplicitPlacement
from rlite.layout.vllm import VLLMPlacement
from rlite.reshard.plan import TransferPlan, plan_transfer
from rlite.reshard.routes import Topology
from rlite.reshard.transfer import Transfer
from tests.helpers.world import run_world
from tests.reshard.reference import Weights, megatron_reference, random_weights, vllm_reference
from tests.reshard.tiny import CONFIGS

CONFIG = CONFIGS["deepseek_v3"]
ARCH = Architecture.from_config(CONFIG)
LAYOUT, ENGINE = ParallelLayout(ep=2), EngineLayout(tp=2)


def _weights(dtype: torch.dtype, scale: float = 1.0) -> Weights:
    weights = random_weights({tensor.name: tensor.shape for tensor in catalogue(ARCH).values()}, dtype)
    return {name: tensor * scale for name, tensor in weights.items()}


def _plan(rank: int, *, source_dtype: str = "float32", dtype: str = "float32", budget: int = 2**16) -> TransferPlan:
    return plan_transfer(
        MegatronPlacement(ARCH, LAYOUT, 2, dtype=source_dtype),
        VLLMPlacement(ARCH, ENGINE, 2, dtype=dtype),
        topology=Topology(node_size=2),
        rank=rank,
        staging_budget_bytes=budget,
    )


def _nans(like: Weights) -> Weights:
    return {name: torch.full_like(tensor, float("nan")) for name, tensor in like.items()}


def _cast_in_flight() -> bool:
    rank, weights = dist.get_rank(), _weights(torch.float32)
    source = megatron_reference(CONFIG, weights, LAYOUT, 2, rank)
    rounded = {n: w if "correction_bias" in n else w.bfloat16() for n, w in weights.items()}
    expected = vllm_reference(CONFIG, rounded, ENGINE, rank)
    destination = _nans(expected)
    plan = _plan(rank, dtype="bfloat16")
    Transfer(plan).run(source, destination)
    bias = destination["model.layers.1.mlp.gate.e_score_correction_bias"]
    return bias.dtype == torch.float32 and all(torch.equal(destination[name], expected[name]) for name in expected)


def test_fp32_weights_arrive_as_the_bf16_that_a_cast_gives_and_the_router_bias_stays_fp32():
    assert run_world(2, _cast_in_flight) == [True, True]


def _release_while_running() -> tuple[bool, list[int]]:
    rank, weights = dist.get_rank(), _weights(torch.float32)
    # The reference may return the canonical tensors themselves, which must outlive the release.
    source = {name: tensor.clone() for name, tensor in megatron_reference(CONFIG, weights, LAYOUT, 2, rank).items()}
    expected = vllm_reference(CONFIG, weights, ENGINE, rank)
    destination, left = _nans(expected), [sum(tensor.nbytes for tensor in source.values())]

    def release(name: str) -> None:
        left.append(left[-1] - source[name].nbytes)
        source[name].untyped_storage().resize_(0)

    Transfer(_plan(rank, budget=2**14)).run(source, destination, release)
    return all(torch.equal(destination[name], expected[name]) for name in expected), left


def test_sources_released_on_the_way_do_not_change_the_result():
    for equal, left in run_world(2, _release_while_running):
        assert equal
        assert left[-1] == 0
        assert len(left) > 20


def _two_runs_with_new_values() -> bool:
    rank, transfer = dist.get_rank(), Transfer(_plan(dist.get_rank()))
    destination = _nans(vllm_reference(CONFIG, _weights(torch.float32), ENGINE, rank))
    for scale in (1.0, -3.0):
        weights = _weights(torch.float32, scale)
        transfer.run(megatron_reference(CONFIG, weights, LAYOUT, 2, rank), destination)
        expected = vllm_reference(CONFIG, weights, ENGINE, rank)
        if not all(torch.equal(destination[name], expected[name]) for name in expected):
            return False
    return True


def test_second_run_carries_the_new_weights():
    assert run_world(2, _two_runs_with_new_values) == [True, True]


def _rows(rank: int, kind: str, dtype: str) -> LocalLayout:
    """Half of a `[2048, 600]` matrix, which is more than 1 MiB in either dtype: rows, columns, or (`swap`) the rows of
    the other rank."""
    if kind == "columns":
        start, stop = (0, 300 * rank), (2048, 300 * rank + 300)
    else:
        first = 1024 * (1 - rank if kind == "swap" else rank)
        start, stop = (first, 0), (first + 1024, 600)
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    return LocalLayout((LocalTensor("part", shape, dtype),), (Box("big", start, stop, "part", (0, 0)),))


def _large_matrix(source: tuple[str, str], destination: tuple[str, str]) -> tuple[bool, int]:
    rank, tensors = dist.get_rank(), {"big": CanonicalTensor("big", (2048, 600), "any")}
    sides = [[_rows(r, *side) for r in range(2)] for side in (source, destination)]
    plan = plan_transfer(
        *(ExplicitPlacement(side, tensors) for side in sides), topology=Topology(node_size=2), rank=rank
    )
    big = torch.randn(2048, 600, generator=torch.Generator().manual_seed(0)).bfloat16()

    def part(side: list[LocalLayout]) -> torch.Tensor:
        box = side[rank].boxes[0]
        dtype = getattr(torch, side[rank].tensors[0].dtype)
        return big[tuple(map(slice, box.start, box.stop))].to(dtype, memory_format=torch.contiguous_format).contiguous()

    expected = part(sides[1])
    received = torch.full_like(expected, float("nan"))
    stats = Transfer(plan).run({"part": part(sides[0])}, {"part": received})
    return torch.equal(received, expected), stats.staging_peak_bytes


HALF_BYTES, QUARTER_BYTES = 1024 * 600 * 2, 1024 * 300 * 2


@pytest.mark.parametrize(
    ("source", "destination", "staged"),
    [
        # Contiguous at both ends: nothing is staged. Otherwise both halves of the arena hold what one bucket needs.
        (("rows", "bfloat16"), ("swap", "bfloat16"), 0),
        (("rows", "float32"), ("swap", "bfloat16"), 2 * HALF_BYTES),
        (("rows", "bfloat16"), ("swap", "float32"), 2 * HALF_BYTES),
        (("rows", "bfloat16"), ("columns", "bfloat16"), 2 * QUARTER_BYTES),
        (("columns", "bfloat16"), ("rows", "bfloat16"), 2 * QUARTER_BYTES),
    ],
)
def test_large_parts_are_staged_only_where_they_are_strided_or_cast(source, destination, staged):
    for equal, staging_peak_bytes in run_world(2, _large_matrix, source, destination):
        assert equal
        assert staging_peak_bytes <= staged


def _transposed_destination() -> bool:
    rank, weights = dist.get_rank(), _weights(torch.float32)
    expected = vllm_reference(CONFIG, weights, ENGINE, rank)
    destination = _nans(expected)
    name = "model.layers.1.mlp.experts.w2_weight"
    stored = destination[name].transpose(1, 2).contiguous()
    destination[name] = stored.transpose(1, 2)
    Transfer(_plan(rank)).run(megatron_reference(CONFIG, weights, LAYOUT, 2, rank), destination)
    return torch.equal(stored, expected[name].transpose(1, 2))


def test_tensors_stored_transposed_are_written_through_a_view():
    assert run_world(2, _transposed_destination) == [True, True]


def _parameters_that_need_gradients() -> bool:
    rank, weights = dist.get_rank(), _weights(torch.float32)
    source = megatron_reference(CONFIG, weights, LAYOUT, 2, rank)
    expected = vllm_reference(CONFIG, weights, ENGINE, rank)
    parameters = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in expected.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in parameters.items()}
    Transfer(_plan(rank)).run({n: torch.nn.Parameter(t) for n, t in source.items()}, parameters)
    same_storage = all(parameters[name].data_ptr() == pointers[name] for name in parameters)
    return same_storage and all(torch.equal(parameters[name], expected[name]) for name in expected)


def test_parameters_are_written_in_place():
    assert run_world(2, _parameters_that_need_gradients) == [True, True]


def _inside_a_subgroup() -> bool | None:
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    rank, weights = dist.get_rank(group), _weights(torch.float32)
    expected = vllm_reference(CONFIG, weights, ENGINE, rank)
    destination = _nans(expected)
    Transfer(_plan(rank), group).run(megatron_reference(CONFIG, weights, LAYOUT, 2, rank), destination)
    return all(torch.equal(destination[name], expected[name]) for name in expected)


def test_ranks_of_the_plan_are_ranks_of_the_group():
    assert run_world(4, _inside_a_subgroup) == [None, True, None, True]


def _one_rank_dies() -> str:
    rank, weights = dist.get_rank(), _weights(torch.float32)
    transfer = Transfer(_plan(rank, budget=2**13))
    source = megatron_reference(CONFIG, weights, LAYOUT, 2, rank)
    destination = _nans(vllm_reference(CONFIG, weights, ENGINE, rank))

    def die_half_way(name: str) -> None:
        if rank == 1:
            os._exit(1)

    transfer.run(source, destination, die_half_way)
    return "finished"


def test_a_rank_that_dies_ends_the_others_with_an_error_that_names_the_exchange():
    with pytest.raises(AssertionError, match=r"RuntimeError: reshard: bucket \d+ of \d+ failed on rank 0 of 2"):
        run_world(2, _one_rank_dies, timeout_s=60)


def _wrong_tensors() -> list[str]:
    rank, weights = dist.get_rank(), _weights(torch.float32)
    transfer, errors = Transfer(_plan(rank)), []
    source = megatron_reference(CONFIG, weights, LAYOUT, 2, rank)
    destination = vllm_reference(CONFIG, weights, ENGINE, rank)
    norm = "model.norm.weight"
    for wrong_source, wrong_destination in (
        ({}, destination),
        (source, {**destination, norm: destination[norm][:-1]}),
        (source, {**destination, norm: destination[norm].half()}),
    ):
        try:
            transfer.run(wrong_source, wrong_destination)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_tensors_that_are_not_those_of_the_plan_are_refused_before_anything_moves():
    for rank, errors in enumerate(run_world(2, _wrong_tensors)):
        assert errors == [
            f"reshard: rank {rank} was given no source tensor 0.embedding.word_embeddings.weight, which the plan expects "
            "as (101, 40)",
            f"reshard: destination tensor model.norm.weight of rank {rank} is torch.float32 (39,); the plan expects "
            "float32 (40,)",
            f"reshard: destination tensor model.norm.weight of rank {rank} is torch.float16 (40,); the plan expects "
            "float32 (40,)",
        ]


def _plan_of_another_rank() -> None:
    with pytest.raises(ValueError, match=r"the plan is for rank \d of 2"):
        Transfer(_plan(1 - dist.get_rank()))


def test_plan_of_another_rank_is_refused():
    run_world(2, _plan_of_another_rank)
