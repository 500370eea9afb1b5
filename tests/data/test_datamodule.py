import itertools
from types import SimpleNamespace

import jsonargparse
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlite.data import DataSource, LoaderOptions, PromptDataModule, PromptFormat, SFTDataModule
from rlite.types import RolloutBatch, TokenRow

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


def given(rows):
    return DataSource(kind="rows", rows=rows)


TEN = given(ROWS)


def fake_trainer(tokenizer_dir, *, rank=0, num_replicas=1):
    return SimpleNamespace(
        strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": num_replicas, "rank": rank}),
        lightning_module=SimpleNamespace(tokenizer_dir=tokenizer_dir),
    )


def uids(loader, count=None):
    batches = []
    for batch in loader:
        batches.append([prompt.uid for prompt in batch.prompts])
        if len(batches) == count:
            break
    return batches


class Recorder(LightningModule):
    """A module that only remembers which prompts it was given."""

    def __init__(self, tokenizer_dir):
        super().__init__()
        self.tokenizer_dir = tokenizer_dir
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_uids, self.val_uids = [], []

    def training_step(self, batch: RolloutBatch, batch_idx):
        self.train_uids.append([prompt.uid for prompt in batch.prompts])
        return self.weight * 0

    def validation_step(self, batch: RolloutBatch, batch_idx):
        self.val_uids.append([prompt.uid for prompt in batch.prompts])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tokenizer_dir, tmp_path, *, steps, ckpt_path=None, **data):
    module = Recorder(tokenizer_dir)
    saver = ModelCheckpoint(dirpath=tmp_path, filename="step-{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[saver],
    )
    trainer.fit(module, datamodule=PromptDataModule(TEN, batch_size=4, **data), ckpt_path=ckpt_path)
    return module


