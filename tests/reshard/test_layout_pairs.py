"""The transfer gives the bits of gather-then-slice, and receives no byte too many, for every architecture and pair."""

import pytest
import torch
import torch.distributed as dist

from rlite.layout.architecture import Architecture
from rlite.layout.catalogue import catalogue
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.layout.vllm import VLLMPlacement
from rlite.reshard.plan import plan_transfer
from rlite.reshard.routes import Topology
from rlite.reshard.transfer import Transfer
from tests.helpers.world import run_world
from tests.reshard.reference import megatron_reference, random_weights, vllm_reference
from tests.reshard.tiny import CONFIGS

MOE = ("deepseek_v3", "deepseek_v2_lite", "qwen3_moe", "mixtral")

# name -> (world size, training, generation, only for mixture-of-experts)
PAIRS = {
    "single": (1, ParallelLayout(), EngineLayout(), False),
    "ep2_to_tp2": (2, ParallelLayout(ep=2), EngineLayout(tp=2), True),
    "ep2_to_ep2": (2, ParallelLayout(ep=2), EngineLayout(tp=2, expert_parallel=True), True),
    "dp2_to_tp2": (2, ParallelLayout(), EngineLayout(tp=2), False),
    "pp2_uneven_to_tp2": (2, ParallelLayout(pp=2, first_stage_layers=2), EngineLayout(tp=2), False),
    "tp2_to_tp1_replicas": (2, ParallelLayout(tp=2, etp=2), EngineLayout(), False),
    "ep4_to_tp4": (4, ParallelLayout(ep=4), EngineLayout(tp=4), True),
    "ep4_to_tp2_replicas": (4, ParallelLayout(ep=4), EngineLayout(tp=2), True),
    "tp2_to_tp4": (4, ParallelLayout(tp=2, etp=2), EngineLayout(tp=4), False),
    "tp2_ep2_to_tp4": (4, ParallelLayout(tp=2, ep=2), EngineLayout(tp=4), True),
    "pp2_ep2_to_tp4": (4, ParallelLayout(pp=2, ep=2, first_stage_layers=1), EngineLayout(tp=4), True),
    "etp2_to_tp4": (4, ParallelLayout(tp=2, ep=2, etp=2), EngineLayout(tp=4), True),
    "ep4_to_ep4": (4, ParallelLayout(ep=4), EngineLayout(tp=4, expert_parallel=True), True),
}


def _transfer_everything(pair: str, names: tuple[str, ...], dtype: str, staging_budget_bytes: int) -> list[str]:
    """Transfers each architecture; returns what is wrong on this rank."""
    world_size, layout, engine, _ = PAIRS[pair]
    rank, problems = dist.get_rank(), []
    for name in names:
        config = CONFIGS[name]
        arch = Architecture.from_config(config)
        weights = random_weights({t.name: t.shape for t in catalogue(arch).values()}, getattr(torch, dtype))
        source = megatron_reference(config, weights, layout, world_size, rank)
        expected = vllm_reference(config, weights, engine, rank)
        destination = {key: torch.full_like(tensor, float("nan")) for key, tensor in expected.items()}
        plan = plan_transfer(
            MegatronPlacement(arch, layout, world_size, dtype=dtype),
            VLLMPlacement(arch, engine, world_size, dtype=dtype),
            topology=Topology(node_size=2),
            rank=rank,
            exact=True,
            staging_budget_bytes=staging_budget_bytes,
        )
        if {t.name: t.shape for t in plan.source} != {key: tuple(t.shape) for key, t in source.items()}:
            problems.append(f"{name}: source layout differs from the reference")
        if {t.name: t.shape for t in plan.destination} != {key: tuple(t.shape) for key, t in expected.items()}:
            problems.append(f"{name}: destination layout differs from the reference")
        released: list[str] = []
        stats = Transfer(plan).run(source, destination, released.append)
        problems += [f"{name}: {key} differs" for key in expected if not torch.equal(destination[key], expected[key])]
        if stats.efficiency < 0.999:
            problems.append(f"{name}: received {stats.bytes_recv}, lower bound {stats.bytes_lower_bound}")
        if stats.staging_peak_bytes > staging_budget_bytes:
            problems.append(f"{name}: staged {stats.staging_peak_bytes} of {staging_budget_bytes} bytes")
        if sorted(released) != sorted(source):
            problems.append(f"{name}: sources were not released exactly once")
    return problems


@pytest.mark.parametrize("pair", PAIRS)
def test_transfer_equals_gather_then_slice(pair):
    world_size, _, _, only_moe = PAIRS[pair]
    names = MOE if only_moe else tuple(CONFIGS)
    assert run_world(world_size, _transfer_everything, pair, names, "bfloat16", 2**28) == [[]] * world_size


@pytest.mark.parametrize("budget", [2**12, 2**14, 2**16, 2**18, 2**20])
def test_staging_budget_never_changes_the_bits(budget):
    result = run_world(4, _transfer_everything, "pp2_ep2_to_tp4", ("deepseek_v3", "qwen3_moe"), "float32", budget)
    assert result == [[]] * 4
