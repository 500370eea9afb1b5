"""`rlite export`: a checkpoint becomes a Hugging Face directory, streamed file by file."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from rlite.device import detect_device_kind, local_device
from rlite.layout.parallel import ParallelLayout
from rlite.megatron.options import MegatronOptions
from rlite.memory import Ledger, PhaseMachine
from rlite.modules.base import download, is_hub_id
from rlite.strategies.checkpoint import RunCheckpoint
from rlite.strategies.policy import PolicyState

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_checkpoint(checkpoint: Path, out: Path, *, policy_dir: Path | None = None, dtype: str | None = None) -> Path:
    """Loads the weights of a checkpoint, under any layout, and writes them with config and tokenizer to `out`.

    Under torchrun each rank loads and writes its share; the layout is the run's where the world size is the same, and
    pipeline stages of even size (or one rank) otherwise.

    Args:
        checkpoint: an rlite checkpoint, or a run directory.
        out: directory to write; absent or empty.
        policy_dir: the policy's Hugging Face directory; by default `model.policy` in the run's `config.yaml`.
        dtype: `float32` or `bfloat16`; by default the run's, and `float32` when no config tells.

    Raises:
        ValueError, FileNotFoundError: no checkpoint there, no policy known, or `out` is not empty.
    """
    found = RunCheckpoint.find(checkpoint)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: choose another directory")
    config = _run_config(found.path)
    policy = policy_dir or _policy_of(config, found.path)
    dtype = dtype or _dtype_of(config)
    device = _join_world()
    layout = _layout_of(config, dist.get_world_size())
    PolicyState.build_groups(layout, device, seed=0)
    state = PolicyState(
        str(policy),
        layout=layout,
        options=MegatronOptions(),
        params_dtype=_DTYPES[dtype],
        phases=PhaseMachine(Ledger()),
        initialize=False,
    )
    found.load_weights(state.chunks)
    state.save_hf(out)
    return out


def _run_config(checkpoint: Path) -> dict[str, Any]:
    """`config.yaml` of the run that wrote the checkpoint; empty when it is not beside it."""
    path = checkpoint.parent.parent / "config.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else {}


def _dtype_of(config: dict[str, Any]) -> str:
    """Of the run's weights; the Trainer's default is fp32."""
    precision = config.get("trainer", {}).get("precision")
    return "bfloat16" if str(precision).startswith("bf16") else "float32"


def _policy_of(config: dict[str, Any], checkpoint: Path) -> Path:
    policy = config.get("model", {}).get("init_args", {}).get("policy")
    if policy is None:
        raise ValueError(
            f"{checkpoint}: no config.yaml in its run directory says which policy it is; give --policy DIR"
        )
    return Path(download(policy) if is_hub_id(policy) else policy)


def _layout_of(config: dict[str, Any], world_size: int) -> ParallelLayout:
    strategy = config.get("trainer", {}).get("strategy")
    settings = strategy.get("init_args", {}).get("layout") if isinstance(strategy, dict) else None
    trainer = config.get("trainer", {})
    if world_size > 1 and settings and trainer.get("devices", 1) * trainer.get("num_nodes", 1) == world_size:
        names = {field.name for field in dataclasses.fields(ParallelLayout)}
        return ParallelLayout(**{name: value for name, value in settings.items() if name in names})
    return ParallelLayout(pp=world_size)


def _join_world() -> torch.device:
    """The process group that torchrun describes, or one process."""
    kind = detect_device_kind()
    device = local_device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group(kind.backend)
        else:
            dist.init_process_group(kind.backend, store=dist.HashStore(), rank=0, world_size=1)
    return device
