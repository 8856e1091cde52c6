"""What the values of single columns are like, and the findings that a survey makes of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any
from unicodedata import category, normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nvflare_plugins.data.declaration import (
    CATEGORIES,
    ID,
    LIMITS,
    MEASUREMENT,
    DataSet,
    answered_values,
    is_spelling,
    limit_of,
)
from nvflare_plugins.data.labels import Label
from nvflare_plugins.data.table import are_ids, is_named_like_id, seems_unique
from nvflare_plugins.data.tabular_files import (
    days_of,
    distinct_texts,
    distinct_values,
    is_number,
    is_text,
    is_time,
    taken,
)
from nvflare_plugins.data.text_values import DatePattern, NumberFormat, fitting_dates, fitting_formats, looks_like_date

# What a survey says: findings with counts and row numbers, never with a value of a row.


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a data set's owner should know.

    Attributes:
        kind: a word for it, the same in every release.
        text: what is the case and what helps; names of columns and policy keys, but nothing out of a row.
        is_problem: a job would be refused for it, or misled by it.
        column: where, if it is a column; by its place in a file whose names may be values.
        count: how many values, rows or lines.
        first_row: the first of them, counted from 1 without the header; None where rows cannot be told apart.
        options: keys of the policy's data set that would read it, with their values.
    """

    kind: str
    text: str
    is_problem: bool = True
    column: str | None = None
    count: int | None = None
    first_row: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Use:
    """What a data set is to be used for; all that is left out is not known yet.

    Attributes:
        label, weight, query: columns; of a survival label the column of each part.
        features: columns to train on; None for all others.
        categories: column -> its public list.
        label_classes: the label's public list.
        unknown_is_missing: of categories outside the lists.
        is_settled: a job says all this, so that what does not fit it is a problem and not yet to be decided.
        may_lack_rows: its kind goes on at a site without rows.
        drops_unlabelled: the policy's key counts for its kind.
        accepts: labels -> which of them the job takes. Shapes: float32[n_rows], of times float32[n_rows, 2] ->
            bool[n_rows].
        label_words: what these are, and what mends others.
        needs_events: some row has to have an event.
    """

    label: Label | None = None
    weight: str | None = None
    query: str | None = None
    features: tuple[str, ...] | None = None
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_classes: tuple[str, ...] | None = None
    unknown_is_missing: bool = False
    is_settled: bool = False
    may_lack_rows: bool = False
    drops_unlabelled: bool = True
    accepts: Callable[[NDArray[np.float32]], NDArray[np.bool_]] | None = None
    label_words: str = "values that the job takes: correct the others"
    needs_events: bool = False


# What the values of single columns are like, and what a job should make of them.


MOST_CATEGORIES = 256
SHOWN_FROM = 10  # rows: a value that fewer have is nobody's business, and is counted but never shown
LARGEST = 1e38  # see xgb.cuts.LARGEST_VALUE: values from there on are refused
_EXACT = 2.0**53
_MOST_DIGITS = 16
_NEARLY_ALL = 0.9
_MOSTLY = 0.5  # of a column's rows: it is then meant to be numbers, or dates
_MANY = 5000
_YEARS = (-25_567, 47_482)  # days: 1900 to 2099
_FIRST_WRITTEN, _LAST_WRITTEN = 19_000_101, 20_991_231
_WORDS = frozenset(("nil", "none", "missing", "(missing)", "unknown", "unbekannt", "not available"))
_STAND_FOR_MISSING = _WORDS | frozenset(
    (
        *("?", "-", "--", "---", ".", "..", "*", "/", "n/a", "na", "#n/a", "#na", "nat", "nan", "<na>", "null"),
        *("(null)", "k.a.", "k. a.", "#null!", "#div/0!", "#value!", "\\n"),
    )
)
"""Beside numbers all of these stand for a missing value; beside other texts the words may be categories."""


