"""Rollout callbacks: own an engine, fill every batch with completions, in training, validation, test and prediction."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rlite.callbacks.conversion import EP2TPConversion
from rlite.callbacks.dynamic_sampling import GroupPool
from rlite.callbacks.engine_check import EngineCheck
from rlite.callbacks.engine_memory import EngineMemory
from rlite.device import DeviceKind
from rlite.layout.architecture import Architecture
from rlite.layout.catalogue import catalogue
from rlite.layout.hf import hf_boxes
from rlite.layout.parallel import EngineLayout
from rlite.layout.placement import ExplicitPlacement, Placement
from rlite.layout.vllm import VLLMPlacement
from rlite.memory import Phase
from rlite.memory.phases import ENGINE, KV_CACHE
from rlite.rollout.config import TransformersConfig, VLLMConfig
from rlite.rollout.engine import GenerationRequest, RolloutEngine
from rlite.rollout.sampling import sampling_seed
from rlite.strategies.colocated import ColocatedRLStrategy, colocated
from rlite.types import Completion, Prompt, Rollout, RolloutBatch, SamplingConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What to sample for some prompts."""

    step: int
    sampling: SamplingConfig
    group_size: int
    first_sample: int = 0
    """Number of the group's first completion; with the prompt and the step it determines the seeds."""


