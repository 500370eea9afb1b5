"""Prompts: sources, tokenisation, the resumable sampler and the Lightning data modules."""

from rlite.data.arithmetic import arithmetic_rows
from rlite.data.datamodule import LoaderOptions, PromptDataModule, SFTDataModule
from rlite.data.sampler import EvalSampler, PromptSampler
from rlite.data.sources import DataSource, load_rows
from rlite.data.tokenize import PromptEncoder, PromptFormat, load_tokenizer

__all__ = [
    "DataSource",
    "EvalSampler",
    "LoaderOptions",
    "PromptDataModule",
    "PromptEncoder",
    "PromptFormat",
    "PromptSampler",
    "SFTDataModule",
    "arithmetic_rows",
    "load_rows",
    "load_tokenizer",
]
