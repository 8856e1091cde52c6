"""Integers as scalars of the group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.interface import GROUP_ORDER, SCALAR_BYTES


def rows_of(scalars: list[int]) -> NDArray[np.uint8]:
    """Write integers as scalars. Shapes: result: uint8[n, 32], below the order."""
    joined = b"".join((scalar % GROUP_ORDER).to_bytes(SCALAR_BYTES, "little") for scalar in scalars)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, SCALAR_BYTES)
