"""A passive party's half of the additive scheme with its rows at workers: the twin of the halves in one process.

What leaves the party has the same form and the same length as without workers, and opens to the same sums.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.scheme import Scheme
from he_processors.ciphertext_wire import CiphertextHeader
from he_processors.ciphertext_wire import Content as CiphertextContent
from he_processors.elgamal.wire import Content, PointHeader
from he_processors.histogram.bin_noise import BinNoise
from he_processors.histogram.bins import BinCodes, BinLayout
from he_processors.packing import PackingLayout
from nvflare_plugins.cluster.workers import Work, Workers, begin, collect, note_rows, shard_rows
from nvflare_plugins.vertical.protocol.elgamal_scheme import ElGamalTerms
from nvflare_plugins.vertical.protocol.encrypted_scheme import (
    CLEAR_CODE,
    announced_format,
    check_setup,
    unpack_public_key,
)
from nvflare_plugins.vertical.protocol.gradient_scheme import (
    GRADIENT_BLOCK_ROWS,
    Timer,
    require_all_rows,
    rows_due,
    untimed,
)
from nvflare_plugins.vertical.protocol.messages import TrainingSetup
from nvflare_plugins.vertical.shards.sum_shard import PART

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
        self.is_streamed = setup.scheme != CLEAR_CODE
        self._form = _form_of(setup, backend, allow_toy_keys, tails)
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
            return self._form.header(len(node_rows) * layout.n_slots) + b"".join(found)

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
        unit, n_workers = self._form.unit, len(self._workers)
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


class _Form:
    """How sums leave the party."""

    unit = 1  # slots that share a ciphertext

    def header(self, n_slots: int) -> bytes:
        """Return what stands before the sums."""
        return b""


class _PointForm(_Form):
    def __init__(self, terms: ElGamalTerms) -> None:
        self._terms = terms

    def header(self, n_slots: int) -> bytes:
        return PointHeader(self._terms.public_key, Content.BINS, self._terms.digits, n_slots).to_bytes()


class _CiphertextForm(_Form):
    def __init__(self, setup: TrainingSetup, allow_toy_keys: bool, tails: tuple[int, int]) -> None:
        self._key = unpack_public_key(setup.scheme, setup.public_key, allow_toy_keys=allow_toy_keys)
        self._packing = PackingLayout.fit(announced_format(setup, tails), self._key.plaintext_bits)
        self.unit = self._packing.pairs_per_plaintext

    def header(self, n_slots: int) -> bytes:
        count = self._packing.n_ciphertexts(n_slots)
        return CiphertextHeader(self._key, CiphertextContent.PACKED_BINS, self._packing, count).to_bytes()


def _form_of(setup: TrainingSetup, backend: str, allow_toy_keys: bool, tails: tuple[int, int]) -> _Form:
    if setup.scheme == CLEAR_CODE:
        return _Form()
    if setup.scheme == Scheme.ELGAMAL.value:
        return _PointForm(ElGamalTerms.of(setup, backend, tails))
    return _CiphertextForm(setup, allow_toy_keys, tails)
