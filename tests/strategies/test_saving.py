"""Saving in the background, and saves that fail or are killed. Real weights, optimizer, files and processes; no trainer."""

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.buffers import flat_optimizer_state, flat_parameters
from rlite.megatron.checkpoint import load_sharded, plan_sharded
from rlite.megatron.optimizer import LrScheduler
from rlite.megatron.options import OptimizerConfig
from rlite.megatron.shard_files import ShardFiles
from rlite.strategies.checkpoint import RunCheckpoint, newest_checkpoint
from rlite.strategies.pending import CheckpointError
from rlite.strategies.saving import CheckpointSaver
from tests.helpers.world import run_world
from tests.megatron.test_checkpoint import _train
from tests.megatron.tiny import CONFIGS, Policy, bring_up

EP2 = ParallelLayout(ep=2)
OPTIMIZER = OptimizerConfig(lr=3e-3)


def _policy() -> tuple[Policy, LrScheduler]:
    policy = bring_up(CONFIGS["qwen3_moe"], EP2, optimizer=OPTIMIZER)
    return policy, LrScheduler(policy.runner.optimizer)


def _state(policy: Policy) -> list[torch.Tensor]:
    """Weights, fp32 main weights and moments of this rank."""
    flats = flat_parameters(policy.chunks) + flat_optimizer_state(policy.runner.optimizer)
    return [flat.clone() for flat in flats]


def _save(
    saver: CheckpointSaver,
    path: Path,
    policy: Policy,
    *,
    background: bool,
    step: int,
    before_planning: Callable[[], None] = lambda: None,
) -> None:
    def plan(directory: Path) -> Iterator[ShardFiles]:
        before_planning()
        yield plan_sharded(directory / "sharded", policy.chunks, policy.runner.optimizer)

    if background:
        with saver.background():
            saver.save(RunCheckpoint(path), {"global_step": step}, plan)
    else:
        saver.save(RunCheckpoint(path), {"global_step": step}, plan)


def _hold_writes() -> threading.Event:
    """From now on files are written only when the event is set."""
    may_write, write = threading.Event(), ShardFiles.write
    ShardFiles.write = lambda files: may_write.wait() and write(files)
    return may_write


def _free(policy: Policy) -> None:
    """What the phase machine does when generation begins."""
    for flat in flat_parameters(policy.chunks) + flat_optimizer_state(policy.runner.optimizer):
        flat.untyped_storage().resize_(0)


def _load(path: Path) -> tuple[list[torch.Tensor], list[float]]:
    policy, scheduler = _policy()
    checkpoint = RunCheckpoint(newest_checkpoint(path))
    load_sharded(checkpoint.path / "sharded", policy.chunks, policy.runner.optimizer)
    loaded = _state(policy)
    return loaded, _train(policy, scheduler, range(2, 4))


def _save_in_both_ways(folder: Path) -> tuple[list[torch.Tensor], list[bool]]:
    policy, scheduler = _policy()
    saver = CheckpointSaver()
    _train(policy, scheduler, range(2))
    expected = _state(policy)
    _save(saver, folder / "sync" / "rollout-2.ckpt", policy, background=False, step=2)
    target = folder / "async" / "rollout-2.ckpt"
    may_write = _hold_writes()
    _save(saver, target, policy, background=True, step=2)
    saver.link(str(target.with_name("last.ckpt")), str(target))
    _train(policy, scheduler, range(2, 3))
    _free(policy)
    saver.finish(wait=False)
    seen = [target.exists(), target.with_name("last.ckpt").is_symlink()]
    dist.barrier()
    may_write.set()
    saver.finish()
    return expected, [*seen, target.exists(), target.with_name("last.ckpt").is_symlink()]


