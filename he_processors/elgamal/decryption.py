"""ElGamal decryption of a level's histograms, checked in the group before any logarithm is looked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import StaysInProcess
from he_processors.curve.interface import COFACTOR_BITS, Curve, Points
from he_processors.elgamal.encryption import DigitFormat, PointColumns
from he_processors.elgamal.keys import ElGamalPrivateKey, base_point, rows_of
from he_processors.elgamal.small_logarithms import TABLE_BITS, SearchBounds, SmallLogarithms
from he_processors.errors import ProtocolError
from he_processors.fixed_point import REFUSED, IntegerRange
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinSums, NodeTotal, check_node

# ElGamal decryption of a level's histograms, checked in the group before any logarithm is looked for.
#
# What comes back are 8 (R + s B) and 8 (C_k + s P_k), so C_k - x_k R is eight times the sum of the messages times B:
# all logarithms here are to the base 8 B. The owner knows every node's sums of digits, and each feature's bins add up
# to them; that is compared in the group first, so that made-up points cost no search.
#
# Security: nothing opened is used or shown before every check has passed, and a failed check says nothing about what
# was opened: one fixed message. A sum out of range is not decrypted at all.


class ElGamalDecryptor(StaysInProcess):
    """Opens sums. Held by the key owner only."""

    def __init__(self, key: ElGamalPrivateKey, curve: Curve, table_bits: int = TABLE_BITS) -> None:
        """Args: table_bits: of the table of small logarithms; fewer in tests of slow backends."""
        self._curve = curve
        self._minus_keys = rows_of([-scalar for scalar in key.scalars])
        self._logarithms = _open_logarithms(curve, table_bits)

    def open_level(
        self,
        rows: PointColumns,
        digits: DigitFormat,
        layout: BinLayout,
        totals: Sequence[NodeTotal],
        searching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[BinSums]:
        """Open the sums of a level: one BinSums for each of ``totals``.

        Security: the time that it takes shows the sums: before anything follows that the passive party sees, its caller
            waits (``padding``).

        Args:
            searching: measures the search.

        Raises:
            ProtocolError: with one fixed message, if any sum of any node is not what it must be.
        """
        opened = self.unmask(rows)
        if not digits.is_noised:  # else totals are met nearly, which only numbers show
            self.check_totals(opened, digits, layout, totals)
        with searching():
            return self.find_sums(opened, digits, layout, totals)

    def unmask(self, rows: PointColumns) -> list[Points]:
        """Take the randomisers off. Shapes: rows: n; result: for each message Points[n]: 8 m B."""
        r, *hidden = rows.columns
        masks = self._curve.mul_by_each(r, self._minus_keys)
        return [self._curve.add(column, mask) for column, mask in zip(hidden, masks, strict=True)]

    def check_totals(
        self, opened: Sequence[Points], digits: DigitFormat, layout: BinLayout, totals: Sequence[NodeTotal]
    ) -> None:
        """Compare the sum over each feature's bins with its node's, in the group.

        Raises:
            ProtocolError: with one fixed message.
        """
        order = np.arange(len(totals) * layout.n_slots, dtype=np.int32)
        starts = _feature_starts(layout, len(totals))
        node = np.repeat(np.arange(len(totals), dtype=np.int64), layout.n_features)
        add = self._curve.segment_sums(order, starts, order.size)
        for points, expected in zip(opened, _digit_totals(digits, totals), strict=True):
            sums = add(points)
            due = self._curve.take(self._logarithms.times(np.array(expected, dtype=np.int64)), node)
            if not self._curve.equal(sums, due).all():
                raise ProtocolError(REFUSED)

    def find_sums(
        self, opened: Sequence[Points], digits: DigitFormat, layout: BinLayout, totals: Sequence[NodeTotal]
    ) -> list[BinSums]:
        """Find the sums of a level whose totals are right, and check every one.

        Raises:
            ProtocolError: with one fixed message.
        """
        ranges = [digits.digit_ranges(total.n_rows) for total in totals]
        sums = [
            self._find_digit(points, [of_node[k] for of_node in ranges], expected, layout, digits.is_noised)
            for k, (points, expected) in enumerate(zip(opened, _digit_totals(digits, totals), strict=True))
        ]
        g, h = digits.join(sums)
        nodes = range(0, len(totals) * layout.n_slots, layout.n_slots)
        found = [BinSums(g[:, i : i + layout.n_slots], h[:, i : i + layout.n_slots]) for i in nodes]
        for node_sums, total in zip(found, totals, strict=True):
            check_node(node_sums, total, layout, digits)
        return found

    def _find_digit(
        self,
        points: Points,
        ranges: Sequence[IntegerRange],
        totals: Sequence[int],
        layout: BinLayout,
        is_noised: bool,
    ) -> NDArray[np.int64]:
        """Find the sums of one digit in all nodes. Shapes: result: int64[n_nodes * n_slots].

        Noised bins add up to no known number: each hit is compared with its point, and each may lie anywhere in range.
        """
        starts = _feature_starts(layout, len(totals))
        n_points = np.diff(starts)
        group = np.repeat(np.arange(n_points.size, dtype=np.int64), n_points)
        total = np.repeat(np.array(totals, dtype=np.int64), layout.n_features)
        low = np.repeat(np.array([one.low for one in ranges], dtype=np.int64), layout.n_features)
        high = np.repeat(np.array([one.high for one in ranges], dtype=np.int64), layout.n_features)
        # Cut points are quantiles: most bins of a feature hold equally many rows, and where one digit has one sign they
        # are near the feature's mean.
        expected = total // n_points
        most_distance = np.maximum(-low, high) + np.abs(expected) * n_points
        if is_noised:
            most_distance *= n_points
        bounds = SearchBounds(expected, low, high, most_distance, n_points)
        values = self._logarithms.find(points, group, bounds, checks_hits=is_noised)
        if is_noised:
            return values
        wrong = np.flatnonzero(np.add.reduceat(values, starts[:-1]) != total)
        if wrong.size:  # a chance hit of the table: once in very many jobs
            again = np.flatnonzero(np.isin(group, wrong))
            renumbered = np.searchsorted(wrong, group[again])
            of_wrong = SearchBounds(*(column[wrong] for column in (expected, low, high, most_distance, n_points)))
            chosen = self._curve.take(points, again)
            values[again] = self._logarithms.find(chosen, renumbered, of_wrong, checks_hits=True)
        return values


def _feature_starts(layout: BinLayout, n_nodes: int) -> NDArray[np.int64]:
    """Return where the slots of each feature of each node begin. Shapes: int64[n_nodes * n_features + 1]."""
    firsts = layout.starts[:-1][None] + layout.n_slots * np.arange(n_nodes, dtype=np.int64)[:, None]
    return np.append(firsts.reshape(-1), n_nodes * layout.n_slots)


def _digit_totals(digits: DigitFormat, totals: Sequence[NodeTotal]) -> list[list[int]]:
    """Return for each digit the sum in every node."""
    of_nodes = [digits.digits_of_total(total.g, total.h, *total.lower) for total in totals]
    return [list(column) for column in zip(*of_nodes, strict=True)]


def _open_logarithms(curve: Curve, table_bits: int) -> SmallLogarithms:
    """Return the table of multiples of 8 B, which is public and the same for every key: made once in a process."""
    found = _LATEST.get((curve.name, table_bits))
    if found is None:
        found = SmallLogarithms(curve, curve.double(base_point(curve), COFACTOR_BITS), table_bits)
        _LATEST.clear()
        _LATEST[curve.name, table_bits] = found
    return found


_LATEST: dict[tuple[str, int], SmallLogarithms] = {}


# Time that does not show what was searched for: it is drawn out to a power of two of a public step.


STEP_S = 1 / 16


def draw_out(
    since_s: float,
    step_s: float = STEP_S,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until 1, 2, 4, 8, ... steps have passed since a moment; call it also when what was done has failed.

    Security: whoever waits for what follows learns which of these, and no more, if it knows the moment: that is when
        its last message came, and not when a search began. Units: seconds.

    Args:
        since_s: the moment, by the clock.
    """
    spent = clock() - since_s
    sleep(due(spent, step_s) - spent)


def due(spent_s: float, step_s: float) -> float:
    """Return the least power of two of steps that is not less than the time spent. Units: seconds."""
    return step_s * float(2 ** max(0, math.ceil(math.log2(max(spent_s, step_s) / step_s))))
