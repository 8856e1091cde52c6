"""One format for the numbers of a file that writes them otherwise than its policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nvflare_plugins.data_sets.answers import limit_of
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.survey.columns import Column, stands_for_missing
from nvflare_plugins.data_sets.survey.findings import Finding
from nvflare_plugins.data_sets.tabular_files import distinct_texts
from nvflare_plugins.data_sets.text_values import NumberFormat, fitting_dates, fitting_formats

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
