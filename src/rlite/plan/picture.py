"""`--plot`: what the fullest rank holds, stacked, in each phase."""

from pathlib import Path
from typing import Any

from rlite.plan.report import Plan

_COLORS = {
    "policy_weights": "#2f6690",
    "gradients": "#f4a259",
    "optimizer_state": "#bc4b51",
    "reference_weights": "#7d8597",
    "critic_weights": "#5b8fb9",
    "critic_gradients": "#f8c78f",
    "critic_optimizer_state": "#d98880",
    "engine_weights": "#3a7d44",
    "kv_cache": "#8cb369",
    "activations": "#9f86c0",
    "logits": "#5e548e",
    "engine_workspace": "#c9d8b6",
}
_GIB, _MIB = 2**30, 2**20


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture; the suffix of `path` decides the format (png, svg, pdf).

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'rlite[plot]'") from error
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    fullest = plan.memory.classes[0]
    unit, name = (_GIB, "GiB") if plan.job.cluster.memory_bytes >= _GIB else (_MIB, "MiB")
    _stack(axes, plan, unit)
    phases = range(len(fullest.phases))
    peaks = [phase.peak_bytes / unit for phase in fullest.phases]
    axes.plot(phases, peaks, linestyle="none", marker="v", color="black", label="peak")
    axes.axhline(plan.memory.usable_bytes / unit, color="black", linewidth=1, label="usable")
    axes.axhline(plan.job.cluster.memory_bytes / unit, color="black", linewidth=1, linestyle=":", label="device")
    axes.set_xticks(list(phases), [str(phase.phase) for phase in fullest.phases])
    axes.set_ylabel(name)
    model, count = plan.job.architecture.model_type, plan.job.cluster.world_size
    verdict = "fits" if plan.memory.fits else "does not fit"
    axes.set_title(f"{model} on {count} devices: {verdict}\nfullest ranks ({fullest.name})", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _stack(axes: Any, plan: Plan, unit: int) -> None:
    fullest = plan.memory.classes[0]
    bottom = [0.0] * len(fullest.phases)
    for name, color in _COLORS.items():
        heights = [(phase.residents | phase.working).get(name, 0) / unit for phase in fullest.phases]
        if any(heights):
            label = name.replace("_", " ").replace("kv", "KV")
            axes.bar(range(len(heights)), heights, 0.55, bottom=bottom, color=color, label=label)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
