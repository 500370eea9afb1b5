"""`TransformersEngine` keeps the same promises as `VLLMEngine`, without vLLM."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from rlite.layout.architecture import Architecture
from rlite.layout.catalogue import catalogue
from rlite.rollout.config import TransformersConfig
from rlite.rollout.engine import EngineStateError, RolloutEngine, StaleWeightsError
from rlite.rollout.transformers import TransformersEngine
from tests.helpers.models import EOS_TOKEN_ID, MODEL_NAMES
from tests.rollout.helpers import MIB, max_logprob_error, requests, tokens

MANY = tuple((2, *(10 + i + j for j in range(1 + i % 5))) for i in range(16))


def _engine(model_dir: Path, **config: Any) -> TransformersEngine:
    defaults = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 * MIB}
    return TransformersEngine(TransformersConfig(**{**defaults, **config}), model_dir)


def _write(engine: TransformersEngine, model_dir: Path, *, version: int = 0) -> None:
    weights = engine.weights()
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        weights[name].copy_(tensor)
    engine.finish_weight_update(version)


def _reference(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_weights_have_the_checkpoints_names_and_shapes(name: str, model_dir: Callable[..., Path]) -> None:
    weights = _engine(model_dir(name)).weights()
    checkpoint = load_file(model_dir(name) / "model.safetensors")
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in checkpoint.items()}


def test_mixtral_keeps_its_own_names(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    config.save_pretrained(tmp_path)
    weights = _engine(tmp_path).weights()
    architecture = Architecture.from_config(json.loads((tmp_path / "config.json").read_text()))
    assert {k: tuple(v.shape) for k, v in weights.items()} == {k: t.shape for k, t in catalogue(architecture).items()}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_logprobs_equal_a_plain_forward_after_every_update(name: str, model_dir: Callable[..., Path]) -> None:
    dirs, engine, asked = [model_dir(name, 0), model_dir(name, 1)], _engine(model_dir(name)), requests()
    completions = []
    for version, which in enumerate((0, 1, 0)):
        _write(engine, dirs[which], version=version)
        completions.append(engine.generate(asked))
        assert max_logprob_error(_reference(dirs[which]), asked, completions[-1]) < 1e-4
    assert max_logprob_error(_reference(dirs[1]), asked, completions[0]) > 0.5
    assert tokens(completions[0]) == tokens(completions[2]) != tokens(completions[1])
    assert completions[2][0].policy_version == 2


def test_router_bias_is_kept_in_fp32(model_dir: Callable[..., Path]) -> None:
    weights = _engine(model_dir("deepseek_v3"), dtype="bfloat16").weights()
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    biases = [name for name in dtypes if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(dtypes.pop(name) == torch.float32 for name in biases)
    assert set(dtypes.values()) == {torch.bfloat16}


@pytest.fixture(scope="module")
def llama(model_dir: Callable[..., Path]) -> TransformersEngine:
    engine = _engine(model_dir("llama"))
    _write(engine, model_dir("llama"), version=7)
    return engine


def test_the_engine_implements_the_protocol(llama: TransformersEngine) -> None:
    assert isinstance(llama, RolloutEngine)


def test_sampling_depends_on_the_seed_only(llama: TransformersEngine) -> None:
    asked, before = requests(prompts=MANY), torch.get_rng_state()
    together = tokens(llama.generate(asked))
    assert tokens(llama.generate(asked[::-1]))[::-1] == together
    assert [tokens(llama.generate([request]))[0] for request in asked[:4]] == together[:4]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(together)) == len(MANY)


def test_small_batches_give_the_same_and_progress_is_reported(
    llama: TransformersEngine, model_dir: Callable[..., Path]
) -> None:
    small, seen = _engine(model_dir("llama"), max_num_seqs=5), []
    _write(small, model_dir("llama"))
    asked = requests(prompts=MANY)
    completions = small.generate(asked, on_progress=lambda done, total: seen.append((done, total)))
    assert tokens(completions) == tokens(llama.generate(asked))
    assert seen == [(5, 16), (10, 16), (15, 16), (16, 16)]


def test_greedy_equals_argmax_step_by_step(llama: TransformersEngine, model_dir: Callable[..., Path]) -> None:
    reference = _reference(model_dir("llama"))
    for request, completion in zip(
        requests(prompts=MANY, temperature=0.0), llama.generate(requests(prompts=MANY, temperature=0.0)), strict=True
    ):
        ids = list(request.prompt_token_ids)
        for token in completion.token_ids:
            with torch.no_grad():
                assert int(reference(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"top_k": 3}, 3), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1), ({"top_k": 3, "top_p": 1e-6}, 1)],
)
def test_truncation_renormalises_the_logprobs(
    llama: TransformersEngine, model_dir: Callable[..., Path], options: dict[str, Any], kept: int
) -> None:
    reference = _reference(model_dir("llama"))
    completions = llama.generate(requests(prompts=MANY, temperature=0.8, **options))
    for prompt, completion in zip(MANY, completions, strict=True):
        with torch.no_grad():
            top, ids = (reference(torch.tensor([prompt])).logits[0, -1] / 0.8).topk(kept)
        expected = dict(zip(ids.tolist(), top.log_softmax(-1).tolist(), strict=True))
        assert completion.logprobs[0] == pytest.approx(expected[completion.token_ids[0]], abs=1e-4)


def test_mixed_sampling_settings_in_one_call_keep_their_order(llama: TransformersEngine) -> None:
    hot, cold = requests(prompts=MANY), requests(prompts=MANY, temperature=0.0)
    mixed = [request for pair in zip(hot, cold, strict=True) for request in pair]
    completions = tokens(llama.generate(mixed))
    assert completions[::2] == tokens(llama.generate(hot))
    assert completions[1::2] == tokens(llama.generate(cold))


def test_stop_tokens_end_completions_and_are_included(llama: TransformersEngine) -> None:
    (long,) = llama.generate(requests(prompts=MANY[:1], max_tokens=60))
    stop = long.token_ids[5]
    (stopped,) = llama.generate(requests(prompts=MANY[:1], max_tokens=60, stop_token_ids=(stop,)))
    assert stopped.token_ids == long.token_ids[: long.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop" and len(stopped.logprobs) == len(stopped.token_ids)
    ends = llama.generate(requests(prompts=MANY, max_tokens=200))
    assert any(completion.finish_reason == "stop" for completion in ends)
    for completion in ends:
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS_TOKEN_ID)


def test_the_longest_sequence_ends_with_reason_length(llama: TransformersEngine) -> None:
    short, full = llama.generate(requests(prompts=((2, 3), (2,) * 250), max_tokens=20))
    assert len(short.token_ids) == 20 or short.finish_reason == "stop"
    assert len(full.token_ids) == 6 and full.finish_reason == "length"


def test_sleep_frees_memory_and_the_cycle_gives_the_same(model_dir: Callable[..., Path]) -> None:
    path = model_dir("llama", hidden_size=512, intermediate_size=2048, vocab_size=4096)
    engine = _engine(path)
    _write(engine, path)
    before, held, tensors = tokens(engine.generate(requests())), engine.weight_bytes, engine.weights()
    awake = psutil.Process().memory_info().rss
    engine.sleep()
    assert (engine.weight_bytes, engine.kv_cache_bytes, engine.kv_tokens) == (0, 0, 0)
    assert held > 36 * MIB and awake - psutil.Process().memory_info().rss > 0.9 * held
    engine.wake_weights()
    _write(engine, path, version=1)
    engine.wake_kv_cache(32 * MIB)
    # 2 layers x (key, value) x 2 heads x 128 dims x 4 bytes a token
    assert engine.kv_tokens == 32 * MIB // (2 * 2 * 2 * 128 * 4)
    assert tokens(engine.generate(requests())) == before
    assert all(tensor.data_ptr() == tensors[name].data_ptr() for name, tensor in engine.weights().items())


def test_states_are_checked(model_dir: Callable[..., Path]) -> None:
    engine = _engine(model_dir("llama"))
    with pytest.raises(StaleWeightsError):
        engine.generate(requests())
    engine.sleep()
    with pytest.raises(EngineStateError, match="already asleep"):
        engine.sleep()
    with pytest.raises(EngineStateError, match="asleep"):
        engine.weights()
    with pytest.raises(EngineStateError, match="wake_weights"):
        engine.wake_kv_cache()
    engine.wake_weights()
    with pytest.raises(ValueError, match="1024 bytes cannot serve max_model_len = 256"):
        engine.wake_kv_cache(1024)
    assert not engine.kv_cache_awake
    engine.wake_kv_cache()
    _write(engine, model_dir("llama"))
    with pytest.raises(ValueError, match="request 0 has 0 tokens"):
        engine.generate(requests(prompts=((),)))
    assert engine.generate([]) == []
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineStateError, match="shut down"):
        engine.generate(requests())
