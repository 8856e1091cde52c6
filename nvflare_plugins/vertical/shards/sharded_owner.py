"""The active party's half of the additive scheme with encryption at workers; sums are opened in its own process."""

from __future__ import annotations

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

LEAST_ROWS = 1 << 10  # encrypted at a time by one worker: fewer make slow batches


def part_rows(n_rows: int, n_workers: int) -> int:
    """Return how many rows a worker encrypts at a time: a block or an even part of it, and four for each worker."""
    parts = 1
    while n_rows < 4 * n_workers * (GRADIENT_BLOCK_ROWS // parts) and GRADIENT_BLOCK_ROWS // parts > LEAST_ROWS:
        parts *= 2
    return GRADIENT_BLOCK_ROWS // parts


class EncryptingOwner(StockedOwner, Protocol):
    """A half that can make a message of pairs that were encrypted elsewhere."""

    def setup(self) -> TrainingSetup:
        """Return what passive parties need."""

    def pairs_message(self, n_rows: int, columns: Sequence[bytes]) -> bytes:
        """Put the header before columns of encrypted pairs."""


class ShardedOwner:
    """Has workers encrypt, some parts ahead of the block that is asked for.

    Security: sums are opened here. See ``EncryptShard`` for what workers see.
    """

    def __init__(self, owner: EncryptingOwner, workers: Workers, backend: str, secret: bytes) -> None:
        """Give the workers what they encrypt with. Args: secret: of ``secret_key_to_bytes``."""
        self.pair_format: PairFormat = owner.pair_format
        self.is_streamed = owner.is_streamed
        self._owner, self._workers = owner, workers
        setup = owner.setup()
        fields = (setup.scheme, setup.fraction_bits, setup.max_additions, setup.public_key)
        begin(workers, PART, [(fields, backend, secret, owner.pair_format.tails)] * len(workers))
        self._g = self._h = np.empty(0, dtype=np.int64)
        self._asked = self._given = 0  # rows of the tree
        self._n_parts = 0
        self._part_rows = GRADIENT_BLOCK_ROWS
        self._parts: deque[tuple[int, Future[Any]]] = deque()

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Begin to encrypt the pairs of a tree, which are asked for block by block in their order."""
        for _, future in self._parts:
            future.cancel()
        self._parts.clear()
        self._g, self._h, self._asked, self._given = g, h, 0, 0
        self._part_rows = part_rows(g.size, len(self._workers))
        self._look_ahead()

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Return the next pairs of the tree, encrypted."""
        ahead = slice(self._given, self._given + g.size)
        if not (np.array_equal(self._g[ahead], g) and np.array_equal(self._h[ahead], h)):
            self.begin_tree(g, h)
        end, columns = self._given + g.size, []
        while self._given < end:
            self._look_ahead()
            n_rows, future = self._parts.popleft()
            columns.append(future.result())
            self._given += n_rows
        joined = [b"".join(map(memoryview, parts)) for parts in zip(*columns, strict=True)]
        return self._owner.pairs_message(g.size, joined)

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
        while self._asked < self._g.size and len(self._parts) < 4 * n_workers + 4:
            rows = slice(self._asked, min(self._asked + self._part_rows, self._g.size))
            worker = self._n_parts % n_workers
            future = self._workers.call(worker, "encrypt", self._g[rows].copy(), self._h[rows].copy())
            future.add_done_callback(self._workers.work[worker].counting("encrypted", rows.stop - rows.start))
            self._parts.append((rows.stop - rows.start, future))
            self._asked, self._n_parts = rows.stop, self._n_parts + 1
