"""`MemoryOffload`: which residents leave the device in the phases that do not need them."""

from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rlite.memory.phases import (
    CRITIC,
    CRITIC_GRADIENTS,
    CRITIC_OPTIMIZER,
    ENGINE,
    GRADIENTS,
    KV_CACHE,
    OPTIMIZER,
    POLICY,
)
from rlite.strategies.colocated import colocated

OffloadPolicy = Literal["full", "optimizer_only", "none"]

_MOVABLE: dict[OffloadPolicy, frozenset[str]] = {
    "full": frozenset({POLICY, GRADIENTS, OPTIMIZER, CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER, ENGINE, KV_CACHE}),
    "optimizer_only": frozenset({GRADIENTS, OPTIMIZER, CRITIC_GRADIENTS, CRITIC_OPTIMIZER}),
    "none": frozenset(),
}


class MemoryOffload(Callback):
    """Frees the device of training state while generating, and of the engine while training.

    Args:
        policy: `full` moves everything that a phase does not need; `optimizer_only` moves gradients and optimizer state
            and leaves both sets of weights and the KV cache in place; `none` moves nothing.
    """

    def __init__(self, *, policy: OffloadPolicy = "full") -> None:
        if policy not in _MOVABLE:
            raise ValueError(f"MemoryOffload.policy = {policy!r}: use one of {', '.join(_MOVABLE)}")
        self.policy = policy

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        colocated(trainer).phases.movable = _MOVABLE[self.policy]
