"""`ColocatedRLStrategy`: Lightning's view of a policy that trains and generates on the same devices in turns.

The strategy owns three things and delegates each: the process mesh (`megatron.groups`), the policy with its optimizer
(`PolicyState`), and the phase machine (`memory.PhaseMachine`). Lightning's hooks are thin.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from rlite import device
from rlite.layout.architecture import Architecture
from rlite.layout.parallel import ParallelLayout
from rlite.layout.placement import Placement
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.memory import Ledger, Phase, PhaseError, PhaseMachine, PhaseMetrics
from rlite.messages import announce
from rlite.rollout.engine import RolloutEngine
from rlite.strategies.checkpoint import RunCheckpoint
from rlite.strategies.critic import CriticState
from rlite.strategies.policy import PolicyState, has_weights
from rlite.strategies.precision import MegatronPrecision
from rlite.strategies.saving import CheckpointSaver
from rlite.strategies.timing import Stopwatch
from rlite.types import LossFn, TokenRow, TokenScores, UpdateResult, ValueLossFn


class ColocatedRLStrategy(ParallelStrategy):
    """Megatron-core parallelism and phase swapping behind Lightning's Strategy interface.

    Args:
        layout: how the policy is cut over ranks. `dp` takes what `tp*pp*cp` leaves of `devices * num_nodes`.
        megatron: recompute, micro-batch size and other knobs of Megatron-core.
        timeout_s: of collectives; a rank that dies makes the others fail after this long.
    """

    is_distributed = True
    """Tells Lightning that there is more than one process (it only knows its own strategies by name)."""

    def __init__(
        self,
        *,
        layout: ParallelLayout | None = None,
        megatron: MegatronOptions | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__()
        self.layout = layout or ParallelLayout()
        self.megatron = megatron or MegatronOptions()
        self.timeout_s = timeout_s
        self.num_nodes = 1
        self.phases = PhaseMachine(Ledger())
        self._phase_metrics = PhaseMetrics()
        self.stopwatch = Stopwatch()
        self.saver = CheckpointSaver()
        self.engine: RolloutEngine | None = None
        """Set by the rollout callback, with where the engine's ranks keep which weights."""
        self.engine_placement: Callable[[Architecture], Placement] | None = None
        self._policy: PolicyState | None = None
        self._critic: CriticState | None = None
        self._wants_reference = False

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def device_name(self) -> str:
        """What this rank's device calls itself."""
        return device.device_name(device.DeviceKind(self.root_device.type))

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @override
    def _configure_launcher(self) -> None:
        # Under torchrun it spawns nothing but still checks that `devices` and `num_nodes` agree with the world.
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.layout.validate(self.world_size)
        reset_seed()
        self.set_world_ranks()
        if not dist.is_initialized():
            _init_dist_connection(
                self.cluster_environment,
                device.DeviceKind(self.root_device.type).backend,
                timeout=timedelta(seconds=self.timeout_s),
            )
        self.phases.ledger.kind = device.DeviceKind(self.root_device.type)
        if not self.phases.ledger.kind.is_accelerator:
            device.keep_large_blocks_apart()
        found = PolicyState.build_groups(self.layout, self.root_device, seed=int(os.environ.get("PL_GLOBAL_SEED", 0)))
        if found:
            announce(found)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.dp(self.world_size), "rank": self.dp_rank}

    @property
    def dp_rank(self) -> int:
        """Ranks with the same `dp_rank` see the same prompts."""
        return self.layout.coordinates(self.global_rank, self.world_size).dp

    # -- set-up ------------------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> MegatronPrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MegatronPrecision) else MegatronPrecision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning builds its own plugin from `precision=` when the strategy is given by name.
        if precision_plugin is not None and not isinstance(precision_plugin, MegatronPrecision):
            precision_plugin = MegatronPrecision(str(precision_plugin.precision))
        self._precision_plugin = precision_plugin

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        yield  # Megatron places its own parameters

    def build_policy(self, policy_dir: str, *, init_from: str | None) -> torch.nn.ModuleList:
        """Builds this rank's chunks of the policy; idempotent. Called by `LightningModule.configure_model`.

        Args:
            policy_dir: Hugging Face directory with at least `config.json`.
            init_from: directory (Hugging Face or rlite checkpoint) whose weights to start from; by default the weights
                in `policy_dir`, or a random start when it has none.
        """
        if self._policy is None:
            self._policy = PolicyState(
                policy_dir,
                layout=self.layout,
                options=self.megatron,
                params_dtype=self.precision_plugin.params_dtype,
                phases=self.phases,
                initialize=init_from is None and not has_weights(Path(policy_dir)),
            )
            self._policy.load_initial_weights(init_from)
        return self._policy.chunks

    def build_optimizer(self, config: OptimizerConfig, *, total_steps: int) -> dict[str, Any]:
        """Wraps the chunks for data parallelism and builds Megatron's distributed optimizer and LR schedule."""
        return self.policy.build_optimizer(config, total_steps=total_steps)

    def build_critic(self, config: OptimizerConfig, *, total_steps: int) -> None:
        """A value model for PPO with the policy's layout and its weights of this moment; both are on the device for it."""
        self._critic = CriticState(self.policy, config, total_steps=total_steps)

    def keep_reference(self) -> None:
        """Asks for the weights that the run starts from to be kept as the reference; before the policy is built."""
        self._wants_reference = True

    @property
    def policy(self) -> PolicyState:
        if self._policy is None:
            raise RuntimeError("the policy is not built yet: it is, from LightningModule.configure_model on")
        return self._policy

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.phases.phase is not Phase.IDLE or self.phases.has_failed:
            self.enter(Phase.IDLE)  # where the run before, of the same trainer, left its weights
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            if self._wants_reference:
                self.policy.keep_reference()
        else:
            self.policy.register_residents()
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        pass  # built in place

    # -- what modules and callbacks call -----------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Moves the phase machine and books the time: weight sync apart from moving memory."""
        if self.phases.phase is phase and not self.phases.has_failed:
            return
        self.phases.enter(phase)
        entry = self.phases.ledger.entries[-1]
        self.stopwatch.add("sync", entry.sync_s)
        self.stopwatch.add("offload", entry.transition_s - entry.sync_s)

    def score(self, rows: Sequence[TokenRow], *, temperature: float, record_experts: bool = False) -> list[TokenScores]:
        """Log-probabilities and entropies of the trained tokens of `rows` under the policy, without gradient.

        With `record_experts` also the experts that every token was sent to.
        """
        self.phases.require(Phase.LOGPROB, Phase.TRAIN, Phase.IDLE, action="scoring with the policy")
        return self.policy.runner.score(rows, temperature=temperature, record_experts=record_experts)

    def score_reference(self, rows: Sequence[TokenRow], *, temperature: float) -> list[TokenScores]:
        """The same under the frozen reference weights, whose routers always choose themselves."""
        self.phases.require(Phase.REFERENCE, action="scoring with the reference")
        native = [replace(row, experts=None) for row in rows]
        with self.policy.with_reference_biases():
            return self.policy.runner.score(native, temperature=temperature)

    def update(self, rows: Sequence[TokenRow], loss_fn: LossFn, *, temperature: float) -> UpdateResult:
        """One optimizer step: forward and backward over micro-batches of `rows`, clip, step."""
        self.phases.require(Phase.TRAIN, action="an optimizer step")
        return self.policy.runner.update(rows, loss_fn, temperature=temperature, step=self._step)

    def _step(self) -> None:
        self.phases.join()  # the optimizer state came in the background
        self._lightning_optimizers[0].step()  # counts trainer.global_step and fires the hooks

    @property
    def critic(self) -> CriticState:
        if self._critic is None:
            raise RuntimeError("there is no critic: PPOModule builds one for training")
        return self._critic

    def score_values(self, rows: Sequence[TokenRow]) -> list[Tensor]:
        """fp32 values of the trained tokens of each row under the critic, without gradient."""
        self.phases.require(Phase.CRITIC, action="scoring with the critic")
        return self.critic.runner.values(rows)

    def update_critic(self, rows: Sequence[TokenRow], loss_fn: ValueLossFn) -> UpdateResult:
        """One optimizer step of the critic; `trainer.global_step` counts only those of the policy."""
        self.phases.require(Phase.CRITIC, action="an optimizer step of the critic")
        return self.critic.update(rows, loss_fn)

    def drain_metrics(self) -> dict[str, float]:
        """`timing_s/*` and `perf/phase/*` since the last call: seconds of this rank, bytes of the rank with the most."""
        timing = {f"timing_s/{name}": seconds for name, seconds in self.stopwatch.drain().items()}
        memory = self._phase_metrics.of(self.phases.ledger.drain())
        if self.world_size > 1 and memory:
            values = torch.tensor(list(memory.values()), dtype=torch.float64)
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
            memory = dict(zip(memory, values.tolist(), strict=True))
        return timing | memory

    def gather_data_parallel(self, value: Any) -> list[Any]:
        """One value from each data-parallel rank, in order of `dp_rank`, on every rank. Values must be picklable.

        Ranks that share a `dp_rank` share its data; the value of the lowest of them counts.
        """
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (self.dp_rank, value))
        by_dp_rank = dict(reversed(gathered))
        return [by_dp_rank[rank] for rank in sorted(by_dp_rank)]

    def exchange_data_parallel(self, outgoing: Sequence[Any]) -> list[Any]:
        """Gives `outgoing[d]` to data-parallel rank d; returns what each gave to this one. Values must be picklable.

        Ranks that share a `dp_rank` must give the same.
        """
        if len(outgoing) == 1:
            return list(outgoing)
        from rlite.megatron.groups import exchange_objects

        return exchange_objects(outgoing)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """`values` of the last pipeline stage, the only one that computes losses."""
        return self.policy.runner.from_last_stage(values)

    @property
    def leads_data_rank(self) -> bool:
        """True on the lowest of the ranks that share a `dp_rank`: it does what must be done once for their data."""
        where = self.layout.coordinates(self.global_rank, self.world_size)
        return where.tp == where.cp == where.pp == 0

    # -- Lightning's steps and collectives ---------------------------------------------------------------------------

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("backward runs inside Megatron's schedule: call trainer.strategy.update(rows, loss_fn)")

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        boxed = [obj]
        dist.broadcast_object_list(boxed, src)
        return boxed[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # saved in shards by save_checkpoint; a full copy would not fit in host memory

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a directory; see `RunCheckpoint`. Every rank calls it."""
        self.phases.require(Phase.IDLE, Phase.TRAIN, action="saving a checkpoint")
        self.phases.join()
        with self.stopwatch.timed("save"):
            self.saver.save(RunCheckpoint(self.broadcast(str(filepath))), checkpoint, self._plan_save)

    def _plan_save(self, directory: Path) -> Iterator[Any]:
        yield self.policy.plan_save(directory / "sharded")
        if self._critic is not None:
            phase = self.phases.phase
            self.enter(Phase.CRITIC)
            self.phases.join()
            yield self.critic.plan_save(directory / "critic")
            self.enter(phase)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = RunCheckpoint(self.broadcast(str(checkpoint_path)))
        state = checkpoint.load(self.policy)
        if self._critic is not None:
            self.critic.load(checkpoint.path / "critic")
        return state

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        pass  # load_checkpoint did it

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pass

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.saver.remove(str(filepath))

    @override
    def on_exception(self, exception: BaseException) -> None:
        try:
            self.phases.join()
        except PhaseError as error:
            exception.add_note(str(error))

    @override
    def teardown(self) -> None:
        # No collectives and no `.cpu()`: this also runs after an error on one rank.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if "colocated_rl" not in strategy_registry:
            strategy_registry.register("colocated_rl", cls, description=cls.__doc__.splitlines()[0])


ColocatedRLStrategy.register_strategies(StrategyRegistry)


def colocated(trainer: Trainer, module: LightningModule | None = None) -> ColocatedRLStrategy:
    """The trainer's strategy, or an error that says which one is needed."""
    if not isinstance(trainer.strategy, ColocatedRLStrategy):
        who = type(module).__name__ if module is not None else "this callback"
        raise TypeError(
            f"{who} needs trainer.strategy = ColocatedRLStrategy, not {type(trainer.strategy).__name__}: "
            "pass strategy='colocated_rl' to the Trainer"
        )
    return trainer.strategy
