"""What a module asks of the strategy. Modules know this and nothing else of Lightning strategies, Megatron or engines."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlite.megatron.options import OptimizerConfig
from rlite.memory import Phase
from rlite.types import LossFn, TokenRow, TokenScores, UpdateResult, ValueLossFn


class StopwatchLike(Protocol):
    def timed(self, name: str) -> Any: ...


@runtime_checkable
class PolicyStrategy(Protocol):
    """A strategy that holds a policy, scores rows with it, updates it, and knows the data-parallel ranks."""

    stopwatch: StopwatchLike

    @property
    def device_name(self) -> str: ...

    @property
    def dp_rank(self) -> int: ...

    @property
    def leads_data_rank(self) -> bool: ...

    def build_policy(self, policy_dir: str, *, init_from: str | None) -> torch.nn.ModuleList: ...

    def build_optimizer(self, config: OptimizerConfig, *, total_steps: int) -> dict[str, Any]: ...

    def build_critic(self, config: OptimizerConfig, *, total_steps: int) -> None: ...

    def keep_reference(self) -> None: ...

    def enter(self, phase: Phase) -> None: ...

    def score(
        self, rows: Sequence[TokenRow], *, temperature: float, record_experts: bool = False
    ) -> list[TokenScores]: ...

    def score_reference(self, rows: Sequence[TokenRow], *, temperature: float) -> list[TokenScores]: ...

    def update(self, rows: Sequence[TokenRow], loss_fn: LossFn, *, temperature: float) -> UpdateResult: ...

    def score_values(self, rows: Sequence[TokenRow]) -> list[Tensor]: ...

    def update_critic(self, rows: Sequence[TokenRow], loss_fn: ValueLossFn) -> UpdateResult: ...

    def drain_metrics(self) -> dict[str, float]: ...

    def gather_data_parallel(self, value: Any) -> list[Any]: ...

    def exchange_data_parallel(self, outgoing: Sequence[Any]) -> list[Any]: ...

    def from_last_stage(self, values: Tensor) -> Tensor: ...
