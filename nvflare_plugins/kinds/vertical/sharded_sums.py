"""A passive party with its rows at workers: protected pairs of each shard, and their sums per bin."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.histogram.planner import BinCodes, BinLayout
from he_processors.histogram.sums import BinNoise
from nvflare_plugins.kinds.vertical.messages import TrainingSetup
from nvflare_plugins.kinds.vertical.schemes import (
    GRADIENT_BLOCK_ROWS,
    Timer,
    announced_terms,
    check_setup,
    require_all_rows,
    rows_due,
    untimed,
)
from nvflare_plugins.workers.worker_connection import WorkerPart, reduce_scatter
from nvflare_plugins.workers.workers import Work, Workers, begin, collect, note_rows, shard_rows

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
        number: int,
        setup: tuple[int, int, int, bytes],
        backend: str,
        codes: BinCodes,
        allow_toy_keys: bool,
        tails: tuple[int, int],
    ) -> None:
        """Args: number: of the worker; setup: the fields of ``TrainingSetup``; tails: see ``announced_terms``.

        Shapes: codes: uint8 or uint16[n_features, n_shard_rows].
        """
        self._number, self._codes = number, codes
        self._pairs = announced_terms(
            TrainingSetup(*setup), backend, allow_toy_keys=allow_toy_keys, tails=tails
        ).pairs()
        self._node_rows: Sequence[NDArray[np.int32]] = ()

    def add_gradients(self, is_first: bool, blocks: list[tuple[NDArray[np.uint8], int, int, int]]) -> None:
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

    def sum_bins(
        self, features: NDArray[np.int64], n_bins: tuple[int, ...], noise: Drawn, node_rows: Nodes
    ) -> list[bytes]:
        """Add the pairs of the nodes into the bins of some features, pack and hide: what the only worker does.

        Args:
            n_bins: of each of these features.
            noise: of the preset noised, on these sums of g and of h, int64[n] each; None where sums are exact.
            node_rows: of each node int32[n_node_rows]; None for those of the last call.

        Returns:
            By column.
        """
        return self._pairs.finish(self._sum(features, n_bins, node_rows), _noise(noise))

    def sum_share(
        self,
        exchange: int,
        features: NDArray[np.int64],
        n_bins: tuple[int, ...],
        bounds: tuple[int, ...],
        noise: Drawn,
        node_rows: Nodes,
    ) -> tuple[list[bytes], int, float]:
        """Do the same with the other workers: each packs and hides a share of the sums, with its share of the noise.

        Args:
            exchange: its number.
            bounds: worker w has the slots from bounds[w] to bounds[w + 1].

        Returns:
            By column, nothing where there is no share; bytes sent to other workers; seconds waited for them.
        """
        if self.peers is None:
            raise TypeError("this worker has no other to add sums with")
        sent, waited = self.peers.sent_bytes, self.peers.waited_s
        sums = self._sum(features, n_bins, node_rows)
        share = reduce_scatter(self.peers, exchange, bounds, sums, self._pairs.part, self._pairs.add)
        columns = [] if share is None else self._pairs.finish(share, _noise(noise))
        return columns, self.peers.sent_bytes - sent, self.peers.waited_s - waited

    def prepare(self, is_last: bool) -> bool:
        """Make a little of what hides later sums; return whether more is due."""
        return self._pairs.prepare(is_last)

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


class ShardedHistogramMaker:
    """Has workers add the pairs of their rows into bins. One training at a time."""

    def __init__(
        self,
        setup: TrainingSetup,
        n_rows: int,
        workers: Workers,
        *,
        allow_clear: bool = False,
        backend: str = "auto",
        allow_toy_keys: bool = False,
        timer: Timer = untimed,
        tails: tuple[int, int] = (0, 0),
    ) -> None:
        """Prepare; see ``histogram_maker`` for the arguments and errors, and ``shard_rows``.

        Args:
            timer: measures the stages "receive", "histogram" (all of a level's sums) and "prepare".
        """
        check_setup(setup, n_rows, allow_clear)
        self._terms = announced_terms(setup, backend, allow_toy_keys=allow_toy_keys, tails=tails)
        self.is_streamed = self._terms.is_streamed
        self._tails = tails
        self._setup = (setup.scheme, setup.fraction_bits, setup.max_additions, setup.public_key)
        self._workers, self._timer, self._backend, self._toys = workers, timer, backend, allow_toy_keys
        self._shards = shard_rows(n_rows, len(workers))
        self._n_rows = n_rows
        self._n_blocks = 0
        self._due: list[list[_Rows]] = []  # rows that each worker gets next
        self._n_sent = [0] * len(self._shards)  # calls with rows of this tree
        self._waiting: deque[Future[Any]] = deque()
        self._node_rows: Sequence[NDArray[np.int32]] | None = None

    def hold(self, codes: BinCodes) -> None:
        """Give each worker the codes of its rows."""
        args = [
            (number, self._setup, self._backend, np.ascontiguousarray(codes[:, rows]), self._toys, self._tails)
            for number, rows in enumerate(self._shards)
        ]
        begin(self._workers, PART, args)
        note_rows(self._workers, self._shards)

    def begin_tree(self, n_rows: int) -> None:
        """Forget the pairs of the tree before."""
        self._n_blocks, self._node_rows = 0, None
        self._waiting.clear()
        self._due = [[] for _ in self._shards]
        self._n_sent = [0] * len(self._shards)

    def add_gradients(self, gradients: bytes) -> None:
        """Give the next block of pairs to the workers whose rows are in it."""
        n_block = rows_due(self._n_rows, self._n_blocks)
        first = self._n_blocks * GRADIENT_BLOCK_ROWS
        self._n_blocks += 1
        block = np.frombuffer(gradients, dtype=np.uint8)  # arrays go to a worker without a copy
        with self._timer("receive"):
            for number, rows in enumerate(self._shards):
                start, stop = max(rows.start, first) - first, min(rows.stop, first + n_block) - first
                if start < stop:
                    self._due[number].append((block, n_block, start, stop))
                if len(self._due[number]) >= _BLOCKS_AT_ONCE or first + n_block >= rows.stop:
                    self._send_rows(number)

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Have the pairs of each node added into bins, noised where they are joined, and hidden."""
        require_all_rows(self._n_rows, self._n_blocks)
        if features is None:
            raise ValueError("sums of shards need the numbers of the features")
        with self._timer("histogram"):
            self._settle()  # gradients that are none are refused as such, before sums fail for want of them
            found = self._hidden(features.astype(np.int64), layout, node_rows, noise)
            return self._terms.sums_header(len(node_rows) * layout.n_slots) + b"".join(found)

    def prepare(self, is_last: bool) -> bool:
        """Have the workers make some masks ahead."""
        with self._timer("prepare"):
            return any(collect([self._workers.call(n, "prepare", is_last) for n in range(len(self._workers))]))

    def _hidden(
        self,
        features: NDArray[np.int64],
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        noise: BinNoise | None,
    ) -> list[bytes]:
        """Have sums added, among the workers too, and hidden; return the columns, joined over the workers."""
        n_slots, n_bins, nodes = len(node_rows) * layout.n_slots, layout.n_bins, self._nodes(node_rows)
        if len(self._workers) == 1:
            args = (features, n_bins, _slots_of(noise, 0, n_slots), nodes[0])
            alone: list[bytes] = self._workers.call(0, "sum_bins", *args).result()
            return alone
        bounds = self._bounds(n_slots)
        shares = [_slots_of(noise, start, stop) for start, stop in itertools.pairwise(bounds)]
        each = [(features, n_bins, tuple(bounds), *own) for own in zip(shares, nodes, strict=True)]
        futures = self._workers.together("sum_share", each)
        for work, future in zip(self._workers.work, futures, strict=True):
            future.add_done_callback(_exchanges(work))
        finished = [columns for columns, _, _ in collect(futures) if columns]
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
        unit, n_workers = self._terms.unit, len(self._workers)
        n_units = -(-n_slots // unit)
        return [min(n_units * number // n_workers * unit, n_slots) for number in range(n_workers + 1)]

    def _settle(self) -> None:
        """Wait for what was asked without waiting. Raises: what was wrong with it."""
        while self._waiting:
            self._waiting.popleft().result()

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


def _slots_of(noise: BinNoise | None, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    return None if noise is None else (noise.g[start:stop], noise.h[start:stop])