class Sort(Enum):
    """What the values of a column are."""

    NUMBERS = "numbers"
    DATES = "dates"
    CATEGORIES = "categories"
    ID = "id"
    NOTHING = "nothing"
    OTHER = "other"


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A column as text or as numbers.

    Shapes: codes: int64[n_rows], which of ``texts`` a row has, -1 is none; counts: int64[len(texts)]; numbers:
        float64[n_rows], NaN is missing. Columns of text have the first two, others the last, and so have columns of
        very many texts that are numbers as the policy has them.
    """

    name: str
    n_rows: int
    texts: tuple[str, ...] = ()
    codes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    numbers: NDArray[np.float64] | None = None
    declared: str = ""

    @classmethod
    def of(cls, name: str, column: pa.ChunkedArray, spec: DataSet) -> Column:
        """Take a column of Arrow apart. Args: spec: how numbers are written."""
        kind, n_rows = column.type, len(column)
        if pa.types.is_dictionary(kind) and not is_text(kind.value_type):
            column = column.cast(kind.value_type)
            kind = column.type
        if is_text(kind) or pa.types.is_dictionary(kind):
            if (quickly := _quick_numbers(name, column, spec)) is not None:
                return cls(name, n_rows, numbers=quickly)
            texts, codes = distinct_texts(column)
            stripped = [text.strip() for text in texts]
            counts = np.bincount(codes[codes >= 0], minlength=len(texts)).astype(np.int64)
            return cls(name, n_rows, tuple(stripped), codes, counts)
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        elif not (is_number(kind) or pa.types.is_null(kind)):
            return cls(name, n_rows, declared=str(kind))
        numbers = np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
        return cls(name, n_rows, numbers=numbers)

    @property
    def is_text(self) -> bool:
        """Whether the values are text."""
        return self.numbers is None and not self.declared

    def present(self, missing: Iterable[str]) -> list[str]:
        """Return the different texts that say something."""
        absent = {"", *missing}
        return [text for text in dict.fromkeys(self.texts) if text not in absent]

    def tally(self, texts: Iterable[str]) -> dict[str, Any]:
        """Return how many rows have one of these texts, and the first of them."""
        chosen = set(texts)
        return rows_where(np.array([*(text in chosen for text in self.texts), False], dtype=bool)[self.codes])

    def mapped(self, value: Callable[[str], float | None]) -> NDArray[np.float64]:
        """Return a number for each row. Shapes: float64[n_rows]; NaN where there is none."""
        return np.array([*map(value, self.texts), None], dtype=np.float64)[self.codes]


def _quick_numbers(name: str, column: pa.ChunkedArray, spec: DataSet) -> NDArray[np.float64] | None:
    """Return numbers of very many different texts without a look at each; None if they are few, or not all numbers."""
    if pa.types.is_dictionary(column.type) or spec.thousands or name in spec.dates or name in spec.columns:
        return None
    if len(column) <= _MANY or pc.count_distinct(column).as_py() <= _MANY:
        return None
    texts = pc.utf8_trim_whitespace(column)
    is_missing = pc.is_in(texts, value_set=pa.array(["", *spec.missing], texts.type))
    if spec.decimal != ".":
        if pc.any(pc.match_substring(texts, ".")).as_py():
            return None
        texts = pc.replace_substring(texts, spec.decimal, ".")
    try:
        numbers = pc.if_else(is_missing, pa.scalar(None, texts.type), texts).cast(pa.float64())
    except pa.ArrowInvalid:
        return None
    return np.array(numbers.to_numpy(), dtype=np.float64)


def rows_where(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return how many rows are meant, and the first of them. Shapes: mask: bool[n_rows]."""
    count = int(np.count_nonzero(mask))
    return {"count": count, "first_row": int(np.argmax(mask)) + 1 if count else None}


