"""Lightning data modules: prompts for RL, rows for a supervised warm start."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from rlite.data.sampler import EvalSampler, PromptSampler, check_batch_size
from rlite.data.sources import DataSource, Row, check_columns, load_rows
from rlite.data.tokenize import PromptEncoder, PromptFormat, load_tokenizer
from rlite.messages import announce
from rlite.types import Prompt, RolloutBatch, TokenRow

NumberedRow = tuple[int, Row]
Item = Prompt | TokenRow


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How rows are split, ordered and loaded."""

    seed: int = 0
    """Of the order of the training rows and of the held-out split."""
    shuffle: bool = True
    """False keeps the order of the source on every pass."""
    val_fraction: float = 0.0
    """Share of the training rows held out for validation; only without `val`."""
    val_batch_size: int | None = None
    """Rows of one validation, test or prediction batch, all ranks together; None is `batch_size`."""
    num_workers: int = 0
    """Loader processes; rows are tokenised once at the start, so 0 is nearly always right."""


DEFAULT_FORMAT = PromptFormat()
DEFAULT_OPTIONS = LoaderOptions()


class PromptDataModule(LightningDataModule):
    """Prompts for RL: a batch is a `RolloutBatch` of this data-parallel rank, its rollouts still empty.

    The training loader is endless (`PromptSampler`): the trainer's `limit_train_batches` says how many rollout steps a
    run has. A validation batch may be empty on some ranks, see `EvalSampler`.

    Args:
        train: source of the training rows.
        val: validation rows; without them `loader.val_fraction` may hold some of `train` out.
        test: rows for `rlite test` and `rlite predict`; the validation rows when not given.
        batch_size: prompts of one training step, all data-parallel ranks together.
        prompt: how a row becomes token ids.
        loader: split, order, workers.
        tokenizer_dir: Hugging Face directory; the policy's (`tokenizer_dir` of the module) when not given.
    """

    def __init__(
        self,
        train: DataSource,
        val: DataSource | None = None,
        test: DataSource | None = None,
        *,
        batch_size: int = 8,
        prompt: PromptFormat = DEFAULT_FORMAT,
        loader: LoaderOptions = DEFAULT_OPTIONS,
        tokenizer_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.sources = {"train": train, "val": val, "test": test}
        self.batch_size = batch_size
        self.format = prompt
        self.options = loader
        self.tokenizer_dir = tokenizer_dir
        self._rows: dict[str, list[NumberedRow]] = {}
        self._items: dict[str, list[Item]] = {}
        self._train_sampler: PromptSampler | None = None
        if val is not None and self.options.val_fraction:
            raise ValueError("data.loader.val_fraction and data.val are both set: keep one")
        if not 0 <= self.options.val_fraction < 1:
            raise ValueError(f"data.loader.val_fraction = {self.options.val_fraction}: must be in [0, 1)")
        if self.options.val_batch_size is not None and self.options.val_batch_size < 1:
            raise ValueError(f"data.loader.val_batch_size = {self.options.val_batch_size}: must be at least 1")

    @override
    def prepare_data(self) -> None:
        """Downloads on one process of a node; the others then find it in the cache."""
        for split, source in self.sources.items():
            if source is not None and source.kind == "dataset":
                load_rows(source, key=f"data.{split}")

    @override
    def setup(self, stage: str) -> None:
        """Reads and tokenises what `stage` (fit, validate, test, predict) needs; every data error is raised here."""
        for split in {"fit": ("train", "val"), "validate": ("val",)}.get(stage, ("test",)):
            if split not in self._items and (rows := self._split_rows(split)):
                self._items[split] = self._tokenize(split, rows)
        if stage == "validate" and not self._items.get("val"):
            raise ValueError("data.val is missing: validation needs data.val or data.loader.val_fraction")
        if stage == "fit":
            replicas = self._data_parallel()["num_replicas"]
            check_batch_size(len(self._items["train"]), batch_size=self.batch_size, num_replicas=replicas)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every split read so far has: those that rewards may name."""
        first, *others = [rows[0][1] for rows in self._rows.values()]
        return tuple(name for name in first if all(name in other for other in others))

    @override
    def train_dataloader(self) -> StatefulDataLoader:
        sampler = PromptSampler(
            len(self._items["train"]),
            batch_size=self.batch_size,
            seed=self.options.seed,
            shuffle=self.options.shuffle,
            **self._data_parallel(),
        )
        self._train_sampler = sampler
        return self._loader("train", sampler)

    def more_prompts(self) -> list[Prompt]:
        """This rank's part of the next `batch_size` training prompts, which the train loader then does not yield.

        Every rank has to ask. They count as consumed: a checkpoint goes on after them.

        Raises:
            ValueError: with loader workers, which have read ahead.
        """
        if self.options.num_workers:
            raise ValueError(
                f"data.loader.num_workers = {self.options.num_workers}: sampling in several rounds needs 0, since workers "
                "read prompts ahead"
            )
        assert self._train_sampler is not None, "train_dataloader() comes first"
        return [self._items["train"][index] for index in self._train_sampler.next_batch()]

    @override
    def val_dataloader(self) -> StatefulDataLoader | list[Any]:
        return self._eval_loader("val") if "val" in self._items else []

    @override
    def test_dataloader(self) -> StatefulDataLoader:
        return self._eval_loader("test")

    @override
    def predict_dataloader(self) -> StatefulDataLoader:
        return self._eval_loader("test")

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Batches are host data; the engines move what they compute on."""
        return batch

    def _encode(self, encoder: PromptEncoder, row: Row, uid: int) -> Item | None:
        return encoder.prompt(row, uid=uid)

    def _collate(self) -> Callable[[list[Any]], Any]:
        return _rollout_batch

    def _split_rows(self, split: str) -> list[NumberedRow]:
        """Rows of a split with their row numbers; none when validation is not configured."""
        if split == "test" and self.sources["test"] is None:
            if not (rows := self._split_rows("val")):
                raise ValueError(
                    "data.test is missing: testing and prediction need data.test, data.val or val_fraction"
                )
            return rows
        if split not in self._rows:
            source = self.sources[split]
            if source is not None:
                self._rows[split] = list(enumerate(load_rows(source, key=f"data.{split}")))
            if split == "train" or (split == "val" and self.options.val_fraction):
                self._hold_out()
        return self._rows.get(split, [])

    def _hold_out(self) -> None:
        if not self.options.val_fraction or "val" in self._rows:
            return
        rows = self._rows.get("train") or list(enumerate(load_rows(self.sources["train"], key="data.train")))
        count = max(1, round(len(rows) * self.options.val_fraction))
        held_out = set(random.Random(self.options.seed).sample(range(len(rows)), count))
        self._rows["val"] = [row for row in rows if row[0] in held_out]
        self._rows["train"] = [row for row in rows if row[0] not in held_out]
        if not self._rows["train"]:
            raise ValueError(
                f"data.loader.val_fraction = {self.options.val_fraction} leaves no training rows of {len(rows)}"
            )

    def _tokenize(self, split: str, rows: list[NumberedRow]) -> list[Item]:
        key = f"data.{split}"
        encoder = PromptEncoder(self.tokenizer, self.format, columns=list(rows[0][1]), key=key)
        items = [item for uid, row in rows if (item := self._encode(encoder, row, uid)) is not None]
        if encoder.num_too_long:
            action = "dropped" if self.format.too_long == "drop" else "truncated"
            announce(f"{key}: {encoder.num_too_long} of {len(rows)} rows over the token limit {action}")
        if not items:
            raise ValueError(
                f"{key}: all {len(rows)} rows are over the limit of {self.format.max_prompt_tokens} tokens: "
                "raise data.prompt.max_prompt_tokens"
            )
        return items

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of `tokenizer_dir`, or of the policy."""
        directory = self.tokenizer_dir
        if directory is None and self.trainer is not None:
            directory = self.trainer.lightning_module.tokenizer_dir
        if directory is None:
            raise ValueError("data.tokenizer_dir is missing: set it, or run under a module that has a tokenizer_dir")
        return load_tokenizer(Path(directory))

    def _data_parallel(self) -> dict[str, int]:
        """`num_replicas` and `rank` of the data-parallel axis; peers on other axes read the same rows."""
        strategy = getattr(self.trainer, "strategy", None)
        return getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})

    def _eval_loader(self, split: str) -> StatefulDataLoader:
        batch_size = self.options.val_batch_size or self.batch_size
        return self._loader(split, EvalSampler(len(self._items[split]), batch_size=batch_size, **self._data_parallel()))

    def _loader(self, split: str, sampler: PromptSampler | EvalSampler) -> StatefulDataLoader:
        return StatefulDataLoader(
            self._items[split],
            batch_sampler=sampler,
            collate_fn=self._collate(),
            num_workers=self.options.num_workers,
        )


def _rollout_batch(prompts: list[Prompt]) -> RolloutBatch:
    return RolloutBatch(prompts=prompts)


class SFTDataModule(PromptDataModule):
    """Prompts with wanted completions, for a supervised warm start: a batch is a list of this rank's `TokenRow`s.

    The prompt is masked; the completion (`prompt.completion_column`) and an end-of-sequence token are trained on.
    """

    @override
    def _tokenize(self, split: str, rows: list[NumberedRow]) -> list[Item]:
        key = f"data.prompt.completion_column for data.{split}"
        check_columns([self.format.completion_column], list(rows[0][1]), key=key)
        return super()._tokenize(split, rows)

    @override
    def _encode(self, encoder: PromptEncoder, row: Row, uid: int) -> TokenRow | None:
        return encoder.token_row(row, uid=uid)

    @override
    def _collate(self) -> Callable[[list[Any]], Any]:
        return list
