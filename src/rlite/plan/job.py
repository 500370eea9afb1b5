"""`PlanJob`: everything in a run's configuration that decides memory, traffic and time, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlite.config import BatchConfig
from rlite.layout.architecture import Architecture
from rlite.layout.megatron import pipeline_places
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.memory.budget import DeviceBudget
from rlite.memory.phases import OffloadPolicy
from rlite.reshard.plan import DEFAULT_STAGING_BUDGET_BYTES
from rlite.rollout.config import TransformersConfig, VLLMConfig

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices a plan is made for."""

    world_size: int
    """Devices in all."""
    node_size: int = 8
    """Devices in one node."""
    memory_bytes: int = 64 * GIB
    """Of one device."""
    reserved_fraction: float = 0.05
    """Part of a device's memory that no tensor gets: runtime, communication buffers, fragmentation."""
    link_gb_per_s: float = 40.0
    """Between nodes, for one device."""
    node_link_gb_per_s: float = 150.0
    """Inside a node, for one device."""
    host_gb_per_s: float = 25.0
    """Between a device and host memory."""

    def __post_init__(self) -> None:
        for name in ("world_size", "node_size", "link_gb_per_s", "node_link_gb_per_s", "host_gb_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"cluster.{name} = {getattr(self, name)}: must be positive")

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (1.0 - self.reserved_fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Assumptions about speed, the same for colocated and for separated devices."""

    peak_tflops: float = 350.0
    """bf16 peak of one device."""
    train_mfu: float = 0.30
    """Part of the peak that training and scoring reach outside pipeline bubbles."""
    prefill_mfu: float = 0.40
    """The same for prompts, and for decoding where it is bound by arithmetic."""
    memory_gb_per_s: float = 1600.0
    """Device memory bandwidth."""
    decode_bandwidth: float = 0.50
    """Part of that bandwidth that decoding reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """One run. Raises ValueError when a layout does not cover the world or the model."""

    cluster: Cluster
    hf_config: Mapping[str, Any]
    """The policy's `config.json`."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    megatron: MegatronOptions = field(default_factory=MegatronOptions)
    train_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: VLLMConfig | TransformersConfig = field(default_factory=VLLMConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    prompts_per_step: int = 1
    """Prompts of a rollout step, over all ranks (`data.batch_size`)."""
    max_prompt_tokens: int = 1024
    max_completion_tokens: int = 256
    needs_reference: bool = False
    scores_policy: bool = True
    """Whether the trainer scores the completions before the first update, every step."""
    has_critic: bool = False
    """PPO: a second model of the policy's layout, with an optimizer of its own."""
    offload: OffloadPolicy = field(default_factory=lambda: OffloadPolicy(name="full"))
    """Of `MemoryOffload`; `none` without that callback."""
    budget: DeviceBudget | None = None
    """Of `MemoryOffload`: what residents of a rank may hold together, and the reserve; None without that callback."""
    on_cpu: bool = False
    """There the KV cache takes what the budget leaves; elsewhere it keeps the size of the config."""
    staging_budget_bytes: int = DEFAULT_STAGING_BUDGET_BYTES
    throughput: Throughput = field(default_factory=Throughput)

    def __post_init__(self) -> None:
        self.layout.validate(self.cluster.world_size)
        self.engine_layout.validate(self.cluster.world_size)
        pipeline_places(self.architecture.num_layers, self.layout)
        if self.offload.rebuild_weights and self.train_dtype == "float32":
            raise ValueError(
                "MemoryOffload.rebuild_weights = true: weights in fp32 have no main weights apart from themselves; set "
                "trainer.precision to bf16-mixed, or rebuild_weights to false"
            )

    def with_kv_cache(self, nbytes: int) -> "PlanJob":
        """The same run with a KV cache of this size on each rank."""
        return replace(self, engine=replace(self.engine, kv_cache_memory_bytes=max(nbytes, 1)))

    @property
    def limit_bytes(self) -> int | None:
        """What residents of a rank may hold together (`MemoryOffload.device_budget_gib`)."""
        return None if self.budget is None else self.budget.limit_bytes

    @property
    def architecture(self) -> Architecture:
        return Architecture.from_config(self.hf_config)

    @property
    def engine_layout(self) -> EngineLayout:
        return self.engine.layout

    @property
    def dp(self) -> int:
        return self.layout.dp(self.cluster.world_size)

    @property
    def row_tokens(self) -> int:
        """Longest training row."""
        return min(self.max_prompt_tokens + self.max_completion_tokens, self.engine.max_model_len)

    @property
    def rows_per_update(self) -> int:
        """Rows that one data-parallel rank sees in one optimizer step."""
        rows = self.prompts_per_step * self.batch.group_size
        return max(1, rows // (self.dp * self.batch.minibatches))

    @property
    def microbatch_tokens(self) -> int:
        """Most tokens of one micro-batch: rows of any length are packed up to the budget; a longer row travels alone."""
        budget = max(self.megatron.max_tokens_per_microbatch, self.row_tokens)
        return min(budget, self.rows_per_update * self.row_tokens)

    @property
    def num_microbatches(self) -> int:
        """Of one optimizer step, with rows of the longest length."""
        rows_together = max(1, self.megatron.max_tokens_per_microbatch // self.row_tokens)
        return -(-self.rows_per_update // rows_together)
