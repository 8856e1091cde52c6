"""ElGamal decryption of a level, checked in the group before any logarithm is looked for, and small logarithms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import StaysInProcess
from he_processors.curve.interface import COFACTOR_BITS, Curve, Points, base_point, rows_of
from he_processors.elgamal.encryption import DigitFormat, ElGamalPrivateKey, PointColumns
from he_processors.errors import ProtocolError
from he_processors.fixed_point import REFUSED, IntegerRange
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinSums, NodeTotal, check_node

# Small discrete logarithms of many points at once: baby steps from a table, giant steps to both sides.
#
# The table holds the multiples 0 .. 2^21 - 1 of one point by the low 64 bits of y; a point and its negative share y, so
# that it stands for twice as many. A point that is not in it goes giant steps away from where its logarithm is
# expected, upwards and downwards at once, and is looked up after each.
#
# The work is bounded by what honest sums take. The sums of one group (the bins of a feature) are known to be no larger
# in all than a bound, so the giant steps of a group are counted against a budget, and no honest group ever exceeds it.
#
# Security: for the owner of the secret key. The time shows the logarithms: see ``draw_out``. Not found, out of range
#     and over budget are one error.
# Reference: Shanks 1971.


TABLE_BITS = 21
_CHUNK = 1 << 15  # points that are computed and looked up together
_FILTER_BITS = 4  # bits of the filter for each entry of the table
_MOST_STEPS = 1 << 12


@dataclass(frozen=True, slots=True)
class SearchBounds:
    """What is known of the logarithms of a group of points. Shapes: int64[n_groups] each.

    Attributes:
        expected: where to begin.
        low, high: the closed range of every logarithm.
        most_distance: bound of the sum over the group of the distances from ``expected``.
        n_points: points of the group.
    """

    expected: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    most_distance: NDArray[np.int64]
    n_points: NDArray[np.int64]


class MultiplesTable:
    """The multiples 0 .. 2^bits - 1 of one point, found by affine coordinates. Public."""

    def __init__(self, curve: Curve, base: Points, bits: int) -> None:
        self._curve = curve
        self.n_entries = 1 << bits
        keys, signs = self._multiples(base)
        order = np.argsort(keys)
        self._keys, self._signs = keys[order], signs[order]
        self._values = order.astype(np.int32)
        # A bitmap of a few bits of each key: most points of a long search are not in the table, and end here.
        self._filter_mask = np.uint64((self.n_entries << _FILTER_BITS) - 1)
        self._filter = np.zeros(max(1, (self.n_entries << _FILTER_BITS) // 8), dtype=np.uint8)
        places = keys & self._filter_mask
        np.bitwise_or.at(self._filter, places >> np.uint64(3), _bit(places))

    def find(self, points: Points) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Look points up; wrong for one point in 2^43 that is not in the table, as 64 bits decide.

        Shapes: results: bool[n], whether it is there, and int64[n], its logarithm, negative ones too.
        """
        words, signs = self._curve.y_words(points)
        is_found = (self._filter[((words & self._filter_mask) >> np.uint64(3)).astype(np.int64)] & _bit(words)) != 0
        values = np.zeros(words.size, dtype=np.int64)
        likely = np.flatnonzero(is_found)
        place = np.minimum(np.searchsorted(self._keys, words[likely]), self.n_entries - 1)
        is_found[likely] = self._keys[place] == words[likely]
        logarithm = self._values[place].astype(np.int64)
        values[likely] = np.where(self._signs[place] == signs[likely], logarithm, -logarithm)
        return is_found, values

    def _multiples(self, base: Points) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the coordinates of all multiples, a chunk at a time."""
        curve, table = self._curve, self._curve.fixed_base(base)
        n_low = min(self.n_entries, 1 << 10)
        low = table.mul(_rows_of_small(np.arange(n_low)))
        found = []
        for first in range(0, self.n_entries, _CHUNK):
            starts = np.arange(first, min(first + _CHUNK, self.n_entries), n_low)
            high = table.mul(_rows_of_small(starts))
            n = starts.size
            chunk = curve.add(
                curve.take(low, np.tile(np.arange(n_low), n)), curve.take(high, np.repeat(np.arange(n), n_low))
            )
            found.append(curve.y_words(chunk))
        return np.concatenate([words for words, _ in found]), np.concatenate([signs for _, signs in found])


class SmallLogarithms:
    """Finds the logarithms of points to one base."""

    def __init__(self, curve: Curve, base: Points, table_bits: int = TABLE_BITS) -> None:
        self._curve = curve
        self._multiples = curve.fixed_base(base)
        self._table = MultiplesTable(curve, base, table_bits)
        self._reach = self._table.n_entries - 1  # to both sides of where one looks
        self.step = 2 * self._reach + 1
        self._giant_steps = self.times(np.array([self.step]))

    def find(
        self, points: Points, group: NDArray[np.int64], bounds: SearchBounds, *, checks_hits: bool = False
    ) -> NDArray[np.int64]:
        """Return the logarithm of every point.

        A hit is wrong with a chance of 2^-43 for each point looked up. Callers know sums of logarithms; where one is
        not right they search again with ``checks_hits``, which compares each hit's multiple with the point.

        Shapes: group: int64[n_points], the group of each; result: int64[n_points].

        Raises:
            ProtocolError: with one fixed message: a logarithm is not in its range, or the giant steps of a group are
                more than honest sums take.
        """
        search = _Search(self, points, group, bounds, checks_hits=checks_hits)
        search.run()
        return search.values

    def times(self, values: NDArray[np.int64]) -> Points:
        """Return multiples of the base. Shapes: values: int64[n], signed; result: Points[n]."""
        return self._multiples.mul(rows_of([int(value) for value in values]))

    def giant_steps(self, n: int) -> Points:
        """Return 1, 2, ..., n giant steps times the base, from a table that grows. Shapes: result: Points[n]."""
        if n > len(self._giant_steps):
            n_kept = min(_MOST_STEPS, 1 << (n - 1).bit_length())
            self._giant_steps = self.times(np.arange(1, n_kept + 1, dtype=np.int64) * self.step)
        return self._curve.take(self._giant_steps, np.arange(n, dtype=np.int64))

    def look_up(self, points: Points) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Look points up in the table, a chunk at a time. Shapes: results: bool[n], int64[n]."""
        n = len(points)
        if n <= _CHUNK:
            return self._table.find(points)
        parts = [
            self._table.find(self._curve.take(points, np.arange(first, min(first + _CHUNK, n), dtype=np.int64)))
            for first in range(0, n, _CHUNK)
        ]
        return np.concatenate([found for found, _ in parts]), np.concatenate([values for _, values in parts])