class RolloutCallback(Callback):
    """Fills `RolloutBatch.rollouts`. Subclasses build the engine.

    Args:
        sampling: of training completions.
        validation_sampling: of validation, test and prediction; by default greedy with the same length.
        logprob_tolerance: the run stops when, after the first weight sync, engine and trainer disagree by more than this
            on the log-probability of any token of a fixed prompt.
        max_sampling_rounds: more than 1 is dynamic sampling (DAPO): groups whose task rewards are all equal are replaced
            by groups of the next `batch_size` prompts of the data, up to so many rounds in all. What is still missing
            then is filled with what there is. Prompts drawn for a round count as consumed, also for a resumed run.
    """

    engine_config: VLLMConfig | TransformersConfig

    def __init__(
        self,
        *,
        sampling: SamplingConfig | None = None,
        validation_sampling: SamplingConfig | None = None,
        logprob_tolerance: float = 0.05,
        max_sampling_rounds: int = 1,
    ) -> None:
        if max_sampling_rounds < 1:
            raise ValueError(f"max_sampling_rounds = {max_sampling_rounds} of the rollout callback: must be at least 1")
        self.max_sampling_rounds = max_sampling_rounds
        self.sampling = sampling or SamplingConfig()
        if self.sampling.temperature <= 0:
            raise ValueError(
                f"sampling.temperature = {self.sampling.temperature}: training needs samples, so it must be > 0 "
                "(greedy decoding is for validation_sampling)"
            )
        self.validation_sampling = validation_sampling or dataclasses.replace(self.sampling, temperature=0.0)
        self.logprob_tolerance = logprob_tolerance
        self._checked = False
        self._pool_metrics: dict[str, float] = {}

    # -- the engine --------------------------------------------------------------------------------------------------

    def build_engine(
        self, policy_dir: str, strategy: ColocatedRLStrategy, log_file: Path, *, record_experts: bool
    ) -> RolloutEngine:
        raise TypeError(f"{type(self).__name__} must implement build_engine")

    engine_config: VLLMConfig | TransformersConfig
    """Set by the subclass."""

    @property
    def engine_layout(self) -> EngineLayout:
        return self.engine_config.layout

    def placement(self, architecture: Architecture, world_size: int) -> Placement:
        """Where the engine's ranks keep which weights."""
        raise TypeError(f"{type(self).__name__} must implement placement")

    def _engine(self, trainer: Trainer, module: LightningModule) -> RolloutEngine:
        strategy = colocated(trainer)
        if strategy.engine is None:
            self.engine_layout.validate(strategy.world_size)
            log_dir = Path(strategy.broadcast(str(trainer.log_dir or trainer.default_root_dir)))
            log_dir.mkdir(parents=True, exist_ok=True)
            log_file = log_dir / f"engine_rank{strategy.global_rank}.log"
            record_experts = _replays_engine(module)
            strategy.enter(Phase.VACANT)
            engine = self.build_engine(module.policy_dir, strategy, log_file, record_experts=record_experts)
            strategy.engine = engine
            kind = DeviceKind(strategy.root_device.type)
            EngineMemory(engine, strategy.phases, kind=kind, max_model_len=self.engine_config.max_model_len)
            strategy.engine_placement = lambda architecture: self.placement(architecture, strategy.world_size)
        return strategy.engine

    # -- Lightning hooks ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.engine_layout.validate(colocated(trainer).world_size)
        if not any(isinstance(callback, EP2TPConversion) for callback in trainer.callbacks):
            raise ValueError(
                f"{type(self).__name__} needs its weights from somewhere: add rlite.callbacks.EP2TPConversion to "
                "trainer.callbacks"
            )
        if stage == "fit" and self.max_sampling_rounds > 1 and pl_module.batch.group_size < 2:
            raise ValueError(
                f"max_sampling_rounds = {self.max_sampling_rounds} of the rollout callback needs model.batch.group_size of "
                "at least 2: a group of one always has equal rewards"
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        job = _Job(step=batch_idx, sampling=self.sampling, group_size=pl_module.batch.group_size)
        self._fill(trainer, pl_module, batch, job, max_rounds=self.max_sampling_rounds)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        for name, value in self._pool_metrics.items():
            pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RolloutBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._fill(trainer, pl_module, batch, self._evaluation(batch_idx))

    @override
    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *args: Any) -> None:
        self._fill(trainer, pl_module, batch, self._evaluation(args[0]))

    @override
    def on_predict_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *args: Any) -> None:
        self._fill(trainer, pl_module, batch, self._evaluation(args[0]))

    def _evaluation(self, batch_idx: int) -> _Job:
        return _Job(step=batch_idx, sampling=self.validation_sampling, group_size=1)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = colocated(trainer)
        if strategy.engine is not None:
            strategy.engine.shutdown()
            strategy.engine = None
            for name in (ENGINE, KV_CACHE):
                strategy.phases.residents.pop(name, None)

    # -- generation --------------------------------------------------------------------------------------------------

    def _fill(
        self, trainer: Trainer, module: LightningModule, batch: RolloutBatch, job: _Job, *, max_rounds: int = 1
    ) -> None:
        strategy, engine = colocated(trainer), self._engine(trainer, module)
        strategy.enter(Phase.GENERATE)
        check = None
        if not self._checked:
            check = EngineCheck.sample(
                strategy, engine, self.engine_layout, temperature=job.sampling.temperature or 1.0
            )
        self._sample(trainer, engine, batch, job)
        if max_rounds > 1:
            self._replace_uniform_groups(trainer, module, engine, batch, job)
        if check is not None:
            check.compare(strategy, tolerance=self.logprob_tolerance)
            self._checked = True

    def _sample(self, trainer: Trainer, engine: RolloutEngine, batch: RolloutBatch, job: _Job) -> None:
        strategy = colocated(trainer)
        with strategy.stopwatch.timed("generate"):
            completions = self._generate(strategy, engine, batch.prompts, job)
        decode = trainer.datamodule.tokenizer.decode  # type: ignore[attr-defined]
        batch.rollouts = [
            Rollout(
                prompt=prompt,
                completion=dataclasses.replace(c, text=decode(list(c.token_ids), skip_special_tokens=True)),
                sample_index=index,
            )
            for prompt, group in zip(batch.prompts, completions, strict=True)
            for index, c in enumerate(group)
        ]
        batch.sampling = job.sampling

    def _generate(
        self, strategy: ColocatedRLStrategy, engine: RolloutEngine, prompts: Sequence[Prompt], job: _Job
    ) -> list[list[Completion]]:
        """Completions of this rank's prompts. Prompts are dealt to the engine's replicas, whatever rank they came from."""
        by_dp_rank: list[Sequence[Prompt]] = strategy.gather_data_parallel(list(prompts))
        everyone = [(dp, i) for dp, owned in enumerate(by_dp_rank) for i in range(len(owned))]
        replicas = self.engine_layout.replicas(strategy.world_size)
        replica = strategy.global_rank // self.engine_layout.tp
        dealt = everyone[replica::replicas]
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        requests = [
            GenerationRequest(
                prompt_token_ids=by_dp_rank[dp][i].token_ids,
                seed=sampling_seed(seed, rollout_step=job.step, prompt_uid=by_dp_rank[dp][i].uid, sample_index=sample),
                sampling=job.sampling,
            )
            for dp, i in dealt
            for sample in range(job.first_sample, job.first_sample + job.group_size)
        ]
        flat = engine.generate(requests) if requests else []
        size = job.group_size
        done = {key: flat[k * size : (k + 1) * size] for k, key in enumerate(dealt)}
        if replicas > 1:
            leads = strategy.global_rank % self.engine_layout.tp == 0
            shares: list[Any] = [None] * strategy.world_size
            dist.all_gather_object(shares, done if leads else {})
            done = {key: group for share in shares for key, group in share.items()}
        return [done[strategy.dp_rank, i] for i in range(len(prompts))]

    def _replace_uniform_groups(
        self, trainer: Trainer, module: LightningModule, engine: RolloutEngine, batch: RolloutBatch, job: _Job
    ) -> None:
        """Samples further prompts until the batch holds only groups that teach something, or the rounds are used up."""
        strategy, size = colocated(trainer), job.group_size
        pool = GroupPool(sum(strategy.gather_data_parallel(len(batch.prompts))))
        sampled = batch
        while True:
            module.score(sampled)
            by_rank = strategy.gather_data_parallel(sampled.groups(size))
            pool.add(by_rank)
            if pool.is_full or pool.rounds == self.max_sampling_rounds:
                break
            sampled = RolloutBatch(prompts=trainer.datamodule.more_prompts())  # type: ignore[attr-defined]
            # A prompt that a small data set yields again is sampled anew, not with the seeds it had.
            self._sample(trainer, engine, sampled, dataclasses.replace(job, first_sample=pool.rounds * size))
        batch.hold(pool.share(strategy.dp_rank, num_ranks=len(by_rank)))
        self._pool_metrics = pool.metrics()


