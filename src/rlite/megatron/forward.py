"""One micro-batch through the model: hidden states, then log-probabilities and entropy of its trained tokens.

Shape legend: B rows, S padded length, N trained tokens of the micro-batch.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from rlite.megatron.attention import zigzag_positions
from rlite.megatron.logprobs import vocab_parallel_logprobs
from rlite.megatron.microbatch import MicroBatch
from rlite.megatron.model import unwrap
from rlite.types import TokenScores


def forward_hidden(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Output of this stage, `[S / cp / tp, B, hidden]`: final hidden states on the last one."""
    tokens_BS = batch.tokens_BS
    positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
    cp = parallel_state.get_context_parallel_world_size()
    if cp > 1:
        local = zigzag_positions(tokens_BS.size(1), cp, device=tokens_BS.device)
        local_S = local[parallel_state.get_context_parallel_rank()]
        tokens_BS, positions_BS = tokens_BS[:, local_S].contiguous(), positions_BS[:, local_S]
    return model(tokens_BS, positions_BS.contiguous(), None)


def token_scores(
    model: torch.nn.Module, hidden: Tensor, batch: MicroBatch, *, temperature: float, chunk_tokens: int
) -> TokenScores:
    """Scores of all N trained tokens, equal on every tensor- and context-parallel rank.

    Only the hidden states that predict a trained token meet the LM head.
    """
    chunk = unwrap(model)
    if chunk.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    here_N, local_N = predicting_positions(batch, hidden.device)
    logprobs, entropy = vocab_parallel_logprobs(
        hidden.flatten(0, 1).index_select(0, local_N),
        chunk.output_weight(),
        batch.targets_N[here_N],
        vocab_size=chunk.unpadded_vocab_size,
        temperature=temperature,
        group=parallel_state.get_tensor_model_parallel_group(),
        chunk_tokens=chunk_tokens,
    )
    return TokenScores(logprobs=collect_tokens(logprobs, here_N), entropy=collect_tokens(entropy, here_N))


def predicting_positions(batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """bool `[N]`: which predicting positions are on this context-parallel rank; and their flat index here."""
    cp, (num_rows, length) = parallel_state.get_context_parallel_world_size(), batch.tokens_BS.shape
    if cp == 1:
        return torch.ones_like(batch.predict_N, dtype=torch.bool), batch.predict_N
    mine = zigzag_positions(length, cp, device=device)[parallel_state.get_context_parallel_rank()]
    local_of_global = torch.full((length,), -1, device=device)
    local_of_global[mine] = torch.arange(mine.numel(), device=device)
    position_N = local_of_global[batch.predict_N // num_rows]
    here_N = position_N >= 0
    return here_N, (position_N * num_rows + batch.predict_N % num_rows)[here_N]


def collect_tokens(values: Tensor, here_N: Tensor) -> Tensor:
    """All N values from those of each context-parallel rank.

    The gradient of a rank's values is its own slice: every rank computes the same loss, and Megatron's data-parallel
    reduction sums the weights' gradients over context-parallel ranks.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    scattered_N = values.new_zeros(here_N.numel()).masked_scatter(here_N, values)
    return reduce_from_tensor_model_parallel_region(scattered_N, group=parallel_state.get_context_parallel_group())
