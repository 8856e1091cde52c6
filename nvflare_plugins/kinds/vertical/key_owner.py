"""The active party's half of the additive scheme for one job: fresh key, encryption at workers, randomisers made ahead.

Security: the key is generated for the job, held in memory only, and gone when the job ends.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import Decryptor, Scheme
from he_processors.elgamal.encryption import DigitFormat, ElGamalPrivateKey
from he_processors.errors import ProtocolError
from he_processors.fixed_point import PairFormat
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinSums, NodeTotal
from he_processors.key_bytes import secret_key_from_bytes, secret_key_to_bytes
from he_processors.paillier import PaillierPrivateKey, generate_paillier_key
from nvflare_plugins.kinds.vertical.gradient_scale import pair_format
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.messages import TrainingSetup
from nvflare_plugins.kinds.vertical.noised import NoisePlan
from nvflare_plugins.kinds.vertical.schemes import (
    CLEAR_CODE,
    GRADIENT_BLOCK_ROWS,
    ClearGradientOwner,
    ElGamalGradientOwner,
    ElGamalTerms,
    EncryptedGradientOwner,
    FillableOwner,
    OpenRows,
    Timer,
    announced_format,
    elgamal_owner,
    gradient_owner,
    untimed,
)
from nvflare_plugins.workers.worker_connection import WorkerPart
from nvflare_plugins.workers.workers import Workers, begin, collect

# What stands on a worker of the active party: encryption of gradient pairs, and the opening of sums.


PART = f"{__name__}:EncryptShard"


class EncryptShard(WorkerPart):
    """Encrypts pairs, each with a fresh randomiser of its own; one of several opens a part of all sums, too.

    Security: sees gradient pairs, sums of them, and gets the job's secret key, because encryption with the public key
        alone costs half as much again under elgamal and several times as much under the others: a party's workers are
        that party.
    """

    def __init__(
        self, setup: tuple[int, int, int, bytes], backend: str, secret: bytes, tails: tuple[int, int], opens: bool
    ) -> None:
        """Args: setup: the fields of ``TrainingSetup``; secret: of ``secret_key_to_bytes``; tails: of the format."""
        announced = TrainingSetup(*setup)
        terms = ElGamalTerms.of(announced, backend, tails) if announced.scheme == Scheme.ELGAMAL.value else None
        key = secret_key_from_bytes(secret, None if terms is None else terms.public_key)
        self._owner: ElGamalGradientOwner | EncryptedGradientOwner
        if terms is not None and isinstance(key, ElGamalPrivateKey):
            self._owner = ElGamalGradientOwner(key, terms.digits, terms.curve, opens=opens)
        elif terms is None and isinstance(key, PaillierPrivateKey):
            self._owner = gradient_owner(key, announced_format(announced, tails), backend)
        else:
            raise ProtocolError("the secret key is not one of the announced scheme")

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Encrypt each pair.

        Shapes: g, h: int64[n]; result: uint8[n, width] for each column of a message, without its header.
        """
        return self._owner.columns(g, h)

    def fill(self, n_rows: int) -> None:
        """Make randomisers until so many rows can be encrypted with them."""
        self._owner.fill(n_rows)

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt some of a message's ciphertexts. Shapes: uint8[n, width], in wire form."""
        if not isinstance(self._owner, EncryptedGradientOwner):
            raise TypeError("points are opened, not decrypted")
        return self._owner.decrypt(ciphertexts)

    def open_points(
        self, body: NDArray[np.uint8], n_bins: tuple[int, ...], totals: list[tuple[int, int, int, tuple[int, int]]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Decrypt and check the sums of some nodes for some features.

        Args:
            n_bins: of each of these features.
            totals: the fields of ``NodeTotal``, of each node.

        Shapes: body: uint8[n_columns, n_nodes * n_slots, 64]; results: of g and of h, int64[n_nodes, 2, n_slots].

        Raises:
            ProtocolError: with one fixed message.
        """
        if not isinstance(self._owner, ElGamalGradientOwner):
            raise TypeError("ciphertexts are decrypted, not opened")
        opened = self._owner.open_rows(body, BinLayout(tuple(n_bins)), [NodeTotal(*one) for one in totals])
        return np.stack([one.g for one in opened]), np.stack([one.h for one in opened])


# The opening of sums divided among the active party's workers, which hold its secret key.
#
# One worker would open no faster than the party's own process, and what is small is opened there: a call costs as much
# as some fifty sums.


LEAST_SLOTS = 64  # opened by one worker, of points: more than a millisecond
LEAST_CIPHERTEXTS = 8  # the same: as many as are decrypted side by side


def spread_opening(owner: object, workers: Workers) -> bool:
    """Have an owner's sums opened by its workers, if there are several; return whether they are.

    The workers hold an ``EncryptShard`` that opens.
    """
    if len(workers) < 2:
        return False
    if isinstance(owner, ElGamalGradientOwner):
        owner.open_with(SpreadPoints(owner.open_rows, workers))
    elif isinstance(owner, EncryptedGradientOwner):
        owner.open_with(lambda here: SpreadDecryptor(here, workers))
    else:
        return False
    return True


class SpreadDecryptor:
    """Ciphertexts, a run of them at each worker."""

    def __init__(self, here: Decryptor, workers: Workers) -> None:
        """Args: here: decrypts what is too little for two workers."""
        self.plaintext_bits = here.plaintext_bits
        self._here, self._workers = here, workers

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> Sequence[int]:
        """Decrypt. Shapes: ciphertexts: uint8[n, width] in wire form; result: n signed integers."""
        n_parts = min(len(self._workers), len(ciphertexts) // LEAST_CIPHERTEXTS)
        if n_parts < 2:
            return self._here.decrypt(ciphertexts)
        parts = [ciphertexts[part] for part in _even(len(ciphertexts), n_parts)]
        found = collect([self._workers.call(n, "decrypt", np.array(part)) for n, part in enumerate(parts)])
        return list(itertools.chain.from_iterable(found))


class SpreadPoints:
    """Sums of points, some nodes or some features at each worker: a feature's sums in a node are checked together."""

    def __init__(self, here: OpenRows, workers: Workers) -> None:
        """Args: here: opens what is too little for two workers."""
        self._here, self._workers = here, workers

    def __call__(self, body: NDArray[np.uint8], layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Open and check. Shapes: body: uint8[n_columns, n_nodes * n_slots, 64]; result: one for each of ``totals``."""
        n_nodes, n_parts = len(totals), min(len(self._workers), body.shape[1] // LEAST_SLOTS)
        if n_parts < 2:
            return self._here(body, layout, totals)
        points = body.reshape(len(body), n_nodes, layout.n_slots, -1)
        of_nodes, of_features = _even(n_nodes, n_parts), _even(layout.n_features, n_parts)
        by_nodes = _largest(of_nodes) * layout.n_features <= _largest(of_features) * n_nodes
        whole = slice(0, n_nodes), slice(0, layout.n_features)
        shares = [
            (part, whole[1]) if by_nodes else (whole[0], part) for part in (of_nodes if by_nodes else of_features)
        ]
        futures = []
        for number, (nodes, features) in enumerate(shares):
            slots = slice(int(layout.starts[features.start]), int(layout.starts[features.stop]))
            mine = points[:, nodes, slots].reshape(len(body), -1, body.shape[2])
            plain = [(one.n_rows, one.g, one.h, one.lower) for one in totals[nodes]]
            args = (np.ascontiguousarray(mine), layout.n_bins[features], plain)
            futures.append(self._workers.call(number, "open_points", *args))
        opened = collect(futures)
        if by_nodes:
            return [BinSums(g, h) for part in opened for g, h in zip(*part, strict=True)]
        return [
            BinSums(*(np.concatenate(part, axis=-1) for part in zip(*of_node, strict=True)))
            for of_node in _by_node(opened)
        ]


def _by_node(opened: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> list[list[tuple[NDArray[np.int64], ...]]]:
    """Return for each node g and h of every worker. Shapes: opened: of each worker g and h, int64[n_nodes, ...]."""
    return [[(g[node], h[node]) for g, h in opened] for node in range(len(opened[0][0]))]


def _even(n: int, n_parts: int) -> list[slice]:
    """Divide a range into parts that are not empty, and as even as they can be."""
    ends = [n * number // n_parts for number in range(n_parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends) if start < stop]


def _largest(parts: list[slice]) -> int:
    lengths: list[int] = [part.stop - part.start for part in parts]
    return max(lengths)


# The active party's half of the additive scheme with encryption at workers, and the opening of sums at several.


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


class EncryptingOwner(FillableOwner, Protocol):
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


# The active party's half of the additive scheme for one job: fresh key, randomisers made ahead.
#
# Security: the key is generated for the job, held in memory only, and gone when the job ends.


def open_owner(
    job: VerticalJob,
    n_rows: int,
    backend: str,
    timer: Timer = untimed,
    workers: Workers | None = None,
    noised: NoisePlan | None = None,
) -> tuple[FillableOwner | ClearGradientOwner, TrainingSetup]:
    """Generate the job's key and open the half that holds it.

    Args:
        backend: of arithmetic at this site.
        timer: measures the stage "search" of elgamal, a part of opening sums.
        workers: where to encrypt; None is this process. Gradients in the clear need none.
        noised: the plan of a job in the preset noised.

    Returns:
        The half, and what passive parties need.
    """
    if job.profile == VerticalProfile.ELGAMAL.value:
        digits = DigitFormat.of(job.fraction_bits, n_rows, (0, 0) if noised is None else noised.tails)
        points = elgamal_owner(digits, backend, timer)
        if workers is None:
            return points, points.setup()
        return ShardedOwner(points, workers, backend, points.secret_bytes()), points.setup()
    pairs = pair_format(n_rows, weighted=job.weight is not None) if noised is None else noised.pair_format(n_rows)
    if not job.is_encrypted:
        return ClearGradientOwner(pairs), TrainingSetup(CLEAR_CODE, pairs.fraction_bits, pairs.max_additions, b"")
    key = generate_paillier_key(job.key_bits)
    owner = gradient_owner(key, pairs, backend)
    if workers is None:
        return owner, owner.setup()
    return ShardedOwner(owner, workers, backend, secret_key_to_bytes(key)), owner.setup()


_MOST_AHEAD = 1 << 18  # randomisers: some 200 MB at 3072 bits
_FILL_STEP = 1 << 10  # randomisers made at a time: decryption, which others wait for, waits for one step at most


class PrecomputingKeyOwner:
    """An owner that makes the randomisers of the next tree while the passive parties work on this one.

    Encryption does not wait for all of them: what is missing then is made block by block, while blocks travel. A
    context manager: leaving it ends the making.
    """

    def __init__(self, owner: FillableOwner, n_rows: int, n_trees: int, timer: Timer = untimed):
        """Prepare for one training.

        Args:
            n_trees: of the whole training; nothing is made for more.
            timer: measures the stage "prepare", which runs beside others.
        """
        self.pair_format: PairFormat = owner.pair_format
        self.is_streamed = owner.is_streamed
        self._owner = owner
        self._timer = timer
        self._n_rows = n_rows
        self._n_due = n_rows * n_trees  # pairs that are not encrypted yet
        self._filling: threading.Thread | None = None
        self._may_fill = threading.Event()
        self._is_due = False  # the next tree's encryption, or the end

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Begin a tree."""
        self._stop_filling()
        self._owner.begin_tree(g, h)

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair; after the last one of a tree, make ready for the next."""
        self._stop_filling()
        protected = self._owner.encrypt(g, h)
        self._n_due -= g.size
        if self._n_due > 0 and self._n_due % self._n_rows == 0:
            self._is_due = False
            self._filling = threading.Thread(target=self._fill, name="veilboost_randomisers", daemon=True)
            self._filling.start()
        return protected

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt the sums of a level and check every node."""
        self._may_fill.clear()
        try:
            return self._owner.open_sums(sums, layout, totals)
        finally:
            self._may_fill.set()

    def finish_sums(self, since_s: float) -> None:
        """Take note that all sums of a level were opened."""
        self._owner.finish_sums(since_s)

    def __enter__(self) -> PrecomputingKeyOwner:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_filling()

    def _fill(self) -> None:
        most = min(self._n_rows, _MOST_AHEAD)
        for n in range(_FILL_STEP, most + _FILL_STEP, _FILL_STEP):
            self._may_fill.wait()
            if self._is_due:
                return
            with self._timer("prepare"):
                self._owner.fill(min(n, most))

    def _stop_filling(self) -> None:
        self._is_due = True
        self._may_fill.set()
        if self._filling is not None:
            self._filling.join()
            self._filling = None
