"""How one canonical tensor is cut over `size` ranks: pure functions (tensor, index, size) -> segments.

A segment is a run of rows (or columns) and where it starts in the local tensor; all other dims are whole.
"""

from collections.abc import Callable
from typing import NamedTuple

from rlite.layout.catalogue import CanonicalTensor


class Segment(NamedTuple):
    """Canonical `[start, stop)` along `dim`, stored from `local_start` on along the same dim."""

    dim: int
    start: int
    stop: int
    local_start: int


Cut = Callable[[CanonicalTensor, int, int], list[Segment]]


def even_range(tensor: CanonicalTensor, extent: int, index: int, size: int, unit: str) -> range:
    """Part `index` of `extent` cut in `size` equal parts. Raises ValueError when it does not divide."""
    if extent % size:
        raise ValueError(
            f"{tensor.name} {tensor.shape}: {extent} {unit} do not divide over {size} ranks; set a tensor parallel size "
            "that divides them"
        )
    part = extent // size
    return range(index * part, (index + 1) * part)


def whole(offset: int = 0) -> Cut:
    """Every rank holds all of it, `offset` rows into the local tensor."""
    return lambda tensor, index, size: [Segment(0, 0, tensor.shape[0], offset)]


def split(dim: int, *, heads: int | None = None) -> Cut:
    """Equal parts along `dim`, which holds `heads` attention heads that must stay whole."""

    def cut(tensor: CanonicalTensor, index: int, size: int) -> list[Segment]:
        if heads is not None:
            even_range(tensor, heads, index, size, "attention heads")
        part = even_range(tensor, tensor.shape[dim], index, size, "rows" if dim == 0 else "columns")
        return [Segment(dim, part.start, part.stop, 0)]

    return cut


def half(which: int) -> Cut:
    """Gate (0) or up (1) of a fused `[gate part | up part]` projection: each rank has its part of both."""

    def cut(tensor: CanonicalTensor, index: int, size: int) -> list[Segment]:
        part = even_range(tensor, tensor.shape[0], index, size, "rows")
        return [Segment(0, part.start, part.stop, which * len(part))]

    return cut


def vocabulary(padded_rows: int) -> Cut:
    """Rows of a vocabulary padded to `padded_rows`, cut evenly; only real rows are a segment."""

    def cut(tensor: CanonicalTensor, index: int, size: int) -> list[Segment]:
        part = even_range(tensor, padded_rows, index, size, "padded vocabulary rows")
        stop = min(part.stop, tensor.shape[0])
        return [Segment(0, part.start, stop, 0)] if stop > part.start else []

    return cut


def interleaved_qkv(which: int, *, num_heads: int, num_kv_heads: int, head_dim: int) -> Cut:
    """Megatron's `linear_qkv`: for every KV group its queries, its key, its value. `which`: 0 q, 1 k, 2 v."""
    queries = num_heads // num_kv_heads
    group_rows = (queries + 2) * head_dim
    offset = (0, queries * head_dim, (queries + 1) * head_dim)[which]
    rows = queries * head_dim if which == 0 else head_dim

    def cut(tensor: CanonicalTensor, index: int, size: int) -> list[Segment]:
        groups = even_range(tensor, num_kv_heads, index, size, "KV heads")
        return [Segment(0, g * rows, (g + 1) * rows, (g - groups.start) * group_rows + offset) for g in groups]

    return cut


def stacked_qkv(which: int, *, num_heads: int, num_kv_heads: int, head_dim: int) -> Cut:
    """vLLM's `qkv_proj`: [queries | keys | values] of this rank; with more ranks than KV heads, heads repeat."""

    def cut(tensor: CanonicalTensor, index: int, size: int) -> list[Segment]:
        heads = even_range(tensor, num_heads, index, size, "attention heads")
        if size > num_kv_heads:
            if size % num_kv_heads:
                raise ValueError(f"{tensor.name} {tensor.shape}: {size} ranks cannot share {num_kv_heads} KV heads")
            first = index // (size // num_kv_heads)
            kv_heads = range(first, first + 1)
        else:
            kv_heads = even_range(tensor, num_kv_heads, index, size, "KV heads")
        mine = heads if which == 0 else kv_heads
        offset = (0, len(heads), len(heads) + len(kv_heads))[which]
        return [Segment(0, mine.start * head_dim, mine.stop * head_dim, offset * head_dim)]

    return cut
