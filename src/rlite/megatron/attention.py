"""Modules of the portable layer spec: what Megatron-core's local spec cannot do, on plain torch.

Shape legend: S local sequence, B sequences, H heads, G key/value heads, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rlite.device import current_device
from rlite.megatron.bootstrap import capabilities


class RMSNorm(torch.nn.Module):
    """RMS norm that works with sequence parallelism (the local spec's norm refuses it, MoE demands it)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else current_device(capabilities().device)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # gradients are summed over tensor-parallel ranks

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class DuplicatedLinear(torch.nn.Module):
    """Linear that every tensor-parallel rank holds whole: the down-projections of multi-head latent attention.

    The local spec splits them by columns there and loses the sum over ranks of the gradient of the rotary key: wrong
    gradients for tp > 1, silently.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool = False, **_: Any
    ) -> None:
        super().__init__()
        assert not bias and (config.tensor_model_parallel_size == 1 or config.sequence_parallel)
        device = None if config.use_cpu_initialization else current_device(capabilities().device)
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight), None


class CoreAttention(MegatronModule):
    """Causal attention on `scaled_dot_product_attention`, with grouped heads, MLA head sizes and context parallelism.

    Context parallelism gathers keys and values of the other ranks (sequence cut in Megatron's zigzag order).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        self.softmax_scale = softmax_scale
        self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp

    def forward(
        self, query_SBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Returns `[S, B, H * D]`. Rows are padded on the right, so the causal mask is the only mask."""
        assert attention_mask is None
        num_tokens, batch = query_SBHD.shape[:2]
        mask = None
        if self.cp_group.size() > 1:
            key_SBGD, value_SBGD, mask = self._gather_context(num_tokens, key_SBGD, value_SBGD)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBHD, key_SBGD, value_SBGD))
        if query.size(1) != key.size(1):
            repeats = query.size(1) // key.size(1)
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return output.permute(2, 0, 1, 3).reshape(num_tokens, batch, -1)

    def _gather_context(self, num_tokens: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the whole sequence in order, and which of them each local query may see."""
        size = self.cp_group.size()
        positions = zigzag_positions(num_tokens * size, size, device=key.device)
        order = torch.argsort(positions.flatten())
        key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)[order]
        value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)[order]
        mask = torch.arange(num_tokens * size, device=key.device)[None] <= positions[self.cp_group.rank()][:, None]
        return key, value, mask

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        return {}


def zigzag_positions(num_tokens: int, cp: int, *, device: torch.device | str = "cpu") -> Tensor:
    """int64 `[cp, num_tokens / cp]`: positions of each context-parallel rank, chunks r and 2*cp-1-r of 2*cp."""
    chunks = torch.arange(num_tokens, device=device).view(2 * cp, -1)
    return torch.stack([torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]]) for rank in range(cp)])