def test_a_run_sees_every_prompt_and_validation_its_own(tokenizer_dir, tmp_path):
    module = fit(tokenizer_dir, tmp_path, steps=5, val=given(ROWS[:3]), loader=LoaderOptions(val_batch_size=2))
    flat = list(itertools.chain(*module.train_uids))
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert module.val_uids == [[0, 1], [2]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resume_continues_with_the_next_prompts(tokenizer_dir, tmp_path, num_workers):
    loader = LoaderOptions(num_workers=num_workers, seed=7)
    whole = fit(tokenizer_dir, tmp_path, steps=8, loader=loader).train_uids
    rest = fit(tokenizer_dir, tmp_path, steps=8, loader=loader, ckpt_path=tmp_path / "step-step=3.ckpt").train_uids
    assert len(rest) == 5
    assert rest == whole[3:]


def test_ranks_get_disjoint_prompts_and_peers_the_same(tokenizer_dir):
    seen = []
    for rank in (0, 1, 1):
        data = PromptDataModule(TEN, batch_size=4)
        data.trainer = fake_trainer(tokenizer_dir, rank=rank, num_replicas=2)
        data.setup("fit")
        seen.append(uids(data.train_dataloader(), 5))
    assert seen[1] == seen[2]
    both = [a + b for a, b in zip(seen[0], seen[1], strict=True)]
    assert all(len(set(batch)) == 4 for batch in both)


def test_validation_batches_are_as_many_on_every_rank(tokenizer_dir):
    counts = []
    for rank in (0, 1):
        data = PromptDataModule(TEN, given(ROWS[:5]), batch_size=4)
        data.trainer = fake_trainer(tokenizer_dir, rank=rank, num_replicas=2)
        data.setup("validate")
        counts.append(uids(data.val_dataloader()))
    assert counts == [[[0, 2], [4]], [[1, 3], []]]


def test_held_out_rows_keep_their_number_and_are_not_trained_on(tokenizer_dir):
    data = PromptDataModule(TEN, loader=LoaderOptions(val_fraction=0.3), batch_size=7, tokenizer_dir=tokenizer_dir)
    data.setup("fit")
    (train,) = uids(data.train_dataloader(), 1)
    (held_out,) = uids(data.val_dataloader())
    assert len(held_out) == 3
    assert sorted(train + held_out) == list(range(10))
    again = PromptDataModule(TEN, loader=LoaderOptions(val_fraction=0.3), batch_size=7, tokenizer_dir=tokenizer_dir)
    again.setup("validate")
    assert uids(again.val_dataloader()) == [held_out]


def test_test_and_predict_fall_back_to_the_validation_rows(tokenizer_dir):
    data = PromptDataModule(TEN, given(ROWS[:2]), tokenizer_dir=tokenizer_dir)
    data.setup("test")
    assert uids(data.test_dataloader()) == uids(data.predict_dataloader()) == [[0, 1]]
    data = PromptDataModule(TEN, given(ROWS[:2]), given(ROWS[:1]), tokenizer_dir=tokenizer_dir)
    data.setup("predict")
    assert uids(data.predict_dataloader()) == [[0]]


def test_fitting_without_validation_has_no_validation_loader(tokenizer_dir):
    data = PromptDataModule(TEN, tokenizer_dir=tokenizer_dir)
    data.setup("fit")
    assert data.val_dataloader() == []


@pytest.mark.parametrize(
    ("stage", "message"), [("validate", r"data\.val is missing"), ("test", r"data\.test is missing")]
)
def test_evaluating_without_rows_is_an_error(tokenizer_dir, stage, message):
    with pytest.raises(ValueError, match=message):
        PromptDataModule(TEN, tokenizer_dir=tokenizer_dir).setup(stage)


def test_columns_are_those_of_every_split(tokenizer_dir):
    data = PromptDataModule(TEN, given([{"prompt": "a", "level": 1}]), tokenizer_dir=tokenizer_dir)
    data.setup("fit")
    assert data.columns == ("prompt",)


def test_dropped_rows_are_reported(tokenizer_dir, capsys):
    rows = [*ROWS, {"prompt": "1" * 50, "answer": ""}]
    data = PromptDataModule(given(rows), prompt=PromptFormat(max_prompt_tokens=8), tokenizer_dir=tokenizer_dir)
    data.setup("fit")
    assert "data.train: 1 of 11 rows over the token limit dropped" in capsys.readouterr().err
    assert 10 not in itertools.chain(*uids(data.train_dataloader(), 2))


def test_dropping_every_row_is_an_error(tokenizer_dir):
    data = PromptDataModule(TEN, prompt=PromptFormat(max_prompt_tokens=2), tokenizer_dir=tokenizer_dir)
    with pytest.raises(ValueError, match="all 10 rows are over the limit"):
        data.setup("fit")


def test_a_batch_larger_than_what_is_left_is_an_error(tokenizer_dir):
    data = PromptDataModule(TEN, batch_size=12, tokenizer_dir=tokenizer_dir)
    with pytest.raises(ValueError, match=r"data\.batch_size = 12 is larger than the data set \(10 prompts\)"):
        data.setup("fit")


def test_no_tokenizer_is_an_error():
    with pytest.raises(ValueError, match=r"data\.tokenizer_dir is missing"):
        PromptDataModule(TEN).setup("fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"val": TEN, "loader": LoaderOptions(val_fraction=0.1)}, "both set"),
        ({"loader": LoaderOptions(val_fraction=1.0)}, r"val_fraction = 1\.0"),
        ({"loader": LoaderOptions(val_batch_size=0)}, "val_batch_size = 0"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptDataModule(TEN, **arguments)


def test_supervised_batches_are_token_rows(tokenizer_dir):
    data = SFTDataModule(
        TEN, batch_size=4, prompt=PromptFormat(completion_column="answer"), tokenizer_dir=tokenizer_dir
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert len(batch) == 4
    assert all(isinstance(row, TokenRow) for row in batch)
    assert {row.num_loss_tokens for row in batch} <= {2, 3}


def test_supervised_rows_need_their_column(tokenizer_dir):
    data = SFTDataModule(TEN, prompt=PromptFormat(completion_column="answr"), tokenizer_dir=tokenizer_dir)
    with pytest.raises(ValueError, match=r"completion_column for data\.train = 'answr': .*did you mean 'answer'"):
        data.setup("fit")


def test_a_yaml_file_configures_it(tmp_path):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(PromptDataModule, "data")
    parser.add_argument("--config", action="config")
    config = tmp_path / "config.yaml"
    config.write_text(
        """
        data:
          class_path: rlite.data.SFTDataModule
          init_args:
            train: {kind: arithmetic, size: 50, params: {max_operand: 20}}
            val: {kind: rows, rows: [{prompt: "1+1=", answer: "2", level: 2, info: {k: "3"}}]}
            batch_size: 2
            prompt: {completion_column: answer}
        """,
        encoding="utf-8",
    )
    arguments = ["--config", str(config), "--data.prompt.max_prompt_tokens", "9", "--data.train.size", "60"]
    data = parser.instantiate_classes(parser.parse_args(arguments)).data
    assert isinstance(data, SFTDataModule)
    assert data.sources["train"] == DataSource(kind="arithmetic", size=60, params={"max_operand": 20})
    assert data.sources["val"].rows == [{"prompt": "1+1=", "answer": "2", "level": 2, "info": {"k": "3"}}]
    assert data.format == PromptFormat(completion_column="answer", max_prompt_tokens=9)
    with pytest.raises(jsonargparse.ArgumentError, match="sise"):
        parser.parse_args(["--config", str(config), "--data.train.sise", "9"])
