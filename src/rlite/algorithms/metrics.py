"""Metrics that survive any split of the batch: every part returns sums, the sums are added up, the end divides.

A key is `<kind>:<name>`:
* `sum:loss` is added and reported as it is;
* `tokens:entropy` is added and divided by `count:tokens`; likewise for every other kind with a `count:<kind>`;
* `max:ratio/max` is reduced with MAX, not added; `max:-ratio/min` carries the negative of a minimum.
Whoever reduces over micro-batches and ranks therefore needs one rule: keys that start with `max:` take the maximum.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

MAX_PREFIX = "max:"
Value = TypeVar("Value", float, Tensor)


def is_max_metric(key: str) -> bool:
    """True where the reduction is MAX instead of SUM."""
    return key.startswith(MAX_PREFIX)


def add_metric_sums(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """The sums of several micro-batches (or ranks) as one."""
    total: dict[str, Value] = {}
    for part in parts:
        for key, value in part.items():
            if key not in total:
                total[key] = value
            elif is_max_metric(key):
                total[key] = torch.maximum(total[key], value) if isinstance(value, Tensor) else max(total[key], value)
            else:
                total[key] = total[key] + value
    return total


def extremes(name: str, values: Tensor) -> dict[str, Tensor]:
    """`max:<name>/max` and `max:-<name>/min` of a tensor that may be empty."""
    values = values.detach()
    floor = values.new_full((1,), -torch.inf)
    return {
        f"max:{name}/max": torch.cat([values, floor]).amax(),
        f"max:-{name}/min": torch.cat([-values, floor]).amax(),
    }


def summarize_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Global sums -> what is logged. Means without a single item, and extremes of nothing, are left out."""
    summary: dict[str, float] = {}
    for key, value in sums.items():
        kind, name = key.split(":", 1)
        if kind == "max":
            if math.isfinite(value):
                summary[name.removeprefix("-")] = -value if name.startswith("-") else value
        elif kind == "sum":
            summary[name] = value
        elif kind != "count" and sums[f"count:{kind}"] > 0:
            summary[name] = value / sums[f"count:{kind}"]
    return _derive(summary, sums)


def _derive(summary: dict[str, float], sums: Mapping[str, float]) -> dict[str, float]:
    """Adds the metrics that are functions of means, and takes out the raw moments (`moment/...`) they are made of."""
    moments = {name.removeprefix("moment/"): value for name, value in summary.items() if name.startswith("moment/")}
    summary = {name: value for name, value in summary.items() if not name.startswith("moment/")}
    if "clip_ratio/low_mean" in summary:
        summary["clip_ratio/region_mean"] = summary["clip_ratio/low_mean"] + summary["clip_ratio/high_mean"]
    if "is_square" in moments and moments["is_square"] > 0:
        summary["rollout/ess"] = summary["rollout/is_mean"] ** 2 / moments["is_square"]
        summary["rollout/chi2_token"] = moments["is_square"] - 1.0
        summary["rollout/prob_pearson"] = _pearson(moments)
        summary["rollout/prob_abs_std"] = _sample_std(
            moments["prob_abs_square"], summary["rollout/prob_abs_mean"], sums["count:tokens"]
        )
    if "seq_is_square" in moments:
        summary["rollout/chi2_seq"] = moments["seq_is_square"] - 1.0
    if "reward_square" in moments:
        summary["reward/std"] = _sample_std(moments["reward_square"], summary["reward/mean"], sums["count:judged"])
    return summary


def _sample_std(mean_square: float, mean: float, count: float) -> float:
    return math.sqrt(max(mean_square - mean**2, 0.0) * count / max(count - 1.0, 1.0))


def _pearson(moments: Mapping[str, float]) -> float:
    """Correlation of trainer and engine probabilities; NaN when one of them is constant."""
    covariance = moments["prob_product"] - moments["prob_old"] * moments["prob_rollout"]
    variance_old = moments["prob_old_square"] - moments["prob_old"] ** 2
    variance_rollout = moments["prob_rollout_square"] - moments["prob_rollout"] ** 2
    if variance_old <= 0 or variance_rollout <= 0:
        return math.nan
    return covariance / math.sqrt(variance_old * variance_rollout)
