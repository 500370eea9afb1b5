"""A critic, the engine's build, the run's own limit, and the options of `MemoryOffload`, in the plan."""

from dataclasses import replace

import pytest

from rlite.layout.parallel import ParallelLayout
from rlite.memory import DeviceBudget
from rlite.memory.phases import (
    CRITIC,
    CRITIC_GRADIENTS,
    CRITIC_OPTIMIZER,
    ENGINE,
    GRADIENTS,
    KV_CACHE,
    OPTIMIZER,
    POLICY,
    OffloadPolicy,
    Phase,
)
from rlite.plan.changes import changes_that_fit
from rlite.plan.memory import ENGINE_WORK, plan_memory
from rlite.plan.throughput import count_devices, training_seconds, update_seconds
from rlite.plan.traffic import plan_reshard, transitions
from rlite.plan.training import TrainingModel, stages
from tests.plan.jobs import LLAMA, MIB, job


def only(plan):
    (rank_class,) = plan_memory(plan).classes
    return rank_class


def test_a_critic_has_a_phase_of_its_own_with_everything_that_it_trains():
    plan = job(has_critic=True, prompts_per_step=1)
    with_critic = only(plan)
    assert [p.phase for p in with_critic.phases][-3:] == [Phase.LOGPROB, Phase.CRITIC, Phase.TRAIN]
    critic = with_critic.phase(Phase.CRITIC)
    assert set(critic.residents) == {CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER}
    assert critic.moved_bytes == sum(
        (
            with_critic.phase(Phase.LOGPROB).residents[POLICY],
            critic.residents[CRITIC],
            critic.residents[CRITIC_OPTIMIZER],
        )
    ), "the policy leaves, weights and optimizer state of the critic come"
    assert critic.step_peak_bytes == sum(critic.residents.values()) + 2 * 4 * 2 * 96 * 64, "gate and up projection"
    host = with_critic.phase(Phase.GENERATE).host_bytes - only(job()).phase(Phase.GENERATE).host_bytes
    assert host == critic.residents[CRITIC] + critic.residents[CRITIC_OPTIMIZER]
    assert training_seconds(plan) == training_seconds(replace(plan, has_critic=False)) / 4 * 8, "as much work again"


@pytest.mark.parametrize("pp", [1, 2])
def test_a_critic_has_one_value_where_the_policy_has_a_head_and_shares_no_embedding(pp):
    plan = job({**LLAMA, "tie_word_embeddings": True}, layout=ParallelLayout(pp=pp))
    stage = stages(plan.architecture, plan.layout)[-1]
    policy, critic = (TrainingModel(plan, critic=critic).stage_bytes(stage) for critic in (False, True))
    copy_of_embedding = 100 * 64 if pp == 2 else 0  # on two ranks of one stage, the policy's head is the embedding
    assert critic.weights - policy.weights == pytest.approx(4 * (64 - copy_of_embedding), abs=4 * 128), "padding"


def test_the_engine_is_built_beside_what_does_not_leave():
    vacant = only(job()).phase(Phase.VACANT)
    assert vacant.residents == {} and vacant.working.keys() == {ENGINE, KV_CACHE, ENGINE_WORK}
    assert vacant.working[KV_CACHE] == MIB and vacant.peak_bytes == sum(vacant.working.values())
    staying = only(job(offload=OffloadPolicy(name="none"))).phase(Phase.VACANT)
    assert set(staying.residents) == {POLICY, GRADIENTS, OPTIMIZER}
    assert staying.peak_bytes == vacant.peak_bytes + sum(staying.residents.values())


