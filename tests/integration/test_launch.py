"""How ranks start: our own launcher, torchrun with two nodes, and SLURM."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT, logger, metrics

SFT = (
    "fit",
    "--config",
    "configs/sft_demo_cpu.yaml",
    "--trainer.limit_train_batches=2",
    "--trainer.enable_checkpointing=false",
)


def environment() -> dict[str, str]:
    """Without what a forked world left behind."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    return {key: value for key, value in os.environ.items() if key not in ranks} | {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def own_launcher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """The directory of a run with the launcher's own two ranks, and how it ended."""
    folder = tmp_path_factory.mktemp("own") / "run"
    command = [sys.executable, "-m", "rlite", *SFT, logger(folder)]
    return folder, subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


def start(command: list[str], **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        command, cwd=ROOT, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_the_command_starts_its_own_ranks_and_prints_only_its_lines(own_launcher: tuple) -> None:
    folder, done = own_launcher
    assert done.returncode == 0, done.stderr
    assert len(metrics(folder)) == 2
    assert len(done.stdout.splitlines()) <= 3, done.stdout


@pytest.mark.slow
def test_two_torchrun_nodes_train_what_two_local_ranks_train(own_launcher: tuple, tmp_path: Path) -> None:
    """2 nodes of 2 processes, data parallel 4 with experts over 2, against the launcher's own 2 processes."""
    port = free_port()
    nodes = [
        start([
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=2",
            "--master_addr=127.0.0.1", f"--master_port={port}", "-m", "rlite", *SFT, "--trainer.num_nodes=2",
            logger(tmp_path / "two"),
        ])
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    for here, there in zip(metrics(tmp_path / "two"), metrics(own_launcher[0]), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_slurm_tasks_train_the_same_and_sigusr1_stops_them_saved(own_launcher: tuple, tmp_path: Path) -> None:
    """Two tasks as `srun` starts them. In the second step one gets the signal that SLURM sends before the time is up."""
    fault = f"{{where: update, rank: 1, step: 1, signum: {signal.SIGUSR1:d}}}"
    command = [
        sys.executable, "-m", "rlite", *SFT, "--trainer.limit_train_batches=9", "--trainer.enable_checkpointing=true",
        f"--trainer.callbacks+={{class_path: tests.integration.faults.Signal, init_args: {fault}}}",
        logger(tmp_path / "run"),
    ]  # fmt: skip
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    tasks = [start(command, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    outputs = [task.communicate(timeout=300)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [143, 143], "\n".join(outputs)
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").resolve().name == "rollout-1.ckpt"
    for here, there in zip(metrics(tmp_path / "run"), metrics(own_launcher[0]), strict=True):
        assert (here["loss"], here["grad_norm"]) == (there["loss"], there["grad_norm"])
