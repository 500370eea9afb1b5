import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rlite.data import PromptEncoder, PromptFormat, arithmetic_rows, load_tokenizer

MODELS = Path(__file__).parents[2] / "configs" / "models"
NAMES = ["tiny_dsv3", "tiny_qwen3_moe", "tiny_llama"]


def load_script():
    spec = importlib.util.spec_from_file_location("make_tiny", MODELS / "make_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_files_are_what_the_script_writes(tmp_path):
    load_script().main(tmp_path)
    for name in NAMES:
        written = {path.name: json.loads(path.read_text()) for path in (tmp_path / name).iterdir()}
        committed = {path.name: json.loads(path.read_text()) for path in (MODELS / name).iterdir()}
        assert written == committed


@pytest.mark.parametrize("name", NAMES)
def test_transformers_builds_the_model(name):
    config = AutoConfig.from_pretrained(MODELS / name)
    model = AutoModelForCausalLM.from_config(config)
    assert model.config.vocab_size == 64
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_has_one_token_per_character_and_loses_nothing(name):
    tokenizer = load_tokenizer(MODELS / name)
    assert len(tokenizer) == 64
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer.chat_template is None
    text = "3+4= 7\nwhy? (a-b)*c"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text)
    assert tokenizer.decode([*token_ids, 1], skip_special_tokens=True) == text


def test_the_tiny_vocabulary_covers_the_arithmetic_task():
    tokenizer = load_tokenizer(MODELS / "tiny_dsv3")
    encoder = PromptEncoder(tokenizer, PromptFormat(completion_column="answer"), columns=["prompt", "answer"])
    for uid, row in enumerate(arithmetic_rows(operators="+-")):
        assert tokenizer.unk_token_id not in encoder.token_row(row, uid=uid).token_ids


def test_deepseek_groups_are_scored_by_two_experts():
    config = json.loads((MODELS / "tiny_dsv3" / "config.json").read_text())
    assert config["num_experts_per_tok"] // config["topk_group"] == 2
    assert config["n_routed_experts"] % config["n_group"] == 0
