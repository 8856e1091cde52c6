"""The passive party's side: add rows of points into bins, and hide the bins from the key owner.

Security: the key owner knows every randomiser that it drew, and chose the points. Every sum therefore leaves as
8 (R + s B), 8 (C_k + s P_k) with a fresh uniform s: the multiplication by 8 takes off what points of small order on
single rows would tell about sums modulo 8, and the new randomiser, uniform in the group of prime order, makes R
independent of the rows. What the C_k then hold is the sum of the messages and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from he_processors.additive.randomiser_pool import BLOCK_ROWS, RandomiserPool
from he_processors.additive.scheme import StaysInProcess
from he_processors.bignum.rows import random_rows_below
from he_processors.curve.interface import COFACTOR_BITS, GROUP_ORDER, Curve, Points
from he_processors.elgamal.digits import DigitFormat
from he_processors.elgamal.encryption import ColumnBatches, PointColumns, by_blocks
from he_processors.elgamal.keys import ElGamalPublicKey, base_point
from he_processors.elgamal.scalars import rows_of
from he_processors.histogram.bin_noise import BinNoise
from he_processors.histogram.planner import HistogramPlan
from he_processors.randomness import BULK_RANDOMNESS, RandomSource

# Sums take the full addition, and rows that came as bytes a cheaper one: a cell of a pair of features has to save more
# than under schemes that multiply. Measured with the AVX512-IFMA backend, from rows in random order: 10 to 11.
CELL_COST = 10


def bin_summer(curve: Curve, n_rows: int, plan: HistogramPlan) -> Callable[[Points], Points]:
    """Prepare to add columns of rows per bin: what a plan asks for is worked out once for all columns.

    Shapes:   of the result: column: Points[n_rows]; sums: Points[plan.n_slots].
    Security: an empty bin is the neutral point, and every sum is one that the key owner could recompute: pass the
        sums through a ``Hider`` before they leave.
    """
    position = np.empty(plan.n_slots, dtype=np.int64)
    position[np.concatenate([block.slots for block in plan.blocks])] = np.arange(plan.n_slots, dtype=np.int64)
    steps = []
    for block in plan.blocks:
        cells = curve.segment_sums(block.cells.order, block.cells.starts, n_rows)
        n_cells = block.cells.starts.size - 1
        steps.append((cells, curve.segment_sums(block.bins.order, block.bins.starts, n_cells)))

    def add(column: Points) -> Points:
        return curve.take(curve.concat([into_bins(into_cells(column)) for into_cells, into_bins in steps]), position)

    return add


def noise_points(curve: Curve, digits: DigitFormat, noise: BinNoise, number: int, n_bins: int) -> Points:
    """Return one message's noise on each bin, times the base point: add it to the bins before they are hidden.

    Shapes: result: Points[n_bins].

    Args:
        number: of the column, from 1; column 0 holds randomisers.

    Raises:
        ValueError, CapacityExceeded: as ``BinNoise.check``.
    """
    noise.check(digits, n_bins)
    values = digits.digits_of(noise.g, noise.h)[number - 1]
    return curve.fixed_base(base_point(curve)).mul(rows_of([int(value) for value in values]))


class HiderMasks(StaysInProcess):
    """Draws 8 s B, 8 s P_1, 8 s P_2, ... for fresh s. Secret.

    Security: its own multiples 8 B and 8 P_k are what s multiplies: nothing of small order in the owner's key survives.
        s is exactly uniform below the group order, by rejection.
    """

    def __init__(self, public_key: ElGamalPublicKey, curve: Curve, source: RandomSource = BULK_RANDOMNESS) -> None:
        self._curve, self._source = curve, source
        points = curve.concat([base_point(curve), curve.from_affine(public_key.rows)])
        cleared = curve.double(points, COFACTOR_BITS)
        single = [np.array([i], dtype=np.int64) for i in range(len(cleared))]
        self._tables = [curve.fixed_base(curve.take(cleared, index)) for index in single]

    def draw(self, n: int) -> PointColumns:
        """Draw masks for ``n`` bins."""
        s = random_rows_below(n, GROUP_ORDER, self._source)
        return by_blocks(self._curve, n, lambda block: PointColumns(tuple(t.mul(s[block]) for t in self._tables)))


class Hider(StaysInProcess):
    """Clears small factors and re-randomises, for one key, with masks that can be made ahead."""

    def __init__(self, public_key: ElGamalPublicKey, curve: Curve, source: RandomSource = BULK_RANDOMNESS) -> None:
        self._curve = curve
        self._masks = RandomiserPool(
            ColumnBatches(curve), HiderMasks(public_key, curve, source), BLOCK_ROWS * curve.threads
        )

    def fill(self, n: int) -> None:
        """Make masks until those for ``n`` bins are ready."""
        self._masks.fill(n)

    def draw(self, n: int) -> PointColumns:
        """Take masks for ``n`` bins: the same for all columns of an answer, and for no other answer. Secret."""
        masks: PointColumns = self._masks.draw(n)  # type: ignore[assignment]  # a pool knows its batches by their length
        return masks

    def hide(self, number: int, bins: Points, masks: PointColumns) -> Points:
        """Make one column of sums show its messages, eight times, to the key owner, and no more.

        Args:
            number: of the column: 0 for R, k for the k-th C.
            masks: from ``draw``.
        """
        return self._curve.add(self._curve.double(bins, COFACTOR_BITS), masks.columns[number])
