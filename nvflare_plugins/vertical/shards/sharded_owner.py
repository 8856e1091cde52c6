"""The active party's half of the additive scheme with encryption at workers, and the opening of sums at several."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.fixed_pairs import PairFormat
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal
from nvflare_plugins.cluster.workers import Workers, begin, collect
from nvflare_plugins.vertical.protocol.gradient_scheme import GRADIENT_BLOCK_ROWS, StockedOwner
from nvflare_plugins.vertical.protocol.messages import TrainingSetup
from nvflare_plugins.vertical.shards.encrypt_shard import PART
from nvflare_plugins.vertical.shards.spread_opening import spread_opening

LEAST_ROWS = 1 << 10  # encrypted at a time by one worker: fewer make slow batches
_MOST_BLOCKS = 3  # of rows, the same: fewer calls cost less, and Dask copies larger messages once more
_BLOCKS_UNDER_WAY = 64


def part_bounds(n_rows: int, n_workers: int) -> list[int]:
    """Return where parts of the rows begin, and where the last ends: even ones, and as many for each worker.

    Each worker has four or more, so that the first rows leave while the last are encrypted.
    """
    largest = GRADIENT_BLOCK_ROWS * max(1, min(_MOST_BLOCKS, _BLOCKS_UNDER_WAY // n_workers))
    per_worker = max(min(4, n_rows // (n_workers * LEAST_ROWS)), -(-n_rows // (n_workers * largest)), 1)
    n_parts = min(per_worker * n_workers, n_rows)
    return [n_rows * number // n_parts for number in range(n_parts)] + [n_rows]


class EncryptingOwner(StockedOwner, Protocol):
    """A half that can make a message of pairs that were encrypted elsewhere."""

    def setup(self) -> TrainingSetup:
        """Return what passive parties need."""

    def pairs_message(self, n_rows: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Put the header before pieces of columns of encrypted pairs, in order."""


class ShardedOwner:
    """Has workers encrypt, some parts ahead of the block that is asked for.

    Security: see ``EncryptShard`` for what workers see.
    """

    def __init__(self, owner: EncryptingOwner, workers: Workers, backend: str, secret: bytes) -> None:
        """Give the workers what they encrypt with. Args: secret: of ``secret_key_to_bytes``."""
        self.pair_format: PairFormat = owner.pair_format
        self.is_streamed = owner.is_streamed
        self._owner, self._workers = owner, workers
        setup = owner.setup()
        fields = (setup.scheme, setup.fraction_bits, setup.max_additions, setup.public_key)
        opens = spread_opening(owner, workers)
        begin(workers, PART, [(fields, backend, secret, owner.pair_format.tails, opens)] * len(workers))
        self._g = self._h = np.empty(0, dtype=np.int64)
        self._given = self._n_asked = 0  # rows and parts of the tree
        self._bounds = [0]
        self._parts: deque[Future[Any]] = deque()
        self._columns: list[NDArray[np.uint8]] = []  # what is left of a part that has come

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Begin to encrypt the pairs of a tree, which are asked for block by block in their order."""
        for future in self._parts:
            future.cancel()
        self._parts.clear()
        self._g, self._h, self._given, self._n_asked, self._columns = g, h, 0, 0, []
        self._bounds = part_bounds(g.size, len(self._workers))
        self._look_ahead()

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Return the next pairs of the tree, encrypted."""
        ahead = slice(self._given, self._given + g.size)
        if not (np.array_equal(self._g[ahead], g) and np.array_equal(self._h[ahead], h)):
            self.begin_tree(g, h)
        end, pieces = self._given + g.size, []
        while self._given < end:
            if not self._columns or not len(self._columns[0]):
                self._look_ahead()
                self._columns = self._parts.popleft().result()
            n_rows = min(end - self._given, len(self._columns[0]))
            pieces.append([column[:n_rows].data for column in self._columns])
            self._columns = [column[n_rows:] for column in self._columns]
            self._given += n_rows
        return self._owner.pairs_message(g.size, list(itertools.chain(*zip(*pieces, strict=True))))

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt the sums of a level and check every node."""
        return self._owner.open_sums(sums, layout, totals)

    def finish_sums(self, since_s: float) -> None:
        """Take note that all sums of a level were opened."""
        self._owner.finish_sums(since_s)

    def fill(self, n_rows: int) -> None:
        """Have the workers make randomisers for so many rows together."""
        own = -(-n_rows // len(self._workers))
        collect([self._workers.call(number, "fill", own) for number in range(len(self._workers))])

    def _look_ahead(self) -> None:
        """Keep every worker busy, and no more in memory than that takes."""
        n_workers = len(self._workers)
        while self._n_asked < len(self._bounds) - 1 and len(self._parts) < 2 * n_workers + 2:
            rows = slice(*self._bounds[self._n_asked : self._n_asked + 2])
            worker = self._n_asked % n_workers
            future = self._workers.call(worker, "encrypt", self._g[rows].copy(), self._h[rows].copy())
            future.add_done_callback(self._workers.work[worker].counting("encrypted", rows.stop - rows.start))
            self._parts.append(future)
            self._n_asked += 1
