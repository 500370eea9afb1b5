"""The data that flows through a run, in order: `Prompt -> Completion -> Rollout -> TokenRow -> TokenScores`.

Token-in/token-out: the ids that the engine sampled are the ids that are trained on; text is only for rewards and eyes.

Shape legend: T tokens of one sequence (prompt and completion), N trained tokens (`loss_mask` true) of all rows of a
micro-batch laid end to end, row after row. Per-token tensors are always flat `[N]`: padding never enters the maths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

NATIVE_EXPERT = -1
"""In a record of experts: the router chooses itself."""
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question: a row of the data set, tokenised once."""

    uid: int
    """Row number in the data set; with the run seed and the rollout step it determines the sampling seeds."""
    token_ids: tuple[int, ...]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; rewards receive them by argument name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled for one prompt."""

    token_ids: tuple[int, ...]
    """Sampled ids, stop token included when one was sampled."""
    logprobs: tuple[float, ...]
    """Log-probabilities as sampled (after temperature, natural log), one for each of `token_ids`."""
    finish_reason: FinishReason
    text: str = ""
    policy_version: int = 0
    """Rollout step of the weights that generated the tokens."""
    experts: Tensor | None = field(default=None, repr=False, compare=False)
    """int16 `[prompt and completion tokens, MoE layers, experts a token]`: global expert ids that the engine's routers chose,
    `NATIVE_EXPERT` for the last token, which no layer has seen. None: not recorded."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """A prompt with one of its `group_size` completions, later with its rewards and advantage."""

    prompt: Prompt
    completion: Completion
    sample_index: int
    """0 <= sample_index < group_size."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Reward by reward name; `None` where a reward abstained."""
    reward: float = 0.0
    """Weighted sum of `rewards`; NaN when all abstained."""
    advantage: float = 0.0
    logprob_diff: float = 0.0
    """Mean |trainer - engine| log-probability over the completion's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How completions are sampled. Training wants temperature 1 and no truncation of the distribution."""

    max_tokens: int = 256
    """Most tokens of a completion."""
    temperature: float = 1.0
    """0 is greedy and only for evaluation."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Added to the tokenizer's end-of-sequence id."""


@dataclass(slots=True, kw_only=True)
class RolloutBatch:
    """A Lightning batch: the prompts of this data-parallel rank, then (filled by the rollout callback) their rollouts."""

    prompts: list[Prompt]
    rollouts: list[Rollout] = field(default_factory=list)
    """Prompt-major: the `group_size` samples of `prompts[0]`, then those of `prompts[1]`, ..."""
    sampling: SamplingConfig | None = None
    """How the completions were sampled; log-probabilities are taken at the same temperature."""
    scored: bool = False
    """Whether the rollouts have their rewards."""

    def groups(self, group_size: int) -> list[list[Rollout]]:
        """The completions of each prompt, in order."""
        return [self.rollouts[start : start + group_size] for start in range(0, len(self.rollouts), group_size)]

    def hold(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Takes these groups, with their prompts, in the place of what it held."""
        self.rollouts = [rollout for group in groups for rollout in group]
        self.prompts = [group[0].prompt for group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One training sequence."""

    token_ids: Tensor
    """int64 `[T]`, prompt and completion."""
    loss_mask: Tensor
    """bool `[T]`; true where the token is trained on. `loss_mask[0]` is false: nothing predicts the first token."""
    experts: Tensor | None = field(default=None, repr=False, compare=False)
    """int16 `[T, MoE layers, experts a token]` that the trainer replays; `NATIVE_EXPERT` where its router chooses itself.
    None: everywhere."""

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> "TokenRow":
        prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
        mask = torch.zeros(len(prompt) + len(completion), dtype=torch.bool)
        mask[len(prompt) :] = True
        token_ids = torch.tensor(prompt + completion, dtype=torch.int64)
        return cls(token_ids=token_ids, loss_mask=mask, experts=rollout.completion.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a forward pass says about the trained tokens of some rows."""

    logprobs: Tensor
    """fp32 `[N]`, log p(token | everything before it) at the sampling temperature."""
    entropy: Tensor
    """fp32 `[N]`, entropy of the whole distribution at that position, in nats."""
    experts: Tensor | None = field(default=None, repr=False, compare=False)
    """int16 `[T, MoE layers, experts a token]` of one row, on the CPU, where the caller asked for a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss function returns for one micro-batch."""

    loss: Tensor
    """Scalar: the PARTIAL loss, numerator of these rows over GLOBAL denominators. Summed over all micro-batches and
    data-parallel ranks it is the loss; gradients are summed, never averaged."""
    metric_sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars that are summed over micro-batches and data-parallel ranks. Same keys in every call."""


LossFn = Callable[[Sequence[int], TokenScores], LossOutput]
"""(indices of the rows in this micro-batch, their scores with gradient) -> loss. Called once a micro-batch."""


ValueLossFn = Callable[[Sequence[int], Tensor], LossOutput]
"""The same for a critic: (row indices, fp32 values `[N]` with gradient, one for each trained token) -> loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One optimizer step."""

    metric_sums: dict[str, float]
    """Summed over micro-batches and data-parallel ranks; equal on every rank."""
    grad_norm: float
    """Before clipping, over all parameters."""
    applied: bool
    """False when the step was skipped because loss or gradients were not finite."""
