"""Writes the tiny models of the demo, the tests and the examples: `python configs/models/make_tiny.py [OUT_DIR]`.

Each directory holds a Hugging Face `config.json` and a tokenizer of 64 single characters, and no weights: rlite starts
such a model from random numbers. They are shaped like the real thing where shape matters to Megatron-core and vLLM:

* `tiny_dsv3`: DeepSeek-V3. Latent attention with the head sizes of the real model, one dense layer and two of 8 experts
  in 2 groups, sigmoid router with bias, one shared expert.
* `tiny_qwen3_moe`: grouped-query attention with query/key norm, 8 experts, softmax router.
* `tiny_llama`: dense, grouped-query attention, tied embeddings.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz \n+-*/=.,:;?!()[]<>'\"_%^"

COMMON = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    # 0.02 is for wide models: at this width 0.1 learns sums in a third of the steps.
    "initializer_range": 0.1,
    "use_cache": True,
    "dtype": "float32",
}

MODELS = {
    "tiny_dsv3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **COMMON,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        # A group is scored by its best two experts, which needs num_experts_per_tok / topk_group = 2.
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "tiny_qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **COMMON,
        "tie_word_embeddings": False,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    },
    "tiny_llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **COMMON,
        "tie_word_embeddings": True,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mlp_bias": False,
    },
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; no chat template."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        model_max_length=COMMON["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def main(out_dir: Path) -> None:
    tokenizer = make_tokenizer()
    for name, config in MODELS.items():
        directory = out_dir / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