def found_in(mask: NDArray[np.bool_], kind: str, words: str, column: str | None = None) -> Iterator[Finding]:
    """Yield a problem of the rows that are meant; nothing where there are none. Shapes: mask: bool[n_rows]."""
    if mask.any():
        yield Finding(kind, words, column=column, **rows_where(mask))


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a column after a look at it.

    Attributes:
        values: float64[n_rows] of numbers and dates.
        categories: those of enough rows to be shown, the most frequent first; n_rare: how many there are besides.
    """

    name: str
    sort: Sort
    findings: tuple[Finding, ...] = ()
    values: NDArray[np.float64] | None = None
    categories: tuple[str, ...] = ()
    n_rare: int = 0
    is_constant: bool = False


def stands_for_missing(text: str) -> bool:
    """Tell whether a text usually means that a value is missing."""
    return text.lower() in _STAND_FOR_MISSING


# -- one column -------------------------------------------------------------------------------------------------------


def look_at(column: Column, raw: pa.ChunkedArray, spec: DataSet, *, is_chosen: bool) -> Facts:
    """Say what a column is like.

    Args:
        raw: the same column as Arrow read it.
        spec: with the options that the file seems to need.
        is_chosen: a job trains on it, so that an id or a text is a problem and cannot just be left out of a draft.
    """
    if column.declared:
        return _of_other_type(column, raw, spec, is_chosen=is_chosen)
    if column.name in spec.columns:
        return _answered(column, raw, spec, is_chosen=is_chosen)
    if column.name in spec.dates:
        is_whole = pa.types.is_integer(raw.type)
        return _dates(Column.of(column.name, raw.cast(pa.string()), spec) if is_whole else column, spec)
    if column.numbers is not None:
        return _numbers(column, column.numbers, [], is_chosen=is_chosen)
    return _text(column, spec, is_chosen=is_chosen)


def _answered(column: Column, raw: pa.ChunkedArray, spec: DataSet, *, is_chosen: bool) -> Facts:
    """Look at a column of which the policy says what it is."""
    name, answer = column.name, spec.columns[column.name]
    if answer == ID:
        found = [Finding("id", f"the policy answers that column {name!r} is an id, and no feature", column=name)]
        return Facts(name, Sort.ID, tuple(found) if is_chosen else ())
    if answer == CATEGORIES or is_spelling(answer):
        column = column if column.is_text else Column.of(name, raw.cast(pa.string()), spec)
        present = column.present(spec.missing)
        return _categories(column, present, [], is_chosen=is_chosen, is_answered=True)
    if answer == MEASUREMENT:
        if column.numbers is None:
            return _text(column, spec, is_chosen=is_chosen)
        return _numbers(column, column.numbers, [], is_chosen=is_chosen, is_answered=True)
    values, codes = distinct_values(raw)
    numbers = answered_values(values, answer, NumberFormat(spec.decimal, spec.thousands), spec.missing)
    unread = np.array([*(number is None for number in numbers), False], dtype=bool)[codes]
    words = f"column {name!r} holds texts that the policy's answer of it does not read. Policy keys: columns, missing"
    found = list(found_in(unread, "text_among_numbers", words, name))
    return _numbers(column, taken(numbers, codes), found, is_chosen=is_chosen, is_answered=True)


def _of_other_type(column: Column, raw: pa.ChunkedArray, spec: DataSet, *, is_chosen: bool) -> Facts:
    name = column.name
    if is_time(raw.type):
        found = []
        if name not in spec.dates:
            text = f"column {name!r} holds {column.declared}: it can become days since 1970-01-01. Policy key: dates"
            found.append(Finding("dates", text, column=name, options={"dates": {name: "YYYY-MM-DD"}}))
        return Facts(name, Sort.DATES, tuple(found), days_of(raw))
    text = f"column {name!r} holds {column.declared}, which no job trains on: turn it into numbers, or leave it out"
    return Facts(name, Sort.OTHER, (Finding("type", text, is_chosen, name),))


def _dates(column: Column, spec: DataSet) -> Facts:
    pattern = DatePattern.of(spec.dates[column.name])
    present = column.present(spec.missing)
    bad = [text for text in present if pattern is None or pattern.days(text) is None]
    found = []
    if bad:
        text = f"column {column.name!r} holds texts that are no dates of its pattern. Policy keys: dates, missing"
        found.append(Finding("dates", text, column=column.name, **column.tally(bad)))
    values = column.mapped(lambda text: None if pattern is None else pattern.days(text))
    return Facts(column.name, Sort.DATES, tuple(found), values)


def _text(column: Column, spec: DataSet, *, is_chosen: bool) -> Facts:  # noqa: C901 - ways to read it, in order
    name, form = column.name, NumberFormat(spec.decimal, spec.thousands)
    is_measured = spec.columns.get(name) == MEASUREMENT
    said = column.present(spec.missing)
    present = [text for text in said if not stands_for_missing(text)]
    if present and any(_number_in(text, form) is None for text in present) and not fitting_dates(present):
        present = [text for text in said if not stands_for_missing(text) or text.lower() in _WORDS]
    absent = set(said) - set(present)
    found: list[Finding] = []
    if absent:
        shown = ", ".join(map(repr, sorted(absent)))  # words of a list of ours, whatever the rows are
        words = f"column {name!r} holds {shown}, which may mean that a value is missing. Policy key: missing"
        options = {"missing": [*spec.missing, *sorted(absent)]}
        found.append(Finding("missing", words, column=name, **column.tally(absent), options=options))
    if not present:
        return _numbers(column, np.full(column.n_rows, np.nan), found, is_chosen=is_chosen)
    if {text.lower() for text in present} <= {"true", "false"}:
        return _numbers(
            column,
            column.mapped(lambda text: {"true": 1.0, "false": 0.0}.get(text.lower())),
            found,
            is_chosen=is_chosen,
        )
    strange = [text for text in present if _number_in(text, form) is None]
    if not strange:
        limits = [text for text in present if limit_of(text)]
        read = dict(zip(present, answered_values(present, LIMITS, form, ()), strict=True))
        found += [*_limits(column, limits), *_beyond_float64(column, [text for text in present if text not in limits])]
        return _numbers(column, column.mapped(read.get), found, is_chosen=is_chosen, is_answered=is_measured)
    if dates := fitting_dates(present):
        return _undeclared_dates(column, present, dates, found)
    n_present = column.tally(present)["count"]
    no_numbers = [text for text in strange if not fitting_formats([_written_number(text)])]
    if is_measured or column.tally(no_numbers)["count"] <= (1 - _MOSTLY) * n_present:
        words = (
            f"column {name!r} holds text among its numbers: mend it, name what means missing, or say what the column "
        )
        words += "is (categories, or a number for each text). Policy keys: missing, columns, decimal, thousands"
        found.append(Finding("text_among_numbers", words, column=name, **column.tally(strange)))
        return Facts(name, Sort.OTHER, tuple(found))
    undated = [text for text in present if not looks_like_date(text)]
    if column.tally(undated)["count"] <= (1 - _MOSTLY) * n_present:
        words = (
            f"column {name!r} holds dates, and no pattern reads them all: write them alike, name what means missing, "
        )
        words += "or say that they are categories. Policy keys: dates, missing, columns"
        found.append(Finding("dates", words, column=name, **column.tally(present)))
        return Facts(name, Sort.OTHER, tuple(found))
    return _categories(column, present, found, is_chosen=is_chosen)


def _number_in(text: str, form: NumberFormat) -> float | None:
    """Return the number that a text is, or the limit that it names."""
    return form.number(_written_number(text))


def _written_number(text: str) -> str:
    return (limit_of(text) or ("", text))[1]


def _limits(column: Column, limits: Sequence[str]) -> Iterator[Finding]:
    if limits:
        words = (
            f"column {column.name!r} holds values below or above a limit, such as <0.5: `limits` reads <x as half of "
        )
        words += "x and >x as x; or give each text a number of its own. Policy key: columns"
        options = {"columns": {column.name: LIMITS}}
        yield Finding("limits", words, column=column.name, **column.tally(limits), options=options)


def _undeclared_dates(column: Column, present: Sequence[str], dates: Sequence[str], found: Sequence[Finding]) -> Facts:
    if short := [text for text in dates if DatePattern.of(text) is None]:
        words = (
            f"column {column.name!r} holds dates with years of two digits ({' or '.join(short)}): say which hundred "
        )
        words += f"years they are in, as `{short[0]} from 1930` for 1930 to 2029. Policy key: dates"
        finding = Finding("dates", words, column=column.name, **column.tally(present))
        return Facts(column.name, Sort.OTHER, (*found, finding))
    first, *others = [pattern for text in dates if (pattern := DatePattern.of(text)) is not None]
    rivals = [other for other in others if any(other.days(text) != first.days(text) for text in present)]
    what = " or ".join(one.text for one in (first, *rivals))
    words = (
        f"column {column.name!r} holds dates ({what}): they become days since 1970-01-01 by the policy, or are left "
    )
    words += "out of features. Policy key: dates"
    options = {} if rivals else {"dates": {column.name: first.text}}
    finding = Finding("dates", words, column=column.name, **column.tally(present), options=options)
    return Facts(column.name, Sort.OTHER if rivals else Sort.DATES, (*found, finding), column.mapped(first.days))


def _are_written_dates(present: NDArray[np.float64]) -> bool:
    """Tell whether all numbers are days as YYYYMMDD. Shapes: present: float64[any], of which none is missing."""
    pattern, (low, high) = DatePattern.of("YYYYMMDD"), _YEARS
    if pattern is None or present.min() < _FIRST_WRITTEN or present.max() > _LAST_WRITTEN:
        return False
    texts = (f"{value:.0f}" if value.is_integer() else "" for value in np.unique(present).tolist())
    return all((days := pattern.days(text)) is not None and low <= days <= high for text in texts)


def _beyond_float64(column: Column, present: Sequence[str]) -> Iterator[Finding]:
    digits = {text: text.lstrip("+-").lstrip("0") for text in present}
    # Python reads no number of thousands of digits, and 17 of them are always too many.
    large = [text for text, n in digits.items() if n.isdecimal() and (len(n) > _MOST_DIGITS or int(n) > _EXACT)]
    if large:
        words = f"column {column.name!r} holds whole numbers beyond 2^53, several of which become one: is it an id?"
        yield Finding("large_integers", words, is_problem=False, column=column.name, **column.tally(large))


def _categories(
    column: Column, present: Sequence[str], found: Sequence[Finding], *, is_chosen: bool, is_answered: bool = False
) -> Facts:
    name, findings = column.name, list(found)
    if not is_answered and seems_unique(len(present), column.tally(present)["count"], name):
        words = (
            f"column {name!r} looks like an id, or free text: nearly every row has another. Leave it out of features, "
        )
        words += "and answer that it is an id. Policy key: columns"
        options = {} if is_chosen else {"columns": {name: ID}}
        finding = Finding("id", words, is_chosen, name, count=len(present), options=options)
        return Facts(name, Sort.ID, (*findings, finding))
    if len(present) > MOST_CATEGORIES:
        words = (
            f"column {name!r} has {len(present)} different texts, more than the {MOST_CATEGORIES} that make sense as "
        )
        words += "categories: group them, or leave it out of features"
        return Facts(name, Sort.OTHER, (*findings, Finding("categories", words, is_chosen, name, count=len(present))))
    rows_of: Counter[str] = Counter()
    for text, count in zip(column.texts, column.counts.tolist(), strict=True):
        rows_of[text] += count
    maybe = [text for text in present if text.lower() in _WORDS]
    if maybe:
        shown = ", ".join(map(repr, sorted(maybe)))
        words = f"column {name!r} holds {shown}: a category, or a missing value? Policy key: missing"
        findings.append(Finding("missing", words, is_problem=False, column=name, **column.tally(maybe)))
    frequent = [text for text, _ in rows_of.most_common() if text in set(present) and rows_of[text] >= SHOWN_FROM]
    apart = {text: normalize("NFC", text) for text in frequent if normalize("NFC", text) != text}
    if apart:
        words = f"column {name!r} holds letters written in two parts, a letter and its mark, which equal no list that "
        words += "writes them as one: have them read so. Policy key: columns"
        spelling: dict[str, Any] = {"columns": {name: apart}}
        findings.append(Finding("spelling", words, column=name, **column.tally(apart), options=spelling))
        frequent = list(dict.fromkeys(apart.get(text, text) for text in frequent))
    is_constant = len(present) == 1
    if is_constant:
        findings.append(Finding("constant", f"column {name!r} has one value only", is_problem=False, column=name))
    return Facts(
        name, Sort.CATEGORIES, tuple(findings), None, tuple(frequent), len(present) - len(frequent), is_constant
    )


def _numbers(
    column: Column,
    values: NDArray[np.float64],
    found: Sequence[Finding],
    *,
    is_chosen: bool,
    is_answered: bool = False,
) -> Facts:
    """Look at numbers, whatever they are to be."""
    name, findings = column.name, list(found)
    words = f"column {name!r} holds values that are infinite, or 1e38 and more: scale it, or name what means missing"
    findings += found_in(np.abs(values) >= LARGEST, "infinite", words, name)
    present = values[np.isfinite(values)]
    if not present.size:
        findings.append(Finding("no_values", f"column {name!r} has no values", is_problem=False, column=name))
        return Facts(name, Sort.NOTHING, tuple(findings), values)
    if not is_answered and _are_written_dates(present):
        words = (
            f"column {name!r} holds numbers that look like dates (YYYYMMDD): declare them, or answer that they are a "
        )
        words += "measurement. Policy keys: dates, columns"
        findings.append(Finding("dates", words, is_problem=False, column=name, **rows_where(np.isfinite(values))))
        return Facts(name, Sort.DATES, tuple(findings), values)
    if not is_answered and are_ids(values, name):
        words = (
            f"column {name!r} looks like an id: its numbers are whole, and nearly every row has another. A model that "
        )
        words += "splits on it tells who is who. Answer that it is a measurement, or an id. Policy key: columns"
        options = {"columns": {name: ID}} if is_named_like_id(name) and not is_chosen else {}
        count = int(np.unique(present).size)
        findings.append(Finding("id", words, is_chosen, name, count=count, options=options))
        return Facts(name, Sort.ID, tuple(findings), values)
    is_constant = bool(present.min() == present.max())
    if is_constant:
        findings.append(Finding("constant", f"column {name!r} has one value only", is_problem=False, column=name))
    return Facts(name, Sort.NUMBERS, tuple(findings), values, is_constant=is_constant)


def rounded_bounds(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return round numbers around all values, at most about a tenth of their range wider on each side.

    A least or largest value that few rows have is not shown itself: a single row may decide it. None without values.
    """
    present = values[np.isfinite(values)]
    if not present.size:
        return None
    low, high = float(present.min()), float(present.max())
    if {low, high} <= {0.0, 1.0}:
        return 0.0, 1.0
    tenth = max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-30) / 10
    decade = 10.0 ** math.floor(math.log10(tenth))
    step = decade * next(of for of in (5, 2, 1) if of * decade <= tenth * (1 + 1e-9))
    below, above = math.floor(low / step), math.ceil(high / step)
    while _round(below, step) >= low and not 0 == below <= low:  # counts and amounts begin at 0
        below -= 1
    while _round(above, step) <= high:
        above += 1
    is_shared = [np.count_nonzero(present == one) >= SHOWN_FROM for one in (low, high)]
    least = low if is_shared[0] else _round(0 if 0 <= low < step else below, step)
    return least, high if is_shared[1] else _round(above, step)


