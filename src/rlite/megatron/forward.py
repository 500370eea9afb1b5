"""One micro-batch through the model: hidden states, then log-probabilities and entropy of its trained tokens.

Shape legend: T packed tokens, N trained tokens of the micro-batch.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from rlite.megatron.logprobs import vocab_parallel_logprobs
from rlite.megatron.microbatch import MicroBatch
from rlite.megatron.model import unwrap
from rlite.megatron.packing import Packing, context_positions
from rlite.types import TokenScores


def forward_hidden(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Output of this stage, `[T / cp / tp, 1, hidden]`: final hidden states on the last one."""
    tokens_T = batch.tokens_T
    here = context_rank_positions(batch)
    if here is not None:
        tokens_T = tokens_T[here]
    # No position ids: rotary embeddings follow from the sequence lengths.
    return model(tokens_T[None], None, None, packed_seq_params=Packing.of(batch))


def token_scores(
    model: torch.nn.Module, hidden: Tensor, batch: MicroBatch, *, temperature: float, chunk_tokens: int
) -> TokenScores:
    """Scores of all N trained tokens, equal on every tensor- and context-parallel rank.

    Only the hidden states that predict a trained token meet the LM head.
    """
    chunk = unwrap(model)
    if chunk.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    here_N, local_N = predicting_positions(batch)
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


def context_rank_positions(batch: MicroBatch) -> Tensor | None:
    """int64 `[T / cp]`: positions of T on this context-parallel rank; None when it holds all, in order."""
    cp = parallel_state.get_context_parallel_world_size()
    if cp == 1:
        return None
    positions = context_positions(batch.lengths, cp)[parallel_state.get_context_parallel_rank()]
    return positions.to(batch.tokens_T.device)


def predicting_positions(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """bool `[N]`: which predicting positions are on this context-parallel rank; and their index among its tokens."""
    here = context_rank_positions(batch)
    if here is None:
        return torch.ones_like(batch.predict_N, dtype=torch.bool), batch.predict_N
    local_of_global = torch.full_like(batch.tokens_T, -1)
    local_of_global[here] = torch.arange(here.numel(), device=here.device)
    local_N = local_of_global[batch.predict_N]
    here_N = local_N >= 0
    return here_N, local_N[here_N]


def collect_tokens(values: Tensor, here_N: Tensor) -> Tensor:
    """All N values from those of each context-parallel rank.

    The gradient of a rank's values is its own slice: every rank computes the same loss, and Megatron's data-parallel
    reduction sums the weights' gradients over context-parallel ranks.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    scattered_N = values.new_zeros(here_N.numel()).masked_scatter(here_N, values)
    return reduce_from_tensor_model_parallel_region(scattered_N, group=parallel_state.get_context_parallel_group())
