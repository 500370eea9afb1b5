"""What one rank moves: its share of the global decisions, as messages in buckets."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlite.layout.boxes import Box, Index, LocalLayout, intersect
from rlite.reshard.pieces import Match, Piece
from rlite.reshard.routes import BucketSpan, Choices, Traffic, cut_piece

LONE_MESSAGE_BYTES = 2**20
"""From this size on a part travels as a message of its own, so that an end where it is contiguous needs no copy."""

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element, by the torch name of the dtype."""

LocalIndex = tuple[int | slice, ...]
Route = tuple[int, tuple[int, ...], str]
"""(sender, takers, dtype on the wire)."""
Routes = dict[Route, list["Move"]]


class Move(NamedTuple):
    """Elements of one local tensor that leave for, or come from, another rank."""

    local: str
    index: LocalIndex
    numel: int


class LocalCopy(NamedTuple):
    """Elements that this rank both holds and needs."""

    source: str
    source_index: LocalIndex
    destination: str
    destination_index: LocalIndex


class Message(NamedTuple):
    """Moves that travel together, in this order, from one rank to all its takers; all ends build the same list."""

    sender: int
    takers: tuple[int, ...]
    wire_dtype: str
    moves: tuple[Move, ...]
    nbytes: int


class Bucket(NamedTuple):
    """One grouped exchange of this rank."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    copies: tuple[LocalCopy, ...]
    done_sources: tuple[str, ...]
    """Local source tensors that nothing needs after this bucket."""


class RankMoves:
    """Collects the moves of `rank`, tensor by tensor, and groups them.

    Raises ValueError when a destination element would be written twice.
    """

    def __init__(
        self,
        rank: int,
        traffic: Mapping[str, Traffic],
        choices: Choices,
        spans: Mapping[str, BucketSpan],
        source: LocalLayout,
        destination: LocalLayout,
    ) -> None:
        self.rank = rank
        self.bytes_local = 0
        self._traffic, self._choices, self._spans = traffic, choices, spans
        self._held, self._needed = _by_tensor(source, traffic), _by_tensor(destination, traffic)
        for name, boxes in self._needed.items():
            _check_written_once(name, boxes, rank)
        outside = {box.local for box in source.boxes if box.tensor not in traffic}
        self._releasable = [tensor.name for tensor in source.tensors if tensor.name not in outside]
        self._sends: dict[int, Routes] = defaultdict(lambda: defaultdict(list))
        self._receives: dict[int, Routes] = defaultdict(lambda: defaultdict(list))
        self._copies: dict[int, list[LocalCopy]] = defaultdict(list)
        self._last_use: dict[str, int] = {}
        self._shares_of: dict[int, list[_Share]] = {}
        self._indices: dict[tuple[Index, ...], LocalIndex] = {}
        for name in traffic:
            if name in self._needed or name in self._held:
                self._add(name)

    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets up to the last one in which this rank does anything."""
        done: dict[int, list[str]] = defaultdict(list)
        for local in self._releasable:
            if local in self._last_use:
                done[self._last_use[local]].append(local)
        last = max([*self._sends, *self._receives, *self._copies], default=-1)
        return tuple(
            Bucket(
                sends=_messages(self._sends.get(i, {})),
                receives=_messages(self._receives.get(i, {})),
                copies=tuple(self._copies.get(i, ())),
                done_sources=tuple(done.get(i, ())),
            )
            for i in range(last + 1)
        )

    def unused_sources(self) -> tuple[str, ...]:
        """Local source tensors that no rank takes anything from."""
        return tuple(local for local in self._releasable if local not in self._last_use)

    def _add(self, name: str) -> None:
        """All moves of one canonical tensor that this rank takes part in."""
        _, match, itemsize, wire_dtype = self._traffic[name]
        first, parts = self._spans[name]
        for number, piece, is_copy, sender, takers in self._shares(match):
            if is_copy:
                self._copy(name, piece, first)
                self.bytes_local += piece.numel * itemsize
                continue
            if sender is None:
                routes = self._choices[name, number].items()
                own = ((s, t) for s, t in routes if s == self.rank or self.rank in t)
                sender, takers = next(own, (None, ()))
            if sender is not None:
                self._move(name, piece, BucketSpan(first, parts), (sender, takers, wire_dtype))

    def _shares(self, match: Match) -> list["_Share"]:
        """What this rank has to do with the pieces of a match, the same for every tensor that shares it."""
        if id(match) not in self._shares_of:
            self._shares_of[id(match)] = list(_shares(match, self.rank))
        return self._shares_of[id(match)]

    def _copy(self, name: str, piece: Piece, bucket: int) -> None:
        source = _box_around(self._held[name], piece)
        destination = _box_around(self._needed[name], piece)
        self._last_use[source.local] = max(bucket, self._last_use.get(source.local, 0))
        indices = [self._index(box, piece.start, piece.stop) for box in (source, destination)]
        self._copies[bucket].append(LocalCopy(source.local, indices[0], destination.local, indices[1]))

    def _move(self, name: str, piece: Piece, span: BucketSpan, route: Route) -> None:
        sends = route[0] == self.rank
        box = _box_around((self._held if sends else self._needed)[name], piece)
        routes = self._sends if sends else self._receives
        for part, start, stop, numel in cut_piece(piece, span.parts):
            bucket = span.first + part
            routes[bucket][route].append(Move(box.local, self._index(box, start, stop), numel))
            if sends:
                self._last_use[box.local] = max(bucket, self._last_use.get(box.local, 0))

    def _index(self, box: Box, start: Index, stop: Index) -> LocalIndex:
        """`box.local_index`, shared by boxes that lie alike: layers repeat each other."""
        key = (box.start, box.local_start, start, stop)
        if key not in self._indices:
            self._indices[key] = box.local_index(start, stop)
        return self._indices[key]


