"""The layers of a pipeline stage: Transformer Engine's where it is installed, else the portable ones."""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlite.megatron.attention import CoreAttention, DuplicatedLinear, RMSNorm
from rlite.megatron.bootstrap import capabilities


def decoder_spec(config: TransformerConfig, *, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Decoder layers of this pipeline rank (and virtual stage)."""
    if capabilities().transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        _make_portable(layer.submodules)
    return block


def _make_portable(layer: Any) -> None:
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.sharded_state_dict_keys_map = {}
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if hasattr(attention, "linear_kv_down_proj"):
        mla.Linear = DuplicatedLinear  # the class that its `in [Linear, ...]` dispatch accepts
        attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, None) not in (None, IdentityOp):
            setattr(attention, name, RMSNorm)
