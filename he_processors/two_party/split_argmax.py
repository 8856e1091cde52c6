"""The best split of each node, from sums that both parties hold as shares: only who wins leaves the circuit.

The active party knows each node's sums G, H and has its own best split; the passive party has candidates, of which the
sums GL, HL of rows on the left are shared between both modulo 2^64. With A = HL + lambda, B = HR + lambda and
T = A + B, the gain of a split is, but for what all candidates of the node share, T Y^2 / (A B) with Y = GL - A G / T:
one fraction, whose logarithm is a sum of three. ``score`` is that integer function in the clear; the circuit gives the
same integers. Units: sums are integers of one grid, scores are 1/512 of an octave of gain.

A level takes three exchanges; A is the active party (the garbler), P the passive one (the evaluator):

    A to P  ask      choices by the bits of each node's mean G / T
    P to A  offer    corrections of the product mean * HL, and choices by the bits of P's shares of HL and Y
    A to P  garble   circuit: normalises |Y| and min(A, B), and shares the logarithms by small tables
    P to A  score    choices by the bits of P's shares of the scores
    A to P  decide   circuit: adds the shares up, and compares all candidates with each other and with A's own best
    P learns for each node whether a candidate wins and, if so, which; it tells A the former and the winner's split.

Security: honest but curious parties. A sees choices alone, which are uniform for it; P sees garbled circuits, of which
    the revealed wires are the winner, masked to zero where A's own split wins. Sizes depend on public numbers alone:
    rows of nodes, candidates, bounds. P's ``allowed`` is its own: a split that its rules exclude never wins.
References: Yao (FOCS 1986); De Dinechin, Tisserand, Multipartite table methods (IEEE Trans. Computers 2005): the tables
    of two parts; XGBoost 3.2, src/tree/param.h (CalcGain), for the gain without alpha and max_delta_step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.randomness import BULK_RANDOMNESS, RandomSource
from he_processors.two_party import garbling
from he_processors.two_party.garbling import Engine, Evaluator, Garbler
from he_processors.two_party.oblivious_transfer import (
    BitChooser,
    Labels,
    OffsetOwner,
    corrections_bytes,
    product_corrections,
    product_shares,
)

MANTISSA_BITS = 9
LEAST_Y_BITS = 7
"""A |Y| below 2^7 steps of the grid counts as zero."""
OCTAVE = 512
"""Units of a score in one octave."""
KEY_BITS = garbling.WORD_BITS + 1
NO_SPLIT = (1 << garbling.WORD_BITS) - 1
"""A key of the active party that every valid candidate exceeds."""
_THIRD = MANTISSA_BITS // 3
_COARSE = 4  # bits of the mantissa by which log(B / T) is looked up, and as many less one by which it is corrected

Shares = NDArray[np.uint64]
Sums = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Terms:
    """What is public of all nodes of a job.

    Attributes:
        g_bound: of one row's gradient, as an integer of the grid.
        h_bound: of one row's hessian.
        l2: XGBoost's lambda on the grid.
        least_hessian: least sum of hessians on either side of a split (min_child_weight), at least 1.
    """

    g_bound: int
    h_bound: int
    l2: int
    least_hessian: int

    def widths(self, n_rows: int) -> Widths:
        """Return the widths of a node's numbers. They depend on the bits of its number of rows alone.

        Raises:
            CapacityExceeded: so many rows do not fit 64 bits, or 16 bits of a score.
        """
        bits = n_rows.bit_length()
        most = (1 << bits) - 1
        g_bits, h_bits = (most * self.g_bound).bit_length(), (most * self.h_bound + 2 * self.l2).bit_length()
        least = self.least_hessian + self.l2
        h_bits = max(h_bits, least.bit_length() + 1)
        found = Widths(max(g_bits, MANTISSA_BITS), h_bits, (bits + 1) // 2 + 8, self.l2, least)
        if found.product_bits > 64 or found.h_bits > found.g_bits + found.mean_bits or found.most_score >= NO_SPLIT:
            raise CapacityExceeded(
                "so many rows do not fit the shares of sealed sums: take fewer rows or a coarser grid"
            )
        return found


@dataclass(frozen=True)
class Widths:
    """Bits of the numbers of one node; nodes of equal widths share a circuit.

    Attributes:
        g_bits: of the sum of gradients, without its sign.
        h_bits: of T.
        mean_bits: fraction bits of G / T.
        least: smallest A or B of a valid split.
    """

    g_bits: int
    h_bits: int
    mean_bits: int
    l2: int
    least: int

    @property
    def product_bits(self) -> int:
        """Bits of Y with its fraction and its sign."""
        return self.g_bits + self.mean_bits + 2

    @property
    def most_score(self) -> int:
        """Return the largest score."""
        return OCTAVE * (2 * (self.g_bits + 1) + self.h_bits + 2)

    @cached_property
    def y_shifts(self) -> tuple[int, ...]:
        """Shifts that normalise |Y|, of which ``y_fraction_bits`` are kept below a step."""
        return garbling.shifts_up_to(self.g_bits - LEAST_Y_BITS)

    @property
    def y_fraction_bits(self) -> int:
        """Fraction bits of Y that count."""
        return MANTISSA_BITS - LEAST_Y_BITS

    @cached_property
    def side_top(self) -> int:
        """Highest bit of min(A, B), which has one bit less than T."""
        return self.h_bits - 2

    @cached_property
    def side_shifts(self) -> tuple[int, ...]:
        """Shifts that normalise min(A, B) from ``least`` on."""
        return garbling.shifts_up_to(max(self.side_top - (self.least.bit_length() - 1), 0))


@dataclass(frozen=True, slots=True)
class NodeSums:
    """A node as the active party knows it: its sums on the grid, of ``n_rows`` rows."""

    g: int
    h: int
    n_rows: int

    def total(self, widths: Widths) -> int:
        """Return T, at least one."""
        return max(self.h + 2 * widths.l2, 1)

    def mean(self, widths: Widths) -> int:
        """Return G / T with fraction bits, rounded down."""
        return (self.g << widths.mean_bits) // self.total(widths)


# The function in the clear.


def score(widths: Widths, node: NodeSums, left_g: Sums, left_h: Sums) -> NDArray[np.int64]:
    """Return the key of each candidate: 2^16 plus its score where the split is valid.

    Shapes: left_g, left_h, result: int64[n].
    """
    shift = np.int64(widths.mean_bits)
    product = ((left_g << shift) - np.int64(node.mean(widths)) * (left_h + widths.l2)).astype(np.int64)
    y = (product ^ (product >> np.int64(63))) >> (shift - widths.y_fraction_bits)
    side = np.minimum(left_h, node.h - left_h) + widths.l2
    y_shifts, y_mantissa = _normal(y, widths.g_bits + widths.y_fraction_bits, widths.y_shifts)
    side_shifts, mantissa = _normal(side, widths.side_top, widths.side_shifts)
    words = _y_words(widths, y_shifts, y_mantissa) + _side_words(widths, node, side_shifts, mantissa)
    is_valid = (y_mantissa >> MANTISSA_BITS > 0) & (side >= widths.least)
    return (words & np.int64(NO_SPLIT)) + (is_valid.astype(np.int64) << garbling.WORD_BITS)


def _normal(values: Sums, top: int, shifts: Sequence[int]) -> tuple[Sums, Sums]:
    """Return which shifts bring the highest bit of each value to ``top``, as bits, and the ten bits from there."""
    made, left = np.zeros_like(values), values.copy()
    for place, shift in enumerate(shifts):
        is_small = (left >> np.int64(top - shift + 1)) == 0
        left = np.where(is_small, left << np.int64(shift), left)
        made |= is_small.astype(np.int64) << np.int64(place)
    lowest = top - MANTISSA_BITS
    kept = left >> np.int64(lowest) if lowest >= 0 else left << np.int64(-lowest)
    return made, kept & np.int64((2 << MANTISSA_BITS) - 1)


def _y_words(widths: Widths, shifts: Sums, mantissa: Sums) -> Sums:
    x = mantissa & np.int64((1 << MANTISSA_BITS) - 1)
    exponents = _exponent_table(widths.g_bits, widths.h_bits, widths.y_shifts)
    first, second = _log_tables(2 * OCTAVE)
    return _word(exponents, shifts) + _word(first, x >> _THIRD) + _word(second, _outer_thirds(x))


def _side_words(widths: Widths, node: NodeSums, shifts: Sums, mantissa: Sums) -> Sums:
    x = mantissa & np.int64((1 << MANTISSA_BITS) - 1)
    first, second = _log_tables(-OCTAVE)
    coarse, fine = _side_tables(widths, node.total(widths))
    n = len(widths.side_shifts)
    high, low = x >> (MANTISSA_BITS - _COARSE), x >> (MANTISSA_BITS - 2 * _COARSE + 1) & ((1 << (_COARSE - 1)) - 1)
    words = _word(first, x >> _THIRD) + _word(second, _outer_thirds(x))
    words += _word(coarse, shifts | high << n)
    return words + _word(fine, shifts | (low | (x >> (MANTISSA_BITS - 1)) << (_COARSE - 1)) << n)


def _word(table: NDArray[np.uint16], index: Sums) -> Sums:
    return table[index].astype(np.int64)


def _outer_thirds(x: Sums) -> Sums:
    return (x & ((1 << _THIRD) - 1)) | (x >> (2 * _THIRD)) << _THIRD


# Tables. Words are modulo 2^16. They are made by the active party alone, so that no rounding has to agree.


def _words(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    found: NDArray[np.uint16] = np.rint(values).astype(np.int64).astype(np.uint16)
    return found


@cache
def _log_tables(factor: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return factor * log2(1 + x), by the two upper thirds of x, and what the lowest adds, by it and the highest."""
    n, parts = 1 << MANTISSA_BITS, 1 << _THIRD
    middle = np.arange(0, n, parts) + (parts - 1) / 2
    first = factor * np.log2(1 + (middle + 0.5) / n)
    upper = (np.arange(parts) + 0.5) / parts
    slope = factor / np.log(2) / (1 + upper) / n
    second = slope[:, None] * (np.arange(parts) - (parts - 1) / 2)
    return _words(first), _words(second.reshape(-1))


