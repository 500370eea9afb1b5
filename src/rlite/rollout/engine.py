"""What every generation engine offers to the rollout callback. Pure: imports no engine.

The life of an engine in a colocated run, every rollout:

    sleep() -> (training) -> wake_weights() -> write into weights() -> finish_weight_update(version)
            -> wake_kv_cache(budget_bytes) -> generate(requests) -> sleep() -> ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rlite.types import Completion, SamplingConfig

ProgressFn = Callable[[int, int], None]
"""(completions finished, completions asked for), called while generating."""


class EngineError(RuntimeError):
    """Base of everything an engine raises about itself."""


class EngineStateError(EngineError):
    """The call is not allowed in the state the engine is in, e.g. sleeping twice."""


class StaleWeightsError(EngineStateError):
    """`generate` before `finish_weight_update`: the weights are not those of any policy."""


class RequestMismatchError(EngineError):
    """The tensor-parallel ranks of one engine were asked for different completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to sample."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    """From `rlite.rollout.sampling.sampling_seed`; ignored when greedy."""
    sampling: SamplingConfig


def check_requests(requests: Sequence[GenerationRequest], *, max_model_len: int) -> None:
    """Raises ValueError, naming the request, for one that no engine can serve."""
    for index, request in enumerate(requests):
        length = len(request.prompt_token_ids)
        if not 0 < length < max_model_len:
            raise ValueError(
                f"generate: the prompt of request {index} has {length} tokens; it must have at least 1 and fewer than "
                f"engine.max_model_len = {max_model_len}"
            )
        if request.sampling.max_tokens < 1:
            raise ValueError(
                f"generate: max_tokens = {request.sampling.max_tokens} of request {index} must be at least 1"
            )


@runtime_checkable
class RolloutEngine(Protocol):
    """One rank of a generation engine that shares its device with the trainer.

    All methods except `weights` and the properties are collective over the ranks of the world: every rank calls them in
    the same order. An engine starts awake with arbitrary weights, so it is stale until `finish_weight_update`.
    """

    @property
    def policy_version(self) -> int:
        """The version given to the last `finish_weight_update`; -1 before the first."""
        ...

    @property
    def weights_awake(self) -> bool: ...

    @property
    def kv_cache_awake(self) -> bool: ...

    @property
    def weight_bytes(self) -> int:
        """Device bytes that weights, and what is derived from them, hold now; 0 when asleep."""
        ...

    @property
    def kv_cache_bytes(self) -> int:
        """Device bytes that the KV cache holds, or may take while generating; 0 when asleep."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache can hold now; 0 when asleep."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """This rank's live weights by name, to be written in place.

        Makes the engine stale until `finish_weight_update`. The tensors stay the same objects (at other addresses) over
        sleep and wake. Raises EngineStateError when the weights are asleep.
        """
        ...

    def finish_weight_update(self, policy_version: int) -> None:
        """Every tensor of `weights()` now holds version `policy_version`.

        Recomputes what is derived from them and forgets cached prefixes. Raises EngineStateError when they are asleep.
        """
        ...

    def sleep(self) -> None:
        """Frees weights and KV cache; their content is lost. Raises EngineStateError when already asleep."""
        ...

    def wake_weights(self) -> None:
        """Allocates the weights, content undefined. Raises EngineStateError when they are awake."""
        ...

    def wake_kv_cache(self, budget_bytes: int | None = None) -> None:
        """Allocates the KV cache, with at most `budget_bytes` on this rank (the smallest over all ranks counts); None
        keeps the size that it had.

        Raises EngineStateError when it is awake or the weights are not, ValueError when the budget does not hold one
        sequence of the longest length.
        """
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_progress: ProgressFn | None = None
    ) -> list[Completion]:
        """Samples one completion for each request, in order.

        `finish_reason` is "stop" when a stop token was sampled (it is the last of `token_ids`) and "length" at
        `max_tokens` or the engine's longest sequence. `logprobs` are those of the distribution that was sampled from:
        after temperature and truncation. Tensor-parallel ranks must pass identical requests.

        Raises EngineStateError when asleep, StaleWeightsError when stale, RequestMismatchError on every rank when their
        requests differ, ValueError for a request the engine cannot serve. Any other exception ends the engine.
        """
        ...

    def shutdown(self) -> None:
        """Frees everything; may be called in any state and twice."""
        ...
