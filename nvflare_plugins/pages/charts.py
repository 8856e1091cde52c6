"""Small charts as inline SVG: where their marks lie; templates/figures.svg draws them.

Colours are CSS variables (``--c1`` .. ``--c6``, ``--ink``, ``--muted``, ``--grid``) that the page defines for light and
dark. Every mark carries a ``<title>``, so that a pointer shows the number behind it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

from nvflare_plugins.base.formatting import counted, human_bytes, number, printable, utc
from nvflare_plugins.pages.run_record import RoundRow

# Pages and figures from the templates beside this module.
#
# Whatever a value holds is text: it is bounded, made printable and escaped, and never read as a template or as HTML.

_LONGEST = 4000


@cache
def environment() -> Environment:
    """Return the templates, with the filters that they use."""
    made = Environment(
        loader=PackageLoader("nvflare_plugins.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    made.filters |= {
        "around_code": lambda text: re.split("`([^`]+)`", printable(text, _LONGEST)),
        "bytes": human_bytes,
        "counted": counted,
        "epsilon": lambda value: f"{value:.4g}" if value is not None and value < float("inf") else "unbounded",
        "fmt": format,
        "listed": listed,
        "number": number,
        "px": lambda value: f"{value:.1f}",
        "utc": utc,
    }
    return made


def page(template: str, /, **facts: object) -> str:
    """Return a whole page that loads nothing. Raises: AttributeError: a fact lacks what the template shows."""
    try:
        return environment().get_template(template).render(facts)
    except UndefinedError as error:
        raise AttributeError(str(error)) from None


def figure(macro: str, /, **facts: object) -> str:
    """Return a figure, drawn by the macro of that name, as markup that pages take as it is."""
    drawn: str = getattr(environment().get_template("figures.svg").module, macro)(**facts)
    return drawn


def listed(texts: Sequence[str], most: int = 1000) -> str:
    """Return texts in a row, and how many more there are."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more:,} more" if more > 0 else "")


def _shown(value: object) -> object:
    """Return what a template prints of a value: markup that a template has made as it is, all else as text."""
    return value if hasattr(value, "__html__") else printable(str(value), _LONGEST)


WIDTH, HALF = 760, 390
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 14, 40
_MOST_MARKERS = 40
_MOST_BARS = 60
_WIDEST_BAR = 60.0
_BAR = 26
_CAPTION = 36
STAGES = {
    "xgboost": ("XGBoost", 1),
    "grow": ("growth of trees", 1),
    "protect": ("protection", 2),
    "encrypt": ("encryption", 2),
    "receive": ("reading", 6),
    "histogram": ("sums of ciphertexts", 4),
    "pack": ("packing", 5),
    "hide": ("hiding", 5),
    "decrypt": ("decryption", 5),
    "compare": ("comparison under seal", 4),
    "prepare": ("made ahead", 1),
    "network": ("network and waiting", 3),
}
"""What a round's time is spent on: the stage -> its words and colour."""
_MOST_ROUNDS = 12
_LANES_LEFT, _LANE, _GAP = 190, 15, 16


