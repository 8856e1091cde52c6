from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from he_processors.bignum.reference import ReferenceBatch
from he_processors.bignum.registry import available_backends, open_backend
from he_processors.errors import ProtocolError
from he_processors.fixed_point import REFUSED, PackingLayout, PairFormat
from he_processors.histogram.planner import BinLayout, HistogramPlan, child_to_build, plan_level
from he_processors.histogram.sums import (
    BinSums,
    NodeTotal,
    check_node,
    decrypt_level,
    pack_and_hide,
    subtract_sibling,
    sum_bins,
)
from he_processors.paillier import PaillierDecryptor, Rerandomiser, owner_encryptor
from tests.support.he_toys import toy_paillier

N_ROWS = 900
LAYOUT = BinLayout((6, 3, 20, 1, 5))
RNG = np.random.default_rng(7)
CODES = np.stack([RNG.integers(0, n + 1, N_ROWS) for n in LAYOUT.n_bins]).astype(np.uint8)
FORMAT = PairFormat.logistic(40, N_ROWS)
G, H = FORMAT.encode_pairs(RNG.uniform(-1, 1, N_ROWS), RNG.uniform(0, 0.25, N_ROWS))
NODES = [
    np.arange(N_ROWS, dtype=np.int32),
    np.flatnonzero(RNG.random(N_ROWS) < 0.3).astype(np.int32),
    np.array([], dtype=np.int32),
    np.array([17], dtype=np.int32),
]


