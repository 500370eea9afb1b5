"""The critic computes the same values and gradients on every layout, starts at 0, and learns."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.critic import CriticRunner, build_critic, copy_policy_weights
from rlite.megatron.groups import build_process_groups
from rlite.megatron.model import build_policy, named_local_tensors, unwrap
from rlite.megatron.optimizer import build_optimizer, wrap_for_training
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.types import LossOutput
from tests.helpers.world import run_world
from tests.megatron.tiny import CONFIGS, make_rows, shard_rows

ROWS = make_rows(5)
TOTAL_TOKENS = sum(row.num_loss_tokens for row in ROWS)


def bring_up(name: str, layout: ParallelLayout, *, lr: float = 1e-2) -> tuple[CriticRunner, list[Tensor]]:
    """A critic with the weights of a fresh policy, and its value heads on this rank."""
    build_process_groups(layout)
    options = MegatronOptions(max_tokens_per_microbatch=40)
    policy = build_policy(CONFIGS[name], layout, options=options)
    critic = build_critic(CONFIGS[name], layout, options=options, params_dtype=torch.float32)
    copy_policy_weights(critic, policy)
    mine, theirs = named_local_tensors(critic), named_local_tensors(policy)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine if not key.endswith("output_layer.weight"))
    critic = wrap_for_training(critic)
    optimizer = build_optimizer(critic, OptimizerConfig(lr=lr, clip_grad=0.0))
    heads = [unwrap(c).output_layer.weight for c in critic if unwrap(c).post_process]
    return CriticRunner(critic, layout, options=options, optimizer=optimizer), heads


def squared_error(rows: Sequence[int], values_N: Tensor) -> LossOutput:
    """Every value should be 1."""
    loss = (values_N - 1.0).square().sum() / TOTAL_TOKENS
    return LossOutput(loss=loss, metric_sums={"sum:loss": loss.detach()})


def _values_and_update(name: str, layout: ParallelLayout) -> dict[str, Any]:
    runner, heads = bring_up(name, layout)
    indices, mine = shard_rows(ROWS, layout)
    assert all(bool((values == 0).all()) for values in runner.values(mine)), "the head starts at zero"
    with torch.no_grad():
        for head in heads:  # so that the gradient reaches the layers below it
            head.copy_(torch.linspace(-1, 1, head.numel()).view_as(head))
        runner.optimizer.reload_model_params()
    before = runner.values(mine)
    result = runner.update_values(mine, squared_error)
    after = runner.values(mine)
    rows = [(i, b, a) for i, b, a in zip(indices, before, after, strict=True)]
    return {"rows": rows, "grad_norm": result.grad_norm, "loss": result.metric_sums["sum:loss"]}


def outcome(name: str, world_size: int, layout: ParallelLayout) -> dict[str, Any]:
    ranks = run_world(world_size, _values_and_update, name, layout)
    before = {i: b for rank in ranks for i, b, _ in rank["rows"]}
    after = {i: a for rank in ranks for i, _, a in rank["rows"]}
    for rank in ranks:
        for i, b, a in rank["rows"]:
            torch.testing.assert_close((b, a), (before[i], after[i]), rtol=0, atol=1e-6)
    return {"before": before, "after": after, "grad_norm": ranks[0]["grad_norm"], "loss": ranks[0]["loss"]}


NAMES = ("deepseek_v3", "llama_tied")


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, Any]]:
    return {name: outcome(name, 1, ParallelLayout()) for name in NAMES}


CASES = {
    "ep2": ("deepseek_v3", ParallelLayout(ep=2)),
    "tp2": ("deepseek_v3", ParallelLayout(tp=2, ep=2)),
    "tied_tp2": ("llama_tied", ParallelLayout(tp=2, etp=2)),
    "tied_pp2": ("llama_tied", ParallelLayout(pp=2)),
    "cp2": ("llama_tied", ParallelLayout(cp=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_computes_the_same_values_and_update(reference: dict[str, dict[str, Any]], case: str) -> None:
    name, layout = CASES[case]
    got, expected = outcome(name, 2, layout), reference[name]
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for index in range(len(ROWS)):
        torch.testing.assert_close(got["before"][index], expected["before"][index], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["after"][index], expected["after"][index], rtol=1e-3, atol=2e-4)


def test_values_are_those_of_the_position_before_the_token(reference: dict[str, dict[str, Any]]) -> None:
    """A value must not know the token that it is there to judge."""
    for index, row in enumerate(ROWS):
        assert len(reference["llama_tied"]["before"][index]) == row.num_loss_tokens
    changed = run_world(1, _values_with_another_last_token)[0]
    kept, other = changed
    assert torch.equal(kept, other)


def _values_with_another_last_token() -> tuple[Tensor, Tensor]:
    from dataclasses import replace

    runner, heads = bring_up("llama_tied", ParallelLayout())
    with torch.no_grad():
        for head in heads:
            head.fill_(0.3)
    row = ROWS[0]
    ids = row.token_ids.clone()
    ids[-1] = (ids[-1] + 1) % 97
    return runner.values([row])[0], runner.values([replace(row, token_ids=ids)])[0]


def _learn() -> list[float]:
    runner, _ = bring_up("deepseek_v3", ParallelLayout())
    return [runner.update_values(ROWS, squared_error).metric_sums["sum:loss"] for _ in range(20)]


def test_it_learns() -> None:
    losses = run_world(1, _learn)[0]
    assert losses[0] == pytest.approx(1.0), "all values are 0 and should be 1"
    assert losses[-1] < 0.2
