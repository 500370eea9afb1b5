"""Every training layout starts from the same weights and computes the same log-probabilities, gradients and norm."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.model import named_local_tensors
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.types import LossOutput, TokenRow, TokenScores, UpdateResult
from tests.helpers.world import run_world
from tests.megatron.tiny import (
    CONFIGS,
    assemble,
    boxes_of,
    bring_up,
    canonical_parts,
    keep_whole_gradients,
    local_gradients,
    make_rows,
    shard_rows,
    toy_loss,
)

ROWS = make_rows(7)
TOTAL_TOKENS = sum(row.num_loss_tokens for row in ROWS)
LAYOUTS = {
    "dp2": (2, ParallelLayout()),
    "tp2": (2, ParallelLayout(tp=2, etp=2)),
    "ep2": (2, ParallelLayout(ep=2)),
    "tp2_ep2": (2, ParallelLayout(tp=2, ep=2)),
    "pp2": (2, ParallelLayout(pp=2)),
    "pp2_uneven": (2, ParallelLayout(pp=2, first_stage_layers=1)),
    "pp2_vpp2": (2, ParallelLayout(pp=2, vpp=2)),
    "cp2": (2, ParallelLayout(cp=2)),
    "ep2_etp2": (4, ParallelLayout(ep=2, etp=2)),
    "tp2_ep2_etp2": (4, ParallelLayout(tp=2, ep=2, etp=2)),
    "tp2_ep4_cp2": (4, ParallelLayout(tp=2, ep=4, cp=2)),
    "pp2_ep2": (4, ParallelLayout(pp=2, ep=2)),
}


STEP = OptimizerConfig(lr=1.0, eps=1.0)
"""Adam's first step is `lr * g / (|g| + eps)`: with the usual epsilon close to a sign, which turns the rounding of a tiny
gradient into a whole step. With eps = 1 an error of the gradient moves a weight by at most as much (slope lr / eps)."""
SAME_ORDER = ("pp2", "pp2_uneven")
"""Layouts that add the same numbers in the same order as one process."""


class Outcome(NamedTuple):
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    updated_weights: dict[str, Tensor]
    scores: dict[int, TokenScores]
    updated_scores: dict[int, TokenScores]
    result: UpdateResult


def outcome(name: str, world_size: int, layout: ParallelLayout, **options: Any) -> Outcome:
    per_rank = run_world(world_size, _one_update, CONFIGS[name], layout, ROWS, MegatronOptions(**options))
    scores, updated = {}, {}
    for rank in per_rank:
        for index, before, after in rank["scores"]:
            for seen, new in ((scores, before), (updated, after)):
                if index in seen:  # tensor-, context- and pipeline-parallel peers see the same numbers
                    torch.testing.assert_close(new.logprobs, seen[index].logprobs, rtol=0, atol=0)
                seen[index] = new
        assert rank["result"] == per_rank[0]["result"]
    return Outcome(
        assemble([rank["weights"] for rank in per_rank]),
        assemble([rank["gradients"] for rank in per_rank]),
        assemble([rank["updated_weights"] for rank in per_rank]),
        scores,
        updated,
        per_rank[0]["result"],
    )


def _one_update(config: dict, layout: ParallelLayout, rows: list[TokenRow], options: MegatronOptions) -> dict:
    policy = bring_up(config, layout, options=options, optimizer=STEP)
    indices, mine = shard_rows(rows, layout)
    weights = canonical_parts(config, layout, named_local_tensors(policy.chunks))
    scores = policy.runner.score(mine, temperature=0.8)
    keep_whole_gradients(policy)
    gradients: list = []

    def step() -> None:
        gradients.extend(canonical_parts(config, layout, local_gradients(policy)))
        policy.runner.optimizer.step()

    result = policy.runner.update(mine, lambda i, s: toy_loss(i, TOTAL_TOKENS, s), temperature=0.8, step=step)
    updated = policy.runner.score(mine, temperature=0.8)
    return {
        "weights": weights,
        "gradients": gradients,
        "updated_weights": canonical_parts(config, layout, named_local_tensors(policy.chunks)),
        "scores": list(zip(indices, scores, updated, strict=True)),
        "result": result,
    }


@pytest.fixture(scope="module")
def reference() -> Any:
    known: dict[str, Outcome] = {}

    def of(name: str) -> Outcome:
        if name not in known:
            known[name] = outcome(name, 1, ParallelLayout())
        return known[name]

    return of


def assert_same(actual: Outcome, expected: Outcome) -> None:
    for name, weight in expected.weights.items():
        assert torch.equal(actual.weights[name], weight), f"{name}: starts from other weights"
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        difference = (actual.gradients[name] - gradient).abs().max()
        assert difference <= 1e-5 * gradient.abs().max(), f"{name}: gradient differs by {difference}"
    assert_same_step(actual, expected)
    for before in (True, False):
        seen, known = (o.scores if before else o.updated_scores for o in (actual, expected))
        assert seen.keys() == known.keys()
        for index, scores in known.items():
            torch.testing.assert_close(seen[index].logprobs, scores.logprobs, rtol=0, atol=1e-5)
            torch.testing.assert_close(seen[index].entropy, scores.entropy, rtol=0, atol=1e-5)
    assert actual.result.grad_norm == pytest.approx(expected.result.grad_norm, rel=1e-5)
    assert actual.result.metric_sums == pytest.approx(expected.result.metric_sums, rel=1e-5)
    assert actual.result.applied and expected.result.applied


def assert_same_step(actual: Outcome, expected: Outcome) -> None:
    """Each weight after the step to rtol 1e-5 of itself or of its tensor's largest step (atol), and the step to as much."""
    assert actual.updated_weights.keys() == expected.updated_weights.keys() == expected.weights.keys()
    moved = 0
    for name, updated in expected.updated_weights.items():
        step = updated - expected.weights[name]
        largest = float(step.abs().max())
        moved += largest > 0
        torch.testing.assert_close(
            actual.updated_weights[name], updated, rtol=1e-5, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )
        rounding = torch.finfo(torch.float32).eps * updated.abs()  # of two weights, half a unit each
        difference = (actual.updated_weights[name] - updated).abs()
        worst = float((difference - rounding).max())
        assert worst <= 1e-5 * largest, f"{name}: the step differs by {worst}, it is {largest}"
    assert moved == len(expected.gradients), "every trained weight moves"


