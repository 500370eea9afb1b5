"""DAPO's dynamic sampling in whole runs: the batch is filled with groups that teach something."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import logger, metrics, rlite, samples

COMMON = (
    "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=2",
    "--model.init_from=null", "--model.optimizer.lr=0", "--model.rewards=[tests.integration.rewards.even_answers_vary]",
)  # fmt: skip


def run(folder: Path, *overrides: str, rollouts: int = 2, rounds: int = 6) -> str:
    """The demo's callbacks with dynamic sampling; what the run printed."""
    callbacks = (
        "--trainer.callbacks=[{class_path: rlite.callbacks.VLLMRollout, init_args: {engine: {tp: 2, dtype: float32, "
        "max_model_len: 32, kv_cache_memory_bytes: 33554432}, sampling: {max_tokens: 4}, "
        f"max_sampling_rounds: {rounds}}}}}, "
        "{class_path: rlite.callbacks.EP2TPConversion}, {class_path: rlite.callbacks.MemoryOffload}]"
    )
    return rlite(*COMMON, callbacks, f"--trainer.limit_train_batches={rollouts}", logger(folder), *overrides)


def prompts(folder: Path, step: int) -> list[str]:
    """In the global order of the data: the file has those of the first of the two data-parallel ranks first."""
    listed = [s["prompt"] for s in samples(folder) if s["rollout_step"] == step and s["sample"] == 0]
    half = len(listed) // 2
    return [prompt for pair in zip(listed[:half], listed[half:], strict=True) for prompt in pair]


def is_even(prompt: str) -> bool:
    left, right = prompt.removesuffix("=").split("+")
    return (int(left) + int(right)) % 2 == 0


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Prompts of each batch when nothing is replaced."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(folder, rollouts=8, rounds=1)
    return [prompts(folder, step) for step in range(8)]


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dynamic") / "run"
    run(folder)
    return folder


def test_uniform_groups_are_replaced_by_those_of_the_next_prompts(order: list[list[str]], dynamic: Path) -> None:
    rows, first = metrics(dynamic), 0
    assert {row["sampling/rounds"] for row in rows} != {1.0}, "the seed should make a round too few"
    for step, row in enumerate(rows):
        rounds = int(row["sampling/rounds"])
        drawn = [prompt for batch in order[first : first + rounds] for prompt in batch]
        assert prompts(dynamic, step) == [prompt for prompt in drawn if is_even(prompt)][:4]
        assert row["sampling/dropped_groups"] == 4 * rounds - 4
        share_even = sum(map(is_even, drawn)) / len(drawn)
        assert row["sampling/reward_mean"] == pytest.approx(share_even / 2)
        assert row["reward/mean"] == pytest.approx(0.5)
        assert row["frac_reward_zero_std"] == 0
        first += rounds


def test_a_resumed_run_draws_the_prompts_an_uninterrupted_one_does(dynamic: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, rollouts=1)
    run(second, f"--ckpt_path={first / 'checkpoints' / 'last.ckpt'}")

    def without_run(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: line[key] for key in ("rollout_step", "uid", "completion", "reward")} for line in lines]

    assert without_run(samples(first) + samples(second)) == without_run(samples(dynamic))


def test_when_the_rounds_are_used_up_the_first_prompts_fill_the_batch(order: list[list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    printed = run(folder, "--model.rewards=[exact_match]", rollouts=1, rounds=2)
    assert "warning, rollout 1: in 100% of the groups all rewards are equal" in printed
    row = metrics(folder)[0]
    assert (row["sampling/rounds"], row["sampling/dropped_groups"]) == (2, 4)
    assert row["frac_reward_zero_std"] == 1
    assert prompts(folder, 0) == order[0]
