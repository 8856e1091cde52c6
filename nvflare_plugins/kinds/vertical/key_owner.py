"""The active party's half of the additive schemes: the gradients' grid, a fresh key, encryption, and opened sums.

Gradients are divided by a power of two that bounds them, so that what is encrypted lies in [-1, 1] and [0, 1] in every
job. The number format the passive parties see depends on the number of rows alone.

A float32 has 24 significant bits. With F fraction bits every gradient and hessian of at least 2^(24 - F) of its bound
is therefore encoded without any rounding, and so are all sums; smaller ones are rounded by at most 2^-(F + 1) of the
bound. Models then equal centralized ones bit for bit, unless nodes are made of such rows alone: saturated predictions
together with min_child_weight near 0.

Security: the key is generated for the job, held in memory only, and gone when the job ends.

The additive schemes of vertical jobs: one row for each profile, and for each that a plugin brings.

Schemes over big numbers are ``AdditiveScheme`` objects of he_processors, and all that is done with them is the same:
packing, bins, re-randomisation, checks. One of others is an entry point of the group ``veilboost.vertical_schemes``,
loaded only where the site's policy names its distribution, version and the hash of its files (site/policy.py).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors import ciphertext_wire
from he_processors.additive_schemes import AdditiveScheme, Decryptor, PrivateKey, PublicKey, Scheme
from he_processors.bignum import registry
from he_processors.ciphertext_wire import public_key_to_bytes, secret_key_from_bytes, secret_key_to_bytes
from he_processors.curve.interface import Curve
from he_processors.curve.registry import AUTO
from he_processors.elgamal import bin_sums, encryption
from he_processors.elgamal.bin_sums import PointHeader, encode_points, join_message, open_message, read_rows
from he_processors.elgamal.decryption import ElGamalDecryptor, draw_out
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import MOST_SUM_BITS, REFUSED, PackingLayout, PairFormat, exponent_of
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinSums, MaskedFormat, NodeTotal, check_node, decrypt_level, open_shares
from he_processors.paillier import PAILLIER, Encryptor, PaillierPrivateKey, owner_encryptor
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.evidence.audit import scheme_facts
from nvflare_plugins.evidence.format import Protection
from nvflare_plugins.growth.arithmetic import GradientUnit
from nvflare_plugins.kinds.vertical.histogram_maker import (
    CLEAR_CODE,
    GRADIENT_BLOCK_ROWS,
    PAIR,
    PairsForm,
    Timer,
    announced_format,
    read_elgamal_setup,
    require_curve,
    untimed,
)
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.messages import TrainingSetup
from nvflare_plugins.kinds.vertical.noised import NoisePlan
from nvflare_plugins.kinds.vertical.sealed import SealedPlan
from nvflare_plugins.site.policy import SCHEMES, load_hashed
from nvflare_plugins.wire.profiles import plugin_of
from nvflare_plugins.workers.worker_connection import WorkerPart
from nvflare_plugins.workers.workers import Workers, begin, collect

MIN_FRACTION_BITS = 40
"""Of tables of 2^22 rows and more, whose sums take two words; smaller ones have as many as fit one word."""
_MAX_FRACTION_BITS = 52
_SUM_BITS = 62
_MAX_ROWS = 1 << 31  # rows are numbered by int32
_HEADROOM = 8.0
FINEST = 2.0**-24
"""Step beside a leaf's denominator that leaves the leaf of a centralized model exact."""


def pair_format(n_rows: int, *, weighted: bool = False) -> PairFormat:
    """Return the finest format whose sums over all rows fit 64 bits, and has ``MIN_FRACTION_BITS`` at least.

    Args:
        weighted: the job has a column of weights, which may be of very different sizes: sums then take two words, and
            the format is as fine as these allow.

    Raises:
        ConfigurationError: more rows than a job may have.
    """
    if n_rows >= _MAX_ROWS:
        raise ConfigurationError(f"{n_rows} rows are more than a vertical job may have: fewer than {_MAX_ROWS}")
    room = (MOST_SUM_BITS - 1 if weighted else _SUM_BITS) - (max(n_rows, 1) - 1).bit_length()
    fraction_bits = max(MIN_FRACTION_BITS, min(_MAX_FRACTION_BITS, room))
    return PairFormat(fraction_bits, max(n_rows, 1), g_bound=1.0, h_low=0.0, h_high=1.0)


