"""What a survey says: findings with counts and row numbers, never with a value of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        label, weight: columns.
        features: columns to train on; None for all others.
        categories: column -> its public list.
        label_classes: the label's public list.
        unknown_is_missing: of categories outside the lists.
        is_settled: a job says all this, so that what does not fit it is a problem and not yet to be decided.
        may_lack_rows: its kind goes on at a site without rows.
        drops_unlabelled: the policy's key counts for its kind.
        accepts: labels -> which of them the job takes. Shapes: float32[n_rows] -> bool[n_rows].
    """

    label: str | None = None
    weight: str | None = None
    features: tuple[str, ...] | None = None
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_classes: tuple[str, ...] | None = None
    unknown_is_missing: bool = False
    is_settled: bool = False
    may_lack_rows: bool = False
    drops_unlabelled: bool = True
    accepts: Callable[[NDArray[np.float32]], NDArray[np.bool_]] | None = None
