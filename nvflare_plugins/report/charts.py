"""Small charts as inline SVG for the report: no script, no font, no image, nothing from the network.

Colours are CSS variables (``--c1`` .. ``--c6``, ``--ink``, ``--muted``, ``--grid``) that the page defines for light and
dark. Every mark carries a ``<title>``, so that a pointer shows the number behind it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvflare_plugins.formatting import markup
from nvflare_plugins.report.style import STYLE

WIDTH = 760
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 14, 40
_MOST_MARKERS = 40
_MOST_BARS = 60
_WIDEST_BAR = 60.0
_CAPTION = 36


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. ``points`` are (x, y); ``wide`` draws it as a broad pale band, for a reference behind another line."""

    name: str
    colour: int
    points: tuple[tuple[float, float], ...]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar: label, value, the text at its end."""

    label: str
    value: float
    text: str
    colour: int = 1
    hint: str = ""


def number(value: float) -> str:
    """Return a number with as many digits as a person needs."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from ``low`` to ``high``, both included in the span; at least two."""
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, height: int = 300, at: str = "round") -> str:
    """Draw curves over a common x axis of whole numbers. Args: at: what a pointer calls a place on it."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    y_ticks = ticks(min(ys), max(ys))
    x_ticks = [x for x in ticks(min(xs), max(xs), 9) if x == int(x) and min(xs) <= x <= max(xs)]
    scale = _Scale(min(xs), max(xs), y_ticks[0], y_ticks[-1], height)
    parts = [*_frame(scale, x_ticks, y_ticks, x_label, y_label)]
    for line in sorted(lines, key=lambda one: not one.wide):
        parts += _draw_line(line, scale, at)
    return _svg(parts, height, f"{y_label} by {x_label}")


def stacked_bars(
    xs: Sequence[int], stacks: Sequence[tuple[str, int, Sequence[float]]], x_label: str, y_label: str, height: int = 260
) -> str:
    """Draw one stacked bar per x; neighbouring rounds are averaged if there are too many for a bar each.

    Args:
        stacks: (name, colour, value per x), lowest first.
    """
    groups = _groups(len(xs))
    heights = [[sum(values[a:b]) / (b - a) for a, b in groups] for _, _, values in stacks]
    totals = [sum(column) for column in zip(*heights, strict=True)]
    y_ticks = ticks(0.0, max(totals) or 1.0)
    half = (xs[groups[0][1] - 1] - xs[groups[0][0]] + 1) / 2
    scale = _Scale(xs[0] - half, xs[-1] + half, 0.0, y_ticks[-1], height)
    x_ticks = [x for x in ticks(xs[0], xs[-1], 9) if x == int(x) and xs[0] <= x <= xs[-1]]
    parts = [*_frame(scale, x_ticks, y_ticks, x_label, y_label)]
    for column, (a, b) in enumerate(groups):
        left, right = scale.x(xs[a] - 0.5), scale.x(xs[b - 1] + 0.5)
        gap = max(min(0.18 * (right - left), 3.0), (right - left - _WIDEST_BAR) / 2)
        base = 0.0
        for (name, colour, _), values in zip(stacks, heights, strict=True):
            top = base + values[column]
            where = f"round {xs[a]}" if b - a == 1 else f"rounds {xs[a]} to {xs[b - 1]}, mean"
            parts.append(
                f'<rect x="{left + gap:.1f}" y="{scale.y(top):.1f}" width="{max(right - left - 2 * gap, 0.8):.1f}" '
                f'height="{scale.y(base) - scale.y(top):.2f}" fill="var(--c{colour})">'
                f"<title>{markup(where)}: {markup(name)} {number(values[column])} s</title></rect>"
            )
            base = top
    return _svg(parts, height, f"{y_label} by {x_label}")


def horizontal_bars(bars: Sequence[Bar], label_width: int = 190, text_width: int = 190) -> str:
    """Draw labelled bars, one below the other."""
    row, top = 26, 4
    height = top * 2 + row * len(bars)
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    room = WIDTH - label_width - text_width - 16
    parts = []
    for i, bar in enumerate(bars):
        y = top + i * row
        width = max(room * bar.value / longest, 1.5)
        label = bar.label if len(bar.label) <= 26 else bar.label[:25] + "\u2026"
        parts.append(
            f"<g><title>{markup(bar.hint or f'{bar.label}: {bar.text}')}</title>"
            f'<text x="{label_width - 10}" y="{y + 17}" text-anchor="end" class="label">{markup(label)}</text>'
            f'<rect x="{label_width}" y="{y + 5}" width="{width:.1f}" height="{row - 10}" rx="2" '
            f'fill="var(--c{bar.colour})"/>'
            f'<text x="{label_width + width + 8:.1f}" y="{y + 17}" class="value">{markup(bar.text)}</text></g>'
        )
    return _svg(parts, height, "bars")


def two_sided_bars(bars: Sequence[Bar], label_width: int = 210, text_width: int = 70) -> str:
    """Draw labelled bars to the right of a line, and to its left where values are below 0."""
    row, top = 24, 4
    height = top * 2 + row * len(bars)
    longest = max((abs(bar.value) for bar in bars), default=0.0) or 1.0
    half = (WIDTH - label_width - 2 * text_width) / 2
    zero = label_width + text_width + half
    parts = [f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}" class="axis"/>']
    for i, bar in enumerate(bars):
        y, width, is_left = top + i * row, max(half * abs(bar.value) / longest, 1.0), bar.value < 0
        label = bar.label if len(bar.label) <= 30 else bar.label[:29] + "\u2026"
        left = zero - width if is_left else zero
        end, anchor = (left - 6, "end") if is_left else (zero + width + 6, "start")
        parts.append(
            f"<g><title>{markup(bar.hint or f'{bar.label}: {bar.text}')}</title>"
            f'<text x="{label_width - 10}" y="{y + 16}" text-anchor="end" class="label">{markup(label)}</text>'
            f'<rect x="{left:.1f}" y="{y + 4}" width="{width:.1f}" height="{row - 8}" rx="2" '
            f'fill="var(--c{2 if is_left else 1})"/>'
            f'<text x="{end:.1f}" y="{y + 16}" text-anchor="{anchor}" class="value">{markup(bar.text)}</text></g>'
        )
    return _svg(parts, height, "bars to both sides")


@dataclass(frozen=True, slots=True)
class Point:
    """One mean with its spread, drawn as a line of that length to both sides; ``name`` is what a pointer shows."""

    name: str
    x: float
    y: float
    spread: float = 0.0
    colour: int = 1


def points_chart(points: Sequence[Point], x_label: str, y_label: str, is_log: bool = False, height: int = 260) -> str:
    """Draw points with their spreads. Args: is_log: the x axis is logarithmic; all x are above 0 then."""
    place = math.log10 if is_log else float
    xs = [place(point.x) for point in points]
    ys = [y for point in points for y in (point.y - point.spread, point.y + point.spread)]
    y_ticks, room = ticks(min(ys), max(ys)), 0.04 * (max(xs) - min(xs)) or 0.5
    scale = _Scale(min(xs) - room, max(xs) + room, y_ticks[0], y_ticks[-1], height)
    parts = [*_frame(scale, [], y_ticks, x_label, y_label)]
    bottom = height - _BOTTOM
    values = _decades(points) if is_log else [x for x in ticks(min(xs), max(xs), 9) if min(xs) <= x <= max(xs)]
    for value in values:
        at = scale.x(place(value))
        parts.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle" class="tick">{number(value)}</text>')
    for point, x in zip(points, xs, strict=True):
        at, low, high = scale.x(x), scale.y(point.y - point.spread), scale.y(point.y + point.spread)
        colour = f"var(--c{point.colour})"
        parts.append(
            f"<g><title>{markup(point.name)}</title>"
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="1.5"/>'
            f'<circle cx="{at:.1f}" cy="{scale.y(point.y):.1f}" r="4" fill="{colour}"/></g>'
        )
    return _svg(parts, height, f"{y_label} by {x_label}")


def _decades(points: Sequence[Point]) -> list[float]:
    """Return round numbers on a logarithmic axis; the ends where no round number lies between them."""
    low, high = min(point.x for point in points), max(point.x for point in points)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low <= value <= high] or [low, high]


def picture(chart: str, caption: str) -> str:
    """Return one chart as a file of its own, in the report's light colours, which not every viewer takes from names."""
    height = int(chart.partition(f'viewBox="0 0 {WIDTH} ')[2].partition('"')[0])
    inner = chart.replace("<svg ", f'<svg x="0" y="{_CAPTION}" width="{WIDTH}" height="{height}" ', 1)
    whole = height + _CAPTION
    rules = "".join(re.findall(r"(?m)^svg [.t].*$", STYLE))
    image = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" width="{WIDTH}" height="{whole}" '
        f'role="img" aria-label="{markup(caption)}"><style>{rules}</style>'
        f'<rect width="{WIDTH}" height="{whole}" fill="var(--card)"/>'
        f'<text x="16" y="24" class="label">{markup(caption)}</text>{inner}</svg>\n'
    )
    light = dict(re.findall(r"--([\w-]+):(#\w+)", STYLE.partition("@media")[0]))
    return re.sub(r"var\(--([\w-]+)\)", lambda name: light[name[1]], image)


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """Return the legend as HTML, to stand above a chart."""
    items = "".join(
        f'<span class="key"><i style="background:var(--c{colour})"></i>{markup(name)}</span>'
        for name, colour in entries
    )
    return f'<p class="legend">{items}</p>'


