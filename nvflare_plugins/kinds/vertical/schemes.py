"""The additive schemes behind which the parties exchange sums: Paillier, ElGamal, or a stand-in without encryption.

The active party is the key owner: it encrypts gradient pairs and opens histograms. A passive party adds what it cannot
read. Both halves exchange opaque bytes, so schemes are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from he_processors.additive_schemes import Decryptor, Scheme, StaysInProcess
from he_processors.bignum import registry
from he_processors.bignum.interface import Residues
from he_processors.ciphertext_wire import (
    CiphertextHeader,
    Content,
    decode_ciphertexts,
    decode_for_decryption,
    encode_ciphertexts,
)
from he_processors.curve.interface import AFFINE_BYTES, Curve, PointColumn, Points
from he_processors.curve.registry import AUTO, BACKEND_NAMES, open_curve
from he_processors.elgamal.bin_sums import (
    CELL_COST,
    Hider,
    PointHeader,
    bin_summer,
    encode_points,
    join_message,
    noise_points,
    open_message,
    read_rows,
)
from he_processors.elgamal.bin_sums import (
    Content as PointContent,
)
from he_processors.elgamal.decryption import ElGamalDecryptor, draw_out
from he_processors.elgamal.encryption import (
    FRACTION_BITS,
    SHORT_FRACTION_BITS,
    DigitFormat,
    ElGamalEncryptor,
    ElGamalPrivateKey,
    ElGamalPublicKey,
    generate_elgamal_key,
)
from he_processors.errors import BackendUnavailable, CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.exact_sums import WORD_BITS, lower_words
from he_processors.fixed_point import REFUSED, PackingLayout, PairFormat
from he_processors.histogram.planner import BinCodes, BinLayout, plan_level
from he_processors.histogram.sums import (
    BareEncryptions,
    BinNoise,
    BinSums,
    NodeTotal,
    check_node,
    decrypt_level,
    pack_and_hide,
    sum_bins,
)
from he_processors.key_bytes import public_key_from_bytes, public_key_to_bytes, secret_key_to_bytes
from he_processors.paillier import (
    PaillierDecryptor,
    PaillierEncryptor,
    PaillierPrivateKey,
    PaillierPublicKey,
    Rerandomiser,
    owner_encryptor,
)
from nvflare_plugins.kinds.vertical.messages import TrainingSetup

_PAIR = np.dtype("<i8")
_BLOCK_ROWS = 1 << 14
GRADIENT_BLOCK_ROWS = 1 << 13
"""Rows whose gradients travel together: few, so that encrypting and sending overlap, but enough for fast batches."""


Timer = Callable[[str], AbstractContextManager[None]]
"""Measures a stage of a party's work."""


