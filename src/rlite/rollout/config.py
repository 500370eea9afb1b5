"""Settings of the generation engines. Imports no engine, so that a config can be read without one."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlite.layout.parallel import EngineLayout

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig:
    """The vLLM engine."""

    tp: int = 1
    """Tensor parallel size of one engine; the world holds world_size / tp replicas."""
    expert_parallel: bool = False
    """Experts whole on their rank of the engine, instead of sliced by tensor parallelism."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights, activations and KV cache."""
    max_model_len: int = 1024
    """Most tokens of prompt and completion together."""
    kv_cache_memory_bytes: int = GIB
    """KV cache of one rank, until `wake_kv_cache` is given another budget."""
    max_num_seqs: int = 256
    """Most sequences that are decoded at once."""
    enable_prefix_caching: bool = True
    """Compute a prompt once for its whole group."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`, for what rlite does not decide itself."""

    def __post_init__(self) -> None:
        _check_positive(self, "tp", "max_model_len", "kv_cache_memory_bytes", "max_num_seqs")

    @property
    def layout(self) -> EngineLayout:
        return EngineLayout(tp=self.tp, expert_parallel=self.expert_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """The Hugging Face `generate` engine: no vLLM needed, slower, the whole model on every rank."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights, activations and KV cache."""
    max_model_len: int = 1024
    """Most tokens of prompt and completion together."""
    kv_cache_memory_bytes: int = GIB
    """What the KV cache may take, until `wake_kv_cache` is given another budget; limits the batch."""
    max_num_seqs: int = 64
    """Most sequences that are decoded at once."""

    def __post_init__(self) -> None:
        _check_positive(self, "max_model_len", "kv_cache_memory_bytes", "max_num_seqs")

    @property
    def layout(self) -> EngineLayout:
        return EngineLayout(tp=1)


def _check_positive(config: VLLMConfig | TransformersConfig, *keys: str) -> None:
    for key in keys:
        if getattr(config, key) < 1:
            raise ValueError(f"engine.{key} = {getattr(config, key)}: must be at least 1")
