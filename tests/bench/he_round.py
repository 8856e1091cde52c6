"""One whole round of the CreditCard shape, every byte of it, checked against plain sums."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from he_processors.bignum.interface import ModBatch, Residues
from he_processors.bignum.registry import open_backend
from he_processors.ciphertext_wire import (
    CiphertextHeader,
    Content,
    decode_ciphertexts,
    decode_for_decryption,
    encode_ciphertexts,
)
from he_processors.fixed_point import PackingLayout
from he_processors.histogram.planner import BLOCK_ROWS, DEVICE_BLOCK_ROWS, BinLayout, plan_level
from he_processors.histogram.sums import BinSums, NodeTotal, decrypt_level, pack_and_hide, subtract_sibling, sum_bins
from he_processors.paillier import (
    Encryptor,
    PaillierDecryptor,
    PaillierPrivateKey,
    PaillierPublicKey,
    Rerandomiser,
    owner_encryptor,
)
from tests.bench.he_ours import FORMAT, N_BINS, Clock, cpu_seconds

N_FEATURES = 18
DEPTH = 5
LAYOUT = BinLayout((N_BINS,) * N_FEATURES)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Seconds of each stage and the bytes that travel."""

    stage_s: dict[str, float]
    uploaded_bytes: int
    returned_bytes: int
    n_products: int

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole round."""
        return sum(self.stage_s.values())

    @property
    def arithmetic_s(self) -> float:
        """Return the seconds of encryption, histograms, packing and decryption alone."""
        return sum(self.stage_s[stage] for stage in ("encrypt", "plan", "histogram", "pack and hide", "decrypt"))


class Stopwatch:
    """Adds up seconds by stage."""

    def __init__(self, clock: Clock) -> None:
        self.stage_s: dict[str, float] = {}
        self._clock = clock

    def run(self, stage: str, work: Callable[[], Any]) -> Any:
        """Do some work of a stage and return its result."""
        seconds, result = cpu_seconds(work, self._clock)
        self.stage_s[stage] = self.stage_s.get(stage, 0.0) + seconds
        return result


@dataclass(frozen=True, slots=True)
class _Data:
    """Codes, gradients and the tree: at every level the nodes, left and right children in turn."""

    codes: np.ndarray
    g: np.ndarray
    h: np.ndarray
    levels: list[list[np.ndarray]]


def measure_round(
    key: PaillierPrivateKey, backend: str, n_rows: int = 227_845, clock: Clock = time.process_time
) -> RoundResult:
    """Run encryption, histograms, packing, re-randomisation and decryption of a tree of depth 5.

    The tree halves every node: the worst case for building the child with fewer rows. Bin codes are uniform: the
    worst case for cells of feature pairs. The key and the owner's tables exist before, as from round 2 on; the
    passive party's re-randomisation bases are made in the round.
    """
    data = _make_data(n_rows)
    watch = Stopwatch(clock)
    encryptor = owner_encryptor(key, backend)
    encryptor.encrypt(np.zeros((min(n_rows, 20_000), 16), dtype=np.uint8))
    decryptor = PaillierDecryptor(key, backend)
    packing = PackingLayout.fit(FORMAT, decryptor.plaintext_bits)
    header = CiphertextHeader(key.public_key, Content.PAIRS, packing, n_rows)
    upload = watch.run("encrypt", lambda: _encrypt(encryptor, header, data))

    arithmetic = open_backend(backend, key.public_key.modulus)  # the passive party's own
    rows = watch.run("receive", lambda: decode_ciphertexts(upload, header, arithmetic))
    rerandomiser = watch.run("open re-randomiser", lambda: Rerandomiser(key.public_key, arithmetic))
    passive = _Passive(key.public_key, packing, rerandomiser, watch)
    active = _Active(decryptor, arithmetic, packing)
    sums: list[BinSums] = []
    for level in data.levels:
        built = [level[0]] if len(level) == 1 else [min(pair, key=len) for pair in _siblings(level)]
        message, reply_header = passive.answer(rows, data.codes, built)
        totals = [NodeTotal.of_rows(data.g[node], data.h[node]) for node in built]
        opened = watch.run("decrypt", partial(active.open, message, reply_header, totals))
        sums = watch.run("siblings", partial(_with_siblings, sums, opened, level, data))
    _check_against_plain_sums(data, sums)
    return RoundResult(watch.stage_s, len(upload), passive.returned_bytes, passive.n_products)


class _Passive:
    """The passive party: adds, packs, hides, sends."""

    def __init__(
        self,
        public_key: PaillierPublicKey,
        packing: PackingLayout,
        rerandomiser: Rerandomiser,
        watch: Stopwatch,
    ) -> None:
        self._public_key = public_key
        self._arithmetic = rerandomiser.arithmetic
        self._packing = packing
        self._rerandomiser = rerandomiser
        self._watch = watch
        self.returned_bytes = 0
        self.n_products = 0

    def answer(self, rows: Residues, codes: np.ndarray, nodes: list[np.ndarray]) -> tuple[bytes, CiphertextHeader]:
        """Return the message with the histograms of ``nodes``, and the header that the receiver expects."""
        block_rows = DEVICE_BLOCK_ROWS if self._arithmetic.name == "cuda" else BLOCK_ROWS
        plan = self._watch.run("plan", lambda: plan_level(codes, LAYOUT, nodes, block_rows=block_rows))
        self.n_products += plan.n_products
        bins = self._watch.run("histogram", lambda: sum_bins(self._arithmetic, rows, plan))
        hidden = self._watch.run("pack and hide", lambda: pack_and_hide(bins, self._packing, self._rerandomiser))
        header = CiphertextHeader(self._public_key, Content.PACKED_BINS, self._packing, len(hidden))
        message = self._watch.run("send", lambda: encode_ciphertexts(header, self._arithmetic, hidden))
        self.returned_bytes += len(message)
        return message, header


class _Active:
    """The key owner: receives, decrypts, checks."""

    def __init__(self, decryptor: PaillierDecryptor, arithmetic: ModBatch, packing: PackingLayout) -> None:
        self._decryptor = decryptor
        self._arithmetic = arithmetic
        self._packing = packing

    def open(self, message: bytes, header: CiphertextHeader, totals: list[NodeTotal]) -> list[BinSums]:
        """Return the checked sums of a level."""
        ciphertexts = decode_for_decryption(message, header, self._arithmetic)
        return decrypt_level(ciphertexts, self._decryptor, self._packing, LAYOUT, totals)


def _make_data(n_rows: int) -> _Data:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, N_BINS, (N_FEATURES, n_rows)).astype(np.uint16)
    g, h = FORMAT.encode_pairs(rng.uniform(-1, 1, n_rows), rng.uniform(0, 0.25, n_rows))
    levels = [[np.arange(n_rows, dtype=np.int32)]]
    for _ in range(1, DEPTH):
        children = []
        for node in levels[-1]:
            shuffled = rng.permutation(node)
            children += [np.sort(shuffled[: node.size // 2]), np.sort(shuffled[node.size // 2 :])]
        levels.append(children)
    return _Data(codes, g, h, levels)


def _encrypt(encryptor: Encryptor, header: CiphertextHeader, data: _Data) -> bytes:
    ciphertexts = encryptor.encrypt(FORMAT.plaintext_rows(data.g, data.h))
    return encode_ciphertexts(header, encryptor.arithmetic, ciphertexts)


def _siblings(level: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(zip(level[0::2], level[1::2], strict=True))


def _with_siblings(parents: list[BinSums], built: list[BinSums], level: list[np.ndarray], data: _Data) -> list[BinSums]:
    """Return the sums of all nodes of a level: those built, and their siblings by subtraction."""
    if len(level) == 1:
        return built
    sums: list[BinSums] = []
    for parent, child, pair in zip(parents, built, _siblings(level), strict=True):
        is_left_built = len(pair[0]) <= len(pair[1])
        other = pair[1] if is_left_built else pair[0]
        total = NodeTotal.of_rows(data.g[other], data.h[other])
        sibling = subtract_sibling(parent, child, total, LAYOUT, FORMAT)
        sums += [child, sibling] if is_left_built else [sibling, child]
    return sums


def _check_against_plain_sums(data: _Data, sums: list[BinSums]) -> None:
    """Compare the deepest level, which rests on all others, with sums of the plain gradients."""
    for node, node_sums in zip(data.levels[-1], sums, strict=True):
        for feature in range(N_FEATURES):
            expected = np.zeros(N_BINS + 1, dtype=np.int64)
            np.add.at(expected, data.codes[feature, node], data.g[node])
            if not np.array_equal(expected, node_sums.g[LAYOUT.starts[feature] : LAYOUT.starts[feature + 1]]):
                raise SystemExit("the round's histograms are wrong")
