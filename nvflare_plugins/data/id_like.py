"""Columns that seem to number rows or people: a model that splits on them learns who is who, not what is the case."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

_NEARLY_ALL = 0.9
_LEAST_DISTINCT = 50
_NAMED_SHARE = 0.2
_WORDS = frozenset(("id", "ids", "pid", "uid", "uuid", "guid", "mrn", "ssn", "iban", "key", "nr", "number", "nummer"))
_FIRST_LOOK = 1000
_EXACT = 2.0**53


def are_ids(values: NDArray[np.float64], name: str) -> bool:
    """Tell whether numbers look like an id: whole, and nearly all different, or many different under such a name.

    Shapes: values: float64[n_rows]; NaN is missing.
    """
    first = values[:_FIRST_LOOK]
    if not np.array_equal(first, np.floor(first), equal_nan=True):  # most measurements end here
        return False
    present = values[np.isfinite(values)]
    if present.size < _LEAST_DISTINCT or not np.array_equal(present, np.floor(present)):
        return False
    # Beyond float64's whole numbers several ids are one number.
    n_distinct, is_merged = np.unique(present).size, np.abs(present).max() > _EXACT
    return seems_unique(n_distinct, present.size, "id" if is_merged else name)


def seems_unique(n_distinct: int, n_present: int, name: str) -> bool:
    """Tell whether so many different values are those of an id."""
    share = _NAMED_SHARE if _is_named_like_one(name) else _NEARLY_ALL
    return n_distinct >= max(_LEAST_DISTINCT, share * n_present)


def _is_named_like_one(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return not _WORDS.isdisjoint(re.split(r"[\W_\d]+", words.lower()))
