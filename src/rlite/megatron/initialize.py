"""Random weights that do not depend on the layout.

Every tensor of the whole model is drawn by its own CPU generator, seeded by a hash of the run's seed and the tensor's
global name; a rank keeps its slice. At most one full tensor exists at a time. That is slow for large models, which do
not start from random weights.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from rlite.megatron.names import global_name, local_name


@torch.no_grad()
def initialize_weights(chunks: Sequence[Any], *, vocab_size: int, std: float, seed: int) -> None:
    """Normal weights of standard deviation `std`; norms one; biases and vocabulary padding zero."""
    for chunk in chunks:
        for raw_name, parameter in chunk.named_parameters():
            name = local_name(raw_name)
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                generator = _generator(global_name(name, chunk), seed)
                parameter.copy_(_draw_slice(name, parameter, vocab_size=vocab_size, std=std, generator=generator))


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _draw_slice(name: str, parameter: Tensor, *, vocab_size: int, std: float, generator: torch.Generator) -> Tensor:
    """fp32 tensor of the shape of `parameter`: this rank's slice of the freshly drawn full tensor."""
    rank, size = _tensor_parallel_coordinates(name)
    shape = list(parameter.shape)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        full = torch.empty(vocab_size, *shape[1:]).normal_(0.0, std, generator=generator)
        rows = full[rank * shape[0] : (rank + 1) * shape[0]]
        return torch.cat([rows, rows.new_zeros(shape[0] - rows.size(0), *shape[1:])])
    if name.endswith("linear_fc1.weight"):  # gate and up, each cut over the ranks
        half = shape[0] // 2
        full = torch.empty(2, half * size, *shape[1:]).normal_(0.0, std, generator=generator)
        return full[:, rank * half : (rank + 1) * half].flatten(0, 1)
    dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    if dim is None:
        return torch.empty(shape).normal_(0.0, std, generator=generator)
    local = shape[dim]
    shape[dim] *= size
    return torch.empty(shape).normal_(0.0, std, generator=generator).narrow(dim, rank * local, local)


def _tensor_parallel_coordinates(name: str) -> tuple[int, int]:
    if ".local_experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
