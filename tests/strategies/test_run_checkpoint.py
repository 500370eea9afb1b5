"""Where checkpoints are found, and what happens to what was there before a save. No policy, no process group."""

import os
from pathlib import Path

import pytest

from rlite.strategies.checkpoint import RunCheckpoint, newest_checkpoint
from rlite.strategies.pending import put_in_place


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
        put_in_place(_complete(tmp_path / ".last.ckpt.partial", content=content), last)
        assert not last.is_symlink()
        assert (last / "COMPLETE").read_text() == content
    assert (best / "COMPLETE").read_text() == "best"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "rollout-0.ckpt"]


def test_linking_replaces_a_link_or_a_directory(tmp_path: Path) -> None:
    last = RunCheckpoint(tmp_path / "last.ckpt")
    _complete(last.path, content="by itself")
    for name in ("rollout-0.ckpt", "rollout-1.ckpt"):
        last.link_to(_complete(tmp_path / name, content=name))
        assert last.path.is_symlink()
        assert (last.path / "COMPLETE").read_text() == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "rollout-0.ckpt", "rollout-1.ckpt"]


@pytest.mark.parametrize("died", ["between the two renames", "before the first"])
def test_a_save_killed_while_names_change_leaves_a_whole_checkpoint_to_go_on_from(died: str, tmp_path: Path) -> None:
    _complete(tmp_path / "rollout-0.ckpt", written_s=1, content="best")
    name = ".last.ckpt.old" if died == "between the two renames" else "last.ckpt"
    _complete(tmp_path / name, written_s=2, content="old")
    (tmp_path / ".rollout-9.ckpt.partial").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found / "COMPLETE").read_text() == "old"
    _complete(tmp_path / ".last.ckpt.partial", written_s=3, content="new")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found / "COMPLETE").read_text() == ("new" if name.startswith(".") else "old")


def test_a_directory_stops_being_a_checkpoint_before_its_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = RunCheckpoint(_complete(tmp_path / "rollout-0.ckpt"))
    (checkpoint.path / "trainer.pt").touch()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed here
    checkpoint.remove()
    assert (tmp_path / ".rollout-0.ckpt.old" / "trainer.pt").exists(), "the next save clears away what has this name"
    assert not checkpoint.path.exists() and newest_checkpoint(tmp_path) is None
