"""`EngineCheck`: do engine and trainer compute the same model? Asked after the first weight sync of every run."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlite.layout.parallel import EngineLayout
from rlite.memory import Phase
from rlite.rollout.engine import GenerationRequest, RolloutEngine
from rlite.strategies.colocated import ColocatedRLStrategy
from rlite.types import Prompt, Rollout, SamplingConfig, TokenRow

_PROMPTS, _PROMPT_TOKENS, _SAMPLED_TOKENS = 2, 6, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """A few tokens that every engine sampled after fixed prompts; the same rows on every rank."""

    rows: list[TokenRow]
    sampled: list[tuple[float, ...]]
    """The engine's log-probabilities of each row's completion."""
    temperature: float

    @classmethod
    def sample(
        cls, strategy: ColocatedRLStrategy, engine: RolloutEngine, layout: EngineLayout, *, temperature: float
    ) -> "EngineCheck":
        """Generates; collective. Every replica is asked, because a broken one samples other tokens."""
        vocabulary = strategy.policy.architecture.vocab_size
        sampling = SamplingConfig(max_tokens=_SAMPLED_TOKENS, temperature=temperature)
        requests = [
            GenerationRequest(
                prompt_token_ids=tuple((7 * start + 3 * k + 5) % vocabulary for k in range(_PROMPT_TOKENS)),
                seed=start,
                sampling=sampling,
            )
            for start in range(_PROMPTS)
        ]
        samples = []
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            prompt = Prompt(uid=0, token_ids=request.prompt_token_ids, text="")
            row = TokenRow.from_rollout(Rollout(prompt=prompt, completion=completion, sample_index=0))
            samples.append((row, completion.logprobs))
        if layout.replicas(strategy.world_size) > 1:
            everyones: list[Any] = [None] * strategy.world_size
            dist.all_gather_object(everyones, samples)
            samples = [sample for of_rank in everyones[:: layout.tp] for sample in of_rank]
        rows, sampled = zip(*samples, strict=True)
        return cls(rows=list(rows), sampled=list(sampled), temperature=temperature)

    def compare(self, strategy: ColocatedRLStrategy, *, tolerance: float) -> None:
        """Raises RuntimeError on every rank when a log-probability differs by more than `tolerance`. Enters LOGPROB."""
        strategy.enter(Phase.LOGPROB)
        scores = strategy.score(self.rows, temperature=self.temperature)
        differences = [
            (score.logprobs.cpu() - torch.tensor(sampled)).abs()
            for score, sampled in zip(scores, self.sampled, strict=True)
        ]
        largest = torch.cat(differences).nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        worst = float(largest)
        if not worst <= tolerance:
            raise RuntimeError(
                f"engine and trainer disagree after the first weight sync: max |log-prob difference| on a fixed prompt is "
                f"{worst:.3g} > logprob_tolerance = {tolerance}. They do not compute the same model: the weight conversion, a "
                "stale derived weight of the engine, or another dtype or rope setting. Raise logprob_tolerance only if bf16 "
                "rounding explains it."
            )
