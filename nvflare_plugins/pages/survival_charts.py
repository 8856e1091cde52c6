"""Times of one site's rows as figures: Kaplan-Meier curves beside predicted ones, and calibration at one time.

Privacy: each step of a Kaplan-Meier curve is the time of a row's event. These figures belong on pages that stay at the
rows' site; nothing of them goes into a report that others may see.
References: Kaplan and Meier, Nonparametric estimation from incomplete observations (1958).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.base.formatting import number
from nvflare_plugins.pages.charts import Axis, Line, labelled_lines, line_chart

_GROUPS = ("predicted early", "predicted in between", "predicted late")
_CALIBRATED, _LEAST_OF_GROUP = 10, 20
_POINTS = 200
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeFigures:
    """Kaplan-Meier and calibration curves as markup. Attributes: words: which rows they are about."""

    kaplan_meier: str
    calibration: str
    words: str


def kaplan_meier(time: Floats, event: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the times of events, ascending, and the share of rows that live beyond each.

    Shapes: time: float64[n_rows]; event: bool[n_rows], whether it was seen then; result: float64[n_times] each.
    """
    times, at = np.unique(time, return_inverse=True)
    deaths, rows = (np.bincount(at, weights=one, minlength=times.size) for one in (event, np.ones(time.size)))
    at_risk = np.cumsum(rows[::-1])[::-1]
    is_event = deaths > 0
    shares: Floats = np.cumprod(1.0 - deaths[is_event] / at_risk[is_event], dtype=np.float64)
    return times[is_event], shares


def time_figures(
    bounds: NDArray[np.float32], predicted: Floats, survival: Callable[[float], Floats] | None
) -> TimeFigures | None:
    """Draw what is known of rows' times beside what a model says of them; None where no row has an event.

    Shapes: bounds: float32[n_rows, 2]; predicted: float64[n_rows], larger for later.

    Args:
        survival: time -> the chance of each row to live beyond it; None of hazards, which say none. Shapes:
            float64[n_rows].
    """
    lower, upper = bounds.astype(np.float64).T
    usable = (upper == lower) | np.isinf(upper)
    time, event, predicted = lower[usable], upper[usable] == lower[usable], predicted[usable]
    if not event.any():
        return None
    left_out = f" {int((~usable).sum()):,} rows whose time lies in an interval are not in them." * bool((~usable).any())
    words = f"{time.size:,} rows of this site, {int(event.sum()):,} of them with an event.{left_out}"
    last, lines, calibration = float(time.max()), [Line("all rows", 1, _steps(time, event, float(time.max())))], ""
    if survival is not None:
        horizon = float(np.median(time[event]))
        grid = np.linspace(last / 60, last, 60).tolist()
        mean = ((0.0, 1.0), *((at, float(survival(at)[usable].mean())) for at in grid))
        lines.append(Line("the model's mean", 6, mean, "dashed"))
        calibration = _calibration(time, event, survival(horizon)[usable], horizon)
    lines += _by_group(time, event, predicted, last)
    curves = labelled_lines(lines, Axis("time", "time", (0.0, last)), "share without an event")
    return TimeFigures(curves, calibration, words)


def _by_group(time: Floats, event: NDArray[np.bool_], predicted: Floats, last: float) -> Iterator[Line]:
    ends = np.searchsorted(np.quantile(predicted, (1 / 3, 2 / 3)), predicted, side="right")
    for place, name in enumerate(_GROUPS):
        rows = ends == place
        if rows.sum() >= _LEAST_OF_GROUP:
            yield Line(name, place + 2, _steps(time[rows], event[rows], last), "faint")


def _steps(time: Floats, event: NDArray[np.bool_], last: float) -> tuple[tuple[float, float], ...]:
    times, shares = kaplan_meier(time, event)
    chosen = np.unique(np.linspace(0, max(times.size - 1, 0), min(times.size, _POINTS)).astype(np.int64))
    points, level = [(0.0, 1.0)], 1.0
    for at, share in zip(times[chosen].tolist(), shares[chosen].tolist(), strict=True):
        points += [(at, level), (at, share)]
        level = share
    return (*points, (last, level))


def _calibration(time: Floats, event: NDArray[np.bool_], chance: Floats, horizon: float) -> str:
    lines = [Line("calibrated", 6, ((0, 0), (1, 1)), "dashed")]
    n_groups = max(1, min(_CALIBRATED, time.size // _LEAST_OF_GROUP))
    points = []
    for rows in np.array_split(np.argsort(chance, kind="stable"), n_groups):
        times, shares = kaplan_meier(time[rows], event[rows])
        before = int(np.searchsorted(times, horizon, side="right"))
        points.append((float(chance[rows].mean()), float(shares[before - 1]) if before else 1.0))
    lines.append(Line(f"rows by their predicted chance to be without an event at {number(horizon)}", 1, tuple(points)))
    return line_chart(lines, Axis("predicted chance", "chance", (0.0, 1.0)), "share without an event")
