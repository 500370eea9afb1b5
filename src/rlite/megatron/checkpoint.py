"""Sharded checkpoints that load under another layout, on Megatron's `dist_checkpointing`.

Tensors carry global names and shapes: weights, fp32 main weights and Adam's moments. Random state is not saved: nothing
in training draws from it. Writing is not atomic; the caller renames the finished directory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer

from rlite.megatron.buffers import create_state
from rlite.megatron.model import unwrap
from rlite.megatron.optimizer import McoreOptimizer
from rlite.megatron.shard_files import ShardFiles

_FORMAT = "rlite-megatron-1"


def save_sharded(
    path: str | Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: McoreOptimizer | None = None,
    *,
    common: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, optimizer state and `common` (small values, equal on every rank) to `path`. Collective.

    Raises:
        FileExistsError: `path` exists and is not empty.
    """
    files = plan_sharded(path, chunks, optimizer, common=common)
    written: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(written, files.write())
    if dist.get_rank() == 0:
        files.finish(written)
    dist.barrier()


def plan_sharded(
    path: str | Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: McoreOptimizer | None = None,
    *,
    common: Mapping[str, Any] | None = None,
) -> ShardFiles:
    """The files that each rank is to write for `save_sharded`, which the caller has written and finished. Collective.

    Raises:
        FileExistsError: `path` exists and is not empty.
        OSError: it could not be made.
    """
    path = Path(path)
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)  # all ranks raise, or none
    if problem[0] is not None:
        raise OSError(problem[0])
    if any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty: a checkpoint needs a directory of its own")
    dist.barrier()  # nobody writes before everybody looked
    state = _sharded_state(chunks, optimizer, is_loading=False)
    state["rlite"] = {
        "format": _FORMAT,
        "common": dict(common or {}),
        "optimizer_steps": None if optimizer is None else _num_steps(optimizer),
    }
    return ShardFiles(path, state, _data_parallel_group())


def load_sharded(
    path: str | Path, chunks: Sequence[torch.nn.Module], optimizer: McoreOptimizer | None = None
) -> dict[str, Any]:
    """Read `path` into the model and, when given, its optimizer, in place; returns `common`. Collective.

    The layout may differ from the one that saved. Flat optimizer buffers stay what they are. Without `optimizer`, only
    weights are read; a bf16 model that is to be trained then needs `optimizer.reload_model_params()`.

    Raises:
        ValueError: `path` is not a complete checkpoint of this package, or holds no optimizer state.
    """
    path = Path(path)
    saved = _read_header(path)
    if optimizer is not None and saved["optimizer_steps"] is None:
        raise ValueError(f"{path} holds weights only, no optimizer state")
    state = _sharded_state(chunks, optimizer, is_loading=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), _data_parallel_group())
    loaded = dist_checkpointing.load(state, str(path), strategy)
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded["model"][index])
    if optimizer is not None:
        for index, part in enumerate(optimizer.parts):
            part.load_parameter_state_from_fully_reshardable(loaded["optimizer"][index])
            _set_steps(part, saved["optimizer_steps"])
    return saved["common"]


def _read_header(path: Path) -> dict[str, Any]:
    if not (path / "metadata.json").is_file() or not (path / "common.pt").is_file():
        raise ValueError(f"{path} is not a complete sharded checkpoint: metadata.json or common.pt is missing")
    header = dist_checkpointing.load_common_state_dict(str(path)).get("rlite")
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"{path} is a checkpoint of another program or version: expected format {_FORMAT}")
    return header


def _sharded_state(
    chunks: Sequence[torch.nn.Module], optimizer: McoreOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        # The default for AdamW without Transformer Engine raises in Megatron-core 0.16.1.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": _data_parallel_group(),
    }
    model = {i: unwrap(chunk).sharded_state_dict(prefix="", metadata=metadata) for i, chunk in enumerate(chunks)}
    if optimizer is None:
        return {"model": model}
    create_state(optimizer)
    flat = {f"{index}.{name}": tensor for index, chunk in model.items() for name, tensor in chunk.items()}
    # Only `param_state`: the rest is numbered by sub-optimizer, of which there is another number on another layout.
    states = {
        index: part.sharded_state_dict(flat, is_loading=is_loading, metadata=metadata)["param_state"]
        for index, part in enumerate(optimizer.parts)
    }
    return {"model": model, "optimizer": states}


def _num_steps(optimizer: McoreOptimizer) -> int:
    """Adam's step count: one number for all parameters. Torch keeps it in the state, fused optimizers in the groups."""
    for part in optimizer.parts:
        holders = [*part.optimizer.state.values(), *part.optimizer.param_groups]
        for holder in holders:
            if "step" in holder:
                return int(holder["step"])
    return 0


def _set_steps(part: MegatronOptimizer, num_steps: int) -> None:
    for state in part.optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], num_steps)
    for group in part.optimizer.param_groups:
        if "step" in group:
            group["step"] = num_steps


def _data_parallel_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
