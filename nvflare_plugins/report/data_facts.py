"""A data set as a site used it in a run: rows, columns, public lists, what the classes of the label mean.

Privacy: rows and missing values are counts of this site's own data. They stand in the site's own record and report and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from dp_components.split_candidates.candidates import Columns
from nvflare_plugins.data_sets.table import Table

TRAINING, EVALUATION, ALIGNMENT, SCORING = "training", "evaluation", "alignment", "scoring"


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
