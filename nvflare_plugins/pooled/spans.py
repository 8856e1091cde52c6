"""Runs of neighbouring bins that hold enough pooled rows, found before any count is opened."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import ProtectedSums

# A run of bins must hold at least k pooled rows of every class, and no count that is smaller may be opened on the way.
# The sites therefore test spans: runs of bins of lengths that are powers of two, beginning at every half of their
# length, and all runs from the lowest bin or to the highest. Of each span and class all sites learn two bits, and no
# count: whether some site has k rows there by itself; and whether every one of the W sites has ceil(k/W). Either one
# shows that the pooled count is at least k. Runs that contain such a span, for each class, are taken from the lowest
# bin on, as short as they can be, which makes most of them. One may be longer than it had to be: pooled rows can be k
# where neither bit shows it.
#
# Privacy: every site learns of each span and class whether another site has k rows there by itself, and whether another
# one has fewer than ceil(k/W). With two sites these are bits of the other one's rows.


Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
_MOST_FLAGS = 1 << 18  # in one message: 2 MiB


def spans_of(n_bins: int) -> Ints:
    """Return all spans of so many bins. Shapes: result: int64[n_spans, 2], first bin and the one after the last."""
    ends = np.arange(1, n_bins + 1)
    found, length = [np.stack([0 * ends, ends], axis=1), np.stack([ends - 1, 0 * ends + n_bins], axis=1)], 1
    while length < n_bins:
        first = np.arange(0, n_bins - length + 1, max(length // 2, 1))
        found.append(np.stack([first, first + length], axis=1))
        length *= 2
    return np.unique(np.concatenate(found), axis=0).astype(np.int64)


def local_bits(rows: Ints, least: int, n_sites: int) -> Bools:
    """Return what this site says of rows, of which all sites learn whether any site says so.

    Shapes: rows: int64[n, n_classes]; result: bool[2, n, n_classes]: has k rows; has fewer than ceil(k/W).
    """
    return np.stack([rows >= least, rows < -(-least // n_sites)])


def are_enough(any_says: Bools) -> Bools:
    """Return where the pooled rows are at least k, from what some site says (``local_bits``)."""
    enough: Bools = any_says[0] | ~any_says[1]
    return enough


def edges_of(spans: Ints, enough: Bools, n_bins: int) -> list[int]:
    """Return where runs end, the last with all that is left over; none if even all bins are not shown to be enough.

    Shapes: spans: of ``spans_of``; enough: bool[n_spans, n_classes].
    """
    # For each bin and class: where the first span ends that begins there or later and is enough.
    nearest = np.full((n_bins + 1, enough.shape[1]), n_bins + 1, dtype=np.int64)
    for of_class in range(enough.shape[1]):
        good = spans[enough[:, of_class]]
        np.minimum.at(nearest[:, of_class], good[:, 0], good[:, 1])
    nearest = np.minimum.accumulate(nearest[::-1], axis=0)[::-1].max(axis=1)
    ends: list[int] = []
    while nearest[ends[-1] if ends else 0] <= n_bins:
        ends.append(int(nearest[ends[-1] if ends else 0]))
    if ends:
        ends[-1] = n_bins  # what is left over belongs to the last
    return ends


def ask_spans(sums: ProtectedSums, bits: list[NDArray[np.bool_]]) -> list[NDArray[np.bool_]]:
    """Return where pooled rows are enough, from the bits of all sites; few columns to a message."""
    found: list[NDArray[np.bool_]] = []
    for block in _blocks(bits):
        flat = sums.any_site(Kind.CELL_FLAGS, np.concatenate([one.ravel() for one in block]))
        parts = np.split(flat, np.cumsum([one.size for one in block])[:-1])
        found += [are_enough(part.reshape(one.shape)) for part, one in zip(parts, block, strict=True)]
    return found


def _blocks(bits: list[NDArray[np.bool_]]) -> Iterator[list[NDArray[np.bool_]]]:
    block: list[NDArray[np.bool_]] = []
    for one in bits:
        if block and sum(other.size for other in block) + one.size > _MOST_FLAGS:
            yield block
            block = []
        block.append(one)
    yield block
