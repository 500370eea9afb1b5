"""Every training layout starts from the same weights and computes the same log-probabilities, gradients and norm."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.model import named_local_tensors
from rlite.megatron.options import MegatronOptions
from rlite.types import TokenRow, TokenScores, UpdateResult
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


class Outcome(NamedTuple):
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
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
        scores,
        updated,
        per_rank[0]["result"],
    )


def _one_update(config: dict, layout: ParallelLayout, rows: list[TokenRow], options: MegatronOptions) -> dict:
    policy = bring_up(config, layout, options=options)
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
    assert actual.scores.keys() == expected.scores.keys()
    for index, scores in expected.scores.items():
        torch.testing.assert_close(actual.scores[index].logprobs, scores.logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(actual.scores[index].entropy, scores.entropy, rtol=0, atol=1e-5)
        # Adam's first step is close to a sign: tiny gradients amplify rounding, so this is looser than the gradients.
        torch.testing.assert_close(
            actual.updated_scores[index].logprobs, scores_after(expected, index), rtol=0, atol=2e-3
        )
    assert actual.result.grad_norm == pytest.approx(expected.result.grad_norm, rel=1e-5)
    assert actual.result.metric_sums == pytest.approx(expected.result.metric_sums, rel=1e-5)
    assert actual.result.applied and expected.result.applied


def scores_after(expected: Outcome, index: int) -> Tensor:
    return expected.updated_scores[index].logprobs


@pytest.mark.parametrize(
    "layout", ["dp2", "tp2", "ep2", "tp2_ep2", "pp2", "pp2_vpp2", "cp2", "tp2_ep2_etp2", "pp2_ep2"]
)
def test_deepseek_v3_is_the_same_on_every_layout(reference: Any, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    assert_same(outcome("deepseek_v3", world_size, parallel), reference("deepseek_v3"))


@pytest.mark.parametrize(
    "layout", ["dp2", "tp2", "ep2", "tp2_ep2", "pp2_uneven", "pp2_vpp2", "cp2", "ep2_etp2", "tp2_ep4_cp2"]
)
def test_qwen3_moe_is_the_same_on_every_layout(reference: Any, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    assert_same(outcome("qwen3_moe", world_size, parallel), reference("qwen3_moe"))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
def test_tied_embeddings_are_the_same_on_every_layout(reference: Any, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    assert_same(outcome("llama_tied", world_size, parallel), reference("llama_tied"))


@pytest.mark.parametrize("layout", ["dp2", "ep2"])
def test_nothing_depends_on_micro_batches_and_chunks(reference: Any, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    actual = outcome("qwen3_moe", world_size, parallel, max_tokens_per_microbatch=20, logprob_chunk_tokens=3)
    assert_same(actual, reference("qwen3_moe"))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_does_not_change_gradients(reference: Any, recompute: str) -> None:
    assert_same(outcome("deepseek_v3", 1, ParallelLayout(), recompute=recompute), reference("deepseek_v3"))


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
