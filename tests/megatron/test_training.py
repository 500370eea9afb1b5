"""Longer behaviour: the policy learns, in fp32 and bf16, and a plain copy of it scores the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.groups import build_process_groups
from rlite.megatron.model import build_policy, named_local_tensors
from rlite.megatron.optimizer import LrScheduler
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.megatron.runner import PolicyRunner
from rlite.types import LossOutput, TokenRow, TokenScores
from tests.helpers.world import run_world
from tests.megatron.tiny import CONFIGS, bring_up, make_rows, shard_rows

EP2 = ParallelLayout(ep=2)


def _learn(dtype: torch.dtype, grad_reduce_in_fp32: bool) -> tuple[float, float, list[float]]:
    optimizer, options = (
        OptimizerConfig(lr=1e-2, warmup_steps=2),
        MegatronOptions(grad_reduce_in_fp32=grad_reduce_in_fp32),
    )
    policy = bring_up(CONFIGS["deepseek_v3"], EP2, options=options, optimizer=optimizer, dtype=dtype)
    scheduler = LrScheduler(policy.runner.optimizer)
    rows = make_rows(6)
    total = sum(row.num_loss_tokens for row in rows)
    mine = shard_rows(rows, EP2)[1]

    def loss_fn(indices: Sequence[int], scores: TokenScores) -> LossOutput:
        loss = -scores.logprobs.sum() / total
        return LossOutput(loss=loss, metric_sums={"loss": loss.detach()})

    losses, rates = [], []
    for _ in range(25):
        rates.append(scheduler.get_last_lr()[0])
        losses.append(policy.runner.update(mine, loss_fn).metric_sums["loss"])
        scheduler.step()
    return losses[0], losses[-1], rates[:3]


@pytest.mark.parametrize(
    ("dtype", "grad_reduce_in_fp32"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_the_policy_learns_its_rows(dtype: torch.dtype, grad_reduce_in_fp32: bool) -> None:
    first, last, rates = run_world(2, _learn, dtype, grad_reduce_in_fp32)[0]
    assert 4 < first < 7, "a random model is about log(97) = 4.6 off"
    assert last < 0.5
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2])


def _bf16_difference(rows: list[TokenRow]) -> list[torch.Tensor]:
    policy = bring_up(CONFIGS["qwen3_moe"], ParallelLayout(), dtype=torch.bfloat16)
    return [scores.logprobs for scores in policy.runner.score(rows)]


def _unwrapped(rows: list[TokenRow], seed: int) -> list[torch.Tensor]:
    layout = ParallelLayout()
    build_process_groups(layout)
    chunks = build_policy(CONFIGS["qwen3_moe"], layout, options=MegatronOptions(seed=seed))
    return [scores.logprobs for scores in PolicyRunner(chunks, layout).score(rows)]


def test_a_model_that_is_only_scored_needs_no_wrapper_and_bf16_is_close() -> None:
    rows = make_rows(4)
    reference, other_seed = (torch.cat(run_world(1, _unwrapped, rows, seed)[0]) for seed in (0, 1))
    in_bf16 = torch.cat(run_world(1, _bf16_difference, rows)[0])
    assert in_bf16.dtype == torch.float32
    assert (in_bf16 - reference).abs().max() < 0.1 < (other_seed - reference).abs().max()


def _reload() -> bool:
    """Writes weights into a wrapped bf16 model; without a reload the next step would bring the old ones back."""
    policy = bring_up(CONFIGS["llama"], ParallelLayout(), optimizer=OptimizerConfig(lr=0.0), dtype=torch.bfloat16)
    for tensor in named_local_tensors(policy.chunks).values():
        tensor.fill_(0.25)
    policy.runner.optimizer.reload_model_params()
    policy.runner.update(make_rows(2), lambda i, s: LossOutput(loss=s.logprobs.sum()))
    return all(bool((tensor == 0.25).all()) for tensor in named_local_tensors(policy.chunks).values())


def test_weights_written_into_the_model_reach_the_main_weights() -> None:
    assert run_world(1, _reload) == [True]


def _refused_layout() -> str:
    try:
        build_process_groups(ParallelLayout(tp=2, etp=1))
    except ValueError as error:
        return str(error)
    return f"accepted on {dist.get_world_size()} ranks"


def test_etp_other_than_tp_without_expert_parallelism_is_refused() -> None:
    """Megatron-core would reduce expert gradients over the wrong ranks, silently."""
    assert "etp = 1 != tp = 2 with ep = 1" in run_world(2, _refused_layout)[0]


def test_options_are_readable_without_torch_or_megatron(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = "import sys, rlite.megatron.options; assert not {'megatron', 'vllm', 'megatron.core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=tmp_path)


def _rng_after_groups() -> bool:
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    build_process_groups(ParallelLayout())
    return torch.equal(torch.get_rng_state(), expected)


def test_building_groups_leaves_the_random_generator_alone() -> None:
    assert run_world(1, _rng_after_groups) == [True]


def _step_settings() -> list[tuple[bool, bool]]:
    optimizer = bring_up(CONFIGS["deepseek_v3"], ParallelLayout()).runner.optimizer
    return [(group["foreach"], group["fused"]) for part in optimizer.parts for group in part.optimizer.param_groups]


def test_adamw_never_holds_temporaries_of_all_weights_together() -> None:
    (settings,) = run_world(1, _step_settings)
    assert settings and set(settings) == {(False, False)}, "on a CPU; CUDA has a fused kernel"
