"""Global decisions that every rank takes alone and alike: who sends each piece, and in which bucket it travels."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlite.layout.boxes import Index
from rlite.layout.placement import Sharding
from rlite.reshard.pieces import Match, Piece

_BUCKETS_TO_OVERLAP = 8
_SMALLEST_BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Which ranks are close to each other: `node_size` consecutive ranks share a node."""

    node_size: int

    def node(self, rank: int) -> int:
        return rank // self.node_size


class Traffic(NamedTuple):
    """One canonical tensor on its way."""

    name: str
    match: Match
    itemsize: int
    """Bytes of an element on the wire."""
    wire_dtype: str


Takers = dict[int, tuple[int, ...]]
"""Sender -> the ranks that it sends a piece to."""
Choices = dict[tuple[str, int], Takers]
"""(tensor, piece) -> who sends it, for the pieces that several ranks could send."""


class BucketSpan(NamedTuple):
    """Where a tensor travels: its pieces are cut in `parts`, one for each of the buckets from `first` on."""

    first: int
    parts: int


def interleave(names: Sequence[str], shardings: Mapping[str, Sharding]) -> list[str]:
    """Order in which tensors travel: tensors of different holders side by side, so that all ranks send at any time.

    Within one set of holders the order of `names` stays, so their sources can be released from the front.
    """
    holders_of: dict[Sharding, frozenset[int]] = {}
    groups: dict[frozenset[int], list[str]] = defaultdict(list)
    for name in names:
        sharding = shardings[name]
        if sharding not in holders_of:
            holders_of[sharding] = frozenset(rank for shard in sharding.shards for rank in shard.ranks)
        groups[holders_of[sharding]].append(name)
    progress = {name: i / len(group) for group in groups.values() for i, name in enumerate(group)}
    return sorted(names, key=progress.__getitem__)


def choose_senders(traffic: Sequence[Traffic], topology: Topology, world_size: int) -> Choices:
    """For every piece that several ranks could send: a holder in the taker's node, else any holder, dealt out from the
    one with the least bytes to send so far. What only one rank can send is counted first."""
    load = np.zeros(world_size, np.int64)
    for _, match, itemsize, _ in traffic:
        load += match.forced_send * itemsize
    load_of = load.tolist()
    return {
        (name, number): _choose(match.pieces[number], itemsize, load_of, topology)
        for name, match, itemsize, _ in traffic
        for number in match.choice
    }


def _choose(piece: Piece, itemsize: int, load_of: list[int], topology: Topology) -> Takers:
    holders_in: dict[int, list[int]] = defaultdict(list)
    for holder in piece.holders:
        holders_in[topology.node(holder)].append(holder)
    takers_of: dict[int | None, list[int]] = defaultdict(list)
    for taker in piece.remote:
        node = topology.node(taker)
        takers_of[node if node in holders_in else None].append(taker)
    chosen: Takers = {}
    for node, takers in takers_of.items():
        candidates = sorted(piece.holders if node is None else holders_in[node], key=load_of.__getitem__)
        for i, sender in enumerate(candidates[: len(takers)]):
            chosen[sender] = chosen.get(sender, ()) + tuple(takers[i :: len(candidates)])
            load_of[sender] += piece.numel * itemsize * len(takers[i :: len(candidates)])
    return chosen


def takers_by_sender(choices: Choices, name: str, number: int, piece: Piece) -> Takers:
    """Who sends the piece to whom; ranks that hold it themselves do not appear."""
    if len(piece.holders) == 1:
        return {piece.holders[0]: piece.remote} if piece.remote else {}
    return choices.get((name, number), {})


