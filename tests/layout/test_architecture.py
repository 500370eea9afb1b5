import pytest

from rlite.layout.architecture import MLA, Architecture
from tests.reshard.tiny import CONFIGS

LLAMA = CONFIGS["llama"]
QWEN3_MOE = CONFIGS["qwen3_moe"]
DEEPSEEK = CONFIGS["deepseek_v3"]


def test_unknown_model_type_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"model_type = 'gpt2' is not supported; use one of .*qwen3_moe"):
        Architecture.from_config({**LLAMA, "model_type": "gpt2"})


def test_missing_key_is_named():
    with pytest.raises(ValueError, match=r"config.json: vocab_size is missing"):
        Architecture.from_config({**LLAMA, "vocab_size": None})


@pytest.mark.parametrize("option", ["attention_bias", "mlp_bias"])
def test_biases_that_would_be_dropped_are_refused(option):
    with pytest.raises(ValueError, match=rf"{option} = true"):
        Architecture.from_config({**LLAMA, option: True})


def test_head_dim_defaults_to_hidden_size_over_heads():
    assert Architecture.from_config({**LLAMA, "head_dim": None}).head_dim == 40 // 8


def test_only_qwen2_has_qkv_bias_and_only_qwen3_normalises_queries():
    archs = {name: Architecture.from_config(config) for name, config in CONFIGS.items()}
    assert {name for name, arch in archs.items() if arch.qkv_bias} == {"qwen2"}
    assert {name for name, arch in archs.items() if arch.qk_norm} == {"qwen3", "qwen3_moe"}


def test_qwen3_moe_layers_follow_sparse_step_and_dense_list():
    config = {**QWEN3_MOE, "num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert Architecture.from_config(config).moe.layers == (1, 5, 7)


def test_qwen3_moe_as_transformers_5_writes_it():
    config = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert Architecture.from_config({**config, "num_local_experts": 8}).moe.num_experts == 8


def test_deepseek_starts_with_dense_layers_and_adds_shared_experts():
    arch = Architecture.from_config({**DEEPSEEK, "n_shared_experts": 2})
    assert arch.moe.layers == (1, 2)
    assert arch.moe.shared_intermediate_size == 2 * 24
    assert arch.mla == MLA(q_lora_rank=10, kv_lora_rank=14, qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=3)


def test_deepseek_v2_has_a_router_bias_only_with_noaux_tc():
    config = CONFIGS["deepseek_v2_lite"]
    assert not Architecture.from_config(config).moe.router_bias
    assert Architecture.from_config({**config, "topk_method": "noaux_tc"}).moe.router_bias
