"""`samples.jsonl` of a run that goes on."""

import json
from pathlib import Path

from rlite.callbacks.samples import _keep_lines_before


def _line(step: int, completion: str) -> str:
    return json.dumps({"rollout_step": step, "completion": completion}, ensure_ascii=False) + "\n"


def test_lines_of_steps_that_are_done_again_go_and_those_before_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    before = _line(0, "a") + _line(1, "line\u2028separator, next\x85line")
    path.write_text(before + _line(2, "b") + _line(3, "c"))
    _keep_lines_before(path, 2)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_line_that_was_cut_when_the_run_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(_line(0, "a") + _line(1, "b")[:20])
    _keep_lines_before(path, 1)
    assert path.read_text() == _line(0, "a")
