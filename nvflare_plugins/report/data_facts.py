"""A data set as a site used it in a run: rows, columns, public lists, what the classes of the label mean.

Privacy: rows and missing values are counts of this site's own data. They stand in the site's own record and report and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from dp_components.split_candidates.candidates import Columns
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.formatting import markup

TRAINING, EVALUATION, ALIGNMENT, SCORING = "training", "evaluation", "alignment", "scoring"
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class DataFacts:
    """One data set of a run.

    Attributes:
        use: "training", "evaluation", "alignment" or "scoring".
        rows: rows of this site that took part.
        columns: names of the features, in the order of the model; of a party of a vertical job, its own.
        missing: column -> how many of these rows have no value; columns without such are left out.
        categories: column -> its public list.
        label: name of the label column; "" where there is none.
        label_classes: what the label's values 0, 1, ... mean; empty where labels are numbers.
        weight: name of the column of weights; "" where there is none.
    """

    name: str
    use: str
    rows: int
    columns: tuple[str, ...] = ()
    missing: dict[str, int] = field(default_factory=dict)
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    label: str = ""
    label_classes: tuple[str, ...] = ()
    weight: str = ""

    @classmethod
    def of(cls, table: Table, name: str, use: str = TRAINING) -> Self:
        """Return the facts of a table."""
        return cls(
            name,
            use,
            table.n_rows,
            table.feature_names,
            {name: n for name, n in zip(table.feature_names, table.n_missing, strict=True) if n},
            dict(table.categories),
            table.label_name,
            table.label_classes or (),
            table.weight_name or "",
        )

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Read the facts. Raises: TypeError, KeyError, ValueError."""
        values = dict(document)
        for name in ("name", "use", "label", "weight"):
            values[name] = str(values.get(name, ""))
        for name in ("columns", "label_classes"):
            values[name] = tuple(str(text) for text in values.get(name, ()))
        values["categories"] = {str(k): tuple(map(str, v)) for k, v in dict(values.get("categories", {})).items()}
        values["missing"] = {str(k): int(v) for k, v in dict(values.get("missing", {})).items()}
        values["rows"] = int(values["rows"])
        return cls(**values)


def texts(entries: Sequence[object] | None) -> tuple[str, ...]:
    """Return a job's list of classes or categories as texts."""
    return tuple(map(str, entries or ()))


def missing_of(names: Sequence[str], columns: Columns) -> dict[str, int]:
    """Count what is missing, column by column. Shapes: columns: float32[n_features, n_rows], NaN is missing."""
    counts = [int(np.count_nonzero(np.isnan(column))) for column in columns]
    return {name: n for name, n in zip(names, counts, strict=True) if n}


def data_html(data: Sequence[DataFacts]) -> Iterator[str]:
    """Describe the data sets of a run for the report."""
    if not data:
        return
    yield (
        "<p><span class='chip warn'>for this site only</span> Rows and missing values are counts of this site's own "
        "data; no other site has been told. Take them out before passing this page on.</p>"
    )
    yield "<div class=scroll><table class=messages>"
    yield "<tr><th>data set<th>use<th class=n>rows<th class=n>columns<th>label<th>weight</tr>"
    for one in data:
        yield (
            f"<tr><td>{markup(one.name)}<td>{markup(one.use)}<td class=n>{one.rows:,}<td class=n>{len(one.columns):,}"
            f"<td>{markup(one.label) or 'none'}<td>{markup(one.weight) or 'none'}</tr>"
        )
    yield "</table></div>"
    first = data[0]
    if first.label_classes:
        meaning = (f"{number} = {text}" for number, text in enumerate(first.label_classes))
        yield f"<h3>What the classes mean</h3><p>{markup(_listed(list(meaning)))}{_positive(first)}</p>"
    if first.columns:
        yield f"<h3>Columns</h3><p>{markup(_listed(first.columns))}</p>"
    if first.categories:
        yield "<h3>Categories (public lists)</h3><table class=pairs>"
        yield from (f"<tr><th>{markup(k)}<td>{markup(_listed(v))}</tr>" for k, v in first.categories.items())
        yield "</table>"
    if any(one.missing for one in data):
        yield "<h3>Missing values</h3><table class=pairs>"
        for one in data:
            shares = [f"{name}: {n:,} of {one.rows:,}" for name, n in one.missing.items()]
            yield f"<tr><th>{markup(one.name)} ({markup(one.use)})<td>{markup(_listed(shares)) or 'none'}</tr>"
        yield "</table>"


def _positive(one: DataFacts) -> str:
    if len(one.label_classes) != 2:
        return ""
    return f". A probability is that of {markup(one.label_classes[1])}."


def _listed(entries: Sequence[str]) -> str:
    more = len(entries) - _SHOWN
    return ", ".join(entries[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