@cache
def _exponent_table(top: int, h_bits: int, shifts: tuple[int, ...]) -> NDArray[np.uint16]:
    """Return twice the exponent of |Y|, by the shifts that were made; scores begin at zero."""
    return _words(OCTAVE * (2.0 * (top - _shifted(shifts)) + h_bits))


def _side_tables(widths: Widths, total: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return minus log2 of the power of two in S = min(A, B), and of (T - S) / T: by the shifts and a little of x.

    The second table corrects the first by three further bits of x, with the slope of half an octave.
    """
    shifted = _shifted(widths.side_shifts)
    power = 2.0 ** (widths.side_top - shifted)
    n_high, n_low = 1 << _COARSE, 1 << (_COARSE - 1)
    at = power * (1 + (np.arange(n_high) + 0.5) / n_high)[:, None]
    coarse = -OCTAVE * (widths.side_top - shifted + np.log2(1 - np.minimum(at / total, 0.5)))
    middle = power * (1 + np.array([0.25, 0.75]))[:, None] / total
    slope = np.where(middle < 0.5, OCTAVE / np.log(2) / (1 - np.minimum(middle, 0.5)), 0.0) * power / total
    step = (np.arange(n_low) - (n_low - 1) / 2) / (n_high * n_low)
    fine = slope[:, None] * step[:, None]
    return _words(coarse.reshape(-1)), _words(fine.reshape(-1))


def _shifted(shifts: tuple[int, ...]) -> NDArray[np.int64]:
    """Return by how much a number was shifted, for each set of shifts. Shapes: result: int64[2^n]."""
    index = np.arange(1 << len(shifts), dtype=np.int64)
    return sum(((index >> place & 1) * shift for place, shift in enumerate(shifts)), np.zeros_like(index))


# The circuits, as both parties run them.


@dataclass(frozen=True, slots=True)
class _Known:
    """What the garbler puts in, for n candidates of one width; zeros at the evaluator.

    Shapes: half, product, total: uint64[n]; odd: bool[n]; tables: uint16[n, 2^m] twice, or of one input.
    """

    half: Shares
    product: Shares
    total: Shares
    odd: NDArray[np.bool_]
    tables: tuple[NDArray[np.uint16], NDArray[np.uint16]]


def _score_circuit(
    engine: Engine, widths: Widths, h_wires: Sequence[Labels], y_wires: Sequence[Labels], allowed: Labels, known: _Known
) -> tuple[Labels, NDArray[np.uint16]]:
    """Return whether each candidate is valid, and this party's share of its score."""
    y = garbling.add_known(engine, y_wires, _bits(known.product, widths.product_bits))
    kept = [bit ^ y[-1] for bit in y[widths.mean_bits - widths.y_fraction_bits : -1]]
    y_flags, y_bits = garbling.normalised(engine, kept[::-1], widths.y_shifts, MANTISSA_BITS + 1)
    half = garbling.add_known(engine, h_wires, _bits(known.half, widths.h_bits))
    difference = [engine.flip(garbling.zero_wire(allowed.shape[1]), known.odd), *half[:-1]]  # |2 HL - H|
    negative = [engine.flip(bit ^ half[-1], garbling.TRUE) for bit in difference]
    side = garbling.add_known(engine, negative, _bits(known.total, widths.h_bits), plus_one=True)[1:]
    wires = side[::-1][: sum(widths.side_shifts) + MANTISSA_BITS + 1]
    flags, bits = garbling.normalised(engine, wires, widths.side_shifts, MANTISSA_BITS + 1)
    valid = engine.both(engine.both(garbling.at_least(engine, side, widths.least), allowed), y_bits[0])
    words = _look_up_y(engine, widths, y_flags, y_bits) + _look_up_side(engine, flags, bits, known)
    return valid, words


def _look_up_y(engine: Engine, widths: Widths, flags: list[Labels], bits: list[Labels]) -> NDArray[np.uint16]:
    words = _look_up_log(engine, bits, 2 * OCTAVE)
    if not flags:
        flags = [garbling.zero_wire(bits[0].shape[1])]
    table = _exponent_table(widths.g_bits, widths.h_bits, widths.y_shifts)
    return words + engine.look_up(flags, np.resize(table, (1, 1 << len(flags))))


def _look_up_side(engine: Engine, flags: list[Labels], bits: list[Labels], known: _Known) -> NDArray[np.uint16]:
    words = _look_up_log(engine, bits, -OCTAVE)
    x = bits[:0:-1]  # the lowest bit first
    high = x[MANTISSA_BITS - _COARSE :]
    low = x[MANTISSA_BITS - 2 * _COARSE + 1 : MANTISSA_BITS - _COARSE]
    words = words + engine.look_up([*flags, *high], known.tables[0])
    return words + engine.look_up([*flags, *low, x[-1]], known.tables[1])


def _look_up_log(engine: Engine, bits: list[Labels], factor: int) -> NDArray[np.uint16]:
    x = bits[:0:-1]
    first, second = _log_tables(factor)
    words = engine.look_up(x[_THIRD:], first[None])
    return words + engine.look_up([*x[:_THIRD], *x[2 * _THIRD :]], second[None])


def _argmax_circuit(
    engine: Engine, keys: list[Labels], shape: tuple[int, int], own: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the candidate that wins each node: the first of the highest keys, -1 where ``own`` is as high.

    Shapes: keys: [2, n_nodes * n_candidates] each; own: uint64[n_nodes]. The garbler's result means nothing.
    """
    n_nodes, left = shape
    places: list[Labels] = []
    while left > 1:
        n_pairs = left // 2
        one, other = ([_part(wire, left, slice(k, 2 * n_pairs, 2)) for wire in keys + places] for k in (0, 1))
        later = garbling.is_more(engine, other[:KEY_BITS], one[:KEY_BITS])
        best = [garbling.chosen(engine, later, b, a) for a, b in zip(one, other, strict=True)] + [later]
        if left % 2:
            over = [_part(wire, left, slice(left - 1, left)) for wire in keys + places]
            over.append(garbling.zero_wire(n_nodes))
            best = [_joined(a, b, n_nodes) for a, b in zip(best, over, strict=True)]
        keys, places, left = best[:KEY_BITS], best[KEY_BITS:], n_pairs + left % 2
    limit = [engine.flip(garbling.zero_wire(n_nodes), bits) for bits in _bits(own, KEY_BITS)]
    wins = garbling.is_more(engine, keys, limit)
    masked = [engine.both(wins, place) for place in places]
    won = engine.reveal(wins)
    found = sum((engine.reveal(bit).astype(np.int64) << i for i, bit in enumerate(masked)), np.zeros(n_nodes, np.int64))
    return np.where(won, found, -1)


def _part(wire: Labels, n_each: int, which: slice) -> Labels:
    return np.ascontiguousarray(wire.reshape(2, -1, n_each)[:, :, which]).reshape(2, -1)


def _joined(wire: Labels, more: Labels, n_nodes: int) -> Labels:
    return np.concatenate([wire.reshape(2, n_nodes, -1), more.reshape(2, n_nodes, 1)], axis=2).reshape(2, -1)


def _bits(values: NDArray[np.uint64], width: int) -> NDArray[np.bool_]:
    """Return the bits of values, the lowest first. Shapes: values: uint64[n]; result: bool[width, n]."""
    return (values >> np.arange(width, dtype=np.uint64)[:, None] & np.uint64(1)).astype(bool)


# The two parties of a level.


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes of a level that share a circuit."""

    widths: Widths
    nodes: tuple[int, ...]

    @property
    def n_choices(self) -> int:
        """Bits that the passive party chooses by, for one candidate."""
        return self.widths.h_bits + self.widths.product_bits + 1


def _groups(terms: Terms, n_rows: Sequence[int]) -> list[_Group]:
    found: dict[Widths, list[int]] = {}
    for node, n in enumerate(n_rows):
        found.setdefault(terms.widths(n), []).append(node)
    return [_Group(widths, tuple(nodes)) for widths, nodes in found.items()]


def _wires(labels: Labels, group: _Group, n: int) -> tuple[list[Labels], list[Labels], Labels]:
    each = [np.ascontiguousarray(labels[:, i * n : (i + 1) * n]) for i in range(group.n_choices)]
    n_h = group.widths.h_bits
    return each[:n_h], each[n_h:-1], each[-1]


class _Steps:
    """Holds the messages of a level to their order, each once."""

    def __init__(self) -> None:
        self._done = 0

    def step(self, number: int) -> None:
        if number != self._done:
            raise ProtocolError("a message of sealed splits that is not the next one")
        self._done += 1


class ActiveLevel(_Steps):
    """The active party's half of one level: it garbles. Methods are called in the order in which they stand."""

    def __init__(
        self,
        terms: Terms,
        nodes: Sequence[NodeSums],
        n_candidates: int,
        chooser: BitChooser,
        owner: OffsetOwner,
        randomness: RandomSource = BULK_RANDOMNESS,
    ) -> None:
        """Args: chooser: of means, from the passive party; owner: of the labels of circuits."""
        super().__init__()
        self._nodes, self._n, self._randomness = nodes, n_candidates, randomness
        self._chooser, self._owner = chooser, owner
        self._groups = _groups(terms, [node.n_rows for node in nodes])
        self._labels: list[Labels] = []
        self._words: NDArray[np.uint16] = np.zeros((len(nodes), n_candidates), dtype=np.uint16)
        self._valid: Labels = np.zeros((2, len(nodes), n_candidates), dtype=np.uint64)

    def ask(self) -> bytes:
        """Choose by the bits of the nodes' means."""
        self.step(0)
        parts = []
        for group in self._groups:
            means = [self._nodes[node].mean(group.widths) for node in group.nodes]
            bits = [mean >> place & 1 for mean in means for place in range(group.widths.product_bits)]
            labels, part = self._chooser.choose(np.array(bits, dtype=bool))
            self._labels.append(labels)
            parts.append(part)
        return b"".join(parts)

    def garble(self, offer: bytes, shares_g: Shares, shares_h: Shares) -> bytes:
        """Write the circuit of scores. Shapes: shares: uint64[n_nodes, n_candidates], of sums modulo 2^64.

        Raises:
            ProtocolError: an offer of another length.
        """
        self.step(1)
        sizes = [len(group.nodes) * self._n * corrections_bytes(group.widths.product_bits) for group in self._groups]
        n_choices = sum(len(group.nodes) * self._n * group.n_choices for group in self._groups)
        labels = self._owner.labels(offer[sum(sizes) :], n_choices)
        garbler, at, done = Garbler(self._owner.offset, self._randomness), 0, 0
        for group, of_means, size in zip(self._groups, self._labels, sizes, strict=True):
            index, n = list(group.nodes), len(group.nodes) * self._n
            known = self._known(group, shares_g[index], shares_h[index], of_means, offer[at : at + size])
            part = labels[:, done : done + n * group.n_choices]
            wires = _wires(part, group, n)
            valid, words = _score_circuit(garbler, group.widths, *wires, known)
            self._valid[:, index], self._words[index] = valid.reshape(2, -1, self._n), words.reshape(-1, self._n)
            at, done = at + size, done + n * group.n_choices
        return garbler.message()

    def decide(self, message: bytes, own: Sequence[int]) -> bytes:
        """Write the circuit of comparisons. Args: own: for each node the key that a candidate has to exceed.

        Raises:
            ProtocolError: a message of another length.
        """
        self.step(2)
        n = self._words.size
        labels = self._owner.labels(message, n * garbling.WORD_BITS)
        garbler = Garbler(self._owner.offset, self._randomness)
        own_keys = np.maximum(np.array(own, dtype=np.uint64), np.uint64(NO_SPLIT))
        _decision(garbler, labels, self._words, self._valid, own_keys)
        return garbler.message()

    def _known(self, group: _Group, shares_g: Shares, shares_h: Shares, of_means: Labels, corrections: bytes) -> _Known:
        widths, nodes = group.widths, [self._nodes[node] for node in group.nodes]
        means = [node.mean(widths) for node in nodes]
        crossed = product_shares(of_means, means, self._n, widths.product_bits, corrections)
        mean = np.array([mean % (1 << 64) for mean in means], dtype=np.uint64)[:, None]
        product = (shares_g << np.uint64(widths.mean_bits)) - mean * (shares_h + np.uint64(widths.l2)) - crossed
        halves = np.array([(node.h + 1) // 2 for node in nodes], dtype=np.uint64)[:, None]
        totals = [node.total(widths) for node in nodes]
        tables = [_side_tables(widths, total) for total in totals]
        coarse, fine = (np.repeat([pair[k] for pair in tables], self._n, axis=0) for k in (0, 1))
        return _Known(
            (shares_h - halves).reshape(-1),
            product.reshape(-1),
            np.repeat(np.array(totals, dtype=np.uint64), self._n),
            np.repeat([bool(node.h & 1) for node in nodes], self._n),
            (coarse, fine),
        )


class PassiveLevel(_Steps):
    """The passive party's half of one level: it evaluates. Methods are called in the order in which they stand."""

    def __init__(
        self, terms: Terms, n_rows: Sequence[int], n_candidates: int, chooser: BitChooser, owner: OffsetOwner
    ) -> None:
        """Args: n_rows: of each node; chooser: of labels, from the active party; owner: of corrections."""
        super().__init__()
        self._n_nodes, self._n = len(n_rows), n_candidates
        self._chooser, self._owner = chooser, owner
        self._groups = _groups(terms, n_rows)
        self._labels: Labels = np.zeros((2, 0), dtype=np.uint64)
        self._allowed: NDArray[np.bool_] = np.zeros((len(n_rows), n_candidates), dtype=bool)
        self._words: NDArray[np.uint16] = np.zeros((len(n_rows), n_candidates), dtype=np.uint16)
        self._valid: Labels = np.zeros((2, len(n_rows), n_candidates), dtype=np.uint64)

    def offer(self, ask: bytes, shares_g: Shares, shares_h: Shares, allowed: NDArray[np.bool_]) -> bytes:
        """Correct the product with the means, and choose labels. Shapes: shares, allowed: [n_nodes, n_candidates].

        Raises:
            ProtocolError: a request of another length.
        """
        self.step(0)
        self._allowed = allowed
        parts, bits, at = [], [], 0
        for group in self._groups:
            widths, index = group.widths, list(group.nodes)
            n_means = len(index) * widths.product_bits
            size = 16 * -(-n_means // 8) * 8
            labels = self._owner.labels(ask[at : at + size], n_means)
            crossed, part = product_corrections(self._owner, labels, shares_h[index], widths.product_bits)
            product = (shares_g[index] << np.uint64(widths.mean_bits)) - crossed
            parts.append(part)
            bits += [_bits(shares_h[index].reshape(-1), widths.h_bits).reshape(-1)]
            bits += [_bits(product.reshape(-1), widths.product_bits).reshape(-1), allowed[index].reshape(-1)]
            at += size
        if at != len(ask):
            raise ProtocolError("a request for sealed splits is longer than its nodes")
        self._labels, choices = self._chooser.choose(np.concatenate(bits))
        return b"".join([*parts, choices])

    def score(self, garbled: bytes) -> bytes:
        """Evaluate the circuit of scores, and choose by this party's shares of them. Raises: ProtocolError."""
        self.step(1)
        evaluator, done = Evaluator(garbled), 0
        for group in self._groups:
            index, n = list(group.nodes), len(group.nodes) * self._n
            wires = _wires(self._labels[:, done : done + n * group.n_choices], group, n)
            valid, words = _score_circuit(evaluator, group.widths, *wires, _nothing(group.widths, n))
            self._valid[:, index], self._words[index] = valid.reshape(2, -1, self._n), words.reshape(-1, self._n)
            done += n * group.n_choices
        evaluator.finish()
        shares = self._words.reshape(-1).astype(np.uint64)
        self._labels, choices = self._chooser.choose(_bits(shares, garbling.WORD_BITS).reshape(-1))
        return choices

    def winners(self, decided: bytes) -> NDArray[np.int64]:
        """Return the candidate that wins each node; -1 where the active party's split does.

        Raises:
            ProtocolError: a message of another length, or a circuit that names a split that this party's rules exclude.
        """
        self.step(2)
        evaluator = Evaluator(decided)
        nothing = np.zeros(self._n_nodes, dtype=np.uint64)
        found = _decision(evaluator, self._labels, np.zeros_like(self._words), self._valid, nothing)
        evaluator.finish()
        node = np.flatnonzero(found >= 0)
        if (found >= self._n).any() or not self._allowed[node, found[node]].all():
            raise ProtocolError("a garbled circuit names a split that is none")
        return found


def _decision(
    engine: Engine, labels: Labels, words: NDArray[np.uint16], valid: Labels, own: NDArray[np.uint64]
) -> NDArray[np.int64]:
    n = words.size
    wires = [np.ascontiguousarray(labels[:, i * n : (i + 1) * n]) for i in range(garbling.WORD_BITS)]
    known = _bits(words.reshape(-1).astype(np.uint64), garbling.WORD_BITS)
    total = garbling.add_known(engine, wires, known)
    n_nodes, n_candidates = words.shape
    return _argmax_circuit(engine, [*total, valid.reshape(2, -1)], (n_nodes, n_candidates), own)


def _nothing(widths: Widths, n: int) -> _Known:
    zeros = np.zeros(n, dtype=np.uint64)
    n_rows = 1 << len(widths.side_shifts)
    tables = np.zeros((1, n_rows << _COARSE), dtype=np.uint16), np.zeros((1, n_rows << _COARSE), dtype=np.uint16)
    return _Known(zeros, zeros, zeros, zeros.astype(bool), tables)
