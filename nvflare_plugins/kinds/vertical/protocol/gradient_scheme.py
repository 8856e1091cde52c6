"""The additive scheme behind which the parties exchange sums: encryption, or a stand-in without any.

The active party is the key owner: it encrypts gradient pairs and opens histograms. A passive party adds what it cannot
read. Both halves exchange opaque bytes, so Paillier and the stand-in are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from he_processors.errors import ProtocolError
from he_processors.exact_sums import WORD_BITS, lower_words
from he_processors.fixed_point import REFUSED, PairFormat
from he_processors.histogram.planner import BinCodes, BinLayout
from he_processors.histogram.sums import BinNoise, BinSums, NodeTotal, check_node

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
