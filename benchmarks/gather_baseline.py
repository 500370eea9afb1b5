"""What the transfer is compared with: build every full tensor on every rank, then keep the slice that is needed.

Each full tensor is assembled once from the gathered parts, as the weight loader of an engine wants it. Tensors that all
ranks hold whole are not gathered. Ranks whose tensors differ in size are padded to the largest.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.layout.boxes import Box, LocalTensor
from rlite.layout.placement import Placement

Tensors = dict[str, Tensor]


@dataclass(slots=True)
class GatherStats:
    bytes_received: int = 0
    ops: int = 0
    peak_bytes: int = 0
    """Gathered buffers and full tensors at a time, beyond source and destination."""


class GatherAll:
    """`bucket_bytes` = 0 gathers tensor by tensor; otherwise local tensors are concatenated up to that size."""

    def __init__(self, sources: Placement, destinations: Placement, rank: int, *, bucket_bytes: int) -> None:
        self.world_size, self.rank = sources.world_size, rank
        layouts = [sources.local(r) for r in range(self.world_size)]
        everyone = tuple(range(self.world_size))
        whole = {name for name in sources.tensors if all(s.ranks == everyone for s in sources.sharding(name).shards)}
        self.boxes: list[dict[str, list[Box]]] = []
        seen: set[tuple] = set()
        for layout in layouts:
            by_local: dict[str, list[Box]] = {tensor.name: [] for tensor in layout.tensors}
            for box in layout.boxes:
                key = (box.tensor, box.start)
                if box.tensor in whole or key not in seen:
                    by_local[box.local].append(box)
                    seen.add(key)
            self.boxes.append(by_local)
        skipped = [{box.local for box in layout.boxes if box.tensor in whole} for layout in layouts]
        gathered = [
            [t for t in layout.tensors if t.name not in skip] for layout, skip in zip(layouts, skipped, strict=True)
        ]
        self.steps = list(_steps(gathered, bucket_bytes))
        self.local_only = [t for t in layouts[rank].tensors if t.name in skipped[rank]]
        self.numel = {name: math.prod(tensor.shape) for name, tensor in sources.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in sources.tensors.items()}
        self.needed: dict[str, list[Box]] = {}
        for box in destinations.local(rank).boxes:
            self.needed.setdefault(box.tensor, []).append(box)

    @torch.no_grad()
    def run(self, source: Tensors, destination: Tensors) -> GatherStats:
        stats, full, missing = GatherStats(), {}, dict(self.numel)
        for tensor in self.local_only:
            self._arrive(source[tensor.name], self.boxes[self.rank][tensor.name], full, missing, destination)
        for step in self.steps:
            dtype = getattr(torch, next(t.dtype for tensors in step for t in tensors))
            flat = torch.empty(max(sum(math.prod(t.shape) for t in tensors) for tensors in step), dtype=dtype)
            offset = 0
            for tensor in step[self.rank]:
                flat[offset : offset + math.prod(tensor.shape)] = source[tensor.name].view(-1)
                offset += math.prod(tensor.shape)
            gathered = torch.empty(self.world_size * flat.numel(), dtype=dtype)
            dist.all_gather_into_tensor(gathered, flat)
            stats.ops += 1
            stats.bytes_received += (self.world_size - 1) * flat.nbytes
            for rank, tensors in enumerate(step):
                offset = rank * flat.numel()
                for tensor in tensors:
                    numel = math.prod(tensor.shape)
                    local = gathered[offset : offset + numel].view(tensor.shape)
                    self._arrive(local, self.boxes[rank][tensor.name], full, missing, destination)
                    offset += numel
            held = gathered.nbytes + flat.nbytes + sum(tensor.nbytes for tensor in full.values())
            stats.peak_bytes = max(stats.peak_bytes, held)
        return stats

    def _arrive(
        self, local: Tensor, boxes: list[Box], full: Tensors, missing: dict[str, int], destination: Tensors
    ) -> None:
        """Puts the parts where they belong in the full tensors, and slices each full tensor once it is complete."""
        for box in boxes:
            part = local[box.local_index(box.start, box.stop)]
            name = box.tensor
            whole = full[name] if name in full else torch.empty(self.shapes[name], dtype=part.dtype)
            whole[tuple(map(slice, box.start, box.stop))] = part
            missing[name] -= part.numel()
            if missing[name]:
                full[name] = whole
                continue
            complete = full.pop(name, whole)
            for need in self.needed.get(name, ()):
                target = destination[need.local][need.local_index(need.start, need.stop)]
                target.copy_(complete[tuple(map(slice, need.start, need.stop))])


def _steps(gathered: list[list[LocalTensor]], bucket_bytes: int) -> Iterator[list[list[LocalTensor]]]:
    """For each collective, the local tensors that every rank contributes; one dtype at a time."""
    for dtype in sorted({tensor.dtype for tensors in gathered for tensor in tensors}):
        columns = [[tensor for tensor in tensors if tensor.dtype == dtype] for tensors in gathered]
        step: list[list[LocalTensor]] = [[] for _ in columns]
        used = 0
        for i in range(max(map(len, columns))):
            row = [column[i : i + 1] for column in columns]
            size = max(math.prod(t.shape) * getattr(torch, dtype).itemsize for tensors in row for t in tensors)
            if used and used + size > bucket_bytes:
                yield step
                step, used = [[] for _ in columns], 0
            step = [old + new for old, new in zip(step, row, strict=True)]
            used += size
        yield step