class VLLMRollout(RolloutCallback):
    """Generates with vLLM, in process, on the devices that train.

    Args:
        engine: tensor parallelism, KV cache and other settings of vLLM.
        sampling, validation_sampling, logprob_tolerance, max_sampling_rounds: see `RolloutCallback`.
    """

    def __init__(self, *, engine: VLLMConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.engine_config = engine or VLLMConfig()

    @override
    def placement(self, architecture: Architecture, world_size: int) -> Placement:
        return VLLMPlacement(architecture, self.engine_layout, world_size, dtype=self.engine_config.dtype)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if _replays_engine(pl_module) and self.engine_config.enable_prefix_caching:
            raise ValueError(
                "model.algorithm.router_replay = R3 needs engine.enable_prefix_caching = false of VLLMRollout: tokens of a "
                "cached prefix meet no router that could be recorded"
            )

    @override
    def build_engine(
        self, policy_dir: str, strategy: ColocatedRLStrategy, log_file: Path, *, record_experts: bool
    ) -> RolloutEngine:
        from rlite.rollout.vllm import VLLMEngine

        return VLLMEngine(
            self.engine_config,
            policy_dir,
            log_file=log_file,
            local_rank=strategy.local_rank,
            capture_routing=record_experts,
        )


class TransformersRollout(RolloutCallback):
    """Generates with Hugging Face `generate`, the whole model on every rank: for machines without vLLM.

    Args:
        engine: dtype, lengths and batch of the engine.
        sampling, validation_sampling, logprob_tolerance, max_sampling_rounds: see `RolloutCallback`.
    """

    def __init__(self, *, engine: TransformersConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.engine_config = engine or TransformersConfig()

    @override
    def placement(self, architecture: Architecture, world_size: int) -> Placement:
        tensors = catalogue(architecture)
        whole = hf_boxes(tensors.values(), dtype=self.engine_config.dtype)
        return ExplicitPlacement([whole] * world_size, tensors)

    @override
    def build_engine(
        self, policy_dir: str, strategy: ColocatedRLStrategy, log_file: Path, *, record_experts: bool
    ) -> RolloutEngine:
        if record_experts:
            raise ValueError(
                "model.algorithm.router_replay = R3: TransformersRollout does not record experts; use VLLMRollout, or R2"
            )
        from rlite.rollout.transformers import TransformersEngine

        return TransformersEngine(self.engine_config, policy_dir, device=strategy.root_device)


def _replays_engine(module: LightningModule) -> bool:
    algorithm = getattr(module, "algorithm", None)  # modules without a reinforcement-learning objective have none
    return algorithm is not None and algorithm.router_replay == "R3"
