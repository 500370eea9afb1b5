"""Small config dataclasses that YAML files fill in. Importing this costs nothing: no torch, no engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How a rollout step's completions become optimizer steps."""

    group_size: int = 8
    """Completions sampled for each prompt; advantages compare them with each other."""
    minibatches: int = 1
    """Optimizer steps that share the completions of one rollout step, each on another part of them."""
    epochs: int = 1
    """Times all completions are used."""
    balance: bool = True
    """Move whole groups between data-parallel ranks so that each trains on about as many tokens."""

    def __post_init__(self) -> None:
        for name in ("group_size", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.batch.{name} = {getattr(self, name)}: must be at least 1")

    @property
    def updates_per_rollout(self) -> int:
        return self.minibatches * self.epochs
