"""AUC over epsilon, or over another number, one panel a table, as an SVG for RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.pages.charts import ticks

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _LEGEND = 380, 260, 52, 36, 26, 28
_COLOURS = ("#0b6e99", "#c4462d", "#7a5195", "#2f7d3b", "#8a6d1d", "#d1338a", "#3b3b98", "#5f9ea0", "#111111")
_STYLE = "svg{font:12px sans-serif;background:#fff}path{fill:none;stroke-width:2}.grid{stroke:#ddd}.axis{stroke:#555}"


def draw(
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]],
    epsilons: Sequence[float],
    without: str | None,
    axis: str = "epsilon",
) -> str:
    """Return the picture; ``without`` is a method that has no epsilon, drawn as a dashed line."""
    methods = list(dict.fromkeys(name for table in tables.values() for name in table if name != without))
    words = dict(zip(methods, _COLOURS, strict=False)) | (
        {} if without is None else {f"{without}, no privacy (dashed)": "#555"}
    )
    step = max(118, *(7 * len(name) for name in methods))
    in_line = 2 * _WIDTH // step
    parts = [
        f'<text x="{_LEFT + step * (i % in_line)}" y="{16 + 18 * (i // in_line)}" fill="{colour}">{name}</text>'
        for i, (name, colour) in enumerate(words.items())
    ]
    legend = _LEGEND + 18 * ((len(words) - 1) // in_line)
    for number, (title, table) in enumerate(tables.items()):
        x, y = _WIDTH * (number % 2), legend + _HEIGHT * (number // 2)
        parts += [
            f'<g transform="translate({x} {y})">',
            *_panel(f"{title}: AUC over {axis}", table, methods, epsilons, without),
            "</g>",
        ]
    height = legend + _HEIGHT * math.ceil(len(tables) / 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {height}"><style>{_STYLE}</style>'
        f"{''.join(parts)}</svg>\n"
    )


def _panel(
    title: str,
    table: Mapping[str, Mapping[str, Any]],
    methods: Sequence[str],
    epsilons: Sequence[float],
    without: str | None,
) -> list[str]:
    curves = {
        name: [table[name][f"{epsilon:g}"]["auc"]["mean"] for epsilon in epsilons]
        for name in (*methods, *([] if without is None else [without]))
        if name in table
    }
    marks = ticks(min(min(c) for c in curves.values()), max(max(c) for c in curves.values()))
    logs = [math.log(epsilon) for epsilon in epsilons]

    def at(i: int, auc: float) -> tuple[float, float]:
        right = (logs[i] - logs[0]) / (logs[-1] - logs[0])
        up = (auc - marks[0]) / (marks[-1] - marks[0])
        return _LEFT + right * (_WIDTH - _LEFT - 14), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold">{title}</text>']
    for mark in marks:
        (left, y), (right, _) = at(0, mark), at(len(epsilons) - 1, mark)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for i, epsilon in enumerate(epsilons):
        x, y = at(i, marks[0])
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{epsilon:g}</text>')
    for name, curve in curves.items():
        points = " L".join(f"{x:.1f} {y:.1f}" for x, y in (at(i, auc) for i, auc in enumerate(curve)))
        look = (
            'stroke="#555" stroke-dasharray="5 4"' if name == without else f'stroke="{_COLOURS[methods.index(name)]}"'
        )
        shown = ", ".join(f"{auc:.4f}" for auc in curve)
        parts.append(f'<path {look} d="M{points}"><title>{name}: {shown}</title></path>')
    return parts
