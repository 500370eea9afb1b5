"""Names of weights: those of Megatron-core's local layer spec, and of the whole model instead of one rank."""

import re
from typing import Any

from megatron.core import parallel_state

_TE_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"self_attention\.linear_q_up_proj\.layer_norm_weight$", "self_attention.q_layernorm.weight"),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_weight$", "self_attention.kv_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$", r"mlp.experts.local_experts.\2.\1.weight"),
)


def local_name(name: str) -> str:
    """The local spec's name of a weight; Transformer Engine fuses norms into linears and stacks experts."""
    for pattern, replacement in _TE_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def global_name(name: str, chunk: Any) -> str:
    """`name` (from `local_name`) with layers and experts counted over the whole model, not over this rank."""
    if layer := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        number = chunk.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{number}.{layer[2]}"
    if expert := re.match(r"(.*\.local_experts)\.(\d+)\.(.*)", name):
        per_rank = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
        name = f"{expert[1]}.{int(expert[2]) + per_rank * parallel_state.get_expert_model_parallel_rank()}.{expert[3]}"
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name
