"""Powers of one base on the CUDA backend, by table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.reference import check_exponents
from he_processors.bignum.rows import widen
from he_processors.cuda.device import Array, guarded
from he_processors.cuda.plan import table_window

if TYPE_CHECKING:
    from he_processors.bignum.cuda import CudaBatch, CudaResidues


class CudaFixedBase:
    """A table of powers of one base, made when the first exponents come, on each device that takes part.

    The window suits the number of exponents seen so far, and keeps the table within the device's cache.
    """

    def __init__(self, arithmetic: CudaBatch, base: int, exponent_bits: int) -> None:
        if exponent_bits < 1:
            raise ValueError("exponent_bits must be at least 1")
        self.device_errors = arithmetic.device_errors
        self._arithmetic = arithmetic
        self._base = base % arithmetic.modulus
        self._exponent_bits = exponent_bits
        self._seen = 0
        self._made: tuple[int, dict[int, Array]] = 0, {}  # window, and tables by device number; replaced together

    @guarded
    def pow(self, exponents: NDArray[np.uint8]) -> CudaResidues:
        """Raise the base to each exponent.

        Shapes: exponents: uint8[n, ceil(exponent_bits / 8)], little-endian; result: Residues[n].

        Raises:
            ValueError: an exponent needs more than ``exponent_bits`` bits.
        """
        check_exponents(exponents, self._exponent_bits)
        window, tables = self._tables_for(len(exponents))
        n_words, n_windows = -(-exponents.shape[1] // 4), -(-self._exponent_bits // window)

        def power(start: int, stop: int, number: int) -> Array:
            unit = self._arithmetic.on_device[number]
            if number not in tables:
                tables[number] = unit.power_table(self._base, window, n_windows)
            words = np.ascontiguousarray(widen(exponents[start:stop], 4 * n_words)).view("<u4")
            return unit.table_powers(tables[number], window, n_windows, words)

        return self._arithmetic.build(len(exponents), power)

    def _tables_for(self, n_exponents: int) -> tuple[int, dict[int, Array]]:
        room = min(device.table_bytes for device in self._arithmetic.devices)
        # No lock, as in native.py: threads at worst make a table twice.
        self._seen += n_exponents
        made = self._made
        window = table_window(self._exponent_bits, self._seen, self._arithmetic.row_bytes, room)
        if made[0] == 0 or window > made[0] + 1:
            made = self._made = window, {}
        return made
