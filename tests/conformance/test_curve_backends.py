"""One contract for every backend of the curve, compared with Python integers."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.curve import registry
from he_processors.curve.interface import FIELD_PRIME, GROUP_ORDER, Curve, Points, to_compressed
from he_processors.errors import ProtocolError
from tests.support.curve_toys import (
    REFERENCE,
    affine_rows,
    base_rows,
    both_forms,
    sample_rows,
    scalar_rows,
    segment_sums,
    small_order_rows,
)
from tests.support.examples import examples

BACKENDS = registry.available_backends()
FORMS = pytest.mark.parametrize("form", [0, 1], ids=["as read", "as summed"])
PAIRS = list(itertools.product(range(len(sample_rows())), repeat=2))


@pytest.fixture(params=BACKENDS)
def curve(request: pytest.FixtureRequest) -> Curve:
    return registry.load_backend(request.param)


@pytest.fixture(params=[name for name in BACKENDS if name != "reference"])
def compiled(request: pytest.FixtureRequest) -> Curve:
    return registry.load_backend(request.param)


@pytest.mark.parametrize("name", registry.BACKEND_NAMES)
def test_every_backend_runs_on_this_machine(name: str) -> None:
    """The only one that says so: the others are not even made for a backend that does not run."""
    if name not in BACKENDS:
        pytest.skip(f"{name} does not run on this machine")


def same(curve: Curve, points: Points, expected: object) -> bool:
    rows = curve.to_affine(points)
    assert rows.dtype == np.uint8 and rows.shape == (len(points), 64)
    return bool(np.array_equal(rows, REFERENCE.to_affine(expected)))


def test_points_come_back_as_they_went_in(curve: Curve) -> None:
    rows = sample_rows()
    for n in (0, 1, 7, 8, 9, 16, len(rows)):  # whole groups of lanes and what is left over
        for points in both_forms(curve, rows[:n]):
            assert np.array_equal(curve.to_affine(points), rows[:n])


def test_bytes_may_lie_anywhere(curve: Curve) -> None:
    rows = sample_rows()
    shifted = np.frombuffer(b"\0" + rows.tobytes(), dtype=np.uint8)[1:].reshape(-1, 64)
    strided = np.hstack([rows, rows])[::2, :64]
    assert np.array_equal(curve.to_affine(curve.from_affine(shifted)), rows)
    assert np.array_equal(curve.to_affine(curve.from_affine(strided)), rows[::2])


def test_every_pair_of_points_adds_up(curve: Curve) -> None:
    left, right = (np.array(column) for column in zip(*PAIRS, strict=True))
    points = REFERENCE.from_affine(sample_rows())
    expected = REFERENCE.to_affine(REFERENCE.add(REFERENCE.take(points, left), REFERENCE.take(points, right)))
    for a, b in itertools.product(both_forms(curve, sample_rows()), repeat=2):
        total = curve.add(curve.take(a, left), curve.take(b, right))
        assert np.array_equal(curve.to_affine(total), expected)


def test_a_batch_may_be_added_to_itself_and_is_not_changed(curve: Curve) -> None:
    """Chains of operations on one batch: no result may lie over what it is made of."""
    rows = sample_rows()
    expected = REFERENCE.from_affine(rows)
    three = REFERENCE.add(REFERENCE.double(expected, 1), expected)
    for points in both_forms(curve, rows):
        double = curve.add(points, points)
        six = curve.add(curve.add(double, points), curve.add(points, double))
        chain = curve.add(six, curve.negate(curve.add(points, double)))
        assert same(curve, double, REFERENCE.double(expected, 1))
        assert same(curve, chain, three)
        assert same(curve, curve.negate(six), REFERENCE.negate(REFERENCE.double(three, 1)))
        assert np.array_equal(curve.to_affine(points), rows)


def test_long_chains_never_leave_their_range(curve: Curve) -> None:
    """Doublings and additions in turn: limbs that grew from step to step would overflow at last."""
    rows = sample_rows()[::5]
    for points in both_forms(curve, rows):
        expected = total = REFERENCE.from_affine(rows)
        chain = points
        for _ in range(12):
            chain = curve.negate(curve.add(curve.double(chain, 3), curve.add(chain, points)))
            total = REFERENCE.negate(REFERENCE.add(REFERENCE.double(total, 3), REFERENCE.add(total, expected)))
        assert same(curve, chain, total)


@FORMS
@pytest.mark.parametrize("times", [0, 1, 2, 3, 50])
def test_doubling(curve: Curve, form: int, times: int) -> None:
    points = both_forms(curve, sample_rows())[form]
    assert same(curve, curve.double(points, times), REFERENCE.double(REFERENCE.from_affine(sample_rows()), times))


def test_a_point_less_itself_is_neutral(curve: Curve) -> None:
    for points in both_forms(curve, sample_rows()):
        zero = curve.add(points, curve.negate(points))
        assert curve.equal(zero, curve.identity(len(points))).all()
        assert np.array_equal(curve.to_affine(zero), curve.to_affine(curve.identity(len(points))))


def test_equality_is_of_points_and_sees_torsion(curve: Curve) -> None:
    rows = sample_rows()
    left, right = (np.array(column) for column in zip(*PAIRS, strict=True))
    expected = (rows[left] == rows[right]).all(axis=1)
    for a, b in itertools.product(both_forms(curve, rows), repeat=2):
        found = curve.equal(curve.take(a, left), curve.take(b, right))
        assert found.dtype == np.bool_ and np.array_equal(found, expected)
    assert not curve.equal(curve.from_affine(small_order_rows()[1:]), curve.identity(7)).any()


def test_keys_of_points(curve: Curve) -> None:
    rows = sample_rows()
    for points in both_forms(curve, rows):
        words, odd = curve.y_words(points)
        assert words.dtype == np.uint64 and odd.dtype == np.uint8
        assert words.tolist() == [y % 2**64 for y in ints_from_rows(rows[:, 32:])]
        assert odd.tolist() == (rows[:, 0] & 1).tolist()


def test_a_column_takes_batches_in_order_and_exactly_so_many_points(curve: Curve) -> None:
    rows = sample_rows()
    column = curve.column(len(rows))
    for part in (rows[:0], rows[:3], rows[3:-1]):
        column.append(curve.from_affine(part))
    with pytest.raises(ValueError, match="lacks"):
        column.whole()
    with pytest.raises(ValueError, match="room"):
        column.append(curve.from_affine(rows[:2]))
    column.append(curve.from_affine(rows[-1:]))
    assert np.array_equal(curve.to_affine(column.whole()), rows)
    assert len(curve.column(0).whole()) == 0


def test_take_and_concat(curve: Curve) -> None:
    rows = sample_rows()
    index = np.array([3, 0, 0, len(rows) - 1], dtype=np.int64)
    read, summed = both_forms(curve, rows)
    for points in (read, summed):
        taken = curve.take(points, index)
        assert np.array_equal(curve.to_affine(taken), rows[index])
        for bad in (-1, len(rows)):
            with pytest.raises(IndexError):
                curve.take(points, np.array([0, bad], dtype=np.int64))
    joined = curve.concat([read, curve.take(summed, index), read])
    assert np.array_equal(curve.to_affine(joined), np.concatenate([rows, rows[index], rows]))
    assert np.array_equal(curve.to_affine(curve.concat([summed, summed])), np.concatenate([rows, rows]))
    assert len(curve.concat([])) == 0


@FORMS
def test_segment_sums(curve: Curve, form: int) -> None:
    rows = sample_rows()
    points = both_forms(curve, rows)[form]
    rng = np.random.default_rng(3)
    lengths = [0, 1, 2, 0, 3, 40, 1, 0, 7, 5, 33, 64, 0]
    starts = np.concatenate([[2], 2 + np.cumsum(lengths)]).astype(np.int64)  # rows before the first segment: unused
    order = rng.integers(0, len(rows), starts[-1] + 3).astype(np.int32)  # and rows after the last one
    expected = segment_sums(REFERENCE, REFERENCE.from_affine(rows), order, starts)
    sums = segment_sums(curve, points, order, starts)
    assert same(curve, sums, expected)
    again = segment_sums(curve, sums, np.arange(len(lengths), dtype=np.int32)[::-1], np.array([0, 5, 5, len(lengths)]))
    flipped = segment_sums(REFERENCE, expected, np.arange(len(lengths), dtype=np.int32)[::-1], np.array([0, 5, 5, 13]))
    assert same(curve, again, flipped)
    assert np.array_equal(curve.to_affine(points), rows)
    prepared = curve.segment_sums(order, starts, len(rows))
    assert all(same(curve, prepared(column), expected) for column in both_forms(curve, rows))
    with pytest.raises(ValueError, match="different length"):
        prepared(curve.identity(len(rows) + 1))


@FORMS
def test_long_segments_among_short_ones(compiled: Curve, form: int) -> None:
    """100,000 points in one segment; the sum of known multiples of the base point is one multiplication."""
    curve = compiled
    rng = np.random.default_rng(4)
    values = rng.integers(0, 1 << 40, 200)
    table = curve.fixed_base(curve.from_affine(base_rows()))
    points = table.mul(np.ascontiguousarray(values.astype("<u8")[:, None].view(np.uint8)))
    if form == 0:
        points = curve.from_affine(curve.to_affine(points))
    starts = np.concatenate([[0], np.cumsum([1300, 0, 1, 100_000, 513, 512, 511, 3])]).astype(np.int64)
    order = rng.integers(0, len(values), starts[-1]).astype(np.int32)
    totals = [int(values[order[begin:end]].sum()) for begin, end in itertools.pairwise(starts)]
    expected = table.mul(rows_from_ints(totals, 8))
    assert curve.equal(segment_sums(curve, points, order, starts), expected).all()


def test_segment_sums_refuse_bad_segments(curve: Curve) -> None:
    points = curve.identity(3)
    for starts in ([0, 2, 1], [0, 3], [-1, 2]):
        with pytest.raises(ValueError):
            segment_sums(curve, points, np.array([0, 1], np.int32), np.array(starts, np.int64))
    for bad in (3, -1):
        with pytest.raises(IndexError):
            segment_sums(curve, points, np.array([0, bad], np.int32), np.array([0, 2], np.int64))


@pytest.mark.parametrize("width", [1, 3, 8, 31, 32])
def test_multiples_of_a_fixed_base(curve: Curve, width: int) -> None:
    small = rows_from_ints([0, 1, 127, 128, 129, 255], 1)
    scalars = scalar_rows(17, width)[:, :width] if width == 32 else np.pad(small, ((0, 0), (0, width - 1)))
    if 1 < width < 32:
        scalars = np.concatenate([scalars, np.full((1, width), 0xFF, np.uint8)])
    for row in (base_rows(), sample_rows()[3:4], sample_rows()[-5:-4]):  # of prime order, small order, and with torsion
        expected = REFERENCE.fixed_base(REFERENCE.from_affine(row)).mul(scalars)
        for base in both_forms(curve, row):
            multiples = curve.fixed_base(base).mul(scalars)
            assert same(curve, multiples, expected)


def test_a_fixed_base_takes_scalars_of_changing_width_and_number(curve: Curve) -> None:
    table = curve.fixed_base(curve.from_affine(base_rows()))
    base = REFERENCE.fixed_base(REFERENCE.from_affine(base_rows()))
    wide = scalar_rows(12, 7)
    for scalars in (wide[:1], wide[:, :3], np.tile(wide, (40, 1)), wide[:, :1], wide):
        multiples = curve.take(table.mul(scalars), np.arange(min(12, len(scalars))))
        assert same(curve, multiples, base.mul(scalars[:12]))


@FORMS
def test_a_scalar_for_each_point(curve: Curve, form: int) -> None:
    rows, scalars, expected = _multiples()
    assert same(curve, curve.mul(both_forms(curve, rows)[form], scalars), expected)


@cache
def _multiples() -> tuple[NDArray[np.uint8], NDArray[np.uint8], Points]:
    rows = sample_rows()
    scalars = scalar_rows(len(rows), 5)
    return rows, scalars, REFERENCE.mul(REFERENCE.from_affine(rows), scalars)


@FORMS
def test_each_of_some_scalars_for_every_point(curve: Curve, form: int) -> None:
    rows, scalars, expected = _multiples_by_each()
    found = curve.mul_by_each(both_forms(curve, rows)[form], scalars)
    assert len(found) == len(scalars)
    assert all(same(curve, a, b) for a, b in zip(found, expected, strict=True))
    assert curve.mul_by_each(curve.identity(3), scalars[:0]) == []


@cache
def _multiples_by_each() -> tuple[NDArray[np.uint8], NDArray[np.uint8], list[Points]]:
    rows, scalars = sample_rows()[::2], scalar_rows(11, 6)
    return rows, scalars, REFERENCE.mul_by_each(REFERENCE.from_affine(rows), scalars)


EDGES = [0, 1, 2**64 - 1, 2**125, GROUP_ORDER // 2, 2**252 - 1, 2**252, GROUP_ORDER - 2, GROUP_ORDER - 1]
SCALARS = st.one_of(st.sampled_from(EDGES), st.integers(0, GROUP_ORDER - 1))


def test_scalars_times_factors_at_all_edges(curve: Curve) -> None:
    scalars = rows_from_ints(EDGES, 32)
    for shift in (0, 1, -1, -(2**20), GROUP_ORDER - 1):
        found = curve.scale(scalars, [*EDGES, -1, GROUP_ORDER + 3], shift)
        for factor, rows in zip([*EDGES, -1, GROUP_ORDER + 3], found, strict=True):
            assert ints_from_rows(rows) == [(s * factor + shift) % GROUP_ORDER for s in EDGES]
    assert curve.scale(scalars[:0], [7], 1)[0].shape == (0, 32)
    assert curve.scale(scalars, [], 1) == []


@given(st.lists(SCALARS, max_size=40), SCALARS, SCALARS, st.integers(-(2**20), 2**20))
def test_scalars_times_factors_are_those_of_integers(scalars: list[int], factor: int, other: int, shift: int) -> None:
    rows = rows_from_ints(scalars, 32).reshape(-1, 32)
    expected = [[(s * f + shift) % GROUP_ORDER for s in scalars] for f in (factor, other)]
    for name in BACKENDS:
        found = registry.load_backend(name).scale(rows, [factor, other], shift)
        assert [ints_from_rows(one) for one in found] == expected


def test_scalars_from_the_group_order_up_are_refused(curve: Curve) -> None:
    points = curve.from_affine(base_rows())
    for bad in (GROUP_ORDER, GROUP_ORDER + 1, 2**253, 2**256 - 1):
        scalars = rows_from_ints([bad], 32)
        for call in (
            curve.fixed_base(points).mul,
            lambda s: curve.mul(points, s),
            lambda s: curve.mul_by_each(points, s),
            lambda s: curve.scale(s, [1], 0),
        ):
            with pytest.raises(ValueError):
                call(scalars)


def test_shapes_that_do_not_fit_are_refused(curve: Curve) -> None:
    two, three = curve.identity(2), curve.identity(3)
    narrow, wide = np.zeros((2, 31), np.uint8), np.zeros((2, 33), np.uint8)
    calls = [
        lambda: curve.add(two, three),
        lambda: curve.equal(two, three),
        lambda: curve.mul(two, np.zeros((3, 32), np.uint8)),
        lambda: curve.mul(two, narrow),
        lambda: curve.mul_by_each(two, wide),
        lambda: curve.scale(narrow, [1], 0),
        lambda: curve.scale(wide, [1], 0),
        lambda: curve.fixed_base(two),
        lambda: curve.fixed_base(curve.identity(1)).mul(wide),
        lambda: curve.fixed_base(curve.identity(1)).mul(np.zeros((2, 0), np.uint8)),
        lambda: curve.from_affine(np.zeros((2, 63), np.uint8)),
        lambda: curve.from_affine(np.zeros((2, 64), np.int64)),
        lambda: curve.from_compressed(narrow),
        lambda: curve.from_ristretto(narrow),
        lambda: curve.from_uniform(np.zeros((2, 65), np.uint8)),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


def test_empty_batches(curve: Curve) -> None:
    none = curve.identity(0)
    no_rows, no_scalars = np.zeros(0, np.int32), np.zeros((0, 32), np.uint8)
    results = [
        curve.from_affine(np.zeros((0, 64), np.uint8)),
        curve.from_compressed(no_scalars),
        curve.from_ristretto(no_scalars),
        curve.from_uniform(np.zeros((0, 64), np.uint8)),
        curve.take(curve.identity(1), np.zeros(0, np.int64)),
        curve.add(none, none),
        curve.negate(none),
        curve.double(none, 3),
        segment_sums(curve, none, no_rows, np.zeros(1, np.int64)),
        curve.fixed_base(curve.identity(1)).mul(no_scalars),
        curve.mul(none, no_scalars),
        *curve.mul_by_each(none, np.ones((2, 32), np.uint8)),
    ]
    assert [len(result) for result in results] == [0] * 13
    assert curve.to_affine(none).shape == (0, 64) and curve.to_ristretto(none).shape == (0, 32)
    assert len(curve.equal(none, none)) == len(curve.y_words(none)[0]) == 0
    empty_segments = segment_sums(curve, none, no_rows, np.zeros(4, np.int64))
    assert curve.equal(empty_segments, curve.identity(3)).all()


def test_field_elements_at_the_edges_of_every_radix(curve: Curve) -> None:
    """Runs of equal bits across limbs of 25, 26, 51 and 52 bits, and next to p, through products and square roots."""
    edges = {0, 1, 2, 19, FIELD_PRIME - 1, FIELD_PRIME, FIELD_PRIME + 1, 2**255 - 1, 2**256 - 1}
    edges |= {sum(((1 << width) - 1) << step for step in range(0, 255, 2 * width)) for width in (25, 26, 51, 52)}
    edges |= {(1 << bit) - 1 for width in (25, 26, 51, 52) for bit in range(width, 255, 51)}
    edges |= {FIELD_PRIME - (1 << bit) for bit in (26, 51, 52, 104, 153, 204, 208, 254)}
    values = rows_from_ints(sorted(edge % 2**256 for edge in edges), 32)
    uniform = np.hstack([values, values[::-1]])
    assert same(curve, curve.from_uniform(uniform), REFERENCE.from_uniform(uniform))
    for row in values:
        assert _taken_ristretto(curve, row[None]) == _taken_ristretto(REFERENCE, row[None])
        assert _taken_compressed(curve, row[None]) == _taken_compressed(REFERENCE, row[None])


def hostile_affine() -> list[NDArray[np.uint8]]:
    x, y = (ints_from_rows(base_rows()[:, half])[0] for half in (slice(32), slice(32, 64)))
    p, top = FIELD_PRIME, 1 << 255
    pairs = [(x, y + 1), (x + p, y), (x, y + p), (x | top, y), (x, y | top), (0, p + 1), (p, 1), (0, 0), (1, 1), (y, x)]
    pairs += [(p, p), (2**256 - 1, 2**256 - 1), (0, 2), (x ^ 1, y), (top, 1), (top | p, 1), (0, top | 1)]
    return [affine_rows(pair) for pair in pairs]


@pytest.mark.parametrize("lane", [0, 3, 5, 7, 8, 12])  # the last of four and of eight, and of what is left over
def test_hostile_points_are_refused_in_every_lane(curve: Curve, lane: int) -> None:
    good = sample_rows()[:13]
    for bad in hostile_affine():
        with pytest.raises(ProtocolError):
            curve.from_affine(np.concatenate([good[:lane], bad, good[lane + 1 :]]))
    curve.from_affine(good)
    short = to_compressed(curve, curve.from_affine(good))
    assert np.array_equal(curve.to_affine(curve.from_compressed(short)), good)
    for y in (2, FIELD_PRIME, FIELD_PRIME + 1, 1 | 1 << 255, (FIELD_PRIME - 1) | 1 << 255, 2**256 - 1):
        with pytest.raises(ProtocolError):
            curve.from_compressed(np.concatenate([short[:lane], rows_from_ints([y], 32), short[lane + 1 :]]))


def test_both_signs_of_x_are_points_and_stay_apart(curve: Curve) -> None:
    x, y = (ints_from_rows(base_rows()[:, half])[0] for half in (slice(32), slice(32, 64)))
    rows = affine_rows((x, y), (FIELD_PRIME - x, y))
    points = curve.from_affine(rows)
    assert np.array_equal(curve.to_affine(points), rows)
    assert not curve.equal(points, curve.take(points, np.array([1, 0])))[0]
    words, odd = curve.y_words(points)
    assert words[0] == words[1] and odd[0] != odd[1]


@given(st.binary(min_size=64, max_size=64), st.integers(0, 3), st.integers(0, 255))
def test_any_bytes_are_taken_or_refused_as_by_the_reference(junk: bytes, kind: int, flip: int) -> None:
    """Random bytes, and points with one byte changed: nearly all off the curve, some not canonical."""
    rows = np.frombuffer(junk, dtype=np.uint8).reshape(1, 64)
    if kind:
        rows = sample_rows()[flip % len(sample_rows())].reshape(1, 64).copy()
        rows[0, junk[0] % 64] ^= flip
    expected = _taken(REFERENCE, rows)
    expected_ristretto = _taken_ristretto(REFERENCE, rows[:, :32])
    expected_compressed = _taken_compressed(REFERENCE, rows[:, :32])
    for name in BACKENDS:
        curve = registry.load_backend(name)
        assert _taken(curve, rows) == expected
        assert _taken_ristretto(curve, rows[:, :32]) == expected_ristretto
        assert _taken_compressed(curve, rows[:, :32]) == expected_compressed
        uniform = curve.to_affine(curve.from_uniform(rows))
        assert np.array_equal(uniform, REFERENCE.to_affine(REFERENCE.from_uniform(rows)))


def _taken(curve: Curve, rows: NDArray[np.uint8]) -> bytes | None:
    try:
        return curve.to_affine(curve.double(curve.from_affine(rows), 1)).tobytes()
    except ProtocolError:
        return None


def _taken_compressed(curve: Curve, rows: NDArray[np.uint8]) -> bytes | None:
    try:
        points = curve.from_compressed(rows)
    except ProtocolError:
        return None
    assert np.array_equal(to_compressed(curve, points), rows), "a point has one encoding"
    return curve.to_affine(points).tobytes()


def _taken_ristretto(curve: Curve, rows: NDArray[np.uint8]) -> bytes | None:
    try:
        return curve.to_affine(curve.from_ristretto(rows)).tobytes()
    except ProtocolError:
        return None


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, len(sample_rows()) - 1), max_size=30), st.data())
def test_any_segments_are_summed_as_by_the_reference(order: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=6)))
    rows, starts = np.array(order, dtype=np.int32), np.array(cuts, dtype=np.int64)
    expected = REFERENCE.to_affine(segment_sums(REFERENCE, REFERENCE.from_affine(sample_rows()), rows, starts))
    for name in BACKENDS:
        curve = registry.load_backend(name)
        for points in both_forms(curve, sample_rows()):
            assert np.array_equal(curve.to_affine(segment_sums(curve, points, rows, starts)), expected)
