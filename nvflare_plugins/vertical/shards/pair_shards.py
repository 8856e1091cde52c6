"""The protected pairs of one shard's rows, and their sums per bin: what a worker of a passive party computes with.

A level's sums are added in two steps. Each worker adds the pairs of its own rows (``sum``). Then each worker takes a
range of the level's slots, adds to its own partial sums those of the other workers (``add``), packs and hides them
(``finish``): adding and hiding are divided among the workers as the rows are. Sums of ciphertexts are exact, so that
what is opened does not depend on the division. In the preset noised the party draws one value for each sum, and
``finish`` adds it: once for the party, not once for each worker.

Security: partial sums are not hidden, and go between the workers of one party alone. Only what ``finish`` returns
    leaves the party.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.rerandomiser import Rerandomiser
from he_processors.additive.scheme import Scheme, StaysInProcess
from he_processors.bignum import registry
from he_processors.bignum.interface import Residues
from he_processors.ciphertext_wire import CiphertextHeader, decode_ciphertexts
from he_processors.ciphertext_wire import Content as CiphertextContent
from he_processors.curve.interface import AFFINE_BYTES, PointColumn, Points
from he_processors.elgamal.bin_sums import CELL_COST, Hider, bin_summer, noise_points
from he_processors.elgamal.wire import Content, PointHeader, open_message, read_rows
from he_processors.errors import ProtocolError
from he_processors.fixed_pairs import PairFormat
from he_processors.histogram.bin_noise import BareEncryptions, BinNoise
from he_processors.histogram.bins import BinCodes, BinLayout
from he_processors.histogram.ciphertext_sums import pack_and_hide, sum_bins
from he_processors.histogram.planner import plan_level
from he_processors.packing import PackingLayout
from nvflare_plugins.vertical.protocol.elgamal_scheme import ElGamalTerms
from nvflare_plugins.vertical.protocol.encrypted_scheme import CLEAR_CODE, announced_format, unpack_public_key
from nvflare_plugins.vertical.protocol.gradient_scheme import ClearHistogramMaker, MaskStock, check_clear_pairs
from nvflare_plugins.vertical.protocol.messages import TrainingSetup

_MOST_MASKS = 1 << 14
_MASKS_AT_ONCE = 1 << 8
_WORD = np.dtype("<i8")


class PairShard(Protocol):
    """The pairs of a shard's rows. Rows are numbered within the shard; sums are opaque."""

    def begin(self, n_rows: int) -> None:
        """Forget the pairs of the tree before; so many come."""

    def take(self, block: memoryview, n_block_rows: int, rows: slice) -> None:
        """Check a block of pairs, and take some of its rows. Raises: ProtocolError: it is not one of so many pairs."""

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> Any:
        """Add the pairs of each node into bins."""

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


def open_pairs(setup: TrainingSetup, backend: str, allow_toy_keys: bool, tails: tuple[int, int] = (0, 0)) -> PairShard:
    """Open a shard's half from what the active party announced.

    Args:
        tails: of the noise on sums (``PairFormat``); (0, 0) where they are exact.

    Raises:
        ProtocolError: it is not usable.
    """
    if setup.scheme == CLEAR_CODE:
        return ClearPairs(announced_format(setup, tails))
    if setup.scheme == Scheme.ELGAMAL.value:
        return PointPairs(ElGamalTerms.of(setup, backend, tails))
    return CiphertextPairs(setup, announced_format(setup, tails), backend, allow_toy_keys)


class PointPairs(StaysInProcess):
    """Rows of points: profile ``elgamal``."""

    def __init__(self, terms: ElGamalTerms) -> None:
        self._terms, self._curve = terms, terms.curve
        self._hider = Hider(terms.public_key, terms.curve)
        self._stock = MaskStock(self._hider, _MOST_MASKS, _MASKS_AT_ONCE)
        self._columns: list[PointColumn] = []
        self._pairs: list[Points] = []

    def begin(self, n_rows: int) -> None:
        self._columns, self._pairs = [], []
        self._stock.begin_tree()
        self._columns = [self._curve.column(n_rows) for _ in range(1 + self._terms.digits.n_messages)]

    def take(self, block: memoryview, n_block_rows: int, rows: slice) -> None:
        header = PointHeader(self._terms.public_key, Content.PAIRS, self._terms.digits, n_block_rows)
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
        self._stock.use(n_slots)
        masks = self._hider.draw(n_slots)
        hidden = [self._hider.hide(number, bins, masks) for number, bins in enumerate(sums)]
        return [self._curve.to_affine(column).tobytes() for column in hidden]

    def prepare(self, is_last: bool) -> bool:
        return self._stock.prepare(is_last)

    def _slots(self, column: Points, slots: slice) -> Points:
        return self._curve.take(column, np.arange(slots.start, slots.stop, dtype=np.int64))

    def _read(self, data: bytes) -> Points:
        return self._curve.from_affine(np.frombuffer(data, dtype=np.uint8).reshape(-1, AFFINE_BYTES))