def _round(n_steps: int, step: float) -> float:
    return float(f"{n_steps * step:.6g}")


# How ids are written, and none of them.


_LETTERS = {"Lu": "A", "Ll": "a", "Nd": "9"}


@dataclass(frozen=True, slots=True)
class IdShape:
    """How the ids of a column are written: what many rows share, and never an id.

    Attributes:
        shapes: those of at least ten rows, the most frequent first: 9 is a digit, A and a a letter, x any of these, and
            {3} or {3-6} how many of them.
        prefix: what all of them begin with before their first digit.
        padded: some have zeros before their number. wide: some have letters or digits beyond ASCII.
    """

    shapes: tuple[str, ...]
    prefix: str = ""
    padded: bool = False
    wide: bool = False

    @classmethod
    def of(cls, ids: Iterable[str | None]) -> IdShape | None:
        """Return how ids are written; None if fewer than ten are there, or many have spaces, as free text has."""
        present = [one for one in ids if one]
        if len(present) < SHOWN_FROM or sum(" " in one for one in present) > (1 - _NEARLY_ALL) * len(present):
            return None
        shapes = _shapes(present, _LETTERS) or _shapes(present, dict.fromkeys(_LETTERS, "x"))
        starts = {re.match(r"\D*", one)[0] for one in present}  # type: ignore[index]
        prefix = starts.pop() if len(starts) == 1 and len({*present}) > 1 else ""
        if any(one == prefix for one in present):
            prefix = ""
        padded = sum(one[len(prefix) :].startswith("0") for one in present) >= SHOWN_FROM
        return cls(shapes, prefix, padded, not all(one.isascii() for one in present))

    @property
    def is_peculiar(self) -> bool:
        """Whether it is more than numbers, or ids of letters and digits, as they stand."""
        return bool(self.prefix or self.padded or self.wide or len(self.shapes) != 1)

    def __str__(self) -> str:
        """Return it in words."""
        said = [" or ".join(self.shapes) or "in many ways"]
        said += [f"all begin with {self.prefix!r}"] if self.prefix else []
        said += ["some have zeros before their number"] if self.padded else []
        said += ["some have letters or digits beyond ASCII"] if self.wide else []
        return ", ".join(said)


