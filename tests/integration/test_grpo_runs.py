"""GRPO runs through the command line on real parts: what they log, that they repeat, and that layouts agree."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.integration.runs import ROOT, logger, metrics, rlite, samples

SMALL = (
    "--data.batch_size=4",
    "--model.batch.group_size=4",
    "--trainer.limit_train_batches=2",
    "--model.init_from=null",
)
CONFIG = "configs/grpo_demo_cpu.yaml"
TWO_UPDATES = "--model.batch.epochs=2"
ONE_STEP = "--trainer.limit_train_batches=1"
LENGTH = "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]"
"""A reward that differs between the completions of a random policy."""


def engine(kind: str, settings: str, max_tokens: int = 4) -> str:
    """The demo's callbacks with another engine."""
    return (
        f"--trainer.callbacks=[{{class_path: rlite.callbacks.{kind}, init_args: {{engine: {{dtype: float32, {settings}, "
        f"max_model_len: 32, kv_cache_memory_bytes: 33554432}}, sampling: {{max_tokens: {max_tokens}}}, "
        "logprob_tolerance: 1.0e-4}}, {class_path: rlite.callbacks.EP2TPConversion}, "
        "{class_path: rlite.callbacks.MemoryOffload}]"
    )


def grpo(folder: Path, *overrides: str, world_size: int = 2) -> list[dict[str, float]]:
    devices = f"--trainer.devices={world_size}"
    arguments = ("fit", "--config", CONFIG, *SMALL, "--trainer.enable_checkpointing=false", devices, logger(folder))
    rlite(*arguments, *overrides, world_size=world_size)
    return metrics(folder)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo's arrangement (train EP2, generate TP2), with two updates a rollout step at learning rate 0."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    grpo(folder, "--model.batch.minibatches=2", "--model.optimizer.lr=0", LENGTH)
    return folder


def test_engine_and_trainer_agree_on_every_token_after_the_first_and_the_last_sync(demo: Path) -> None:
    rows = metrics(demo)
    assert len(rows) == 2
    assert all(0 < row["rollout/logprob_diff_max"] <= 1e-4 for row in rows)


def test_the_first_ratio_is_one(demo: Path) -> None:
    for row in metrics(demo):
        assert abs(row["ratio/max"] - 1) <= 1e-5
        assert abs(row["ratio/min"] - 1) <= 1e-5


def test_every_promised_metric_is_logged(demo: Path) -> None:
    promised = {"reward/mean", "reward/std", "completions/mean_length", "entropy", "grad_norm", "lr", "loss"}
    promised |= {f"timing_s/{name}" for name in ("generate", "reward", "logprob", "update", "sync", "offload", "step")}
    promised |= {"rollout/logprob_diff_mean", "rollout/logprob_diff_max", "clip_ratio/region_mean", "perf/tokens_per_s"}
    promised |= {f"perf/reshard/{name}" for name in ("seconds", "bytes_recv", "bytes_lower_bound", "efficiency", "ops")}
    promised |= {f"perf/phase/{name}/device_peak_bytes" for name in ("generate", "logprob", "train")}
    assert promised <= metrics(demo)[0].keys(), promised - metrics(demo)[0].keys()


def test_every_logged_metric_is_documented(demo: Path) -> None:
    named = re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text())
    pattern = "|".join(re.escape(name).replace(r"\{name\}", "[^/]+") for name in named)
    pattern = re.sub(r"\\\{([\w,]+)\\\}", lambda choice: f"({choice[1].replace(',', '|')})", pattern)
    unknown = [name for name in metrics(demo)[0] if not re.fullmatch(pattern, name)]
    assert not unknown, unknown


def test_every_completion_is_in_the_samples_file(demo: Path) -> None:
    lines = samples(demo)
    assert len(lines) == 2 * 4 * 4
    assert {"prompt", "completion", "rewards", "reward", "advantage", "logprob_diff"} <= lines[0].keys()
    assert [line["sample"] for line in lines[:5]] == [0, 1, 2, 3, 0]
    assert all(line["rewards"] == {"soft_overlong": line["reward"]} for line in lines)


def test_conversion_receives_the_lower_bound(demo: Path) -> None:
    assert metrics(demo)[0]["perf/reshard/efficiency"] >= 0.999


def test_the_same_seed_gives_the_same_completions_and_another_seed_others(demo: Path, tmp_path: Path) -> None:
    def texts(folder: Path) -> list[str]:
        return [line["completion"] for line in samples(folder) if line["rollout_step"] == 0]

    grpo(tmp_path / "again", "--trainer.limit_train_batches=1")
    grpo(tmp_path / "other", "--trainer.limit_train_batches=1", "--seed_everything=1")
    assert texts(tmp_path / "again") == texts(demo) != texts(tmp_path / "other")


