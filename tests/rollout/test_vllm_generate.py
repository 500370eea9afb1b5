"""What `VLLMEngine.generate` promises, on one tiny Llama and one process unless it is about ranks."""

import dataclasses
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlite.layout.parallel import EngineLayout
from rlite.rollout.engine import EngineStateError, RequestMismatchError, RolloutEngine, StaleWeightsError
from tests.helpers.models import EOS_TOKEN_ID
from tests.helpers.world import run_world
from tests.rollout.helpers import build_engine, max_logprob_error, requests, tokens, write_checkpoint

pytestmark = pytest.mark.usefixtures("original_functions")

MANY = tuple((2, 10 + i, 20 + i) for i in range(24))


def _ready_engine(model_dir: Path, log_dir: Path, **config: Any) -> RolloutEngine:
    engine = build_engine(model_dir, log_dir, **config)
    write_checkpoint(engine, model_dir, EngineLayout(tp=config.get("tp", 1)), version=7)
    return engine


def _error(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _many_questions(model_dir: Path, log_dir: Path) -> dict[str, Any]:
    """All single-process behaviours on one engine; every entry is judged by a test below."""
    engine, seen = _ready_engine(model_dir, log_dir), []
    is_engine = isinstance(engine, RolloutEngine)
    asked = requests(prompts=MANY)
    result: dict[str, Any] = {"protocol": is_engine, "asked": asked}
    result["together"] = engine.generate(asked, on_progress=lambda done, total: seen.append((done, total)))
    result["progress"] = seen
    result["reversed"] = engine.generate(asked[::-1])[::-1]
    result["alone"] = [engine.generate([request])[0] for request in asked[:4]]
    result["nothing"] = engine.generate([])
    result["cool"] = engine.generate(requests(prompts=MANY, temperature=0.7))
    result["narrow"] = engine.generate(requests(prompts=MANY, top_k=3))
    result["long"] = engine.generate(requests(prompts=(MANY[0],), max_tokens=60))
    stop = result["long"][0].token_ids[5]
    result["stopped"] = engine.generate(requests(prompts=(MANY[0],), max_tokens=60, stop_token_ids=(stop,)))
    result["ends"] = engine.generate(requests(prompts=MANY, max_tokens=200))
    result["filled"] = engine.generate(requests(prompts=((2,) * 250,), max_tokens=100))
    result["empty_prompt"] = _error(lambda: engine.generate(requests(prompts=(MANY[0], ()))))
    result["long_prompt"] = _error(lambda: engine.generate(requests(prompts=((2,) * 256,))))
    result["no_tokens"] = _error(lambda: engine.generate(requests(max_tokens=0)))
    result["after_errors"] = engine.generate(asked)
    engine.weights()
    result["stale"] = _error(lambda: engine.generate(asked))
    engine.sleep()
    result["asleep"] = _error(lambda: engine.generate(asked))
    engine.shutdown()
    engine.shutdown()
    result["shut_down"] = _error(engine.sleep)
    return result


@pytest.fixture(scope="module")
def answers(model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(1, _many_questions, model_dir("llama"), tmp_path_factory.mktemp("log"))[0]


@pytest.fixture(scope="module")
def reference(model_dir: Callable[..., Path]) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32).eval()


def test_the_engine_implements_the_protocol(answers: dict[str, Any]) -> None:
    assert answers["protocol"]


def test_completions_come_in_order_with_version_and_one_logprob_a_token(answers: dict[str, Any]) -> None:
    assert len(answers["together"]) == len(MANY)
    for completion in answers["together"]:
        assert len(completion.logprobs) == len(completion.token_ids) > 0
        assert all(logprob <= 0 for logprob in completion.logprobs)
        assert completion.policy_version == 7
        assert completion.text == ""


def test_sampling_depends_on_the_seed_only_not_on_order_or_batch(answers: dict[str, Any]) -> None:
    assert tokens(answers["together"]) == tokens(answers["reversed"])
    assert tokens(answers["together"][:4]) == tokens(answers["alone"])
    assert tokens(answers["together"]) == tokens(answers["after_errors"])


def test_progress_counts_up_to_the_number_of_requests(answers: dict[str, Any]) -> None:
    assert answers["progress"] == [(i + 1, len(MANY)) for i in range(len(MANY))]


def test_no_requests_give_no_completions(answers: dict[str, Any]) -> None:
    assert answers["nothing"] == []


def test_logprobs_are_after_temperature(answers: dict[str, Any], reference: torch.nn.Module) -> None:
    asked = requests(prompts=MANY, temperature=0.7)
    assert max_logprob_error(reference, asked, answers["cool"]) < 1e-4
    untempered = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.0)) for r in asked]
    assert max_logprob_error(reference, untempered, answers["cool"]) > 0.1


def test_logprobs_are_of_the_truncated_distribution(answers: dict[str, Any], reference: torch.nn.Module) -> None:
    """With top_k = 3 the three candidates share all probability; checked by hand for the first token of each prompt."""
    for prompt, completion in zip(MANY, answers["narrow"], strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0, -1]
        top, ids = logits.topk(3)
        expected = dict(zip(ids.tolist(), top.log_softmax(-1).tolist(), strict=True))
        assert math.isclose(completion.logprobs[0], expected[completion.token_ids[0]], abs_tol=1e-4)


