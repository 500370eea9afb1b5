"""Sleep frees real memory, and the KV cache is planned anew when it wakes."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlite.layout.parallel import EngineLayout
from rlite.rollout.engine import EngineStateError
from tests.helpers.world import run_world
from tests.rollout.helpers import MIB, build_engine, requests, tokens, write_checkpoint

pytestmark = pytest.mark.usefixtures("original_functions")

WIDE = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
"""About 37 MiB in fp32: enough to see in the resident set size."""


def _rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def _cycles(model_dir: Path, log_dir: Path) -> dict[str, Any]:
    layout = EngineLayout()
    engine = build_engine(model_dir, log_dir, kv_cache_memory_bytes=128 * MIB)
    write_checkpoint(engine, model_dir, layout, version=0)
    held = (engine.weight_bytes, engine.kv_cache_bytes, engine.kv_tokens)
    result: dict[str, Any] = {"held": held, "tokens": [tokens(engine.generate(requests()))], "awake": [], "asleep": []}
    result["bytes_asleep"], result["tensors_kept"] = [], []
    tensors = engine.weights()
    for version in range(4):
        result["awake"].append(_rss())
        engine.sleep()
        result["asleep"].append(_rss())
        result["bytes_asleep"].append((engine.weight_bytes, engine.kv_cache_bytes, engine.kv_tokens))
        engine.wake_weights()
        result["tensors_kept"].append(all(engine.weights()[name] is not None for name in tensors))
        write_checkpoint(engine, model_dir, layout, version=version)
        engine.wake_kv_cache()
        result["tokens"].append(tokens(engine.generate(requests())))
        result["requests_kept"] = len(engine._core.model_executor.driver_worker.worker.model_runner.requests)
        result["awake_bytes"] = (engine.weight_bytes, engine.kv_cache_bytes, engine.kv_tokens)
    result["same_storage"] = all(
        tensor.data_ptr() == engine.weights()[name].data_ptr() for name, tensor in tensors.items()
    )
    return result


def test_sleep_frees_memory_and_cycles_do_not_grow(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    (result,) = run_world(1, _cycles, model_dir("llama", **WIDE), tmp_path)
    weight_bytes, kv_bytes, kv_tokens = result["held"]
    assert weight_bytes > 36 * MIB and 127 * MIB < kv_bytes <= 128 * MIB
    # 2 layers x (key, value) x 2 heads x 128 dims x 4 bytes a token
    assert kv_tokens == kv_bytes // (2 * 2 * 2 * 128 * 4)
    assert result["bytes_asleep"] == [(0, 0, 0)] * 4
    assert result["awake_bytes"] == result["held"]
    for awake, asleep in zip(result["awake"][1:], result["asleep"][1:], strict=True):
        assert awake - asleep > 0.9 * (weight_bytes + kv_bytes)
    assert result["awake"][-1] - result["awake"][1] < 4 * MIB
    assert all(sampled == result["tokens"][0] for sampled in result["tokens"])
    assert result["requests_kept"] == len(requests()), "requests of earlier cycles are still held"
    assert result["same_storage"], "the tensors handed out before the first sleep must stay the live ones"


def _budgets(model_dir: Path, log_dir: Path) -> dict[str, Any]:
    layout = EngineLayout()
    engine = build_engine(model_dir, log_dir, kv_cache_memory_bytes=32 * MIB, enable_prefix_caching=False)
    result: dict[str, Any] = {"errors": []}
    asked = requests(prompts=[(2, 10 + i, 20 + i) for i in range(24)], max_tokens=200)
    for budget in (64 * MIB, MIB, None, 8 * MIB):
        engine.sleep()
        engine.wake_weights()
        write_checkpoint(engine, model_dir, layout, version=0)
        try:
            engine.wake_kv_cache(budget)
        except ValueError as error:
            result["errors"].append((budget, str(error), engine.kv_cache_awake, engine.kv_cache_bytes))
            try:
                engine.generate(asked)
            except EngineStateError as state_error:
                result["state_after_error"] = str(state_error)
        else:
            result[budget] = (engine.kv_cache_bytes, engine.kv_tokens, tokens(engine.generate(asked)))
    return result


def test_kv_cache_is_planned_for_the_budget_it_wakes_with(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    (result,) = run_world(1, _budgets, model_dir("llama", head_dim=256, num_key_value_heads=4), tmp_path)
    (error,) = result["errors"]  # 256 tokens of 2 layers x 2 x 4 heads x 256 dims x 4 bytes need 4 MiB
    assert error[0] == MIB and error[2:] == (False, 0)
    assert "max_model_len = 256" in error[1] and f"{MIB} bytes" in error[1]
    assert "KV cache is asleep" in result["state_after_error"]
    assert result[64 * MIB][:2] == (64 * MIB, 4096)
    assert result[None][:2] == result[64 * MIB][:2], "a refused budget must not be remembered"
    assert result[8 * MIB][:2] == (8 * MIB, 512)
    # 24 sequences of 200 tokens do not fit into 512: vLLM preempts and recomputes, and samples the same.
    assert result[8 * MIB][2] == result[64 * MIB][2]


def _different_budgets(model_dir: Path, log_dir: Path) -> int:
    import torch.distributed as dist

    engine = build_engine(model_dir, log_dir, tp=2)
    engine.sleep()
    engine.wake_weights()
    engine.wake_kv_cache((16 if dist.get_rank() else 32) * MIB)
    return engine.kv_cache_bytes


def test_the_smallest_budget_of_all_ranks_counts(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    sizes = run_world(2, _different_budgets, model_dir("llama_tied"), tmp_path)
    assert sizes[0] == sizes[1] <= 16 * MIB