def check_weights(
    weight: NDArray[np.float32],
    bounds: tuple[float | None, float | None],
    effective: Mapping[str, str],
    fraction_bits: int,
    finest: float = FINEST,
) -> None:
    """Refuse weights that differ so much that leaves of the smallest ones would drown in the step of the format.

    A leaf's denominator is at least min_child_weight + lambda, or some row's weight; the step counts beside it.

    Shapes: weight: float32[n_rows].

    Args:
        bounds: of |gradient| and hessian of a row of weight 1; None where labels drive them.
        finest: largest step beside a leaf's denominator.

    Raises:
        DataRefusal: they do.
    """
    known = [_HEADROOM if bound is None else bound for bound in bounds]
    largest, positive = float(weight.max(initial=0.0)), weight[weight > 0]
    step = 2.0 ** (exponent_of(max(known) * (largest or 1.0)) - fraction_bits)
    least = float(effective["min_child_weight"]) + float(effective["reg_lambda"])
    if step > finest * max(least, float(positive.min(initial=largest))):
        raise DataRefusal(
            "weight: the weights differ too much for leaves of the smallest ones to be exact: clip the weights, set "
            "those that hardly count to 0, divide all by their largest, or raise min_child_weight; profile paillier "
            "has a finer step than elgamal"
        )


