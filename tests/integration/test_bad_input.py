"""Bad input: one line that names the key, the value and the fix, and exit code 1 or 2, before models are loaded."""

from pathlib import Path

import pytest

from tests.integration.runs import logger, rlite

FIT = ("fit", "--config", "configs/grpo_demo_cpu.yaml", "--model.init_from=null", "--trainer.limit_train_batches=1")
LAYOUT = "--trainer.strategy.init_args.layout"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{LAYOUT}.pp=3", r"tp\*pp\*cp = 1\*3\*1 = 3 does not divide world size 2"),
        (f"{LAYOUT}={{tp: 2, etp: 2, ep: 2}}", r"etp\*ep\*pp = 2\*2\*1 = 4 does not divide world size 2"),
        (f"{LAYOUT}={{tp: 2, ep: 1, etp: 1}}", "etp = 1 != tp = 2 with ep = 1"),
        (f"{LAYOUT}.vpp=2", "vpp = 2 needs pp > 1"),
        ("--model.batch.group_size=1", "group_size = 1.* needs at least 2"),
        ("--data.batch_size=1000", "data.batch_size = 1000"),
        ("--data.batch_size=3", "data.batch_size = 3"),
        ("--data.train={kind: file, path: nowhere.jsonl}", "nowhere.jsonl.*no such file"),
        ("--model.policy=nowhere", "nowhere"),
        ("--model.init_from=nowhere", "model.init_from = nowhere: no such directory"),
        ("--model.rewards=[exact_mach]", "did you mean 'exact_match'"),
        ("--model.rewards=[]", "rewards is empty"),
        ("--model.algorithm=dapoo", "dapo"),
        ("--model.algorithm={clip_hihg: 0.3}", "clip_high"),
        ("--trainer.precision=16-true", "16-true.*not supported"),
        ("--model.optimizer.lr=-1", "model.optimizer.lr = -1"),
        ("--trainer.limit_train_batches=1.0", "limit_train_batches"),
        ("--trainer.limit_train_batches=0", "limit_train_batches"),
        ("--ckpt_path=nowhere", "nowhere"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"(?s)exit code [12].*{message}"):
        rlite(*FIT, override, logger(tmp_path / "run"))


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("--trainer.max_epoch=1", "trainer.max_epochs"),
        ("--model.optimizer.learning=1", "lr"),
        ("--model.batch.groupsize=4", "group_size"),
        ("--data.batchsize=4", "batch_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(override: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"(?s)exit code 2.*([Dd]id you mean '|Known keys: )[^']*({nearest})"):
        rlite(*FIT, override, logger(tmp_path / "run"), world_size=1)


def test_a_reward_that_raises_shows_its_traceback_and_the_row_before_the_update(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ZeroDivisionError.*row 0 \(prompt uid"):
        rlite(*FIT, "--model.rewards=[tests.integration.faults.raising]", logger(tmp_path / "run"))


def test_a_reward_that_returns_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)reward 'nan' returned nan.*to abstain, return None"):
        rlite(*FIT, "--model.rewards=[tests.integration.faults.nan]", logger(tmp_path / "run"))


def test_generating_without_a_conversion_names_the_callback(tmp_path: Path) -> None:
    engine = "{tp: 2, dtype: float32, max_model_len: 32}"
    callbacks = f"--trainer.callbacks=[{{class_path: rlite.callbacks.VLLMRollout, init_args: {{engine: {engine}}}}}]"
    with pytest.raises(AssertionError, match="EP2TPConversion"):
        rlite(*FIT, callbacks, logger(tmp_path / "run"))
