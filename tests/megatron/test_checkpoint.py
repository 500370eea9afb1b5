"""Sharded checkpoints: bitwise on the same layout, exact to rounding on another, refused when damaged."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.buffers import flat_optimizer_state, flat_parameters
from rlite.megatron.checkpoint import load_sharded, save_sharded
from rlite.megatron.model import named_local_tensors
from rlite.megatron.optimizer import LrScheduler
from rlite.megatron.options import OptimizerConfig
from tests.helpers.world import run_world
from tests.megatron.tiny import (
    CONFIGS,
    Policy,
    assemble,
    bring_up,
    canonical_parts,
    make_rows,
    shard_rows,
    toy_loss,
)

EP2, TP2, PP2 = ParallelLayout(ep=2), ParallelLayout(tp=2, etp=2), ParallelLayout(pp=2)
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.01, warmup_steps=4)


def _train(policy: Policy, scheduler: LrScheduler, steps: range) -> list[float]:
    norms = []
    for step in steps:
        rows = make_rows(6, seed=step)
        total = sum(row.num_loss_tokens for row in rows)
        mine = shard_rows(rows, policy.layout)[1]
        result = policy.runner.update(mine, lambda i, s, total=total: toy_loss(i, total, s))
        scheduler.step()
        norms.append(result.grad_norm)
    return norms


def _save_then_go_on(config: dict, layout: ParallelLayout, path: str, dtype: torch.dtype) -> tuple:
    policy = bring_up(config, layout, optimizer=OPTIMIZER, dtype=dtype)
    scheduler = LrScheduler(policy.runner.optimizer)
    _train(policy, scheduler, range(3))
    common = {"rollout_step": 3, "scheduler": scheduler.state_dict()}
    save_sharded(path, policy.chunks, policy.runner.optimizer, common=common)
    saved = canonical_parts(config, layout, named_local_tensors(policy.chunks))
    norms = _train(policy, scheduler, range(3, 6))
    return norms, saved, canonical_parts(config, layout, named_local_tensors(policy.chunks))


def _load_then_go_on(config: dict, layout: ParallelLayout, path: str, dtype: torch.dtype) -> tuple:
    policy = bring_up(config, layout, optimizer=OPTIMIZER, dtype=dtype)
    for weight in named_local_tensors(policy.chunks).values():
        weight.fill_(0.123)
    optimizer = policy.runner.optimizer
    flats = [tensor.data_ptr() for tensor in flat_optimizer_state(optimizer) + flat_parameters(policy.chunks)]
    common = load_sharded(path, policy.chunks, optimizer)
    assert flats == [t.data_ptr() for t in flat_optimizer_state(optimizer) + flat_parameters(policy.chunks)]
    assert common["rollout_step"] == 3
    loaded = canonical_parts(config, layout, named_local_tensors(policy.chunks))
    scheduler = LrScheduler(optimizer)
    scheduler.load_state_dict(common["scheduler"])
    norms = _train(policy, scheduler, range(3, 6))
    steps = {float(state["step"]) for part in optimizer.parts for state in part.optimizer.state.values()}
    assert steps == {6.0}, "every parameter has made six steps: none shares its counter with another"
    return norms, loaded, canonical_parts(config, layout, named_local_tensors(policy.chunks))


def _resume(name: str, tmp_path: Path, save: ParallelLayout, load: ParallelLayout, dtype: torch.dtype) -> tuple:
    path = str(tmp_path / "checkpoint")
    expected = run_world(2, _save_then_go_on, CONFIGS[name], save, path, dtype)
    actual = run_world(2, _load_then_go_on, CONFIGS[name], load, path, dtype)
    (norms, saved, weights), (resumed_norms, loaded, resumed) = map(_assembled, (expected, actual))
    for name_, weight in saved.items():
        assert torch.equal(loaded[name_], weight), f"{name_} was not restored"
    return norms, weights, resumed_norms, resumed


def _assembled(per_rank: list) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    first, last = (assemble([rank[index] for rank in per_rank]) for index in (1, 2))
    return per_rank[0][0], first, last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_on_the_same_layout_is_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    norms, weights, resumed_norms, resumed = _resume("deepseek_v3", tmp_path, EP2, EP2, dtype)
    assert resumed_norms == norms
    for name, weight in weights.items():
        assert torch.equal(resumed[name], weight), name


@pytest.mark.parametrize(
    ("name", "save", "load"),
    [
        ("deepseek_v3", EP2, TP2),
        ("qwen3_moe", TP2, PP2),
        ("qwen3_moe", PP2, ParallelLayout(pp=2, vpp=2)),
        ("llama_tied", PP2, TP2),
    ],
)
def test_resume_on_another_layout(tmp_path: Path, name: str, save: ParallelLayout, load: ParallelLayout) -> None:
    norms, weights, resumed_norms, resumed = _resume(name, tmp_path, save, load, torch.float32)
    assert resumed_norms == pytest.approx(norms, rel=1e-5)
    for tensor, weight in weights.items():
        # Adam divides by the root of the second moment: a gradient near zero turns rounding into part of a step.
        torch.testing.assert_close(resumed[tensor], weight, rtol=0, atol=2e-4, msg=lambda m, t=tensor: f"{t}: {m}")


def _save_weights_only(path: str) -> None:
    policy = bring_up(CONFIGS["llama"], ParallelLayout())
    save_sharded(path, policy.chunks)


def _refusals(path: str) -> list[str]:
    policy = bring_up(CONFIGS["llama"], ParallelLayout())
    messages = []
    for call in (
        lambda: load_sharded(path, policy.chunks, policy.runner.optimizer),
        lambda: save_sharded(path, policy.chunks),
        lambda: load_sharded(Path(path) / "missing", policy.chunks),
    ):
        try:
            call()
        except (ValueError, FileExistsError) as error:
            messages.append(str(error))
    return messages


def test_wrong_directories_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    run_world(1, _save_weights_only, str(path))
    no_optimizer, not_empty, missing = run_world(1, _refusals, str(path))[0]
    assert "no optimizer state" in no_optimizer
    assert "is not empty" in not_empty
    assert "metadata.json" in missing


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    run_world(1, _save_weights_only, str(path))
    shutil.copytree(path, tmp_path / "cut")
    (tmp_path / "cut" / "common.pt").unlink()
    with pytest.raises(AssertionError, match=r"not a complete sharded checkpoint"):
        run_world(1, _load_weights_only, str(tmp_path / "cut"))
    run_world(1, _load_weights_only, str(path))


def _load_weights_only(path: str) -> None:
    policy = bring_up(CONFIGS["llama"], ParallelLayout())
    load_sharded(path, policy.chunks)