@dataclass(frozen=True, slots=True, repr=False)
class EncodedGradients:
    """The gradients of one tree on the grid of the number format. Shapes: g, h: int64[n_rows].

    Attributes:
        n_words: of sums (``he_processors.fixed_point``).
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]
    unit: GradientUnit
    n_words: int = 1


class GradientScale:
    """Encodes gradients of one training.

    Privacy: bounded objectives have their scale from the objective and the weights. Others start from the label range
        with headroom and are widened when training outgrows it; the scale never leaves the active party.
    """

    def __init__(
        self,
        bounds: tuple[float | None, float | None],
        label: NDArray[np.float32],
        largest_weight: float,
        pairs: PairFormat,
    ):
        """Args: bounds: of |gradient| and hessian of a row of weight 1; None where labels drive them."""
        self._pairs = pairs
        per_row = _HEADROOM * (float(np.abs(label).max(initial=0.0)) + 1.0)
        self._is_bounded = None not in bounds
        self._g_exponent, self._h_exponent = (
            exponent_of((per_row if bound is None else bound) * largest_weight) for bound in bounds
        )

    def encode(self, g: NDArray[np.float32], h: NDArray[np.float32]) -> EncodedGradients:
        """Round gradients to the grid. Shapes: g, h: float32[n_rows].

        Raises:
            CapacityExceeded: a gradient is not finite, or larger than its objective allows.
        """
        largest = [float(np.abs(values).max(initial=0.0)) for values in (g, h)]
        if not all(map(math.isfinite, largest)):
            raise CapacityExceeded("a gradient is not finite; check labels and weights")
        if not self._is_bounded:
            self._g_exponent = max(self._g_exponent, exponent_of(largest[0]))
            self._h_exponent = max(self._h_exponent, exponent_of(largest[1]))
        # Multiplying by a power of two is exact.
        in_units = (g.astype(np.float64) * 2.0**-self._g_exponent, h.astype(np.float64) * 2.0**-self._h_exponent)
        encoded = self._pairs.encode_pairs(*in_units)
        fraction_bits = self._pairs.fraction_bits
        unit = GradientUnit(self._g_exponent - fraction_bits, self._h_exponent - fraction_bits)
        return EncodedGradients(*encoded, unit, self._pairs.n_words)


class GradientOwner:
    """The active party's half.

    Security: holds the secret key; opened sums are checked against what is known of each node before they are used.

    Attributes:
        setup: what passive parties need.
        is_streamed: sums come in blocks of features (``feature_blocks``); the same at both halves.
    """

    is_streamed = True

    def __init__(self, pair_format: PairFormat, scheme: int = CLEAR_CODE, public_key: bytes = b"") -> None:
        self.pair_format = pair_format
        self.setup = TrainingSetup(scheme, pair_format.fraction_bits, pair_format.max_additions, public_key)

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Take note of all pairs of a tree, which ``encrypt`` is then asked for block by block in their order."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Protect encoded gradient pairs, each with a fresh randomiser. Shapes: g, h: int64[n_block_rows]."""
        raise NotImplementedError

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Open histograms, one for each of ``totals``. Raises: ProtocolError with one fixed message."""
        raise NotImplementedError

    def finish_sums(self, since_s: float) -> None:
        """Take note that all sums of a level were opened, or that one could not be: something follows that others see.

        Args:
            since_s: when the last of them came. Units: seconds of ``time.perf_counter``.
        """

    def fill(self, n_rows: int) -> None:
        """Make randomisers until so many rows can be encrypted with them, while the passive parties work."""


class ClearGradientOwner(GradientOwner):
    """The stand-in without encryption, for tests and for jobs that name `plain`.

    Security: none. Passive parties see every gradient.
    """

    is_streamed = False

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Return the pairs as they are."""
        return np.stack([g, h], axis=1).astype(PAIR, copy=False).tobytes()

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Read and check the sums."""
        n_words = self.pair_format.n_words
        if len(sums) != 2 * n_words * PAIR.itemsize * layout.n_slots * len(totals):
            raise ProtocolError(REFUSED)
        values = np.frombuffer(sums, dtype=PAIR).reshape(len(totals), layout.n_slots, 2, n_words)
        opened = [BinSums(*np.ascontiguousarray(v.transpose(1, 2, 0))) for v in values]
        for node_sums, total in zip(opened, totals, strict=True):
            check_node(node_sums, total, layout, self.pair_format)
        return opened


_BLOCK_BINS = 1 << 16
OpenRows = Callable[[NDArray[np.uint8], BinLayout, Sequence[NodeTotal]], list[BinSums]]


class ElGamalGradientOwner(GradientOwner):
    """The active party's half: encrypts digits of gradients, opens and checks sums."""

    def __init__(
        self,
        private_key: encryption.ElGamalPrivateKey,
        digits: encryption.DigitFormat,
        curve: Curve,
        timer: Timer = untimed,
        *,
        opens: bool = True,
    ) -> None:
        """Args: timer: measures the stage "search", a part of opening sums; opens: is asked to open sums, too."""
        key = private_key.public_key
        super().__init__(digits, key.scheme.value, key.to_bytes())
        self._digits, self._curve, self._timer = digits, curve, timer
        self._private_key = private_key
        self._encryptor = encryption.ElGamalEncryptor(private_key, curve)
        self._decryptor = ElGamalDecryptor(private_key, curve) if opens else None  # its table: 30 MB and a second
        self._open: OpenRows = self.open_rows

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair to one row of points, with a fresh randomiser."""
        rows = self._encryptor.encrypt(self._digits.digits_of(g, h))
        return encode_points(self._header(bin_sums.Content.PAIRS, g.size), self._curve, rows)

    def columns(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Encrypt as ``encrypt``; return a message's columns without its header. Shapes: uint8[n, point_bytes] each."""
        rows = self._encryptor.encrypt(self._digits.digits_of(g, h))
        return [bin_sums.write_column(self._digits, self._curve, column) for column in rows.columns]

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt sums and check every node."""
        body = open_message(sums, self._header(bin_sums.Content.BINS, len(totals) * layout.n_slots))
        opened: list[BinSums] = []
        n_nodes = max(1, _BLOCK_BINS // layout.n_slots)  # opened together: points in memory take many times their bytes
        for first in range(0, len(totals), n_nodes):
            of_block = totals[first : first + n_nodes]
            rows = slice(first * layout.n_slots, (first + len(of_block)) * layout.n_slots)
            opened += self._open(body[:, rows], layout, of_block)
        return opened

    def open_rows(self, body: NDArray[np.uint8], layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt and check sums in this process. Shapes: body: uint8[n_columns, n_rows, point_bytes]."""
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
        """Make randomisers for the next tree."""
        self._encryptor.fill(n_rows)

    def secret_bytes(self) -> bytes:
        """Return the key for the owner's own workers. Secret."""
        return secret_key_to_bytes(self._private_key)

    def pairs_message(self, n_rows: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Put the header before pieces of columns of pairs that were encrypted elsewhere, in order."""
        return join_message(self._header(bin_sums.Content.PAIRS, n_rows), pieces)

    def _header(self, content: bin_sums.Content, count: int) -> PointHeader:
        return PointHeader(self._encryptor.public_key, content, self._digits, count)


def elgamal_owner(digits: encryption.DigitFormat, backend: str = AUTO, timer: Timer = untimed) -> ElGamalGradientOwner:
    """Generate a key and open the half that holds it."""
    curve = require_curve(backend)
    return ElGamalGradientOwner(encryption.generate_elgamal_key(digits.n_messages, curve), digits, curve, timer)


class EncryptedGradientOwner(GradientOwner):
    """The active party's half: encrypts gradients, opens and checks sums."""

    def __init__(self, encryptor: Encryptor, decryptor: Decryptor, pair_format: PairFormat):
        key = encryptor.public_key
        super().__init__(pair_format, key.scheme.value, public_key_to_bytes(key))
        self._encryptor, self._decryptor = encryptor, decryptor
        self._packing = PackingLayout.fit(pair_format, key.plaintext_bits)

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair to one ciphertext, with a fresh randomiser."""
        header = self._header(ciphertext_wire.Content.PAIRS, g.size)
        plaintexts = self.pair_format.plaintext_rows(g, h)
        return ciphertext_wire.encode_ciphertexts(
            header, self._encryptor.arithmetic, self._encryptor.encrypt(plaintexts)
        )

    def columns(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Encrypt as ``encrypt``; return the one column of a message without its header. Shapes: uint8[n, width]."""
        encrypted = self._encryptor.encrypt(self.pair_format.plaintext_rows(g, h))
        return [self._encryptor.arithmetic.to_wire(encrypted)]

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt in this process. Shapes: ciphertexts: uint8[n, width] in wire form."""
        return list(self._decryptor.decrypt(ciphertexts))

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt the sums of a level and check every node."""
        ciphertexts = self._ciphertexts(sums, len(totals) * layout.n_slots)
        return decrypt_level(ciphertexts, self._decryptor, self._packing, layout, totals)

    def _ciphertexts(self, sums: bytes, n_bins: int) -> NDArray[np.uint8]:
        """Read a message of sums. Shapes: result: uint8[n_ciphertexts, width]."""
        header = self._header(ciphertext_wire.Content.PACKED_BINS, self._packing.n_ciphertexts(n_bins))
        return ciphertext_wire.decode_for_decryption(sums, header, self._encryptor.arithmetic)

    def fill(self, n_rows: int) -> None:
        """Make randomisers for the next tree."""
        fill = getattr(getattr(self._encryptor, "randomisers", None), "fill", None)
        if fill is not None:
            fill(n_rows)

    def pairs_message(self, n_rows: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Put the header before pieces of pairs that were encrypted elsewhere, in wire form, in order."""
        return b"".join([self._header(ciphertext_wire.Content.PAIRS, n_rows).to_bytes(), *pieces])

    def open_with(self, wrap: Callable[[Decryptor], Decryptor]) -> None:
        """Have sums decrypted elsewhere from now on. Args: wrap: takes what decrypts in this process."""
        self._decryptor = wrap(self._decryptor)

    def _header(self, content: ciphertext_wire.Content, count: int) -> ciphertext_wire.CiphertextHeader:
        return ciphertext_wire.CiphertextHeader(self._encryptor.public_key, content, self._packing, count)


class SealedGradientOwner(EncryptedGradientOwner):
    """The same for masked sums: what is opened are shares modulo 2^64, of which nothing can be checked."""

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt masked sums; return shares in the place of sums."""
        n_bins = len(totals) * layout.n_slots
        shares = open_shares(self.decrypt(self._ciphertexts(sums, n_bins)), n_bins, self._packing)
        of_g, of_h = (share.view(np.int64).reshape(len(totals), -1) for share in shares)
        return [BinSums(g, h) for g, h in zip(of_g, of_h, strict=True)]


def gradient_owner(
    private_key: PrivateKey, pair_format: PairFormat, backend: str = registry.AUTO
) -> EncryptedGradientOwner:
    """Open the key owner's half."""
    encryptor = owner_encryptor(private_key, backend)
    kind = SealedGradientOwner if isinstance(pair_format, MaskedFormat) else EncryptedGradientOwner
    return kind(encryptor, private_key.decryptor(backend), pair_format)


# What stands on a worker of the active party: encryption of gradient pairs, and the opening of sums.


PART = f"{__name__}:EncryptShard"


class EncryptShard(WorkerPart):
    """Encrypts pairs, each with a fresh randomiser of its own; one of several opens a part of all sums, too.

    Security: sees gradient pairs, sums of them, and gets the job's secret key, because encryption with the public key
        alone costs half as much again under elgamal and several times as much under the others: a party's workers are
        that party.
    """

    def __init__(
        self,
        setup: tuple[int, int, int, bytes],
        backend: str,
        secret: bytes,
        form: tuple[tuple[int, int], int, bool],
        opens: bool,  # noqa: FBT001 - workers are called by position
    ) -> None:
        """Args: setup: the fields of ``TrainingSetup``; secret: of ``secret_key_to_bytes``; form: of ``PairsForm``."""
        announced = TrainingSetup(*setup)
        points = (
            read_elgamal_setup(announced, backend, PairsForm(*form))
            if announced.scheme == Scheme.ELGAMAL.value
            else None
        )
        key = secret_key_from_bytes(secret, None if points is None else points[0])
        self._owner: ElGamalGradientOwner | EncryptedGradientOwner
        if points is not None and isinstance(key, encryption.ElGamalPrivateKey):
            self._owner = ElGamalGradientOwner(key, *points[1:], opens=opens)
        elif points is None and isinstance(key, PaillierPrivateKey):
            self._owner = gradient_owner(key, announced_format(announced, PairsForm(*form)), backend)
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

        Shapes: body: uint8[n_columns, n_rows, point_bytes]; results: of g and of h, int64[n_nodes, 2, n_slots].

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
        """Open and check. Shapes: body: uint8[n_columns, n_rows, point_bytes]; result: one for each of ``totals``."""
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
        g, h = (np.concatenate(parts, axis=0 if by_nodes else -1) for parts in zip(*collect(futures), strict=True))
        return list(map(BinSums, g, h))


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


class WrappedOwner(GradientOwner):
    """A half behind which another one encrypts and opens."""

    def __init__(self, owner: GradientOwner) -> None:
        self.pair_format, self.is_streamed, self.setup = owner.pair_format, owner.is_streamed, owner.setup
        self._owner = owner

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt the sums of a level and check every node."""
        return self._owner.open_sums(sums, layout, totals)

    def finish_sums(self, since_s: float) -> None:
        """Take note that all sums of a level were opened."""
        self._owner.finish_sums(since_s)


class ShardedOwner(WrappedOwner):
    """Has workers encrypt, some parts ahead of the block that is asked for.

    Security: see ``EncryptShard`` for what workers see.
    """

    def __init__(
        self, owner: ElGamalGradientOwner | EncryptedGradientOwner, workers: Workers, backend: str, secret: bytes
    ) -> None:
        """Give the workers what they encrypt with. Args: secret: of ``secret_key_to_bytes``."""
        super().__init__(owner)
        self._encrypting, self._workers = owner, workers
        opens, form = spread_opening(owner, workers), tuple(PairsForm.of(owner.pair_format))
        begin(workers, PART, [(astuple(owner.setup), backend, secret, form, opens)] * len(workers))
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
        return self._encrypting.pairs_message(g.size, list(itertools.chain(*zip(*pieces, strict=True))))

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
    planned: NoisePlan | SealedPlan | None = None,
    numbers: AdditiveScheme = PAILLIER,
) -> GradientOwner:
    """Generate the job's key and open the half that holds it.

    Args:
        backend: of arithmetic at this site.
        timer: measures the stage "search" of elgamal, a part of opening sums.
        workers: where to encrypt; None is this process. Gradients in the clear need none.
        planned: the plan of a job in the preset noised or sealed.
        numbers: the job's scheme over big numbers.
    """
    owner: ElGamalGradientOwner | EncryptedGradientOwner
    if job.profile == VerticalProfile.ELGAMAL.value:
        owner = points = elgamal_owner(
            encryption.DigitFormat.of(
                job.fraction_bits, n_rows, planned.tails if isinstance(planned, NoisePlan) else (0, 0), job.point_bytes
            ),
            backend,
            timer,
        )
        secret = points.secret_bytes
    else:
        pairs = pair_format(n_rows, weighted=job.weight is not None) if planned is None else planned.pair_format(n_rows)
        if not job.is_encrypted:
            return ClearGradientOwner(pairs)
        key = numbers.generate(job.key_bits)
        if type(key).__repr__ is not PrivateKey.__repr__:
            raise ConfigurationError(
                f"private keys of scheme {numbers.name} may show themselves: their class has a __repr__ of its own. "
                "Remedy: ask the scheme's author to leave it out."
            )
        owner = gradient_owner(key, pairs, backend)
        secret = partial(secret_key_to_bytes, key)
    return owner if workers is None else ShardedOwner(owner, workers, backend, secret())


_MOST_AHEAD = 1 << 18  # randomisers: some 200 MB at 3072 bits
_FILL_STEP = 1 << 10  # randomisers made at a time: decryption, which others wait for, waits for one step at most


class PrecomputingKeyOwner(WrappedOwner):
    """An owner that makes the randomisers of the next tree while the passive parties work on this one.

    Encryption does not wait for all of them: what is missing then is made block by block, while blocks travel. A
    context manager: leaving it ends the making.
    """

    def __init__(self, owner: GradientOwner, n_rows: int, n_trees: int, timer: Timer = untimed):
        """Prepare for one training.

        Args:
            n_trees: of the whole training; nothing is made for more.
            timer: measures the stage "prepare", which runs beside others.
        """
        super().__init__(owner)
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


_LONGEST_TEXT = 2000


@dataclass(frozen=True, slots=True)
class VerticalScheme:
    """How gradients and their sums are protected from the parties that compute on them.

    Attributes:
        code: in the active party's announcement.
        protection: by which the evidence names ciphertexts.
        numbers: the scheme over big numbers; of points, and of pairs in the clear, Paillier's, which is not used.
        release: of its plugin, equal at all parties; "" for ours.
        facts: what the evidence records of the plugin.
    """

    code: int
    protection: Protection
    numbers: AdditiveScheme = PAILLIER
    release: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


BUILT_IN = {
    VerticalProfile.PAILLIER.value: VerticalScheme(Scheme.PAILLIER.value, Protection.PAILLIER),
    VerticalProfile.ELGAMAL.value: VerticalScheme(Scheme.ELGAMAL.value, Protection.ELGAMAL),
    VerticalProfile.PLAIN.value: VerticalScheme(CLEAR_CODE, Protection.CLEAR),
}


def choose_scheme(job: VerticalJob, context: SiteContext) -> VerticalScheme:
    """Return the scheme of a job; a plugin's is loaded if the site's policy, and the server's, pin its files.

    Raises:
        PolicyRefusal, ConfigurationError: as ``load_hashed``; or the server pins other files; or what it loaded is no
            scheme of that name; or this site's cluster would need it.
    """
    name, policy = plugin_of(job.profile), context.policy
    if name is None:
        return BUILT_IN[job.profile]
    if policy.cluster_for(job.data_set) is not None:
        raise ConfigurationError(
            f"{policy.site} trains data set {job.data_set!r} on a cluster, whose workers load no plugins: "
            f"{job.profile} is refused there. Policy key: cluster. Remedy: choose profile paillier."
        )
    if context.server_speaks is not None and context.server_pins != policy.plugin(name).sha256:
        raise ConfigurationError(
            f"the server pins other files of plugin {name} than {policy.site}: have both operators compare its sha256. "
            f"Policy key: plugins.{name}"
        )
    scheme, pin = load_hashed(policy, name, SCHEMES, "which encrypt gradients")
    problem = problem_of(scheme, name)
    if problem or not isinstance(scheme, AdditiveScheme):
        raise ConfigurationError(
            f"plugin {name} of {pin} at {policy.site} is not usable: {problem}. Policy key: plugins.{name}. Remedy: "
            "another version of it (nvflare_plugins/conformance tells its author more)."
        )
    facts = scheme_facts(name, pin.distribution, pin.version, pin.sha256, scheme.assumption)
    return VerticalScheme(Scheme.PLUGIN.value, Protection.PLUGIN, scheme, f"{pin} sha256 {pin.sha256}", facts)


def problem_of(scheme: object, name: str) -> str:
    """Return why what a plugin brings is no scheme; "" if it is one."""
    if not isinstance(scheme, AdditiveScheme):
        return "its entry point is no AdditiveScheme"
    if scheme.name != name:
        return "it calls itself by another name than its entry point"
    text = scheme.assumption
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_TEXT or not text.isprintable():
        return f"its assumption is no text of 1 to {_LONGEST_TEXT} printable characters"
    if not isinstance(scheme.public_key, type) or not issubclass(scheme.public_key, PublicKey):
        return "its public_key is no kind of PublicKey"
    return "" if callable(scheme.generate) else "its generate cannot be called"