class CiphertextPairs(StaysInProcess):
    """One ciphertext a row: profile ``paillier``."""

    def __init__(self, setup: TrainingSetup, pairs: PairFormat, backend: str, allow_toy_keys: bool) -> None:
        self._public_key = unpack_public_key(setup.scheme, setup.public_key, allow_toy_keys=allow_toy_keys)
        self._packing = PackingLayout.fit(pairs, self._public_key.plaintext_bits)
        self._arithmetic = registry.open_backend(backend, self._public_key.modulus)
        self._rerandomiser = Rerandomiser(self._public_key, self._arithmetic)
        self._stock = MaskStock(self._rerandomiser, _MOST_MASKS, 1 << 6)
        self._blocks: list[Residues] = []
        self._pairs: Residues | None = None

    def begin(self, n_rows: int) -> None:
        self._blocks, self._pairs = [], None
        self._stock.begin_tree()

    def take(self, block: memoryview, n_block_rows: int, rows: slice) -> None:
        header = CiphertextHeader(self._public_key, CiphertextContent.PAIRS, self._packing, n_block_rows)
        found = decode_ciphertexts(block, header, self._arithmetic)
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
            sums = BareEncryptions(self._public_key, self._arithmetic).add(sums, noise, self._packing.pair_format)
        self._stock.use(self._packing.n_ciphertexts(len(sums)))
        hidden = pack_and_hide(sums, self._packing, self._rerandomiser)
        return [self._arithmetic.to_wire(hidden).tobytes()]

    def prepare(self, is_last: bool) -> bool:
        return self._stock.prepare(is_last)

    def _slots(self, sums: Residues, slots: slice) -> Residues:
        return self._arithmetic.take(sums, np.arange(slots.start, slots.stop, dtype=np.int64))


class ClearPairs:
    """Pairs in the clear: profile ``plain``. Security: none."""

    def __init__(self, pairs: PairFormat) -> None:
        self._format, self._words = pairs, 2 * pairs.n_words
        self._maker = ClearHistogramMaker(n_words=pairs.n_words)
        self._n_rows = 0
        self._blocks: list[memoryview] = []

    def begin(self, n_rows: int) -> None:
        self._n_rows, self._blocks = n_rows, []

    def take(self, block: memoryview, n_block_rows: int, rows: slice) -> None:
        if len(block) != 2 * _WORD.itemsize * n_block_rows:
            raise ProtocolError(f"expected {n_block_rows} gradient pairs")
        mine = block[16 * rows.start : 16 * rows.stop]
        check_clear_pairs(np.frombuffer(mine, dtype="<i8").reshape(-1, 2), self._format.fraction_bits)
        self._blocks.append(mine)

    def sum(self, codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
        if self._blocks:
            self._maker.hold_pairs(np.frombuffer(b"".join(self._blocks), dtype=_WORD).reshape(self._n_rows, 2))
            self._blocks = []
        return np.frombuffer(self._maker.sum_held(codes, layout, node_rows), dtype=_WORD).reshape(-1, self._words)

    def part(self, sums: NDArray[np.int64], slots: slice) -> list[bytes]:
        return [sums[slots].tobytes()]

    def add(self, sums: NDArray[np.int64], slots: slice, others: Sequence[Sequence[bytes]]) -> NDArray[np.int64]:
        total = sums[slots].copy()
        for (data,) in others:
            total += np.frombuffer(data, dtype=_WORD).reshape(-1, self._words)
        return total

    def finish(self, sums: NDArray[np.int64], noise: BinNoise | None = None) -> list[bytes]:
        if noise is not None:
            noise.check(self._format, len(sums))
            sums = sums + np.stack([noise.g, noise.h], axis=1)
        return [sums.tobytes()]

    def prepare(self, is_last: bool) -> bool:
        return False
