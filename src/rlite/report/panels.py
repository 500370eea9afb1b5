"""Which metrics of a run share a chart, in the order in which people ask about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlite.report.charts import Series, line_chart, stacked_chart
from rlite.report.run import Points, Run

_PHASES = ("generate", "reference", "logprob", "train", "idle")
_PARTS = (
    ("generate", "generate"),
    ("logprob", "log-probabilities"),
    ("reward", "rewards"),
    ("update", "update"),
    ("sync", "weight conversion"),
    ("offload", "moving memory"),
)
_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart with its heading."""

    title: str
    note: str
    """What to look for, one sentence."""
    chart: str
    """SVG and legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def sections(run: Run) -> list[Section]:
    """Sections and panels for which the run logged something."""
    made = [
        Section(title="Learning", panels=tuple(_learning(run))),
        Section(title="Stability", panels=tuple(_stability(run))),
        Section(title="Speed", panels=tuple(_speed(run))),
        Section(title="Memory", panels=tuple(_memory(run))),
    ]
    return [section for section in made if section.panels]


def _learning(run: Run) -> Iterator[Panel]:
    named = [(name, f"{name.split('/')[1]}") for name in run.metrics if name.startswith("rewards/")]
    rewards = [("reward/mean", "training"), ("val/reward/mean", "validation"), *(named if len(named) > 1 else [])]
    yield from _lines(run, "Reward", "Mean over the completions of a rollout step.", rewards, smooth=True)
    yield from _lines(
        run,
        "Groups without a signal",
        "Share of prompts whose completions all have the same reward; they teach nothing.",
        [("frac_reward_zero_std", "")],
        smooth=True,
    )
    edges = [run.metrics.get(f"completions/{edge}_length") for edge in ("min", "max")]
    length = Series(
        name="mean, shortest to longest",
        points=run.metrics.get("completions/mean_length", ()),
        band=(edges[0], edges[1]) if edges[0] and edges[1] else None,
    )
    yield from _panel("Completion length", "Tokens, end-of-sequence token included.", line_chart([length]))
    yield from _lines(
        run,
        "Truncated completions",
        "Share that ended at the length limit instead of stopping.",
        [("completions/clipped_ratio", "")],
        smooth=True,
    )
    yield from _lines(
        run, "Loss", "Mean over the updates of a step; its level means little.", [("loss", "")], smooth=True
    )


def _stability(run: Run) -> Iterator[Panel]:
    yield from _lines(run, "Entropy", "Nats a token; a fall to zero ends exploration.", [("entropy", "")], smooth=True)
    kl = [("kl", "to the reference"), ("approx_kl/k3", "to the old policy (k3)")]
    yield from _lines(run, "KL divergence", "Nats a token.", kl, smooth=True)
    yield from _lines(
        run,
        "Trainer against engine",
        "Absolute difference of log-probabilities of the sampled tokens; it should stay flat.",
        [("rollout/logprob_diff_mean", "mean"), ("rollout/logprob_diff_max", "largest")],
        log=True,
    )
    clips = [("clip_ratio/low_mean", "below"), ("clip_ratio/high_mean", "above")]
    yield from _lines(run, "Clipped tokens", "Share whose probability ratio left the trust region.", clips)
    yield from _lines(run, "Gradient norm", "Before clipping, over all parameters.", [("grad_norm", "")], smooth=True)
    yield from _lines(run, "Learning rate", "At the last update of a step.", [("lr", "")])


def _speed(run: Run) -> Iterator[Panel]:
    parts = [(label, run.metrics.get(f"timing_s/{name}", ())) for name, label in _PARTS]
    rest = _rest(run.metrics.get("timing_s/step", ()), [points for _, points in parts])
    layers = [Series(name=label, points=points) for label, points in [*parts, ("everything else", rest)]]
    yield from _panel("Seconds of a rollout step", "By what they went to.", stacked_chart(layers, unit=" s"))
    yield from _lines(
        run,
        "Tokens a second",
        "Of prompts and completions, over the whole rollout step, all devices together.",
        [("perf/tokens_per_s", "")],
        smooth=True,
    )


def _memory(run: Run) -> Iterator[Panel]:
    for title, note, metric in (
        ("Device memory by phase", "Most bytes held at once, on the rank with the most.", "device_peak_bytes"),
        ("Host memory by phase", "State that waits on the host, on the rank with the most.", "host_bytes"),
        ("Copied on entering a phase", "Between device and host.", "moved_bytes"),
    ):
        points = {phase: run.metrics.get(f"perf/phase/{phase}/{metric}", ()) for phase in _PHASES}
        yield from _panel(title, note, _bytes_chart(points))
    yield from _panel(
        "Process memory",
        "Resident set size of the largest process.",
        _bytes_chart({"": run.metrics.get("perf/rss_bytes", ())}),
    )


def _bytes_chart(points_of: dict[str, Points]) -> str:
    largest = max((y for points in points_of.values() for _, y in points), default=0.0)
    if not largest:
        return ""
    unit, size = next((pair for pair in _UNITS if largest >= pair[1]), _UNITS[-1])
    lines = [Series(name=name, points=[(x, y / size) for x, y in points]) for name, points in points_of.items()]
    return line_chart(lines, unit=f" {unit}", from_zero=True)


def _rest(totals: Points, parts: Sequence[Points]) -> Points:
    """What of the whole step no part accounts for."""
    known: dict[float, float] = {}
    for points in parts:
        for x, y in points:
            known[x] = known.get(x, 0.0) + y
    return [(x, max(0.0, total - known.get(x, 0.0))) for x, total in totals]


def _lines(
    run: Run, title: str, note: str, names: Sequence[tuple[str, str]], *, smooth: bool = False, log: bool = False
) -> Iterator[Panel]:
    series = [Series(name=label, points=run.metrics.get(name, ()), smooth=smooth) for name, label in names]
    yield from _panel(title, note, line_chart(series, log=log))


def _panel(title: str, note: str, chart: str) -> Iterator[Panel]:
    if chart:
        yield Panel(title=title, note=note, chart=chart)
