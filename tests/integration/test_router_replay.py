"""Router replay in whole runs: the trainer sends tokens where the engine sent them, whatever the two layouts."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlite.callbacks import VLLMRollout
from rlite.types import NATIVE_EXPERT
from tests.integration.runs import logger, metrics, rlite

COMMON = (
    "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=4",
    "--model.init_from=null", "--model.optimizer.lr=0", "--trainer.limit_train_batches=1",
    "--trainer.enable_checkpointing=false",
    "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 16, cache_tokens: 16}}]",
)  # fmt: skip
TRAIN_EP2 = "--trainer.strategy.init_args.layout={ep: 2}"
TRAIN_TP2 = "--trainer.strategy.init_args.layout={tp: 2, etp: 2, ep: 1}"


def run(folder: Path, replay: str, *overrides: str, dtype: str = "bfloat16", updates: int = 1) -> dict[str, float]:
    """One rollout step with an engine that computes in `dtype`, against a trainer in float32."""
    callbacks = (
        f"--trainer.callbacks=[{{class_path: rlite.callbacks.VLLMRollout, init_args: {{engine: {{tp: 2, dtype: {dtype}, "
        "enable_prefix_caching: false, max_model_len: 32, kv_cache_memory_bytes: 33554432}, sampling: {max_tokens: 16}, "
        "logprob_tolerance: 5.0}}, {class_path: rlite.callbacks.EP2TPConversion}]"
    )
    algorithm = f"--model.algorithm={{preset: grpo, router_replay: {replay}}}"
    batch = f"--model.batch.minibatches={updates}"
    rlite(*COMMON, callbacks, algorithm, batch, logger(folder), *overrides)
    return metrics(folder)[0]


def check_experts_used(runner: Any) -> None:
    """Makes the runner compare, after each update, what its routers chose with what its rows asked for."""
    update = runner.update

    def checked(rows, loss_fn, **kwargs):
        result = update(rows, loss_fn, **kwargs)
        used = runner.score(rows, record_experts=True)
        for row, scores in zip(rows, used, strict=True):
            assert row.experts is not None
            replayed = row.experts[..., :1] != NATIVE_EXPERT
            assert int(replayed[..., 0].sum()) == replayed[..., 0].numel() - replayed.size(1), "all but the last token"
            assert torch.equal(torch.where(replayed, scores.experts, NATIVE_EXPERT), row.experts)
        Path(os.environ["CHECKED"]).touch()
        return result

    runner.update = checked


class CheckedRollout(VLLMRollout):
    """Installs `check_experts_used` in the trainer."""

    def on_train_start(self, trainer, pl_module) -> None:
        check_experts_used(trainer.strategy.policy.runner)


@pytest.mark.parametrize("layout", [TRAIN_EP2, TRAIN_TP2], ids=["ep2", "tp2"])
def test_trainer_and_engine_choose_the_same_experts_for_every_replayed_token(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKED", str(tmp_path / "checked"))
    callbacks = (
        "--trainer.callbacks=[{class_path: tests.integration.test_router_replay.CheckedRollout, init_args: {engine: "
        "{tp: 2, dtype: bfloat16, enable_prefix_caching: false, max_model_len: 32, kv_cache_memory_bytes: 33554432}, "
        "sampling: {max_tokens: 16}, logprob_tolerance: 5.0}}, {class_path: rlite.callbacks.EP2TPConversion}]"
    )
    row = run(tmp_path / "run", "R3", layout, callbacks)
    assert (tmp_path / "checked").exists()
    assert 0 < row["moe/routing_mismatch"] < 0.3, "routers in bf16 and fp32 differ now and then"


@pytest.mark.slow
def test_replay_brings_trainer_and_engine_closer(tmp_path: Path) -> None:
    without = run(tmp_path / "none", "none", "--data.batch_size=16")
    replayed = run(tmp_path / "R3", "R3", "--data.batch_size=16")
    assert "moe/routing_mismatch" not in without
    assert replayed["reward/mean"] == without["reward/mean"], "the same completions"
    assert replayed["rollout/kl_k3"] < without["rollout/kl_k3"]
    assert replayed["rollout/logprob_diff_max"] < without["rollout/logprob_diff_max"]


def test_an_engine_in_the_trainers_dtype_has_no_mismatch(tmp_path: Path) -> None:
    row = run(tmp_path / "run", "R3", dtype="float32")
    assert row["moe/routing_mismatch"] == 0
    assert row["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.slow
def test_r2_replays_the_trainers_own_choice_while_it_moves(tmp_path: Path) -> None:
    still = run(tmp_path / "still", "R2", dtype="float32", updates=2)
    moving = run(tmp_path / "moving", "R2", "--model.optimizer.lr=0.02", dtype="float32", updates=2)
    assert still["moe/routing_mismatch"] == 0
    assert 0 < moving["moe/routing_mismatch"] < 0.5


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="router_replay = R2 has no effect with one update"):
        run(tmp_path / "one", "R2")
    with pytest.raises(AssertionError, match=r"R3 needs engine\.enable_prefix_caching = false"):
        rlite(*COMMON, "--model.algorithm={preset: grpo, router_replay: R3}", logger(tmp_path / "cached"))
