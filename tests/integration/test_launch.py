"""How ranks start: our own launcher, and torchrun with two nodes."""

import os
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


@pytest.mark.slow
def test_the_command_starts_its_own_ranks_and_prints_only_its_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlite", *SFT, logger(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "run")) == 2
    assert len(done.stdout.splitlines()) <= 3, done.stdout


@pytest.mark.slow
def test_two_torchrun_nodes_train_what_two_local_ranks_train(tmp_path: Path) -> None:
    """2 nodes of 2 processes, data parallel 4 with experts over 2, against the launcher's own 2 processes."""
    one = [sys.executable, "-m", "rlite", *SFT, logger(tmp_path / "one")]
    subprocess.run(one, cwd=ROOT, env=environment(), capture_output=True, check=True, timeout=300)
    port = free_port()
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=2",
             "--master_addr=127.0.0.1", f"--master_port={port}", "-m", "rlite", *SFT, "--trainer.num_nodes=2",
             logger(tmp_path / "two")],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    for here, there in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)
