"""Router replay: recorded choices, live gates, the same on every layout and under recomputation."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.options import MegatronOptions
from rlite.megatron.router_replay import LayerReplay
from rlite.types import NATIVE_EXPERT, TokenRow
from tests.helpers.world import run_world
from tests.megatron.tiny import CONFIGS, bring_up, make_rows, shard_rows, toy_loss

MOE_LAYERS = {"qwen3_moe": 4, "deepseek_v3": 3}
TOPK = {"qwen3_moe": 2, "deepseek_v3": 4}


def with_experts(rows: list[TokenRow], name: str) -> list[TokenRow]:
    """Random experts for every token; the last one and a few others choose themselves; one row has no record."""
    generator = torch.Generator().manual_seed(5)
    replayed = []
    for row in rows[:-1]:
        shape = (row.token_ids.numel(), MOE_LAYERS[name])
        experts = torch.rand(*shape, 8, generator=generator).argsort(-1)[..., : TOPK[name]].to(torch.int16)
        experts[-1], experts[2] = NATIVE_EXPERT, NATIVE_EXPERT
        replayed.append(replace(row, experts=experts))
    return [*replayed, rows[-1]]


ROWS = make_rows(5)
TOTAL_TOKENS = sum(row.num_loss_tokens for row in ROWS)


class Outcome(NamedTuple):
    native: dict[int, Tensor]
    logprobs: dict[int, Tensor]
    experts: dict[int, Tensor]
    grad_norm: float
    mismatch: float


def _run(name: str, layout: ParallelLayout, rows: list[TokenRow], options: MegatronOptions) -> dict[str, Any]:
    policy = bring_up(CONFIGS[name], layout, options=options)
    indices, mine = shard_rows(rows, layout)
    native = policy.runner.score([replace(row, experts=None) for row in mine], record_experts=True)
    scores = policy.runner.score(mine, record_experts=True)
    result = policy.runner.update(mine, lambda i, s: toy_loss(i, TOTAL_TOKENS, s))
    sums = result.metric_sums
    again = policy.runner.score([replace(row, experts=s.experts) for row, s in zip(mine, native, strict=True)])
    assert all(torch.isfinite(s.logprobs).all() for s in again)
    return {
        "rows": [(i, n.experts, s.logprobs, s.experts) for i, n, s in zip(indices, native, scores, strict=True)],
        "grad_norm": result.grad_norm,
        "mismatch": sums["routed:moe/routing_mismatch"] / sums["count:routed"],
    }


def outcome(name: str, world_size: int, layout: ParallelLayout, **options: Any) -> Outcome:
    ranks = run_world(world_size, _run, name, layout, with_experts(ROWS, name), MegatronOptions(**options))
    native, logprobs, experts = {}, {}, {}
    for rank in ranks:
        for index, own, values, chosen in rank["rows"]:
            for seen, new in ((native, own), (experts, chosen)):
                assert index not in seen or torch.equal(seen[index], new), "peers see the same experts"
                seen[index] = new
            logprobs[index] = values
    assert len({rank["mismatch"] for rank in ranks}) == 1
    return Outcome(native, logprobs, experts, ranks[0]["grad_norm"], ranks[0]["mismatch"])


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    return {name: outcome(name, 1, ParallelLayout()) for name in MOE_LAYERS}


@pytest.mark.parametrize("name", MOE_LAYERS)
def test_tokens_go_where_the_record_says_and_elsewhere_where_the_router_says(
    reference: dict[str, Outcome], name: str
) -> None:
    got = reference[name]
    for index, row in enumerate(with_experts(ROWS, name)):
        if row.experts is None:
            assert torch.equal(got.experts[index], got.native[index])
            continue
        replayed = row.experts[..., :1] != NATIVE_EXPERT
        assert torch.equal(torch.where(replayed, got.experts[index], NATIVE_EXPERT), row.experts)
        own = got.experts[index][~replayed.expand_as(row.experts)]
        assert (own >= 0).all()
        first_layer = got.experts[index][2, 0]  # before it nothing was replayed, so token 2 chooses as it always does
        assert torch.equal(first_layer.sort().values, got.native[index][2, 0].sort().values)


def test_mismatch_is_what_two_random_choices_of_2_out_of_8_differ_by(reference: dict[str, Outcome]) -> None:
    assert reference["qwen3_moe"].mismatch == pytest.approx(1 - 2 / 8, abs=0.1)
    assert reference["deepseek_v3"].mismatch == pytest.approx(1 - 4 / 8, abs=0.1)


CASES = {
    "ep2": ("deepseek_v3", ParallelLayout(ep=2), {}),
    "tp2": ("qwen3_moe", ParallelLayout(tp=2, etp=2), {}),
    "tp2_ep2": ("deepseek_v3", ParallelLayout(tp=2, ep=2), {}),
    "cp2": ("qwen3_moe", ParallelLayout(cp=2), {}),
    "pp2": ("deepseek_v3", ParallelLayout(pp=2), {"max_tokens_per_microbatch": 24}),
    "pp2_vpp2": ("qwen3_moe", ParallelLayout(pp=2, vpp=2), {"max_tokens_per_microbatch": 24, "recompute": "full"}),
    "ep2_recompute": ("qwen3_moe", ParallelLayout(ep=2), {"max_tokens_per_microbatch": 24, "recompute": "full"}),
    "pp2_recompute": ("deepseek_v3", ParallelLayout(pp=2), {"max_tokens_per_microbatch": 24, "recompute": "full"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_replays_the_same(reference: dict[str, Outcome], case: str) -> None:
    name, layout, options = CASES[case]
    got, expected = outcome(name, 2, layout, **options), reference[name]
    for index in range(len(ROWS)):
        assert torch.equal(got.experts[index].sort(-1).values, expected.experts[index].sort(-1).values)
        torch.testing.assert_close(got.logprobs[index], expected.logprobs[index], rtol=1e-5, atol=1e-5)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert got.mismatch == pytest.approx(expected.mismatch, abs=1e-9)


def _replays_itself(name: str) -> float:
    policy = bring_up(CONFIGS[name], ParallelLayout())
    native = policy.runner.score(ROWS, record_experts=True)
    rows = [replace(row, experts=s.experts) for row, s in zip(ROWS, native, strict=True)]
    again = policy.runner.score(rows)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(native, again, strict=True))
    result = policy.runner.update(rows, lambda i, s: toy_loss(i, TOTAL_TOKENS, s))
    return result.metric_sums["routed:moe/routing_mismatch"]


def test_replaying_its_own_choice_changes_nothing() -> None:
    assert run_world(1, _replays_itself, "deepseek_v3") == [0.0]


def _refusal(name: str, rows: list[TokenRow], record_experts: bool) -> str:
    with pytest.raises(ValueError) as error:
        bring_up(CONFIGS[name], ParallelLayout()).runner.score(rows, record_experts=record_experts)
    return str(error.value)


def test_experts_of_another_model_are_refused() -> None:
    wrong = replace(ROWS[0], experts=torch.zeros(ROWS[0].token_ids.numel(), 3, 2, dtype=torch.int16))
    message = run_world(1, _refusal, "qwen3_moe", [wrong], False)[0]
    assert "(3, 2)" in message
    assert "(4, 2)" in message


def test_a_dense_model_has_no_experts_to_record() -> None:
    assert "no routers" in run_world(1, _refusal, "llama", ROWS, True)[0]


# -- the hook alone -------------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)


def routed(hook: LayerReplay, **options: Any) -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    gates, _ = topk_routing_with_score_function(logits, 2, router_replay=hook, **options)
    return gates, torch.autograd.grad(gates[0, 3], logits)[0]


def test_softmax_gates_are_live_scores_of_the_replayed_experts() -> None:
    hook = LayerReplay(0)
    hook.begin(torch.tensor([[3, 1], [NATIVE_EXPERT] * 2]), keep_for_recompute=False)
    gates, gradient = routed(hook)
    first = torch.tensor([0.0, 2.0]).double().softmax(0)  # experts 3 and 1 of token 0
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[0, 3], expected[0, 1] = first
    expected[1, 3], expected[1, 2] = torch.tensor([3.0, 2.0]).double().softmax(0)  # token 1 chooses itself
    torch.testing.assert_close(gates, expected, rtol=0, atol=1e-7)
    slope = float(first[0] * first[1])
    torch.testing.assert_close(gradient[0], torch.tensor([0, -slope, 0, slope]).double(), rtol=0, atol=1e-7)
    assert hook.mismatch.tolist() == [0.5, 1.0], "of experts 3 and 1, token 0 would have chosen 1 itself"


def test_sigmoid_gates_are_normalised_over_the_replayed_experts_and_ignore_the_bias() -> None:
    hook = LayerReplay(0)
    hook.begin(torch.tensor([[3, 1], [0, 1]]), keep_for_recompute=False)
    bias = torch.tensor([5.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    gates, _ = routed(hook, score_function="sigmoid", expert_bias=bias, scaling_factor=2.5)
    scores = torch.tensor([0.0, 2.0]).double().sigmoid()
    assert gates[0, 3].item() == pytest.approx(2.5 * float(scores[0] / scores.sum()), abs=1e-6)


def test_a_router_that_does_not_ask_is_an_error_and_not_another_model() -> None:
    hook = LayerReplay(3)
    hook.begin(torch.tensor([[3, 1], [0, 1]]), keep_for_recompute=False)
    topk_routing_with_score_function(LOGITS.clone(), 2)  # as a patched router would
    with pytest.raises(RuntimeError, match="router of MoE layer 3 does not ask"):
        hook.end()


def test_recomputation_replays_micro_batches_in_order() -> None:
    hook = LayerReplay(0)
    wanted = [torch.tensor([[3, 1], [0, 1]]), torch.tensor([[0, 1], [2, 0]])]
    for experts in wanted:
        hook.begin(experts, keep_for_recompute=True)
        routed(hook)
        hook.end()
    counted = hook.mismatch.clone()
    for experts in wanted:
        gates, _ = topk_routing_with_score_function(LOGITS.clone(), 2, router_replay=hook)
        assert torch.equal((gates > 0).nonzero()[:, 1].view(2, 2), experts.sort(-1).values)
    assert torch.equal(hook.mismatch, counted), "recomputation is not counted again"
