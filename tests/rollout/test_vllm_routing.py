"""The experts that the engine reports are those that transformers chooses for the same tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlite.layout.parallel import EngineLayout
from rlite.types import NATIVE_EXPERT, Completion
from tests.helpers.world import run_world
from tests.rollout.helpers import MIB, build_engine, requests, write_checkpoint

pytestmark = pytest.mark.usefixtures("original_functions")


def _generate(
    model_dir: Path, log_dir: Path, asked: list, config: dict[str, Any]
) -> tuple[list[Completion], list[list]]:
    layout = EngineLayout(tp=config.get("tp", 1), expert_parallel=config.get("expert_parallel", False))
    engine = build_engine(model_dir, log_dir, capture_routing=True, enable_prefix_caching=False, **config)
    write_checkpoint(engine, model_dir, layout, version=0)
    engine.generate(asked[:1])  # an earlier call leaves nothing behind
    completions = engine.generate(asked)
    return completions, [completion.experts.tolist() for completion in completions]


def _reference_experts(model: torch.nn.Module, ids: tuple[int, ...]) -> Tensor:
    """int64 `[T, MoE layers, top_k]`, sorted, from a forward pass of transformers."""
    chosen: list[Tensor] = []

    def hear(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        chosen.append(next(tensor for tensor in tensors if not tensor.is_floating_point()))

    hooks = [
        module.register_forward_pre_hook(hear, with_kwargs=True)
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort(-1).values


def _check(model_dir: Path, log_dir: Path, asked: list, world_size: int, **config: Any) -> None:
    results = run_world(world_size, _generate, model_dir, log_dir, asked, config)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for completions, routed in results:
        assert len(routed) == len(asked)
        for request, completion, experts in zip(asked, completions, routed, strict=True):
            ids = (*request.prompt_token_ids, *completion.token_ids[:-1])
            expected = _reference_experts(model, ids)
            assert torch.equal(torch.tensor(experts[:-1]).sort(-1).values, expected)
            assert set(torch.tensor(experts[-1]).flatten().tolist()) == {NATIVE_EXPERT}


@pytest.mark.parametrize(
    ("name", "tp", "expert_parallel"), [("qwen3_moe", 1, False), ("deepseek_v3", 1, False), ("qwen3_moe", 2, True)]
)
def test_experts_equal_transformers(
    name: str, tp: int, expert_parallel: bool, model_dir: Callable, tmp_path: Path
) -> None:
    _check(model_dir(name), tmp_path, requests(), tp, tp=tp, expert_parallel=expert_parallel)


def test_preempted_requests_are_recorded_whole(model_dir: Callable, tmp_path: Path) -> None:
    """8 sequences of up to 164 tokens in a cache of 512: some are thrown out and computed again."""
    asked = requests(prompts=[(2, 10 + i, 20 + i, 30 + i) for i in range(8)], max_tokens=160)
    path = model_dir("qwen3_moe")  # 2 layers x (key, value) x 2 heads x 32 dims x 4 bytes = 1 KiB a token
    _check(path, tmp_path, asked, 1, kv_cache_memory_bytes=MIB // 2)


def test_prefix_caching_is_refused(model_dir: Callable, tmp_path: Path) -> None:
    def build() -> str:
        with pytest.raises(ValueError) as error:
            build_engine(model_dir("qwen3_moe"), tmp_path, capture_routing=True)
        return str(error.value)

    assert "enable_prefix_caching = True" in run_world(1, build)[0]
