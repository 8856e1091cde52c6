"""The additive schemes behind which the parties exchange sums: Paillier, ElGamal, or a stand-in without encryption.

The active party is the key owner: it encrypts gradient pairs and opens histograms. A passive party adds what it cannot
read. Both halves exchange opaque bytes, so schemes are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from he_processors.additive_schemes import Decryptor, Scheme
from he_processors.bignum import registry
from he_processors.bignum.interface import Residues
from he_processors.ciphertext_wire import (
    CiphertextHeader,
    Content,
    decode_ciphertexts,
    decode_for_decryption,
    encode_ciphertexts,
)
from he_processors.curve.interface import Curve, PointColumn, Points
from he_processors.curve.registry import AUTO, BACKEND_NAMES, open_curve
from he_processors.elgamal.bin_sums import (
    CELL_COST,
    Hider,
    PointHeader,
    bin_summer,
    decode_points,
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
    PointColumns,
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


class StockedOwner(GradientOwner, Protocol):
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


class Masks(Protocol):
    """What hides sums, made ahead; its pool hands each out once."""

    def fill(self, n: int) -> None:
        """Make until ``n`` are ready."""


class MaskStock:
    """How many masks a passive party makes ahead: as many as the last tree took, for there is no better guess."""

    def __init__(self, masks: Masks, most: int, at_once: int):
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


class ClearHistogramMaker:
    """Adds pairs in the clear: the other half of ``ClearGradientOwner``."""

    is_streamed = False

    def __init__(self, timer: Timer = untimed, n_words: int = 1, unit_bits: int | None = None) -> None:
        """Args: n_words: of a sum (``PairFormat.n_words``); unit_bits: of ``check_clear_pairs``; None takes any."""
        self._timer = timer
        self._unit_bits = unit_bits
        self._n_words = n_words
        self._n_rows = 0
        self._blocks: list[NDArray[np.int64]] = []
        self._pairs: NDArray[np.int64] | None = None
        self._codes: BinCodes | None = None
        self._codes_of_row = np.empty((0, 0), dtype=np.uint8)

    def hold(self, codes: BinCodes) -> None:
        """Keep nothing: codes come with each question."""

    def begin_tree(self, n_rows: int) -> None:
        """Forget the pairs of the tree before."""
        self._n_rows, self._blocks, self._pairs = n_rows, [], None

    def add_gradients(self, gradients: bytes) -> None:
        """Take the next block of pairs."""
        n_due = rows_due(self._n_rows, len(self._blocks))
        if len(gradients) != 2 * _PAIR.itemsize * n_due:
            raise ProtocolError(f"expected {n_due} gradient pairs")
        pairs = np.frombuffer(gradients, dtype=_PAIR).reshape(n_due, 2)
        if self._unit_bits is not None:
            check_clear_pairs(pairs, self._unit_bits)
        self._blocks.append(pairs)

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add the pairs of each node into bins."""
        if self._pairs is None:
            require_all_rows(self._n_rows, len(self._blocks))
            self.hold_pairs(np.concatenate(self._blocks))
        return self.sum_held(codes, layout, node_rows, noise)

    def hold_pairs(self, pairs: NDArray[np.int64]) -> None:
        """Take all pairs of a tree at once. Shapes: pairs: int64[n_rows, 2]."""
        if self._n_words > 1:  # each value as two, whose sums fit 64 bits; the upper one counts 2^20
            low = lower_words(pairs)
            pairs = np.stack([low, (pairs - low) >> WORD_BITS], axis=2).reshape(len(pairs), 2 * self._n_words)
        self._pairs = pairs

    def sum_held(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add the pairs that are held, as ``sum_bins``."""
        if self._codes is not codes:
            self._codes, self._codes_of_row = codes, np.ascontiguousarray(codes.T)
        with self._timer("histogram"):
            sums = [self._sum_node(layout, rows) for rows in node_rows]
            if noise is not None:
                _add_noise(sums, noise)
            return b"".join(of_node.astype(_PAIR, copy=False).tobytes() for of_node in sums)

    def prepare(self, is_last: bool) -> bool:
        """Make nothing: nothing is hidden."""
        return False

    def _sum_node(self, layout: BinLayout, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        # The sums are a product with the 0/1 matrix of slots and rows, block by block to bound the memory.
        if self._pairs is None:
            raise ProtocolError("sums were asked for before the gradients came")
        total = np.zeros((layout.n_slots, 2 * self._n_words), dtype=np.int64)
        first_slots = layout.starts[:-1].astype(np.int32)
        n_cells = min(rows.size, _BLOCK_ROWS) * layout.n_features
        ones, ends = np.ones(n_cells, dtype=np.int64), np.arange(0, n_cells + 1, layout.n_features, dtype=np.int32)
        for start in range(0, rows.size, _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            slots = self._codes_of_row[block] + first_slots
            cells = (ones[: slots.size], slots.reshape(-1), ends[: block.size + 1])
            shape = (layout.n_slots, block.size)
            total += sparse.csc_array(cells, shape=shape, copy=False) @ self._pairs[block]
        return total


def _add_noise(sums: list[NDArray[np.int64]], noise: BinNoise) -> None:
    """Add noise to the sums of nodes in place. Shapes: sums: int64[n_slots, 2] for each node."""
    parts = np.stack([noise.g, noise.h], axis=1).reshape(len(sums), -1, 2)
    for of_node, part in zip(sums, parts, strict=True):
        of_node += part


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

    def __init__(self, private_key: ElGamalPrivateKey, digits: DigitFormat, curve: Curve, timer: Timer = untimed):
        """Args: timer: measures the stage "search", which is a part of opening sums."""
        self.pair_format: PairFormat = digits
        self._digits, self._curve, self._timer = digits, curve, timer
        self._private_key = private_key
        self._encryptor = ElGamalEncryptor(private_key, curve)
        self._decryptor = ElGamalDecryptor(private_key, curve)
        self._open: OpenRows = self.open_rows

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Do nothing ahead."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair to one row of points, with a fresh randomiser."""
        rows = self._encryptor.encrypt(self._digits.digits_of(g, h))
        return encode_points(self._header(PointContent.PAIRS, g.size), self._curve, rows)

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


class ElGamalHistogramMaker:
    """A passive party's half: adds rows of points into bins, and hides the sums."""

    is_streamed = True

    def __init__(self, public_key: ElGamalPublicKey, digits: DigitFormat, curve: Curve, timer: Timer = untimed):
        """Args: timer: measures the stages "receive", "histogram", "hide" and "prepare"."""
        self._public_key, self._digits, self._curve, self._timer = public_key, digits, curve, timer
        self._hider = Hider(public_key, curve)
        self._stock = MaskStock(self._hider, _MOST_POINT_MASKS, _POINT_MASKS_AT_ONCE)
        self._n_rows = self._n_blocks = 0
        self._columns: list[PointColumn] = []  # of this tree
        self._pairs: PointColumns | None = None

    def hold(self, codes: BinCodes) -> None:
        """Keep nothing: codes come with each question."""

    def begin_tree(self, n_rows: int) -> None:
        """Forget the points of the tree before."""
        self._columns = []  # before the next ones need their memory
        self._n_rows, self._n_blocks, self._pairs = n_rows, 0, None
        self._stock.begin_tree()
        self._columns = [self._curve.column(n_rows) for _ in range(1 + self._digits.n_messages)]

    def add_gradients(self, gradients: bytes) -> None:
        """Check and take the next block of rows."""
        header = PointHeader(self._public_key, PointContent.PAIRS, self._digits, rows_due(self._n_rows, self._n_blocks))
        with self._timer("receive"):
            block = decode_points(gradients, header, self._curve)
            for column, points in zip(self._columns, block.columns, strict=True):
                column.append(points)
        self._n_blocks += 1

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add rows into bins, and hide every bin; one column after the other, so that one is in memory as points."""
        if self._pairs is None:
            require_all_rows(self._n_rows, self._n_blocks)
            self._pairs = PointColumns(tuple(column.whole() for column in self._columns))
        with self._timer("histogram"):
            plan = plan_level(codes, layout, node_rows, cell_cost=CELL_COST)
            add = bin_summer(self._curve, len(self._pairs), plan)
        self._stock.use(plan.n_slots)
        with self._timer("hide"):
            masks, hidden = self._hider.draw(plan.n_slots), []
        for number, column in enumerate(self._pairs.columns):
            with self._timer("histogram"):
                bins = add(column)
                if noise is not None and number > 0:
                    bins = self._curve.add(bins, noise_points(self._curve, self._digits, noise, number, len(bins)))
            with self._timer("hide"):
                hidden.append(self._hidden(number, bins, masks))
        header = PointHeader(self._public_key, PointContent.BINS, self._digits, plan.n_slots)
        return join_message(header, hidden)

    def prepare(self, is_last: bool) -> bool:
        """Make some masks ahead."""
        with self._timer("prepare"):
            return self._stock.prepare(is_last)

    def _hidden(self, number: int, bins: Points, masks: PointColumns) -> bytes:
        return self._curve.to_affine(self._hider.hide(number, bins, masks)).tobytes()


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


def elgamal_maker(
    setup: TrainingSetup, backend: str = AUTO, timer: Timer = untimed, tails: tuple[int, int] = (0, 0)
) -> ElGamalHistogramMaker:
    """Open a passive party's half from the active party's announcement.

    Raises:
        ProtocolError: it holds another number format, or no usable key.
    """
    terms = ElGamalTerms.of(setup, backend, tails)
    return ElGamalHistogramMaker(terms.public_key, terms.digits, terms.curve, timer)


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


class EncryptedHistogramMaker:
    """A passive party's half: adds ciphertexts into bins, packs and hides the sums."""

    is_streamed = True

    def __init__(
        self,
        public_key: PaillierPublicKey,
        pair_format: PairFormat,
        backend: str = registry.AUTO,
        timer: Timer = untimed,
    ):
        """Args: timer: measures the stages "receive", "histogram", "pack" and "prepare"."""
        self._public_key = public_key
        self._timer = timer
        self._packing = PackingLayout.fit(pair_format, public_key.plaintext_bits)
        self._arithmetic = registry.open_backend(backend, public_key.modulus)
        self._rerandomiser = Rerandomiser(public_key, self._arithmetic)
        self._stock = MaskStock(self._rerandomiser, _MOST_MASKS, _MASKS_AT_ONCE)
        self._n_rows = 0
        self._blocks: list[Residues] = []
        self._pairs: Residues | None = None

    def hold(self, codes: BinCodes) -> None:
        """Keep nothing: codes come with each question."""

    def begin_tree(self, n_rows: int) -> None:
        """Forget the ciphertexts of the tree before."""
        self._n_rows, self._blocks, self._pairs = n_rows, [], None
        self._stock.begin_tree()

    def add_gradients(self, gradients: bytes) -> None:
        """Check and take the next block of ciphertexts."""
        n_due = rows_due(self._n_rows, len(self._blocks) if self._pairs is None else n_blocks_of(self._n_rows))
        header = CiphertextHeader(self._public_key, Content.PAIRS, self._packing, n_due)
        with self._timer("receive"):
            self._blocks.append(decode_ciphertexts(gradients, header, self._arithmetic))

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add ciphertexts into bins, pack many bins to a ciphertext and re-randomise."""
        if self._pairs is None:
            require_all_rows(self._n_rows, len(self._blocks))
            self._pairs = self._blocks[0] if len(self._blocks) == 1 else self._arithmetic.concat(self._blocks)
            self._blocks = []
        with self._timer("histogram"):
            bins = sum_bins(self._arithmetic, self._pairs, plan_level(codes, layout, node_rows))
            if noise is not None:
                bins = BareEncryptions(self._public_key, self._arithmetic).add(bins, noise, self._packing.pair_format)
        self._stock.use(self._packing.n_ciphertexts(len(bins)))
        with self._timer("pack"):
            hidden = pack_and_hide(bins, self._packing, self._rerandomiser)
            header = CiphertextHeader(self._public_key, Content.PACKED_BINS, self._packing, len(hidden))
            return encode_ciphertexts(header, self._arithmetic, hidden)

    def prepare(self, is_last: bool) -> bool:
        """Make some encryptions of zero ahead."""
        with self._timer("prepare"):
            return self._stock.prepare(is_last)


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
    if setup.scheme == CLEAR_CODE:
        announced = announced_format(setup, tails)
        return ClearHistogramMaker(timer, announced.n_words, announced.fraction_bits)
    if setup.scheme == Scheme.ELGAMAL.value:
        return elgamal_maker(setup, backend, timer, tails)
    pair_format = announced_format(setup, tails)
    public_key = unpack_public_key(setup.scheme, setup.public_key, allow_toy_keys=allow_toy_keys)
    return EncryptedHistogramMaker(public_key, pair_format, backend, timer)


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
