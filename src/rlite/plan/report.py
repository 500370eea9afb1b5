"""A whole plan: memory, traffic, devices and, when it does not fit, what would change that. As text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from rlite.layout.catalogue import catalogue
from rlite.plan.changes import Change, changes_that_fit
from rlite.plan.job import PlanJob
from rlite.plan.memory import MemoryPlan, RankClass, plan_memory, stage_span
from rlite.plan.sizes import show_seconds, show_size
from rlite.plan.throughput import DeviceCount, count_devices
from rlite.plan.traffic import ReshardPlan, Transition, plan_reshard, transitions

_LABELS = {
    "policy_weights": "policy weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "reference_weights": "reference weights",
    "critic_weights": "critic weights",
    "critic_gradients": "critic gradients",
    "critic_optimizer_state": "critic optimizer",
    "engine_weights": "engine weights",
    "kv_cache": "KV cache",
    "activations": "activations",
    "logits": "logits chunk",
    "engine_workspace": "engine workspace",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `rlite plan` says about a job."""

    job: PlanJob
    memory: MemoryPlan
    reshard: ReshardPlan
    transitions: tuple[Transition, ...]
    devices: DeviceCount
    changes: tuple[Change, ...]
    """That would make it fit; empty when it does."""


def make_plan(job: PlanJob) -> Plan:
    """Plans memory, the weight conversion and the devices; looks for changes when the job does not fit."""
    memory, reshard = plan_memory(job), plan_reshard(job)
    moves = transitions(job, memory)
    return Plan(
        job=job,
        memory=memory,
        reshard=reshard,
        transitions=moves,
        devices=count_devices(job.with_kv_cache(memory.kv.nbytes), reshard, moves),
        changes=() if memory.fits else tuple(changes_that_fit(job)),
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values; bytes and seconds."""
    job, memory = plan.job, plan.memory
    return {
        "fits": memory.fits,
        "headroom_bytes": memory.headroom_bytes,
        "cluster": asdict(job.cluster) | {"usable_bytes": job.cluster.usable_bytes},
        "limit_bytes": job.limit_bytes,
        "layout": asdict(job.layout) | {"dp": job.dp, "edp": job.layout.edp(job.cluster.world_size)},
        "engine": asdict(job.engine),
        "kv_cache": asdict(memory.kv),
        "rank_classes": [_class_json(rank_class) for rank_class in memory.classes],
        "reshard": asdict(plan.reshard),
        "transitions": [asdict(transition) for transition in plan.transitions],
        "devices": asdict(plan.devices) | {"step_s": plan.devices.step_s},
        "throughput_assumptions": asdict(job.throughput),
        "changes": [{"settings": change.settings, "cost": change.cost} for change in plan.changes],
    }


def as_text(plan: Plan) -> str:
    """The plan as tables for people."""
    parts = [_heading(plan.job), _residents(plan), _classes(plan.memory), _kv(plan), _reshard(plan), _moves(plan)]
    return "\n\n".join([*parts, _devices(plan), _verdict(plan)])


def _class_json(rank_class: RankClass) -> dict[str, Any]:
    phases = {
        str(phase.phase): asdict(phase) | {"held_bytes": phase.held_bytes, "peak_bytes": phase.peak_bytes}
        for phase in rank_class.phases
    }
    for phase in phases.values():
        del phase["phase"]
    return {"name": rank_class.name, "ranks": list(rank_class.ranks), "phases": phases}


def _heading(job: PlanJob) -> str:
    cluster, layout, options = job.cluster, job.layout, job.megatron
    weights = sum(prod(tensor.shape) for tensor in catalogue(job.architecture).values())
    axes = [f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp", "ep", "etp", "cp", "vpp")]
    axes = [axis for axis in axes if not axis.endswith(("etp1", "cp1", "vpp1"))] + [f"dp{job.dp}"]
    engine = f"tp{job.engine_layout.tp} x {job.engine_layout.replicas(cluster.world_size)} replicas, {job.engine.dtype}"
    return "\n".join(
        [
            f"{job.architecture.model_type}, {weights / 1e9:.3g} billion weights, on {cluster.world_size} devices of "
            f"{show_size(cluster.memory_bytes)} in nodes of {cluster.node_size}",
            f"  training    {' '.join(axes)}, {job.train_dtype}, recompute {options.recompute}, "
            f"{job.num_microbatches} micro-batches of {job.microbatch_tokens} tokens an update",
            f"  generation  {engine}, {job.prompts_per_step} prompts x {job.batch.group_size}, "
            f"rows of at most {job.row_tokens} tokens",
            f"  offload     {_offload(job)}; {cluster.reserved_fraction:.0%} of a device is left to runtime and "
            f"communication: {show_size(cluster.usable_bytes)} usable",
        ]
    )


def _offload(job: PlanJob) -> str:
    rebuilt = ", weights made of fp32 main weights" if job.offload.rebuild_weights else ""
    limit = "" if job.limit_bytes is None else f", residents within {show_size(job.limit_bytes)} (device_budget_gib)"
    return f"{job.offload.name}{rebuilt}{limit}"


def _residents(plan: Plan) -> str:
    """The fullest kind of rank, phase by phase."""
    fullest = plan.memory.classes[0]
    names = [name for name in _LABELS if any(name in p.residents | p.working for p in fullest.phases)]
    rows = [[_LABELS[name], *((p.residents | p.working).get(name, 0) for p in fullest.phases)] for name in names]
    rows.append(["held while it runs", *(p.held_bytes for p in fullest.phases)])
    rows.append(["most on entering", *(p.transition_peak_bytes for p in fullest.phases)])
    rows.append(["most in optimizer step", *(p.step_peak_bytes for p in fullest.phases)])
    rows.append(["peak", *(p.peak_bytes for p in fullest.phases)])
    rows.append(["headroom", *(plan.memory.usable_bytes - p.peak_bytes for p in fullest.phases)])
    rows.append(["on the host", *(p.host_bytes for p in fullest.phases)])
    header = ["", *(str(p.phase).upper() for p in fullest.phases)]
    title = f"Fullest ranks: {fullest.name} ({len(fullest.ranks)} of {plan.job.cluster.world_size})"
    return title + "\n" + table(header, [[row[0], *map(_bytes, row[1:])] for row in rows])


def _classes(memory: MemoryPlan) -> str:
    """One row for stages of the same content, with the most that any of their ranks holds."""
    alike: dict[str, list[RankClass]] = {}
    for c in memory.classes:
        alike.setdefault(c.content, []).append(c)
    rows = []
    for content, classes in alike.items():
        stages = sorted(stage for c in classes for stage in c.stages)
        peaks = [max(p.peak_bytes for p in phase) for phase in zip(*(c.phases for c in classes), strict=True)]
        count = sum(len(c.ranks) for c in classes)
        cells = [_bytes(nbytes) for nbytes in (*peaks, memory.usable_bytes - max(peaks))]
        rows.append([f"{stage_span(stages)}: {content}", str(count), *cells])
    header = ["peak by kind of rank", "ranks", *(str(p.phase).upper() for p in memory.classes[0].phases), "headroom"]
    return table(header, rows)


def _kv(plan: Plan) -> str:
    kv = plan.memory.kv
    return (
        f"KV cache: {show_size(kv.nbytes)} at {show_size(kv.bytes_per_token)} a token = {kv.tokens} tokens, "
        f"{kv.sequences} sequences of {plan.job.engine.max_model_len} tokens at once on each engine"
    )


def _reshard(plan: Plan) -> str:
    r, job = plan.reshard, plan.job
    ratio = r.gather_all_bytes / r.received_mean_bytes if r.received_mean_bytes else float("inf")
    return "\n".join(
        [
            f"Weight conversion, per rank and rollout: {show_size(r.received_mean_bytes)} received on average, "
            f"{show_size(r.received_max_bytes)} at most",
            f"  lower bound {show_size(r.lower_bound_mean_bytes)}; between nodes "
            f"{show_size(r.internode_mean_bytes)}; gathering every weight would be {show_size(r.gather_all_bytes)}, "
            f"{ratio:.3g} times as much",
            f"  at least {show_seconds(r.seconds)} on links of {job.cluster.link_gb_per_s:g} GB/s between and "
            f"{job.cluster.node_link_gb_per_s:g} GB/s inside nodes; staging {show_size(job.staging_budget_bytes)}",
        ]
    )


def _moves(plan: Plan) -> str:
    rows = [
        [
            f"-> {t.phase.upper()}",
            _bytes(t.moved_bytes),
            show_seconds(t.seconds),
            show_seconds(t.background_s) if t.background_s else "-",
        ]
        for t in plan.transitions
    ]
    title = f"Between device and host, at {plan.job.cluster.host_gb_per_s:g} GB/s (the rank that moves most)"
    return title + "\n" + table(["", "moved", "time", "in the background"], rows)


def _devices(plan: Plan) -> str:
    d, s = plan.devices, plan.job.throughput
    return "\n".join(
        [
            f"Devices for one rollout step in {show_seconds(d.step_s)} "
            f"(generate {show_seconds(d.generate_s)}, train {show_seconds(d.train_s)}, switch {show_seconds(d.switch_s)})",
            f"  colocated                       {d.colocated}",
            f"  separated, on-policy            {d.separated} ({d.separated_training} train + {d.separated_generation} "
            "generate; each waits for the other)",
            f"  separated, one step off-policy  {d.overlapped} (both work all the time on different data)",
            f"  assumed for all: {s.peak_tflops:g} TFLOP/s a device at {s.train_mfu:.0%} in training and "
            f"{s.prefill_mfu:.0%} in prompts, {s.memory_gb_per_s:g} GB/s of memory at {s.decode_bandwidth:.0%} in decoding,",
            "  every completion at its longest; separated clusters move weights for free",
        ]
    )


def _verdict(plan: Plan) -> str:
    memory = plan.memory
    if memory.fits:
        return f"FITS: {show_size(memory.headroom_bytes)} to spare on the fullest rank"
    lines = []
    if memory.headroom_bytes < 0:
        lines.append(f"DOES NOT FIT: {show_size(-memory.headroom_bytes)} missing on the fullest rank")
    if memory.over_budget_bytes:
        lines.append(
            f"DOES NOT FIT: residents exceed MemoryOffload.device_budget_gib by {show_size(memory.over_budget_bytes)}"
        )
    if not memory.kv.sequences:
        lines.append(
            f"DOES NOT FIT: the KV cache cannot hold one sequence of {plan.job.engine.max_model_len} tokens "
            f"({show_size(memory.kv.least_bytes)})"
        )
    if plan.changes:
        lines.append("Any one of these would make it fit, the cheapest first:")
        lines += [f"  {number}. {change}" for number, change in enumerate(plan.changes, 1)]
    else:
        lines.append("No change that rlite plan knows of makes it fit; use more devices or a smaller model")
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(_lines([header, *rows], widths))


def _lines(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells).rstrip()


def _bytes(nbytes: Any) -> str:
    return show_size(nbytes) if nbytes else "-"