def _shapes(ids: Sequence[str], letters: Mapping[str, str]) -> tuple[str, ...]:
    """Return the shapes that at least ten ids have; none where these are not nearly all ids."""
    found: dict[tuple[str, ...], list[list[int]]] = {}  # kinds of runs -> their lengths in each id
    for one in ids:
        runs = [(kind, sum(1 for _ in run)) for kind, run in groupby(one, lambda c: letters.get(category(c), c))]
        found.setdefault(tuple(kind for kind, _ in runs), []).append([length for _, length in runs])
    usual = sorted((kind for kind in found if len(found[kind]) >= SHOWN_FROM), key=lambda kind: -len(found[kind]))
    if sum(len(found[kind]) for kind in usual) < _NEARLY_ALL * len(ids):
        return ()
    return tuple("".join(_run(kind, [n[i] for n in found[kinds]]) for i, kind in enumerate(kinds)) for kinds in usual)


def _run(kind: str, lengths: Sequence[int]) -> str:
    least, most = min(lengths), max(lengths)
    return kind if least == most == 1 else f"{kind}{{{least}}}" if least == most else f"{kind}{{{least}-{most}}}"


# One format for the numbers of a file that writes them otherwise than its policy says.


_SAMPLE = 1000


@dataclass(frozen=True, slots=True)
class _Written:
    """How the numbers of a column of text seem to be written.

    Attributes:
        forms: those that read all its texts; sampled: those that read the first ones.
        strange: how many rows have texts that the policy's format does not read, and the first of them.
    """

    name: str
    forms: frozenset[NumberFormat]
    sampled: tuple[NumberFormat, ...]
    strange: dict[str, Any]


