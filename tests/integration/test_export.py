"""A run's checkpoint as a Hugging Face directory: transformers and a fresh engine compute the same model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlite.cli.commands import export
from rlite.export import _dtype_of
from tests.helpers.world import run_world
from tests.integration.runs import logger, rlite, samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rollout steps of the demo, trained with EP2, and then a step of predictions by the run itself."""
    folder = tmp_path_factory.mktemp("export") / "run"
    rlite(
        "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=4",
        "--trainer.limit_train_batches=2", "--model.init_from=null", "--model.optimizer.lr=1e-2", logger(folder),
        "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]",
    )  # fmt: skip
    return folder


def test_greedy_completions_of_the_synced_engine_are_those_of_transformers_on_the_export(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "hf"
    run_world(1, export, ["--ckpt", str(run), "--out", str(out)])
    predictions = tmp_path / "predict"
    rlite(
        "generate", "--config", "configs/grpo_demo_cpu.yaml", "--model.init_from", str(run), logger(predictions),
        "--data.test={kind: arithmetic, size: 12}", "--data.batch_size=4",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    lines = samples(predictions, "predictions.jsonl")
    assert len(lines) == 12
    for line in lines:
        ids = torch.tensor([tokenizer(line["prompt"], add_special_tokens=False).input_ids])
        mine = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(mine, skip_special_tokens=True) == line["completion"]


def test_an_export_can_be_trained_on_as_a_policy(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    run_world(1, export, ["--ckpt", str(run), "--out", str(out)])
    folder = tmp_path / "again"
    rlite(
        "fit", "--config", "configs/grpo_demo_cpu.yaml", "--model.policy", str(out), "--model.init_from=null",
        "--data.batch_size=4", "--trainer.limit_train_batches=1", logger(folder),
    )  # fmt: skip
    assert len(samples(folder)) == 4 * 8


def test_export_refuses_a_directory_that_is_not_empty_and_one_without_a_checkpoint(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        export(["--ckpt", str(run), "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="neither a Hugging Face directory"):
        export(["--ckpt", str(tmp_path), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("trainer", "dtype"),
    [
        ({"precision": "bf16-mixed"}, "bfloat16"),
        ({"precision": "32-true"}, "float32"),
        ({"precision": None}, "float32"),
    ],
)
def test_an_export_has_the_dtype_of_the_run_also_where_that_is_the_default(trainer: dict, dtype: str) -> None:
    assert _dtype_of({"trainer": trainer}) == dtype
