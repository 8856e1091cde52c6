"""A passive party's half of the additive schemes: it adds protected pairs into bins, and hides the sums.

Both halves exchange opaque bytes, so that schemes are interchangeable: Paillier, ElGamal on a curve, or a stand-in
without encryption. A party's rows are in this process or at its workers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import AdditiveScheme, PublicKey, Scheme, StaysInProcess
from he_processors.bignum import registry
from he_processors.bignum.interface import Residues
from he_processors.ciphertext_wire import CiphertextHeader, Content, decode_ciphertexts, public_key_from_bytes
from he_processors.curve.interface import AFFINE_BYTES, Curve, PointColumn, Points
from he_processors.curve.registry import AUTO, BACKEND_NAMES, open_curve
from he_processors.elgamal import bin_sums, encryption
from he_processors.elgamal.bin_sums import Content as PointContent
from he_processors.errors import BackendUnavailable, CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import WORD_BITS, PackingLayout, PairFormat, lower_words
from he_processors.histogram.planner import BinCodes, BinLayout, plan_level
from he_processors.histogram.sums import BinMasks, BinNoise, MaskedFormat, add_unhidden, pack_and_hide, sum_bins
from he_processors.paillier import PAILLIER, Rerandomiser
from nvflare_plugins.kinds.vertical.messages import TrainingSetup
from nvflare_plugins.workers.worker_connection import WorkerPart, reduce_scatter
from nvflare_plugins.workers.workers import Work, Workers, begin, collect, note_rows, shard_rows

PAIR = np.dtype("<i8")
Added = BinNoise | BinMasks
"""What is added to sums before they leave."""
Terms = tuple[str, bool, tuple[tuple[int, int], int, bool]]
"""Backend, whether keys that protect nothing will do, and the fields of ``PairsForm``."""
_BLOCK_ROWS = 1 << 14
GRADIENT_BLOCK_ROWS = 1 << 13
"""Rows whose gradients travel together: few, so that encrypting and sending overlap, but enough for fast batches."""


Timer = Callable[[str], AbstractContextManager[None]]
"""Measures a stage of a party's work."""


