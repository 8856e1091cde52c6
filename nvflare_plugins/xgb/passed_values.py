"""Counts for the quantile search without holding values: five passes in place of thirty-two.

The search halves brackets of keys, so that what it asks for in its first 12 steps ends in twenty ones: a count of keys
by their first 12 bits answers it. The next five steps ask within at most as many of these groups as there are cuts, and
so on: one pass each counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.xgb.cuts import to_keys

_PARTS = ((20, 12), (15, 5), (10, 5), (5, 5), (0, 5))
"""Of each pass: how many of a key's last bits it leaves out, and how many before those it tells apart."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """What one pass has counted.

    Shapes: groups: int64[n_features][n_groups], ascending: the upper bits of keys that were looked at. below:
        uint32 or int64[n_features][n_groups, 2^width + 1]: values of a group whose next bits are less than a number.
    """

    left_out: int
    width: int
    groups: list[NDArray[np.int64]]
    below: list[NDArray[np.int64 | np.uint32]]

    def places(self, feature: int, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each key's group. Raises: KeyError, if one was not looked at."""
        groups, upper = self.groups[feature], keys >> (self.left_out + self.width)
        places = np.minimum(np.searchsorted(groups, upper), groups.size - 1)
        if keys.size and not np.array_equal(groups[places], upper):
            raise KeyError
        return places


class PassedValues:
    """The values of a table that is read in passes; what ``SortedValues`` is for one that is held.

    Memory: 150 KiB for each feature with 256 cuts, twice that for 2^32 rows or more.
    """

    def __init__(self, blocks: Callable[[], Iterator[NDArray[np.float32]]], columns: Sequence[int]) -> None:
        """Count values of some columns.

        Args:
            blocks: begins a pass. Shapes: float32[some rows, n_features] each.
            columns: places of the columns that the search is for.
        """
        self._blocks, self._columns = blocks, list(columns)
        self._counted: list[_Counted] = []

    def present(self) -> NDArray[np.int64]:
        """See ``Values``."""
        if not self._counted:
            self._counted = [self._pass(0, [np.zeros(1, np.int64)] * len(self._columns))]
        return np.array([below[0, -1] for below in self._counted[0].below], dtype=np.int64)

    def up_to(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """See ``Values``."""
        self.present()
        result, is_open = np.zeros(keys.shape, dtype=np.int64), np.ones(keys.shape, dtype=bool)
        for number, (left_out, width) in enumerate(_PARTS):
            counted = self._counts_for(number, keys, is_open)
            for feature, own in enumerate(keys):
                still = is_open[feature]
                asked = own[still]
                is_end = (asked + 1) % (1 << left_out) == 0  # nothing finer is needed
                parts = (asked >> left_out) & ((1 << width) - 1)
                result[feature, still] += counted.below[feature][counted.places(feature, asked), parts + is_end]
                is_open[feature, still] = ~is_end
            if not is_open.any():
                break
        return result

    def _counts_for(self, number: int, keys: NDArray[np.int64], is_open: NDArray[np.bool_]) -> _Counted:
        """Return the counts of a level in which all open keys lie, from an earlier pass if there was such a one."""
        try:
            counted = self._counted[number]
            for feature, own in enumerate(keys):
                counted.places(feature, own[is_open[feature]])
        except (IndexError, KeyError):
            shift = sum(_PARTS[number])
            groups = [np.unique(own[still] >> shift) for own, still in zip(keys, is_open, strict=True)]
            counted = self._pass(number, groups)
            self._counted[number:] = [counted]
        return counted

    def _pass(self, number: int, groups: list[NDArray[np.int64]]) -> _Counted:
        left_out, width = _PARTS[number]
        counts = [np.zeros(own.size << width, dtype=np.int64) for own in groups]
        for block in self._blocks():
            for own, found, column in zip(groups, counts, block.T[self._columns], strict=True):
                keys = to_keys(column[~np.isnan(column)]).astype(np.int64)
                upper = keys >> (left_out + width)
                places = np.minimum(np.searchsorted(own, upper), own.size - 1)
                inside = own[places] == upper if own.size else np.zeros(keys.size, dtype=bool)
                parts = (keys[inside] >> left_out) & ((1 << width) - 1)
                found += np.bincount((places[inside] << width) + parts, minlength=found.size)
        below = [_below(found.reshape(own.size, 1 << width)) for own, found in zip(groups, counts, strict=True)]
        return _Counted(left_out, width, groups, below)


def _below(counts: NDArray[np.int64]) -> NDArray[np.int64 | np.uint32]:
    summed = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    return summed.astype(np.uint32) if summed.max(initial=0) < 1 << 32 else summed
