"""Weights without a copy on the host: fp32 main weights make them anew, bit for bit, in every phase that wants them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.buffers import WeightRebuilder, flat_gradients, flat_optimizer_state, flat_parameters
from rlite.megatron.model import named_local_tensors
from rlite.memory import DerivedBuffers, FlatBuffers, Ledger, OffloadPolicy, Phase, PhaseMachine
from rlite.memory.phases import GRADIENTS, OPTIMIZER, POLICY, REFERENCE
from tests.helpers.world import run_world
from tests.megatron.tiny import CONFIGS, Policy, bring_up, make_rows, shard_rows, toy_loss


def _machine(policy: Policy, *, rebuild: bool) -> PhaseMachine:
    phases, optimizer = PhaseMachine(Ledger()), policy.runner.optimizer
    phases.offload_policy = OffloadPolicy(name="full", rebuild_weights=rebuild)
    state, weights = FlatBuffers(OPTIMIZER, flat_optimizer_state(optimizer)), flat_parameters(policy.chunks)
    if rebuild:
        rebuilder = WeightRebuilder(policy.chunks, optimizer, content_of=state.content_of)
        phases.register(DerivedBuffers(POLICY, weights, rebuild=rebuilder.run))
    else:
        phases.register(FlatBuffers(POLICY, weights))
    phases.register(state)
    phases.register(FlatBuffers(GRADIENTS, flat_gradients(policy.chunks), contents="scratch"))
    phases.register(phases.residents[POLICY].frozen_copy(REFERENCE))
    return phases


def _train(config: dict[str, Any], layout: ParallelLayout, rebuild: bool) -> dict[str, Any]:
    """Three rollout steps: reference, own log-probabilities, training; weights as they are in each."""
    policy = bring_up(config, layout, dtype=torch.bfloat16)
    phases, optimizer = _machine(policy, rebuild=rebuild), policy.runner.optimizer
    seen: list[Any] = []
    for step in range(3):
        mine = shard_rows(make_rows(4, seed=step), layout)[1]
        if step:
            phases.enter(Phase.IDLE)
        for phase in (Phase.VACANT, Phase.IDLE, Phase.REFERENCE, Phase.LOGPROB):
            phases.enter(phase)
            if phases.residents[POLICY].on_device:
                seen.append({n: t.clone() for n, t in named_local_tensors(policy.chunks).items()})
        seen.append([s.logprobs for s in policy.runner.score(mine)])
        phases.enter(Phase.TRAIN)

        def joined_step() -> None:
            phases.join()
            optimizer.step()

        seen.append(policy.runner.update(mine, lambda i, s: toy_loss(i, 30, s), step=joined_step))
    entry = phases.ledger.drain()[-2]
    held = {name: resident.full_bytes() for name, resident in phases.residents.items()}
    return {"seen": seen, "held": held, "host": entry.host_bytes, "moved": entry.moved_bytes, "phase": entry.phase}


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek_v3", ParallelLayout(ep=2)),
        ("qwen3_moe", ParallelLayout()),
        ("llama_tied", ParallelLayout(pp=2)),
    ],
)
def test_a_run_is_bit_identical_and_the_host_holds_no_weights(name: str, layout: ParallelLayout) -> None:
    kept = run_world(2, _train, CONFIGS[name], layout, False)
    rebuilt = run_world(2, _train, CONFIGS[name], layout, True)
    for copied, made in zip(kept, rebuilt, strict=True):
        assert len(copied["seen"]) == len(made["seen"]) == 3 * 4
        for number, (left, right) in enumerate(zip(copied["seen"], made["seen"], strict=True)):
            assert _equal(left, right), number
        weights = copied["held"][POLICY]
        assert copied["host"][POLICY] == weights > made["host"][POLICY] == 0
        assert sum(copied["host"].values()) - sum(made["host"].values()) == weights
        assert made["phase"] == copied["phase"] == Phase.LOGPROB
        assert copied["moved"] == weights
        assert made["moved"] == pytest.approx(copied["held"][OPTIMIZER] / 3, rel=0.05), "fp32 main weights of the shard"


def _refused(dtype: torch.dtype, break_it: bool) -> str:
    policy = bring_up(CONFIGS["llama"], ParallelLayout(), dtype=dtype)
    if break_it:
        policy.chunks[0].register_parameter("extra", torch.nn.Parameter(torch.ones(2, dtype=dtype)))
    with pytest.raises(ValueError) as error:
        WeightRebuilder(policy.chunks, policy.runner.optimizer, content_of=lambda main: main)
    return str(error.value)


@pytest.mark.parametrize(("dtype", "break_it"), [(torch.float32, False), (torch.bfloat16, True)])
def test_weights_without_main_weights_are_refused(dtype: torch.dtype, break_it: bool) -> None:
    (message,) = run_world(1, _refused, dtype, break_it)
    assert "MemoryOffload.rebuild_weights = true" in message and "set trainer.precision to bf16-mixed" in message
    assert ("extra (bfloat16)" if break_it else "(float32)") in message
