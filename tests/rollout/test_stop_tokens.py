"""End-of-sequence ids of a model directory."""

import json
from collections.abc import Callable
from pathlib import Path

from rlite.rollout.stop_tokens import end_of_sequence_ids


def test_generation_config_wins_over_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_of_sequence_ids(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert end_of_sequence_ids(tmp_path) == (7, 9)


def test_the_tokenizers_own_token_is_added(model_dir: Callable[..., Path]) -> None:
    assert end_of_sequence_ids(model_dir("llama")) == (1,)


def test_a_directory_that_names_none_gives_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_of_sequence_ids(tmp_path) == ()
