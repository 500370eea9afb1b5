"""Fixes for Megatron-core 0.16.1 that are needed on any device."""

import queue
from typing import Any

import torch
from torch import Tensor

from rlite.megatron.patching import replace


def apply() -> None:
    """Bugs that do not depend on Transformer Engine."""
    replace(
        "optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        lambda _: _set_main_param_and_optimizer_states,
        why="KeyError 'step' and an in-place write on a leaf when loading a resharded torch AdamW state",
    )
    replace(
        "optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
        _with_padding_between_buckets,
        why="a checkpoint reads it at padded offsets: wrong optimizer state with tied embeddings and a pipeline",
    )
    replace(
        "dist_checkpointing.strategies.filesystem_async:_get_write_results_queue",
        lambda _: queue.Queue,
        why="a spawned Manager process re-imports __main__; rlite writes checkpoints in this process",
    )


def apply_without_transformer_engine() -> None:
    """Names that Megatron-core leaves undefined or wrong when Transformer Engine is missing."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # NameError in every MoE router otherwise
    replace(
        "transformer.multi_latent_attention:HAVE_TE",
        lambda _: False,
        why="True without TE (the extension imports with mocks): TypeError in isinstance()",
    )


@torch.no_grad()
def _set_main_param_and_optimizer_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    group_index, group_order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][group_order]
    for key, destination in {"param": main_param, **self.optimizer.state[main_param]}.items():
        if key in tensors:  # `step` travels in the parameter groups
            destination.copy_(tensors[key])


def _with_padding_between_buckets(get_parameter_state: Any) -> Any:
    """The state of a buffer with the gaps between its buckets, as `sharded_param_state_fully_reshardable` indexes it.

    Buffers have several buckets when an embedding is shared between pipeline stages. Silent in Megatron-core 0.16.1.
    """

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = get_parameter_state(self, *args, **kwargs)
        for index, buffer in enumerate(self.buffers if state is not None else ()):
            for tensors in state[index].values():
                for key, packed in tensors.items():
                    if isinstance(packed, Tensor):
                        tensors[key] = _unpack_buckets(packed, buffer)
        return state

    return wrapped


def _unpack_buckets(packed: Tensor, buffer: Any) -> Tensor:
    unpacked, start = packed.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        unpacked[bucket.offset : bucket.offset + bucket.numel_unpadded] = packed[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return unpacked
