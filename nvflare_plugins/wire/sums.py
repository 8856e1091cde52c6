"""Protected sums of real numbers: scale, encode, protect, add at the server, reveal, decode.

Scales. Every quantity (gradients, hessians, weights, labels, each metric's numerator) has a fixed-point grid of its
own, as fine as the capacity allows for the largest value that any site may send. The sites find that largest value
together by a secure maximum of exponents. Each site learns from it the largest exponent of the others, and nothing
else: that is the maximum, but for a site that is alone at the top, which can take its own part from the sums and so
finds the second. The server learns nothing. When training outgrows a scale, all sites agree on a new one and encode
anew; the message that did not fit was never summed.

Integrity. Every sum carries tags under a key that the server lacks (he_processors/sum_tags.py): a site that opens a sum
which is not the sum of what the sites sent ends the job, before anything of it is used. Not so under ``plain``, where
nothing is protected, and where the server is trusted with sums and adds noise to them.

Resolution. With bound B (a power of two, at least every site's value) and W sites the step is W B / 2^59, W rounded up
to a power of two, and a sum is off by at most W/2 steps; a sum over any run of bins by at most W steps. Counts of rows
are integers on their grid, hence exact. Histograms under `bfv` and `ckks` have fewer bits (up to 50, and 44) where that
is enough: where the objective bounds a row's gradient, no weights are in use, and the step stays fine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.field61 import MODULUS
from he_processors.fixed_point import Grid, Grids, exponent_of
from he_processors.masks import MessageLabel
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from he_processors.sum_tags import LARGEST_SUM, N_TAGS, SumTags, changed_sum, random_flags
from nvflare_plugins.wire.channel import Channel, RescaleRequested
from nvflare_plugins.wire.envelope import CURVE_METRICS, Codec, Kind
from nvflare_plugins.wire.profiles import WIDE_CAPACITY_BITS, MaskedSums, SumProcessor

LOWEST_EXPONENT, HIGHEST_EXPONENT = -192, 192
METRIC_FLAGS = 2  # residues behind a metric's parts: whether some site's part is infinite, or no number
RESIDUE_BYTES = 8
_HEADROOM_EXPONENT = 3  # a scale found anew leaves room for values eight times as large


class Family(StrEnum):
    """Quantities of one size share a scale; the numerators of each metric are a quantity of their own."""

    GRADIENTS = "gradients"
    HESSIANS = "hessians"
    WEIGHTS = "weights"  # of rows: their number, where there are none
    LABELS = "labels"
    COUNTS = "counts"
    INVERSE_WEIGHTS = "inverse weights"  # nothing is summed on it: it tells how small a weight is


_PAIRS = (Family.GRADIENTS, Family.HESSIANS)
_QUANTITIES: dict[Kind, tuple[str, ...]] = {
    Kind.HISTOGRAM: _PAIRS,
    Kind.ROOT_SUM: _PAIRS,
    Kind.STUMP_SUM: _PAIRS,
    Kind.WEIGHT_TOTAL: (Family.WEIGHTS,),
    Kind.LABEL_MEAN: (Family.LABELS,),
    Kind.LEAF_QUANTILE: (Family.LABELS,),
}
_Part = tuple[tuple[str, ...], NDArray[np.float64]]
_INTEGER_BOUND_EXPONENT = 45  # counts of rows
_NO_RESIDUES: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
_NO_VALUES: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


def metric_quantity(metric: str) -> str:
    """Return the name of the scale on which a metric's numerator lies."""
    return f"metric {metric}"


def _quantities(kind: Kind, metric: str) -> tuple[str, ...]:
    """Say what the values of a message are, in turn."""
    if kind is not Kind.METRIC:
        return _QUANTITIES[kind]
    # The area under a curve comes with the area that would be full; every other metric with a sum of weights.
    return (metric_quantity(metric),) if metric in CURVE_METRICS else (metric_quantity(metric), Family.WEIGHTS)


