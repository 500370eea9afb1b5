"""Weights written in place into a live engine: it then computes what transformers computes from the same checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite.layout.parallel import EngineLayout
from rlite.types import Completion
from tests.helpers.world import run_world
from tests.rollout.helpers import build_engine, max_logprob_error, requests, tokens, write_checkpoint

pytestmark = pytest.mark.usefixtures("original_functions")

CASES = [
    ("llama", 1, False),
    ("llama_tied", 2, False),
    ("qwen2_tied", 1, False),
    ("qwen3_moe", 1, False),
    ("qwen3_moe", 2, False),
    ("qwen3_moe", 2, True),
    ("deepseek_v3", 1, False),
    ("deepseek_v3", 2, False),
    ("deepseek_v3", 2, True),
]


def _update_cycle(dir_a: Path, dir_b: Path, log_dir: Path, tp: int, expert_parallel: bool) -> dict[str, Any]:
    layout, config = (
        EngineLayout(tp=tp, expert_parallel=expert_parallel),
        {"tp": tp, "expert_parallel": expert_parallel},
    )
    engine = build_engine(dir_a, log_dir, **config)
    result: dict[str, Any] = {}
    write_checkpoint(engine, dir_a, layout, version=1)
    result["a"] = engine.generate(requests())
    write_checkpoint(engine, dir_b, layout, version=2)  # in place, awake, prefixes of A cached
    result["b"] = engine.generate(requests())
    result["b_greedy"] = engine.generate(requests(temperature=0.0))
    engine.sleep()
    engine.wake_weights()
    write_checkpoint(engine, dir_a, layout, version=3)
    engine.wake_kv_cache()
    result["a_again"] = engine.generate(requests())
    engine.shutdown()
    fresh = build_engine(dir_b, log_dir, **config)
    write_checkpoint(fresh, dir_b, layout, version=4)
    result["fresh_b_greedy"] = fresh.generate(requests(temperature=0.0))
    fresh.shutdown()
    torch.distributed.barrier()  # the trainer's group outlives the engines
    return result


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}{'-ep' if case[2] else ''}")
def case(
    request: pytest.FixtureRequest, model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, list[Completion]]], dict[str, torch.nn.Module]]:
    """(results by rank, transformers models by name)"""
    name, tp, expert_parallel = request.param
    dirs = {"a": model_dir(name, 0), "b": model_dir(name, 1)}
    results = run_world(tp, _update_cycle, dirs["a"], dirs["b"], tmp_path_factory.mktemp("log"), tp, expert_parallel)
    models = {k: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for k, path in dirs.items()}
    return results, models


def test_logprobs_equal_transformers_after_every_update(case: Any) -> None:
    results, models = case
    for key, model in (("a", "a"), ("b", "b"), ("b_greedy", "b"), ("a_again", "a")):
        asked = requests(temperature=0.0) if "greedy" in key else requests()
        assert max_logprob_error(models[model], asked, results[0][key]) < 1e-4, key
    # The check can fail: the other checkpoint explains nothing.
    assert max_logprob_error(models["b"], requests(), results[0]["a"]) > 0.5


def test_going_back_to_the_first_weights_gives_the_first_completions(case: Any) -> None:
    results, _ = case
    assert tokens(results[0]["a"]) == tokens(results[0]["a_again"])
    assert tokens(results[0]["a"]) != tokens(results[0]["b"])
    assert [c.policy_version for c in results[0]["a_again"]] == [3] * len(results[0]["a_again"])


def test_greedy_after_an_update_equals_a_freshly_built_engine(case: Any) -> None:
    results, _ = case
    assert tokens(results[0]["b_greedy"]) == tokens(results[0]["fresh_b_greedy"])


def test_all_ranks_of_an_engine_return_the_same(case: Any) -> None:
    results, _ = case
    assert all(result == results[0] for result in results)


def _generate(model_dir: Path, log_dir: Path, dtype: str) -> tuple[list[Completion], dict[str, torch.dtype]]:
    engine = build_engine(model_dir, log_dir, dtype=dtype)
    dtypes = {name: tensor.dtype for name, tensor in engine.weights().items()}
    write_checkpoint(engine, model_dir, EngineLayout(), version=0)
    return engine.generate(requests()), dtypes


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_bf16_engine_is_close_to_fp32_and_keeps_its_router_bias(
    name: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """bf16 rounds to 3 digits and may flip an expert choice; wrong weights give errors above 2."""
    ((completions, dtypes),) = run_world(1, _generate, model_dir(name), tmp_path, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(model_dir(name), dtype=torch.float32).eval()
    errors = [max_logprob_error(model, [r], [c]) for r, c in zip(requests(), completions, strict=True)]
    assert sorted(errors)[1] < 0.2, errors
    biases = {name for name in dtypes if name.endswith("e_score_correction_bias")}
    assert all(dtypes[bias] == torch.float32 for bias in biases) and bool(biases) == (name == "deepseek_v3")
    assert all(dtype == torch.bfloat16 for name, dtype in dtypes.items() if name not in biases)
