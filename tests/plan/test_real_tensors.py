"""The plan of the tiny models against the tensors that Megatron-core allocates for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlite.device import DeviceKind
from rlite.layout.parallel import ParallelLayout
from rlite.memory.phases import CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER, GRADIENTS, OPTIMIZER, POLICY, Phase
from rlite.memory.residents import FlatBuffers
from rlite.plan.memory import plan_memory
from tests.helpers.world import run_world
from tests.plan.jobs import job

MODELS = Path(__file__).parents[2] / "configs" / "models"
LAYOUTS = {
    "ep2": ParallelLayout(ep=2),
    "tp2": ParallelLayout(tp=2, etp=2),
    "dp2": ParallelLayout(),
    "pp2": ParallelLayout(pp=2, first_stage_layers=1),
}


@pytest.fixture(scope="module", autouse=True)
def _bootstrap() -> None:
    """Megatron-core is imported once, in the parent of all worlds."""
    from rlite.megatron.bootstrap import bootstrap

    bootstrap(DeviceKind.CPU)


def read_config(model: str) -> dict[str, Any]:
    return json.loads((MODELS / model / "config.json").read_text())


def _device_bytes(hf_config: dict, layout: ParallelLayout, dtype: str) -> dict[str, int]:
    from rlite.megatron.buffers import flat_gradients, flat_optimizer_state, flat_parameters
    from tests.megatron.tiny import bring_up

    policy = bring_up(hf_config, layout, dtype=getattr(torch, dtype))
    residents = {
        POLICY: flat_parameters(policy.chunks),
        GRADIENTS: flat_gradients(policy.chunks),
        OPTIMIZER: flat_optimizer_state(policy.runner.optimizer),
    }
    return {name: FlatBuffers(name, tensors).device_bytes() for name, tensors in residents.items()} | {
        "rank": dist.get_rank()
    }


def _critic_bytes(hf_config: dict, layout: ParallelLayout) -> dict[str, int]:
    from rlite.megatron.buffers import flat_gradients, flat_optimizer_state, flat_parameters
    from rlite.megatron.critic import build_critic
    from rlite.megatron.groups import build_process_groups
    from rlite.megatron.optimizer import build_optimizer, wrap_for_training
    from rlite.megatron.options import MegatronOptions, OptimizerConfig

    build_process_groups(layout)
    chunks = build_critic(hf_config, layout, options=MegatronOptions(), params_dtype=torch.bfloat16)
    chunks = wrap_for_training(chunks)
    optimizer = build_optimizer(chunks, OptimizerConfig())
    residents = {
        CRITIC: flat_parameters(chunks),
        CRITIC_GRADIENTS: flat_gradients(chunks),
        CRITIC_OPTIMIZER: flat_optimizer_state(optimizer),
    }
    return {name: FlatBuffers(name, tensors).device_bytes() for name, tensors in residents.items()} | {
        "rank": dist.get_rank()
    }


@pytest.mark.parametrize(("model", "layout"), [("tiny_dsv3", "ep2"), ("tiny_llama", "pp2")])
def test_the_critic_is_within_5_percent_too(model: str, layout: str) -> None:
    hf_config = read_config(model) | {"tie_word_embeddings": True}
    plan = plan_memory(job(hf_config, layout=LAYOUTS[layout], train_dtype="bfloat16", has_critic=True))
    planned = {rank: c.phase(Phase.CRITIC).residents for c in plan.classes for rank in c.ranks}
    for measured in run_world(2, _critic_bytes, hf_config, LAYOUTS[layout]):
        for name in (CRITIC, CRITIC_GRADIENTS, CRITIC_OPTIMIZER):
            assert planned[measured["rank"]][name] == pytest.approx(measured[name], rel=0.05), (name, measured)


CASES = [
    *((model, layout, "float32") for model in ("tiny_dsv3", "tiny_qwen3_moe") for layout in LAYOUTS),
    *((model, "ep2", "bfloat16") for model in ("tiny_dsv3", "tiny_qwen3_moe")),
    *(("tiny_llama", layout, "float32") for layout in ("tp2", "pp2")),
]


@pytest.mark.parametrize(("model", "layout", "dtype"), CASES)
def test_every_resident_is_within_5_percent(model: str, layout: str, dtype: str) -> None:
    hf_config = read_config(model)
    plan = plan_memory(job(hf_config, layout=LAYOUTS[layout], train_dtype=dtype))
    planned = {rank: c.phase(Phase.TRAIN).residents for c in plan.classes for rank in c.ranks}
    for measured in run_world(2, _device_bytes, hf_config, LAYOUTS[layout], dtype):
        for name in (POLICY, GRADIENTS, OPTIMIZER):
            assert planned[measured["rank"]][name] == pytest.approx(measured[name], rel=0.05), (name, measured)
