"""What a job's label is: one column, or the columns that say until when each row was watched and what was seen then.

The rows of a survival objective carry two numbers: the earliest and the latest time at which the event can have been.
An event that was seen has both alike. A row that was watched until a time without an event has no latest time, which is
infinite here, as XGBoost's ``label_lower_bound`` and ``label_upper_bound`` are.

| form | event at t | none until t (right-censored) | before t (left-censored) | between s and t |
|---|---|---|---|---|
| ``{"time": ..., "event": ...}`` | t, 1 | t, 0 | | |
| ``{"signed": ...}`` | t | -t | | |
| ``{"lower": ..., "upper": ...}`` | t, t | t, missing or infinite | missing or 0, t | s, t |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.declared import STRICT, Name, Words, refuse_unknown
from nvflare_plugins.base.formatting import printable

Label = str | Mapping[str, str]
"""A column's name, or of each part of a survival label the column."""

FORMS = (("time", "event"), ("signed",), ("lower", "upper"))
_TRUNCATED = ("entry", "start", "truncation", "left_truncation")
SHOWN_FORMS = "{'time': ..., 'event': ...}, {'signed': ...} or {'lower': ..., 'upper': ...}"


def checked_label(label: Label) -> Label:
    """Refuse an object that is no form of a survival label. Raises: ConfigurationError."""
    if isinstance(label, str):
        return label
    for part in label:
        if part in _TRUNCATED:
            raise ConfigurationError(
                f"label.{part}: left truncation (rows that are watched from a later time on) is not supported, neither "
                "here nor in XGBoost. Measure times from each row's own beginning, or choose another model"
            )
    refuse_unknown("label", label, [part for form in FORMS for part in form])
    if set(label) not in map(set, FORMS):
        raise ConfigurationError(f"label must be a column's name, or one of {SHOWN_FORMS}")
    if len(set(label.values())) != len(label):
        raise ConfigurationError("label names one column for two of its parts")
    if any(set(column) & set(",=") for column in label.values()):
        raise ConfigurationError(
            "label names a column with ',' or '=', which separate its parts in texts: give it another name. Policy "
            "key: data_sets.<name>.rename"
        )
    return label


LabelColumns = Annotated[
    Annotated[str, STRICT, Field(min_length=1, max_length=256)] | dict[Annotated[str, STRICT], Name],
    AfterValidator(checked_label),
    Words(f"a column's name, or {SHOWN_FORMS}"),
]
"""The type of a job's field ``label`` where its kind takes survival objectives."""


def _one_column(label: object) -> object:
    if isinstance(label, Mapping):
        raise ConfigurationError(
            "label names times, and this kind of job takes one column: survival models are trained by horizontal and "
            "vertical jobs, their tunings, and private_trees"
        )
    return label


OneColumn = Annotated[Name, BeforeValidator(_one_column)]
"""The type of a job's field ``label`` where its kind does not."""


def check_classes(label: Label, classes: object) -> None:
    """Refuse a list of classes for what is no class. Raises: ConfigurationError."""
    if classes is not None and not isinstance(label, str):
        raise ConfigurationError(
            "label_classes is for a label of one column: leave it out, and say in the policies what an event is, if it "
            "is not 0 and 1. Policy key: data_sets.<name>.columns"
        )


def columns_of(label: Label | None) -> tuple[str, ...]:
    """Return the columns that a label is in, none of which is a feature."""
    if label is None:
        return ()
    return (
        (label,) if isinstance(label, str) else tuple(label[part] for form in FORMS for part in form if part in label)
    )


def words_of_label(label: Label) -> str:
    """Return a label as text, in records, schema documents and commands: its column, or ``time=days,event=death``."""
    if isinstance(label, str):
        return label
    return ",".join(f"{part}={label[part]}" for form in FORMS for part in form if part in label)


def label_of_words(text: str) -> Label:
    """Return the label that a text stands for. Raises: ConfigurationError: it is one of times, and no form of one."""
    parts = [part.partition("=") for part in text.split(",")]
    is_of_times = all(found for _, found, _ in parts) and {name for name, *_ in parts} & {n for f in FORMS for n in f}
    return checked_label({name: column for name, _, column in parts}) if is_of_times else text


