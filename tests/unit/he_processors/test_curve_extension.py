"""The curve's C functions and their Python side by themselves: what they refuse, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from he_processors.curve import native, registry
from he_processors.curve import native as native_plan
from he_processors.errors import BackendUnavailable, ConfigurationError
from tests.support.curve_toys import base_rows, sample_rows, scalar_rows, segment_sums

VARIANTS = native.instruction_sets()
pytestmark = pytest.mark.skipif(not VARIANTS, reason="the native extension was not built")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@each_variant
def test_the_c_functions_check_their_buffers(variant: str) -> None:
    """A wrong size or index raises instead of touching memory beyond a buffer."""
    number, c = VARIANTS.index(variant), native._curve
    affine = native.load(variant, 1).from_affine(sample_rows()[:16]).rows
    points = np.zeros((16, 20), dtype=np.uint64)
    few, few_affine = points[:3].copy(), affine[:3].copy()
    order, bad_order = np.arange(16, dtype=np.int32), np.full(16, 16, dtype=np.int32)
    task = np.array([[0, 16, 0]], dtype=np.int64)
    bytes_64, bytes_32, odd = np.zeros((16, 64), np.uint8), np.zeros((16, 32), np.uint8), np.zeros(16, np.uint8)
    digits = np.zeros((2, 5), dtype=np.int8)
    unaligned = np.zeros(points.nbytes + 1, np.uint8)[1:]
    calls: list[Callable[[], object]] = [
        lambda: c.from_affine(number, bytes_64, few_affine),
        lambda: c.from_affine(number, bytes_64.ravel()[:-1].copy(), affine),
        lambda: c.from_affine(number, bytes_64, unaligned[: affine.nbytes]),
        lambda: c.from_ristretto(number, bytes_64, affine),
        lambda: c.from_uniform(number, bytes_64, few),
        lambda: c.to_affine(number, points, bytes_32),
        lambda: c.to_affine(number, points.astype(np.uint32), bytes_64),
        lambda: c.to_affine(number, np.zeros((16, 18), np.uint64), bytes_64),
        lambda: c.to_affine(number, points.ravel(), bytes_64),
        lambda: c.to_ristretto(number, points, bytes_64),
        lambda: c.narrow(number, points, few_affine),
        lambda: c.widen(number, affine, few),
        lambda: c.y_words(number, points, np.zeros(15, np.uint64), odd),
        lambda: c.y_words(number, points, np.zeros(16, np.uint64), odd[:15].copy()),
        lambda: c.add(number, points, few, points.copy()),
        lambda: c.add(number, points, affine, few),
        lambda: c.equal(number, points, points, odd[:3].copy()),
        lambda: c.negate(number, affine, points.copy()),
        lambda: c.twice(number, points, -1, points.copy()),
        lambda: c.twice(number, points, 1, few),
        lambda: c.sums(number, affine, bad_order, task, few),
        lambda: c.sums(number, affine, -order, task, few),
        lambda: c.sums(number, affine, order, task + np.array([1, 0, 0]), few),
        lambda: c.sums(number, affine, order, -task, few),
        lambda: c.sums(number, affine, order, task + np.array([0, 0, 3]), few),
        lambda: c.sums(number, affine, order, task - np.array([0, 0, 1]), few),
        lambda: c.sums(number, affine, order, task[:, :2].copy(), few),
        lambda: c.sums(number, affine, order.view(np.uint8)[:-1], task, few),
        lambda: c.ladder(number, points, 3, points.copy()),
        lambda: c.ladder(number, points[:1], 16, points.copy()),
        lambda: c.table(number, points[:2], 2, points[:5].copy()),
        lambda: c.table(number, points[:2], 0, points[:4].copy()),
        lambda: c.fixed_mul(number, affine, 4, 2, bytes_32, 32, points.copy()),  # two windows take 18 entries
        lambda: c.fixed_mul(number, affine, 4, 1, bytes_32, 31, points.copy()),
        lambda: c.fixed_mul(number, affine, 4, 1, b"", 1 << 62, points[:4].copy()),  # 4 times that wraps to nothing
        lambda: c.fixed_mul(number, affine, 4, 1 << 62, bytes_32, 32, points.copy()),
        lambda: c.fixed_mul(number, affine, 4, -1, bytes_32, 32, points.copy()),
        lambda: c.mul(number, points, bytes_32[:3].copy(), points.copy()),
        lambda: c.mul(number, points, bytes_32, few),
        lambda: c.mul_each(number, points, digits, 2, 8, points.copy()),
        lambda: c.mul_each(number, points[:8], digits + np.int8(17), 2, 8, points.copy()),
        lambda: c.mul_each(number, points[:8], digits + np.int8(2), 2, 8, points.copy()),
        lambda: c.mul_each(number, points[:8], digits - np.int8(17), 2, 8, points.copy()),
        lambda: c.mul_each(number, points[:8], digits, 2, 17, points.copy()),
        lambda: c.mul_each(number, points[:8], digits, 3, 8, points.copy()),
        lambda: c.mul_each(number, points[:8], digits, 0, 8, points.copy()),
        lambda: c.all_below(bytes_32, 33, bytes(32)),
        lambda: c.all_below(bytes_32, 31, bytes(32)),
        lambda: c.all_below(bytes_32, 0, bytes(32)),
        lambda: c.all_below(bytes_32, 32, bytes(31)),
        lambda: c.add(len(VARIANTS), points, points, points.copy()),
        lambda: c.add(-1, points, points, points.copy()),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


@each_variant
def test_threads_do_not_change_results(variant: str) -> None:
    one, three = native.load(variant, 1), native.load(variant, 3)
    scalars, order = scalar_rows(50, 1), np.arange(50, dtype=np.int32)[::-1].copy()
    starts = np.array([0, 9, 9, 50], dtype=np.int64)
    results = []
    for curve in (one, three):
        points = curve.fixed_base(curve.from_affine(base_rows())).mul(scalars)
        summed = curve.concat([segment_sums(curve, points, order, starts), *curve.mul_by_each(points, scalars[4:6])])
        results.append(curve.to_affine(curve.mul(summed, scalar_rows(len(summed), 2))))
    assert np.array_equal(*results)


def test_points_of_another_variant_are_refused() -> None:
    curve = native.load(VARIANTS[0])
    with pytest.raises(ValueError):
        curve.negate(native.NativePoints(curve.identity(1).rows, "another"))


def test_a_missing_extension_or_instruction_set_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable):
        native.load("neon")
    with pytest.raises(ValueError):
        native.load(VARIANTS[0], 0)
    monkeypatch.setattr(native, "_curve", None)
    assert native.instruction_sets() == ()
    with pytest.raises(BackendUnavailable):
        native.load("portable")


def test_the_registry_takes_the_fastest_or_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)
    assert registry.open_curve().name == registry.available_backends()[0] == VARIANTS[0]
    assert registry.open_curve("reference").name == "reference"
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "portable")
    assert registry.open_curve().name == "portable"
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "unknown")
    with pytest.raises(ConfigurationError):
        registry.open_curve()


def test_digits_stand_for_their_scalars() -> None:
    scalars = scalar_rows(30, 3)
    digits = native_plan.digits_of_each(scalars)
    values = [sum(int(digit) << i for i, digit in enumerate(row)) for row in digits]
    assert values == [int.from_bytes(row.tobytes(), "little") for row in scalars]
    assert np.all((digits == 0) | (digits % 2 == 1)) and np.abs(digits).max() < 2 * native_plan.NAF_BUCKETS
    assert native_plan.digits_of_each(np.zeros((2, 32), np.uint8)).shape == (2, 1)
