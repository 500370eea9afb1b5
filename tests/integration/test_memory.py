"""Memory in whole runs: what each phase holds, what was predicted, what grows, and what happens when it runs out."""

import re
from pathlib import Path

import pytest

from rlite.memory.phases import ENGINE, GRADIENTS, KV_CACHE, OPTIMIZER, POLICY, REFERENCE
from tests.integration.ledgers import TRACE, assert_plan_agrees, held
from tests.integration.runs import logger, metrics, rlite, samples

MIB = 2**20
BUDGET_GIB, RESERVE_GIB = 0.0625, 0.0078125
"""64 and 8 MiB."""
LENGTH = "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]"
COMMON = (
    "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=4",
    "--model.init_from=null", LENGTH,
)  # fmt: skip


def run(folder: Path, *overrides: str, rollouts: int = 2, timeout_s: float = 300) -> str:
    steps = f"--trainer.limit_train_batches={rollouts}"
    return rlite(*COMMON, steps, logger(folder), *overrides, timeout_s=timeout_s)


def callbacks(offload: str, *, kv_bytes: int = 32 * MIB, model_len: int = 32, tolerance: float = 1e-4) -> str:
    """The demo's callbacks with other settings of memory."""
    engine = f"{{tp: 2, dtype: float32, max_model_len: {model_len}, kv_cache_memory_bytes: {kv_bytes}}}"
    return (
        f"--trainer.callbacks=[{{class_path: rlite.callbacks.VLLMRollout, init_args: {{engine: {engine}, "
        f"sampling: {{max_tokens: 4}}, logprob_tolerance: {tolerance}}}}}, {{class_path: rlite.callbacks.EP2TPConversion}}, "
        f"{{class_path: rlite.callbacks.MemoryOffload, init_args: {offload}}}]"
    )


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a reference, under a device budget."""
    folder = tmp_path_factory.mktemp("budgeted") / "run"
    offload = f"{{device_budget_gib: {BUDGET_GIB}, reserve_gib: {RESERVE_GIB}}}"
    algorithm = "--model.algorithm={preset: grpo, kl_coef: 0.1}"
    run(folder, callbacks(offload), TRACE, algorithm, "--model.batch.minibatches=2")
    return folder


def test_generation_holds_no_byte_of_training_state_on_any_rank(budgeted: Path) -> None:
    by_phase = held(budgeted)
    for rank in (0, 1):
        generate = by_phase[rank, "generate"]
        assert {generate[name] for name in (POLICY, GRADIENTS, OPTIMIZER, REFERENCE)} == {0}
        assert all(by_phase[rank, "train"][name] > 0 for name in (POLICY, GRADIENTS, OPTIMIZER))
        assert by_phase[rank, "train"][ENGINE] == by_phase[rank, "train"][KV_CACHE] == 0


def test_the_engine_is_built_on_a_vacant_device(budgeted: Path) -> None:
    assert set(held(budgeted)[0, "vacant"].values()) == {0}


def test_the_kv_cache_takes_what_is_free_less_the_reserve(budgeted: Path) -> None:
    generate = held(budgeted)[0, "generate"]
    free = (BUDGET_GIB - RESERVE_GIB) * 2**30 - generate[ENGINE]
    assert 0.98 * free <= generate[KV_CACHE] <= free, "whole blocks"
    assert generate[KV_CACHE] > 32 * MIB, "more than was planned at the start"


def test_the_plan_sizes_the_kv_cache_by_the_budget_as_the_run_does(budgeted: Path) -> None:
    assert_plan_agrees(budgeted)


def test_the_host_holds_no_more_than_what_was_offloaded(budgeted: Path) -> None:
    by_phase = held(budgeted)
    state = max(
        by_phase[rank, "train"][POLICY] + by_phase[rank, "train"][OPTIMIZER] + by_phase[rank, "reference"][REFERENCE]
        for rank in (0, 1)
    )
    host = max(value for row in metrics(budgeted) for name, value in row.items() if name.endswith("/host_bytes"))
    assert state <= host <= 1.1 * state


def bf16_run(folder: Path, offload: str, layout: str) -> Path:
    """Two rollouts with a reference, own log-probabilities and two updates each."""
    algorithm = "--model.algorithm={preset: grpo, kl_coef: 0.1}"
    layout = f"--trainer.strategy.init_args.layout={layout}"
    precision = "--trainer.precision=bf16-mixed"
    settings = (callbacks(offload, tolerance=1.0), TRACE, algorithm, layout, precision, "--model.batch.minibatches=2")
    run(folder, *settings, "--model.optimizer.lr=1e-2")
    return folder


@pytest.mark.parametrize("layout", ["{ep: 2}", pytest.param("{ep: 1}", marks=pytest.mark.slow)])
def test_overlap_and_rebuilt_weights_change_no_bit_and_spare_the_host_the_weights(layout: str, tmp_path: Path) -> None:
    plain = bf16_run(tmp_path / "plain", "{overlap: false}", layout)
    both = bf16_run(tmp_path / "both", "{rebuild_weights: true}", layout)
    assert samples(plain) == samples(both)
    for before, after in zip(metrics(plain), metrics(both), strict=True):
        same = [name for name in before if not name.startswith(("timing_s/", "perf/"))]
        assert {name: before[name] for name in same} == {name: after[name] for name in same}
        weights = held(plain)[0, "train"][POLICY]
        spared = before["perf/phase/train/host_bytes"] - after["perf/phase/train/host_bytes"]
        assert spared == pytest.approx(weights, rel=0.01)
        assert after["perf/phase/train/hidden_s"] + after["perf/phase/train/waited_s"] > 0
        assert before["perf/phase/train/hidden_s"] == before["perf/phase/train/waited_s"] == 0
    assert_plan_agrees(both)
    shards = [sorted((folder / "checkpoints").glob("*.ckpt/sharded/*.distcp")) for folder in (plain, both)]
    assert shards[0] and [p.name for p in shards[0]] == [p.name for p in shards[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*shards, strict=True))


def test_growth_and_peaks_are_logged(budgeted: Path) -> None:
    first, second = metrics(budgeted)
    assert {"perf/leak/device_growth", "perf/leak/rss_growth", "perf/phase/train/rss_peak_bytes"} <= second.keys()
    assert first["perf/phase/vacant/seconds"] > 0 == second["perf/phase/vacant/seconds"], (
        "entered in the first step only"
    )


def test_too_small_a_budget_is_told_with_what_would_fit(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="The KV cache can have") as error:
        run(tmp_path / "run", callbacks("{device_budget_gib: 0.005, reserve_gib: 0.0}", model_len=256))
    message = str(error.value)
    assert "raise MemoryOffload.device_budget_gib to" in message and "lower engine.max_model_len to" in message
    assert "resident" in message and "engine_weights" in message


LAYOUTS = {"ep2": "{ep: 2}", "tp2": "{tp: 2, etp: 2, ep: 1}", "dp2": "{ep: 1}"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_dsv3", "tiny_qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_agrees_with_the_ledger(model: str, layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = (f"--trainer.strategy.init_args.layout={LAYOUTS[layout]}", f"--model.policy=configs/models/{model}")
    run(folder, *overrides, TRACE, "--model.batch.minibatches=2", "--trainer.enable_checkpointing=false")
    assert_plan_agrees(folder)


@pytest.mark.slow
def test_memory_does_not_grow_over_fifty_rollouts(tmp_path: Path) -> None:
    """Within 2% of rollout 5 on every rank: the metrics are those of the worst rank."""
    folder = tmp_path / "run"
    run(folder, "--trainer.enable_checkpointing=false", rollouts=50, timeout_s=900)
    rows = metrics(folder)
    rss = [row["perf/phase/generate/rss_peak_bytes"] for row in rows]
    assert rows[49]["perf/leak/rss_growth"] < 0.02 and rows[49]["perf/leak/device_growth"] == 0
    assert rss[49] < 1.02 * rss[4]
    assert rows[19]["perf/rss_bytes"] < 1.05 * rows[2]["perf/rss_bytes"]


@pytest.mark.parametrize(
    ("fault", "says", "machine"),
    [
        (
            "BreakTransition",
            "transition generate -> train failed: MemoryError: injected",
            "failed half way.; on device: gradients, policy_weights$",
        ),
        ("KillEngine", "injected: the engine died", "machine: generate; on device: engine_weights, kv_cache"),
    ],
)
def test_a_fault_is_told_truly_and_leaves_the_checkpoint_whole(
    fault: str, says: str, machine: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    often = "--trainer.callbacks+={class_path: rlite.callbacks.RolloutCheckpoint, init_args: {every_n_rollouts: 1}}"
    broken = f"--trainer.callbacks+=tests.integration.memory_faults.{fault}"
    with pytest.raises(AssertionError, match=says) as error:
        run(folder, often, broken)
    assert re.search(machine, str(error.value), re.MULTILINE)
    assert [row["rollout_step"] for row in metrics(folder)] == [0]
    run(tmp_path / "again", f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}")
    assert [row["rollout_step"] for row in metrics(tmp_path / "again")] == [1]
