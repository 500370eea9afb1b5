"""One self-contained HTML page about a run."""

from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from rlite.report.charts import show
from rlite.report.panels import Panel, sections
from rlite.report.run import Points, Run, Sample
from rlite.report.style import CSS

_SHOWN_CHARACTERS = 4000


def page(run: Run) -> str:
    """The page. Everything that a model or a data set wrote is escaped."""
    parts = [_heading(run), _tiles(run)]
    for section in sections(run):
        cards = "".join(_card(panel) for panel in section.panels)
        parts.append(f'<h2>{escape(section.title)}</h2><div class="grid2">{cards}</div>')
    parts.append(_samples(run))
    if run.traces:
        links = ", ".join(f'<a href="{escape(name)}" download>{escape(name)}</a>' for name in run.traces)
        parts.append(f'<p class="note">Time line of phases, transfers and memory, for ui.perfetto.dev: {links}</p>')
    if run.config:
        parts.append(f"<details><summary>Configuration</summary><pre>{escape(run.config)}</pre></details>")
    title = f"{run.directory.parent.name}/{run.directory.name}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>rlite: {escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>"
    )


def _heading(run: Run) -> str:
    recorded = f", {run.samples.total} completions recorded" if run.samples else ""
    name = escape(run.directory.parent.name) + " / " + escape(run.directory.name)
    return f'<h1>{name}</h1><p class="sub">{_num_steps(run)} rollout steps{recorded}</p>'


def _num_steps(run: Run) -> int:
    return len({step for points in run.metrics.values() for step, _ in points})


def _tiles(run: Run) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in _facts(run)
    )
    return f'<div class="tiles">{tiles}</div>' if tiles else ""


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    metrics = run.metrics
    if points := metrics.get("reward/mean"):
        first, last = _ends(points)
        yield f"{first:.3g} → {last:.3g}", "mean reward, first and last tenth"
    if points := metrics.get("val/reward/mean"):
        yield show(points[-1][1]), "last validation reward"
    for name, label, unit in (
        ("timing_s/step", "a rollout step (median)", " s"),
        ("perf/tokens_per_s", "tokens a second (median)", ""),
    ):
        if points := metrics.get(name):
            yield show(median(y for _, y in points)) + unit, label
    if points := metrics.get("rollout/logprob_diff_max"):
        yield show(max(y for _, y in points)), "largest trainer/engine log-prob difference"
    if points := metrics.get("perf/reshard/efficiency"):
        yield f"{points[-1][1]:.0%}", "of the bytes received in weight conversion were needed"
    if skipped := sum(y for _, y in metrics.get("updates_skipped", ())):
        yield show(skipped), "updates skipped: loss or gradients not finite"


def _ends(points: Points) -> tuple[float, float]:
    """Means of the first and of the last tenth."""
    count = max(1, len(points) // 10)
    return fmean(y for _, y in points[:count]), fmean(y for _, y in points[-count:])


def _card(panel: Panel) -> str:
    return (
        f'<div class="card"><h3>{escape(panel.title)}</h3><p class="note">{escape(panel.note)}</p>{panel.chart}</div>'
    )


def _samples(run: Run) -> str:
    if run.samples is None:
        return ""
    chosen = run.samples
    columns = _column("Best completions", chosen.best, "good") + _column("Worst completions", chosen.worst, "bad")
    parts = [f'<h2>Rollout step {chosen.step}</h2><div class="grid2">{columns}</div>'] if columns else []
    if strangest := _column("Largest difference between trainer and engine, whole run", chosen.strangest, ""):
        parts.append(f"<h2>Numerics</h2>{strangest}")
    return "".join(parts)


def _column(title: str, samples: Sequence[Sample], kind: str) -> str:
    if not samples:
        return ""
    return f'<div><h3 class="note">{escape(title)}</h3>{"".join(_sample(sample, kind) for sample in samples)}</div>'


def _sample(sample: Sample, kind: str) -> str:
    reward = "no reward" if sample["reward"] is None else f"reward {show(sample['reward'])}"
    facts = [f"step {sample['rollout_step']}", f"{sample.get('num_tokens', '?')} tokens", _ending(sample)]
    rewards = sample.get("rewards") or {}
    if len(rewards) > 1:
        facts += [f"{name} {'-' if value is None else show(value)}" for name, value in rewards.items()]
    facts += [f"{label} {show(sample[key])}" for key, label in _NUMBERS if isinstance(sample.get(key), float)]
    return (
        f'<div class="card sample"><header><span class="reward {kind}">{escape(reward)}</span>'
        f'<span class="meta">{escape(", ".join(fact for fact in facts if fact))}</span></header>'
        f'<pre><span class="prompt">{_text(sample["prompt"])}</span>{_text(sample["completion"])}</pre></div>'
    )


_NUMBERS = (("advantage", "advantage"), ("logprob_diff", "log-prob difference"))


def _ending(sample: Sample) -> str:
    return {"stop": "stopped", "length": "truncated", "abort": "aborted"}.get(sample.get("finish_reason", ""), "")


def _text(text: Any) -> str:
    """Escaped; the middle of a long text is left out."""
    text = str(text)
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return escape(text)
