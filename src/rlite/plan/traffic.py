"""What moves in a rollout step: weights from training ranks to engine ranks, and state between device and host."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlite.layout.boxes import volume
from rlite.layout.catalogue import catalogue
from rlite.layout.hf import hf_boxes
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.placement import ExplicitPlacement, Placement, Sharding
from rlite.layout.vllm import VLLMPlacement
from rlite.memory.phases import Phase
from rlite.plan.job import PlanJob
from rlite.plan.memory import MemoryPlan
from rlite.plan.sizes import DTYPE_BYTES
from rlite.reshard.plan import TransferPlanner
from rlite.reshard.routes import Topology, takers_by_sender
from rlite.rollout.config import VLLMConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """The weight conversion. Bytes are per rank and rollout step."""

    received_mean_bytes: int
    received_max_bytes: int
    lower_bound_mean_bytes: int
    """What the engine's ranks need and do not hold as training ranks."""
    internode_mean_bytes: int
    """Of the bytes received: those from another node."""
    internode_max_bytes: int
    gather_all_bytes: int
    """What a rank would receive if every rank gathered the whole model: its bytes less those that the rank holds."""
    seconds: float
    """On the links of the slowest rank; a bound, packing and start-up of messages come on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Entering a phase: bytes of the rank that moves most, between its device and its host."""

    phase: str
    moved_bytes: int
    seconds: float
    """Of these copies and, where weights are made anew, of gathering them."""
    background_s: float = 0.0
    """The part that the first forward and backward pass do not wait for."""


def placements(job: PlanJob) -> tuple[Placement, Placement]:
    """Training side and engine side, as the run builds them."""
    arch, world_size = job.architecture, job.cluster.world_size
    source = MegatronPlacement(arch, job.layout, world_size, dtype=job.train_dtype)
    if isinstance(job.engine, VLLMConfig):
        return source, VLLMPlacement(arch, job.engine_layout, world_size, dtype=job.engine.dtype)
    tensors = catalogue(arch)
    whole = hf_boxes(tensors.values(), dtype=job.engine.dtype)
    return source, ExplicitPlacement([whole] * world_size, tensors)


def plan_reshard(job: PlanJob) -> ReshardPlan:
    """Runs the planner of the conversion and adds up what every rank receives.

    Raises:
        ValueError: the staging budget is too small, or a layout does not divide the model.
    """
    source, destination = placements(job)
    # Who receives what from which node follows from how a tensor lies on both sides, so one of each kind is planned.
    count_of = _tensors_that_lie_alike(source, destination)
    planner = TransferPlanner(
        source,
        destination,
        topology=Topology(node_size=job.cluster.node_size),
        tensors=count_of,
        staging_budget_bytes=job.staging_budget_bytes,
    )
    received, internode = _received(planner, count_of)
    lower_bound = sum(
        traffic.match.receive * traffic.itemsize * count_of[name] for name, traffic in planner.traffic.items()
    )
    cluster = job.cluster
    seconds = internode / cluster.link_gb_per_s + (received - internode) / cluster.node_link_gb_per_s
    return ReshardPlan(
        received_mean_bytes=int(received.mean()),
        received_max_bytes=int(received.max()),
        lower_bound_mean_bytes=int(np.mean(lower_bound)),
        internode_mean_bytes=int(internode.mean()),
        internode_max_bytes=int(internode.max()),
        gather_all_bytes=_gather_all_bytes(job, source),
        seconds=float(seconds.max()) / 1e9,
    )


def transitions(job: PlanJob, memory: MemoryPlan) -> tuple[Transition, ...]:
    """Device-to-host and host-to-device copies of one rollout step. VACANT is entered once in a run."""
    cluster, plans = job.cluster, []
    host = cluster.host_gb_per_s * 1e9
    link = 1e9 * (cluster.link_gb_per_s if cluster.world_size > cluster.node_size else cluster.node_link_gb_per_s)
    for phase in memory.classes[0].phases:
        if phase.phase is Phase.VACANT:
            continue
        ranks = [rank_class.phase(phase.phase) for rank_class in memory.classes]
        moved, background = max(r.moved_bytes for r in ranks), max(r.background_bytes for r in ranks)
        seconds = moved / host + max(r.gathered_bytes for r in ranks) / link
        transition = Transition(
            phase=str(phase.phase), moved_bytes=moved, seconds=seconds, background_s=background / host
        )
        plans.append(transition)
    return tuple(plans)


def _tensors_that_lie_alike(source: Placement, destination: Placement) -> dict[str, int]:
    """The first tensor of every kind, and how many there are."""
    first: dict[tuple[Sharding, Sharding, str, str], str] = {}
    counts: Counter[str] = Counter()
    for name in source.tensors:
        kind = (source.sharding(name), destination.sharding(name), source.dtype(name), destination.dtype(name))
        counts[first.setdefault(kind, name)] += 1
    return dict(counts)


def _received(planner: TransferPlanner, count_of: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that each rank receives by the chosen routes, and those of them that come from another node."""
    totals, node = np.zeros((2, planner.world_size), np.int64), planner.topology.node
    for name, traffic in planner.traffic.items():
        for number, piece in enumerate(traffic.match.pieces):
            nbytes = piece.numel * traffic.itemsize * count_of[name]
            for sender, takers in takers_by_sender(planner.choices, name, number, piece).items():
                for taker in takers:
                    totals[0, taker] += nbytes
                    totals[1, taker] += nbytes * (node(sender) != node(taker))
    return totals[0], totals[1]


def _gather_all_bytes(job: PlanJob, source: Placement) -> int:
    """Of the whole model, less what a rank holds on average."""
    itemsize, missing = DTYPE_BYTES[job.engine.dtype], 0.0
    held: dict[Sharding, float] = {}
    for name, tensor in source.tensors.items():
        sharding = source.sharding(name)
        if sharding not in held:
            held[sharding] = sum(volume(start, stop) * len(ranks) for ranks, start, stop in sharding.shards)
        missing += math.prod(tensor.shape) - held[sharding] / source.world_size
    return int(missing * itemsize)