def assert_identical(actual: Outcome, expected: Outcome) -> None:
    """Up to the gradient; the norm by which it is clipped is a sum over ranks, so the step is equal to rounding only."""
    for name, gradient in expected.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), f"{name}: gradient"
    for index, scores in expected.scores.items():
        assert torch.equal(actual.scores[index].logprobs, scores.logprobs)


@pytest.mark.parametrize(
    "layout", ["dp2", "tp2", "ep2", "tp2_ep2", "pp2", "pp2_vpp2", "cp2", "tp2_ep2_etp2", "pp2_ep2"]
)
def test_deepseek_v3_is_the_same_on_every_layout(reference: Any, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    actual = outcome("deepseek_v3", world_size, parallel)
    assert_same(actual, reference("deepseek_v3"))
    if layout in SAME_ORDER:
        assert_identical(actual, reference("deepseek_v3"))


@pytest.mark.parametrize(
    "layout", ["dp2", "tp2", "ep2", "tp2_ep2", "pp2_uneven", "pp2_vpp2", "cp2", "ep2_etp2", "tp2_ep4_cp2"]
)
def test_qwen3_moe_is_the_same_on_every_layout(reference: Any, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    actual = outcome("qwen3_moe", world_size, parallel)
    assert_same(actual, reference("qwen3_moe"))
    if layout in SAME_ORDER:
        assert_identical(actual, reference("qwen3_moe"))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
def test_tied_embeddings_are_the_same_on_every_layout(reference: Any, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    assert_same(outcome("llama_tied", world_size, parallel), reference("llama_tied"))


def test_nothing_depends_on_micro_batches_and_chunks(reference: Any) -> None:
    world_size, parallel = LAYOUTS["ep2"]
    actual = outcome("qwen3_moe", world_size, parallel, max_tokens_per_microbatch=20, logprob_chunk_tokens=3)
    assert_same(actual, reference("qwen3_moe"))


def _gradients_by_budget(config: dict, rows: list[TokenRow], budgets: list[int]) -> list[tuple[int, list]]:
    """(micro-batches with rows, this rank's gradients) for each token budget of a micro-batch; weights stay."""
    layout = ParallelLayout()
    policy = bring_up(config, layout, optimizer=OptimizerConfig(lr=0.0))
    keep_whole_gradients(policy)
    mine = shard_rows(rows, layout)[1]
    calls: list[int] = []
    found: list[tuple[int, list]] = []

    def loss_fn(indices: Any, scores: TokenScores) -> LossOutput:
        calls.append(len(indices))
        return toy_loss(indices, TOTAL_TOKENS, scores)

    def step() -> None:  # clips the gradients, so they are looked at before
        found.append((len(calls), canonical_parts(config, layout, local_gradients(policy))))
        policy.runner.optimizer.step()

    for budget in budgets:
        calls.clear()
        policy.runner.options = MegatronOptions(max_tokens_per_microbatch=budget)
        policy.runner.update(mine, loss_fn, temperature=0.8, step=step)
    return found


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_gradients_do_not_depend_on_micro_batch_size_or_data_parallelism(reference: Any, name: str, dp: int) -> None:
    """Token budgets of 1, 2 and 4 of the longest row, ragged rows: gradients of one micro-batch on one process, to 1e-5."""
    lengths = [row.token_ids.numel() for row in ROWS]
    assert len(set(lengths)) > 3
    per_rank = run_world(dp, _gradients_by_budget, CONFIGS[name], ROWS, [rows * max(lengths) for rows in (1, 2, 4)])
    counts = [count for count, _ in per_rank[0]]
    assert counts[0] > counts[1] >= counts[2] and len(set(counts)) > 1
    for step in range(3):
        for tensor, gradient in assemble([rank[step][1] for rank in per_rank]).items():
            expected = reference(name).gradients[tensor]
            assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), (step, tensor)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_does_not_change_gradients(reference: Any, recompute: str) -> None:
    modules = ("core_attn", "mlp", "shared_experts")
    actual = outcome("deepseek_v3", 1, ParallelLayout(), recompute=recompute, recompute_modules=modules)
    assert_same(actual, reference("deepseek_v3"))


def _names_and_shapes(config: dict, layout: ParallelLayout) -> tuple[dict, dict]:
    policy = bring_up(config, layout)
    held = {name: tuple(tensor.shape) for name, tensor in named_local_tensors(policy.chunks).items()}
    return held, {tensor.name: tensor.shape for tensor in boxes_of(config, layout).tensors}


@pytest.mark.parametrize("layout", ["tp2_ep2_etp2", "pp2_ep2", "pp2_vpp2"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_names_and_shapes_are_those_of_the_layout_package(name: str, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    for held, described in run_world(world_size, _names_and_shapes, CONFIGS[name], parallel):
        assert held == described
