"""Hugging Face directories as endpoints: every rank reads only its boxes, and an export is one transfer for each file.

No rank ever holds the model: an import reads slices straight into the local tensors, an export holds a file at a time.
"""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import Box, LocalLayout
from rlite.layout.catalogue import CanonicalTensor, catalogue
from rlite.layout.hf import hf_boxes
from rlite.layout.placement import ExplicitPlacement, Placement
from rlite.reshard.moves import ITEMSIZE
from rlite.reshard.plan import DEFAULT_STAGING_BUDGET_BYTES, plan_transfer
from rlite.reshard.routes import Topology
from rlite.reshard.transfer import Transfer

INDEX_FILE = "model.safetensors.index.json"
DEFAULT_MAX_SHARD_BYTES = 4 * 2**30

_COPIED_FILES = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*.tiktoken", "spiece.model",
)  # fmt: skip


def load_hf_weights(directory: str | Path, layout: LocalLayout, tensors: Mapping[str, Tensor]) -> None:
    """Fills this rank's `tensors` (by the local names of `layout`) from the checkpoint in `directory`, casting dtypes.

    Padding becomes zero. No communication. Raises FileNotFoundError without weights, ValueError when the checkpoint
    lacks a tensor, has it in another shape than its `config.json` says, or stores it quantised.
    """
    directory = Path(directory)
    files = _files_by_tensor(directory)
    known = catalogue(Architecture.from_config(json.loads((directory / "config.json").read_text())))
    by_file: dict[Path, list[Box]] = defaultdict(list)
    for box in layout.boxes:
        if box.tensor not in files or box.tensor not in known:
            place = "config.json" if box.tensor in files else "*.safetensors"
            raise ValueError(f"{directory}: {place} has no tensor {box.tensor}, which the model needs")
        by_file[files[box.tensor]].append(box)
    with torch.no_grad():
        for region in layout.padding:
            tensors[region.local][tuple(map(slice, region.start, region.stop))].zero_()
        for path, boxes in by_file.items():
            with safe_open(path, framework="pt") as file:
                for box in boxes:
                    _read(file, path, box, known[box.tensor].shape, tensors[box.local])


def save_hf_weights(
    directory: str | Path,
    placement: Placement,
    tensors: Mapping[str, Tensor],
    *,
    config_dir: str | Path,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    staging_budget_bytes: int = DEFAULT_STAGING_BUDGET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the model that `tensors` of all ranks make up, as `placement` says, as a Hugging Face directory.

    Collective. Rank r writes files r, r + world size, ...; each is assembled by a transfer of its own, so a rank holds
    at most `max_shard_bytes` (or one larger tensor) beyond its own weights. `dtype` defaults to that of the weights.
    `config_dir` provides `config.json` and the tokenizer.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model_dtype = dtype or placement.dtype(next(iter(placement.tensors)))
    shards = list(_shards(placement.tensors.values(), model_dtype, max_shard_bytes))
    names = _file_names(len(shards))
    device = next(iter(tensors.values())).device
    for first in range(0, len(shards), world_size):
        wave = [hf_boxes(shard, dtype=model_dtype) for shard in shards[first : first + world_size]]
        wave += [LocalLayout((), ())] * (world_size - len(wave))
        chosen = {tensor.name: tensor for shard in shards[first : first + world_size] for tensor in shard}
        plan = plan_transfer(
            placement,
            ExplicitPlacement(wave, chosen),
            topology=Topology(node_size=world_size),
            rank=rank,
            tensors=chosen,
            staging_budget_bytes=staging_budget_bytes,
        )
        file = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device=device) for t in wave[rank].tensors}
        Transfer(plan, group).run(tensors, file)
        if file:
            _replace(directory / names[first + rank], lambda path, file=file: save_file(file, path, {"format": "pt"}))
    if rank == 0:
        _write_index(directory, shards, names, model_dtype)
        _write_config(Path(config_dir), directory, model_dtype)
    dist.barrier(group)


def hf_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """`config.json` of an export: says what was written, and what vLLM needs to know and transformers leaves out."""
    out = {**config, "dtype": dtype}
    out.pop("torch_dtype", None)
    if config.get("model_type") == "deepseek_v3":
        out["topk_method"] = config.get("topk_method") or "noaux_tc"
        out["scoring_func"] = config.get("scoring_func") or "sigmoid"
    if config.get("num_nextn_predict_layers"):
        # Multi-token-prediction layers are not part of the trained model.
        out["num_nextn_predict_layers"] = 0
    return out


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    index = directory / INDEX_FILE
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors")
    return files


def _read(file: Any, path: Path, box: Box, shape: tuple[int, ...], local: Tensor) -> None:
    stored = file.get_slice(box.tensor)
    if tuple(stored.get_shape()) != shape:
        raise ValueError(f"{path}: {box.tensor} has shape {tuple(stored.get_shape())}; config.json implies {shape}")
    if len(box.stop) != len(shape) or any(b > size for b, size in zip(box.stop, shape, strict=True)):
        raise ValueError(f"{path}: {box.tensor} has shape {shape}; the model needs elements up to {box.stop}")
    if not stored.get_dtype().startswith(("F16", "F32", "F64", "BF16")):
        raise ValueError(
            f"{path}: {box.tensor} is stored as {stored.get_dtype()}; convert the checkpoint to bf16 first"
        )
    local[box.local_index(box.start, box.stop)].copy_(stored[tuple(map(slice, box.start, box.stop))])


def _shards(tensors: Iterator[CanonicalTensor], dtype: str, max_bytes: int) -> Iterator[list[CanonicalTensor]]:
    shard: list[CanonicalTensor] = []
    used = 0
    for tensor in tensors:
        nbytes = _nbytes(tensor, dtype)
        if shard and used + nbytes > max_bytes:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += nbytes
    if shard:
        yield shard


def _nbytes(tensor: CanonicalTensor, dtype: str) -> int:
    return torch.Size(tensor.shape).numel() * ITEMSIZE[tensor.dtype or dtype]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _write_index(
    directory: Path, shards: Sequence[Sequence[CanonicalTensor]], names: Sequence[str], dtype: str
) -> None:
    if len(shards) == 1:
        return
    weight_map = {tensor.name: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    total = sum(_nbytes(tensor, dtype) for shard in shards for tensor in shard)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    _replace(directory / INDEX_FILE, lambda path: path.write_text(text))


def _write_config(source: Path, directory: Path, dtype: str) -> None:
    text = json.dumps(hf_config(json.loads((source / "config.json").read_text()), dtype), indent=2)
    _replace(directory / "config.json", lambda path: path.write_text(text))
    if source.resolve() == directory.resolve():
        return
    for pattern in _COPIED_FILES:
        for path in source.glob(pattern):
            shutil.copy2(path, directory / path.name)


def _replace(path: Path, write: Any) -> None:
    """Writes beside `path` and renames, so that a file that exists is complete."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)
