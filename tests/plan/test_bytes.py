"""Training and engine bytes against hand counts, and against the placements of all layers on all ranks."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from rlite.layout.architecture import Architecture
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.layout.vllm import VLLMPlacement
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.plan.activations import (
    layer_elements,
    microbatches_in_flight,
    optimizer_step_bytes,
    recomputed_elements,
    working_bytes,
)
from rlite.plan.generation import engine_position, engine_weight_bytes, kv_bytes_per_token, kv_cache
from rlite.plan.sizes import parse_size, show_size
from rlite.plan.training import TrainingModel, flat_numel, stages
from rlite.rollout.config import TransformersConfig, VLLMConfig
from tests.plan.jobs import DSV3, LLAMA, QWEN3, flagship, job

LAYERS_7 = {**DSV3, "num_hidden_layers": 7, "first_k_dense_replace": 2, "vocab_size": 1000}
TIED = {**LLAMA, "tie_word_embeddings": True}


def test_flat_buffer_pads_parameters_to_64_and_buckets_to_128_and_the_ranks():
    assert flat_numel([Counter({100: 2})], 1) == 256
    assert flat_numel([Counter({100: 2})], 3) == 384  # lcm(3, 128)
    assert flat_numel([Counter({64: 1}), Counter({65: 1})], 2) == 256  # two buckets, each padded


def test_llama_by_hand():
    """Embedding and head 2 x 6400; a layer: qkv 128 x 64, o 64 x 64, fc1 192 x 64, fc2 64 x 96, two norms of 64; a norm."""
    weights = 2 * 6400 + 2 * (8192 + 4096 + 12288 + 6144 + 128) + 64
    padded = math.ceil(weights / 128) * 128
    plan = job()
    held = TrainingModel(plan).stage_bytes(stages(plan.architecture, plan.layout)[0])
    assert (held.weights, held.gradients) == (4 * padded, 4 * padded)
    assert held.optimizer == 8 * padded // 2, "two moments, over two data-parallel ranks"
    mixed = replace(plan, train_dtype="bfloat16")
    held = TrainingModel(mixed).stage_bytes(stages(plan.architecture, plan.layout)[0])
    assert (held.weights, held.gradients, held.optimizer) == (2 * padded, 4 * padded, 12 * padded // 2)


def test_experts_are_sharded_over_their_own_data_parallel_ranks():
    """ep 2 on 4 ranks: dense optimizer state over 4 ranks, that of experts over 2."""
    plan = job({**QWEN3, "num_hidden_layers": 1}, world_size=4, layout=ParallelLayout(ep=2))
    held = TrainingModel(plan).stage_bytes(stages(plan.architecture, plan.layout)[0])
    experts = 64 * 3 * 768 * 2048
    dense = held.weights // 4 - experts
    assert held.optimizer == 8 * (dense // 4 + experts // 2)


@pytest.mark.parametrize(
    ("hf_config", "world_size", "layout"),
    [
        (LAYERS_7, 8, ParallelLayout(pp=4, ep=2, last_stage_layers=1)),
        (LAYERS_7, 8, ParallelLayout(tp=2, pp=2, ep=4, first_stage_layers=3)),
        ({**LAYERS_7, "num_hidden_layers": 8}, 4, ParallelLayout(pp=2, vpp=2, ep=2)),
        (TIED, 4, ParallelLayout(pp=2)),
        (TIED, 2, ParallelLayout(tp=2, etp=2)),
        (LLAMA, 4, ParallelLayout(cp=2, tp=2, etp=2)),
    ],
)
def test_stages_hold_what_the_placement_of_every_rank_says(hf_config, world_size, layout):
    plan = job(hf_config, world_size=world_size, layout=layout)
    arch, model = plan.architecture, TrainingModel(plan)
    of_stage = [model.stage_bytes(stage) for stage in stages(arch, layout)]
    placement = MegatronPlacement(arch, layout, world_size)
    for rank in range(world_size):
        tensors = [t for t in placement.local(rank).tensors if not t.name.endswith("expert_bias")]
        weights = sum(math.prod(t.shape) for t in tensors)
        planned = of_stage[layout.coordinates(rank, world_size).pp].weights // 4
        slack = 64 * len(tensors) + 2 * layout.vpp * 256
        assert weights <= planned <= weights + slack, rank


@pytest.mark.parametrize("engine", [EngineLayout(tp=4), EngineLayout(tp=8), EngineLayout(tp=3, expert_parallel=True)])
def test_engine_holds_what_the_placement_of_every_rank_says(engine):
    hf_config = {**QWEN3, "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8, "num_attention_heads": 24}
    hf_config |= {"num_key_value_heads": 1, "vocab_size": 192, "intermediate_size": 6144}
    config = VLLMConfig(tp=engine.tp, expert_parallel=engine.expert_parallel, max_model_len=64)
    plan = job(hf_config, world_size=engine.tp, engine=config)
    placement = VLLMPlacement(Architecture.from_config(hf_config), engine, engine.tp)
    for rank in range(engine.tp):
        held = sum(2 * math.prod(tensor.shape) for tensor in placement.local(rank).tensors)
        assert engine_weight_bytes(plan, engine_position(plan, rank)) == held, rank


def test_flagship_engine_holds_a_32nd_of_671_billion_weights_and_what_is_replicated():
    plan = flagship()
    placement = VLLMPlacement(plan.architecture, plan.engine_layout, 32)
    itemsize = {"bfloat16": 2, "float32": 4}
    weights = sum(itemsize[tensor.dtype] * math.prod(tensor.shape) for tensor in placement.local(31).tensors)
    assert engine_weight_bytes(plan, 0) == weights
    assert 1.0 < weights / (671.03e9 * 2 / 32) < 1.06


def test_kv_cache_by_hand():
    assert kv_bytes_per_token(flagship()) == 61 * (512 + 64) * 2, "the latent vector is on every rank"
    qwen = job(QWEN3, world_size=8, engine=VLLMConfig(tp=8, max_model_len=1000, kv_cache_memory_bytes=49152 * 2500))
    assert kv_bytes_per_token(qwen) == 48 * 2 * 1 * 128 * 2, "4 KV heads on 8 ranks: one each"
    cache = kv_cache(replace(qwen, engine=replace(qwen.engine, tp=2)))
    assert cache.bytes_per_token == 49152 and (cache.tokens, cache.sequences) == (2500, 2)
    whole = kv_bytes_per_token(job(QWEN3, engine=TransformersConfig()))
    assert whole == 48 * 2 * 4 * 128 * 2


def test_schedule_keeps_fewer_microbatches_on_later_stages():
    plan = job({**LLAMA, "num_hidden_layers": 8}, world_size=4, layout=ParallelLayout(pp=4), prompts_per_step=64)
    plan = replace(plan, megatron=MegatronOptions(max_tokens_per_microbatch=64))
    assert plan.num_microbatches == 64 * 8
    assert [microbatches_in_flight(plan, stage) for stage in range(4)] == [4, 3, 2, 1]
    few = replace(plan, prompts_per_step=1, megatron=MegatronOptions(max_tokens_per_microbatch=256))
    assert few.num_microbatches == 2
    assert [microbatches_in_flight(few, stage) for stage in range(4)] == [2, 2, 2, 1]
    interleaved = replace(plan, layout=ParallelLayout(pp=4, vpp=2))
    assert microbatches_in_flight(interleaved, 0) == (2 * 3 + 4 + 1) / 2


def test_activations_by_hand():
    """A llama layer: norms 4 x 64, attention q 64 and kv 32 (repeated for every query head), feed-forward 4 x 96."""
    plan = job(prompts_per_step=1)
    kept = 4 * 64 + (64 + 64) + (64 + 32) + 2 * 64 + 64 + 4 * 96
    assert layer_elements(plan, moe=False) == kept
    assert plan.microbatch_tokens == 4 * 64, "8 completions on 2 ranks, of the engine's longest length"
    (stage,) = stages(plan.architecture, plan.layout)
    working = working_bytes(plan, stage, 0)
    assert working.train_activations == 4 * 256 * (2 * kept + 4 * 64)
    assert working.score_activations == 4 * 256 * (kept + 4 * 64)
    assert working.train_logits == 256 * 100 * 8 + 100 * 64 * 4
    assert working.score_logits == 256 * 100 * 8
    assert optimizer_step_bytes(TrainingModel(plan).stage_bytes(stage)) == 2 * 4 * 96 * 64 * 2, "gate and up projection"
    full = replace(plan, megatron=MegatronOptions(recompute="full"))
    # Two inputs are kept; the layer that is computed again has its input already.
    assert working_bytes(full, stage, 0).train_activations == 4 * 256 * (2 * 64 + kept - 64 + 4 * 64)
    selective = replace(plan, megatron=MegatronOptions(recompute="selective", recompute_modules=("core_attn", "mlp")))
    repeated, feed_forward = 2 * 64, 4 * 96
    again = repeated + feed_forward
    assert recomputed_elements(selective, moe=False) == again
    assert working_bytes(selective, stage, 0).train_activations == 4 * 256 * (2 * (kept - again) + again + 4 * 64)


def test_recompute_of_experts_and_latent_attention_by_hand():
    """Up-projections: queries twice, keys without rotation, values. `moe` holds the shared experts, which count once."""
    small = job(DSV3, world_size=8, layout=ParallelLayout(ep=8))

    def again(*modules: str) -> float:
        options = MegatronOptions(recompute="selective", recompute_modules=modules)
        return recomputed_elements(replace(small, megatron=options), moe=True)

    assert again("mla_up_proj") == 2 * 128 * 192 + 128 * (128 + 128)
    assert again("layernorm") == 2 * 7168
    assert again("shared_experts") == 4 * 2048
    assert again("mlp") == 0
    assert again("moe", "shared_experts") == again("moe") > 2 * 8 * 7168
    assert again("moe") < layer_elements(small, moe=True)


def test_dtypes_of_gradients_and_moments_are_counted():
    plan = job(train_dtype="bfloat16")
    (stage,) = stages(plan.architecture, plan.layout)
    base = TrainingModel(plan).stage_bytes(stage)
    elements = base.weights // 2
    assert (base.gradients, base.gradient_copies, base.optimizer) == (4 * elements, 0, 12 * base.owned)
    lean = replace(
        plan,
        megatron=MegatronOptions(grad_reduce_in_fp32=False),
        optimizer=OptimizerConfig(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16"),
    )
    held = TrainingModel(lean).stage_bytes(stage)
    assert (held.gradients, held.gradient_copies, held.optimizer) == (2 * elements, 4 * held.owned, 8 * held.owned)
    assert optimizer_step_bytes(held) == optimizer_step_bytes(base) + 4 * held.owned
    critic = TrainingModel(lean, critic=True).stage_bytes(stage)
    assert critic.optimizer == 12 * critic.owned, "it has an optimizer config of its own"


def test_sizes_are_read_and_shown():
    assert parse_size("64GiB", key="x") == 64 * 2**30 and parse_size("80 gb", key="x") == 80 * 10**9
    assert parse_size("1.5MiB", key="x") == 3 * 2**19 and parse_size("4096", key="x") == 4096
    assert (show_size(1536), show_size(-(2**31)), show_size(12)) == ("1.50 KiB", "-2.00 GiB", "12 B")
    for bad in ("64 gigs", "0GiB", "", "-1GiB"):
        with pytest.raises(ValueError, match="--device_memory = "):
            parse_size(bad, key="--device_memory")
