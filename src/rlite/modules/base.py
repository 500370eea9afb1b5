"""`PolicyModule`: what every algorithm shares. It names the policy, builds it through the strategy, and logs."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from rlite.megatron.options import OptimizerConfig
from rlite.modules.protocol import PolicyStrategy


def is_hub_id(policy: str) -> bool:
    """Whether `policy` is `org/model` and neither it nor a directory `org` or `models` of ours is meant."""
    path = Path(policy)
    is_local = path.exists() or path.parent.is_dir() or path.parts[0] == "models"
    return re.fullmatch(r"[\w.-]+/[\w.-]+", policy) is not None and not is_local


def download(policy: str, *, local_files_only: bool = False) -> str:
    """Directory of the hub's model `policy`. Raises ValueError when it is neither here nor there."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(policy, local_files_only=local_files_only)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.policy = {policy!r}: no such directory, and it could not be loaded from the hub either ({error})"
        ) from error


class PolicyModule(pl.LightningModule):
    """A LightningModule whose parameters are the strategy's Megatron chunks.

    Args:
        policy: Hugging Face directory: `config.json` and a tokenizer, with or without weights (then a random start); or a
            name on the hub (`org/model`), downloaded once on each node.
        optimizer: learning rate and schedule.
        init_from: weights to start from instead: a Hugging Face directory, an rlite checkpoint, a run directory, or a
            directory of runs (then the one that was saved last).
    """

    updates_per_batch = 1
    """Optimizer steps a Lightning batch leads to; the learning-rate schedule counts with it."""

    def __init__(self, *, policy: str, optimizer: OptimizerConfig | None = None, init_from: str | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.optimizer_config = optimizer or OptimizerConfig()
        self.init_from = init_from
        self.chunks: torch.nn.ModuleList | None = None
        self._built_by: object = None

    @property
    def strategy(self) -> PolicyStrategy:
        strategy = self.trainer.strategy
        if not isinstance(strategy, PolicyStrategy):
            raise TypeError(
                f"{type(self).__name__} needs trainer.strategy = ColocatedRLStrategy, not {type(strategy).__name__}: "
                "pass strategy='colocated_rl' to the Trainer"
            )
        return strategy

    @override
    def prepare_data(self) -> None:
        """Downloads a policy that is named by its hub id; Lightning calls it on one process of a node."""
        if is_hub_id(self.policy):
            download(self.policy)

    @cached_property
    def policy_dir(self) -> str:
        """The policy on disk."""
        return download(self.policy, local_files_only=True) if is_hub_id(self.policy) else self.policy

    @property
    def tokenizer_dir(self) -> str:
        """Where the data module finds the tokenizer."""
        return self.policy_dir

    @override
    def configure_model(self) -> None:
        if self.chunks is not None and self._built_by is not self.trainer.strategy:
            raise RuntimeError(
                "this module's weights belong to the strategy of another Trainer: go on with that Trainer, or build a new "
                "module with init_from=CHECKPOINT"
            )
        if self.chunks is None:
            self._built_by = self.trainer.strategy
            self.chunks = self.strategy.build_policy(self.policy_dir, init_from=self.init_from)

    @override
    def configure_optimizers(self) -> Any:
        return self.strategy.build_optimizer(self.optimizer_config, total_steps=self.total_steps)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return int(self.trainer.limit_train_batches) * self.updates_per_batch

    @override
    def setup(self, stage: str) -> None:
        steps = self.trainer.limit_train_batches
        if stage == "fit" and (not isinstance(steps, int) or steps < 1):
            raise ValueError(
                f"trainer.limit_train_batches = {steps}: set it to the number of rollout steps, at least 1 "
                "(data is endless, so the run needs an end)"
            )

    def log_values(self, values: dict[str, float], *, batch_size: int) -> None:
        """Logs scalars that are equal on every rank."""
        for name, value in values.items():
            self.log(name, value, batch_size=batch_size, on_step=True, on_epoch=False, rank_zero_only=False)

    def step_schedules(self) -> None:
        """Moves the learning rate to the next optimizer step."""
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()  # type: ignore[union-attr]
