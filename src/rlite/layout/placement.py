"""One side of a transfer: where every rank of a world keeps every canonical tensor.

A world of 256 ranks holds millions of boxes, nearly all of them alike. So a placement answers two questions lazily:
what does this rank hold (`local`), and who holds this tensor (`sharding`). Tensors that are held alike share one
`Sharding` object, which the planner uses as a cache key.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlite.layout.boxes import Box, Index, LocalLayout, LocalTensor, Region
from rlite.layout.catalogue import CanonicalTensor
from rlite.layout.cuts import Cut, Segment


class Shard(NamedTuple):
    """Ranks that each hold canonical elements `[start, stop)`."""

    ranks: tuple[int, ...]
    start: Index
    stop: Index


@dataclass(frozen=True, eq=False, slots=True)
class Sharding:
    """Who holds a canonical tensor. Compared by identity: equal patterns are one object within a placement."""

    shards: tuple[Shard, ...]


class Placement(Protocol):
    """What the planner asks a side."""

    world_size: int
    tensors: Mapping[str, CanonicalTensor]

    def dtype(self, name: str) -> str:
        """Torch name of the dtype in which this side stores the tensor."""
        ...

    def sharding(self, name: str) -> Sharding:
        """All boxes of the tensor, over all ranks."""
        ...

    def local(self, rank: int) -> LocalLayout:
        """All boxes of the rank, over all tensors."""
        ...


class ExplicitPlacement:
    """A placement from the layouts of all ranks, written out."""

    def __init__(self, layouts: Sequence[LocalLayout], tensors: Mapping[str, CanonicalTensor]) -> None:
        self.world_size = len(layouts)
        self.tensors = tensors
        self._layouts = layouts
        self._dtypes: dict[str, str] = {}
        shards: dict[str, dict[tuple[Index, Index], set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, layout in enumerate(layouts):
            dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
            for box in layout.boxes:
                self._check(box, dtypes[box.local], rank)
                shards[box.tensor][box.start, box.stop].add(rank)
        self._shardings = {
            name: Sharding(tuple(Shard(tuple(sorted(ranks)), *region) for region, ranks in boxes.items()))
            for name, boxes in shards.items()
        }

    def _check(self, box: Box, dtype: str, rank: int) -> None:
        if box.tensor not in self.tensors:
            raise ValueError(
                f"rank {rank}: local tensor {box.local} holds {box.tensor}, which is not a canonical tensor"
            )
        shape = self.tensors[box.tensor].shape
        if len(box.stop) != len(shape) or any(b > size for b, size in zip(box.stop, shape, strict=True)):
            raise ValueError(f"rank {rank}: {box.tensor} box {box.start}..{box.stop} leaves the shape {shape}")
        known = self._dtypes.setdefault(box.tensor, dtype)
        if known != dtype:
            raise ValueError(f"rank {rank}: {box.tensor} is {dtype} here and {known} on a lower rank")

    def dtype(self, name: str) -> str:
        return self._dtypes[name]

    def sharding(self, name: str) -> Sharding:
        return self._shardings.get(name, _NOBODY)

    def local(self, rank: int) -> LocalLayout:
        return self._layouts[rank]


_NOBODY = Sharding(())


class Slot(NamedTuple):
    """Ranks that hold part `index` of `size`, under the rule named `role`."""

    ranks: tuple[int, ...]
    index: int
    size: int
    role: str


class Rule(NamedTuple):
    """How a side stores the tensors of one role."""

    local: str
    """Name of the local tensor, relative to its layer."""
    axis: str
    """`all`: replicated; `tp`; `expert`: whatever the side does with experts."""
    cut: Cut
    stacked: bool = False
    """Whether experts lie behind each other in a leading dim."""


class _OwnPart(NamedTuple):
    """How one rank holds its part of a tensor."""

    rule: Rule
    segments: tuple[tuple[Index, Index, Index, Index], ...]
    """(canonical start, canonical stop, local start, local stop), without the position of a stacked expert."""
    padded_shape: Index
    """Shape of the local tensor when its vocabulary is padded, else empty."""


class RuledPlacement(ABC):
    """A placement that follows from a table of rules, one for each role."""

    def __init__(
        self, tensors: Mapping[str, CanonicalTensor], rules: Mapping[str, Rule], *, world_size: int, dtype: str
    ) -> None:
        self.tensors = tensors
        self.rules = rules
        self.world_size = world_size
        self._dtype = dtype
        self._slots_by_key: dict[Hashable, tuple[Slot, ...]] = {}
        self._own_parts: dict[Hashable, tuple[_OwnPart, ...]] = {}
        self._shardings: dict[Hashable, Sharding] = {}
        self._interned: dict[tuple[Shard, ...], Sharding] = {}

    padded_rows: Mapping[str, int] = {}
    """Rows, over all ranks, of the tensors of a role whose vocabulary is padded."""

    @abstractmethod
    def slot_key(self, tensor: CanonicalTensor) -> Hashable:
        """Equal for tensors that the same ranks hold in the same way."""

    @abstractmethod
    def slots(self, tensor: CanonicalTensor) -> tuple[Slot, ...]:
        """Every part of the tensor and the ranks that hold it."""

    @abstractmethod
    def locate(self, tensor: CanonicalTensor, rule: Rule) -> tuple[str, int | None]:
        """Full name of the local tensor and, when experts are stacked there, the position of this one."""

    def dtype(self, name: str) -> str:
        return self.tensors[name].dtype or self._dtype

    def sharding(self, name: str) -> Sharding:
        tensor = self.tensors[name]
        key = (self.slot_key(tensor), tensor.shape)
        if key not in self._shardings:
            shards = [
                Shard(slot.ranks, *_region(tensor, segment))
                for slot in self._cached_slots(tensor)
                for segment in self.rules[slot.role].cut(tensor, slot.index, slot.size)
            ]
            equal = self._interned.setdefault(tuple(shards), Sharding(tuple(shards)))
            self._shardings[key] = equal
        return self._shardings[key]

    def local(self, rank: int) -> LocalLayout:
        boxes: list[Box] = []
        shapes: dict[str, Index] = {}
        dtypes: dict[str, str] = {}
        padding: list[Region] = []
        for tensor in self.tensors.values():
            for rule, segments, padded_shape in self._parts(tensor, rank):
                local, position = self.locate(tensor, rule)
                lead = () if position is None else (position,)
                shape = shapes.get(local) or padded_shape
                for start, stop, first, last in segments:
                    boxes.append(Box(tensor.name, start, stop, local, lead + first))
                    end = last if position is None else (position + 1, *last)
                    shape = tuple(map(max, shape, end)) if shape else end
                if padded_shape:
                    padding.extend(_padding(tensor.name, local, segments, padded_shape))
                shapes[local] = shape
                dtypes[local] = tensor.dtype or self._dtype
        tensors = tuple(LocalTensor(name, shape, dtypes[name]) for name, shape in shapes.items())
        return LocalLayout(tensors, tuple(boxes), tuple(padding))

    def _parts(self, tensor: CanonicalTensor, rank: int) -> tuple["_OwnPart", ...]:
        """What `rank` holds of the tensor; computed once for all tensors that it holds alike."""
        key = (self.slot_key(tensor), tensor.shape, rank)
        if key not in self._own_parts:
            slots = [slot for slot in self._cached_slots(tensor) if rank in slot.ranks]
            self._own_parts[key] = tuple(self._own_part(tensor, slot) for slot in slots)
        return self._own_parts[key]

    def _own_part(self, tensor: CanonicalTensor, slot: Slot) -> "_OwnPart":
        rule, segments = self.rules[slot.role], []
        for segment in rule.cut(tensor, slot.index, slot.size):
            start, stop = _region(tensor, segment)
            first = tuple(segment.local_start if d == segment.dim else 0 for d in range(len(start)))
            last = tuple(f + b - a for f, a, b in zip(first, start, stop, strict=True))
            segments.append((start, stop, first, last))
        rows = self.padded_rows.get(slot.role, 0) // slot.size
        return _OwnPart(rule, tuple(segments), (rows, *tensor.shape[1:]) if rows else ())

    def _cached_slots(self, tensor: CanonicalTensor) -> tuple[Slot, ...]:
        key = self.slot_key(tensor)
        if key not in self._slots_by_key:
            self._slots_by_key[key] = self.slots(tensor)
        return self._slots_by_key[key]


def _region(tensor: CanonicalTensor, segment: Segment) -> tuple[Index, Index]:
    dims = range(len(tensor.shape))
    start = tuple(segment.start if d == segment.dim else 0 for d in dims)
    stop = tuple(segment.stop if d == segment.dim else tensor.shape[d] for d in dims)
    return start, stop


def _padding(tensor: str, local: str, segments: Sequence[tuple[Index, ...]], shape: Index) -> list[Region]:
    """Rows behind the last real one."""
    used = max((last[0] for *_, last in segments), default=0)
    return [Region(tensor, local, (used, *(0 for _ in shape[1:])), shape)] if used < shape[0] else []
