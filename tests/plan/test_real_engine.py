"""The plan of an engine against what vLLM allocates: weights, KV cache and its tokens."""

from pathlib import Path

import pytest

from rlite.plan.generation import engine_weight_bytes, kv_cache
from rlite.rollout.config import VLLMConfig
from tests.helpers.world import run_world
from tests.plan.jobs import MIB, job
from tests.plan.test_real_tensors import MODELS, read_config
from tests.rollout.helpers import build_engine

pytestmark = [pytest.mark.usefixtures("original_functions"), pytest.mark.slow]

ENGINE = VLLMConfig(tp=2, dtype="float32", max_model_len=256, kv_cache_memory_bytes=16 * MIB, max_num_seqs=32)


def _held(model_dir: Path, log_dir: Path) -> tuple[int, int, int]:
    engine = build_engine(model_dir, log_dir, tp=2, kv_cache_memory_bytes=ENGINE.kv_cache_memory_bytes)
    return engine.weight_bytes, engine.kv_cache_bytes, engine.kv_tokens


@pytest.mark.parametrize("model", ["tiny_dsv3", "tiny_qwen3_moe"])
def test_engine_is_within_5_percent(model: str, tmp_path: Path) -> None:
    plan = job(read_config(model), engine=ENGINE)
    cache = kv_cache(plan)
    for weights, cache_bytes, tokens in run_world(2, _held, MODELS / model, tmp_path):
        assert engine_weight_bytes(plan, 0) == pytest.approx(weights, rel=0.05)
        assert cache.nbytes == pytest.approx(cache_bytes, rel=0.05)
        assert cache.tokens == pytest.approx(tokens, rel=0.05)
