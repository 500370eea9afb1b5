"""Bytes of the weight conversion against the plans of all ranks; devices against hand counts."""

import math
from dataclasses import replace

import pytest

from rlite.layout.parallel import ParallelLayout
from rlite.memory.phases import Phase
from rlite.plan.memory import plan_memory
from rlite.plan.throughput import count_devices, generation_seconds, training_seconds
from rlite.plan.traffic import ReshardPlan, Transition, placements, plan_reshard, transitions
from rlite.reshard.plan import TransferPlanner
from rlite.reshard.routes import Topology
from rlite.rollout.config import TransformersConfig, VLLMConfig
from tests.plan.jobs import DSV3, LLAMA, QWEN3, job

SMALL_DSV3 = {**DSV3, "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 8, "vocab_size": 1024}
SMALL_QWEN3 = {**QWEN3, "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 1024}
CASES = [
    job(SMALL_DSV3, world_size=4, node_size=2, layout=ParallelLayout(pp=2, ep=2)),
    job(SMALL_QWEN3, world_size=4, node_size=2, layout=ParallelLayout(ep=4)),
    job(SMALL_QWEN3, world_size=4, node_size=4, layout=ParallelLayout(tp=2, etp=1, ep=2)),
    job(SMALL_QWEN3, node_size=1, layout=ParallelLayout(ep=2), engine=TransformersConfig(dtype="float32")),
]


@pytest.mark.parametrize("plan", CASES)
def test_received_bytes_are_those_of_every_ranks_plan(plan):
    topology = Topology(node_size=plan.cluster.node_size)
    planner = TransferPlanner(*placements(plan), topology=topology, staging_budget_bytes=plan.staging_budget_bytes)
    ranks = [planner.plan(rank) for rank in range(plan.cluster.world_size)]
    reshard = plan_reshard(plan)
    assert reshard.received_mean_bytes == sum(rank.bytes_recv for rank in ranks) // len(ranks)
    assert reshard.received_max_bytes == max(rank.bytes_recv for rank in ranks)
    assert reshard.lower_bound_mean_bytes == reshard.received_mean_bytes
    assert reshard.internode_mean_bytes == sum(rank.bytes_internode for rank in ranks) // len(ranks)
    assert reshard.internode_max_bytes == max(rank.bytes_internode for rank in ranks)


def test_same_layout_on_both_sides_moves_nothing():
    plan = job(LLAMA, engine=VLLMConfig(tp=1, dtype="float32", max_model_len=64))
    reshard = plan_reshard(plan)
    assert (reshard.received_max_bytes, reshard.seconds, reshard.gather_all_bytes) == (0, 0.0, 0)


def test_gathering_everything_is_the_model_less_what_a_rank_holds():
    """Two ranks with half of the experts each: what is missing is the other half."""
    reshard = plan_reshard(CASES[3])
    half_of_the_experts = 2 * 4 * 3 * 768 * 2048 * 4
    assert reshard.gather_all_bytes == half_of_the_experts == reshard.received_mean_bytes
    assert reshard.seconds == pytest.approx(half_of_the_experts / 40e9), "one rank a node"


def test_transitions_take_the_rank_that_moves_most():
    plan = job(LLAMA, world_size=4, layout=ParallelLayout(pp=2))
    memory = plan_memory(plan)
    generate, logprob, train = transitions(plan, memory)
    assert [t.phase for t in (generate, logprob, train)] == ["generate", "logprob", "train"]
    assert generate.moved_bytes == max(c.phase(Phase.GENERATE).moved_bytes for c in memory.classes)
    assert generate.seconds == pytest.approx(generate.moved_bytes / 25e9)


def _reshard(seconds: float) -> ReshardPlan:
    sizes = ("received_mean", "received_max", "lower_bound_mean", "internode_mean", "internode_max", "gather_all")
    return ReshardPlan(seconds=seconds, **{f"{name}_bytes": 0 for name in sizes})


def test_separated_clusters_that_take_turns_need_more_devices(monkeypatch):
    """Equal times on 64 devices: each cluster needs 64 to make up for its waiting. 9 s and 1 s: 64 (9 + 3) / 10 and
    64 (3 + 1) / 10. Overlapped, the work is shared out without waiting, as on colocated devices."""
    plan = job(LLAMA, world_size=64, engine=VLLMConfig(tp=1, max_model_len=64))
    monkeypatch.setattr("rlite.plan.throughput.training_seconds", lambda _: 1.0)
    monkeypatch.setattr("rlite.plan.throughput.generation_seconds", lambda _: 1.0)
    even = count_devices(plan, _reshard(0.0), ())
    assert (even.colocated, even.separated, even.overlapped) == (64, 128, 64)
    monkeypatch.setattr("rlite.plan.throughput.generation_seconds", lambda _: 9.0)
    uneven = count_devices(plan, _reshard(0.0), ())
    assert (uneven.separated_generation, uneven.separated_training) == (math.ceil(76.8), math.ceil(25.6))
    assert uneven.overlapped == math.ceil(57.6) + math.ceil(6.4)
    slow_switch = count_devices(plan, _reshard(6.0), (Transition(phase="train", moved_bytes=1, seconds=4.0),))
    assert slow_switch.step_s == 20.0 and slow_switch.separated == math.ceil(38.4) + math.ceil(12.8)


def test_step_time_follows_work_and_devices():
    plan = job(QWEN3, world_size=8, layout=ParallelLayout(ep=8), engine=VLLMConfig(tp=8, max_model_len=64))
    twice = replace(plan, prompts_per_step=2)
    assert training_seconds(twice) == pytest.approx(2 * training_seconds(plan))
    assert training_seconds(replace(plan, needs_reference=True)) == pytest.approx(training_seconds(plan) * 5 / 4)
    assert generation_seconds(replace(plan, max_completion_tokens=512)) > generation_seconds(plan)
