"""Scalars modulo the group order in batches: secret multipliers times many randomisers, with numpy.

A scalar is cut into 13 limbs of 21 bits. Multiplying by x is a product with the 13 x 13 matrix whose line i holds the
limbs of 2^(21 i) x modulo the order: doubles hold it exactly (13 products of 42 bits). What is left is at most 2^26
orders, which one estimate of the quotient takes off, because the order is 2^252 and a little.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.interface import GROUP_ORDER, SCALAR_BYTES
from he_processors.packing import bit_field

_LIMB_BITS = 21
_N_LIMBS = 13  # 12 limbs are the 252 bits below the order's highest one
_MASK = (1 << _LIMB_BITS) - 1
_SURPLUS = GROUP_ORDER - (1 << 252)
_SURPLUS_LIMBS = 6


def scale_and_shift(scalars: NDArray[np.uint8], factors: list[int], shifts: list[int]) -> list[NDArray[np.uint8]]:
    """Return factor * scalar + shift modulo the group order, for every pair of a factor and a shift.

    Shapes: scalars: uint8[n, 32], below the order; result: for each factor uint8[n, 32], below the order.
    """
    if not len(scalars):
        return [scalars for _ in factors]
    matrix = np.hstack([_matrix(factor) for factor in factors])  # [13, 13 * n_factors]
    # Not by BLAS: it would start threads of its own for so little.
    products = np.einsum("ij,in->jn", matrix, _limbs(scalars))
    parts = products.astype(np.int64).reshape(len(factors), _N_LIMBS, -1)
    return [_reduce(part, shift) for part, shift in zip(parts, shifts, strict=True)]


def rows_of(scalars: list[int]) -> NDArray[np.uint8]:
    """Write integers as scalars. Shapes: result: uint8[n, 32], below the order."""
    joined = b"".join((scalar % GROUP_ORDER).to_bytes(SCALAR_BYTES, "little") for scalar in scalars)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, SCALAR_BYTES)


def _matrix(factor: int) -> NDArray[np.float64]:
    """Return the limbs of 2^(21 i) * factor modulo the order. Shapes: result: float64[13, 13]."""
    return np.array([_int_limbs((factor << (_LIMB_BITS * i)) % GROUP_ORDER) for i in range(_N_LIMBS)], dtype=np.float64)


def _int_limbs(value: int, n_limbs: int = _N_LIMBS) -> list[int]:
    return [value >> (_LIMB_BITS * i) & _MASK for i in range(n_limbs)]


def _limbs(scalars: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Cut scalars into limbs. Shapes: result: float64[13, n]."""
    wide = np.zeros((len(scalars), SCALAR_BYTES + 10), dtype=np.uint8)  # room to read nine bytes at any bit offset
    wide[:, :SCALAR_BYTES] = scalars
    return np.stack([bit_field(wide, _LIMB_BITS * i, _LIMB_BITS).astype(np.float64) for i in range(_N_LIMBS)])


def _reduce(limbs: NDArray[np.int64], shift: int) -> NDArray[np.uint8]:
    """Add the shift and reduce. Shapes: limbs: int64[13, n], changed; result: uint8[n, 32]."""
    limbs += np.array(_int_limbs(shift % GROUP_ORDER), dtype=np.int64)[:, None]
    _carry(limbs)
    # value = t * 2^252 + rest is rest - t * surplus modulo the order: more than -2^151 and less than 2^252.
    quotient = limbs[-1].copy()
    limbs[-1] = 0
    for i, surplus in enumerate(_int_limbs(_SURPLUS, _SURPLUS_LIMBS)):
        limbs[i] -= quotient * surplus
    _carry(limbs)
    limbs += np.where(limbs[-1] < 0, np.array(_int_limbs(GROUP_ORDER), dtype=np.int64)[:, None], 0)
    _carry(limbs)
    return _rows(limbs)


def _carry(limbs: NDArray[np.int64]) -> None:
    """Bring all limbs but the highest into [0, 2^21)."""
    for i in range(_N_LIMBS - 1):
        limbs[i + 1] += limbs[i] >> _LIMB_BITS
        limbs[i] &= _MASK


def _rows(limbs: NDArray[np.int64]) -> NDArray[np.uint8]:
    words = np.zeros((limbs.shape[1], 4), dtype="<u8")
    for i, limb in enumerate(limbs.astype(np.uint64)):
        word, offset = divmod(_LIMB_BITS * i, 64)
        words[:, word] |= limb << np.uint64(offset)
        if offset + _LIMB_BITS > 64 and word < 3:  # the highest limb is one bit
            words[:, word + 1] |= limb >> np.uint64(64 - offset)
    return words.view(np.uint8)
