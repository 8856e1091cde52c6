"""Protected sums of real numbers: scale, encode, protect, add at the server, reveal, decode.

Scales. Every family of kinds has a fixed-point grid, as fine as the processor's capacity allows for the largest value
that any site may send. The sites find that largest value together by a secure maximum of exponents. Each site learns
from it the largest exponent of the others, and nothing else: that is the maximum, but for a site that is alone at the
top, which can take its own part from the sums and so finds the second. The server learns nothing. When training
outgrows a scale, all sites agree on a new one and encode anew; the message that did not fit was never summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.fixed_point import Grid, exponent_of
from he_processors.masks import MessageLabel
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_uint64
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.channel import Channel, RescaleRequested
from nvflare_plugins.wire.profiles import MaskedSums, SumProcessor

LOWEST_EXPONENT, HIGHEST_EXPONENT = -192, 192
_HEADROOM_EXPONENT = 3  # a scale found anew leaves room for values eight times as large


class Family(Enum):
    """Kinds whose values are of one size share a scale."""

    GRADIENTS = "gradients"
    LABELS = "labels"
    METRICS = "metrics"
    COUNTS = "counts"


FAMILY = {
    Kind.HISTOGRAM: Family.GRADIENTS,
    Kind.ROOT_SUM: Family.GRADIENTS,
    Kind.STUMP_SUM: Family.GRADIENTS,
    Kind.WEIGHT_TOTAL: Family.LABELS,
    Kind.LABEL_MEAN: Family.LABELS,
    Kind.LEAF_QUANTILE: Family.LABELS,
    Kind.METRIC: Family.METRICS,
    Kind.ROW_COUNT: Family.COUNTS,
    Kind.LEAF_VALID: Family.COUNTS,
    Kind.CUT_COUNTS: Family.COUNTS,
}
_INTEGER_BOUND_EXPONENT = 45  # counts of rows


class ProtectedSums:
    """Sums over the sites of one job.

    Privacy: what leaves the site is what the processor protects; every site learns the sums.
    """

    def __init__(
        self, channel: Channel, processor: SumProcessor, masks: MaskedSums, finest_exponent: int | None = None,
        randomness: RandomSource = OS_RANDOMNESS,
    ):  # fmt: skip
        self._channel = channel
        self._processor = processor
        self._masks = masks
        self._finest = finest_exponent
        self._randomness = randomness
        self._grids: dict[Family, Grid] = {
            Family.COUNTS: Grid(0, min(_INTEGER_BOUND_EXPONENT, processor.capacity_bits - channel.world.bit_length()))
        }

    def agree_scales(self, bounds: Mapping[Family, float]) -> None:
        """Find the scale of each family by a secure maximum over the sites.

        Args:
            bounds: largest magnitude of any value that this site expects to send; the same families at all sites.
        """
        families = sorted(bounds, key=lambda family: family.value)
        exponents = [exponent_of(bounds[family]) for family in families]
        largest = self._secure_maximum(exponents)
        for family, exponent in zip(families, largest, strict=True):
            self._grids[family] = Grid.for_sum(
                exponent, self._channel.world, self._processor.capacity_bits, self._finest
            )

    def tighten(self, family: Family, bound: float) -> None:
        """Take a finer grid where a smaller bound follows from what all sites have received alike.

        No site tells anything: the bound is computed from released sums. Should it prove too small for a site, the
        sites agree on a wider one as always.
        """
        exponent = max(exponent_of(bound), LOWEST_EXPONENT)
        if exponent < self._grids[family].bound_exponent:
            self._grids[family] = Grid.for_sum(
                exponent, self._channel.world, self._processor.capacity_bits, self._finest
            )

    def scale_of(self, family: Family) -> Grid:
        """Return the grid in use, for reports."""
        return self._grids[family]

    def sum(self, kind: Kind, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Add the sites' real numbers.

        Shapes: values: float64[n], the same n at all sites; result: float64[n], identical at all sites.
        Raises: CapacityExceeded, if a value is not finite; ProtocolError; JobAborted.
        """
        family = FAMILY[kind]
        while True:
            grid = self._grids[family]
            try:
                integers = grid.encode_running(values, 2) if kind is Kind.HISTOGRAM else grid.encode(values)
            except CapacityExceeded:
                if family is Family.COUNTS or not np.isfinite(values).all():
                    raise CapacityExceeded(
                        f"{kind.name}: this site's value is not finite or exceeds every scale; check labels, weights "
                        "and the objective for infinities"
                    ) from None
                integers = None
            try:
                return grid.decode(self._sum_integers(kind, integers, values.size))
            except RescaleRequested:
                self._rescale(family, values)

    def sum_counts(self, kind: Kind, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add the sites' integers exactly. Shapes: counts: int64[n]; result: int64[n]."""
        bound = 1 << self._grids[Family.COUNTS].bound_exponent
        if counts.size and not -bound <= counts.min() <= counts.max() <= bound:
            raise CapacityExceeded(f"{kind.name}: a count is larger than {bound}")
        try:
            return self._sum_integers(kind, counts, counts.size)
        except RescaleRequested:
            raise _no_scale(kind) from None

    def _sum_integers(self, kind: Kind, integers: NDArray[np.int64] | None, n_values: int) -> NDArray[np.int64]:
        label = self._label(kind, n_values)
        codec = self._processor.codec
        if integers is None:
            self._channel.request_rescale(kind, codec, n_values)
        payload = self._processor.protect(integers, label)
        return self._processor.reveal(self._channel.sum(kind, codec, payload, n_values), label)

    def _rescale(self, family: Family, values: NDArray[np.float64]) -> None:
        old = self._grids[family].bound_exponent
        needed = exponent_of(float(np.abs(values).max(initial=0.0))) + _HEADROOM_EXPONENT
        [exponent] = self._secure_maximum([max(needed, old)])
        if exponent <= old:
            raise ProtocolError(f"a new scale for {family.value} was asked for, but no site needs one")
        self._grids[family] = Grid.for_sum(
            exponent, self._channel.world, self._processor.capacity_bits, self._finest
        )

    def _secure_maximum(self, exponents: list[int]) -> list[int]:
        """Return the largest exponent over all sites, for each position.

        Privacy: a site that takes its own numbers from the sums learns the largest exponent of the other sites.

        For every threshold a site sends 0 if its exponent is below and a uniform 64-bit number otherwise: the masked
        sum is 0 where no site reaches the threshold and uniform where one does (wrong with probability 2^-64).
        """
        thresholds = np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
        clipped = np.clip(exponents, LOWEST_EXPONENT, None)
        if clipped.max(initial=LOWEST_EXPONENT) > HIGHEST_EXPONENT:
            raise CapacityExceeded(f"a value is larger than 2^{HIGHEST_EXPONENT}: rescale labels or weights")
        reached = clipped[:, None] >= thresholds[None, :]
        flags = np.where(reached, random_uint64(reached.size, self._randomness).reshape(reached.shape), np.uint64(0))
        label = self._label(Kind.SCALE, flags.size)
        payload = self._masks.protect(flags.ravel().view(np.int64), label)
        try:
            reply = self._channel.sum(Kind.SCALE, self._masks.codec, payload, flags.size)
        except RescaleRequested:
            raise _no_scale(Kind.SCALE) from None
        any_reached = (self._masks.reveal(reply, label) != 0).reshape(reached.shape)
        counts = any_reached.sum(axis=1)
        if (counts == 0).any() or (any_reached != (np.arange(thresholds.size) < counts[:, None])).any():
            raise ProtocolError("the secure maximum of exponents does not decrypt: a site or the server misbehaved")
        return [int(thresholds[count - 1]) for count in counts]

    def _label(self, kind: Kind, n_values: int) -> MessageLabel:
        return MessageLabel(self._channel.counter, kind.name, str(self._channel.moment), n_values)


def _no_scale(kind: Kind) -> ProtocolError:
    return ProtocolError(f"another scale was asked for {kind.name}, which has none: a site or the server misbehaved")
