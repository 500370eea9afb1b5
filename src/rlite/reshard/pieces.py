"""What has to move for one canonical tensor: the pieces that source boxes and destination boxes have in common."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlite.layout.boxes import Index, intersect, volume
from rlite.layout.placement import Shard, Sharding


class Piece(NamedTuple):
    """Canonical elements that all `holders` have and all `takers` need."""

    start: Index
    stop: Index
    numel: int
    holders: tuple[int, ...]
    takers: tuple[int, ...]
    remote: tuple[int, ...]
    """Takers that are no holders."""


@dataclass(frozen=True, slots=True)
class Match:
    """All pieces of one pair of shardings. Shared by every tensor with that pair."""

    pieces: tuple[Piece, ...]
    choice: tuple[int, ...]
    """Pieces that several ranks could send."""
    forced_send: np.ndarray
    """int64 `[world]`: elements that each rank sends because nobody else could."""
    forced_staging: np.ndarray
    """int64 `[world]`: the same elements counted once for all their takers, and the elements that the rank receives."""
    receive: np.ndarray
    """int64 `[world]`: elements that each rank needs and does not hold."""


def atoms(sharding: Sharding) -> list[Shard]:
    """The same elements as disjoint shards: overlapping boxes are cut along each other's edges."""
    holders: dict[tuple[Index, Index], set[int]] = defaultdict(set)
    for shard in sharding.shards:
        holders[shard.start, shard.stop].update(shard.ranks)
    shards = [Shard(tuple(sorted(ranks)), *region) for region, ranks in holders.items()]
    overlap = any(intersect(*a[1:], *b[1:]) for a, b in itertools.combinations(shards, 2))
    return _cut_along_edges(shards) if overlap else shards


def _cut_along_edges(shards: Sequence[Shard]) -> list[Shard]:
    dims = range(len(shards[0].start))
    edges = [sorted({edge for shard in shards for edge in (shard.start[d], shard.stop[d])}) for d in dims]
    cells = []
    for cell in itertools.product(*(itertools.pairwise(e) for e in edges)):
        start, stop = tuple(a for a, _ in cell), tuple(b for _, b in cell)
        ranks = {rank for shard in shards if intersect(start, stop, *shard[1:]) for rank in shard.ranks}
        if ranks:
            cells.append(Shard(tuple(sorted(ranks)), start, stop))
    return cells


def match(held: Sequence[Shard], destination: Sharding, world_size: int) -> Match:
    """Intersects disjoint source shards with the destination.

    Raises ValueError (without the tensor's name, which it does not know) when a destination box is not covered.
    """
    pieces: list[Piece] = []
    for takers, start, stop in destination.shards:
        covered = 0
        for holders, *region in held:
            if common := intersect(start, stop, *region):
                numel = volume(*common)
                covered += numel
                remote = tuple(taker for taker in takers if taker not in holders)
                pieces.append(Piece(*common, numel, holders, takers, remote))
        if covered != volume(start, stop):
            raise ValueError(
                f"destination rank {takers[0]} needs elements {start}..{stop}; no source rank holds "
                f"{volume(start, stop) - covered} of them"
            )
    return _totals(tuple(pieces), world_size)


def _totals(pieces: tuple[Piece, ...], world_size: int) -> Match:
    send, staging, receive = [0] * world_size, [0] * world_size, [0] * world_size
    for piece in pieces:
        for taker in piece.remote:
            receive[taker] += piece.numel
            staging[taker] += piece.numel
        if len(piece.holders) == 1 and piece.remote:
            send[piece.holders[0]] += piece.numel * len(piece.remote)
            staging[piece.holders[0]] += piece.numel
    choice = tuple(i for i, piece in enumerate(pieces) if len(piece.holders) > 1 and piece.remote)
    return Match(pieces, choice, np.array(send), np.array(staging), np.array(receive))
