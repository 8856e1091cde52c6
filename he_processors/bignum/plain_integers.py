"""Batches of plain integers: the linear combinations around modular arithmetic.

Chinese remainders (``x_p * (q^2 * u) + x_q * (p^2 * v) mod n^2``), the factor ``1 + m * n``, exact division by a
constant (a product modulo a power of two) are all of the form that ``linear`` computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.row_blocks import default_threads, row_blocks, run_blocks
from he_processors.bignum.rows import byte_width, ints_from_rows, rows_from_ints

try:
    from he_processors._native import _bignum
except ImportError:
    _bignum = None

Term = tuple[NDArray[np.uint8], int]

_MAX_TERMS = 8


def linear(terms: Sequence[Term], constant: int, modulus: int, threads: int | None = None) -> NDArray[np.uint8]:
    """Return ``(constant + sum_t coefficient_t * rows_t) mod modulus``, row by row.

    Runs in C where the extension was built, otherwise in Python.

    Shapes: rows_t: uint8[n, any width], little-endian; result: uint8[n, byte_width(modulus)].
    Args:
        terms: pairs of rows and a non-negative coefficient; at least one, at most eight.
        constant: a non-negative integer.
        modulus: any positive integer, even ones included.
        threads: how many threads share the batch; by default ``VEILBOOST_THREADS`` or one for each core.

    Raises: ValueError for a negative number, no terms or too many, or batches of different length.
    """
    check_terms(terms, constant, modulus)
    if _bignum is None:
        return linear_python(terms, constant, modulus)
    width = byte_width(modulus)
    batches = [(np.ascontiguousarray(rows), _to_bytes(coefficient)) for rows, coefficient in terms]
    n_threads = default_threads() if threads is None else threads
    out = np.empty((len(batches[0][0]), width), dtype=np.uint8)

    def combine(block: slice) -> None:
        block_terms = tuple((rows[block], rows.shape[1], coefficient) for rows, coefficient in batches)
        _bignum.linear(block_terms, _to_bytes(constant), _to_bytes(modulus), out[block])

    run_blocks(combine, row_blocks(len(out), n_threads, 1), n_threads)
    return out


def linear_python(terms: Sequence[Term], constant: int, modulus: int) -> NDArray[np.uint8]:
    """Do what ``linear`` does with Python integers: its twin where there is no extension, and its oracle."""
    check_terms(terms, constant, modulus)
    totals = [constant] * len(terms[0][0])
    for rows, coefficient in terms:
        totals = [total + coefficient * value for total, value in zip(totals, ints_from_rows(rows), strict=True)]
    return rows_from_ints((total % modulus for total in totals), byte_width(modulus))


def check_terms(terms: Sequence[Term], constant: int, modulus: int) -> None:
    """Raises: ValueError unless ``linear`` can take these arguments."""
    if not 1 <= len(terms) <= _MAX_TERMS:
        raise ValueError(f"expected 1 to {_MAX_TERMS} terms")
    if constant < 0 or modulus < 1 or any(coefficient < 0 for _, coefficient in terms):
        raise ValueError("constant and coefficients must not be negative, the modulus must be positive")
    for rows, _ in terms:
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] < 1 or len(rows) != len(terms[0][0]):
            raise ValueError("rows must be uint8[n, width], as many in every term")


def _to_bytes(value: int) -> bytes:
    return value.to_bytes(max(1, byte_width(value)), "little")