def test_stop_token_is_included_and_ends_the_completion(answers: dict[str, Any]) -> None:
    long, stopped = answers["long"][0], answers["stopped"][0]
    end = long.token_ids.index(long.token_ids[5]) + 1
    assert stopped.token_ids == long.token_ids[:end]
    assert len(stopped.logprobs) == end
    assert stopped.finish_reason == "stop"


def test_the_models_end_of_sequence_token_stops(answers: dict[str, Any]) -> None:
    ended = [c for c in answers["ends"] if c.finish_reason == "stop"]
    assert ended, "no completion of 200 tokens over a vocabulary of 128 sampled the end of sequence"
    for completion in answers["ends"]:
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS_TOKEN_ID)
        assert EOS_TOKEN_ID not in completion.token_ids[:-1]


def test_the_longest_sequence_ends_with_reason_length(answers: dict[str, Any]) -> None:
    (completion,) = answers["filled"]
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")


def test_requests_the_engine_cannot_serve_are_named_and_leave_it_usable(answers: dict[str, Any]) -> None:
    assert answers["empty_prompt"][0] == "ValueError" and "request 1 has 0 tokens" in answers["empty_prompt"][1]
    assert answers["long_prompt"][0] == "ValueError" and "max_model_len = 256" in answers["long_prompt"][1]
    assert answers["no_tokens"][0] == "ValueError" and "max_tokens = 0" in answers["no_tokens"][1]
    assert answers["after_errors"] is not None


def test_generating_stale_asleep_or_shut_down_raises(answers: dict[str, Any]) -> None:
    assert answers["stale"][0] == StaleWeightsError.__name__
    assert answers["asleep"][0] == EngineStateError.__name__
    assert answers["shut_down"][0] == EngineStateError.__name__ and "shut down" in answers["shut_down"][1]


def _process_state() -> dict[str, Any]:
    return {
        "env": dict(os.environ),
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "threads": torch.get_num_threads(),
        "functions": (torch.set_num_threads, torch.accelerator.synchronize, torch.accelerator.empty_cache),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }


def _trainer_state_around_the_engine(model_dir: Path, log_dir: Path) -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    if dist.get_rank() == 0:
        del os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]  # as in the main process of Lightning's own launcher
    before = _process_state()
    engine = _ready_engine(model_dir, log_dir, tp=2)
    assert _process_state() == before
    engine.generate(requests())
    assert _process_state() == before
    engine.sleep()
    engine.wake_weights()
    engine.wake_kv_cache()
    assert _process_state() == before
    engine.shutdown()
    assert _process_state() == before
    assert dist.get_world_size() == 2  # vLLM's own shutdown would have destroyed the trainer's group


def test_rng_environment_and_threads_of_the_trainer_are_untouched(model_dir: Callable, tmp_path: Path) -> None:
    run_world(2, _trainer_state_around_the_engine, model_dir("llama_tied"), tmp_path)


def test_vllm_talks_to_the_log_file_only(
    model_dir: Callable, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_world(2, _own_requests, model_dir("llama"), tmp_path)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert "Initializing a V1 LLM engine" in (tmp_path / "log0.txt").read_text()


def _differing_requests(model_dir: Path, log_dir: Path) -> dict[str, Any]:
    engine, mine = _ready_engine(model_dir, log_dir, tp=2), requests()
    other = [*mine[:-1], dataclasses.replace(mine[-1], seed=1)] if dist.get_rank() == 1 else mine
    fewer = mine[:-1] if dist.get_rank() == 1 else mine
    return {
        "seed": _error(lambda: engine.generate(other)),
        "count": _error(lambda: engine.generate(fewer)),
        "after": tokens(engine.generate(mine)),
    }


def test_ranks_of_one_engine_must_ask_the_same(model_dir: Callable, tmp_path: Path) -> None:
    results = run_world(2, _differing_requests, model_dir("llama_tied"), tmp_path)
    for result in results:  # on every rank, so that none waits for the others
        assert result["seed"][0] == result["count"][0] == RequestMismatchError.__name__
        assert "ranks [1]" in result["seed"][1]
        assert "{0: 4, 1: 3}" in result["count"][1]
    assert results[0]["after"] == results[1]["after"]


def _own_requests(model_dir: Path, log_dir: Path) -> list[tuple[int, ...]]:
    engine = _ready_engine(model_dir, log_dir)
    return tokens(engine.generate(requests()[:1] if dist.get_rank() == 0 else requests()))


def test_replicas_generate_independently(model_dir: Callable, tmp_path: Path) -> None:
    first, second = run_world(2, _own_requests, model_dir("llama"), tmp_path)
    assert len(first) == 1 and len(second) == 4
    assert first[0] == second[0]


def _one_rank_breaks(model_dir: Path, log_dir: Path) -> tuple[str, str]:
    engine = _ready_engine(model_dir, log_dir)

    def boom(done: int, total: int) -> None:
        raise KeyError("boom")

    assert _error(lambda: engine.generate(requests(), on_progress=boom))[0] == "KeyError"
    return _error(lambda: engine.generate(requests()))


def test_an_exception_while_generating_ends_the_engine(model_dir: Callable, tmp_path: Path) -> None:
    (error,) = run_world(1, _one_rank_breaks, model_dir("llama"), tmp_path)
    assert error[0] == EngineStateError.__name__ and "boom" in error[1]
