"""One test for each CPU fix: what goes wrong in stock vLLM, and that it does not with the fix."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from rlite.layout.parallel import EngineLayout
from rlite.rollout import vllm_compat
from rlite.rollout.config import VLLMConfig
from rlite.rollout.vllm_compat import CPU_FIXES, Fix, VLLMVersionError
from rlite.rollout.vllm_memory import mla_layers, named_weights
from tests.helpers.world import run_world
from tests.rollout.helpers import build_engine, max_logprob_error, requests, write_checkpoint

pytestmark = pytest.mark.usefixtures("original_functions")


def _without(originals: dict[str, Any], part: str) -> None:
    """Gives this (forked) process stock vLLM's behaviour back at the targets that contain `part`."""
    removed = [fix for fix in CPU_FIXES if part in fix.target]
    assert removed, part
    vllm_compat.CPU_FIXES = tuple(fix for fix in CPU_FIXES if fix not in removed)
    for fix in removed:
        owner, name = vllm_compat.resolve(fix)
        setattr(owner, name, originals[fix.target])


def _generate(model_dir: Path, log_dir: Path, prepare: Callable[[], None] | None, **config: Any) -> list[Any]:
    if prepare is not None:
        prepare()
    engine = build_engine(model_dir, log_dir, **config)
    write_checkpoint(engine, model_dir, EngineLayout(tp=config.get("tp", 1)), version=0)
    return engine.generate(requests())


def _error_without(prepare: Callable[[], None], model_dir: Path, log_dir: Path) -> float:
    (completions,) = run_world(1, _generate, model_dir, log_dir, prepare)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return max_logprob_error(model, requests(), completions)


# That all is right with the fixes is what test_vllm_weights.py shows; here is what each of them is for.


def _linear_shapes(originals: dict[str, Any], model_dir: Path, log_dir: Path) -> dict[str, tuple[int, ...]]:
    _without(originals, "dispatch_cpu_unquantized_gemm")
    return {name: tuple(t.shape) for name, t in build_engine(model_dir, log_dir).weights().items()}


def test_linear_weights_stock_vllm_empties_them(original_functions: dict, model_dir: Callable, tmp_path: Path) -> None:
    (shapes,) = run_world(1, _linear_shapes, original_functions, model_dir("llama"), tmp_path)
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (0,)


def test_tied_head_stock_vllm_leaves_it_stale(original_functions: dict, model_dir: Callable, tmp_path: Path) -> None:
    """Only the head keeps stock behaviour: its packed copy does not see the write into the embedding."""
    stock = original_functions["vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm"]

    def prepare() -> None:
        import vllm.model_executor.layers.utils as utils

        plain = utils.dispatch_cpu_unquantized_gemm
        _without(original_functions, "dispatch_cpu_unquantized_gemm")
        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: (plain if remove_weight else stock)(
            layer, remove_weight
        )

    assert _error_without(prepare, model_dir("qwen2_tied"), tmp_path) > 0.5


def test_expert_weights_stock_vllm_permutes_them(original_functions: dict, model_dir: Callable, tmp_path: Path) -> None:
    def prepare() -> None:
        _without(original_functions, "CPUUnquantizedExperts")

    assert _error_without(prepare, model_dir("qwen3_moe"), tmp_path) > 0.5


def test_expert_layers_that_are_not_silu_gated_are_refused() -> None:
    class Layer:
        moe_config = type("Config", (), {"activation": type("Activation", (), {"value": "gelu"})})
        w1_bias = w2_bias = None

    with pytest.raises(ValueError, match="'gelu'"):
        vllm_compat._keep_expert_weights(Layer(), torch.nn.Module())


