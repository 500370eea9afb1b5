"""What an update sums, skips and tells; with ragged and missing rows."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.model import named_local_tensors
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.types import LossOutput, TokenScores, UpdateResult
from tests.helpers.world import run_world
from tests.megatron.tiny import CONFIGS, bring_up, make_rows, shard_rows, toy_loss

EP2 = ParallelLayout(ep=2)
SMALL = MegatronOptions(max_tokens_per_microbatch=20)


def _only_first_rank_has_rows() -> tuple[UpdateResult, list[int]]:
    policy = bring_up(CONFIGS["qwen3_moe"], EP2, options=SMALL)
    rows = make_rows(5) if dist.get_rank() == 0 else []
    total = sum(row.num_loss_tokens for row in make_rows(5))
    calls: list[int] = []

    def loss_fn(indices: Any, scores: TokenScores) -> LossOutput:
        calls.append(len(indices))
        return toy_loss(indices, total, scores)

    assert len(policy.runner.score(rows)) == len(rows)
    return policy.runner.update(rows, loss_fn), calls


def _all_rows_on_one_process() -> UpdateResult:
    policy = bring_up(CONFIGS["qwen3_moe"], ParallelLayout())
    rows = make_rows(5)
    total = sum(row.num_loss_tokens for row in rows)
    return policy.runner.update(rows, lambda i, s: toy_loss(i, total, s))


def test_a_rank_without_rows_takes_part_with_zero_weight() -> None:
    (result, calls), (other, empty_calls) = run_world(2, _only_first_rank_has_rows)
    expected = run_world(1, _all_rows_on_one_process)[0]
    assert result == other
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert result.metric_sums == pytest.approx(expected.metric_sums, rel=1e-5)
    assert sum(calls) == 5 and set(empty_calls) == {0}


def _non_finite(what: str, layout: ParallelLayout) -> tuple[UpdateResult, bool, UpdateResult]:
    policy = bring_up(CONFIGS["qwen3_moe"], layout, options=SMALL)
    mine = shard_rows(make_rows(6), layout)[1]
    before = {name: tensor.clone() for name, tensor in named_local_tensors(policy.chunks).items()}
    bad_rank = dist.get_world_size() - 1

    def loss_fn(indices: Any, scores: TokenScores) -> LossOutput:
        output = toy_loss(indices, 40, scores)
        if dist.get_rank() != bad_rank:
            return output
        if what == "loss":
            return LossOutput(loss=output.loss * math.inf, metric_sums=output.metric_sums)
        poison = scores.logprobs.sum() * 0.0
        poison.register_hook(lambda gradient: gradient * math.nan)
        return LossOutput(loss=output.loss + poison, metric_sums=output.metric_sums)

    skipped = policy.runner.update(mine, loss_fn)
    after = named_local_tensors(policy.chunks)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return skipped, unchanged, policy.runner.update(mine, lambda i, s: toy_loss(i, 40, s))


@pytest.mark.parametrize("layout", [EP2, ParallelLayout(pp=2)])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_non_finite_loss_or_gradient_on_one_rank_skips_the_step_on_all(what: str, layout: ParallelLayout) -> None:
    for skipped, unchanged, next_result in run_world(2, _non_finite, what, layout):
        assert not skipped.applied and math.isnan(skipped.grad_norm)
        assert unchanged, "weights moved although the step was skipped"
        assert next_result.applied and math.isfinite(next_result.grad_norm)


def _loss_scale(factor: float) -> float:
    policy = bring_up(CONFIGS["llama"], ParallelLayout(), options=SMALL)
    rows = make_rows(6)

    def loss_fn(indices: Any, scores: TokenScores) -> LossOutput:
        return LossOutput(loss=-factor * scores.logprobs.sum())

    return policy.runner.update(rows, loss_fn).grad_norm


def test_partial_losses_are_summed_never_averaged() -> None:
    """Six rows in several micro-batches: the norm is that of the plain sum, by autograd on one sequence at a time."""
    norm = run_world(1, _loss_scale, 1.0)[0]
    assert norm == pytest.approx(run_world(1, _norm_by_autograd)[0], rel=1e-5)
    assert run_world(1, _loss_scale, 0.5)[0] == pytest.approx(0.5 * norm, rel=1e-5)


def _norm_by_autograd() -> float:
    from rlite.megatron.forward import forward_hidden
    from rlite.megatron.groups import build_process_groups
    from rlite.megatron.microbatch import make_microbatch
    from rlite.megatron.model import build_policy

    layout = ParallelLayout()
    build_process_groups(layout)
    chunk = build_policy(CONFIGS["llama"], layout)[0]
    for row in make_rows(6):
        hidden = forward_hidden(chunk, make_microbatch([row], [0], device=torch.device("cpu")))[:, 0]
        logprobs = (hidden @ chunk.output_weight()[:97].t()).log_softmax(-1)
        trained = row.loss_mask.nonzero()[:, 0]
        (-logprobs[trained - 1].gather(-1, row.token_ids[trained, None]).sum()).backward()
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in chunk.parameters()))


def _other_keys() -> None:
    policy = bring_up(CONFIGS["llama"], ParallelLayout(), options=SMALL)

    def loss_fn(indices: Any, scores: TokenScores) -> LossOutput:
        return LossOutput(loss=scores.logprobs.sum(), metric_sums={f"key{indices[0]}": torch.tensor(1.0)})

    policy.runner.update(make_rows(6), loss_fn)


def test_metric_keys_that_change_are_refused() -> None:
    with pytest.raises(AssertionError, match="metric_sums has keys"):
        run_world(1, _other_keys)


def _clipped_step(clip_grad: float) -> tuple[float, float]:
    """(reported norm, largest weight change) of plain SGD-like first Adam step with a large epsilon."""
    config = OptimizerConfig(lr=1.0, eps=1e6, betas=(0.0, 0.0), clip_grad=clip_grad)
    policy = bring_up(CONFIGS["llama"], ParallelLayout(), optimizer=config)
    before = {name: tensor.clone() for name, tensor in named_local_tensors(policy.chunks).items()}
    result = policy.runner.update(make_rows(4), lambda i, s: toy_loss(i, 1, s))
    after = named_local_tensors(policy.chunks)
    change = math.sqrt(sum(float((after[n].double() - before[n].double()).square().sum()) for n in before))
    return result.grad_norm, change


def test_gradients_are_clipped_by_the_global_norm() -> None:
    norm, unclipped = run_world(1, _clipped_step, 0.0)[0]
    same_norm, clipped = run_world(1, _clipped_step, norm / 4)[0]
    assert same_norm == pytest.approx(norm, rel=1e-6), "the norm is reported before clipping"
    assert clipped == pytest.approx(unclipped / 4, rel=0.05)


def _rows_with_nothing_to_train() -> tuple[list[int], UpdateResult]:
    policy = bring_up(CONFIGS["llama"], ParallelLayout())
    rows = make_rows(3)
    rows[1].loss_mask.zero_()
    lengths = [scores.logprobs.numel() for scores in policy.runner.score(rows)]
    return lengths, policy.runner.update(rows, lambda i, s: toy_loss(i, 10, s))


def test_a_row_without_trained_tokens_gives_empty_scores() -> None:
    lengths, result = run_world(1, _rows_with_nothing_to_train)[0]
    rows = make_rows(3)
    assert lengths == [rows[0].num_loss_tokens, 0, rows[2].num_loss_tokens]
    assert result.applied
