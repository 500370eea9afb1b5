"""Tiny Hugging Face model directories: config, random fp32 safetensors, character tokenizer. Made for CPUs."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EOS_TOKEN_ID = 1

_COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=EOS_TOKEN_ID,
    bos_token_id=2,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
# vLLM's CPU kernels demand a head dim in multiples of 32, and kv_lora_rank 512 with qk_rope_head_dim 64 for MLA.
_DENSE = dict(hidden_size=128, intermediate_size=192)
_MLA = dict(q_lora_rank=48, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
_DSV3 = dict(
    num_hidden_layers=3,
    num_key_value_heads=4,
    moe_intermediate_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.0,
    norm_topk_prob=True,
)
_QWEN3_MOE = dict(head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)

_MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**_COMMON, **_DSV3, **_MLA}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**_COMMON, **_QWEN3_MOE}),
    "llama": (LlamaForCausalLM, LlamaConfig, {**_COMMON, **_DENSE}),
    "llama_tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {**_COMMON, **_DENSE, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config, {**_COMMON, **_DENSE, "tie_word_embeddings": True}),
}
MODEL_NAMES = tuple(_MODELS)


def make_model_dir(directory: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random model `name` (one of `MODEL_NAMES`) to `directory / f"{name}_{seed}"` and returns that path.

    Every tensor is random, norms, biases and the router's correction bias too, so that a tensor that was not delivered
    is seen. `overrides` are keys of the Hugging Face config.
    """
    model_class, config_class, config = _MODELS[name]
    torch.manual_seed(1000 + seed)
    model = model_class(config_class(**{**config, **overrides})).to(torch.float32)
    _randomize(model)
    path = directory / f"{name}_{seed}"
    model.save_pretrained(path)
    if name == "deepseek_v3":  # transformers 5 writes neither key; vLLM reads both
        config_file = path / "config.json"
        saved = json.loads(config_file.read_text())
        config_file.write_text(json.dumps({**saved, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}, indent=1))
    write_char_tokenizer(path)
    return path


def _randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.05)


def write_char_tokenizer(path: Path) -> None:
    """Ids 0..3 are pad, eos, bos, unk; then one id for each printable ASCII character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocab = {token: i for i, token in enumerate([*specials, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), specials, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