def budgeted(limit_bytes, *, on_cpu, **fields):
    budget = DeviceBudget(limit_bytes=limit_bytes, reserve_bytes=MIB // 4)
    return job(budget=budget, on_cpu=on_cpu, scores_policy=False, staging_budget_bytes=1000, **fields)


def test_on_a_cpu_the_kv_cache_takes_what_the_budget_leaves():
    plan = budgeted(4 * MIB, on_cpu=True)
    generate = only(plan).phase(Phase.GENERATE).residents
    room = 4 * MIB - MIB // 4 - generate[ENGINE]
    assert room - 1024 < generate[KV_CACHE] <= room, "whole tokens"
    assert plan_memory(plan).kv.nbytes == generate[KV_CACHE]
    staying = only(replace(plan, offload=OffloadPolicy(name="none"))).phase(Phase.GENERATE).residents
    assert sum(staying.values()) == pytest.approx(4 * MIB - MIB // 4, abs=1024), "training state leaves it less"
    assert only(budgeted(None, on_cpu=True)).phase(Phase.GENERATE).residents[KV_CACHE] == MIB


def test_elsewhere_it_keeps_its_size_and_the_budget_must_hold_it_with_the_reserve():
    held = sum(only(job()).phase(Phase.GENERATE).residents.values())
    assert plan_memory(budgeted(held + MIB // 4, on_cpu=False)).fits
    memory = plan_memory(budgeted(held + MIB // 4 - 1, on_cpu=False))
    assert not memory.fits and memory.over_budget_bytes == 1 and memory.headroom_bytes > 0


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_budget_that_is_too_small_is_raised_first(on_cpu):
    first, *_ = changes_that_fit(budgeted(MIB // 2, on_cpu=on_cpu))
    assert list(first.settings) == ["MemoryOffload.device_budget_gib"] and first.cost == 0
    assert plan_memory(first.job).fits
    small = replace(first.job, cluster=replace(first.job.cluster, memory_bytes=MIB))
    assert "MemoryOffload.device_budget_gib" not in {k for c in changes_that_fit(small) for k in c.settings}


def bf16(**fields):
    offload = OffloadPolicy(name="full", **fields)
    return job(train_dtype="bfloat16", world_size=4, offload=offload)


def test_rebuilt_weights_are_not_on_the_host_and_come_from_main_weights_and_other_ranks():
    copied, rebuilt = only(bf16()), only(bf16(rebuild_weights=True))
    weights = copied.phase(Phase.TRAIN).residents[POLICY]
    assert copied.phase(Phase.TRAIN).host_bytes - rebuilt.phase(Phase.TRAIN).host_bytes == weights
    for phase in (Phase.GENERATE, Phase.LOGPROB, Phase.TRAIN):
        assert copied.phase(phase).residents == rebuilt.phase(phase).residents
    logprob = rebuilt.phase(Phase.LOGPROB)
    assert logprob.moved_bytes == 2 * weights / 4, "fp32, a quarter of them on each of four ranks"
    assert logprob.gathered_bytes == weights * 3 / 4
    assert rebuilt.phase(Phase.TRAIN).gathered_bytes == copied.phase(Phase.LOGPROB).gathered_bytes == 0
    (entering,) = [
        t
        for t in transitions(bf16(rebuild_weights=True), plan_memory(bf16(rebuild_weights=True)))
        if t.phase == "logprob"
    ]
    assert entering.seconds == pytest.approx(logprob.moved_bytes / 25e9 + logprob.gathered_bytes / 150e9)


def test_rebuilt_weights_need_main_weights():
    with pytest.raises(ValueError, match=r"MemoryOffload\.rebuild_weights = true: weights in fp32"):
        job(offload=OffloadPolicy(name="full", rebuild_weights=True))


def test_what_returns_in_the_background_is_hidden_behind_the_update():
    late, waiting = bf16(), bf16(overlap=False)
    assert only(late).phase(Phase.TRAIN).background_bytes == only(late).phase(Phase.TRAIN).residents[OPTIMIZER]
    assert only(waiting).phase(Phase.TRAIN).background_bytes == 0
    assert only(late).phase(Phase.TRAIN).peak_bytes == only(waiting).phase(Phase.TRAIN).peak_bytes
    switch = [
        count_devices(plan, plan_reshard(plan), transitions(plan, plan_memory(plan))).switch_s
        for plan in (late, waiting)
    ]
    copying = only(late).phase(Phase.TRAIN).background_bytes / 25e9
    assert switch[1] - switch[0] == pytest.approx(min(copying, update_seconds(late)))
