"""Small jobs and configurations for the plan tests."""

from typing import Any

from rlite.layout.parallel import ParallelLayout
from rlite.plan import Cluster, PlanJob
from rlite.rollout.config import VLLMConfig
from tests.layout.published import DEEPSEEK_V3, QWEN3_30B_A3B

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DSV3 = {**DEEPSEEK_V3, "num_experts_per_tok": 8}
QWEN3 = {**QWEN3_30B_A3B, "num_experts_per_tok": 8}
MIB = 2**20


def job(hf_config: dict[str, Any] = LLAMA, *, world_size: int = 2, memory_bytes: int = 2**30, **fields: Any) -> PlanJob:
    """A job with an engine of two ranks, in fp32."""
    fields.setdefault("engine", VLLMConfig(tp=2, dtype="float32", max_model_len=64, kv_cache_memory_bytes=MIB))
    fields.setdefault("train_dtype", "float32")
    cluster = Cluster(world_size=world_size, node_size=fields.pop("node_size", 8), memory_bytes=memory_bytes)
    return PlanJob(cluster=cluster, hf_config=hf_config, **fields)


def flagship(**fields: Any) -> PlanJob:
    """DeepSeek-V3 on 256 devices of 64 GiB."""
    fields.setdefault("layout", ParallelLayout(pp=16, ep=16, last_stage_layers=1))
    fields.setdefault("engine", VLLMConfig(tp=32, max_model_len=4096, kv_cache_memory_bytes=8 * 2**30))
    return job(DSV3, world_size=256, memory_bytes=64 * 2**30, train_dtype="bfloat16", **fields)
