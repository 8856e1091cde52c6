"""The best split under seal: the circuit against the function in the clear, and that against exact fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.two_party import garbling, split_argmax
from he_processors.two_party.split_argmax import NO_SPLIT, OCTAVE, NodeSums, Terms, score
from tests.support.examples import quick
from tests.support.two_party import Parties, messages_of_level

F = 14
LOGISTIC = Terms(1 << F, 1 << (F - 2), 1 << F, 1 << F)
SQUARED = Terms(1 << F, 1 << F, 0, 1)
"""Hessians of one, neither lambda nor min_child_weight."""
ODD = Terms(12345, 4321, 777, 1)


def drawn_nodes(terms: Terms, sizes: list[int], n_candidates: int, seed: int = 0):
    """Draw nodes and the left sums of their candidates, empty sides among them."""
    rng, nodes, left = np.random.default_rng(seed), [], []
    for n in sizes:
        p = rng.beta(0.5, 2.0, n)
        g = np.rint((p - (rng.random(n) < p)) * terms.g_bound).astype(np.int64)
        h = np.rint(4 * p * (1 - p) * terms.h_bound).astype(np.int64) if terms is not SQUARED else np.full(n, 1 << F)
        goes_left = rng.random((n_candidates, n)) < rng.random((n_candidates, 1)) ** 2
        goes_left[0], goes_left[1] = False, True  # nobody, everybody
        goes_left[2:3] = goes_left[-1]  # a tie
        nodes.append(NodeSums(int(g.sum()), int(h.sum()), n))
        left.append((goes_left @ g, goes_left @ h))
    return nodes, np.array([g for g, _ in left]), np.array([h for _, h in left])


def first_best(keys: np.ndarray, own: int = NO_SPLIT) -> int:
    best = int(np.argmax(keys))
    return best if keys[best] > own else -1


@pytest.mark.parametrize(
    ("n_candidates", "terms"),
    quick(itertools.product([3, 4, 37], [LOGISTIC, SQUARED, ODD]), (3, ODD), (4, LOGISTIC), (37, SQUARED)),
)
def test_the_circuit_gives_the_function_in_the_clear(terms, n_candidates):
    parties, sizes = Parties.of(terms), [1, 2, 40, 300, 511, 512, 5000, 300]
    for seed in range(2):
        nodes, g, h = drawn_nodes(terms, sizes, n_candidates, seed)
        allowed = np.random.default_rng(seed).random(g.shape) < 0.8
        keys = np.array(
            [score(terms.widths(n.n_rows), n, *left) * may for n, *left, may in zip(nodes, g, h, allowed, strict=True)]
        )
        own = [int(np.sort(row)[-2]) if i % 3 == 0 else NO_SPLIT for i, row in enumerate(keys)]
        own = [max(key, NO_SPLIT) for key in own]
        _, winners = messages_of_level(*parties.level(nodes, n_candidates), g, h, allowed, own)
        assert winners.tolist() == [first_best(*pair) for pair in zip(keys, own, strict=True)]


HASHED = [LOGISTIC, SQUARED, ODD, Terms(1 << F, 1 << F, 8, 1), Terms(9, 1, 0, 1)]
SIZES = [(1, 3, 16, 300), (2, 5, 12, 40, 5000)]


@pytest.mark.parametrize(
    ("n_candidates", "terms", "sizes"),
    quick(
        itertools.product([2, 5, 7], HASHED, SIZES),
        *zip([2, 5, 7, 2, 7], HASHED, [SIZES[number % 2] for number in range(5)], strict=True),
    ),
)
def test_no_key_hashes_a_label_twice(terms, n_candidates, sizes, monkeypatch):
    """Two inputs of one label under one key would show the offset, and with it all that wires carry."""
    n_hashed, encrypt = [], garbling._Hash._encrypted

    def noted(self, key, blocks):
        n_hashed.append(blocks.size // 2)
        assert np.diff(np.sort(blocks.reshape(-1, 2)[:, 0])).all()  # of random halves none comes twice either
        return encrypt(self, key, blocks)

    monkeypatch.setattr(garbling._Hash, "_encrypted", noted)
    parties = Parties.of(terms)
    for n_rows in sizes:
        nodes, g, h = drawn_nodes(terms, [n_rows, n_rows], n_candidates)
        active, passive = parties.level(nodes, n_candidates)
        messages_of_level(active, passive, g, h)
    assert max(n_hashed) > 2 * n_candidates


@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_the_active_partys_split_wins_a_tie(distance):
    nodes, g, h = drawn_nodes(LOGISTIC, [300], 5)
    keys = score(LOGISTIC.widths(300), nodes[0], g[0], h[0])
    _, winners = messages_of_level(*Parties.of(LOGISTIC).level(nodes, 5), g, h, own=[int(keys.max()) + distance])
    assert (winners[0] == np.argmax(keys)) == (distance < 0) and (winners[0] == -1) == (distance >= 0)


@pytest.mark.parametrize("may_win", [True, False])
def test_nothing_wins_where_nothing_may(may_win):
    """Neither a split of nobody, nor one that the passive party's rules exclude."""
    nodes, g, h = drawn_nodes(LOGISTIC, [300, 40], 5)
    left = (g, h) if not may_win else (np.zeros_like(g), np.zeros_like(h))
    allowed = np.full(g.shape, may_win)
    assert messages_of_level(*Parties.of(LOGISTIC).level(nodes, 5), *left, allowed)[1].tolist() == [-1, -1]


