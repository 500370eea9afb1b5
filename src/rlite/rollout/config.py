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
        for key in ("tp", "max_model_len", "kv_cache_memory_bytes", "max_num_seqs"):
            if getattr(self, key) < 1:
                raise ValueError(f"rollout.engine.{key} = {getattr(self, key)}: must be at least 1")

    @property
    def layout(self) -> EngineLayout:
        return EngineLayout(tp=self.tp, expert_parallel=self.expert_parallel)
