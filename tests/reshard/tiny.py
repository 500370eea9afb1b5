"""Tiny `config.json` dicts whose sizes are all different and divide no better than they must."""

_DENSE = {
    "num_hidden_layers": 3,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 101,
}
_MLA = {"q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 5, "qk_rope_head_dim": 2, "v_head_dim": 3}

CONFIGS = {
    "deepseek_v3": {
        **_DENSE,
        **_MLA,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2_lite": {
        **_DENSE,
        **_MLA,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "qwen3_moe": {
        **_DENSE,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "mlp_only_layers": [1],
    },
    "mixtral": {**_DENSE, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3": {**_DENSE, "model_type": "qwen3"},
    "qwen2": {**_DENSE, "model_type": "qwen2", "tie_word_embeddings": True},
    "llama_tied": {**_DENSE, "model_type": "llama", "tie_word_embeddings": True},
    "llama": {**_DENSE, "model_type": "llama"},
}