def number_format(
    spec: DataSet, columns: Iterable[Column], others_follow: Callable[[NumberFormat], bool]
) -> Finding | None:
    """Find that a file's numbers are written in another way than the policy says.

    Args:
        columns: of text; each is looked at once.
        others_follow: tells whether columns of text that are numbers already, as the policy has them, are numbers in
            another format too; asked when ``columns`` have been seen.
    """
    written = [one for column in columns if (one := _written(column, spec)) is not None]
    unread = [one for one in written if one.strange["count"]]
    votes = Counter(form for one in unread for form in one.sampled)
    read = [one for one in written if not one.strange["count"]]
    # A format must read what the policy's does too; plain ones come first.
    for form in sorted(votes, key=lambda one: (-votes[one], one.thousands, one.decimal)):
        fit = [one for one in unread if form in one.forms]
        if fit and all(form in one.forms for one in read) and others_follow(form):
            which = ", ".join(repr(one.name) for one in fit[:5]) + (", ..." if len(fit) > 5 else "")
            options = {"decimal": form.decimal, "thousands": form.thousands}
            options = {key: value for key, value in options.items() if getattr(spec, key) != value}
            manner, keys = _manner(form), ", ".join(options)
            # Of 1,234 nothing tells whether it is a thousand times more.
            rivals = [one for one in votes if one.decimal != form.decimal and all(one in of.forms for of in fit + read)]
            if rivals:
                manner, keys, options = f"{manner} or {_manner(rivals[0])}: say which", "decimal, thousands", {}
            return Finding(
                "number_format",
                f"numbers of {which} are written with {manner}. Policy keys: {keys}",
                count=sum(one.strange["count"] for one in fit),
                first_row=min(one.strange["first_row"] for one in fit),
                options=options,
            )
    return None


