"""Inner products modulo the prime p = 2^61 - 1, in C where the extension was built and in numpy elsewhere.

The tags of sums (sum_tags.py) are such inner products. A product of two residues has 122 bits, which numpy lacks: the
C kernels sum products in 128 bits (portable), as words of halves (AVX2) or in limbs of 52 bits (AVX512-IFMA), and the
numpy twin multiplies halves of 31 bits. All give the same canonical residues.

Security: no secret is looked up in a table or branched on; constant time is not claimed, as elsewhere (SECURITY.md).
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
from numpy.typing import NDArray

from he_processors._native import extension

_field = extension("_field")

_log = logging.getLogger(__name__)

BITS = 61
MODULUS = (1 << BITS) - 1
LARGEST = MODULUS // 2
"""The largest integer below p/2: two vectors of at most that in magnitude differ modulo p, if they differ."""

NUMPY = "numpy"

_P = np.uint64(MODULUS)
_BITS, _HALF, _WORD = np.uint64(BITS), np.uint64(31), np.uint64(32)
_LOW_HALF, _LOW_30, _LOW_WORD = (np.uint64((1 << bits) - 1) for bits in (31, 30, 32))
_30 = np.uint64(30)
_CHUNK = 1 << 15  # values whose products stay in the cache


@cache
def _say_so_once() -> None:
    _log.warning("tags of sums are made in numpy: the package was installed without a C compiler")


def variants() -> tuple[str, ...]:
    """Return the ways to compute on this machine, fastest first; the last one is always ``NUMPY``."""
    return (*(() if _field is None else _field.instruction_sets()), NUMPY)


_BEST = variants()[0]


def residues(integers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Map signed integers to residues below p. Shapes: integers: int64[n]; result: uint64[n]."""
    folded = (integers & np.int64(MODULUS)) + (integers >> np.int64(BITS))  # from -4 to p + 3
    return reduced(np.where(folded < 0, folded + np.int64(MODULUS), folded).view(np.uint64))


def add(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Add residues below p. Shapes: a, b, result: uint64[n]."""
    return reduced(a + b)


def powers(bases: NDArray[np.uint64], n: int, variant: str = _BEST) -> NDArray[np.uint64]:
    """Return the powers 0 to n - 1 of each base, modulo p.

    Shapes: bases: uint64[r], of any size; result: uint64[r, n].
    """
    out = np.ones((bases.size, n), dtype=np.uint64)
    if variant != NUMPY:
        _field.powers(bases, out)
        return out
    for row, base in zip(out, bases.tolist(), strict=True):
        done = 1
        while done < n:
            step, part = np.uint64(pow(base, done, MODULUS)), row[done : 2 * done]
            part[:] = _multiply(row[: part.size], step)
            done *= 2
    return out


def combine(
    values: NDArray[np.int64],
    more: NDArray[np.int64],
    powers: NDArray[np.uint64],
    scales: NDArray[np.uint64],
    variant: str = _BEST,
) -> tuple[NDArray[np.uint64], bool]:
    """Add up the inner products of all blocks, each times its scale: sum_b scale_b (block b . powers) modulo p.

    Both sums and the range of the values are found in one pass over the values.

    Shapes: values: int64[n]; more: int64[k], whose blocks follow those of values; powers: uint64[2, m]; scales:
        uint64[2, ceil(n / m) + ceil(k / m)]; of any size. All are contiguous.

    Returns:
        uint64[2], each below p; and whether no value exceeds ``LARGEST`` in magnitude.
    """
    out: NDArray[np.uint64] = np.zeros(2, dtype=np.uint64)
    if variant != NUMPY:
        return out, _field.combine(variant, values, more, powers, scales, out)
    if _field is None:
        _say_so_once()
    for number, (of_powers, of_scales) in enumerate(zip(powers, scales, strict=True)):
        sums = [one for part in (values, more) for one in _block_dots(part, reduced(of_powers))]
        if sums:
            out[number] = _dot(np.array(sums, dtype=np.int64), reduced(of_scales))
    return out, bool(not values.size or -LARGEST <= values.min() <= values.max() <= LARGEST)


def _block_dots(values: NDArray[np.int64], factors: NDArray[np.uint64]) -> list[int]:
    """Return one inner product for each block; the last block may be shorter than there are factors."""
    return [_dot(values[i : i + factors.size], factors) for i in range(0, values.size, factors.size)]


def _dot(values: NDArray[np.int64], factors: NDArray[np.uint64]) -> int:
    """Return one inner product; the words of the products are added apart, in 64 bits for up to 2^32 of them."""
    low = high = 0
    for i in range(0, values.size, _CHUNK):
        part = residues(values[i : i + _CHUNK])
        products = _multiply(part, factors[i : i + part.size])
        low += int((products & _LOW_WORD).sum())
        high += int((products >> _WORD).sum())
    return (low + (high << 32)) % MODULUS


def _multiply(a: NDArray[np.uint64], b: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Multiply residues below p, in halves of 31 and 30 bits: with 2^61 = 1 all four products fit 64 bits."""
    a0, a1, b0, b1 = a & _LOW_HALF, a >> _HALF, b & _LOW_HALF, b >> _HALF
    mixed = a0 * b1 + a1 * b0  # below 2^62; times 2^31 below
    total = a0 * b0 + ((a1 * b1) << np.uint64(1)) + (mixed >> _30) + ((mixed & _LOW_30) << _HALF)
    return reduced(total)


def reduced(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Reduce 64-bit numbers modulo p. Shapes: values, result: uint64[n], the result below p."""
    folded: NDArray[np.uint64] = (values & _P) + (values >> _BITS)
    canonical: NDArray[np.uint64] = np.minimum(folded, folded - _P)  # below p already: folded - p wraps and is larger
    return canonical