class ProtectedSums:
    """Sums over the sites of one job.

    Privacy: what leaves the site is what the processor protects; every site learns the sums.
    """

    def __init__(
        self,
        channel: Channel,
        processor: SumProcessor,
        tags: SumTags | None,
        finest_exponent: int | None = None,
        randomness: RandomSource = OS_RANDOMNESS,
        pairs: SumProcessor | None = None,
    ):
        """Prepare the sums of an attempt.

        Args:
            tags: of the session; None where the server is trusted with sums and may change them. Then there are counts
                alone.
            finest_exponent: steps are not finer than 2^finest_exponent (to compare profiles on one grid).
            pairs: protects integers of gradient pairs that are not wide, in words of their own; None where
                ``processor`` does.
        """
        self._channel = channel
        self._processor, self._pairs = processor, processor if pairs is None else pairs
        self._tags = tags
        self._is_tagged = tags is not None and processor.codec is not Codec.PLAIN
        self._finest = finest_exponent
        self._randomness = randomness
        self._wide_pairs = True
        self._grids: dict[str, Grid] = {
            Family.COUNTS: Grid(0, min(_INTEGER_BOUND_EXPONENT, processor.capacity_bits - channel.world.bit_length()))
        }

    def agree_scales(self, bounds: Mapping[str, float], coarsest_pairs: float = 0.0) -> None:
        """Find the scale of each quantity by a secure maximum over the sites.

        Args:
            bounds: largest magnitude of any value that this site expects to send; the same quantities at all sites.
            coarsest_pairs: the largest step that will do for gradient pairs. Where the scheme's own capacity gives a
                coarser one, they travel wide, at twice the bytes under `bfv` and `ckks`. The same at all sites.
        """
        quantities = sorted(bounds)
        largest = self._secure_maximum([exponent_of(bounds[quantity]) for quantity in quantities])
        self.take_scales(dict(zip(quantities, largest, strict=True)), coarsest_pairs)

    def scales(self) -> dict[str, int]:
        """Return the exponent of each agreed scale's bound, for ``take_scales``."""
        return {name: grid.bound_exponent for name, grid in self._grids.items() if name != Family.COUNTS}

    def take_scales(self, exponents: Mapping[str, int], coarsest_pairs: float = 0.0) -> None:
        """Take the scales that sites have agreed on before; no site sends anything.

        Args:
            exponents: of the largest magnitude of each quantity, the same at all sites.
            coarsest_pairs: see ``agree_scales``.
        """
        self._wide_pairs = False
        pairs = [self._grid(quantity, exponents[quantity]) for quantity in _PAIRS if quantity in exponents]
        self._wide_pairs = any(2.0**grid.exponent > coarsest_pairs for grid in pairs)
        for quantity, exponent in exponents.items():
            self._grids[quantity] = self._grid(quantity, exponent)

    def _grid(self, quantity: str, bound_exponent: int) -> Grid:
        capacity = WIDE_CAPACITY_BITS if self._is_wide((quantity,)) else self._processor.capacity_bits
        return Grid.for_sum(bound_exponent, self._channel.world, capacity, self._finest)

    def _is_wide(self, quantities: tuple[str, ...]) -> bool:
        return self._wide_pairs or quantities[0] not in _PAIRS

    def tighten(self, quantity: str, bound: float) -> None:
        """Take a finer grid where a smaller bound follows from what all sites have received alike.

        No site tells anything: the bound is computed from released sums. Should it prove too small for a site, the
        sites agree on a wider one as always.
        """
        exponent = max(exponent_of(bound), LOWEST_EXPONENT)
        if exponent < self._grids[quantity].bound_exponent:
            self._grids[quantity] = self._grid(quantity, exponent)

    def scale_of(self, quantity: str) -> Grid:
        """Return the grid in use."""
        return self._grids[quantity]

    def sum(self, kind: Kind, values: NDArray[np.float64], metric: str = "") -> NDArray[np.float64]:
        """Add the sites' real numbers.

        A metric's part that is infinite at some site, or no number, is so in the result, as it would be on the pooled
        rows; which site's it was stays hidden.

        Shapes: values: float64[n], the same n at all sites; result: float64[n], identical at all sites.

        Args:
            metric: its name, for METRIC alone.

        Raises:
            CapacityExceeded: a value is not finite.
            ProtocolError: the answer is not a sum of this exchange.
            JobAborted: the job was ended meanwhile.
        """
        if kind is Kind.METRIC:
            return self.sum_metrics([(metric, values)])[0]
        return self._sum_parts(kind, [(_quantities(kind, metric), values)], _NO_RESIDUES)[0][0]

    def sum_metrics(self, parts: Sequence[tuple[str, NDArray[np.float64]]]) -> list[NDArray[np.float64]]:
        """Add the sites' parts of several metrics in one exchange.

        Shapes: parts: (metric's name, float64[n of its parts]); result: float64[n] for each, identical at all sites.

        Raises:
            ProtocolError, JobAborted: as ``sum``.
        """
        finite, flags = self._finite(parts)
        return _marked(*self._sum_parts(Kind.METRIC, finite, flags))

    @property
    def takes_metrics(self) -> bool:
        """Whether ``add_with_metrics`` may be called: residues are masked, and no more than that."""
        return self._tags is not None and self._processor.codec in (Codec.PLAIN, Codec.MASKED)

    def add_with_metrics(
        self,
        integers: NDArray[np.int64] | None,
        n_values: int,
        *,
        wide: bool,
        parts: Sequence[tuple[str, NDArray[np.float64]]],
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """Add a root's integers as ``add`` does and parts of metrics as ``sum_metrics`` does, in one exchange.

        The parts' integers travel as residues behind the root's, masked under ``plain`` as well.

        Shapes: as of both.

        Raises:
            RescaleRequested: integers or parts of some site do not fit; nothing was summed.
            ProtocolError, JobAborted: as ``add``.
        """
        finite, flags = self._finite(parts)
        grids, own = self._encoded(Kind.METRIC, finite)
        ends = np.cumsum([values.size for _, values in finite])
        label = self._label(Kind.HISTOGRAM_METRIC, n_values)
        if own is None:
            integers, own = None, np.zeros(ends[-1], dtype=np.int64)
        residues = np.concatenate([np.where(own < 0, own + MODULUS, own).view(np.uint64), flags])
        processor = self._processor if wide else self._pairs
        added, opened = self._sum_integers(
            Kind.HISTOGRAM_METRIC, integers, n_values, residues, wide=wide, processor=processor
        )
        centred = np.where(opened > LARGEST_SUM, opened - np.uint64(MODULUS), opened).view(np.int64)[: ends[-1]]
        if np.abs(centred).max() > 1 << WIDE_CAPACITY_BITS:
            raise changed_sum(label)
        totals = [grid.decode(one) for grid, one in zip(grids, np.split(centred, ends[:-1]), strict=True)]
        return added, _marked(totals, opened[ends[-1] :])

    def _finite(self, parts: Sequence[tuple[str, NDArray[np.float64]]]) -> tuple[list[_Part], NDArray[np.uint64]]:
        """Return metrics' parts without infinities and NaN, and flags that tell of these."""
        # As in the secure maximum: the sum tells whether a site has one, not how many do.
        found = [is_so(values).any() for _, values in parts for is_so in (np.isinf, np.isnan)]
        flags = random_flags(np.array(found), self._randomness)
        return [(_quantities(Kind.METRIC, name), np.where(np.isfinite(v), v, 0.0)) for name, v in parts], flags

    def _sum_parts(
        self, kind: Kind, parts: Sequence[_Part], flags: NDArray[np.uint64]
    ) -> tuple[list[NDArray[np.float64]], NDArray[np.uint64]]:
        """Add vectors whose values are, in turn, of the quantities named beside them; all in one message."""
        wide = self._is_wide(parts[0][0])
        ends = np.cumsum([values.size for _, values in parts])
        while True:
            grids, integers = self._encoded(kind, parts)
            try:
                total, opened = self._sum_integers(kind, integers, int(ends[-1]), flags, wide=wide)
            except RescaleRequested:
                self._rescale([(*part, grid) for part, grid in zip(parts, grids, strict=True)])
                continue
            return [g.decode(one) for g, one in zip(grids, np.split(total, ends[:-1]), strict=True)], opened

    def _encoded(self, kind: Kind, parts: Sequence[_Part]) -> tuple[list[Grids], NDArray[np.int64] | None]:
        """Return the grids of vectors, and their integers in turn; None where a value is above its bound."""
        grids = [Grids(tuple(self._grids[quantity] for quantity in quantities)) for quantities, _ in parts]
        try:
            encoded = [
                grid.encode_running(values) if kind is Kind.HISTOGRAM else grid.encode(values)
                for grid, (_, values) in zip(grids, parts, strict=True)
            ]
        except CapacityExceeded:
            if not all(np.isfinite(values).all() for _, values in parts):
                raise _not_finite(kind) from None
            return grids, None
        return grids, np.concatenate(encoded)

    def add(self, kind: Kind, integers: NDArray[np.int64] | None, n_values: int, *, wide: bool) -> NDArray[np.int64]:
        """Add integers that lie on one grid at all sites already, exactly.

        Shapes: integers: int64[n_values]; result: int64[n_values], identical at all sites.

        Args:
            integers: their sum over all sites is at most 2^59 in magnitude where ``wide``, else at most
                2^pair_capacity_bits, and below it in words of 32 bits; None asks for another grid in their place.

        Raises:
            RescaleRequested: some site has asked for another grid; nothing was summed.
            ProtocolError: the answer is not a sum of this exchange.
            JobAborted: the job was ended meanwhile.
        """
        processor = self._processor if wide else self._pairs
        return self._sum_integers(kind, integers, n_values, _NO_RESIDUES, wide=wide, processor=processor)[0]

    def sum_counts(self, kind: Kind, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add the sites' integers exactly. Shapes: counts: int64[n]; result: int64[n]."""
        bound = 1 << self._grids[Family.COUNTS].bound_exponent
        if counts.size and not -bound <= counts.min() <= counts.max() <= bound:
            raise CapacityExceeded(f"{kind.name}: a count is larger than {bound}")
        try:
            return self._sum_integers(kind, counts, counts.size, _NO_RESIDUES, wide=False)[0]
        except RescaleRequested:
            raise _no_scale(kind) from None

    def _sum_integers(
        self,
        kind: Kind,
        integers: NDArray[np.int64] | None,
        n_values: int,
        flags: NDArray[np.uint64],
        *,
        wide: bool,
        processor: SumProcessor | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Add integers, and residues beside them; ask for another scale in the place of integers that do not fit."""
        processor = processor or self._processor
        label, codec = self._label(kind, n_values), processor.codec
        tail = RESIDUE_BYTES * (flags.size + N_TAGS * self._is_tagged)
        if integers is None:
            self._channel.request_rescale(kind, codec, n_values, tail)
        if self._tags is None or not tail:
            reply = self._channel.sum(kind, codec, processor.protect(integers, label, wide=wide), n_values)
            return processor.reveal(reply, label, wide=wide), flags
        payload = _protected(processor, integers, label, wide=wide)
        residues = self._tags.protect(integers if self._is_tagged else None, flags, label)
        payload = b"".join((payload, _packed(residues)))
        reply = self._channel.sum(kind, codec, payload, n_values, tail)
        try:
            total = _opened(processor, reply, tail, label, wide=wide)
        except ProtocolError:
            if self._is_tagged:  # what a scheme says of a sum that it cannot open may depend on values
                raise changed_sum(label) from None
            raise
        return total, self._tags.open(total if self._is_tagged else None, _unpacked(reply, tail), label)

    def _rescale(self, parts: Sequence[tuple[tuple[str, ...], NDArray[np.float64], Grids]]) -> None:
        old: dict[str, int] = {}
        needed: dict[str, int] = {}
        for quantities, values, grids in parts:
            largest = np.abs(values.reshape(-1, len(quantities))).max(axis=0, initial=0.0)
            of_each = zip(quantities, largest, grids.exceeded(values), grids.of, strict=True)
            for quantity, value, is_exceeded, grid in of_each:
                old[quantity] = grid.bound_exponent
                wanted = exponent_of(float(value)) + _HEADROOM_EXPONENT if is_exceeded else grid.bound_exponent
                needed[quantity] = max(wanted, needed.get(quantity, wanted))
        agreed = self._secure_maximum(list(needed.values()))
        if all(new <= exponent for new, exponent in zip(agreed, old.values(), strict=True)):
            raise ProtocolError(f"a new scale for {', '.join(old)} was asked for, but no site needs one")
        for quantity, new in zip(needed, agreed, strict=True):
            self._grids[quantity] = self._grid(quantity, new)

    @property
    def pair_capacity_bits(self) -> int:
        """Return the bits of sums of gradient pairs in narrow messages."""
        return self._pairs.capacity_bits

    @property
    def rows_are_exact(self) -> bool:
        """Return whether integers of rows travel as they are; CKKS, whose words are few, gets sums that are rounded."""
        return self._processor.codec is not Codec.CKKS

    def largest_exponents(self, bounds: Sequence[float]) -> list[int]:
        """Return the smallest e with 2^e at least the largest of all sites' bounds, for each position.

        Privacy: as a scale's, see above.
        """
        return self._secure_maximum([exponent_of(bound) for bound in bounds])

    def _secure_maximum(self, exponents: list[int]) -> list[int]:
        """Return the largest exponent over all sites, for each position.

        Privacy: a site that takes its own numbers from the sums learns the largest exponent of the other sites.

        For every threshold a site sends 0 if its exponent is below and a uniform residue modulo p = 2^61 - 1 otherwise:
        the sum is 0 where no site reaches the threshold and uniform where one does (wrong with probability 1/p).
        """
        thresholds = np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
        clipped = np.clip(exponents, LOWEST_EXPONENT, None)
        if clipped.max(initial=LOWEST_EXPONENT) > HIGHEST_EXPONENT:
            raise CapacityExceeded(f"a value is larger than 2^{HIGHEST_EXPONENT}: rescale labels or weights")
        reached = clipped[:, None] >= thresholds[None, :]
        any_reached = self.any_site(Kind.SCALE, reached)
        counts = any_reached.sum(axis=1)
        if (counts == 0).any() or (any_reached != (np.arange(thresholds.size) < counts[:, None])).any():
            raise ProtocolError("the secure maximum of exponents does not decrypt: a site or the server misbehaved")
        return [int(thresholds[count - 1]) for count in counts]

    def any_site(self, kind: Kind, is_set: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Tell for each flag whether some site has set it, and no more. Masked under every profile.

        Shapes: is_set: bool[...], the same shape at all sites; result: likewise, identical at all sites.

        Privacy: a flag that is set travels as a uniform residue, so that the sum does not tell how many sites have set
            it. A site that takes its own residue away learns whether another one has. A sum is 0 by chance once in
            2^61 times.

        Raises:
            ProtocolError: the answer is not a sum of this exchange.
            JobAborted: the job was ended meanwhile.
        """
        if self._tags is None:
            raise ValueError(f"{kind.name}: there are no such sums where the server is trusted with them")
        label, flags = self._label(kind, 0), random_flags(is_set.ravel(), self._randomness)
        residues = self._tags.protect(_NO_VALUES, flags, label)
        try:
            reply = self._channel.sum(kind, Codec.MASKED, _packed(residues), 0, residues.nbytes)
        except RescaleRequested:
            raise _no_scale(kind) from None
        if len(reply) != residues.nbytes:
            raise ProtocolError(f"{label.kind}: {len(reply)} bytes where {residues.size} residues of 8 bytes are due")
        opened = self._tags.open(_NO_VALUES, _unpacked(reply, residues.nbytes), label)
        is_set_somewhere: NDArray[np.bool_] = (opened != 0).reshape(is_set.shape)
        return is_set_somewhere

    def _label(self, kind: Kind, n_values: int) -> MessageLabel:
        return MessageLabel(self._channel.counter, kind.name, str(self._channel.moment), n_values)


# A long message under masks is not copied for the sake of the few bytes behind it.


def _protected(
    processor: SumProcessor, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool
) -> bytes | memoryview:
    if isinstance(processor, MaskedSums):
        return processor.protected(integers, label)
    return processor.protect(integers, label, wide=wide)


def _opened(processor: SumProcessor, reply: bytes, tail: int, label: MessageLabel, *, wide: bool) -> NDArray[np.int64]:
    end = len(reply) - tail
    if isinstance(processor, MaskedSums):
        return processor.reveal(memoryview(reply)[:end], label, wide=wide)
    return processor.reveal(reply[:end], label, wide=wide)


def _marked(totals: list[NDArray[np.float64]], flags: NDArray[np.uint64]) -> list[NDArray[np.float64]]:
    """Return metrics' parts with what their flags tell."""
    for total, (is_infinite, is_nan) in zip(totals, flags.reshape(-1, METRIC_FLAGS), strict=True):
        if is_infinite or is_nan:
            total[0] = np.nan if is_nan else np.inf
    return totals


def _packed(residues: NDArray[np.uint64]) -> bytes:
    return residues.astype("<u8", copy=False).tobytes()


def _unpacked(reply: bytes, tail: int) -> NDArray[np.uint64]:
    """Return the residues at the end of a sum; frames with a tail that is longer than they are do not arrive."""
    return np.frombuffer(reply, dtype="<u8", offset=len(reply) - tail).astype(np.uint64)


def _not_finite(kind: Kind) -> CapacityExceeded:
    return CapacityExceeded(
        f"{kind.name}: this site's value is not finite; check labels, weights and the objective for infinities"
    )


def _no_scale(kind: Kind) -> ProtocolError:
    return ProtocolError(f"another scale was asked for {kind.name}, which has none: a site or the server misbehaved")
