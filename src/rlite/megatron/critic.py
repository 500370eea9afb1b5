"""The critic of PPO: a policy-shaped model whose last stage gives one number for each position.

Shape legend: N trained tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from typing_extensions import override

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.config import HfConfig, ModelConfig, model_config
from rlite.megatron.forward import collect_tokens, predicting_positions
from rlite.megatron.microbatch import MicroBatch
from rlite.megatron.model import PolicyChunk, named_local_tensors, unwrap
from rlite.megatron.options import MegatronOptions
from rlite.megatron.runner import PolicyRunner
from rlite.types import TokenRow, TokenScores, UpdateResult, ValueLossFn

_HEAD = "output_layer.weight"


class CriticChunk(PolicyChunk):
    """A policy chunk; on the last stage `[1, hidden]` takes the place of the LM head."""

    def __init__(self, model: ModelConfig, *, vp_stage: int | None = None) -> None:
        untied = {**model.gpt_kwargs, "share_embeddings_and_output_weights": False}
        super().__init__(replace(model, gpt_kwargs=untied), vp_stage=vp_stage)
        if self.post_process:
            weight = self.output_layer.weight
            self.output_layer = torch.nn.Linear(
                self.config.hidden_size, 1, bias=False, dtype=weight.dtype, device=weight.device
            )


def build_critic(
    hf_config: HfConfig,
    layout: ParallelLayout,
    *,
    options: MegatronOptions,
    params_dtype: torch.dtype,
) -> torch.nn.ModuleList:
    """This rank's chunks of the critic, weights undefined: `copy_policy_weights` fills them."""
    model = model_config(hf_config, layout, options=options, params_dtype=params_dtype)
    stages: Sequence[int | None] = range(layout.vpp) if layout.vpp > 1 else [None]
    return torch.nn.ModuleList(CriticChunk(model, vp_stage=stage) for stage in stages)


@torch.no_grad()
def copy_policy_weights(critic: Sequence[torch.nn.Module], policy: Sequence[torch.nn.Module]) -> None:
    """The critic starts from the policy's weights on the same rank, with a head of zeros: every value is 0."""
    source = named_local_tensors(policy)
    for name, tensor in named_local_tensors(critic).items():
        if name.endswith(_HEAD):
            tensor.zero_()
        else:
            tensor.copy_(source[name])


class CriticRunner(PolicyRunner):
    """Values of the trained tokens, and optimizer steps on them. Routers always choose themselves, unbalanced."""

    balances_experts = False

    def values(self, rows: Sequence[TokenRow]) -> list[Tensor]:
        """fp32 `[trained tokens]` of each row: the estimate before each of them is sampled. Collective."""
        return [scores.logprobs for scores in self.score(_native(rows))]

    def update_values(
        self, rows: Sequence[TokenRow], loss_fn: ValueLossFn, *, step: Callable[[], Any] | None = None
    ) -> UpdateResult:
        """One optimizer step, as `PolicyRunner.update`."""
        return self.update(_native(rows), lambda indices, scores: loss_fn(indices, scores.logprobs), step=step)

    @override
    def _token_scores(
        self, model: torch.nn.Module, hidden: Tensor, batch: MicroBatch, temperature: float
    ) -> TokenScores:
        """Values in the place of log-probabilities: the schedule and the bookkeeping of rows are the same."""
        values_N = token_values(model, hidden, batch)
        return TokenScores(logprobs=values_N, entropy=torch.zeros_like(values_N))


def token_values(model: torch.nn.Module, hidden: Tensor, batch: MicroBatch) -> Tensor:
    """fp32 `[N]`, equal on every tensor- and context-parallel rank."""
    chunk = unwrap(model)
    if chunk.config.sequence_parallel:
        # Every rank computes the whole loss, so its gradient is cut, not summed over ranks.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    here_N, local_N = predicting_positions(batch)
    features = hidden.flatten(0, 1).index_select(0, local_N).float()
    values = torch.nn.functional.linear(features, chunk.output_layer.weight.float())[:, 0]
    return collect_tokens(values, here_N)


def _native(rows: Sequence[TokenRow]) -> list[TokenRow]:
    return [replace(row, experts=None) for row in rows]