@dataclass(frozen=True, slots=True)
class Line:
    """One curve.

    Attributes:
        points: (x, y).
        style: line, wide (a pale band behind the others), dashed or faint.
        key: by which a page's script finds it.
    """

    name: str
    colour: int
    points: tuple[tuple[float, float], ...]
    style: str = "line"
    key: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar: label, value, the text at its end."""

    label: str
    value: float
    text: str
    colour: int = 1
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One mean with its spread, drawn as a line of that length to both sides; ``name`` is what a pointer shows."""

    name: str
    x: float
    y: float
    spread: float = 0.0
    colour: int = 1


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis beyond what the data say. Attributes: at: what a pointer calls a place; span: lowest and highest value.

    ``mark``: a value, drawn as a line across the chart, and its name; ``width``: of the chart.
    """

    label: str
    at: str = "round"
    span: tuple[float, float] | None = None
    mark: tuple[float, str] | None = None
    width: int = WIDTH


Mark = dict[str, Any]
"""What the macro ``drawing`` puts where it says: a line, text, circle, path or rect (templates/figures.svg)."""


def text_mark(x: float, y: float, text: str, anchor: str, style: str) -> Mark:
    """Return a text of a drawing. Args: anchor: start, middle or end; style: its class."""
    return {"kind": "text", "x": x, "y": y, "text": text, "anchor": anchor, "class": style}


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


def line_chart(lines: Sequence[Line], x: Axis | str, y_label: str, height: int = 300) -> str:
    """Draw curves over a common x axis: of whole numbers, unless it has a span of its own."""
    axis = x if isinstance(x, Axis) else Axis(x)
    xs = axis.span or [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low, high, y_ticks = min(xs), max(xs), ticks(min(ys), max(ys))
    scale = _Scale(low, high, y_ticks[0], y_ticks[-1], height, axis.width)
    drawn = [_draw_line(line, scale, axis.at) for line in sorted(lines, key=lambda one: one.style != "wide")]
    frame = _frame(
        scale, _whole_ticks(low, high) if axis.span is None else ticks(low, high), y_ticks, axis.label, y_label
    )
    if axis.mark is not None:
        at = scale.x(axis.mark[0])
        frame["mark"] = (at, axis.mark[1], "end" if at > 0.85 * axis.width else "middle")
    return figure("line_chart", frame=frame, lines=drawn)


def labelled_lines(lines: Sequence[Line], x: Axis | str, y_label: str) -> str:
    """Draw curves as ``line_chart`` does, below their legend."""
    return legend([(line.name, line.colour) for line in lines]) + line_chart(lines, x, y_label)


def stacked_bars(
    xs: Sequence[int], stacks: Sequence[tuple[str, int, Sequence[float]]], x_label: str, y_label: str, height: int = 260
) -> str:
    """Draw one stacked bar per x; neighbouring rounds are averaged if there are too many for a bar each.

    Args:
        stacks: (name, colour, value per x), lowest first.
    """
    groups = _groups(len(xs))
    heights = [[sum(values[a:b]) / (b - a) for a, b in groups] for _, _, values in stacks]
    y_ticks = ticks(0.0, max(sum(column) for column in zip(*heights, strict=True)) or 1.0)
    half = (xs[groups[0][1] - 1] - xs[groups[0][0]] + 1) / 2
    scale = _Scale(xs[0] - half, xs[-1] + half, 0.0, y_ticks[-1], height)
    bars = []
    for column, (a, b) in enumerate(groups):
        left, right = scale.x(xs[a] - 0.5), scale.x(xs[b - 1] + 0.5)
        gap = max(min(0.18 * (right - left), 3.0), (right - left - _WIDEST_BAR) / 2)
        where = f"round {xs[a]}" if b - a == 1 else f"rounds {xs[a]} to {xs[b - 1]}, mean"
        base = 0.0
        for (name, colour, _), values in zip(stacks, heights, strict=True):
            top = base + values[column]
            hint = f"{where}: {name} {number(values[column])} s"
            box = (left + gap, scale.y(top), max(right - left - 2 * gap, 0.8), scale.y(base) - scale.y(top))
            bars.append((*box, colour, hint))
            base = top
    return figure(
        "stacked_bars", frame=_frame(scale, _whole_ticks(xs[0], xs[-1]), y_ticks, x_label, y_label), bars=bars
    )


def horizontal_bars(bars: Sequence[Bar], longest: float = 0.0, mark: float | None = None) -> str:
    """Draw labelled bars, one below the other.

    Args:
        longest: the value that fills the picture, where figures share a scale; 0 takes the largest.
        mark: a value at which a line stands.
    """
    return _bars(bars, 190, WIDTH - 2 * 190 - 16, longest, mark)


def paired_bars(labels: Sequence[str], pairs: Sequence[tuple[float, float]]) -> str:
    """Draw two shares for each label, one below the other, in the first two colours: a histogram beside another."""
    left, row, longest = 158, 30, max(max(pair) for pair in pairs) or 1.0
    marks: list[Mark] = []
    for place, (label, pair) in enumerate(zip(labels, pairs, strict=True)):
        marks.append(text_mark(left - 8, row * place + 19, shortened(label, 23), "end", "tick"))
        for n, share in enumerate(pair):
            top, width = row * place + 4 + 11 * n, (HALF - left - 50) * share / longest
            bar = {"kind": "rect", "x": left, "y": top, "width": width, "height": 10, "hint": f"{label}: {share:.1%}"}
            marks.append({**bar, "fill": f"var(--c{n + 1})"})
            marks.append(text_mark(left + width + 4, top + 9, f"{share:.1%}", "start", "tick"))
    return figure("drawing", width=HALF, height=row * len(labels) + 4, name="shares of rows", marks=marks)


def two_sided_bars(bars: Sequence[Bar]) -> str:
    """Draw labelled bars to the right of a line, and to its left where values are below 0."""
    labels, texts = 210, 70
    half = (WIDTH - labels - 2 * texts) / 2
    return _bars(bars, labels + texts + half, half, mark=0.0, label_at=labels)


def _bars(
    bars: Sequence[Bar], zero: float, room: float, longest: float = 0.0, mark: float | None = None, label_at: float = 0
) -> str:
    """Draw bars from ``zero`` on, over at most ``room``. Args: label_at: where labels end; 0 is where bars begin."""
    longest = longest or max((abs(bar.value) for bar in bars), default=0.0) or 1.0
    height, marks = 8 + _BAR * len(bars), list[Mark]()
    for n, bar in enumerate(bars):
        width, base, is_left = max(room * abs(bar.value) / longest, 1.5), 21 + _BAR * n, bar.value < 0
        left, hint = zero - width if is_left else zero, bar.hint or f"{bar.label}: {bar.text}"
        fill = f"var(--c{2 if is_left else bar.colour})"
        marks.append(
            text_mark(
                (label_at or zero) - 10, base, shortened(bar.label, int((label_at or zero) / 7.4)), "end", "label"
            )
        )
        rect = {"kind": "rect", "x": left, "y": base - 12, "width": width, "height": 16}
        marks.append({**rect, "fill": fill, "hint": hint})
        beside = (left - 6, "end") if is_left else (left + width + 8, "start")
        marks.append(text_mark(beside[0], base, bar.text, beside[1], "value halo"))
    if mark is not None:
        at = zero + room * mark / longest
        marks.append({"kind": "line", "ends": (at, 0, at, height), "class": "axis"})
    return figure("drawing", width=WIDTH, height=height, name="bars", marks=marks)


def points_chart(
    points: Sequence[Point],
    x: str,
    y_label: str,
    *,
    is_log: bool = False,
    names: Sequence[str] = (),
    width: int = WIDTH,
) -> str:
    """Draw points with their spreads.

    Args:
        is_log: the x axis is logarithmic; all x are above 0 then.
        names: of the places 0, 1, ... on the x axis, where these are no numbers.
    """
    place = math.log10 if is_log else float
    xs = [place(point.x) for point in points]
    ys = [y for point in points for y in (point.y - point.spread, point.y + point.spread)]
    y_ticks, room = ticks(min(ys), max(ys)), 0.04 * (max(xs) - min(xs)) or 0.5
    scale = _Scale(min(xs) - room, max(xs) + room, y_ticks[0], y_ticks[-1], 260, width)
    values = (
        _decades(points)
        if is_log
        else [one for one in ticks(min(xs), max(xs), width // 84) if min(xs) <= one <= max(xs)]
    )
    frame = _frame(scale, [], y_ticks, x, y_label)
    frame["columns"] = [(scale.x(place(value)), number(value)) for value in values]
    if names:
        most = max(int((width - _LEFT) / len(names) / 7), 4)
        frame["columns"] = [(scale.x(at), shortened(name, most)) for at, name in enumerate(names)]
    drawn = [
        (scale.x(x), scale.y(point.y), scale.y(point.y - point.spread), scale.y(point.y + point.spread), point)
        for point, x in zip(points, xs, strict=True)
    ]
    return figure("points_chart", frame=frame, points=drawn)


def _decades(points: Sequence[Point]) -> list[float]:
    """Return round numbers on a logarithmic axis; the ends where no round number lies between them."""
    low, high = min(point.x for point in points), max(point.x for point in points)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low <= value <= high] or [low, high]


def timeline(rounds: Sequence[RoundRow]) -> str:
    """Draw when each stage of a round ran at this site: a strip for each round; nothing for rounds without spans.

    Where there are many rounds, some are shown, the first and the last among them.
    """
    known = [row for row in rounds if any(stage in STAGES for stage, _, _ in row.spans)]
    if not known:
        return ""
    n = min(len(known), _MOST_ROUNDS)
    shown = [known[round(i * (len(known) - 1) / max(n - 1, 1))] for i in range(n)]
    longest = max(max((end for _, _, end in row.spans), default=0.0) for row in shown) or 1.0
    scale = (WIDTH - _LANES_LEFT - _RIGHT) / longest
    strips, top = [], 4
    for row in shown:
        lanes, first = [], top
        for key, (name, colour) in STAGES.items():
            spans = [
                (begin * scale, max((end - begin) * scale, 0.4), f"{name}: {number(begin)} to {number(end)} s")
                for stage, begin, end in row.spans
                if stage == key
            ]
            if spans:
                lanes.append((name, colour, top, spans))
                top += _LANE
        strips.append((row.round + 1, first, lanes))
        top += _GAP
    words = (
        f"What ran when, at this site alone, {n} of {len(known)} rounds; lanes above one another ran at the same time. "
        f"The axis is {number(longest)} s long."
    )
    return figure("timeline", width=WIDTH, height=top, words=words, rounds=strips, left=_LANES_LEFT)


def picture(chart: str, caption: str) -> str:
    """Return one chart as a file of its own, in the report's light colours, which not every viewer takes from names."""
    height = int(chart.partition(f'viewBox="0 0 {WIDTH} ')[2].partition('"')[0])
    image = figure("picture", width=WIDTH, height=height, margin=_CAPTION, chart=chart, caption=caption)
    return in_light_colours(image)