def _manner(form: NumberFormat) -> str:
    between = f" and {form.thousands!r} between thousands" if form.thousands else ""
    return f"a decimal {'comma' if form.decimal == ',' else 'point'}{between}"


def _written(column: Column, spec: DataSet) -> _Written | None:
    """Return how the numbers of a column of text seem to be written; None if it holds dates, or nothing."""
    declared = NumberFormat(spec.decimal, spec.thousands)
    present = [text for text in column.present(spec.missing) if not stands_for_missing(text)]
    if not present or fitting_dates(present[:_SAMPLE]):
        return None
    numbers = {text: (limit_of(text) or ("", text))[1] for text in present}
    strange = column.tally(text for text, number in numbers.items() if declared.number(number) is None)
    sampled = fitting_formats(list(numbers.values())[:_SAMPLE])
    fitting = frozenset(fitting_formats(numbers.values())) if sampled else frozenset()
    return _Written(column.name, fitting, tuple(sampled), strange)


def follows(column: pa.ChunkedArray, form: NumberFormat, spec: DataSet) -> bool:
    """Tell whether all texts of a column are numbers of a format, or missing."""
    absent = {"", *spec.missing}
    texts = (text.strip() for text in distinct_texts(column)[0])
    return all(text in absent or form.number(text) is not None for text in texts)
