"""Garbled circuits against plain integers: what the evaluator reads, and what it may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from he_processors.errors import ProtocolError
from he_processors.two_party import garbling
from he_processors.two_party.garbling import Engine, Evaluator, Garbler
from he_processors.two_party.oblivious_transfer import Labels
from tests.support.two_party import transfers

N, BITS = 300, 9
Circuit = Callable[[Engine, list[list[Labels]]], Sequence[Labels]]


def run(circuit: Circuit, *numbers: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Evaluate a circuit over numbers that the evaluator chose; return the number that it reads, and the message."""
    owner, chooser = transfers()
    bits = np.array([number >> place & 1 for number in numbers for place in range(BITS)], dtype=bool)
    labels, choices = chooser.choose(bits.reshape(-1))

    def wires(of: Labels) -> list[list[Labels]]:
        each = [of[:, i * N : (i + 1) * N] for i in range(BITS * len(numbers))]
        return [each[i : i + BITS] for i in range(0, len(each), BITS)]

    garbler = Garbler(owner.offset)
    for wire in circuit(garbler, wires(owner.labels(choices, bits.size))):
        garbler.reveal(wire)
    message = garbler.message()
    evaluator = Evaluator(message)
    found = [evaluator.reveal(wire) for wire in circuit(evaluator, wires(labels))]
    evaluator.finish()
    return sum(bit.astype(np.int64) << i for i, bit in enumerate(found)), message


def drawn(seed: int, most: int = (1 << BITS) - 1) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, most + 1, N)
    values[:4] = 0, 1, most, most - 1
    return values


def bits_of(values: np.ndarray) -> np.ndarray:
    return (values >> np.arange(BITS)[:, None] & 1).astype(bool)


@pytest.mark.parametrize("plus_one", [False, True])
def test_sums_with_the_garblers_numbers(plus_one):
    own, known = drawn(1), drawn(2)

    def circuit(engine, wires):
        secret = known if isinstance(engine, Garbler) else known * 0
        return garbling.add_known(engine, wires[0], bits_of(secret), plus_one=plus_one)

    assert np.array_equal(run(circuit, own)[0], (own + known + plus_one) % (1 << BITS))


@pytest.mark.parametrize("bound", [1, 2, 3, 64, 100, 511])
def test_bounds(bound):
    values = drawn(bound)
    values[4:7] = bound - 1, bound, min(bound + 1, 511)
    found, _ = run(lambda engine, wires: [garbling.at_least(engine, wires[0], bound)], values)
    assert np.array_equal(found, values >= bound)


def test_comparison_and_choice():
    a, b = drawn(3), drawn(4)
    a[10:20] = b[10:20]

    def circuit(engine, wires):
        more = garbling.is_more(engine, wires[0], wires[1])
        larger = [garbling.chosen(engine, more, x, y) for x, y in zip(*wires, strict=True)]
        return [*larger, more, garbling.either(engine, *(one[0] for one in wires))]

    found, _ = run(circuit, a, b)
    assert np.array_equal(found, np.maximum(a, b) | (a > b) << BITS | ((a | b) & 1) << (BITS + 1))


@pytest.mark.parametrize("most", range(8))
def test_normalised_numbers_have_their_highest_bit_set(most):
    shifts, values = garbling.shifts_up_to(most), drawn(5)
    assert sum(shifts) == most

    def circuit(engine, wires):
        flags, bits = garbling.normalised(engine, wires[0][::-1], shifts, BITS - most)
        return [*flags, *bits[::-1]]

    found, _ = run(circuit, values)
    for value, result in zip(values.tolist(), found.tolist(), strict=True):
        shift = min(most, BITS - value.bit_length())
        made = sum(s for i, s in enumerate(shifts) if result >> i & 1)
        assert made == shift and result >> len(shifts) == (value << shift) % (1 << BITS) >> most


def test_tables_are_read_as_shares():
    owner, chooser = transfers()
    values, rng = drawn(6), np.random.default_rng(7)
    labels, choices = chooser.choose(bits_of(values).reshape(-1))
    zero = owner.labels(choices, BITS * N)
    tables = rng.integers(0, 1 << 16, (N, 1 << BITS)).astype(np.uint16)
    for each in (tables, tables[:1]):
        garbler = Garbler(owner.offset)
        own = garbler.look_up([zero[:, i * N : (i + 1) * N] for i in range(BITS)], each)
        evaluator = Evaluator(garbler.message())
        opened = evaluator.look_up([labels[:, i * N : (i + 1) * N] for i in range(BITS)], np.zeros_like(each))
        evaluator.finish()
        assert np.array_equal(own + opened, each[np.arange(N) % len(each), values])
        # What the evaluator opens is uniform: five standard errors of the mean of 300 words.
        assert abs(opened.mean() - 2**15) < 5 * 2**16 / np.sqrt(12 * N)


def test_a_wrong_label_opens_nothing():
    """Who holds the labels of other bits than were chosen reads something else: the tables are bound to labels."""
    owner, chooser = transfers()
    labels, choices = chooser.choose(np.zeros(2 * N, dtype=bool))
    zero = owner.labels(choices, 2 * N)
    garbler = Garbler(owner.offset)
    wire = garbler.both(zero[:, :N], zero[:, N:])
    guessed = labels ^ np.uint64(2)
    result = Evaluator(garbler.message()).both(guessed[:, :N], guessed[:, N:])
    assert not (result == wire).any() and not (result == (wire ^ owner.offset)).any()


def test_constants_have_labels_of_their_own():
    assert np.unique(garbling.zero_wire(1000), axis=1).shape == (2, 1000)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:8]])
def test_messages_of_another_length_are_refused(change):
    owner, chooser = transfers()
    labels, choices = chooser.choose(np.zeros(2 * N, dtype=bool))
    zero = owner.labels(choices, 2 * N)
    garbler = Garbler(owner.offset)
    garbler.both(zero[:, :N], zero[:, N:])
    with pytest.raises(ProtocolError, match=r"shorter|longer"):
        evaluator = Evaluator(change(garbler.message()))
        evaluator.both(labels[:, :N], labels[:, N:])
        evaluator.finish()
