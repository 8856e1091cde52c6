"""What a passive party keeps of a model: its own splits, with the thresholds that nobody else has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError

NOTHING_ABOVE = (-1, False)
NO_THRESHOLD = np.finfo(np.float32).smallest_subnormal
"""What XGBoost writes in the place of the threshold where a node is split by categories."""
_MOST_CATEGORIES = 1 << 16


def are_others(values: NDArray[np.float32], categories: Sequence[int]) -> NDArray[np.bool_]:
    """Tell which values are none of a split's categories and go left, also one that training never saw.

    Shapes: values: float32[n], positions in the public list.

    Reference: XGBoost 3.2, src/common/categorical.h (Decision).
    """
    return ~np.isin(values, np.array(categories, dtype=np.float32))


@dataclass(frozen=True, slots=True, repr=False)
class PrivateSplit:
    """One split of a passive party.

    Units: threshold in the feature's own unit; values below it go left. ``NO_THRESHOLD`` of a split by categories.

    Attributes:
        above: node of the party's nearest split above this one in the tree, and whether this one lies to its left;
            ``NOTHING_ABOVE`` if it has none there, None if the party does not know the tree.
        categories: of a categorical feature, the places in its public list that go right, ascending; else None.
    """

    feature: int
    threshold: np.float32
    default_left: bool
    above: tuple[int, bool] | None = None
    categories: tuple[int, ...] | None = None

    def goes_left(self, values: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Decide rows as XGBoost does. Shapes: values: float32[n], NaN is missing; result: bool[n]."""
        is_left = values < self.threshold if self.categories is None else are_others(values, self.categories)
        return np.where(np.isnan(values), self.default_left, is_left)


PrivateTable = dict[tuple[int, int], PrivateSplit]
"""(tree, node) -> the party's split there."""


def table_to_json(table: Mapping[tuple[int, int], PrivateSplit], aliases: tuple[str, ...]) -> str:
    """Write a table for the party's own disk.

    Privacy: holds thresholds and sets of categories; must not leave the party unasked.
    """
    # The shortest decimal form of a float32 reads back as the same number.
    splits = [
        [tree, node, s.feature, str(s.threshold), int(s.default_left), s.above and [s.above[0], int(s.above[1])]]
        + ([] if s.categories is None else [list(s.categories)])
        for (tree, node), s in sorted(table.items())
    ]
    return json.dumps({"aliases": list(aliases), "splits": splits})


def table_from_json(text: str) -> tuple[PrivateTable, tuple[str, ...]]:
    """Read what ``table_to_json`` wrote.

    Raises:
        ConfigurationError: the text is not such a table.
    """
    try:
        document = json.loads(text)
        aliases = tuple(map(str, document["aliases"]))
        table = {
            (int(tree), int(node)): PrivateSplit(
                int(feature),
                _threshold(threshold),
                bool(default_left),
                None if above is None else _above(*above),
                _categories(*sets),
            )
            for tree, node, feature, threshold, default_left, above, *sets in document["splits"]
        }
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise ConfigurationError("the file does not hold a private table of a vertical model") from None
    if any(not 0 <= split.feature < len(aliases) for split in table.values()):
        raise ConfigurationError("a private table names a feature that it does not list")
    for (tree, _), split in table.items():
        if split.above not in (None, NOTHING_ABOVE) and (tree, split.above[0]) not in table:
            raise ConfigurationError("a private table names a split above another that it does not list")
    return table, aliases


def _threshold(text: str) -> np.float32:
    """Read a threshold; the bound above the largest floats is infinite. Raises: ValueError, TypeError."""
    number = float(text)
    if math.isnan(number):
        raise ValueError("a threshold that is no number")
    with np.errstate(over="ignore"):
        return np.float32(number)


def _categories(categories: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Read the categories of a split. Raises: ValueError, TypeError."""
    if categories is None:
        return None
    places = np.array([int(place) for place in categories])
    if not places.size or places[0] < 0 or places[-1] >= _MOST_CATEGORIES or (np.diff(places) <= 0).any():
        raise ValueError("categories that are no places in a list")
    return tuple(places.tolist())


def _above(node: int, is_left: int) -> tuple[int, bool]:
    return int(node), bool(is_left)
