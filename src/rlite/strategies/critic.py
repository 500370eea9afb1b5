"""`CriticState`: the critic on this rank, beside the policy: its own weights, optimizer, schedule and phase."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from rlite.megatron.options import OptimizerConfig
from rlite.memory.phases import CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER
from rlite.strategies.policy import PolicyState
from rlite.types import TokenRow, UpdateResult, ValueLossFn

if TYPE_CHECKING:
    from rlite.megatron.shard_files import ShardFiles


class CriticState(PolicyState):
    """A value model with the policy's layout and, at first, its weights. Built for training, on the device.

    Args:
        policy: whose weights to start from; it must be on the device.
        config: learning rate and schedule of the critic.
        total_steps: optimizer steps of the run.
    """

    WEIGHTS, OPTIMIZER, GRADIENTS = CRITIC, CRITIC_OPTIMIZER, CRITIC_GRADIENTS

    def __init__(self, policy: PolicyState, config: OptimizerConfig, *, total_steps: int) -> None:
        super().__init__(
            str(policy.dir),
            layout=policy.layout,
            options=policy.options,
            params_dtype=policy.params_dtype,
            phases=policy.phases,
            initialize=False,
        )
        from rlite.megatron.critic import copy_policy_weights

        copy_policy_weights(self.chunks, policy.chunks)
        self.build_optimizer(config, total_steps=total_steps)

    @override
    def _build_chunks(self, initialize: bool) -> torch.nn.ModuleList:
        from rlite.megatron.critic import build_critic

        return build_critic(self.hf_config, self.layout, options=self.options, params_dtype=self.params_dtype)

    @override
    def _build_runner(self) -> Any:
        from rlite.megatron.critic import CriticRunner

        return CriticRunner(list(self.chunks), self.layout, options=self.options, optimizer=self.optimizer)

    def update(self, rows: Sequence[TokenRow], loss_fn: ValueLossFn) -> UpdateResult:
        """One optimizer step, and the learning rate of the next."""
        result = self.runner.update_values(rows, loss_fn, step=self._step)
        self.scheduler.step()
        return result

    def _step(self) -> None:
        self.phases.join()  # the optimizer state came in the background
        self.optimizer.step()

    def plan_save(self, directory: Path) -> "ShardFiles":
        """Files of weights, optimizer state and schedule. Collective; the critic must be on the device."""
        from rlite.megatron.checkpoint import plan_sharded

        common = {"schedule": self.scheduler.state_dict()}
        return plan_sharded(directory, list(self.chunks), self.optimizer, common=common)

    def load(self, directory: Path) -> None:
        """Restores what was written. Collective. Raises ValueError when the checkpoint has no critic."""
        from rlite.megatron.checkpoint import load_sharded

        if not directory.is_dir():
            raise ValueError(f"{directory.parent} has no critic: it is not a checkpoint of PPOModule")
        common = load_sharded(directory, list(self.chunks), self.optimizer)
        self.scheduler.load_state_dict(common["schedule"])
