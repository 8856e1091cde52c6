"""Runs of neighbouring bins that hold enough pooled rows, found before any count is opened; grids of times by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.labels import has_event
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.survival import signed_places
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.cuts import from_keys, to_keys

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


# The grid of times of survival:cox, on which rows of one bin are tied: agreed by the sites, no row shown.
#
# Bins are found in two steps of spans, over rows with an event alone: first the powers of two between which
# events lie, then runs of 2,048 equal parts of what lies between. A part is a range of the order-preserving image of
# float32, so that times in days and in seconds get bins alike. Every bin holds k pooled events at least, and so as many
# rows. Where there are more bins than the job wants, neighbours are joined.
#
# Events count as what they weigh beside the largest weight of all sites (effective rows), so that no bin is one row's.
#
# Privacy: every site learns the bits of spans of these parts, and the pooled events of bins of at least k; no smaller
# count is opened. Edges of bins are ends of parts and no times of rows.

LEAST_BINS = 2
Runs = Callable[[Ints], Ints]
"""Shapes: int64[n, 2] to int64[n]."""
PARTS = _OCTAVES, _FINE = 255, 2048
"""Of times in the two steps: powers of two, and parts of what lies between."""
_MANTISSA_BITS = 23
_WEIGHT_BITS = 20  # of the share of the largest weight
_ZERO = 1 << 31  # the key of 0


def search_times(
    sums: ProtectedSums, table: Table, least: int, most: int, largest_weight: float, n_sites: int
) -> NDArray[np.float32]:
    """Agree on a grid of times.

    Args:
        table: this site's rows, with times as label.
        least: pooled events of a bin; k above.
        most: bins.
        largest_weight: no weight exceeds it at any site.

    Returns:
        The first time of each bin but the first. Shapes: float32[n_bins - 1], ascending, the same at all sites.

    Raises:
        PolicyRefusal: at all sites alike, if there are too few bins.
        ProtocolError: the opened counts contradict what was said before: a site or the server lied.
    """
    is_event = has_event(table.label)
    keys = to_keys(np.ascontiguousarray(table.label[is_event, 0])).astype(np.int64)
    shares = np.ones(keys.size) if table.weight is None else table.weight[is_event] / np.float64(largest_weight)
    weights = np.floor(np.ldexp(shares, _WEIGHT_BITS)).astype(np.int64)

    def events_of(edges: Ints) -> Runs:
        """Return this site's events of runs of parts, from the first of each to before the last."""
        parts = np.clip(np.searchsorted(edges, keys, side="right") - 1, 0, edges.size - 2)
        until = np.zeros(edges.size, dtype=np.int64)
        np.add.at(until, parts + 1, weights)
        until = np.cumsum(until)
        return lambda runs: (until[runs[:, 1]] - until[runs[:, 0]]) >> _WEIGHT_BITS

    def enough_of(events: Runs, n_parts: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Return spans of parts, and which of these hold enough events of all sites."""
        spans = spans_of(n_parts)
        return spans, ask_spans(sums, [local_bits(events(spans)[:, None], least, n_sites)])[0]

    octaves = _ZERO + (np.arange(_OCTAVES + 1, dtype=np.int64) << _MANTISSA_BITS)
    spans, enough = enough_of(events_of(octaves), _OCTAVES)
    good = spans[enough[:, 0]]
    if not good.size:
        raise _too_coarse(least)
    first = int(good[good[:, 0] == 0, 1].min()) - 1
    last = int(good[good[:, 1] == _OCTAVES, 0].max()) + 1
    low, high = octaves[min(first, last - 1)], octaves[max(first + 1, last)]
    edges = low + (high - low) * np.arange(_FINE + 1, dtype=np.int64) // _FINE
    events = events_of(edges)
    ends = np.array(edges_of(*enough_of(events, _FINE), _FINE), dtype=np.int64)
    if ends.size < LEAST_BINS:
        raise _too_coarse(least)
    bins = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    pooled = sums.sum_counts(Kind.CLASS_COUNTS, events(bins))
    if pooled.min() < least:
        raise ProtocolError("the counts of events contradict what a site has said of its rows")
    kept = ends[_joined(pooled, most)]
    return from_keys(edges[kept].astype(np.uint32))


def on_grid(table: Table, edges: NDArray[np.float32]) -> Table:
    """Return rows whose labels are places on a grid (growth/survival.py). Shapes: edges: of ``search_times``."""
    label = signed_places(table.label[:, 0], has_event(table.label), edges)
    return dataclasses.replace(table, label=label)


def _joined(pooled: Ints, most: int) -> Ints:
    """Return after which bins the grid has an edge: neighbours are joined where there are more than ``most``.

    Shapes: pooled: int64[n_bins]; result: int64[at most ``most`` - 1].
    """
    until, share = np.cumsum(pooled), -(-int(pooled.sum()) // most) if pooled.size > most else 1
    kept, before = [], 0
    for number, total in enumerate(until[:-1].tolist()):
        if total - before >= share:
            kept.append(number)
            before = total
    return np.array(kept, dtype=np.int64)


def _too_coarse(least: int) -> PolicyRefusal:
    return PolicyRefusal(
        f"survival:cox: the grid of times would be too coarse: the events of all sites do not fill {LEAST_BINS} bins "
        f"with at least {least} each, as the sites can show. Policy keys: min_rows_per_node, min_rows_per_cut. Remedy: "
        "train on more events, lower the job's min_rows_per_cut, or ask the sites to lower the keys"
    )
