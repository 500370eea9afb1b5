"""Line charts and stacked areas as inline SVG: no script, no library, colours from the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlite.report.run import Points

_WIDTH, _HEIGHT = 560.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 12.0, 30.0
_MOST_POINTS = 400
_COLORS = 8
"""Classes `c0` to `c7` of the style sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or one layer of a stack."""

    name: str
    """For the legend; empty where the heading says it."""
    points: Points
    smooth: bool = False
    """Draw the values faintly and an exponential mean over about a twentieth of the run on top."""
    band: tuple[Points, Points] | None = None
    """Lower and upper edge of an area around the line."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Maps values to the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        low, high = self.y
        share = (self._scaled(y) - self._scaled(low)) / (self._scaled(high) - self._scaled(low))
        along = (x - self.x[0]) / (self.x[1] - self.x[0])
        return (
            _LEFT + along * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (_HEIGHT - _TOP - _BOTTOM),
        )

    def _scaled(self, y: float) -> float:
        return math.log10(max(y, 1e-30)) if self.log else y


def line_chart(series: Sequence[Series], *, unit: str = "", log: bool = False, from_zero: bool = False) -> str:
    """SVG of the series over the rollout steps; empty when they have no points, or only zeros.

    `log` leaves out what is not positive; `from_zero` starts the value axis at zero.
    """
    drawn = [s for s in (_prepared(s, log=log) for s in series) if s.points]
    if not any(y for s in drawn for _, y in s.points):
        return ""
    values = [y for s in drawn for edge in (s.points, *(s.band or ())) for _, y in edge] + [0.0] * from_zero
    axes = Axes(_x_range(drawn), _y_range(values, log=log), log)
    parts = [_grid(axes, unit)]
    parts += [_band(axes, s, color) for color, s in enumerate(drawn) if s.band]
    parts += [_line(axes, s, color) for color, s in enumerate(drawn)]
    parts += [_marks(axes, s, color, unit) for color, s in enumerate(drawn)]
    return _svg(parts) + _legend([s.name for s in drawn])


def stacked_chart(series: Sequence[Series], *, unit: str = "") -> str:
    """SVG of layers on top of each other; a layer counts as 0 where it has no value."""
    layers = [Series(name=s.name, points=thin(s.points)) for s in series if any(y for _, y in s.points)]
    if not layers:
        return ""
    steps = sorted({x for s in layers for x, _ in s.points})
    below = dict.fromkeys(steps, 0.0)
    edges = []
    for layer in layers:
        values = dict(layer.points)
        above = {x: below[x] + values.get(x, 0.0) for x in steps}
        edges.append((below, above, values))
        below = above
    axes = Axes(_x_range(layers), _y_range([0.0, *below.values()], log=False))
    parts = [_grid(axes, unit)]
    for color, (layer, (low, high, values)) in enumerate(zip(layers, edges, strict=True)):
        parts.append(_area(axes, list(low.items()), list(high.items()), f"c{color % _COLORS} layer"))
        tops = [(x, high[x]) for x in values]
        parts.append(_hover(axes, [(x, y, f"{layer.name} {show(values[x])}{unit}") for x, y in tops]))
    return _svg(parts) + _legend([layer.name for layer in layers])


def thin(points: Points, most: int = _MOST_POINTS) -> Points:
    """At most `most` points: means over equally many neighbours."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[0][0], sum(y for _, y in group) / len(group)) for group in groups]


def smoothed(points: Points) -> Points:
    """Exponential mean without a bias at the start."""
    keep = max(0.0, 1.0 - 20.0 / max(len(points), 1))
    result, mean, weight = [], 0.0, 0.0
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        result.append((x, mean / weight))
    return result


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers inside `[low, high]`."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def show(value: float) -> str:
    """Four significant digits at most; powers of ten for very large and very small numbers."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"


def _prepared(series: Series, *, log: bool) -> Series:
    def usable(points: Points) -> Points:
        return [(x, y) for x, y in thin(points) if y > 0 or not log]

    band = (usable(series.band[0]), usable(series.band[1])) if series.band else None
    band = band if band and band[0] and band[1] else None
    return Series(name=series.name, points=usable(series.points), smooth=series.smooth, band=band)


def _x_range(series: Sequence[Series]) -> tuple[float, float]:
    low, high = min(s.points[0][0] for s in series), max(s.points[-1][0] for s in series)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _y_range(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return (low, high) if high > low else (low, 10 * low)
    if low == high:
        return (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    margin = 0.06 * (high - low)
    return (0.0 if 0 <= low <= 0.4 * high else low - margin), high + margin


def _grid(axes: Axes, unit: str) -> str:
    low, high = axes.y
    if axes.log:
        first, last = round(math.log10(low)), round(math.log10(high))
        marks = [10.0**power for power in range(first, last + 1, max(1, (last - first) // 4))]
    else:
        marks = ticks(low, high)
    lines = []
    for mark in marks:
        _, y = axes.at(axes.x[0], mark)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{show(mark)}{unit}</text>')
    for mark in ticks(*axes.x, count=6):
        if mark == int(mark):
            x, _ = axes.at(mark, low)
            lines.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 9}" text-anchor="middle">{mark:.0f}</text>')
    return "".join(lines)


def _line(axes: Axes, series: Series, color: int) -> str:
    raw = _path(axes, series.points)
    name = f"c{color % _COLORS}"
    if not series.smooth or len(series.points) < 10:
        return f'<path class="line {name}" d="{raw}"/>'
    smooth = _path(axes, smoothed(series.points))
    return f'<path class="line faint {name}" d="{raw}"/><path class="line {name}" d="{smooth}"/>'


def _band(axes: Axes, series: Series, color: int) -> str:
    assert series.band is not None
    return _area(axes, series.band[0], series.band[1], f"c{color % _COLORS} band")


def _area(axes: Axes, low: Points, high: Points, name: str) -> str:
    there, back = _path(axes, high), _path(axes, list(reversed(low)))
    return f'<path class="{name}" d="{there}L{back[1:]}Z"/>'


def _marks(axes: Axes, series: Series, color: int, unit: str) -> str:
    dots = ""
    if len(series.points) == 1:  # a line of one point would not be seen
        x, y = axes.at(*series.points[0])
        dots = f'<circle class="dot c{color % _COLORS}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    return dots + _hover(axes, [(x, y, f"{series.name} {show(y)}{unit}".strip()) for x, y in series.points])


def _hover(axes: Axes, points: Sequence[tuple[float, float, str]]) -> str:
    """Invisible circles whose title the browser shows under the pointer."""
    circles = []
    for step, value, text in points:
        x, y = axes.at(step, value)
        title = escape(f"step {step:.0f}: {text}")
        circles.append(f'<circle class="hover" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{title}</title></circle>')
    return "".join(circles)


def _path(axes: Axes, points: Points) -> str:
    return "M" + "L".join("{:.1f},{:.1f}".format(*axes.at(x, y)) for x, y in points)


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img">{"".join(parts)}</svg>'


def _legend(names: Sequence[str]) -> str:
    """Series without a name explain themselves by the heading."""
    items = [f'<span><i class="c{n % _COLORS}"></i>{escape(name)}</span>' for n, name in enumerate(names) if name]
    return f'<div class="legend">{"".join(items)}</div>' if items else ""