def untimed(stage: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


class MaskPool:
    """How many masks a passive party makes ahead: as many as the last tree took, for there is no better guess."""

    def __init__(self, masks: bin_sums.Hider | Rerandomiser, most: int, at_once: int):
        """Args: most: that are kept; at_once: made while a question may wait."""
        self._masks, self._most, self._at_once = masks, most, at_once
        self._ready = self._used = self._used_before = 0

    def begin_tree(self) -> None:
        """Note that a tree begins."""
        self._used_before, self._used = max(self._used, self._used_before // 2), 0

    def use(self, n: int) -> None:
        """Note that so many are about to be taken."""
        self._used += n
        self._ready = max(self._ready - n, 0)

    def prepare(self, *, is_last: bool) -> bool:
        """Make some more; return whether further ones are due."""
        due = max(self._used_before - self._used, 0) if is_last else max(self._used_before, self._used)
        due = min(due, self._most)
        if self._ready >= due:
            return False
        self._ready = min(self._ready + self._at_once, due)
        self._masks.fill(self._ready)
        return self._ready < due


def check_clear_pairs(pairs: NDArray[np.int64], unit_bits: int) -> None:
    """Check the bounds of pairs that came in the clear: under encryption nobody can, here everybody can.

    Beyond them sums could overflow, and would no longer be those of the format that both parties know.

    Shapes: pairs: int64[n, 2], gradients and hessians in steps of 2^-unit_bits.

    Raises:
        ProtocolError: a gradient outside of [-1, 1] or a hessian outside of [0, 1].
    """
    most = 1 << unit_bits
    g, h = pairs[:, 0], pairs[:, 1]
    if g.size and (g.min() < -most or g.max() > most or h.min() < 0 or h.max() > most):
        raise ProtocolError(
            "gradients: a message of the active party with gradient pairs in the clear holds one beyond the bounds of "
            f"the number format that it announced (fraction_bits {unit_bits}). Remedy: have the active party run the "
            "released version, or choose a profile with encryption"
        )


def _only_noise(added: Added) -> BinNoise:
    """Return noise. Raises: TypeError: masks, which need ciphertexts in this process."""
    if not isinstance(added, BinNoise):
        raise TypeError("masks are added to Paillier's sums in one process alone")
    return added


class ProtectedPairs:
    """The pairs of a tree's rows as a passive party, or one of its workers, computes with them. Sums are opaque.

    A level's sums are added in two steps. Whoever holds rows adds their pairs (``sum``). Where workers share the rows,
    each then takes a range of the slots and adds to its own partial sums those of the others (``part``, ``add``). At
    last sums are noised in the preset noised, packed and hidden (``finish``). Sums are exact, so that what is opened
    does not depend on the division.

    Security: partial sums are not hidden, and stay within the party. Only what ``finish`` returns leaves it.

    Attributes:
        stage: what the time of ``finish`` counts as.
        is_streamed: sums come in blocks of features.
        unit: slots that share a ciphertext.
    """

    stage: str
    is_streamed = True
    unit = 1

    def begin(self, n_rows: int) -> None:
        """Forget the pairs of the tree before; so many come."""
        raise NotImplementedError

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        """Check a block of pairs, and take some of its rows. Raises: ProtocolError: it is not one of so many pairs."""
        raise NotImplementedError

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> Any:
        """Add the pairs of each node into bins. Rows are numbered in the order in which they were taken."""
        raise NotImplementedError

    def part(self, sums: Any, slots: slice) -> list[bytes]:
        """Return some slots of sums for another worker, column by column."""
        raise NotImplementedError

    def add(self, sums: Any, slots: slice, others: Sequence[Sequence[bytes]]) -> Any:
        """Return some slots of sums with what other workers have there added."""
        raise NotImplementedError

    def finish(self, sums: Any, noise: Added | None = None) -> list[bytes]:
        """Return sums as they may leave the party, without a header, column by column.

        Args:
            noise: one value for each of these sums, added before they are hidden; None where sums are exact.
        """
        raise NotImplementedError

    def prepare(self, *, is_last: bool) -> bool:
        """Make a little of what ``finish`` needs; return whether more is due."""
        return False

    def sums_header(self, n_slots: int) -> bytes:
        """Return what stands before the sums that leave."""
        return b""


class HistogramMaker:
    """A passive party's half in this process: adds protected pairs into bins, and hides the sums. Needs no secret.

    Attributes:
        is_streamed: sums come in blocks of features (``feature_blocks``); the same at both halves.
    """

    def __init__(self, pairs: ProtectedPairs, timer: Timer = untimed) -> None:
        """Args: timer: measures the stages "receive", "histogram", "prepare", and that of hiding."""
        self.is_streamed = pairs.is_streamed
        self._pairs, self._timer = pairs, timer
        self._n_rows = self._n_blocks = 0

    def hold(self, codes: BinCodes) -> None:
        """Take the party's bin codes, before the first tree; here they come with each question.

        Shapes: codes: uint8 or uint16[n_features, n_rows].
        """

    def begin_tree(self, n_rows: int) -> None:
        """Forget the pairs of the tree before."""
        self._n_rows, self._n_blocks = n_rows, 0
        self._pairs.begin(n_rows)

    def add_gradients(self, gradients: bytes) -> None:
        """Take the next block of the tree's protected pairs, all that are missing or GRADIENT_BLOCK_ROWS of them.

        Raises:
            ProtocolError: they are not exactly so many valid ones.
        """
        first = self._n_blocks * GRADIENT_BLOCK_ROWS
        n_due = min(GRADIENT_BLOCK_ROWS, self._n_rows - first)
        if n_due <= 0:
            raise ProtocolError("more gradients than the tree has rows")
        with self._timer("receive"):
            self._take(gradients, first, n_due)
        self._n_blocks += 1

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: Added | None = None,
    ) -> bytes:
        """Add the pairs of each node into bins, and hide which rows made them.

        Args:
            features: the numbers of the features that these codes are of, for workers that hold the codes of all.
            noise: what is added to the sums before they are hidden, noise or masks; None for exact sums.

        Shapes: codes: uint8 or uint16[n_features, n_rows]; node_rows: int32[n_node_rows] for each node.
        """
        if not self._n_blocks or self._n_blocks * GRADIENT_BLOCK_ROWS < self._n_rows:
            raise ProtocolError("sums are asked for before the gradients of all rows came")
        columns = self._hidden(codes, layout, node_rows, features, noise)
        return b"".join([self._pairs.sums_header(len(node_rows) * layout.n_slots), *columns])

    def prepare(self, *, is_last: bool) -> bool:
        """Make a little of what hides later sums, while nothing else is to do; return whether more is due.

        Args:
            is_last: no tree follows the present one.
        """
        with self._timer("prepare"):
            return self._pairs.prepare(is_last=is_last)

    def _take(self, gradients: bytes, first: int, n_rows: int) -> None:
        self._pairs.take(gradients, n_rows, slice(0, n_rows))

    def _hidden(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None,
        noise: Added | None,
    ) -> list[bytes]:
        """Return the sums as they leave, column by column."""
        with self._timer("histogram"):
            sums = self._pairs.sum(codes, layout, node_rows)
        with self._timer(self._pairs.stage):
            return self._pairs.finish(sums, noise)


class ClearPairs(ProtectedPairs):
    """Pairs in the clear: profile ``plain``. Security: none."""

    stage = "histogram"
    is_streamed = False

    def __init__(self, pair_format: PairFormat | None = None, n_words: int = 1) -> None:
        """Args: pair_format: None takes any pairs, in tests alone."""
        self._format, self._n_words = pair_format, n_words
        self._blocks: list[NDArray[np.int64]] = []
        self._pairs: NDArray[np.int64] | None = None
        self._codes: BinCodes | None = None
        self._codes_of_row = np.empty((0, 0), dtype=np.uint8)

    def begin(self, n_rows: int) -> None:
        self._blocks, self._pairs = [], None

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        if len(block) != 2 * PAIR.itemsize * n_block_rows:
            raise ProtocolError(f"expected {n_block_rows} gradient pairs")
        pairs = np.frombuffer(block, dtype=PAIR).reshape(n_block_rows, 2)[rows]
        if self._format is not None:
            check_clear_pairs(pairs, self._format.fraction_bits)
        self._blocks.append(pairs)

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
        if self._pairs is None:
            self._pairs = self._in_words(np.concatenate(self._blocks))
            self._blocks = []
        if self._codes is not codes:
            self._codes, self._codes_of_row = codes, np.ascontiguousarray(codes.T)
        sums = [self._sum_node(self._pairs, layout, rows) for rows in node_rows]
        return np.concatenate(sums) if sums else np.empty((0, 2 * self._n_words), dtype=np.int64)

    def part(self, sums: NDArray[np.int64], slots: slice) -> list[bytes]:
        return [sums[slots].astype(PAIR, copy=False).tobytes()]

    def add(self, sums: NDArray[np.int64], slots: slice, others: Sequence[Sequence[bytes]]) -> NDArray[np.int64]:
        total = sums[slots].copy()
        for (data,) in others:
            total += np.frombuffer(data, dtype=PAIR).reshape(-1, 2 * self._n_words)
        return total

    def finish(self, sums: NDArray[np.int64], noise: Added | None = None) -> list[bytes]:
        if noise is not None:
            noise = _only_noise(noise)
            if self._format is not None:
                noise.check(self._format, len(sums))
            sums = sums + np.stack([noise.g, noise.h], axis=1)
        return self.part(sums, slice(None))

    def _in_words(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return pairs as sums take them. Shapes: pairs: int64[n_rows, 2]; result: int64[n_rows, 2 * n_words]."""
        if self._n_words == 1:
            return pairs
        low = lower_words(pairs)  # each value as two, whose sums fit 64 bits; the upper one counts 2^20
        return np.stack([low, (pairs - low) >> WORD_BITS], axis=2).reshape(len(pairs), 2 * self._n_words)

    def _sum_node(self, pairs: NDArray[np.int64], layout: BinLayout, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        from scipy import sparse

        # The sums are a product with the 0/1 matrix of slots and rows, block by block to bound the memory.
        total = np.zeros((layout.n_slots, 2 * self._n_words), dtype=np.int64)
        first_slots = layout.starts[:-1].astype(np.int32)
        n_cells = min(rows.size, _BLOCK_ROWS) * layout.n_features
        ones, ends = np.ones(n_cells, dtype=np.int64), np.arange(0, n_cells + 1, layout.n_features, dtype=np.int32)
        for start in range(0, rows.size, _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            slots = self._codes_of_row[block] + first_slots
            cells = (ones[: slots.size], slots.reshape(-1), ends[: block.size + 1])
            shape = (layout.n_slots, block.size)
            total += sparse.csc_array(cells, shape=shape, copy=False) @ pairs[block]
        return total


# The additive scheme of profile ``elgamal``: rows of points on a curve, through he_processors.
#
# One row of points per training row and tree carries the digits of gradient and hessian under one randomiser. Sums come
# back bin by bin, each multiplied by 8 and re-randomised, so that the key owner sees the sums of digits and nothing of
# the rows behind them.
#
# Security: the secret scalars stay with ``ElGamalGradientOwner``. Passive parties are honest but curious, as under
#     every additive scheme.

REFERENCE = "reference"
_MOST_POINT_MASKS = 1 << 16  # some 50 MB
_POINT_MASKS_AT_ONCE = 1 << 12  # a hundredth of a second: a question waits so long at most


class PointPairs(StaysInProcess, ProtectedPairs):
    """Rows of points: profile ``elgamal``."""

    stage = "hide"

    def __init__(self, public_key: encryption.ElGamalPublicKey, digits: encryption.DigitFormat, curve: Curve) -> None:
        self._public_key, self._digits, self._curve = public_key, digits, curve
        self._columns: list[PointColumn] = []
        self._pairs: list[Points] = []

    @cached_property
    def _hider(self) -> bin_sums.Hider:
        return bin_sums.Hider(self._public_key, self._curve)  # its tables take a while: made where sums are hidden

    @cached_property
    def _pool(self) -> MaskPool:
        return MaskPool(self._hider, _MOST_POINT_MASKS, _POINT_MASKS_AT_ONCE)

    def sums_header(self, n_slots: int) -> bytes:
        return self._header(PointContent.BINS, n_slots).to_bytes()

    def begin(self, n_rows: int) -> None:
        self._columns, self._pairs = [], []  # before the next ones need their memory
        self._pool.begin_tree()
        self._columns = [self._curve.column(n_rows) for _ in range(1 + self._digits.n_messages)]

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        found = bin_sums.read_rows(
            bin_sums.open_message(block, self._header(PointContent.PAIRS, n_block_rows)), self._curve, rows
        )
        for column, points in zip(self._columns, found.columns, strict=True):
            column.append(points)

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> list[Points]:
        if not self._pairs:
            self._pairs = [column.whole() for column in self._columns]
        plan = plan_level(codes, layout, node_rows, cell_cost=bin_sums.CELL_COST)
        add = bin_sums.bin_summer(self._curve, len(self._pairs[0]), plan)
        return [add(column) for column in self._pairs]

    def part(self, sums: list[Points], slots: slice) -> list[bytes]:
        return [self._curve.to_affine(self._slots(column, slots)).tobytes() for column in sums]

    def add(self, sums: list[Points], slots: slice, others: Sequence[Sequence[bytes]]) -> list[Points]:
        total = [self._slots(column, slots) for column in sums]
        for other in others:
            total = [self._curve.add(own, self._read(data)) for own, data in zip(total, other, strict=True)]
        return total

    def finish(self, sums: list[Points], noise: Added | None = None) -> list[bytes]:
        n_slots = len(sums[0])
        if noise is not None:
            noise = _only_noise(noise)
            numbers = range(1, len(sums))
            added = [bin_sums.noise_points(self._curve, self._digits, noise, number, n_slots) for number in numbers]
            sums = [sums[0], *map(self._curve.add, sums[1:], added)]
        self._pool.use(n_slots)
        masks = self._hider.draw(n_slots)
        hidden = [self._hider.hide(number, bins, masks) for number, bins in enumerate(sums)]
        return [bin_sums.write_column(self._digits, self._curve, column).tobytes() for column in hidden]

    def prepare(self, *, is_last: bool) -> bool:
        return self._pool.prepare(is_last=is_last)

    def _header(self, content: PointContent, count: int) -> bin_sums.PointHeader:
        return bin_sums.PointHeader(self._public_key, content, self._digits, count)

    def _slots(self, column: Points, slots: slice) -> Points:
        return self._curve.take(column, np.arange(slots.start, slots.stop, dtype=np.int64))

    def _read(self, data: bytes) -> Points:
        return self._curve.from_affine(np.frombuffer(data, dtype=np.uint8).reshape(-1, AFFINE_BYTES))


class PairsForm(NamedTuple):
    """What the job says of pairs, beside the announcement.

    Attributes:
        tails: of the noise on sums (``PairFormat``); (0, 0) for exact sums.
        point_bytes: of a point in messages, under elgamal.
        is_masked: sums leave with masks on them, which the party keeps.
    """

    tails: tuple[int, int] = (0, 0)
    point_bytes: int = AFFINE_BYTES
    is_masked: bool = False

    @classmethod
    def of(cls, pairs: PairFormat) -> PairsForm:
        """Return the form of a format that was opened."""
        return cls(pairs.tails, getattr(pairs, "point_bytes", AFFINE_BYTES), isinstance(pairs, MaskedFormat))


EXACT_PAIRS = PairsForm()


def read_elgamal_setup(
    setup: TrainingSetup, backend: str = AUTO, form: PairsForm = EXACT_PAIRS
) -> tuple[encryption.ElGamalPublicKey, encryption.DigitFormat, Curve]:
    """Read an announcement. Raises: ProtocolError: it holds another number format, or no usable key."""
    if setup.fraction_bits not in encryption.FRACTION_BITS or (
        any(form.tails) and setup.fraction_bits != encryption.NOISED_FRACTION_BITS
    ):
        raise ProtocolError("the active party announced a number format that elgamal does not have")
    curve = require_curve(backend)
    digits = encryption.DigitFormat.of(setup.fraction_bits, setup.max_additions, form.tails, form.point_bytes)
    public_key = encryption.ElGamalPublicKey.from_bytes(setup.public_key, curve)
    if public_key.n_messages != digits.n_messages:
        raise ProtocolError("the public key has another number of points than the format has digits")
    return public_key, digits, curve


def require_curve(backend: str = AUTO) -> Curve:
    """Open the curve; a backend of big numbers that has no curve leaves the choice to this machine.

    Raises:
        BackendUnavailable: this machine has no compiled backend of the curve, and would take hours.
    """
    curve = open_curve(backend if backend in BACKEND_NAMES else AUTO)
    if curve.name == REFERENCE:
        raise BackendUnavailable(
            "profile elgamal needs the C extension, which was not built when this package was installed: install it "
            "where there is a C compiler, or choose profile paillier"
        )
    return curve


# The additive scheme with encryption: Paillier, through he_processors.
#
# One ciphertext per row and tree carries gradient and hessian; sums come back packed, many bins to a ciphertext, and
# re-randomised, so that the key owner cannot tell which rows made them.
#
# Security: the secret key stays with ``EncryptedGradientOwner``. Passive parties are honest but curious: one that
#     returns chosen ciphertexts as sums would learn nothing itself, but could make the key owner's tree depend on it.
# Reference: SecureBoost (Cheng et al., 2021), section 4.

CLEAR_CODE = 0
_MOST_MASKS = 1 << 14  # encryptions of zero: 16 MB at 3072 bits
_MASKS_AT_ONCE = 1 << 6  # some hundredths of a second: a question waits so long at most


class CiphertextPairs(StaysInProcess, ProtectedPairs):
    """One ciphertext a row: profile ``paillier``, and schemes of others."""

    stage = "pack"

    def __init__(self, public_key: PublicKey, pair_format: PairFormat, backend: str = registry.AUTO) -> None:
        self._public_key, self._packing = public_key, PackingLayout.fit(pair_format, public_key.plaintext_bits)
        self.unit = self._packing.pairs_per_plaintext
        self._arithmetic = registry.open_backend(backend, public_key.modulus)
        self._blocks: list[Residues] = []
        self._pairs: Residues | None = None

    @cached_property
    def _rerandomiser(self) -> Rerandomiser:
        return Rerandomiser(self._public_key, self._arithmetic)  # its tables take a while: made where sums are hidden

    @cached_property
    def _pool(self) -> MaskPool:
        return MaskPool(self._rerandomiser, _MOST_MASKS, _MASKS_AT_ONCE)

    def sums_header(self, n_slots: int) -> bytes:
        return self._header(Content.PACKED_BINS, self._packing.n_ciphertexts(n_slots)).to_bytes()

    def begin(self, n_rows: int) -> None:
        self._blocks, self._pairs = [], None
        self._pool.begin_tree()

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        found = decode_ciphertexts(block, self._header(Content.PAIRS, n_block_rows), self._arithmetic)
        if rows != slice(0, n_block_rows):
            found = self._arithmetic.take(found, np.arange(rows.start, rows.stop, dtype=np.int64))
        self._blocks.append(found)

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> Residues:
        if self._pairs is None:
            self._pairs = self._blocks[0] if len(self._blocks) == 1 else self._arithmetic.concat(self._blocks)
            self._blocks = []
        return sum_bins(self._arithmetic, self._pairs, plan_level(codes, layout, node_rows))

    def part(self, sums: Residues, slots: slice) -> list[bytes]:
        return [self._arithmetic.to_wire(self._slots(sums, slots)).tobytes()]

    def add(self, sums: Residues, slots: slice, others: Sequence[Sequence[bytes]]) -> Residues:
        total = self._slots(sums, slots)
        for (data,) in others:
            rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, self._arithmetic.width)
            total = self._arithmetic.mul(total, self._arithmetic.from_wire(rows))
        return total

    def finish(self, sums: Residues, noise: Added | None = None) -> list[bytes]:
        if noise is not None:
            sums = add_unhidden(self._public_key, self._arithmetic, sums, noise, self._packing.pair_format)
        self._pool.use(self._packing.n_ciphertexts(len(sums)))
        hidden = pack_and_hide(sums, self._packing, self._rerandomiser)
        return [self._arithmetic.to_wire(hidden).tobytes()]

    def prepare(self, *, is_last: bool) -> bool:
        return self._pool.prepare(is_last=is_last)

    def _header(self, content: Content, count: int) -> CiphertextHeader:
        return CiphertextHeader(self._public_key, content, self._packing, count)

    def _slots(self, sums: Residues, slots: slice) -> Residues:
        return self._arithmetic.take(sums, np.arange(slots.start, slots.stop, dtype=np.int64))


def histogram_maker(  # noqa: PLR0913 - what was announced, the rest by name
    setup: TrainingSetup,
    n_rows: int,
    workers: Workers | None = None,
    *,
    allow_clear: bool = False,
    backend: str = registry.AUTO,
    allow_toy_keys: bool = False,
    timer: Timer = untimed,
    form: PairsForm = EXACT_PAIRS,
    numbers: AdditiveScheme = PAILLIER,
) -> HistogramMaker:
    """Open a passive party's half from the active party's announcement.

    Args:
        workers: that hold the rows, in shards (``shard_rows``); None is this process.
        allow_clear: accept gradients in the clear; only where the job names `plain` and the party's policy allows it.
        allow_toy_keys: accept keys that protect nothing; True in tests only.
        timer: measures the stages of the half; at workers "histogram" is all of a level's sums.
        form: of pairs, as the job says.
        numbers: the job's scheme over big numbers; workers know ours alone.

    Raises:
        ProtocolError: the announcement does not fit the party's rows, or holds no usable key.
        ConfigurationError: it asks for what the party does not accept.
    """
    if setup.max_additions != n_rows:
        raise ProtocolError("the active party announced another number of rows")
    if setup.scheme == CLEAR_CODE and (not allow_clear or setup.public_key):
        raise ConfigurationError("the active party wants gradients in the clear, which this party does not accept")
    terms = (backend, allow_toy_keys, (form.tails, form.point_bytes, form.is_masked))
    if workers is None:
        return HistogramMaker(announced_pairs(setup, *terms, numbers), timer)
    return ShardedHistogramMaker(setup, workers, terms, timer)


def announced_pairs(
    setup: TrainingSetup,
    backend: str = registry.AUTO,
    allow_toy_keys: bool = False,  # noqa: FBT001, FBT002 - workers get these terms as a tuple
    form: tuple[tuple[int, int], int, bool] = EXACT_PAIRS,
    numbers: AdditiveScheme = PAILLIER,
) -> ProtectedPairs:
    """Return what computes with pairs of the announced form; see ``histogram_maker``. Raises: ProtocolError."""
    if setup.scheme == Scheme.ELGAMAL.value:
        return PointPairs(*read_elgamal_setup(setup, backend, PairsForm(*form)))
    announced = announced_format(setup, PairsForm(*form))
    if setup.scheme == CLEAR_CODE:
        return ClearPairs(announced, announced.n_words)
    public_key = unpack_public_key(setup.scheme, setup.public_key, numbers, allow_toy_keys=allow_toy_keys)
    return CiphertextPairs(public_key, announced, backend)


def announced_format(setup: TrainingSetup, form: PairsForm = EXACT_PAIRS) -> PairFormat:
    """Return the announced format. Raises: ProtocolError, if there is none such."""
    kind, bounds = MaskedFormat if form.is_masked else PairFormat, (1.0, 0.0, 1.0)
    try:
        return kind(setup.fraction_bits, setup.max_additions, *bounds, tails=form.tails)
    except CapacityExceeded:
        raise ProtocolError("the active party announced a number format that no sum fits") from None


def unpack_public_key(
    scheme: int, data: bytes, numbers: AdditiveScheme = PAILLIER, *, allow_toy_keys: bool = False
) -> PublicKey:
    """Read the public key of an announcement strictly, as ``public_key_from_bytes``.

    Raises:
        ProtocolError: not a usable key of the announced scheme.
    """
    public_key = public_key_from_bytes(data, numbers, allow_toy_keys=allow_toy_keys)
    if public_key.scheme.value != scheme:
        raise ProtocolError("the public key is not one of the announced scheme")
    return public_key


# What stands on a worker of a passive party: bin codes and protected pairs of one shard's rows.


PART = f"{__name__}:SumShard"
Drawn = tuple[NDArray[np.int64], NDArray[np.int64]] | None
Nodes = list[NDArray[np.int32]] | None


class SumShard(WorkerPart):
    """Adds the pairs of its rows into bins. Rows are numbered from the shard's first.

    Security: sees the shard's bin codes, protected pairs, which of its rows are in which node, and the noise on sums
        that it hides; no key but the public one, no value of a feature, no threshold.
    """

    def __init__(
        self,
        setup: tuple[int, int, int, bytes],
        terms: Terms,
        codes: BinCodes,
    ) -> None:
        """Args: setup: the fields of ``TrainingSetup``; terms: the further ones of ``announced_pairs``.

        Shapes: codes: uint8 or uint16[n_features, n_shard_rows].
        """
        self._codes = codes
        self._pairs = announced_pairs(TrainingSetup(*setup), *terms)
        self._node_rows: Sequence[NDArray[np.int32]] = ()

    def add_gradients(
        self,
        is_first: bool,  # noqa: FBT001 - workers are called by position
        blocks: list[tuple[NDArray[np.uint8], int, int, int]],
    ) -> None:
        """Take rows of some blocks.

        Args:
            is_first: a tree begins: the pairs of the one before are forgotten.
            blocks: of each its bytes, how many rows it has, and which are taken, from one to before another.
        """
        if is_first:
            self._pairs.begin(self._codes.shape[1])
            self._node_rows = ()
        for block, n_block_rows, start, stop in blocks:
            self._pairs.take(block.data, n_block_rows, slice(start, stop))

    def sum_share(
        self,
        exchange: int,
        features: NDArray[np.int64],
        n_bins: tuple[int, ...],
        bounds: tuple[int, ...],
        noise: Drawn,
        node_rows: Nodes,
    ) -> tuple[list[bytes], int, float]:
        """Add the pairs of the nodes into the bins of some features, with the other workers; pack and hide a share.

        Args:
            exchange: its number.
            n_bins: of each of these features.
            bounds: worker w has the slots from bounds[w] to bounds[w + 1].
            noise: of the preset noised, on these sums of g and of h, int64[n] each; None where sums are exact.
            node_rows: of each node int32[n_node_rows]; None for those of the last call.

        Returns:
            By column, nothing where there is no share; bytes sent to other workers; seconds waited for them.
        """
        sums = self._sum(features, n_bins, node_rows)
        if self.peers is None or len(bounds) == 2:  # the only worker
            return self._pairs.finish(sums, _noise(noise)), 0, 0.0
        sent, waited = self.peers.sent_bytes, self.peers.waited_s
        share = reduce_scatter(self.peers, exchange, bounds, sums, self._pairs.part, self._pairs.add)
        columns = [] if share is None else self._pairs.finish(share, _noise(noise))
        return columns, self.peers.sent_bytes - sent, self.peers.waited_s - waited

    def prepare(self, is_last: bool) -> bool:  # noqa: FBT001 - workers are called by position
        """Make a little of what hides later sums; return whether more is due."""
        return self._pairs.prepare(is_last=is_last)

    def _sum(self, features: NDArray[np.int64], n_bins: tuple[int, ...], node_rows: Nodes) -> Any:
        if node_rows is not None:
            self._node_rows = node_rows
        whole = np.array_equal(features, np.arange(features[0], features[-1] + 1))
        codes = self._codes[features[0] : features[-1] + 1] if whole else self._codes[features]
        return self._pairs.sum(codes, BinLayout(tuple(n_bins)), self._node_rows)


def _noise(drawn: Drawn) -> BinNoise | None:
    return None if drawn is None else BinNoise(*drawn)


# A passive party's half of the additive scheme with its rows at workers: the twin of the halves in one process.
#
# What leaves the party has the same form and the same length as without workers, and opens to the same sums.


_BLOCKS_AT_ONCE = 3  # blocks of gradients go to a worker together: fewer calls cost less
_MOST_WAITING = 4  # calls under way to each worker


class ShardedHistogramMaker(HistogramMaker):
    """Has workers add the pairs of their rows into bins. One training at a time."""

    def __init__(self, setup: TrainingSetup, workers: Workers, terms: Terms, timer: Timer) -> None:
        """Args: terms: the further arguments of ``announced_pairs``; timer: "histogram" is all of a level's sums."""
        super().__init__(announced_pairs(setup, *terms), timer)
        self._setup, self._terms = (setup.scheme, setup.fraction_bits, setup.max_additions, setup.public_key), terms
        self._workers = workers
        self._shards = shard_rows(setup.max_additions, len(workers))
        self._due: list[list[_Rows]] = []  # rows that each worker gets next
        self._n_sent = [0] * len(self._shards)  # calls with rows of this tree
        self._waiting: deque[Future[Any]] = deque()
        self._node_rows: Sequence[NDArray[np.int32]] | None = None

    def hold(self, codes: BinCodes) -> None:
        """Give each worker the codes of its rows."""
        args = [(self._setup, self._terms, np.ascontiguousarray(codes[:, rows])) for rows in self._shards]
        begin(self._workers, PART, args)
        note_rows(self._workers, self._shards)

    def begin_tree(self, n_rows: int) -> None:
        """Forget the pairs of the tree before."""
        self._n_rows, self._n_blocks, self._node_rows = n_rows, 0, None
        self._waiting.clear()
        self._due = [[] for _ in self._shards]
        self._n_sent = [0] * len(self._shards)

    def prepare(self, *, is_last: bool) -> bool:
        """Have the workers make some masks ahead."""
        with self._timer("prepare"):
            return any(collect([self._workers.call(n, "prepare", is_last) for n in range(len(self._workers))]))

    def _take(self, gradients: bytes, first: int, n_rows: int) -> None:
        """Give a block of pairs to the workers whose rows are in it."""
        block = np.frombuffer(gradients, dtype=np.uint8)  # arrays go to a worker without a copy
        for number, rows in enumerate(self._shards):
            start, stop = max(rows.start, first) - first, min(rows.stop, first + n_rows) - first
            if start < stop:
                self._due[number].append((block, n_rows, start, stop))
            if len(self._due[number]) >= _BLOCKS_AT_ONCE or first + n_rows >= rows.stop:
                self._send_rows(number)

    def _hidden(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None,
        noise: Added | None,
    ) -> list[bytes]:
        """Have sums added, among the workers too, noised where they are joined, and hidden."""
        if features is None:
            raise ValueError("sums of shards need the numbers of the features")
        with self._timer("histogram"):
            while self._waiting:  # gradients that are none are refused as such, before sums fail for want of them
                self._waiting.popleft().result()
            columns, nodes = features.astype(np.int64), self._nodes(node_rows)
            bounds = self._bounds(len(node_rows) * layout.n_slots)
            drawn = None if noise is None else _only_noise(noise)
            slots = itertools.starmap(slice, itertools.pairwise(bounds))
            shares = [None if drawn is None else (drawn.g[some], drawn.h[some]) for some in slots]
            each = [(columns, layout.n_bins, tuple(bounds), *own) for own in zip(shares, nodes, strict=True)]
            futures = self._workers.together("sum_share", each)
            for work, future in zip(self._workers.work, futures, strict=True):
                future.add_done_callback(_exchanges(work))
            finished = [found for found, _, _ in collect(futures) if found]
            return [b"".join(column) for column in zip(*finished, strict=True)]

    def _nodes(self, node_rows: Sequence[NDArray[np.int32]]) -> list[list[NDArray[np.int32]] | None]:
        """Return for each worker its rows of the nodes; None where it has them: blocks of a level are of the same."""
        if node_rows is self._node_rows:
            return [None] * len(self._shards)
        self._node_rows = node_rows
        found: list[list[NDArray[np.int32]] | None] = []
        for shard in self._shards:
            cuts = [np.searchsorted(rows, [shard.start, shard.stop]) for rows in node_rows]  # rows are in order
            own = zip(node_rows, cuts, strict=True)
            found.append([(rows[start:stop] - shard.start).astype(np.int32) for rows, (start, stop) in own])
        return found

    def _send_rows(self, number: int) -> None:
        """Give a worker the rows that are due, if any are."""
        due, self._due[number] = self._due[number], []
        if due:
            self._ask(number, "add_gradients", self._n_sent[number] == 0, due)
            self._n_sent[number] += 1

    def _bounds(self, n_slots: int) -> list[int]:
        """Divide slots among the workers, each range of whole ciphertexts."""
        unit, n_workers = self._pairs.unit, len(self._workers)
        n_units = -(-n_slots // unit)
        return [min(n_units * number // n_workers * unit, n_slots) for number in range(n_workers + 1)]

    def _ask(self, number: int, method: str, *args: Any) -> None:
        while len(self._waiting) >= _MOST_WAITING * len(self._workers):
            self._waiting.popleft().result()
        self._waiting.append(self._workers.call(number, method, *args))


_Rows = tuple[NDArray[np.uint8], int, int, int]  # a block, how many rows it has, the first and the last of a worker's


def _exchanges(work: Work) -> Callable[[Future[Any]], None]:
    def note(future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            work.exchanged(*future.result()[1:])

    return note
