"""What each phase holds, by the rules of the phase machine."""

from dataclasses import replace

import pytest

from rlite.layout.parallel import ParallelLayout
from rlite.memory.phases import ENGINE, GRADIENTS, KV_CACHE, OPTIMIZER, POLICY, REFERENCE, OffloadPolicy, Phase
from rlite.plan import memory as plan_module
from rlite.plan.memory import plan_memory, stage_span
from tests.plan.jobs import DSV3, MIB, QWEN3, flagship, job

STAGING = 10_000


def _phases(**fields):
    (rank_class,) = plan_memory(job(staging_budget_bytes=STAGING, **fields)).classes
    return {phase.phase: phase for phase in rank_class.phases}


def test_generation_holds_no_training_state():
    phases = _phases(needs_reference=True)
    assert set(phases[Phase.GENERATE].residents) == {ENGINE, KV_CACHE}
    assert set(phases[Phase.REFERENCE].residents) == {REFERENCE}
    assert set(phases[Phase.LOGPROB].residents) == {POLICY}
    assert set(phases[Phase.TRAIN].residents) == {POLICY, GRADIENTS, OPTIMIZER}


def test_phases_that_the_algorithm_skips_are_not_planned():
    phases = _phases(scores_policy=False)
    assert list(phases) == [Phase.VACANT, Phase.GENERATE, Phase.TRAIN]
    held = phases[Phase.TRAIN].residents
    assert phases[Phase.TRAIN].moved_bytes == held[POLICY] + held[OPTIMIZER], "the policy comes back with the rest"


def test_entering_generation_holds_policy_engine_and_staging_together():
    phases = _phases()
    policy, engine = phases[Phase.TRAIN].residents[POLICY], phases[Phase.GENERATE].residents[ENGINE]
    assert engine + MIB > policy + engine + STAGING, "the KV cache is what counts at this size"
    assert phases[Phase.GENERATE].transition_peak_bytes == engine + MIB
    small = job(staging_budget_bytes=STAGING)
    small = replace(small, engine=replace(small.engine, kv_cache_memory_bytes=STAGING))
    (rank_class,) = plan_memory(small).classes
    assert rank_class.phase(Phase.GENERATE).transition_peak_bytes == policy + engine + STAGING


def test_moved_bytes_are_the_copies_between_device_and_host():
    phases = _phases(needs_reference=True)
    held = phases[Phase.TRAIN].residents
    assert phases[Phase.GENERATE].moved_bytes == held[OPTIMIZER] + held[POLICY], "gradients are dropped"
    assert phases[Phase.REFERENCE].moved_bytes == held[POLICY]
    assert phases[Phase.LOGPROB].moved_bytes == held[POLICY]
    assert phases[Phase.TRAIN].moved_bytes == held[OPTIMIZER]
    assert phases[Phase.TRAIN].host_bytes == 2 * held[POLICY] + held[OPTIMIZER]


def test_without_offload_everything_stays():
    phases = _phases(offload=OffloadPolicy(name="none"))
    everything = {POLICY, GRADIENTS, OPTIMIZER, ENGINE, KV_CACHE}
    assert set(phases.pop(Phase.VACANT).residents) == {POLICY, GRADIENTS, OPTIMIZER}, "the engine is being built"
    assert all(set(phase.residents) == everything for phase in phases.values())
    assert all(phase.moved_bytes == 0 for phase in phases.values())
    some = _phases(offload=OffloadPolicy(name="optimizer_only"))
    assert set(some[Phase.GENERATE].residents) == {POLICY, ENGINE, KV_CACHE}


def test_a_budget_keeps_on_the_device_what_fits_it():
    held = _phases()[Phase.TRAIN].residents
    some = _phases(offload=OffloadPolicy(name="budget", budget_bytes=held[POLICY] + held[OPTIMIZER]))
    assert set(some[Phase.GENERATE].residents) == {POLICY, OPTIMIZER, ENGINE, KV_CACHE}
    assert some[Phase.GENERATE].moved_bytes == 0


def test_training_peak_includes_the_optimizer_step():
    train = _phases(prompts_per_step=1)[Phase.TRAIN]
    assert train.peak_bytes == max(train.held_bytes, train.step_peak_bytes)
    largest = 2 * 96 * 64  # gate and up projection of a layer
    assert train.step_peak_bytes == sum(train.residents.values()) + 2 * 4 * largest


def test_ranks_of_a_kind_share_one_plan():
    plan = plan_memory(flagship())
    assert sorted(rank for rank_class in plan.classes for rank in rank_class.ranks) == list(range(256))
    contents = {rank_class.content for rank_class in plan.classes}
    assert contents == {"embedding, 3 dense layers, 1 MoE layer", "4 MoE layers", "1 MoE layer, head"}
    assert plan.classes[0].peak_bytes == max(rank_class.peak_bytes for rank_class in plan.classes)


def test_experts_that_do_not_divide_make_two_kinds_of_engine_ranks():
    small = {**QWEN3, "num_hidden_layers": 2, "num_experts": 8, "num_attention_heads": 24, "num_key_value_heads": 1}
    small |= {"vocab_size": 192}
    base = job(small, world_size=6)
    plan = plan_memory(replace(base, engine=replace(base.engine, tp=3, expert_parallel=True)))
    assert sorted(len(rank_class.ranks) for rank_class in plan.classes) == [2, 4]
    first, last = sorted(plan.classes, key=lambda rank_class: rank_class.ranks)
    assert first.ranks == (0, 1, 3, 4) and last.ranks == (2, 5)
    difference = first.phase(Phase.GENERATE).residents[ENGINE] - last.phase(Phase.GENERATE).residents[ENGINE]
    assert difference == 2 * 3 * 768 * 2048 * 4, "one expert a layer"


def test_work_does_not_grow_with_ranks_or_layers(monkeypatch):
    """671 billion weights: tensors of two layers are laid out, not those of 61 on 256 ranks."""
    seen = []
    original = plan_module.TrainingModel.stage_bytes
    monkeypatch.setattr(plan_module.TrainingModel, "stage_bytes", lambda self, s: seen.append(s) or original(self, s))
    plan_memory(flagship())
    assert len(seen) == 16
    model = plan_module.TrainingModel(flagship())
    assert sum(len(part) for part in model._parts.values()) < 100


def test_layout_that_does_not_cover_the_world_or_the_model_is_refused():
    with pytest.raises(ValueError, match="does not divide world size 6"):
        job(world_size=6, layout=ParallelLayout(tp=4, etp=4))
    with pytest.raises(ValueError, match="61 layers on pp = 16"):
        job(DSV3, world_size=256, layout=ParallelLayout(pp=16, ep=16))
    with pytest.raises(ValueError, match=r"MemoryOffload\.policy = 'some'"):
        job(offload=OffloadPolicy(name="some"))


def test_stage_spans():
    assert [stage_span(s) for s in ((3,), (1, 2, 3), (1, 3))] == ["stage 3", "stages 1-3", "stages 1, 3"]
