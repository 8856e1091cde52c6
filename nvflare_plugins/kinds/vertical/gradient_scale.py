"""The fixed-point grid of gradients at the active party.

Gradients are divided by a power of two that bounds them, so that what is encrypted lies in [-1, 1] and [0, 1] in every
job. The number format the passive parties see depends on the number of rows alone.

A float32 has 24 significant bits. With F fraction bits every gradient and hessian of at least 2^(24 - F) of its bound
is therefore encoded without any rounding, and so are all sums; smaller ones are rounded by at most 2^-(F + 1) of the
bound. Models then equal centralized ones bit for bit, unless nodes are made of such rows alone: saturated predictions
together with min_child_weight near 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import CapacityExceeded, ConfigurationError
from he_processors.fixed_point import MOST_SUM_BITS, PairFormat, exponent_of
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.growth.arithmetic import GradientUnit

MIN_FRACTION_BITS = 40
"""Of tables of 2^22 rows and more, whose sums take two words; smaller ones have as many as fit one word."""
_MAX_FRACTION_BITS = 52
_SUM_BITS = 62
_MAX_ROWS = 1 << 31  # rows are numbered by int32
_HEADROOM = 8.0
FINEST = 2.0**-24
"""Step beside a leaf's denominator that leaves the leaf of a centralized model exact."""


def pair_format(n_rows: int, *, weighted: bool = False) -> PairFormat:
    """Return the finest format whose sums over all rows fit 64 bits, and has ``MIN_FRACTION_BITS`` at least.

    Args:
        weighted: the job has a column of weights, which may be of very different sizes: sums then take two words, and
            the format is as fine as these allow.

    Raises:
        ConfigurationError: more rows than a job may have.
    """
    if n_rows >= _MAX_ROWS:
        raise ConfigurationError(f"{n_rows} rows are more than a vertical job may have: fewer than {_MAX_ROWS}")
    room = (MOST_SUM_BITS - 1 if weighted else _SUM_BITS) - (max(n_rows, 1) - 1).bit_length()
    fraction_bits = max(MIN_FRACTION_BITS, min(_MAX_FRACTION_BITS, room))
    return PairFormat(fraction_bits, max(n_rows, 1), g_bound=1.0, h_low=0.0, h_high=1.0)


def check_weights(
    weight: NDArray[np.float32],
    bounds: tuple[float | None, float | None],
    effective: Mapping[str, str],
    fraction_bits: int,
    finest: float = FINEST,
) -> None:
    """Refuse weights that differ so much that leaves of the smallest ones would drown in the step of the format.

    A leaf's denominator is at least min_child_weight + lambda, or some row's weight; the step counts beside it.

    Shapes: weight: float32[n_rows].

    Args:
        bounds: of |gradient| and hessian of a row of weight 1; None where labels drive them.
        finest: largest step beside a leaf's denominator.

    Raises:
        DataRefusal: they do.
    """
    known = [_HEADROOM if bound is None else bound for bound in bounds]
    largest, positive = float(weight.max(initial=0.0)), weight[weight > 0]
    step = 2.0 ** (exponent_of(max(known) * (largest or 1.0)) - fraction_bits)
    least = float(effective["min_child_weight"]) + float(effective["reg_lambda"])
    if step > finest * max(least, float(positive.min(initial=largest))):
        raise DataRefusal(
            "weight: the weights differ too much for leaves of the smallest ones to be exact: clip the weights, set "
            "those that hardly count to 0, divide all by their largest, or raise min_child_weight; profile paillier "
            "has a finer step than elgamal"
        )


@dataclass(frozen=True, slots=True, repr=False)
class EncodedGradients:
    """The gradients of one tree on the grid of the number format. Shapes: g, h: int64[n_rows].

    Attributes:
        n_words: of sums (``he_processors.exact_sums``).
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]
    unit: GradientUnit
    n_words: int = 1


class GradientScale:
    """Encodes gradients of one training.

    Privacy: bounded objectives have their scale from the objective and the weights. Others start from the label range
        with headroom and are widened when training outgrows it; the scale never leaves the active party.
    """

    def __init__(
        self,
        bounds: tuple[float | None, float | None],
        label: NDArray[np.float32],
        largest_weight: float,
        pairs: PairFormat,
    ):
        """Args: bounds: of |gradient| and hessian of a row of weight 1; None where labels drive them."""
        self._pairs = pairs
        per_row = _HEADROOM * (float(np.abs(label).max(initial=0.0)) + 1.0)
        self._is_bounded = None not in bounds
        self._g_exponent, self._h_exponent = (
            exponent_of((per_row if bound is None else bound) * largest_weight) for bound in bounds
        )

    def encode(self, g: NDArray[np.float32], h: NDArray[np.float32]) -> EncodedGradients:
        """Round gradients to the grid. Shapes: g, h: float32[n_rows].

        Raises:
            CapacityExceeded: a gradient is not finite, or larger than its objective allows.
        """
        largest = [float(np.abs(values).max(initial=0.0)) for values in (g, h)]
        if not all(map(math.isfinite, largest)):
            raise CapacityExceeded("a gradient is not finite; check labels and weights")
        if not self._is_bounded:
            self._g_exponent = max(self._g_exponent, exponent_of(largest[0]))
            self._h_exponent = max(self._h_exponent, exponent_of(largest[1]))
        # Multiplying by a power of two is exact.
        in_units = (g.astype(np.float64) * 2.0**-self._g_exponent, h.astype(np.float64) * 2.0**-self._h_exponent)
        encoded = self._pairs.encode_pairs(*in_units)
        fraction_bits = self._pairs.fraction_bits
        unit = GradientUnit(self._g_exponent - fraction_bits, self._h_exponent - fraction_bits)
        return EncodedGradients(*encoded, unit, self._pairs.n_words)
