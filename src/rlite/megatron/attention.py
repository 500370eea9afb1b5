"""Modules of the portable layer spec: what Megatron-core's local spec cannot do, on plain torch.

Shape legend: T packed tokens, H heads, G key/value heads, D head size.
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
from rlite.megatron.packing import Packing, context_order, context_positions


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
    """Causal attention inside each packed sequence, on `scaled_dot_product_attention`, with grouped heads, MLA head sizes
    and context parallelism.

    Context parallelism gathers keys and values of the other ranks (each sequence cut in Megatron's zigzag order).
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
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        """Returns `[T, H, D]`. Sequences are padded on the right, so causality is the only mask."""
        assert attention_mask is None
        cp = self.cp_group.size()
        positions = None
        if cp > 1:
            positions = context_positions(packed_seq_params.lengths, cp).to(query_THD.device)
            order = context_order(packed_seq_params.lengths, cp).to(query_THD.device)
            key_TGD = gather_from_sequence_parallel_region(key_TGD.contiguous(), group=self.cp_group)[order]
            value_TGD = gather_from_sequence_parallel_region(value_TGD.contiguous(), group=self.cp_group)[order]
        outputs = []
        for start, count, length in packed_seq_params.runs:
            queries = slice(start // cp, (start + count * length) // cp)
            keys = slice(start, start + count * length)
            mask = None
            if positions is not None:
                mine = positions[self.cp_group.rank(), queries][: length // cp] - start
                mask = torch.arange(length, device=mine.device)[None] <= mine[:, None]
            outputs.append(self._attend(query_THD[queries], key_TGD[keys], value_TGD[keys], count, mask))
        return torch.cat(outputs)

    def _attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, count: int, mask: Tensor | None) -> Tensor:
        """Attention of `count` sequences of one length; `mask` `[queries, keys]` or causal."""
        query, key, value = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (query_THD, key_TGD, value_TGD))
        if query.size(1) != key.size(1):
            repeats = query.size(1) // key.size(1)
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return output.transpose(1, 2).flatten(0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        return {}
