"""The C functions by themselves: what they refuse, and how they are built."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from he_processors.bignum import native
from he_processors.errors import BackendUnavailable
from tests.support.native_toys import draw, each_variant, needs_the_extension, toy

pytestmark = needs_the_extension


@each_variant
def test_the_c_functions_check_their_buffers(variant: str) -> None:
    """A wrong size or index raises instead of touching memory beyond a buffer."""
    arithmetic = toy(variant)
    _, x = draw(arithmetic, 16)
    handle, rows, bignum = arithmetic._handle, x.limbs, native._bignum
    order, bad_order = np.arange(16, dtype=np.int32), np.full(16, 16, dtype=np.int32)
    task = np.array([[0, 16, 0]], dtype=np.int64)
    steps = np.array([[0, 0]], dtype=np.int32)
    exponents, numbers = np.zeros((16, 2), dtype=np.uint8), np.zeros((16, arithmetic.width), dtype=np.uint8)
    calls: list[Callable[[], object]] = [
        lambda: bignum.mul(handle, rows, rows[:3], rows.copy()),
        lambda: bignum.mul(handle, rows, rows, rows[:3].copy()),
        lambda: bignum.add(handle, rows, rows.view(np.uint8).ravel()[:5].copy(), rows.copy()),
        lambda: bignum.products(handle, rows, bad_order, task, rows[:1].copy()),
        lambda: bignum.products(handle, rows, order, task + np.array([1, 0, 0]), rows[:1].copy()),
        lambda: bignum.products(handle, rows, order, -task, rows[:1].copy()),
        lambda: bignum.products(handle, rows, order, task + np.array([0, 0, 1]), rows[:1].copy()),
        lambda: bignum.products(handle, rows, order, task - np.array([0, 0, 1]), rows[:1].copy()),
        lambda: bignum.ladder(handle, rows, 3, rows.copy()),
        lambda: bignum.ladder(handle, rows[:1], 40, rows.copy()),
        lambda: bignum.table(handle, rows[:2], 2, rows[:7].copy()),
        lambda: bignum.table(handle, rows[:2], 63, rows.copy()),
        lambda: bignum.powers(handle, rows, 5, exponents, 2, rows.copy()),
        lambda: bignum.powers(handle, rows, 2, exponents, 3, rows.copy()),
        lambda: bignum.pow_const(handle, rows, steps + 1, 1, rows.copy()),
        lambda: bignum.pow_const(handle, rows, steps, 0, rows.copy()),
        lambda: bignum.horner(handle, rows, 0, 1, rows.copy()),
        lambda: bignum.horner(handle, rows, 3, 1, rows[:5].copy()),
        lambda: bignum.enter(handle, numbers, arithmetic.width - 1, rows.copy()),
        lambda: bignum.leave(handle, rows, numbers[:3].copy()),
        lambda: bignum.first_not_below(numbers, arithmetic.width, b"\x01"),
        lambda: bignum.mul(handle, rows, rows, np.zeros(rows.nbytes + 1, np.uint8)[1:]),  # not aligned
        lambda: bignum.products(handle, rows, order.view(np.uint8)[:-1], task, rows[:1].copy()),
        lambda: bignum.products(handle, rows, order, task[:, :2].copy(), rows[:1].copy()),
        lambda: bignum.pow_const(handle, rows, steps[:, :1].copy(), 1, rows.copy()),
        # Widths whose product with the number of rows wraps to nothing.
        lambda: bignum.enter(handle, b"", 1 << 62, rows[:4].copy()),
        lambda: bignum.powers(handle, rows, 2, b"", 1 << 62, rows[:4].copy()),
        lambda: bignum.modulus("none", 10, b"\x05", b"\x06", b"\x01", b"\x01"),
        lambda: bignum.modulus(variant, 8, b"\x05" * 65, b"\x06", b"\x01", b"\x01"),  # longer than its limbs
        lambda: bignum.mul(object(), rows, rows, rows.copy()),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


def test_a_missing_extension_or_instruction_set_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable):
        native.load("neon")
    monkeypatch.setattr(native, "_bignum", None)
    assert native.instruction_sets() == ()
    with pytest.raises(BackendUnavailable):
        native.load("portable")


def test_every_source_file_is_built_and_shipped() -> None:
    root = Path(native.__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        pytest.skip("not a source checkout")
    extensions = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    packages = (root / "he_processors", root / "nvflare_plugins")
    for key, ending in (("sources", "*.c"), ("depends", "*.h")):
        named = {root / name for of in extensions for name in of.get(key, ())}
        assert named == {path for package in packages for path in package.rglob(ending)}
    assert all(of["optional"] is True for of in extensions)