def test_a_circuit_that_names_an_excluded_split_is_refused(monkeypatch):
    """Rules of the passive party hold also against a garbler who leaves them out."""
    honest = split_argmax._score_circuit

    def lying(engine, widths, h_wires, y_wires, allowed, known):
        allowed = engine.flip(allowed, garbling.TRUE)
        return honest(engine, widths, h_wires, y_wires, allowed, known)

    monkeypatch.setattr(split_argmax, "_score_circuit", lying)
    nodes, g, h = drawn_nodes(LOGISTIC, [300], 5)
    with pytest.raises(ProtocolError, match="a split that is none"):
        messages_of_level(*Parties.of(LOGISTIC).level(nodes, 5), g, h, np.zeros(g.shape, bool))


@pytest.mark.parametrize("terms", [LOGISTIC, SQUARED, ODD])
def test_scores_are_the_logarithm_of_the_gain(terms):
    """Against fractions: nine bits of |Y| and of both sides are kept, and the mean's fraction bits count."""
    nodes, g, h = drawn_nodes(terms, [40, 300, 5000, 20000], 60, 3)
    n_compared = 0
    for node, left_g, left_h in zip(nodes, g, h, strict=True):
        widths = terms.widths(node.n_rows)
        for key, gl, hl in zip(score(widths, node, left_g, left_h), left_g.tolist(), left_h.tolist(), strict=True):
            a, b = hl + terms.l2, node.h - hl + terms.l2
            if min(hl, node.h - hl) < terms.least_hessian:
                assert key <= NO_SPLIT
                continue
            y = abs(gl - Fraction(node.g * a, node.total(widths)))
            assert key > NO_SPLIT or y < 1 << 8
            if y > max(1 << 9, Fraction(a, 1 << (widths.mean_bits - 7))):
                gain = Fraction(gl**2, a) + Fraction((node.g - gl) ** 2, b) - Fraction(node.g**2, a + b)
                expected = OCTAVE * (math.log2(gain) + widths.h_bits)
                assert abs((key & NO_SPLIT) - expected) < 0.06 * OCTAVE
                n_compared += 1
    assert n_compared > 80


def test_least_sums_of_hessians_are_exact():
    node, widths = NodeSums(-900_000, 10 * LOGISTIC.least_hessian, 200), LOGISTIC.widths(200)
    least = LOGISTIC.least_hessian
    h = np.array([least - 1, least, node.h - least, node.h - least + 1])
    keys = score(widths, node, np.full(4, 500_000), h)
    assert (keys > NO_SPLIT).tolist() == [False, True, True, False]
    for i, key in enumerate(keys.tolist()):
        level = Parties.of(LOGISTIC).level([node], 1)
        _, winners = messages_of_level(*level, np.array([[500_000]]), h[None, i : i + 1])
        assert winners.tolist() == [0 if key > NO_SPLIT else -1]


def test_messages_have_lengths_that_depend_on_public_numbers_alone():
    sizes, lengths = [300, 511, 40], set()
    parties = Parties.of(LOGISTIC)
    for seed in range(3):
        nodes, g, h = drawn_nodes(LOGISTIC, sizes, 6, seed)
        said, _ = messages_of_level(*parties.level(nodes, 6), g, h, np.full(g.shape, seed > 0))
        lengths.add(tuple(map(len, said)))
    assert len(lengths) == 1


def test_messages_out_of_their_order_are_refused():
    nodes, g, h = drawn_nodes(LOGISTIC, [300, 40], 4)
    parties = Parties.of(LOGISTIC)
    active, passive = parties.level(nodes, 4)
    said, _ = messages_of_level(active, passive, g, h)
    zeros, may = np.zeros(g.shape, np.uint64), np.ones(g.shape, bool)
    for repeated in (
        active.ask,
        lambda: passive.offer(said[0], zeros, zeros, may),
        lambda: active.garble(said[1], zeros, zeros),
        lambda: passive.score(said[2]),
        lambda: active.decide(said[3], [NO_SPLIT] * 2),
        lambda: passive.winners(said[4]),
        lambda: parties.level(nodes, 4)[1].winners(said[4]),
    ):
        with pytest.raises(ProtocolError, match="not the next one"):
            repeated()


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + bytes(128), lambda data: b""])
def test_messages_of_another_length_are_refused(place, change):
    nodes, g, _ = drawn_nodes(LOGISTIC, [300], 4)
    active, passive = Parties.of(LOGISTIC).level(nodes, 4)
    zeros, may = np.zeros(g.shape, np.uint64), np.ones(g.shape, bool)
    steps = (
        lambda data: active.ask(),
        lambda data: passive.offer(data, zeros, zeros, may),
        lambda data: active.garble(data, zeros, zeros),
        passive.score,
        lambda data: active.decide(data, [NO_SPLIT]),
        passive.winners,
    )
    said = b""
    with pytest.raises(ProtocolError, match=r"length|longer|shorter"):
        for number, step in enumerate(steps):
            said = step(change(said) if number == place + 1 else said)


def test_more_rows_than_fit_are_refused():
    Terms(1 << F, 1 << F, 1 << F, 1).widths(1 << 20)
    with pytest.raises(CapacityExceeded, match="coarser grid"):
        Terms(1 << F, 1 << F, 1 << F, 1).widths(1 << 40)
