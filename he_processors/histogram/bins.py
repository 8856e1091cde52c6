"""Features in bins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

BinCodes = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True)
class BinLayout:
    """How the bins of all features of one party lie in one vector of slots.

    Feature f has ``n_bins[f]`` bins and, after them, one slot for missing values; its codes are 0 .. n_bins[f].
    """

    n_bins: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.n_bins or any(not 1 <= n < 1 << 16 for n in self.n_bins):
            raise ValueError("every feature needs 1 to 65535 bins")

    @property
    def n_features(self) -> int:
        """Return the number of features."""
        return len(self.n_bins)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Return each feature's first slot, and the number of slots last. Shapes: int64[n_features + 1]."""
        return np.concatenate([[0], np.cumsum(np.array(self.n_bins, dtype=np.int64) + 1)])

    @property
    def n_slots(self) -> int:
        """Return the slots of one node."""
        return int(self.starts[-1])

    def check_codes(self, codes: BinCodes) -> None:
        """Check a matrix of bin codes.

        Shapes: codes: uint8 or uint16[n_features, n_rows].

        Raises:
            TypeError: another dtype.
            ValueError: the shape or a code does not fit this layout.
        """
        if codes.dtype not in (np.uint8, np.uint16):
            raise TypeError("bin codes must be uint8 or uint16")
        if codes.ndim != 2 or codes.shape[0] != self.n_features:
            raise ValueError("bin codes must have one line for each feature")
        if codes.shape[1] and np.any(codes.max(axis=1) > np.array(self.n_bins)):
            raise ValueError("a bin code lies beyond the bins of its feature")