class _Scale:
    """From data to pixels."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, height: int):
        self._x_low, self._x_span = x_low, (x_high - x_low) or 1.0
        self._y_low, self._y_span = y_low, (y_high - y_low) or 1.0
        self.height = height

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x_low) / self._x_span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return self.height - _BOTTOM - (value - self._y_low) / self._y_span * (self.height - _TOP - _BOTTOM)


def _frame(
    scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> Iterator[str]:
    bottom = scale.height - _BOTTOM
    for y in y_ticks:
        at = scale.y(y)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" class="tick">{number(y)}</text>'
    for x in x_ticks:
        yield f'<text x="{scale.x(x):.1f}" y="{bottom + 17}" text-anchor="middle" class="tick">{number(x)}</text>'
    yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" class="axis"/>'
    yield f'<text x="{WIDTH - _RIGHT}" y="{scale.height - 6}" text-anchor="end" class="name">{markup(x_label)}</text>'
    middle = (_TOP + bottom) / 2
    yield (
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" class="name" transform="rotate(-90 14 {middle:.0f})">'
        f"{markup(y_label)}</text>"
    )


def _draw_line(line: Line, scale: _Scale, place: str) -> Iterator[str]:
    points = [(scale.x(x), scale.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = "wide" if line.wide else "line"
    yield f'<polyline points="{path}" class="{style}" stroke="var(--c{line.colour})"/>'
    radius = 3.0 if len(points) <= _MOST_MARKERS and not line.wide else 0.0
    step = 1 if len(points) <= 400 else len(points) // 400
    for (x, y), (x_value, y_value) in list(zip(points, line.points, strict=True))[::step]:
        hint = f"<title>{markup(line.name)}, {place} {number(x_value)}: {number(y_value)}</title>"
        if radius:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="var(--c{line.colour})"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" class="hit">{hint}</circle>'


def _groups(n: int) -> list[tuple[int, int]]:
    size = -(-n // _MOST_BARS)
    return [(start, min(start + size, n)) for start in range(0, n, size)]


def _svg(parts: Sequence[str], height: int, name: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{markup(name)}">{"".join(parts)}</svg>'
