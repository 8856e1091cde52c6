"""A passive party with its rows at workers: protected pairs of each shard, and their sums per bin."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import Scheme, StaysInProcess
from he_processors.bignum import registry
from he_processors.bignum.interface import Residues
from he_processors.ciphertext_wire import CiphertextHeader, decode_ciphertexts
from he_processors.ciphertext_wire import Content as CiphertextContent
from he_processors.curve.interface import AFFINE_BYTES, PointColumn, Points
from he_processors.elgamal.bin_sums import (
    CELL_COST,
    Content,
    Hider,
    PointHeader,
    bin_summer,
    noise_points,
    open_message,
    read_rows,
)
from he_processors.errors import ProtocolError
from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.histogram.planner import BinCodes, BinLayout, plan_level
from he_processors.histogram.sums import BareEncryptions, BinNoise, pack_and_hide, sum_bins
from he_processors.paillier import Rerandomiser
from nvflare_plugins.kinds.vertical.messages import TrainingSetup
from nvflare_plugins.kinds.vertical.schemes import (
    CLEAR_CODE,
    GRADIENT_BLOCK_ROWS,
    ClearHistogramMaker,
    ElGamalTerms,
    MaskStock,
    Timer,
    announced_format,
    check_clear_pairs,
    check_setup,
    require_all_rows,
    rows_due,
    unpack_public_key,
    untimed,
)
from nvflare_plugins.workers.worker_connection import WorkerPart, reduce_scatter
from nvflare_plugins.workers.workers import Work, Workers, begin, collect, note_rows, shard_rows

# The protected pairs of one shard's rows, and their sums per bin: what a worker of a passive party computes with.
#
# A level's sums are added in two steps. Each worker adds the pairs of its own rows (``sum``). Then each worker takes a
# range of the level's slots, adds to its own partial sums those of the other workers (``add``), packs and hides them
# (``finish``): adding and hiding are divided among the workers as the rows are. Sums of ciphertexts are exact, so that
# what is opened does not depend on the division. In the preset noised the party draws one value for each sum, and
# ``finish`` adds it: once for the party, not once for each worker.
#
# Security: partial sums are not hidden, and go between the workers of one party alone. Only what ``finish`` returns
# leaves the party.


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
        """Args: number: of the worker; setup: the fields of ``TrainingSetup``; tails: see ``open_pairs``.

        Shapes: codes: uint8 or uint16[n_features, n_shard_rows].
        """
        self._number, self._codes = number, codes
        self._pairs = open_pairs(TrainingSetup(*setup), backend, allow_toy_keys, tails)
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
