"""What a site's policy answers of a column, where its values alone do not tell what they are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from nvflare_plugins.data_sets.text_values import NumberFormat

_LIMIT = re.compile(r"(<=?|>=?|[≤≥])\s*(.+)")
_YES_OR_NO = dict.fromkeys(("yes", "y", "ja", "j", "true", "1"), 1.0) | dict.fromkeys(
    ("no", "n", "nein", "false", "0"), 0.0
)
MEASUREMENT, ID, CATEGORIES, YES_NO, LIMITS = "measurement", "id", "categories", "yes/no", "limits"
Answer = str | Mapping[str, float | None]


def is_read_by(answer: Answer | None) -> bool:
    """Tell whether a column's texts become numbers by what the policy answers of it."""
    return answer in (YES_NO, LIMITS) or isinstance(answer, Mapping)


def limit_of(text: str) -> tuple[str, str] | None:
    """Return the mark and the number of a value beyond what could be measured, such as ``<0.5``; None if it is none."""
    match = _LIMIT.fullmatch(text)
    return None if match is None else (match[1][0].replace("≤", "<").replace("≥", ">"), match[2])


def answered_number(text: str, answer: Answer, form: NumberFormat, missing: Iterable[str]) -> float | None:
    """Return what a text of an answered column says, without white space around it; NaN if missing, None if nothing.

    Limits: ``<x`` is half of x (x itself, where that is not above 0), ``>x`` is x.
    """
    if isinstance(answer, Mapping) and text in answer:
        value = answer[text]
        return math.nan if value is None else float(value)
    if not text or text in missing:
        return math.nan
    if answer == YES_NO:
        return _YES_OR_NO.get(text.lower())
    beyond = limit_of(text) if answer == LIMITS else None
    if beyond is None:
        return form.number(text)
    value = form.number(beyond[1])
    return value / 2 if value is not None and beyond[0] == "<" and value > 0 else value


def answered_values(
    values: Iterable[object], answer: Answer, form: NumberFormat, missing: Iterable[str]
) -> list[float | None]:
    """Return what each value of a file or frame says, as ``answered_number``. Whole numbers may be 3 or 3.0."""
    return [answered_number(_text(value), answer, form, missing) for value in values]


def _text(value: object) -> str:
    if value is None or value != value:
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
