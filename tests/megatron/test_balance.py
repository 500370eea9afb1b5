"""Auxiliary loss and router bias: against formulas written out by hand, on every layout, on packed rows of any length."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.balance import router_biases, routers_of, with_router_biases
from rlite.megatron.checkpoint import load_sharded, save_sharded
from rlite.megatron.config import model_config
from rlite.megatron.forward import forward_hidden, token_scores
from rlite.megatron.groups import build_process_groups
from rlite.megatron.microbatch import make_microbatch, pack_rows, spread_rows
from rlite.megatron.model import build_policy, unwrap
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.types import LossOutput
from tests.helpers.world import run_world
from tests.megatron.tiny import (
    CONFIGS,
    assemble,
    bring_up,
    canonical_parts,
    keep_whole_gradients,
    local_gradients,
    make_rows,
    shard_rows,
    toy_loss,
)

ROWS = make_rows(6)
TOTAL_TOKENS = sum(row.num_loss_tokens for row in ROWS)
LENGTHS = [row.token_ids.numel() for row in ROWS]
COEFF, RATE = 0.5, 0.125
PER_SEQUENCE = MegatronOptions(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=COEFF)
PER_MICROBATCH = MegatronOptions(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=COEFF)
Gradients = dict[str, Tensor]


def balance_by_hand(logits_TE: Tensor, topk: int, *, sigmoid: bool) -> Tensor:
    """E * sum over experts of (share of the choices) * (mean score), one expert after the other."""
    num_tokens, num_experts = logits_TE.shape
    scores = logits_TE.sigmoid() / logits_TE.sigmoid().sum(1, keepdim=True) if sigmoid else logits_TE.softmax(1)
    chosen = scores.argsort(dim=1, descending=True)[:, :topk]
    parts = [(chosen == e).sum() / (topk * num_tokens) * scores[:, e].sum() / num_tokens for e in range(num_experts)]
    return num_experts * torch.stack(parts).sum()


def _by_hand(config: dict, microbatches: Sequence[Sequence[int]], kind: str) -> tuple[list, float]:
    """Gradients and mean over layers of the loss, from plain autograd through a model without data-parallel wrapper."""
    layout = ParallelLayout()
    build_process_groups(layout)
    chunk = build_policy(config, layout)[0]
    routers, logits = routers_of(chunk), {}
    for layer, router in enumerate(routers):
        gating = router.gating

        def recorded(hidden: Tensor, gating: Any = gating, layer: int = layer) -> Tensor:
            logits[layer] = gating(hidden)
            return logits[layer]

        router.gating = recorded
    total, balance = torch.zeros(()), torch.zeros(())
    for indices in microbatches:
        batch = make_microbatch(ROWS, indices, device=torch.device("cpu"))
        scores = token_scores(chunk, forward_hidden(chunk, batch), batch, temperature=1.0, chunk_tokens=1024)
        total = total + toy_loss(indices, TOTAL_TOKENS, scores).loss
        pieces = [LENGTHS[i] for i in indices] if kind == "seq_aux_loss" else [sum(LENGTHS[i] for i in indices)]
        for layer, router in enumerate(routers):
            for piece in logits[layer].flatten(0, 1).split(pieces):
                weight = 1 / len(ROWS) if kind == "seq_aux_loss" else len(piece) / sum(LENGTHS)
                sigmoid = router.score_function == "sigmoid"
                balance = balance + weight * balance_by_hand(piece, router.topk, sigmoid=sigmoid)
    (total + COEFF * balance).backward()
    gradients = {f"0.{name}": parameter.grad for name, parameter in chunk.named_parameters()}
    return canonical_parts(config, layout, gradients), float(balance) / len(routers)


def _of_runner(config: dict, layout: ParallelLayout, options: MegatronOptions) -> tuple[list, float]:
    policy = bring_up(config, layout, options=options, optimizer=OptimizerConfig(lr=0.0))
    keep_whole_gradients(policy)
    mine = shard_rows(ROWS, layout)[1]
    policy.runner.score(mine)  # adds nothing
    gradients: list = []

    def step() -> None:
        gradients.extend(canonical_parts(config, layout, local_gradients(policy)))
        policy.runner.optimizer.step()

    result = policy.runner.update(mine, lambda i, s: toy_loss(i, TOTAL_TOKENS, s), step=step)
    sums = result.metric_sums
    return gradients, sums["balanced:moe/aux_loss"] / sums["count:balanced"]


def assert_gradients(per_rank: list, expected: list) -> None:
    actual, wanted = assemble([gradients for gradients, _ in per_rank]), assemble([expected[0][0]])
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        difference = (actual[name] - gradient).abs().max()
        assert difference <= 1e-5 * gradient.abs().max(), f"{name}: gradient differs by {difference}"
    assert [value for _, value in per_rank] == pytest.approx([expected[0][1]] * len(per_rank), rel=1e-5)


@pytest.fixture(scope="module")
def by_hand() -> Any:
    known: dict[Any, list] = {}

    def of(name: str, kind: str, microbatches: Sequence[Sequence[int]]) -> list:
        key = (name, kind, str(microbatches))
        if key not in known:
            known[key] = run_world(1, _by_hand, CONFIGS[name], microbatches, kind)
        return known[key]

    return of


SMALL = {"max_tokens_per_microbatch": 2 * max(LENGTHS)}
SEQUENCES = {
    "one_process": ("qwen3_moe", 1, ParallelLayout(), {}),
    "small_micro_batches": ("deepseek_v3", 1, ParallelLayout(), SMALL),
    "recompute_full": ("deepseek_v3", 1, ParallelLayout(), SMALL | {"recompute": "full"}),
    "recompute_moe": (
        "deepseek_v3",
        1,
        ParallelLayout(),
        SMALL | {"recompute": "selective", "recompute_modules": ("moe", "mlp", "core_attn")},
    ),
    "ep2": ("qwen3_moe", 2, ParallelLayout(ep=2), SMALL),
    "tp2_ep2": ("deepseek_v3", 2, ParallelLayout(tp=2, ep=2), {}),
    "cp2": ("qwen3_moe", 2, ParallelLayout(cp=2), {}),
    "pp2_vpp2": ("deepseek_v3", 2, ParallelLayout(pp=2, vpp=2), SMALL),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_the_loss_of_sequences_does_not_depend_on_micro_batches_or_layout(by_hand: Any, case: str) -> None:
    name, world_size, layout, settings = SEQUENCES[case]
    per_rank = run_world(world_size, _of_runner, CONFIGS[name], layout, replace(PER_SEQUENCE, **settings))
    assert_gradients(per_rank, by_hand(name, "seq_aux_loss", [[i] for i in range(len(ROWS))]))


def test_the_loss_of_micro_batches_weighs_them_by_their_tokens(by_hand: Any) -> None:
    budget = SMALL["max_tokens_per_microbatch"]
    microbatches = spread_rows(LENGTHS, count=len(pack_rows(LENGTHS, max_tokens=budget)), max_tokens=budget)
    assert len(microbatches) > 1
    per_rank = run_world(1, _of_runner, CONFIGS["qwen3_moe"], ParallelLayout(), replace(PER_MICROBATCH, **SMALL))
    assert_gradients(per_rank, by_hand("qwen3_moe", "aux_loss", microbatches))
    # Tensor parallelism: the same micro-batch cut over ranks, with padding that must not count.
    per_rank = run_world(2, _of_runner, CONFIGS["qwen3_moe"], ParallelLayout(tp=2, ep=2), PER_MICROBATCH)
    assert_gradients(per_rank, by_hand("qwen3_moe", "aux_loss", [range(len(ROWS))]))


def test_balanced_experts_have_a_loss_of_one() -> None:
    logits_TE = 9.0 * torch.eye(4)  # each token chooses another expert
    assert float(balance_by_hand(logits_TE, 1, sigmoid=False)) == pytest.approx(1.0)
    assert float(balance_by_hand(logits_TE[:1].expand(4, 4), 1, sigmoid=False)) > 3.9


def _biases(layout: ParallelLayout, folder: str) -> dict[str, Any]:
    """A step of learning rate 0 that is skipped, then one that is not; then a checkpoint."""
    options = MegatronOptions(moe_router_bias_update_rate=RATE, max_tokens_per_microbatch=2 * max(LENGTHS))
    policy = bring_up(CONFIGS["deepseek_v3"], layout, options=options, optimizer=OptimizerConfig(lr=0.0))
    mine, biases = shard_rows(ROWS, layout)[1], router_biases(policy.chunks)
    chosen = [scores.experts for scores in policy.runner.score(mine, record_experts=True)]
    skipped = policy.runner.update(mine, lambda i, s: LossOutput(loss=s.logprobs.sum() * math.inf))
    still = all(bool((bias == 0).all()) for bias in biases)
    before = policy.runner.score(mine)
    policy.runner.update(mine, lambda i, s: toy_loss(i, TOTAL_TOKENS, s))
    moved = [bias.clone() for bias in biases]
    after = policy.runner.score(mine)
    save_sharded(folder, policy.chunks, policy.runner.optimizer)
    with with_router_biases(policy.chunks, [torch.zeros_like(bias) for bias in biases]):
        old = policy.runner.score(mine)
    restored_after_block = all(torch.equal(a, b) for a, b in zip(biases, moved, strict=True))
    for bias in biases:
        bias.fill_(7.0)
    load_sharded(folder, policy.chunks, policy.runner.optimizer)
    return {
        "chosen": chosen if policy.layout.coordinates(dist.get_rank(), dist.get_world_size()).tp == 0 else [],
        "biases": moved,
        "layers": [router.layer_number for chunk in policy.chunks for router in routers_of(unwrap(chunk))],
        "skipped": not skipped.applied and still,
        "effect": any(not torch.equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True)),
        "swapped": all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(before, old, strict=True)),
        "kept": restored_after_block and all(torch.equal(a, b) for a, b in zip(biases, moved, strict=True)),
    }


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, ParallelLayout()), (2, ParallelLayout(ep=2)), (2, ParallelLayout(tp=2, ep=2)), (2, ParallelLayout(pp=2))],
)
def test_the_bias_moves_against_the_load_of_all_ranks(world_size: int, layout: ParallelLayout, tmp_path: Path) -> None:
    per_rank = run_world(world_size, _biases, layout, str(tmp_path / "saved"))
    chosen = [experts for rank in per_rank[: 1 if layout.pp > 1 else None] for experts in rank["chosen"]]
    assert sum(len(experts) for experts in chosen) == sum(LENGTHS)
    seen = set()
    for rank in per_rank:
        assert rank["skipped"], "a skipped step moved the bias"
        assert rank["effect"] and rank["swapped"] and rank["kept"]
        for layer, bias in zip(rank["layers"], rank["biases"], strict=True):
            experts = torch.cat([row[:, layer - 2].flatten() for row in chosen])  # layer 1 is dense
            load = torch.bincount(experts.long(), minlength=8)
            assert bias.tolist() == [
                RATE * math.copysign(1, load.sum() / 8 - n) * bool(load.sum() / 8 != n) for n in load
            ]
            seen.add(layer)
    assert seen == {2, 3, 4}


def _nothing_to_do() -> tuple[bool, set[str]]:
    policy = bring_up(CONFIGS["qwen3_moe"], ParallelLayout())
    sums = policy.runner.update(ROWS, lambda i, s: toy_loss(i, TOTAL_TOKENS, s)).metric_sums
    hooked = any("routing" in vars(router) for router in routers_of(policy.chunks[0]))
    return hooked, {key for key in sums if "moe" in key}


def test_by_default_routers_are_left_alone() -> None:
    assert run_world(1, _nothing_to_do) == [(False, set())]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", PER_SEQUENCE, "moe_router_load_balancing_type = seq_aux_loss: llama has no experts"),
        ("qwen3_moe", MegatronOptions(moe_router_bias_update_rate=1e-3), "qwen3_moe has no router bias"),
        ("llama", MegatronOptions(recompute="selective", recompute_modules=("moe",)), "llama has no moe"),
        (
            "qwen3",
            MegatronOptions(recompute="selective", recompute_modules=("mla_up_proj",)),
            "qwen3 has no mla_up_proj",
        ),
        ("deepseek_v3", MegatronOptions(recompute="selective", recompute_modules=("layernorm",)), "needs Transformer"),
        ("llama", MegatronOptions(gradient_accumulation_fusion=True), "needs CUDA and Transformer Engine"),
    ],
)
def test_options_that_mean_nothing_are_refused(name: str, options: MegatronOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(CONFIGS[name], ParallelLayout(), options=options)


@pytest.mark.parametrize(
    "settings",
    [{"moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "aux_loss"}, {"moe_aux_loss_coeff": -1.0}],
)
def test_half_an_auxiliary_loss_is_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="moe_aux_loss_coeff"):
        MegatronOptions(**settings)
