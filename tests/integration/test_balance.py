"""Balance of experts in a whole run: what moves is the router's bias alone, and engine, reference and log know it."""

from pathlib import Path

import pytest

from tests.integration.runs import logger, metrics, rlite


def test_a_moving_bias_reaches_the_engine_but_not_the_reference(tmp_path: Path) -> None:
    """Learning rate 0: after the first update the policy differs from its reference by the bias only."""
    rlite(
        "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=4",
        "--model.init_from=null", "--model.optimizer.lr=0", "--trainer.limit_train_batches=2",
        "--trainer.enable_checkpointing=false", "--model.algorithm={preset: grpo, kl_coef: 0.1}",
        "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]",
        "--trainer.strategy.init_args.megatron={moe_router_load_balancing_type: seq_aux_loss, moe_aux_loss_coeff: 0.01, "
        "moe_router_bias_update_rate: 0.2}",
        logger(tmp_path / "run"),
    )  # fmt: skip
    first, second = metrics(tmp_path / "run")
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl"] > 1e-6
    for row in (first, second):
        assert 0 < row["rollout/logprob_diff_max"] <= 1e-4
        assert 0.9 < row["moe/aux_loss"] <= 4, "1 is balance, 8 / 2 all tokens on the same experts"