def in_light_colours(markup: str) -> str:
    """Return markup with the light colours in place of their names, which pages alone define."""
    style = environment().get_template("style.css").render()
    light = dict(re.findall(r"--([\w-]+):(#\w+)", style.partition("@media")[0]))
    return re.sub(r"var\(--([\w-]+)\)", lambda name: light.get(name[1], name[0]), markup)


def shortened(text: str, most: int) -> str:
    """Return a text that fits: its beginning, if it is longer than ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """Return the legend as HTML, to stand above a chart."""
    return figure("legend", entries=entries)


class _Scale:
    """From data to pixels."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, height: int, width: int = WIDTH):
        self._x_low, self._x_span = x_low, (x_high - x_low) or 1.0
        self._y_low, self._y_span = y_low, (y_high - y_low) or 1.0
        self.height, self.width = height, width

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x_low) / self._x_span * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return self.height - _BOTTOM - (value - self._y_low) / self._y_span * (self.height - _TOP - _BOTTOM)


def _whole_ticks(low: float, high: float) -> list[float]:
    return [x for x in ticks(low, high, 9) if x == int(x) and low <= x <= high]


def _frame(
    scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> dict[str, Any]:
    bottom = scale.height - _BOTTOM
    return {
        "width": scale.width,
        "height": scale.height,
        "left": _LEFT,
        "right": scale.width - _RIGHT,
        "bottom": bottom,
        "middle": f"{(_TOP + bottom) / 2:.0f}",
        "rows": [(scale.y(y), number(y)) for y in y_ticks],
        "columns": [(scale.x(x), number(x)) for x in x_ticks],
        "x_label": x_label,
        "y_label": y_label,
        "mark": None,
    }


def _draw_line(line: Line, scale: _Scale, place: str) -> dict[str, Any]:
    places = [(scale.x(x), scale.y(y)) for x, y in line.points]
    hints = [f"{line.name}, {place} {number(x)}: {number(y)}" for x, y in line.points]
    return {
        "style": line.style,
        "key": line.key,
        "colour": line.colour,
        "path": places,
        "has_markers": len(places) <= _MOST_MARKERS and line.style == "line",
        "places": list(zip(places, hints, strict=True))[:: max(1, len(places) // 400)],
    }


def _groups(n: int) -> list[tuple[int, int]]:
    size = -(-n // _MOST_BARS)
    return [(start, min(start + size, n)) for start in range(0, n, size)]
