"""`PolicyState`: the policy on this rank: chunks, optimizer, runner, reference, and what of it may leave the device."""

import json
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlite import device as devices
from rlite.layout.architecture import Architecture
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.parallel import ParallelLayout
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.memory import DerivedBuffers, FlatBuffers, PhaseMachine
from rlite.memory.phases import GRADIENTS, OPTIMIZER, POLICY, REFERENCE
from rlite.strategies.checkpoint import RunCheckpoint

if TYPE_CHECKING:
    from rlite.megatron.shard_files import ShardFiles


class PolicyState:
    """Built once in a process; Megatron's groups must exist (`build_groups`).

    Args:
        policy_dir: Hugging Face directory with `config.json`, with or without weights.
        layout: training layout, validated against the world size.
        options: of the training engine.
        params_dtype: of the weights that compute.
        phases: the machine at which the residents are registered.
        initialize: start from random weights; false leaves them undefined, to be loaded.

    Raises:
        FileNotFoundError: no `config.json` in `policy_dir`.
        ValueError: an architecture or layout that is not supported.
    """

    WEIGHTS, OPTIMIZER, GRADIENTS = POLICY, OPTIMIZER, GRADIENTS
    """Names of the residents."""

    def __init__(
        self,
        policy_dir: str,
        *,
        layout: ParallelLayout,
        options: MegatronOptions,
        params_dtype: torch.dtype,
        phases: PhaseMachine,
        initialize: bool = True,
    ) -> None:
        self.dir, self.layout, self.options, self.phases = Path(policy_dir), layout, options, phases
        self.params_dtype = params_dtype
        self.hf_config = read_hf_config(self.dir)
        self.architecture = Architecture.from_config(self.hf_config)
        self.chunks: torch.nn.ModuleList = self._build_chunks(initialize)
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._runner: Any = None
        self._reference_biases: list[Tensor] = []

    def _build_chunks(self, initialize: bool) -> torch.nn.ModuleList:
        from rlite.megatron.model import build_policy

        return build_policy(
            self.hf_config, self.layout, options=self.options, params_dtype=self.params_dtype, initialize=initialize
        )

    @staticmethod
    def build_groups(layout: ParallelLayout, device: torch.device, *, seed: int) -> str | None:
        """Bootstraps Megatron-core and creates its groups; one line about what was found, None when they exist already.

        Raises:
            ValueError: those that exist are of another layout.
        """
        from rlite.megatron.bootstrap import bootstrap

        found = bootstrap(devices.DeviceKind(device.type))
        from megatron.core import parallel_state

        from rlite.megatron.groups import build_process_groups, check_process_groups

        if parallel_state.model_parallel_is_initialized():
            check_process_groups(layout)
            return None
        build_process_groups(layout, seed=seed)
        return str(found)

    # -- weights -----------------------------------------------------------------------------------------------------

    @cached_property
    def placement(self) -> MegatronPlacement:
        """Which parts of the canonical tensors every rank holds."""
        world_size, dtype = torch.distributed.get_world_size(), str(self.params_dtype).removeprefix("torch.")
        return MegatronPlacement(self.architecture, self.layout, world_size, dtype=dtype)

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's weights by the names of `placement`."""
        from rlite.megatron.model import named_local_tensors

        return named_local_tensors(self.chunks)

    def load_initial_weights(self, init_from: str | None) -> None:
        """From `init_from` (Hugging Face directory, rlite checkpoint, or a run directory), else from the policy's own."""
        source = Path(init_from) if init_from else self.dir
        if init_from and not source.exists():
            raise FileNotFoundError(f"model.init_from = {init_from}: no such directory")
        if has_weights(source):
            from rlite.reshard.safetensors_io import load_hf_weights

            local = self.placement.local(torch.distributed.get_rank())
            load_hf_weights(source, local, self.local_tensors())
        elif init_from:
            RunCheckpoint.find(source).load_weights(self.chunks)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def plan_save(self, directory: Path) -> "ShardFiles":
        """Files of weights and optimizer state for a checkpoint of the run. Collective; both must be on the device."""
        from rlite.megatron.checkpoint import plan_sharded

        return plan_sharded(directory, list(self.chunks), self.optimizer)

    def save_hf(self, directory: Path) -> None:
        """Writes the weights, with config and tokenizer, as a Hugging Face directory; no rank ever holds the model."""
        from rlite.reshard.safetensors_io import save_hf_weights

        save_hf_weights(directory, self.placement, self.local_tensors(), config_dir=self.dir)

    # -- training ----------------------------------------------------------------------------------------------------

    def build_optimizer(self, config: OptimizerConfig, *, total_steps: int) -> dict[str, Any]:
        """Wraps the chunks, builds optimizer and schedule, registers the residents. What Lightning wants of an optimizer."""
        from rlite.megatron.buffers import flat_gradients
        from rlite.megatron.optimizer import LrScheduler, build_optimizer, wrap_for_training

        if self.optimizer is not None:
            raise RuntimeError(
                "this strategy has trained already: a second fit needs a new Trainer and module (init_from)"
            )
        wrapped = wrap_for_training(list(self.chunks), grad_reduce_in_fp32=self.options.grad_reduce_in_fp32)
        for index, chunk in enumerate(wrapped):  # the module list that Lightning knows keeps its identity
            self.chunks[index] = chunk
        self.optimizer = build_optimizer(self.chunks, config.with_total_steps(total_steps))
        self.scheduler = LrScheduler(self.optimizer)
        self._runner = None
        self.register_residents()
        self.phases.register(FlatBuffers(self.GRADIENTS, flat_gradients(self.chunks), contents="scratch"))
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.scheduler}}

    def register_residents(self) -> None:
        """Tells the phase machine where weights and optimizer state are; again after they moved to other storages."""
        from rlite.megatron.buffers import flat_optimizer_state, flat_parameters

        rebuild = self.phases.offload_policy.rebuild_weights
        if self.optimizer is None:  # nothing to rebuild weights from: they are copied
            self.phases.register(FlatBuffers(self.WEIGHTS, (p.data for p in self.chunks.parameters())))
            return
        optimizer_state = FlatBuffers(self.OPTIMIZER, flat_optimizer_state(self.optimizer))
        weights = flat_parameters(self.chunks)
        self.phases.register(self._derived(weights, optimizer_state) if rebuild else FlatBuffers(self.WEIGHTS, weights))
        self.phases.register(optimizer_state)

    def _derived(self, weights: list[Tensor], optimizer_state: FlatBuffers) -> DerivedBuffers:
        from rlite.megatron.buffers import WeightRebuilder

        rebuilder = WeightRebuilder(self.chunks, self.optimizer, content_of=optimizer_state.content_of)
        return DerivedBuffers(self.WEIGHTS, weights, rebuild=rebuilder.run)

    def keep_reference(self) -> None:
        """Copies the weights as they are now to the host; phase REFERENCE puts them in the policy's place.

        The bias of routers is in no flat storage: `with_reference_biases` is to be around what the reference computes.
        """
        from rlite.megatron.balance import router_biases

        policy = self.phases.residents[POLICY]
        assert isinstance(policy, FlatBuffers)
        self.phases.register(policy.frozen_copy(REFERENCE))
        self._reference_biases = [bias.clone() for bias in router_biases(self.chunks)]

    def with_reference_biases(self) -> AbstractContextManager[None]:
        """The routers' biases of the reference, until the end of the block."""
        from rlite.megatron.balance import with_router_biases

        return with_router_biases(self.chunks, self._reference_biases)

    @property
    def runner(self) -> Any:
        """Scores and updates rows with these chunks."""
        if self._runner is None:
            self._runner = self._build_runner()
        return self._runner

    def _build_runner(self) -> Any:
        from rlite.megatron.runner import PolicyRunner

        return PolicyRunner(list(self.chunks), self.layout, options=self.options, optimizer=self.optimizer)


def read_hf_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face directory. Raises FileNotFoundError that says what was looked for."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"model.policy = {directory}: no config.json there. Give a Hugging Face directory (config.json, tokenizer, "
            "with or without *.safetensors)"
        )
    return json.loads(path.read_text())


def has_weights(directory: Path) -> bool:
    """Whether a Hugging Face directory holds safetensors."""
    return any(directory.glob("*.safetensors"))