@pytest.mark.parametrize("first_expert", [None, 0, 3])
def test_experts_equal_a_loop_over_tokens_with_and_without_expert_map(first_expert: int | None) -> None:
    """Reference: one token and one expert at a time. With a map, this rank holds 3 of 6 experts."""
    torch.manual_seed(0)
    hidden, intermediate, num_experts, tokens, top_k = 8, 6, 6, 10, 2
    local = list(range(num_experts)) if first_expert is None else list(range(first_expert, first_expert + 3))
    w1, w2 = torch.randn(num_experts, 2 * intermediate, hidden), torch.randn(num_experts, hidden, intermediate)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).int()
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if expert in local:
                gate, up = w1[expert][:intermediate] @ x[token], w1[expert][intermediate:] @ x[token]
                expected[token] += weight * (w2[expert] @ (F.silu(gate) * up))
    expert_map = None
    if first_expert is not None:
        expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(3, dtype=torch.int32)
    output = torch.full((tokens, hidden), float("nan"))
    vllm_compat._apply_experts(
        None,
        output=output,
        hidden_states=x,
        w1=w1[local],
        w2=w2[local],
        topk_weights=weights,
        topk_ids=ids,
        expert_map=expert_map,
        activation=None,
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def _absorbed_matrices(model_dir: Path, log_dir: Path) -> None:
    engine = build_engine(model_dir, log_dir)
    layers = mla_layers(engine._model)
    assert len(layers) == 3
    for layer in layers:  # where they are copies, as in some versions and dtypes, writing kv_b_proj does not reach them
        layer.W_UK_T = torch.nn.Parameter(layer.W_UK_T.data.clone(), requires_grad=False)
        layer.W_UV = torch.nn.Parameter(layer.W_UV.data.clone(), requires_grad=False)
    pointers = [layer.W_UK_T.data_ptr() for layer in layers]
    write_checkpoint(engine, model_dir, EngineLayout(), version=0)
    for layer, pointer in zip(layers, pointers, strict=True):
        kv_b_NDL = layer.kv_b_proj.weight.data.view(4, 32 + 32, 512)  # [heads, nope | v, latent]
        torch.testing.assert_close(layer.W_UK_T.data, kv_b_NDL[:, :32])
        torch.testing.assert_close(layer.W_UV.data, kv_b_NDL[:, 32:].transpose(1, 2))
        assert layer.W_UK_T.data_ptr() == pointer  # captured graphs hold the address


def test_absorbed_mla_matrices_follow_an_update(model_dir: Callable, tmp_path: Path) -> None:
    run_world(1, _absorbed_matrices, model_dir("deepseek_v3"), tmp_path)


def test_rotary_kernel_of_stock_vllm_is_wrong_for_mla(model_dir: Callable, tmp_path: Path) -> None:
    def prepare() -> None:
        fixed = vllm_compat.platform_llm_args
        vllm_compat.platform_llm_args = lambda *args: {
            key: value for key, value in fixed(*args).items() if key != "compilation_config"
        }

    assert _error_without(prepare, model_dir("deepseek_v3"), tmp_path) > 0.1


def _compiled_files(model_dir: Path, log_dir: Path) -> list[str]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(log_dir / "inductor")
    _generate(model_dir, log_dir, None)
    return [str(path) for path in (log_dir / "inductor").rglob("*.cpp")]


def test_log_probs_need_no_c_compiler(model_dir: Callable, tmp_path: Path) -> None:
    from vllm.platforms import current_platform

    assert current_platform.simple_compile_backend == "eager"
    assert run_world(1, _compiled_files, model_dir("llama"), tmp_path) == [[]]


def _shared_memory_files(model_dir: Path, log_dir: Path) -> tuple[str, list[str]]:
    engine = build_engine(model_dir, log_dir, tp=2)
    names = [name for name in os.listdir("/dev/shm") if "cpushm" in name]
    return engine._tp_group.device_communicator.dist_module.__name__, names


def test_tensor_parallel_ranks_talk_through_gloo_not_shared_memory(model_dir: Callable, tmp_path: Path) -> None:
    results = run_world(2, _shared_memory_files, model_dir("llama_tied"), tmp_path)
    assert results == [("torch.distributed", [])] * 2


def _shutdown_of_stock_vllm(model_dir: Path, log_dir: Path) -> tuple[bool, bool]:
    engine = build_engine(model_dir, log_dir)
    engine.shutdown()
    after_ours = torch.distributed.is_initialized()
    engine = build_engine(model_dir, log_dir)
    with engine._guard:
        engine._core.shutdown()
    after_stock = torch.distributed.is_initialized()
    if not after_stock:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(
            "gloo", store=store, rank=0, world_size=1
        )  # the helper ends with a barrier
    return after_ours, after_stock


def test_shutdown_keeps_the_trainers_process_group(model_dir: Callable, tmp_path: Path) -> None:
    assert run_world(1, _shutdown_of_stock_vllm, model_dir("llama"), tmp_path) == [(True, False)]


def test_a_vllm_without_a_fixes_target_is_refused_by_name() -> None:
    fix = Fix("vllm.platforms:current_platform.gone", None, "a reason")
    with pytest.raises(VLLMVersionError, match=r"has no vllm\.platforms:current_platform\.gone.*a reason.*0\.32"):
        vllm_compat.resolve(fix)
    with pytest.raises(VLLMVersionError, match=r"vllm\.no_such_module"):
        vllm_compat.resolve(Fix("vllm.no_such_module:name", None, "a reason"))


def test_arguments_by_platform() -> None:
    """CUDA and NPU sleep by vLLM's own pool; experts keep a layout that can be written in place."""
    args = {name: vllm_compat.platform_llm_args(name, {}, VLLMConfig()) for name in ("cpu", "cuda", "npu")}
    assert args["cpu"]["enforce_eager"] and "enable_sleep_mode" not in args["cpu"]
    assert args["cpu"]["enable_chunked_prefill"] is False and args["cpu"]["max_num_batched_tokens"] == 8192
    assert args["cuda"] == {"enable_sleep_mode": True, "moe_backend": "triton"}
    assert args["npu"] == {"enable_sleep_mode": True, "additional_config": {"rl_config": {"enabled": True}}}
    chosen = VLLMConfig(extra={"moe_backend": "cutlass"})
    assert "moe_backend" not in vllm_compat.platform_llm_args("cuda", {}, chosen)


def test_transposed_experts_are_handed_out_as_views_in_the_usual_order() -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.w13_weight = torch.nn.Parameter(torch.zeros(3, 8, 10), requires_grad=False)  # [E, H, 2I]
    model.experts.gate = torch.nn.Parameter(torch.zeros(3, 8), requires_grad=False)
    weights = named_weights(model, transposed_experts=True)
    weights["experts.w13_weight"][1, 9, 7] = 1.0
    assert model.experts.w13_weight[1, 7, 9] == 1.0
    assert weights["experts.gate"].shape == (3, 8)
    assert named_weights(model)["experts.w13_weight"].shape == (3, 8, 10)


def test_arguments_that_rlite_owns_cannot_be_passed_as_extra(model_dir: Callable, tmp_path: Path) -> None:
    def build(model: Path, log_dir: Path) -> str:
        with pytest.raises(ValueError) as error:
            build_engine(model, log_dir, extra={"enable_chunked_prefill": True})
        return str(error.value)

    (message,) = run_world(1, build, model_dir("llama"), tmp_path)
    assert "engine.extra.enable_chunked_prefill" in message
