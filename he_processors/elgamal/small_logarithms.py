"""Small discrete logarithms of many points at once: baby steps from a table, giant steps to both sides.

The table holds the multiples 0 .. 2^21 - 1 of one point by the low 64 bits of y; a point and its negative share y, so
that it stands for twice as many. A point that is not in it goes giant steps away from where its logarithm is expected,
upwards and downwards at once, and is looked up after each.

The work is bounded by what honest sums take. The sums of one group (the bins of a feature) are known to be no larger in
all than a bound, so the giant steps of a group are counted against a budget, and no honest group ever exceeds it.

Security: for the owner of the secret key. The time shows the logarithms: see ``padding``. Not found, out of range and
    over budget are one error.
Reference: Shanks 1971.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.interface import Curve, Points
from he_processors.elgamal.keys import rows_of
from he_processors.errors import ProtocolError
from he_processors.fixed_point import REFUSED

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
        search = _Search(self, points, group, bounds, checks_hits)
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
    result: NDArray[np.uint8] = np.left_shift(1, (words & np.uint64(7)).astype(np.uint8), dtype=np.uint8)
    return result


def _rows_of_small(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    return values.astype("<u4").view(np.uint8).reshape(-1, 4)
