"""Sampling inside transformers' `generate` with one random generator for each request."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlite.types import Completion, SamplingConfig


class SeededSampler(LogitsProcessor):
    """Chooses the next token of every row itself and leaves greedy search no other choice.

    `generate` can only sample all rows from one global generator; here row b draws from a generator seeded with
    `seeds[b]`, so its tokens do not depend on the batch. Log-probs are those of the distribution sampled from.
    """

    def __init__(self, sampling: SamplingConfig, *, seeds: Sequence[int], device: torch.device) -> None:
        self._greedy = sampling.temperature == 0
        self._warpers = LogitsProcessorList() if self._greedy else _warpers(sampling)
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._tokens_BS: list[Tensor] = []
        self._logprobs_BS: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` `[B, V]`, fp32 logits; returns 0 for the chosen token of each row and -inf elsewhere."""
        logprobs_BV = self._warpers(input_ids, scores).log_softmax(-1)
        if self._greedy:
            tokens_B = logprobs_BV.argmax(-1)
        else:
            rows = zip(logprobs_BV.exp(), self._generators, strict=True)
            tokens_B = torch.cat([torch.multinomial(probs_V, 1, generator=generator) for probs_V, generator in rows])
        self._tokens_BS.append(tokens_B)
        self._logprobs_BS.append(logprobs_BV.gather(-1, tokens_B[:, None])[:, 0])
        return torch.full_like(scores, float("-inf")).scatter_(-1, tokens_B[:, None], 0.0)

    def completion(self, row: int, limit: int, stop_ids: Sequence[int], policy_version: int) -> Completion:
        """What row `row` sampled, up to and with its first stop token, at most `limit` tokens."""
        tokens = torch.stack(self._tokens_BS)[:limit, row].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
        return Completion(
            token_ids=tuple(tokens[:end]),
            logprobs=tuple(torch.stack(self._logprobs_BS)[:limit, row].tolist()[:end]),
            finish_reason="length" if end is None else "stop",
            policy_version=policy_version,
        )


def _warpers(sampling: SamplingConfig) -> LogitsProcessorList:
    """In vLLM's order: temperature, min_p, top_k, top_p."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList(warpers)
