"""Where checkpoints are found, and what happens to what was there before a save. No policy, no process group."""

import os
from pathlib import Path

import pytest

from rlite.strategies.checkpoint import RunCheckpoint


def _complete(directory: Path, *, written_s: int = 0, content: str = "") -> Path:
    directory.mkdir(parents=True)
    (directory / "COMPLETE").write_text(content)
    os.utime(directory / "COMPLETE", (written_s, written_s))
    return directory


def test_init_from_a_directory_of_runs_takes_the_run_that_was_saved_last(tmp_path: Path) -> None:
    _complete(tmp_path / "version_0" / "checkpoints" / "rollout-9.ckpt", written_s=100)
    wanted = _complete(tmp_path / "20260101-120000" / "checkpoints" / "rollout-4.ckpt", written_s=200)
    (tmp_path / "version_1").mkdir()
    assert RunCheckpoint.find(tmp_path).path == wanted
    with pytest.raises(ValueError, match="nor a directory of such runs"):
        RunCheckpoint.find(tmp_path / "version_1")


def test_saving_over_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    best = _complete(tmp_path / "rollout-0.ckpt", content="best")
    last = tmp_path / "last.ckpt"
    last.symlink_to(best.name)
    for content in ("second", "third"):
        RunCheckpoint(last)._replace(_complete(tmp_path / ".last.ckpt.partial", content=content))
        assert not last.is_symlink()
        assert (last / "COMPLETE").read_text() == content
    assert (best / "COMPLETE").read_text() == "best"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "rollout-0.ckpt"]
