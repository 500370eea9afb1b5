"""Boxes: which part of a canonical tensor lies where in a local one.

All indices are Python integers; a box is half-open, `start[d] <= i < stop[d]`. A local tensor may have leading
dims that the canonical one lacks (experts stacked as `[E, rows, columns]`); there the box has extent 1. A local tensor
that stores the transpose is handed to the transfer as a transposed view, so boxes need no such flag.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

Index = tuple[int, ...]


class Box(NamedTuple):
    """Elements `[start, stop)` of canonical `tensor`, stored in `local` from `local_start` on."""

    tensor: str
    start: Index
    stop: Index
    local: str
    local_start: Index

    @property
    def numel(self) -> int:
        return volume(self.start, self.stop)

    @property
    def local_stop(self) -> Index:
        lead = len(self.local_start) - len(self.start)
        extent = (1,) * lead + tuple(b - a for a, b in zip(self.start, self.stop, strict=True))
        return tuple(s + e for s, e in zip(self.local_start, extent, strict=True))

    def local_index(self, start: Index, stop: Index) -> tuple[int | slice, ...]:
        """Index of the local tensor that gives canonical elements `[start, stop)`, which lie inside this box."""
        lead = len(self.local_start) - len(self.start)
        offsets = [local - first for local, first in zip(self.local_start[lead:], self.start, strict=True)]
        rows = [slice(a + o, b + o) for a, b, o in zip(start, stop, offsets, strict=True)]
        return (*self.local_start[:lead], *rows)


class LocalTensor(NamedTuple):
    """A tensor as one rank stores it; `dtype` by its torch name, for example `bfloat16`."""

    name: str
    shape: Index
    dtype: str


class Region(NamedTuple):
    """Elements of a local tensor that pad canonical `tensor` (vocabulary rows) and are kept zero."""

    tensor: str
    local: str
    start: Index
    stop: Index


class LocalLayout(NamedTuple):
    """All that one rank holds."""

    tensors: tuple[LocalTensor, ...]
    boxes: tuple[Box, ...]
    padding: tuple[Region, ...] = ()


def volume(start: Index, stop: Index) -> int:
    return math.prod(b - a for a, b in zip(start, stop, strict=True))


def intersect(start: Index, stop: Index, other_start: Index, other_stop: Index) -> tuple[Index, Index] | None:
    """Common part of two boxes of one tensor, None when they have none."""
    low = tuple(map(max, start, other_start))
    high = tuple(map(min, stop, other_stop))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def check_local(layout: LocalLayout) -> None:
    """Raises ValueError unless every local element lies in exactly one box or padding region."""
    parts: dict[str, list[tuple[Index, Index]]] = defaultdict(list)
    for box in layout.boxes:
        parts[box.local].append((box.local_start, box.local_stop))
    for region in layout.padding:
        parts[region.local].append((region.start, region.stop))
    known = {tensor.name: tensor for tensor in layout.tensors}
    if unknown := parts.keys() - known.keys():
        raise ValueError(f"boxes name local tensors that do not exist: {sorted(unknown)[:3]}")
    for tensor in layout.tensors:
        _check_tiling(tensor, sorted(parts[tensor.name]))


def _check_tiling(tensor: LocalTensor, parts: Sequence[tuple[Index, Index]]) -> None:
    for i, (start, stop) in enumerate(parts):
        if min(start) < 0 or any(b > size for b, size in zip(stop, tensor.shape, strict=True)):
            raise ValueError(f"{tensor.name}: box {start}..{stop} leaves the tensor's shape {tensor.shape}")
        for other_start, other_stop in parts[i + 1 :]:
            if other_start[0] >= stop[0]:
                break
            if intersect(start, stop, other_start, other_stop):
                raise ValueError(f"{tensor.name}: boxes {start}..{stop} and {other_start}..{other_stop} overlap")
    covered, numel = sum(volume(*part) for part in parts), math.prod(tensor.shape)
    if covered != numel:
        raise ValueError(f"{tensor.name}: boxes cover {covered} of the {numel} elements of shape {tensor.shape}")