class _Search:
    """The state of one search: all points that are not found yet have gone equally many giant steps."""

    def __init__(
        self,
        logarithms: SmallLogarithms,
        points: Points,
        group: NDArray[np.int64],
        bounds: SearchBounds,
        *,
        checks_hits: bool,
    ) -> None:
        self._logarithms, self._curve = logarithms, logarithms._curve
        self._points, self._group, self._bounds = points, group, bounds
        self._checks_hits = checks_hits
        self._step = logarithms.step
        self._low, self._high = bounds.low[group], bounds.high[group]
        self._expected = bounds.expected[group]
        # A point k steps away is more than (k - 1/2) steps off: the steps of a group are at most this many.
        self._budget = bounds.most_distance // self._step + bounds.n_points
        self._spent = np.zeros(bounds.expected.size, dtype=np.int64)
        self._n_done = 0  # giant steps that every pending point has gone
        self.values = np.zeros(len(points), dtype=np.int64)

    def run(self) -> None:
        curve, bounds = self._curve, self._bounds
        begin = curve.take(curve.negate(self._logarithms.times(bounds.expected)), self._group)
        at = curve.add(self._points, begin)
        everyone = np.arange(len(self._points), dtype=np.int64)
        pending = everyone[~self._note(everyone, at, np.zeros_like(everyone))]
        above = below = curve.take(at, pending)
        while pending.size:
            self._check_budget(pending)
            n_steps = self._steps_at_once(pending.size)
            down = self._logarithms.giant_steps(n_steps)
            up = curve.negate(down)  # a point with a larger logarithm is found after taking steps off it
            is_found = self._try(pending, above, up, 1)
            is_found |= self._try(pending, below, down, -1)
            self._n_done += n_steps
            left = np.flatnonzero(~is_found)
            pending = pending[left]
            last = np.full(left.size, n_steps - 1, dtype=np.int64)
            above = curve.add(curve.take(above, left), curve.take(up, last))
            below = curve.add(curve.take(below, left), curve.take(down, last))

    def _steps_at_once(self, n_pending: int) -> int:
        """Return how many steps to try together: many for few points, but no more than were gone already."""
        return max(1, min(self._n_done, _CHUNK // (2 * n_pending), _MOST_STEPS))

    def _check_budget(self, pending: NDArray[np.int64]) -> None:
        """Refuse what no honest sums need: each pending point is at least one step further than all have gone."""
        waiting = np.bincount(self._group[pending], minlength=self._spent.size) * (self._n_done + 1)
        beyond = (self._n_done + 0.5) * self._step
        is_possible = (self._expected[pending] + beyond <= self._high[pending]) | (
            self._expected[pending] - beyond >= self._low[pending]
        )
        if np.any(self._spent + waiting > self._budget) or not is_possible.all():
            raise ProtocolError(REFUSED)

    def _try(self, pending: NDArray[np.int64], at: Points, moves: Points, direction: int) -> NDArray[np.bool_]:
        """Look up every pending point after each of several moves. Shapes: result: bool[n_pending], found."""
        beyond = direction * (self._n_done + 0.5) * self._step + self._expected[pending]
        bound = self._high[pending] if direction > 0 else self._low[pending]
        usable = np.flatnonzero(direction * (bound - beyond) >= 0)
        result = np.zeros(pending.size, dtype=np.bool_)
        if not usable.size:
            return result
        n_moves = len(moves)
        rows = np.repeat(usable, n_moves)
        steps = np.tile(np.arange(n_moves, dtype=np.int64), usable.size)
        candidates = self._curve.add(self._curve.take(at, rows), self._curve.take(moves, steps))
        signed = direction * (self._n_done + 1 + steps)
        result[rows[self._note(pending[rows], candidates, signed)]] = True
        return result

    def _note(self, which: NDArray[np.int64], points: Points, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Look points up and keep the logarithms found. Shapes: which, steps: int64[n]; result: bool[n], found."""
        is_found, values = self._logarithms.look_up(points)
        values = values + self._expected[which] + steps * self._step
        is_found &= (values >= self._low[which]) & (values <= self._high[which])
        hits = np.flatnonzero(is_found)
        if self._checks_hits and hits.size:
            multiples = self._logarithms.times(values[hits])
            is_right = self._curve.equal(multiples, self._curve.take(self._points, which[hits]))
            is_found[hits[~is_right]] = False
            hits = hits[is_right]
        self.values[which[hits]] = values[hits]
        np.add.at(self._spent, self._group[which[hits]], np.abs(steps[hits]))
        return is_found


def _bit(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    return np.left_shift(1, (words & np.uint64(7)).astype(np.uint8), dtype=np.uint8)


def _rows_of_small(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    return values.astype("<u4").view(np.uint8).reshape(-1, 4)


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
            self._find_digit(points, [of_node[k] for of_node in ranges], expected, layout, is_noised=digits.is_noised)
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
        *,
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
