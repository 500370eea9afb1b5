"""Builds this rank's part of the policy and names what it holds."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.config import HfConfig, ModelConfig, model_config
from rlite.megatron.initialize import initialize_weights
from rlite.megatron.names import local_name
from rlite.megatron.options import MegatronOptions
from rlite.megatron.spec import decoder_spec


class PolicyChunk(GPTModel):
    """A GPT model whose last stage returns HIDDEN STATES after the final norm, `[S / tp, B, hidden]`, never logits."""

    def __init__(self, model: ModelConfig, *, vp_stage: int | None = None) -> None:
        stage = {"ignore_virtual": False, "vp_stage": vp_stage}
        super().__init__(
            model.transformer,
            decoder_spec(model.transformer, vp_stage=vp_stage),
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            vp_stage=vp_stage,
            **model.gpt_kwargs,
        )
        self.unpadded_vocab_size = model.vocab_size

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """`[padded_vocab / tp, hidden]`: the LM head of the last stage, tied or not."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_policy(
    hf_config: HfConfig,
    layout: ParallelLayout,
    *,
    options: MegatronOptions | None = None,
    params_dtype: torch.dtype = torch.float32,
    initialize: bool = True,
) -> torch.nn.ModuleList:
    """This rank's chunks (one, or `layout.vpp`) of the model that a Hugging Face config describes.

    Needs `build_process_groups(layout)`. With `initialize`, weights are random and equal on every layout for the same
    `options.seed`; without it they are uninitialised, to be filled from a checkpoint.

    Raises:
        ValueError: see `rlite.megatron.config.model_config`.
    """
    options = options or MegatronOptions()
    model = model_config(hf_config, layout, options=options, params_dtype=params_dtype)
    stages: Sequence[int | None] = range(layout.vpp) if layout.vpp > 1 else [None]
    chunks = torch.nn.ModuleList(PolicyChunk(model, vp_stage=stage) for stage in stages)
    if initialize:
        initialize_weights(chunks, vocab_size=model.vocab_size, std=model.init_std, seed=options.seed)
    return chunks


def unwrap(chunk: torch.nn.Module) -> PolicyChunk:
    """The chunk inside Megatron's data-parallel wrapper."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def named_local_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """`"{chunk}.{name}"` -> weight of this rank, with the names of Megatron-core's local layer spec on any spec.

    Parameters, and the router's bias buffer. The tensors share memory with the model and carry no gradient; take them
    again after the model was wrapped for training, which moves the weights into flat buffers.
    """
    return {
        f"{index}.{local_name(name)}": tensor.detach()
        for index, chunk in enumerate(chunks)
        for name, tensor in _weights(unwrap(chunk))
    }


def _weights(chunk: PolicyChunk) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
