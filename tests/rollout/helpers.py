"""Shared by the engine tests: building an engine, writing a checkpoint into it, and the reference log-probs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlite.layout.architecture import Architecture
from rlite.layout.parallel import EngineLayout
from rlite.layout.vllm import vllm_boxes
from rlite.rollout.config import VLLMConfig
from rlite.rollout.engine import GenerationRequest, RolloutEngine
from rlite.types import Completion, SamplingConfig

MIB = 1024**2
LONG_PROMPT = (2, *(10 + 7 * i % 80 for i in range(140)))
"""More than one KV block, so that a cached prefix would be reused."""
PROMPTS = ((2, 20, 12, 21, 30), (2, 40, 41), LONG_PROMPT, (2, 99, 98, 97))


def build_engine(model_dir: Path, log_dir: Path, *, capture_routing: bool = False, **config: Any) -> RolloutEngine:
    from rlite.rollout.vllm import VLLMEngine

    defaults = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 * MIB, "max_num_seqs": 32}
    return VLLMEngine(
        VLLMConfig(**{**defaults, **config}),
        model_dir,
        log_file=log_dir / f"log{dist.get_rank()}.txt",
        capture_routing=capture_routing,
    )


def write_checkpoint(engine: RolloutEngine, model_dir: Path, layout: EngineLayout, *, version: int) -> None:
    """Every rank copies its boxes of the checkpoint into the engine's weights."""
    architecture = Architecture.from_config(json.loads((model_dir / "config.json").read_text()))
    boxes = vllm_boxes(architecture, layout, dist.get_world_size(), dist.get_rank(), dtype="float32")
    checkpoint, weights = load_file(model_dir / "model.safetensors"), engine.weights()
    assert {tensor.name: tensor.shape for tensor in boxes.tensors} == {k: tuple(v.shape) for k, v in weights.items()}
    for box in boxes.boxes:
        source = checkpoint[box.tensor][tuple(slice(*bounds) for bounds in zip(box.start, box.stop, strict=True))]
        weights[box.local][box.local_index(box.start, box.stop)].copy_(source)
    engine.finish_weight_update(version)


def requests(
    *, temperature: float = 1.0, prompts: Sequence[tuple[int, ...]] = PROMPTS, max_tokens: int = 12, **sampling: Any
) -> list[GenerationRequest]:
    config = SamplingConfig(max_tokens=max_tokens, temperature=temperature, **sampling)
    return [
        GenerationRequest(prompt_token_ids=prompt, seed=100 + i, sampling=config) for i, prompt in enumerate(prompts)
    ]


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def max_logprob_error(model: torch.nn.Module, asked: Sequence[GenerationRequest], got: Sequence[Completion]) -> float:
    """Largest |engine - transformers| log-prob over all sampled tokens; transformers in one forward pass, fp32."""
    worst = 0.0
    for request, completion in zip(asked, got, strict=True):
        ids = torch.tensor([*request.prompt_token_ids, *completion.token_ids])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
        logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
        reference = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, float((reference - torch.tensor(completion.logprobs)).abs().max()))
    return worst