def _messages(routes: Routes) -> tuple[Message, ...]:
    """For each route one message of all small moves, then the large ones alone; wide elements first.

    Both ends of a route list its messages in the same order.
    """
    messages = []
    for route, moves in sorted(routes.items(), key=lambda item: (-ITEMSIZE[item[0][2]], item[0])):
        itemsize = ITEMSIZE[route[2]]
        small, small_bytes, large = [], 0, []
        for move in moves:
            nbytes = move.numel * itemsize
            if nbytes < LONE_MESSAGE_BYTES:
                small.append(move)
                small_bytes += nbytes
            else:
                large.append(Message(*route, (move,), nbytes))
        if small:
            messages.append(Message(*route, tuple(small), small_bytes))
        messages.extend(large)
    return tuple(messages)


def _by_tensor(layout: LocalLayout, names: Iterable[str]) -> dict[str, list[Box]]:
    wanted = set(names)
    boxes: dict[str, list[Box]] = defaultdict(list)
    for box in layout.boxes:
        if box.tensor in wanted:
            boxes[box.tensor].append(box)
    return dict(boxes)


def _check_written_once(name: str, boxes: Sequence[Box], rank: int) -> None:
    for a, b in itertools.combinations(boxes, 2):
        if intersect(a.start, a.stop, b.start, b.stop):
            raise ValueError(
                f"{name}: destination rank {rank} holds elements {a.start}..{a.stop} in {a.local} and "
                f"{b.start}..{b.stop} in {b.local}; every element may be written only once on a rank"
            )


def _box_around(boxes: Sequence[Box], piece: Piece) -> Box:
    """The local box that contains the piece; there is one, because pieces are intersections of boxes."""
    if len(boxes) == 1:
        return boxes[0]
    return next(box for box in boxes if intersect(*box[1:3], *piece[:2]) == piece[:2])


class _Share(NamedTuple):
    """What a rank has to do with one piece."""

    number: int
    piece: Piece
    is_copy: bool
    sender: int | None
    """None when several ranks could send, and the choice differs from tensor to tensor."""
    takers: tuple[int, ...]


def _shares(match: Match, rank: int) -> Iterator[_Share]:
    for number, piece in enumerate(match.pieces):
        holds = rank in piece.holders
        if holds and rank in piece.takers:
            yield _Share(number, piece, True, None, ())
        if piece.remote and (holds or rank in piece.takers):
            if len(piece.holders) > 1:
                yield _Share(number, piece, False, None, ())
            elif holds or rank in piece.remote:
                yield _Share(number, piece, False, piece.holders[0], piece.remote)
