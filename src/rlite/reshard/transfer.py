"""The executor: runs a plan on real tensors, a bucket at a time, inside a fixed staging budget.

While bucket k is on the wire, bucket k + 1 is packed into the other half of the arena. A message that is one contiguous
part of a tensor, in the dtype of the wire, leaves from, or arrives in, the tensor itself.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.layout.boxes import LocalTensor
from rlite.reshard.moves import ITEMSIZE, Bucket, Message
from rlite.reshard.plan import TransferPlan

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """One run on one rank. Metrics are logged as `perf/reshard/{field}`."""

    seconds: float
    bytes_recv: int
    bytes_local: int
    bytes_lower_bound: int
    efficiency: float
    """`bytes_lower_bound / bytes_recv`; 1 when nothing had to be received."""
    ops: int
    """Messages sent and received."""
    staging_peak_bytes: int


class Transfer:
    """A plan bound to a process group whose ranks are those of the plan; reusable, one `run` at a time.

    Collective: all ranks of the group construct it and run it together.
    """

    def __init__(self, plan: TransferPlan, group: dist.ProcessGroup | None = None) -> None:
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        if (plan.world_size, plan.rank) != (world_size, rank):
            raise ValueError(
                f"the plan is for rank {plan.rank} of {plan.world_size}; "
                f"the process group has rank {rank} of {world_size}"
            )
        self.plan = plan
        self._group = group
        self._peers = dist.get_process_group_ranks(group or dist.group.WORLD)
        # NCCL and HCCL set up their communicator in the first collective, in which all ranks must take part; in the
        # point-to-point exchange that follows they need not.
        dist.barrier(group)

    @torch.no_grad()
    def run(
        self,
        source: Tensors,
        destination: Tensors,
        on_source_done: Callable[[str], None] | None = None,
    ) -> TransferStats:
        """Writes every destination tensor from the sources of all ranks, casting where dtypes differ.

        `on_source_done(local name)` is called once no rank needs that source tensor of this rank any more, so that its
        storage can be released. Raises ValueError when tensors are not those of the plan, before any communication, and
        RuntimeError naming the bucket when a peer stops.
        """
        started = time.perf_counter()
        _check_tensors("source", source, self.plan.source, self.plan.rank)
        _check_tensors("destination", destination, self.plan.destination, self.plan.rank)
        release = on_source_done or (lambda name: None)
        for name in self.plan.unused_sources:
            release(name)
        for region in self.plan.padding:
            destination[region.local][tuple(map(slice, region.start, region.stop))].zero_()
        arena_bytes = self._exchange(source, destination, release)
        plan = self.plan
        return TransferStats(
            seconds=time.perf_counter() - started,
            bytes_recv=plan.bytes_recv,
            bytes_local=plan.bytes_local,
            bytes_lower_bound=plan.bytes_lower_bound,
            efficiency=plan.bytes_lower_bound / plan.bytes_recv if plan.bytes_recv else 1.0,
            ops=plan.ops,
            staging_peak_bytes=arena_bytes,
        )

    def _exchange(self, source: Tensors, destination: Tensors, release: Callable[[str], None]) -> int:
        """All buckets; returns the size of the staging arena."""
        buckets = self.plan.buckets
        half_bytes = max((_staged_bytes(bucket, source, destination) for bucket in buckets), default=0)
        device = next((tensor.device for tensor in (*source.values(), *destination.values())), None)
        arena = torch.empty(2 * half_bytes, dtype=torch.uint8, device=device)
        previous: _Flight | None = None
        for number, bucket in enumerate(buckets):
            half = arena[number % 2 * half_bytes :][:half_bytes]
            flight = _Flight(bucket, half, source, destination)
            with self._named(number):
                flight.start(self._group, self._peers)
            _copy_all(
                [destination[copy.destination][copy.destination_index] for copy in bucket.copies],
                [source[copy.source][copy.source_index] for copy in bucket.copies],
            )
            if previous:
                with self._named(number - 1):
                    previous.finish(release)
            previous = flight
        if previous:
            with self._named(len(buckets) - 1):
                previous.finish(release)
        return arena.nbytes

    @contextmanager
    def _named(self, number: int) -> Iterator[None]:
        """Errors of the backend say where they happened."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"reshard: bucket {number + 1} of {len(self.plan.buckets)} failed on rank {self.plan.rank} of "
                f"{self.plan.world_size}; another rank has probably stopped: {error}"
            ) from error


class _Flight:
    """One bucket between its packing and its arrival. Nothing moves before `start`."""

    def __init__(self, bucket: Bucket, half: Tensor, source: Tensors, destination: Tensors) -> None:
        self._bucket = bucket
        self._packed: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._unpacked: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._wires: dict[int, Tensor] = {}
        self._works: list[dist.Work] = []
        used = 0
        ends = [(m, source, self._packed) for m in bucket.sends] + [
            (m, destination, self._unpacked) for m in bucket.receives
        ]
        # Wide elements first over both directions: then every message starts aligned.
        for message, tensors, (staged, views) in sorted(ends, key=lambda end: -ITEMSIZE[end[0].wire_dtype]):
            direct = _direct(message, tensors)
            if direct is not None:
                self._wires[id(message)] = direct
                continue
            wire = half[used : used + message.nbytes].view(getattr(torch, message.wire_dtype))
            used += message.nbytes
            self._wires[id(message)] = wire
            for move, flat in zip(message.moves, wire.split([move.numel for move in message.moves]), strict=True):
                view = tensors[move.local][move.index]
                views.append(view)
                staged.append(flat.view(view.shape))

    def start(self, group: dist.ProcessGroup | None, peers: Sequence[int]) -> None:
        staged, views = self._packed
        _copy_all(staged, views)
        ops = [
            dist.P2POp(dist.irecv, self._wires[id(message)], peers[message.sender], group)
            for message in self._bucket.receives
        ]
        for message in self._bucket.sends:
            wire = self._wires[id(message)]
            ops.extend(dist.P2POp(dist.isend, wire, peers[taker], group) for taker in message.takers)
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def finish(self, release: Callable[[str], None]) -> None:
        for work in self._works:
            work.wait()
        staged, views = self._unpacked
        _copy_all(views, staged)
        for name in self._bucket.done_sources:
            release(name)


def _direct(message: Message, tensors: Tensors) -> Tensor | None:
    """The moved part itself where it can be on the wire as it lies."""
    if len(message.moves) > 1:
        return None
    move = message.moves[0]
    view = tensors[move.local][move.index]
    return view if view.is_contiguous() and view.dtype == getattr(torch, message.wire_dtype) else None


def _staged_bytes(bucket: Bucket, source: Tensors, destination: Tensors) -> int:
    ends = [(m, source) for m in bucket.sends] + [(m, destination) for m in bucket.receives]
    return sum(message.nbytes for message, tensors in ends if _direct(message, tensors) is None)


def _copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """One call for many copies, with casts; devices fuse them where they can."""
    if destinations:
        torch._foreach_copy_(destinations, sources)


def _check_tensors(side: str, tensors: Tensors, expected: Sequence[LocalTensor], rank: int) -> None:
    for name, shape, dtype in expected:
        if name not in tensors:
            raise ValueError(
                f"reshard: rank {rank} was given no {side} tensor {name}, which the plan expects as {shape}"
            )
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, dtype):
            raise ValueError(
                f"reshard: {side} tensor {name} of rank {rank} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"the plan expects {dtype} {shape}"
            )
