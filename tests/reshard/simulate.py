"""Runs the plans of all ranks in one process, with numpy: an executor that shares no code with the real one."""

from collections import defaultdict

import numpy as np

from rlite.layout.boxes import LocalLayout
from rlite.reshard.plan import TransferPlan

Locals = list[dict[str, np.ndarray]]


def fill_sources(layouts: list[LocalLayout], canonical: dict[str, np.ndarray]) -> Locals:
    """Every rank's tensors, cut from the canonical ones; what no box covers is -1."""
    ranks: Locals = []
    for layout in layouts:
        tensors = {t.name: np.full(t.shape, -1, np.int64) for t in layout.tensors}
        for box in layout.boxes:
            index = tuple(map(slice, box.start, box.stop))
            tensors[box.local][box.local_index(box.start, box.stop)] = canonical[box.tensor][index]
        ranks.append(tensors)
    return ranks


def run_plans(plans: list[TransferPlan], sources: Locals) -> tuple[Locals, Locals]:
    """(destination tensors, how often each element was written). Fails when both ends of a message disagree."""
    values: Locals = [{t.name: np.full(t.shape, -1, np.int64) for t in plan.destination} for plan in plans]
    writes: Locals = [{t.name: np.zeros(t.shape, np.int64) for t in plan.destination} for plan in plans]

    def write(rank: int, local: str, index: tuple, data: np.ndarray) -> None:
        values[rank][local][index] = data
        writes[rank][local][index] += 1

    for number in range(max(len(plan.buckets) for plan in plans)):
        wire: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        for plan in plans:
            for message in plan.buckets[number].sends if number < len(plan.buckets) else ():
                packed = np.concatenate([sources[plan.rank][m.local][m.index].ravel() for m in message.moves])
                for taker in message.takers:
                    wire[plan.rank, taker].append(packed)
        for plan in plans:
            bucket = plan.buckets[number] if number < len(plan.buckets) else None
            for copy in bucket.copies if bucket else ():
                data = sources[plan.rank][copy.source][copy.source_index]
                write(plan.rank, copy.destination, copy.destination_index, data)
            for message in bucket.receives if bucket else ():
                packed = wire[message.sender, plan.rank].pop(0)
                assert packed.size == sum(move.numel for move in message.moves)
                offsets = np.cumsum([move.numel for move in message.moves])[:-1]
                for move, data in zip(message.moves, np.split(packed, offsets), strict=True):
                    shape = values[plan.rank][move.local][move.index].shape
                    write(plan.rank, move.local, move.index, data.reshape(shape))
        assert not any(wire.values()), "a message was sent that nobody receives"
    return values, writes