def naive(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Add row by row: the twin of everything below."""
    sums = np.zeros(LAYOUT.n_slots, dtype=np.int64)
    for row in rows:
        for feature in range(LAYOUT.n_features):
            sums[LAYOUT.starts[feature] + CODES[feature, row]] += values[row]
    return sums


def run_on_integers(plan: HistogramPlan, values: list[int], modulus: int) -> list[int]:
    return sum_bins(ReferenceBatch(modulus), values, plan)


@pytest.mark.parametrize("use_pairs", [True, False])
def test_plan_multiplies_the_right_rows(use_pairs: bool) -> None:
    modulus = 2**61 - 1
    values = [int(v) for v in RNG.integers(1, modulus, N_ROWS)]
    plan = plan_level(CODES, LAYOUT, NODES, use_pairs=use_pairs)
    got = run_on_integers(plan, values, modulus)
    assert len(got) == len(NODES) * LAYOUT.n_slots
    for node, rows in enumerate(NODES):
        expected = [1] * LAYOUT.n_slots
        for row in rows:
            for feature in range(LAYOUT.n_features):
                slot = LAYOUT.starts[feature] + CODES[feature, row]
                expected[slot] = expected[slot] * values[row] % modulus
        assert got[node * LAYOUT.n_slots : (node + 1) * LAYOUT.n_slots] == expected


def test_cells_of_pairs_save_products_where_they_are_few() -> None:
    with_pairs = plan_level(CODES, LAYOUT, NODES[:1])
    without = plan_level(CODES, LAYOUT, NODES[:1], use_pairs=False)
    assert with_pairs.n_products < 0.7 * without.n_products
    many_bins = BinLayout((250, 250))
    codes = RNG.integers(0, 251, (2, 400)).astype(np.uint8)
    rows = [np.arange(400, dtype=np.int32)]
    without = plan_level(codes, many_bins, rows, use_pairs=False)
    assert plan_level(codes, many_bins, rows).n_products == without.n_products


@pytest.mark.parametrize(
    ("costs", "rows_per_cell", "is_paired"),
    [({}, 2, False), ({}, 4, True), ({"cell_cost": 10}, 11, False), ({"cell_cost": 10}, 12, True)],
)
def test_pairs_pay_from_three_rows_in_a_cell_and_from_more_where_cells_are_dear(
    costs: dict[str, int], rows_per_cell: int, is_paired: bool
) -> None:
    cells = np.tile(np.arange(100), rows_per_cell)
    codes = np.stack([cells // 10, cells % 10]).astype(np.uint8)
    layout, rows = BinLayout((10, 10)), [np.arange(cells.size, dtype=np.int32)]
    plan = plan_level(codes, layout, rows, **costs)
    assert (plan.n_products < plan_level(codes, layout, rows, use_pairs=False).n_products) == is_paired


def test_planned_products_are_counted_exactly() -> None:
    n_products = 0

    class Counting(ReferenceBatch):
        def segprod(self, residues, order, starts):
            nonlocal n_products
            n_products += int(np.maximum(np.diff(starts) - 1, 0).sum())
            return super().segprod(residues, order, starts)

    plan = plan_level(CODES, LAYOUT, NODES)
    sum_bins(Counting(2**61 - 1), [3] * N_ROWS, plan)
    assert n_products == plan.n_products


def test_large_levels_are_cut_into_blocks() -> None:
    values = list(range(1, N_ROWS + 1))
    one_block = plan_level(CODES, LAYOUT, NODES)
    assert len(one_block.blocks) == 1
    for block_rows in (1, 1000, 2000):
        plan = plan_level(CODES, LAYOUT, NODES, block_rows=block_rows)
        assert len(plan.blocks) >= 2
        assert run_on_integers(plan, values, 2**61 - 1) == run_on_integers(one_block, values, 2**61 - 1)


def test_bins_that_need_sixteen_bits() -> None:
    layout = BinLayout((256, 300))
    codes = np.stack([RNG.integers(0, 257, 3000), RNG.integers(0, 301, 3000)]).astype(np.uint16)
    layout.check_codes(codes)
    plan = plan_level(codes, layout, [np.arange(3000, dtype=np.int32)])
    got = sum_bins(ReferenceBatch(2**3001 - 1), [2] * 3000, plan)
    counts = [value.bit_length() - 1 for value in got]
    expected = [np.bincount(codes[0], minlength=257), np.bincount(codes[1], minlength=301)]
    assert counts == np.concatenate(expected).tolist()


def test_the_child_with_fewer_rows_is_built() -> None:
    assert child_to_build(3, 10, 4, 20) == 3
    assert child_to_build(3, 21, 4, 20) == 4
    assert child_to_build(3, 20, 4, 20) == 3
    assert child_to_build(4, 20, 3, 20) == 3


def test_codes_are_checked() -> None:
    LAYOUT.check_codes(CODES)
    with pytest.raises(TypeError):
        LAYOUT.check_codes(CODES.astype(np.int64))
    with pytest.raises(ValueError):
        LAYOUT.check_codes(CODES[:-1])
    bad = CODES.copy()
    bad[3, 5] = 2
    with pytest.raises(ValueError):
        LAYOUT.check_codes(bad)
    for n_bins in ((), (0,), (1 << 16,)):
        with pytest.raises(ValueError):
            BinLayout(n_bins)


# The slow twin re-randomises for seconds; that it computes as the others do is the contract of all.
@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=[pytest.mark.slow] if b == "reference" else []) for b in available_backends()]
)
def test_whole_round_is_exact(backend: str) -> None:
    key = toy_paillier()
    public_key, encryptor, decryptor = key.public_key, owner_encryptor(key, backend), PaillierDecryptor(key, backend)
    packing = PackingLayout.fit(FORMAT, decryptor.plaintext_bits)
    ciphertexts = encryptor.encrypt(FORMAT.plaintext_rows(G, H))
    arithmetic = open_backend(backend, public_key.modulus)  # the passive party's own
    ciphertexts = arithmetic.from_wire(encryptor.arithmetic.to_wire(ciphertexts))
    bins = sum_bins(arithmetic, ciphertexts, plan_level(CODES, LAYOUT, NODES))
    hidden = pack_and_hide(bins, packing, Rerandomiser(public_key, arithmetic))
    totals = [NodeTotal.of_rows(G[rows], H[rows]) for rows in NODES]
    sums = decrypt_level(arithmetic.to_wire(hidden), decryptor, packing, LAYOUT, totals)
    for rows, node_sums in zip(NODES, sums, strict=True):
        assert node_sums.g.tolist() == naive(G, rows).tolist()
        assert node_sums.h.tolist() == naive(H, rows).tolist()


def _sums(rows: np.ndarray) -> BinSums:
    return BinSums(naive(G, rows), naive(H, rows))


def test_sibling_by_subtraction() -> None:
    child, sibling = NODES[1], np.setdiff1d(NODES[0], NODES[1])
    total = NodeTotal.of_rows(G[NODES[0]], H[NODES[0]]).minus(NodeTotal.of_rows(G[child], H[child]))
    assert total == NodeTotal.of_rows(G[sibling], H[sibling])
    got = subtract_sibling(_sums(NODES[0]), _sums(child), total, LAYOUT, FORMAT)
    assert got.g.tolist() == naive(G, sibling).tolist() and got.h.tolist() == naive(H, sibling).tolist()
    with pytest.raises(ProtocolError, match=REFUSED):
        subtract_sibling(_sums(NODES[0]), _sums(child), replace(total, h=total.h + 1), LAYOUT, FORMAT)


def test_bins_must_add_up_to_the_node_in_every_feature() -> None:
    rows = NODES[1]
    total = NodeTotal.of_rows(G[rows], H[rows])
    check_node(_sums(rows), total, LAYOUT, FORMAT)
    for slot in (0, int(LAYOUT.starts[3]), LAYOUT.n_slots - 1):
        for field in ("g", "h"):
            sums = _sums(rows)
            getattr(sums, field)[slot] += 1
            with pytest.raises(ProtocolError, match=REFUSED):
                check_node(sums, total, LAYOUT, FORMAT)
    moved = _sums(rows)  # from one feature to another
    moved.g[[0, LAYOUT.n_slots - 1]] += [1, -1]
    with pytest.raises(ProtocolError, match=REFUSED):
        check_node(moved, total, LAYOUT, FORMAT)


def test_bins_must_lie_within_the_bounds_of_their_node() -> None:
    # Sums agree, but no single row has a gradient beyond 1.
    rows = NODES[3]
    sums = _sums(rows)
    total = NodeTotal.of_rows(G[rows], H[rows])
    sums.g[0] += 2 << 40
    sums.g[1] -= 2 << 40
    with pytest.raises(ProtocolError, match=REFUSED):
        check_node(sums, total, LAYOUT, FORMAT)
    sums = _sums(rows)
    sums.h[0], sums.h[1] = sums.h[0] - 1, sums.h[1] + 1
    with pytest.raises(ProtocolError, match=REFUSED):
        check_node(sums, total, LAYOUT, FORMAT)


def test_node_sums_beyond_int64_are_compared_without_wrapping() -> None:
    pair_format = PairFormat(0, 1, g_bound=2.0**62, h_low=0.0, h_high=1.0)
    layout = BinLayout((4,))
    sums = BinSums(np.full(5, 2**62, dtype=np.int64), np.zeros(5, dtype=np.int64))
    wrapped = int(np.sum(sums.g))  # 5 * 2^62 modulo 2^64
    assert wrapped != 5 * 2**62
    check_node(sums, NodeTotal(1, 5 * 2**62, 0), layout, pair_format)
    with pytest.raises(ProtocolError, match=REFUSED):
        check_node(sums, NodeTotal(1, wrapped, 0), layout, pair_format)


def test_impossible_row_counts_are_refused() -> None:
    for n_rows in (-1, N_ROWS + 1):
        with pytest.raises(ProtocolError, match=REFUSED):
            check_node(_sums(NODES[3]), NodeTotal(n_rows, 0, 0), LAYOUT, FORMAT)