def untimed(stage: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


class GradientOwner(Protocol):
    """The active party's half.

    Security: holds the secret key; opened sums are checked against what is known of each node before they are used.

    Attributes:
        is_streamed: sums come in blocks of features (``feature_blocks``); the same at both halves.
    """

    pair_format: PairFormat
    is_streamed: bool

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Take note of all pairs of a tree, which ``encrypt`` is then asked for block by block in their order."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Protect encoded gradient pairs. Shapes: g, h: int64[n_block_rows]."""

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Open histograms, one for each of ``totals``. Raises: ProtocolError with one fixed message."""

    def finish_sums(self, since_s: float) -> None:
        """Take note that all sums of a level were opened, or that one could not be: something follows that others see.

        Args:
            since_s: when the last of them came. Units: seconds of ``time.perf_counter``.
        """


class FillableOwner(GradientOwner, Protocol):
    """A half that can make its randomisers ahead."""

    def fill(self, n_rows: int) -> None:
        """Make randomisers until so many rows can be encrypted with them."""


class HistogramAggregator(Protocol):
    """A passive party's half: needs no secret."""

    is_streamed: bool

    def hold(self, codes: BinCodes) -> None:
        """Take the party's bin codes, before the first tree. Shapes: codes: uint8 or uint16[n_features, n_rows]."""

    def begin_tree(self, n_rows: int) -> None:
        """Forget the pairs of the tree before."""

    def add_gradients(self, gradients: bytes) -> None:
        """Take the next block of the tree's protected pairs, all that are missing or GRADIENT_BLOCK_ROWS of them.

        Raises:
            ProtocolError: they are not exactly so many valid ones.
        """

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add the pairs of each node into bins, and hide which rows made them.

        Args:
            features: the numbers of the features that these codes are of, for halves that hold the codes of all.
            noise: what is added to the sums before they are hidden; None for exact sums.

        Shapes: codes: uint8 or uint16[n_features, n_rows]; node_rows: int32[n_node_rows] for each node.
        """

    def prepare(self, is_last: bool) -> bool:
        """Make a little of what later sums need, while nothing else is to do; return whether more is due.

        Args:
            is_last: no tree follows the present one.
        """


class MaskSource(Protocol):
    """What hides sums, made ahead; its pool hands each out once."""

    def fill(self, n: int) -> None:
        """Make until ``n`` are ready."""


class MaskPool:
    """How many masks a passive party makes ahead: as many as the last tree took, for there is no better guess."""

    def __init__(self, masks: MaskSource, most: int, at_once: int):
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

    def prepare(self, is_last: bool) -> bool:
        """Make some more; return whether further ones are due."""
        due = max(self._used_before - self._used, 0) if is_last else max(self._used_before, self._used)
        due = min(due, self._most)
        if self._ready >= due:
            return False
        self._ready = min(self._ready + self._at_once, due)
        self._masks.fill(self._ready)
        return self._ready < due


def rows_due(n_rows: int, n_blocks: int) -> int:
    """Return the rows of a tree's next block. Raises: ProtocolError if all have come."""
    n_due = min(GRADIENT_BLOCK_ROWS, n_rows - n_blocks * GRADIENT_BLOCK_ROWS)
    if n_due <= 0:
        raise ProtocolError("more gradients than the tree has rows")
    return n_due


def n_blocks_of(n_rows: int) -> int:
    """Return how many blocks hold the gradients of a tree."""
    return -(-n_rows // GRADIENT_BLOCK_ROWS)


def require_all_rows(n_rows: int, n_blocks: int) -> None:
    """Raise ProtocolError unless the blocks hold all rows of a tree."""
    if n_blocks != n_blocks_of(n_rows) or not n_blocks:
        raise ProtocolError("sums are asked for before the gradients of all rows came")


class ClearGradientOwner:
    """The stand-in without encryption, for tests and for jobs that name `plain`.

    Security: none. Passive parties see every gradient.
    """

    is_streamed = False

    def __init__(self, pair_format: PairFormat):
        self.pair_format = pair_format

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Do nothing ahead."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Return the pairs as they are."""
        return np.stack([g, h], axis=1).astype(_PAIR, copy=False).tobytes()

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Read and check the sums."""
        n_words = self.pair_format.n_words
        if len(sums) != 2 * n_words * _PAIR.itemsize * layout.n_slots * len(totals):
            raise ProtocolError(REFUSED)
        values = np.frombuffer(sums, dtype=_PAIR).reshape(len(totals), layout.n_slots, 2, n_words)
        opened = [BinSums(*np.ascontiguousarray(v.transpose(1, 2, 0))) for v in values]
        for node_sums, total in zip(opened, totals, strict=True):
            check_node(node_sums, total, layout, self.pair_format)
        return opened

    def finish_sums(self, since_s: float) -> None:
        """Hide nothing: there is nothing to hide."""


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


class ProtectedPairs(Protocol):
    """The pairs of a tree's rows as a passive party, or one of its workers, computes with them. Sums are opaque.

    A level's sums are added in two steps. Whoever holds rows adds their pairs (``sum``). Where workers share the rows,
    each then takes a range of the slots and adds to its own partial sums those of the others (``part``, ``add``). At
    last sums are noised in the preset noised, packed and hidden (``finish``). Sums are exact, so that what is opened
    does not depend on the division.

    Security: partial sums are not hidden, and stay within the party. Only what ``finish`` returns leaves it.

    Attributes:
        stage: what the time of ``finish`` counts as.
    """

    stage: str

    def begin(self, n_rows: int) -> None:
        """Forget the pairs of the tree before; so many come."""

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        """Check a block of pairs, and take some of its rows. Raises: ProtocolError: it is not one of so many pairs."""

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> Any:
        """Add the pairs of each node into bins. Rows are numbered in the order in which they were taken."""

    def part(self, sums: Any, slots: slice) -> list[bytes]:
        """Return some slots of sums for another worker, column by column."""

    def add(self, sums: Any, slots: slice, others: Sequence[Sequence[bytes]]) -> Any:
        """Return some slots of sums with what other workers have there added."""

    def finish(self, sums: Any, noise: BinNoise | None = None) -> list[bytes]:
        """Return sums as they may leave the party, without a header, column by column.

        Args:
            noise: one value for each of these sums, added before they are hidden; None where sums are exact.
        """

    def prepare(self, is_last: bool) -> bool:
        """Make a little of what ``finish`` needs; return whether more is due."""


class PassiveTerms(Protocol):
    """What a passive party takes from the active party's announcement, checked.

    Attributes:
        is_streamed: sums come in blocks of features.
        unit: slots that share a ciphertext.
    """

    @property
    def is_streamed(self) -> bool: ...

    @property
    def unit(self) -> int: ...

    def pairs(self) -> ProtectedPairs:
        """Return what computes with pairs of this form."""

    def sums_header(self, n_slots: int) -> bytes:
        """Return what stands before the sums that leave."""


class HistogramMaker:
    """A passive party's half in this process: adds protected pairs into bins, and hides the sums."""

    def __init__(self, terms: PassiveTerms, timer: Timer = untimed) -> None:
        """Args: timer: measures the stages "receive", "histogram", "prepare", and that of hiding."""
        self.is_streamed = terms.is_streamed
        self._terms, self._pairs, self._timer = terms, terms.pairs(), timer
        self._n_rows = self._n_blocks = 0

    def hold(self, codes: BinCodes) -> None:
        """Keep nothing: codes come with each question."""

    def begin_tree(self, n_rows: int) -> None:
        """Forget the pairs of the tree before."""
        self._n_rows, self._n_blocks = n_rows, 0
        self._pairs.begin(n_rows)

    def add_gradients(self, gradients: bytes) -> None:
        """Check and take the next block of pairs."""
        n_due = rows_due(self._n_rows, self._n_blocks)
        with self._timer("receive"):
            self._pairs.take(gradients, n_due, slice(0, n_due))
        self._n_blocks += 1

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add the pairs of each node into bins, and hide which rows made them."""
        require_all_rows(self._n_rows, self._n_blocks)
        with self._timer("histogram"):
            sums = self._pairs.sum(codes, layout, node_rows)
        with self._timer(self._pairs.stage):
            columns = self._pairs.finish(sums, noise)
            return b"".join([self._terms.sums_header(len(node_rows) * layout.n_slots), *columns])

    def prepare(self, is_last: bool) -> bool:
        """Make a little of what hides later sums."""
        with self._timer("prepare"):
            return self._pairs.prepare(is_last)


@dataclass(frozen=True, slots=True)
class ClearTerms:
    """Terms of gradients in the clear. Attributes: pair_format: None takes any pairs, in tests alone."""

    pair_format: PairFormat | None = None
    n_words: int = 1
    is_streamed: ClassVar[bool] = False
    unit: ClassVar[int] = 1

    def pairs(self) -> ClearPairs:
        """Return what computes with pairs in the clear."""
        return ClearPairs(self)

    def sums_header(self, n_slots: int) -> bytes:
        """Return nothing: sums in the clear have no header."""
        return b""


class ClearPairs:
    """Pairs in the clear: profile ``plain``. Security: none."""

    stage = "histogram"

    def __init__(self, terms: ClearTerms) -> None:
        self._format, self._n_words = terms.pair_format, terms.n_words
        self._blocks: list[NDArray[np.int64]] = []
        self._pairs: NDArray[np.int64] | None = None
        self._codes: BinCodes | None = None
        self._codes_of_row = np.empty((0, 0), dtype=np.uint8)

    def begin(self, n_rows: int) -> None:
        self._blocks, self._pairs = [], None

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        if len(block) != 2 * _PAIR.itemsize * n_block_rows:
            raise ProtocolError(f"expected {n_block_rows} gradient pairs")
        pairs = np.frombuffer(block, dtype=_PAIR).reshape(n_block_rows, 2)[rows]
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
        return [sums[slots].astype(_PAIR, copy=False).tobytes()]

    def add(self, sums: NDArray[np.int64], slots: slice, others: Sequence[Sequence[bytes]]) -> NDArray[np.int64]:
        total = sums[slots].copy()
        for (data,) in others:
            total += np.frombuffer(data, dtype=_PAIR).reshape(-1, 2 * self._n_words)
        return total

    def finish(self, sums: NDArray[np.int64], noise: BinNoise | None = None) -> list[bytes]:
        if noise is not None:
            if self._format is not None:
                noise.check(self._format, len(sums))
            sums = sums + np.stack([noise.g, noise.h], axis=1)
        return self.part(sums, slice(None))

    def prepare(self, is_last: bool) -> bool:
        return False

    def _in_words(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return pairs as sums take them. Shapes: pairs: int64[n_rows, 2]; result: int64[n_rows, 2 * n_words]."""
        if self._n_words == 1:
            return pairs
        low = lower_words(pairs)  # each value as two, whose sums fit 64 bits; the upper one counts 2^20
        return np.stack([low, (pairs - low) >> WORD_BITS], axis=2).reshape(len(pairs), 2 * self._n_words)

    def _sum_node(self, pairs: NDArray[np.int64], layout: BinLayout, rows: NDArray[np.int32]) -> NDArray[np.int64]:
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
_BLOCK_BINS = 1 << 16
_MOST_POINT_MASKS = 1 << 16  # some 50 MB
OpenRows = Callable[[NDArray[np.uint8], BinLayout, Sequence[NodeTotal]], list[BinSums]]
_POINT_MASKS_AT_ONCE = 1 << 12  # a hundredth of a second: a question waits so long at most


class ElGamalGradientOwner:
    """The active party's half: encrypts digits of gradients, opens and checks sums."""

    is_streamed = True

    def __init__(
        self,
        private_key: ElGamalPrivateKey,
        digits: DigitFormat,
        curve: Curve,
        timer: Timer = untimed,
        *,
        opens: bool = True,
    ) -> None:
        """Args: timer: measures the stage "search", a part of opening sums; opens: is asked to open sums, too."""
        self.pair_format: PairFormat = digits
        self._digits, self._curve, self._timer = digits, curve, timer
        self._private_key = private_key
        self._encryptor = ElGamalEncryptor(private_key, curve)
        self._decryptor = ElGamalDecryptor(private_key, curve) if opens else None  # its table: 30 MB and a second
        self._open: OpenRows = self.open_rows

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Do nothing ahead."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair to one row of points, with a fresh randomiser."""
        rows = self._encryptor.encrypt(self._digits.digits_of(g, h))
        return encode_points(self._header(PointContent.PAIRS, g.size), self._curve, rows)

    def columns(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Encrypt as ``encrypt``; return the columns of a message without its header. Shapes: uint8[n, 64] each."""
        rows = self._encryptor.encrypt(self._digits.digits_of(g, h))
        return [self._curve.to_affine(column) for column in rows.columns]

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt sums and check every node."""
        body = open_message(sums, self._header(PointContent.BINS, len(totals) * layout.n_slots))
        opened: list[BinSums] = []
        n_nodes = max(1, _BLOCK_BINS // layout.n_slots)  # opened together: points in memory take many times their bytes
        for first in range(0, len(totals), n_nodes):
            of_block = totals[first : first + n_nodes]
            rows = slice(first * layout.n_slots, (first + len(of_block)) * layout.n_slots)
            opened += self._open(body[:, rows], layout, of_block)
        return opened

    def open_rows(self, body: NDArray[np.uint8], layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt and check sums in this process. Shapes: body: uint8[n_columns, n_nodes * n_slots, 64]."""
        if self._decryptor is None:
            raise TypeError("this half opens no sums")
        columns = read_rows(body, self._curve, slice(None))
        return self._decryptor.open_level(columns, self._digits, layout, totals, lambda: self._timer("search"))

    def open_with(self, opener: OpenRows) -> None:
        """Have sums opened elsewhere from now on, by what does as ``open_rows``."""
        self._open = opener

    def finish_sums(self, since_s: float) -> None:
        """Wait for a public number of steps of time, because the passive party sees when its next question comes."""
        with self._timer("search"):
            draw_out(since_s)

    def fill(self, n_rows: int) -> None:
        """Make randomisers for the next tree while the passive parties work."""
        self._encryptor.fill(n_rows)

    def setup(self) -> TrainingSetup:
        """Return what passive parties need."""
        key = self._encryptor.public_key
        return TrainingSetup(key.scheme.value, self._digits.fraction_bits, self._digits.max_additions, key.to_bytes())

    def secret_bytes(self) -> bytes:
        """Return the key for the owner's own workers. Secret."""
        return secret_key_to_bytes(self._private_key)

    def pairs_message(self, n_rows: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Put the header before pieces of columns of pairs that were encrypted elsewhere, in affine form, in order."""
        return join_message(self._header(PointContent.PAIRS, n_rows), pieces)

    def _header(self, content: PointContent, count: int) -> PointHeader:
        return PointHeader(self._encryptor.public_key, content, self._digits, count)


class PointPairs(StaysInProcess):
    """Rows of points: profile ``elgamal``."""

    stage = "hide"

    def __init__(self, terms: ElGamalTerms) -> None:
        self._terms, self._curve = terms, terms.curve
        self._hider = Hider(terms.public_key, terms.curve)
        self._pool = MaskPool(self._hider, _MOST_POINT_MASKS, _POINT_MASKS_AT_ONCE)
        self._columns: list[PointColumn] = []
        self._pairs: list[Points] = []

    def begin(self, n_rows: int) -> None:
        self._columns, self._pairs = [], []  # before the next ones need their memory
        self._pool.begin_tree()
        self._columns = [self._curve.column(n_rows) for _ in range(1 + self._terms.digits.n_messages)]

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        header = self._terms.header(PointContent.PAIRS, n_block_rows)
        found = read_rows(open_message(block, header), self._curve, rows)
        for column, points in zip(self._columns, found.columns, strict=True):
            column.append(points)

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> list[Points]:
        if not self._pairs:
            self._pairs = [column.whole() for column in self._columns]
        plan = plan_level(codes, layout, node_rows, cell_cost=CELL_COST)
        add = bin_summer(self._curve, len(self._pairs[0]), plan)
        return [add(column) for column in self._pairs]

    def part(self, sums: list[Points], slots: slice) -> list[bytes]:
        return [self._curve.to_affine(self._slots(column, slots)).tobytes() for column in sums]

    def add(self, sums: list[Points], slots: slice, others: Sequence[Sequence[bytes]]) -> list[Points]:
        total = [self._slots(column, slots) for column in sums]
        for other in others:
            total = [self._curve.add(own, self._read(data)) for own, data in zip(total, other, strict=True)]
        return total

    def finish(self, sums: list[Points], noise: BinNoise | None = None) -> list[bytes]:
        n_slots = len(sums[0])
        if noise is not None:
            digits = self._terms.digits
            added = [noise_points(self._curve, digits, noise, number, n_slots) for number in range(1, len(sums))]
            sums = [sums[0], *map(self._curve.add, sums[1:], added)]
        self._pool.use(n_slots)
        masks = self._hider.draw(n_slots)
        hidden = [self._hider.hide(number, bins, masks) for number, bins in enumerate(sums)]
        return [self._curve.to_affine(column).tobytes() for column in hidden]

    def prepare(self, is_last: bool) -> bool:
        return self._pool.prepare(is_last)

    def _slots(self, column: Points, slots: slice) -> Points:
        return self._curve.take(column, np.arange(slots.start, slots.stop, dtype=np.int64))

    def _read(self, data: bytes) -> Points:
        return self._curve.from_affine(np.frombuffer(data, dtype=np.uint8).reshape(-1, AFFINE_BYTES))


def elgamal_owner(digits: DigitFormat, backend: str = AUTO, timer: Timer = untimed) -> ElGamalGradientOwner:
    """Generate a key and open the half that holds it."""
    curve = _curve(backend)
    return ElGamalGradientOwner(generate_elgamal_key(digits.n_messages, curve), digits, curve, timer)


@dataclass(frozen=True, slots=True)
class ElGamalTerms:
    """What a passive party takes from the active party's announcement, checked."""

    public_key: ElGamalPublicKey
    digits: DigitFormat
    curve: Curve
    is_streamed: ClassVar[bool] = True
    unit: ClassVar[int] = 1

    @classmethod
    def of(cls, setup: TrainingSetup, backend: str = AUTO, tails: tuple[int, int] = (0, 0)) -> ElGamalTerms:
        """Read an announcement. Raises: ProtocolError: it holds another number format, or no usable key."""
        if setup.fraction_bits not in FRACTION_BITS or (any(tails) and setup.fraction_bits != SHORT_FRACTION_BITS):
            raise ProtocolError("the active party announced a number format that elgamal does not have")
        curve = _curve(backend)
        digits = DigitFormat.of(setup.fraction_bits, setup.max_additions, tails)
        public_key = ElGamalPublicKey.from_bytes(setup.public_key, curve)
        if public_key.n_messages != digits.n_messages:
            raise ProtocolError("the public key has another number of points than the format has digits")
        return cls(public_key, digits, curve)

    def pairs(self) -> PointPairs:
        """Return what computes with rows of points."""
        return PointPairs(self)

    def header(self, content: PointContent, count: int) -> PointHeader:
        """Return the header of a message to or from the active party."""
        return PointHeader(self.public_key, content, self.digits, count)

    def sums_header(self, n_slots: int) -> bytes:
        """Return what stands before the sums that leave."""
        return self.header(PointContent.BINS, n_slots).to_bytes()


def require_curve(backend: str = AUTO) -> None:
    """Refuse what would take hours.

    Raises:
        BackendUnavailable: this machine has no compiled backend of the curve.
    """
    _curve(backend)


def _curve(backend: str) -> Curve:
    """Open the curve; a backend of big numbers that has no curve leaves the choice to this machine."""
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


class EncryptedGradientOwner:
    """The active party's half: encrypts gradients, opens and checks sums."""

    is_streamed = True

    def __init__(self, encryptor: PaillierEncryptor, decryptor: Decryptor, pair_format: PairFormat):
        self.pair_format = pair_format
        self._encryptor = encryptor
        self._decryptor = decryptor
        self._packing = PackingLayout.fit(pair_format, encryptor.public_key.plaintext_bits)

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Do nothing ahead."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair to one ciphertext, with a fresh randomiser."""
        header = self._header(Content.PAIRS, g.size)
        plaintexts = self.pair_format.plaintext_rows(g, h)
        return encode_ciphertexts(header, self._encryptor.arithmetic, self._encryptor.encrypt(plaintexts))

    def columns(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Encrypt as ``encrypt``; return the one column of a message without its header. Shapes: uint8[n, width]."""
        encrypted = self._encryptor.encrypt(self.pair_format.plaintext_rows(g, h))
        return [self._encryptor.arithmetic.to_wire(encrypted)]

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt in this process. Shapes: ciphertexts: uint8[n, width] in wire form."""
        return list(self._decryptor.decrypt(ciphertexts))

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt the sums of a level and check every node."""
        count = self._packing.n_ciphertexts(len(totals) * layout.n_slots)
        header = self._header(Content.PACKED_BINS, count)
        ciphertexts = decode_for_decryption(sums, header, self._encryptor.arithmetic)
        return decrypt_level(ciphertexts, self._decryptor, self._packing, layout, totals)

    def finish_sums(self, since_s: float) -> None:
        """Hide no time: that of decrypting depends on counts."""

    def fill(self, n_rows: int) -> None:
        """Make randomisers for the next tree while the passive parties work."""
        fill = getattr(getattr(self._encryptor, "randomisers", None), "fill", None)
        if fill is not None:
            fill(n_rows)

    def setup(self) -> TrainingSetup:
        """Return what passive parties need."""
        key = self._encryptor.public_key
        return TrainingSetup(
            key.scheme.value, self.pair_format.fraction_bits, self.pair_format.max_additions, public_key_to_bytes(key)
        )

    def pairs_message(self, n_rows: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Put the header before pieces of pairs that were encrypted elsewhere, in wire form, in order."""
        return b"".join([self._header(Content.PAIRS, n_rows).to_bytes(), *pieces])

    def open_with(self, wrap: Callable[[Decryptor], Decryptor]) -> None:
        """Have sums decrypted elsewhere from now on. Args: wrap: takes what decrypts in this process."""
        self._decryptor = wrap(self._decryptor)

    def _header(self, content: Content, count: int) -> CiphertextHeader:
        return CiphertextHeader(self._encryptor.public_key, content, self._packing, count)


@dataclass(frozen=True, slots=True)
class PaillierTerms:
    """What a passive party takes from the active party's announcement, checked."""

    public_key: PaillierPublicKey
    packing: PackingLayout
    backend: str = registry.AUTO
    is_streamed: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        """Return the slots that share a ciphertext."""
        return self.packing.pairs_per_plaintext

    @classmethod
    def of(cls, public_key: PaillierPublicKey, pair_format: PairFormat, backend: str = registry.AUTO) -> PaillierTerms:
        """Return the terms of a key and a number format."""
        return cls(public_key, PackingLayout.fit(pair_format, public_key.plaintext_bits), backend)

    def pairs(self) -> CiphertextPairs:
        """Return what computes with ciphertexts."""
        return CiphertextPairs(self)

    def header(self, content: Content, count: int) -> CiphertextHeader:
        """Return the header of a message to or from the active party."""
        return CiphertextHeader(self.public_key, content, self.packing, count)

    def sums_header(self, n_slots: int) -> bytes:
        """Return what stands before the sums that leave."""
        return self.header(Content.PACKED_BINS, self.packing.n_ciphertexts(n_slots)).to_bytes()


class CiphertextPairs(StaysInProcess):
    """One ciphertext a row: profile ``paillier``."""

    stage = "pack"

    def __init__(self, terms: PaillierTerms) -> None:
        self._terms, self._packing = terms, terms.packing
        self._arithmetic = registry.open_backend(terms.backend, terms.public_key.modulus)
        self._rerandomiser = Rerandomiser(terms.public_key, self._arithmetic)
        self._pool = MaskPool(self._rerandomiser, _MOST_MASKS, _MASKS_AT_ONCE)
        self._blocks: list[Residues] = []
        self._pairs: Residues | None = None

    def begin(self, n_rows: int) -> None:
        self._blocks, self._pairs = [], None
        self._pool.begin_tree()

    def take(self, block: bytes | memoryview, n_block_rows: int, rows: slice) -> None:
        found = decode_ciphertexts(block, self._terms.header(Content.PAIRS, n_block_rows), self._arithmetic)
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

    def finish(self, sums: Residues, noise: BinNoise | None = None) -> list[bytes]:
        if noise is not None:
            sums = BareEncryptions(self._terms.public_key, self._arithmetic).add(sums, noise, self._packing.pair_format)
        self._pool.use(self._packing.n_ciphertexts(len(sums)))
        hidden = pack_and_hide(sums, self._packing, self._rerandomiser)
        return [self._arithmetic.to_wire(hidden).tobytes()]

    def prepare(self, is_last: bool) -> bool:
        return self._pool.prepare(is_last)

    def _slots(self, sums: Residues, slots: slice) -> Residues:
        return self._arithmetic.take(sums, np.arange(slots.start, slots.stop, dtype=np.int64))


def gradient_owner(
    private_key: PaillierPrivateKey, pair_format: PairFormat, backend: str = registry.AUTO
) -> EncryptedGradientOwner:
    """Open the key owner's half."""
    encryptor = owner_encryptor(private_key, backend)
    return EncryptedGradientOwner(encryptor, PaillierDecryptor(private_key, backend), pair_format)


def histogram_maker(
    setup: TrainingSetup,
    n_rows: int,
    *,
    allow_clear: bool = False,
    backend: str = registry.AUTO,
    allow_toy_keys: bool = False,
    timer: Timer = untimed,
    tails: tuple[int, int] = (0, 0),
) -> HistogramAggregator:
    """Open a passive party's half from the active party's announcement.

    Args:
        allow_clear: accept gradients in the clear; only where the job names `plain` and the party's policy allows it.
        allow_toy_keys: accept keys that protect nothing; True in tests only.
        timer: measures the stages of the half.
        tails: of the noise on sums (``PairFormat``), as the job says; (0, 0) for exact sums.

    Raises:
        ProtocolError: the announcement does not fit the party's rows, or holds no usable key.
        ConfigurationError: it asks for what the party does not accept.
    """
    check_setup(setup, n_rows, allow_clear)
    return HistogramMaker(announced_terms(setup, backend, allow_toy_keys=allow_toy_keys, tails=tails), timer)


def announced_terms(
    setup: TrainingSetup, backend: str = registry.AUTO, *, allow_toy_keys: bool = False, tails: tuple[int, int] = (0, 0)
) -> PassiveTerms:
    """Read an announcement; see ``histogram_maker``. Raises: ProtocolError: it is not usable."""
    if setup.scheme == Scheme.ELGAMAL.value:
        return ElGamalTerms.of(setup, backend, tails)
    announced = announced_format(setup, tails)
    if setup.scheme == CLEAR_CODE:
        return ClearTerms(announced, announced.n_words)
    key = unpack_public_key(setup.scheme, setup.public_key, allow_toy_keys=allow_toy_keys)
    return PaillierTerms.of(key, announced, backend)


def check_setup(setup: TrainingSetup, n_rows: int, allow_clear: bool) -> None:
    """Check an announcement against the party's rows and what it accepts. Raises: as ``histogram_maker``."""
    if setup.max_additions != n_rows:
        raise ProtocolError("the active party announced another number of rows")
    if setup.scheme == CLEAR_CODE and (not allow_clear or setup.public_key):
        raise ConfigurationError("the active party wants gradients in the clear, which this party does not accept")


def announced_format(setup: TrainingSetup, tails: tuple[int, int] = (0, 0)) -> PairFormat:
    """Return the announced format. Raises: ProtocolError, if there is none such."""
    try:
        return PairFormat(setup.fraction_bits, setup.max_additions, g_bound=1.0, h_low=0.0, h_high=1.0, tails=tails)
    except CapacityExceeded:
        raise ProtocolError("the active party announced a number format that no sum fits") from None


def unpack_public_key(scheme: int, data: bytes, *, allow_toy_keys: bool = False) -> PaillierPublicKey:
    """Read the public key of an announcement strictly, as ``public_key_from_bytes``.

    Raises:
        ProtocolError: not a usable key of the announced scheme.
    """
    public_key = public_key_from_bytes(data, allow_toy_keys=allow_toy_keys)
    if public_key.scheme.value != scheme:
        raise ProtocolError("the public key is not one of the announced scheme")
    return public_key
