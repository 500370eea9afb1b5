"""The planner: two placements and a topology -> what one rank sends, receives and copies, bucket by bucket.

Pure: no communication, no tensors. Every rank takes the global decisions alone (`routes.py`) and derives from them only
its own moves (`moves.py`). Received bytes equal the lower bound: what the rank needs minus what it holds itself.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlite.layout.boxes import LocalTensor, Region
from rlite.layout.placement import Placement, Shard, Sharding
from rlite.reshard.moves import ITEMSIZE, Bucket, RankMoves
from rlite.reshard.pieces import Match, atoms, match
from rlite.reshard.routes import Topology, Traffic, assign_buckets, choose_senders, interleave

DEFAULT_STAGING_BUDGET_BYTES = 256 * 2**20

_EXACT_CASTS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What one rank does. Byte counts are per run, in the dtype on the wire."""

    rank: int
    world_size: int
    source: tuple[LocalTensor, ...]
    destination: tuple[LocalTensor, ...]
    padding: tuple[Region, ...]
    """Destination elements to be set to zero."""
    unused_sources: tuple[str, ...]
    """Local source tensors that no rank takes anything from."""
    buckets: tuple[Bucket, ...]
    bytes_recv: int
    bytes_sent: int
    bytes_local: int
    bytes_lower_bound: int
    """Bytes that the destination needs and this rank's own source does not hold."""
    bytes_internode: int
    """Of `bytes_recv`: from ranks of other nodes."""
    ops: int
    """Messages sent and received."""
    staging_peak_bytes: int
    """Upper bound: contiguous ends of lone messages need no staging."""


def plan_transfer(
    sources: Placement,
    destinations: Placement,
    *,
    topology: Topology,
    rank: int,
    tensors: Iterable[str] | None = None,
    exact: bool = False,
    staging_budget_bytes: int = DEFAULT_STAGING_BUDGET_BYTES,
) -> TransferPlan:
    """Plan of one rank; arguments and errors are those of `TransferPlanner`."""
    planner = TransferPlanner(
        sources,
        destinations,
        topology=topology,
        tensors=tensors,
        exact=exact,
        staging_budget_bytes=staging_budget_bytes,
    )
    return planner.plan(rank)


class TransferPlanner:
    """Global decisions of a transfer, and the plan of any rank.

    `tensors` restricts the transfer to some canonical tensors; `exact` demands that no cast loses bits.
    Raises ValueError, naming the canonical tensor, both shapes and a rank, when a side does not know it, shapes
    disagree, a destination box is not covered, or an exact cast does not exist.
    """

    def __init__(
        self,
        sources: Placement,
        destinations: Placement,
        *,
        topology: Topology,
        tensors: Iterable[str] | None = None,
        exact: bool = False,
        staging_budget_bytes: int = DEFAULT_STAGING_BUDGET_BYTES,
    ) -> None:
        if sources.world_size != destinations.world_size:
            raise ValueError(
                f"{sources.world_size} source ranks but {destinations.world_size} destination ranks: both sides of a "
                "transfer are laid out over the same world"
            )
        self.sources, self.destinations, self.topology = sources, destinations, topology
        self.world_size = sources.world_size
        self._atoms: dict[Sharding, list[Shard]] = {}
        self._matches: dict[tuple[Sharding, Sharding], Match] = {}
        names = list(dict.fromkeys([*sources.tensors, *destinations.tensors] if tensors is None else tensors))
        with _collector_paused():
            self._sides = {name: self._check(name, exact) for name in names}
            order = interleave(names, {name: source for name, (source, _) in self._sides.items()})
            self.traffic = {name: self._traffic(name) for name in order}
            in_order = list(self.traffic.values())
            self.choices = choose_senders(in_order, topology, self.world_size)
            self.spans = assign_buckets(in_order, self.choices, staging_budget_bytes, self.world_size)

    def plan(self, rank: int) -> TransferPlan:
        """What `rank` does. Raises ValueError when it would have to write a destination element twice."""
        with _collector_paused():
            source, destination = self.sources.local(rank), self.destinations.local(rank)
            moves = RankMoves(rank, self.traffic, self.choices, self.spans, source, destination)
            buckets = moves.buckets()
        received = [message for bucket in buckets for message in bucket.receives]
        sent = [message for bucket in buckets for message in bucket.sends]
        node = self.topology.node
        return TransferPlan(
            rank=rank,
            world_size=self.world_size,
            source=source.tensors,
            destination=destination.tensors,
            padding=tuple(region for region in destination.padding if region.tensor in self.traffic),
            unused_sources=moves.unused_sources(),
            buckets=buckets,
            bytes_recv=sum(message.nbytes for message in received),
            bytes_sent=sum(message.nbytes * len(message.takers) for message in sent),
            bytes_local=moves.bytes_local,
            bytes_lower_bound=sum(int(t.match.receive[rank]) * t.itemsize for t in self.traffic.values()),
            bytes_internode=sum(m.nbytes for m in received if node(m.sender) != node(rank)),
            ops=len(received) + sum(len(message.takers) for message in sent),
            staging_peak_bytes=2 * max((sum(m.nbytes for m in b.sends + b.receives) for b in buckets), default=0),
        )

    def _traffic(self, name: str) -> Traffic:
        source, destination = self.sources.dtype(name), self.destinations.dtype(name)
        wire_dtype = source if ITEMSIZE[source] < ITEMSIZE[destination] else destination
        return Traffic(name, self._match(name), ITEMSIZE[wire_dtype], wire_dtype)

    def _match(self, name: str) -> Match:
        source, destination = pair = self._sides[name]
        if pair not in self._matches:
            if source not in self._atoms:
                self._atoms[source] = atoms(source)
            try:
                self._matches[pair] = match(self._atoms[source], destination, self.world_size)
            except ValueError as error:
                raise ValueError(f"{self._both_sides(name)}: {error}") from None
        return self._matches[pair]

    def _check(self, name: str, exact: bool) -> tuple[Sharding, Sharding]:
        """Both shardings, after every check of the tensor that needs no boxes."""
        sides = self.sources, self.destinations
        known = [side.tensors[name].shape for side in sides if name in side.tensors]
        shardings = tuple(side.sharding(name) for side in sides) if len(known) == 2 else ()
        if len(known) < 2 or known[0] != known[1] or not all(sharding.shards for sharding in shardings):
            raise ValueError(f"{self._both_sides(name)}: the two sides of a transfer must hold the same tensors")
        source, destination = (side.dtype(name) for side in sides)
        for dtype in (source, destination):
            if dtype not in ITEMSIZE:
                raise ValueError(
                    f"{self._both_sides(name)}: dtype {dtype} cannot be moved; use one of {list(ITEMSIZE)}"
                )
        if exact and source != destination and (source, destination) not in _EXACT_CASTS:
            raise ValueError(f"{self._both_sides(name)}: {source} cannot be cast to {destination} exactly")
        return shardings

    def _both_sides(self, name: str) -> str:
        return f"{name}: source {_describe(self.sources, name)}, destination {_describe(self.destinations, name)}"


def _describe(side: Placement, name: str) -> str:
    if name not in side.tensors:
        return "does not know it"
    shards = side.sharding(name).shards
    holder = f"from rank {shards[0].ranks[0]} on" if shards else "held by no rank"
    return f"shape {list(side.tensors[name].shape)} {holder}"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A plan is a million small tuples that live on: scanning them for cycles again and again doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
