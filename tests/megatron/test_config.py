"""Layouts and models that do not fit are refused with the equation; learning rates by hand."""

from typing import Any

import pytest

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.config import model_config
from rlite.megatron.names import local_name
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from tests.megatron.tiny import CONFIGS


def _config(name: str, layout: ParallelLayout | None = None, **overrides: Any) -> Any:
    return model_config({**CONFIGS[name], **overrides}, layout or ParallelLayout(), options=MegatronOptions())


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("llama", ParallelLayout(tp=3, etp=3), r"tp = 3 does not divide num_attention_heads = 4"),
        ("llama", ParallelLayout(tp=4, etp=4), r"tp = 4 does not divide num_key_value_heads = 2"),
        ("qwen3_moe", ParallelLayout(ep=3), r"ep = 3 does not divide number of experts = 8"),
        ("qwen3_moe", ParallelLayout(tp=1, ep=2, etp=5), r"etp = 5 does not divide expert size = 24"),
        ("llama", ParallelLayout(ep=2), r"ep = 2: llama has no experts"),
        ("llama", ParallelLayout(pp=3), r"4 layers on pp = 3"),
        ("llama", ParallelLayout(pp=2, vpp=3), r"vpp = 3 does not divide"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(name: str, layout: ParallelLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(name, layout)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ("llama", {"model_type": "gpt_neox"}, "gpt_neox"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {"num_experts_per_tok": 2}, r"2 // 2 = 1: deepseek_v3 scores a group by its best 2"),
        ("deepseek_v2", {"n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy"}, "best 1 experts"),
    ],
)
def test_features_that_megatron_computes_differently_are_refused(name: str, overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(name, **overrides)


def test_vocabulary_is_padded_to_a_multiple_of_tp() -> None:
    model = _config("llama", ParallelLayout(tp=2, etp=2))
    assert model.vocab_size == 97 and model.gpt_kwargs["vocab_size"] == 98


def test_expert_bias_is_frozen_and_no_auxiliary_loss_is_added() -> None:
    transformer = _config("deepseek_v3").transformer
    assert transformer.moe_router_bias_update_rate == 0.0
    assert transformer.moe_aux_loss_coeff == 0.0
    assert transformer.moe_router_load_balancing_type == "none"


@pytest.mark.parametrize(
    ("fused", "local"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.1.input_layernorm.weight"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.2.mlp.experts.linear_fc1.weight3",
            "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight",
        ),
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"),
    ],
)
def test_transformer_engine_names_become_those_of_the_local_spec(fused: str, local: str) -> None:
    assert local_name(fused) == local


def test_learning_rate_warms_up_and_decays() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6, min_lr=0.2)
    assert [config.lr_factor(step) for step in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", total_steps=2)
    assert [cosine.lr_factor(step) for step in range(3)] == pytest.approx([1.0, 0.5, 0.0])


def test_a_schedule_that_ends_before_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule = cosine: total_steps = 5 must be larger"):
        OptimizerConfig(schedule="cosine", warmup_steps=5).with_total_steps(5)
    assert OptimizerConfig(schedule="cosine").with_total_steps(5).total_steps == 5