Fault = tuple[str, NDArray[np.bool_]]
"""What is the matter with some rows, in words that name none, and with which. Shapes: bool[n_rows]."""
_Bounds = tuple[NDArray[np.float64], NDArray[np.float64], list[Fault]]


def survival_bounds(
    label: Mapping[str, str], values: Mapping[str, NDArray[np.float64]]
) -> tuple[NDArray[np.float32], list[Fault]]:
    """Return the bounds of every row's time, and what no time, event or bound can be; without a label both are missing.

    Shapes: values: float64[n_rows] of each column, NaN is missing; result: float32[n_rows, 2].
    """
    parts = {part: values[column] for part, column in label.items()}
    names = {part: repr(printable(column, 80)) for part, column in label.items()}
    of_form = {"time": _of_events, "signed": _of_signs, "lower": _of_intervals}
    lower, upper, faults = of_form[next(iter(set(of_form) & set(label)))](parts, names)
    with np.errstate(over="ignore"):
        bounds = np.stack([lower, upper], axis=1).astype(np.float32)
    is_beyond: NDArray[np.bool_] = (np.isinf(bounds) != np.isinf(np.stack([lower, upper], axis=1))).any(axis=1)
    faults.append(("times are beyond float32: give them in a larger unit, such as days, not seconds", is_beyond))
    return bounds, [fault for fault in faults if fault[1].any()]


def _of_events(parts: Mapping[str, NDArray[np.float64]], names: Mapping[str, str]) -> _Bounds:
    time, event = parts["time"], parts["event"]
    faults = [
        (f"event column {names['event']} holds more than 0 and 1", ~np.isnan(event) & ~np.isin(event, (0, 1))),
        (f"rows have an event in {names['event']} and no time in {names['time']}", np.isnan(time) & (event == 1)),
        _not_times(names["time"], time),
    ]
    lower = np.where(np.isnan(event), np.nan, time)
    return lower, np.where((event == 0) & ~np.isnan(time), np.inf, lower), faults


def _of_signs(parts: Mapping[str, NDArray[np.float64]], names: Mapping[str, str]) -> _Bounds:
    signed, name = parts["signed"], names["signed"]
    lower = np.abs(signed)
    faults = [
        (f"signed times {name} hold 0, which has no sign: name a column of times and one of events", signed == 0),
        (f"signed times {name} are not finite", np.isinf(signed)),
    ]
    return lower, np.where(signed < 0, np.inf, lower), faults


def _of_intervals(parts: Mapping[str, NDArray[np.float64]], names: Mapping[str, str]) -> _Bounds:
    lower, upper = parts["lower"], parts["upper"]
    is_unknown = np.isnan(lower) & np.isnan(upper)
    faults = [_not_times(names["lower"], lower), (f"bounds {names['upper']} are below 0", upper < 0)]
    lower = np.where(np.isnan(lower) & ~is_unknown, 0.0, lower)
    upper = np.where(np.isnan(upper) & ~is_unknown, np.inf, upper)
    return lower, upper, [*faults, (f"bounds {names['upper']} are below those of {names['lower']}", upper < lower)]


def _not_times(name: str, time: NDArray[np.float64]) -> Fault:
    return f"times {name} are below 0, or not finite", (time < 0) | np.isinf(time)


def is_labelled(label: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which rows have a label. Shapes: label: float32[n_rows] or float32[n_rows, 2]; result: bool[n_rows]."""
    missing = np.isnan(label)
    return ~(missing[:, 0] | missing[:, 1]) if label.ndim == 2 else ~missing


def signed(bounds: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return times as XGBoost's Cox regression takes them: below 0 where no event was seen.

    Shapes: bounds: float32[n_rows, 2], without intervals; result: float32[n_rows].
    """
    return np.where(has_event(bounds), bounds[:, 0], -bounds[:, 0])


def has_event(bounds: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return at which rows the event was seen, at a known time. Shapes: float32[n_rows, 2]; result: bool[n_rows]."""
    return np.asarray(bounds[:, 0] == bounds[:, 1])