def test_a_save_in_the_background_holds_the_state_of_its_moment_and_appears_when_it_is_whole(tmp_path: Path) -> None:
    before = run_world(2, _save_in_both_ways, tmp_path)
    assert before[0][1] == [False, False, True, True], "neither name nor link before every rank has written"
    for way in ("sync", "async"):
        after = run_world(2, _load, tmp_path / way)
        for (saved, _), (loaded, _) in zip(before, after, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True)), way
        if way == "sync":
            norms = [rank[1] for rank in after]
    assert [rank[1] for rank in after] == norms, "training goes on alike from both"
    assert not list((tmp_path / "async").glob(".*")), "nothing unfinished is left"


def _limit_file_size(rank: int, limit_bytes: int) -> None:
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))


def _fail_to_write(
    folder: Path, rank: int, limit_bytes: int, background: bool, when: str
) -> tuple[str, list[torch.Tensor]]:
    policy, scheduler = _policy()
    saver = CheckpointSaver()
    _train(policy, scheduler, range(1))
    expected = _state(policy)
    _save(saver, folder / "rollout-1.ckpt", policy, background=False, step=1)
    _train(policy, scheduler, range(1, 2))
    limit = partial(_limit_file_size, rank, limit_bytes)
    if when == "at once":
        limit()
    try:
        before = limit if when == "planning" else lambda: None
        _save(saver, folder / "rollout-2.ckpt", policy, background=background, step=2, before_planning=before)
        saver.remove(str(folder / "rollout-1.ckpt"))
        saver.finish()
    except CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(error), expected
    return "", expected


@pytest.mark.parametrize(
    ("rank", "limit_bytes", "background", "when"),
    [
        (1, 10_000, False, "at once"),
        (0, 10_000, True, "at once"),
        (0, 100, False, "at once"),  # at trainer.pt already
        (0, 100, False, "planning"),  # at common.pt
    ],
)
def test_a_write_error_stops_every_rank_and_leaves_what_was_there(
    rank: int, limit_bytes: int, background: bool, when: str, tmp_path: Path
) -> None:
    reports = run_world(2, _fail_to_write, tmp_path, rank, limit_bytes, background, when)
    for message, _ in reports:
        assert f"checkpoint {tmp_path}/rollout-2.ckpt was not written. Rank {rank}: " in message
        assert "File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["rollout-1.ckpt"], "no half directory, nothing removed"
    for (_, saved), (loaded, _) in zip(reports, run_world(2, _load, tmp_path), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


def _die_while_writing(folder: Path, rank: int) -> None:
    policy, scheduler = _policy()
    saver = CheckpointSaver()
    _save(saver, folder / "rollout-1.ckpt", policy, background=True, step=1)
    _train(policy, scheduler, range(1))
    finish, write = saver.finish, ShardFiles.write

    def killed(files: ShardFiles) -> Any:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(files)

    finish()
    ShardFiles.write = killed
    _save(saver, folder / "rollout-2.ckpt", policy, background=True, step=2)
    _train(policy, scheduler, range(1, 2))


def _fail_elsewhere(folder: Path) -> None:
    """Each rank handles an error on its own, while the save is written; rank 1 takes longest."""
    policy, _ = _policy()
    saver = CheckpointSaver()
    may_write = _hold_writes()
    _save(saver, folder / "rollout-1.ckpt", policy, background=True, step=1)
    saver.link(str(folder / "last.ckpt"), str(folder / "rollout-1.ckpt"))
    threading.Timer(float(dist.get_rank()), may_write.set).start()
    saver.finish_after_error()


def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_world(2, _die_while_writing, tmp_path, 1)
    assert (tmp_path / ".rollout-2.ckpt.partial").is_dir()
    assert newest_checkpoint(tmp_path) == tmp_path / "rollout-1.ckpt"
    run_world(2, _load, tmp_path)


def test_an_error_elsewhere_waits_for_the_save_in_the_background(tmp_path: Path) -> None:
    (tmp_path / ".rollout-9.ckpt.partial").mkdir()
    run_world(2, _fail_elsewhere, tmp_path)
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "rollout-1.ckpt"
    assert not list(tmp_path.glob(".*")), "what a killed save had left is gone"
    run_world(2, _load, tmp_path)