def assign_buckets(
    traffic: Sequence[Traffic], choices: Choices, staging_budget_bytes: int, world_size: int
) -> dict[str, BucketSpan]:
    """Packs tensors, in order, into buckets. Two are staged at a time, so in one of them no rank stages more than half
    the budget: what it receives, and what it sends counted once for all takers.

    A tensor that exceeds a bucket alone has its pieces cut. Raises ValueError when even single rows exceed it.
    """
    loads = [_staging(name, match, choices) * itemsize for name, match, itemsize, _ in traffic]
    bucket_bytes = _bucket_bytes(loads, staging_budget_bytes)
    spans: dict[str, BucketSpan] = {}
    current, fill = 0, np.zeros(world_size, np.int64)
    for (name, match, itemsize, _), load in zip(traffic, loads, strict=True):
        fill = fill + load
        if fill.max() <= bucket_bytes:
            spans[name] = BucketSpan(current, 1)
        elif load.max() <= bucket_bytes:
            current, fill = current + 1, load
            spans[name] = BucketSpan(current, 1)
        else:
            first = current + bool((fill > load).any())
            parts = _parts(name, match, choices, itemsize, bucket_bytes, staging_budget_bytes)
            spans[name] = BucketSpan(first, parts)
            current, fill = first + parts, np.zeros(world_size, np.int64)
    return spans


def _bucket_bytes(loads: Sequence[np.ndarray], staging_budget_bytes: int) -> int:
    """Half the budget, or less where that still makes enough buckets for packing and transfer to overlap."""
    total = int(sum(loads).max()) if loads else 0
    return min(staging_budget_bytes // 2, max(_SMALLEST_BUCKET_BYTES, -(-total // _BUCKETS_TO_OVERLAP)))


def _staging(name: str, match: Match, choices: Choices) -> np.ndarray:
    """Elements that each rank stages for the tensor."""
    if not match.choice:
        return match.forced_staging
    staging = match.forced_staging.copy()
    for number in match.choice:
        senders = list(choices[name, number])
        staging[senders] += match.pieces[number].numel
    return staging


def _parts(
    name: str, match: Match, choices: Choices, itemsize: int, bucket_bytes: int, staging_budget_bytes: int
) -> int:
    """Into how many parts pieces must be cut so that no rank's share of a part exceeds a bucket."""
    pieces = [piece for piece in match.pieces if piece.remote]
    uses: Counter[tuple[int, Piece]] = Counter()
    for number, piece in enumerate(match.pieces):
        uses.update((rank, piece) for rank in piece.remote)
        uses.update((rank, piece) for rank in takers_by_sender(choices, name, number, piece))
    longest = max(max(_extents(piece)) for piece in pieces)
    parts = 1
    while True:
        load: Counter[int] = Counter()
        for (rank, piece), count in uses.items():
            load[rank] += _largest_part(piece, parts) * itemsize * count
        need = max(load.values())
        if need <= bucket_bytes:
            return parts
        if parts == longest:
            break
        parts = min(2 * parts, longest)
    if need <= staging_budget_bytes // 2:
        return parts
    raise ValueError(
        f"staging_budget_bytes = {staging_budget_bytes} is too small: {name}, cut into single rows, still takes {need} "
        f"bytes on a rank at once, in each of two buckets. Set it to at least {2 * need}."
    )


def _extents(piece: Piece) -> list[int]:
    return [b - a for a, b in zip(piece.start, piece.stop, strict=True)]


def _cut_dim(piece: Piece) -> int:
    """Pieces are cut along their longest dim."""
    extents = _extents(piece)
    return extents.index(max(extents))


def _largest_part(piece: Piece, parts: int) -> int:
    """Elements of the largest of `parts` parts."""
    extent = max(_extents(piece))
    return -(-extent // parts) * (piece.numel // extent)


def cut_piece(piece: Piece, parts: int) -> Iterator[tuple[int, Index, Index, int]]:
    """(part, start, stop, numel) of the parts that are not empty."""
    if parts == 1:
        yield 0, piece.start, piece.stop, piece.numel
        return
    dim = _cut_dim(piece)
    first, extent = piece.start[dim], piece.stop[dim] - piece.start[dim]
    for part in range(parts):
        low, high = first + part * extent // parts, first + (part + 1) * extent // parts
        if low < high:
            start = (*piece.start[:dim], low, *piece.start[dim + 1 :])
            stop = (*piece.stop[:dim], high, *piece.stop[dim + 1 :])
            yield part, start, stop, piece.numel // extent * (high - low)