LAYOUTS = {
    "ep2": (2, "ep: 2"),
    "tp2etp2": (2, "ep: 1, tp: 2, etp: 2"),
    "dp2": (2, "ep: 1"),
    "pp2": (2, "ep: 1, pp: 2, first_stage_layers: 1"),
    "pp2vpp2": (2, "ep: 1, pp: 2, vpp: 2"),
    "cp2": (2, "ep: 1, cp: 2"),
    "tp2ep2": (2, "ep: 2, tp: 2, etp: 1"),
    "pp2ep2": (4, "ep: 2, pp: 2"),
}


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo's model with a layer more: two pipeline ranks with two chunks each need four."""
    directory = tmp_path_factory.mktemp("policy") / "tiny_dsv3"
    shutil.copytree(ROOT / "configs/models/tiny_dsv3", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    return f"--model.policy={directory}"


@pytest.fixture(scope="module")
def one_process(four_layers: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("one") / "run"
    layout = "--trainer.strategy.init_args.layout={ep: 1}"
    return grpo(folder, four_layers, layout, *ragged_step(engine_tp=1), world_size=1)[0]


def ragged_step(*, engine_tp: int) -> tuple[str, ...]:
    """One rollout step of longer completions, so that some of each group end early, and two updates."""
    reward = "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 12, cache_tokens: 12}}]"
    return (engine("VLLMRollout", f"tp: {engine_tp}", max_tokens=12), reward, ONE_STEP, TWO_UPDATES)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_whole_rl_step_does_not_depend_on_the_layout(
    world_size: int, layout: str, four_layers: str, one_process: dict[str, float], tmp_path: Path
) -> None:
    """Rewards, log-probabilities, loss, gradient norm and the effect of the first update on the second."""
    overrides = (four_layers, f"--trainer.strategy.init_args.layout={{{layout}}}", *ragged_step(engine_tp=2))
    row = grpo(tmp_path / "run", *overrides, world_size=world_size)[0]
    assert one_process["advantage/abs_mean"] > 0.1 and one_process["grad_norm"] > 1e-3
    for key in ("reward/mean", "loss", "grad_norm", "entropy", "ratio/max", "ratio/min"):
        assert row[key] == pytest.approx(one_process[key], rel=1e-5, abs=1e-7), key
    assert row["rollout/logprob_diff_max"] <= 1e-4
    assert any(line["logprob_diff"] > 0 for line in samples(tmp_path / "run")), "known on every pipeline stage"


@pytest.mark.slow
def test_balancing_tokens_over_data_parallel_ranks_changes_no_loss(tmp_path: Path) -> None:
    """Completions of very different lengths, two optimizer steps on other groups each, and adaptive denominators."""
    arguments = ("--trainer.strategy.init_args.layout={ep: 1}", engine("VLLMRollout", "tp: 1", max_tokens=16))
    arguments += (LENGTH, "--model.batch.minibatches=2", "--data.batch_size=8", "--trainer.limit_train_batches=1")
    stays = grpo(tmp_path / "stays", *arguments, "--model.batch.balance=false")[0]
    moves = grpo(tmp_path / "moves", *arguments)[0]
    assert moves["global_seqlen/balanced_max"] < moves["global_seqlen/max"]
    assert "global_seqlen/max" not in stays
    for key in ("reward/mean", "loss", "grad_norm", "entropy", "ratio/max", "completions/mean_length"):
        assert moves[key] == pytest.approx(stays[key], rel=1e-5, abs=1e-7), key


def test_a_reference_at_the_start_has_no_kl_and_then_some(tmp_path: Path) -> None:
    rows = grpo(tmp_path / "kl", "--model.algorithm={preset: grpo, kl_coef: 0.1}", "--model.optimizer.lr=1e-2", LENGTH)
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert rows[1]["kl"] > 1e-6


def test_transformers_serves_the_same_contract(tmp_path: Path) -> None:
    rows = grpo(tmp_path / "hf", engine("TransformersRollout", "max_num_seqs: 8"))
    assert len(rows) == 2


@pytest.mark.slow
def test_weights_and_biases_offline_gets_the_same_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ours = f"{{save_dir: {tmp_path}, name: run, version: ''}}"
    loggers = (
        f"--trainer.logger=[{{class_path: rlite.loggers.RunLogger, init_args: {ours}}}, "
        "{class_path: lightning.pytorch.loggers.WandbLogger, init_args: {offline: true, project: rlite, "
        f"save_dir: {tmp_path}}}}}]"
    )
    rlite("fit", "--config", CONFIG, *SMALL, "--trainer.enable_checkpointing=false", loggers)
    assert len(metrics(folder)) == 2
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")), "an offline run to be synced later"
    assert (folder / "config.yaml").exists()
