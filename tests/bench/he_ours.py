"""Rates of our own backends: CPU seconds on one thread, each operation as a job uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.histogram.planner import BinLayout, plan_level
from he_processors.histogram.sums import sum_bins
from he_processors.paillier import Encryptor, PaillierDecryptor, PaillierPrivateKey, owner_encryptor

Rates = dict[str, float]
Clock = Callable[[], float]

# The CreditCard shape: 227,845 rows, 18 features, 256 bins, 40 fraction bits.
FORMAT = PairFormat.logistic(fraction_bits=40, max_additions=227_845)
N_BINS = 256

# Rows in each measurement: about a second each, enough to fill the lanes of the fast backends.
_ROWS = {"cuda": 200_000, "ifma": 40_000, "avx2": 8_000, "portable": 3_000, "gmpy2": 1_500, "reference": 24}


def cpu_seconds(work: Callable[[], object], clock: Clock = time.process_time) -> tuple[float, Any]:
    """Run once; return the CPU seconds of all threads (or another clock's), and the result."""
    begin = clock()
    result = work()
    return clock() - begin, result


def measure_ours(key: PaillierPrivateKey, backend: str) -> Rates:
    """Measure one backend.

    ``encrypt_per_s``: owner encryption with fresh randomisers, table made before. ``add_per_s``: products of a whole
    histogram, planning and merging included, without feature pairs. ``pack_per_s``: bins packed.
    """
    rng = np.random.default_rng(1)
    n_rows = _ROWS[backend]
    encryptor = owner_encryptor(key, backend)
    plaintexts = random_plaintexts(n_rows, rng)
    encryptor.encrypt(plaintexts)  # makes the tables
    encrypt_s, ciphertexts = cpu_seconds(lambda: _encrypt_to_wire(encryptor, plaintexts))
    arithmetic = encryptor.arithmetic
    residues = arithmetic.from_wire(ciphertexts)
    decryptor = PaillierDecryptor(key, backend)
    packing = PackingLayout.fit(FORMAT, decryptor.plaintext_bits)

    layout = BinLayout((N_BINS,) * 18)
    codes = rng.integers(0, N_BINS, (18, n_rows)).astype(np.uint16)
    rows = [np.arange(n_rows, dtype=np.int32)]
    plan = plan_level(codes, layout, rows, use_pairs=False)
    add_s, bins = cpu_seconds(lambda: sum_bins(arithmetic, residues, plan_level(codes, layout, rows, use_pairs=False)))
    some_bins = arithmetic.take(bins, np.arange(min(len(bins), n_rows), dtype=np.int64))
    pack_s, _ = cpu_seconds(lambda: arithmetic.horner(some_bins, packing.pairs_per_plaintext, FORMAT.pair_bits))
    n_decrypt = max(8, min(2_000, n_rows // 8))
    decrypt_s, _ = cpu_seconds(lambda: decryptor.decrypt(ciphertexts[:n_decrypt]))
    return {
        "encrypt_per_s": n_rows / encrypt_s,
        "add_per_s": plan.n_products / add_s,
        "pack_per_s": len(some_bins) / pack_s,
        "decrypt_per_s": min(n_decrypt, n_rows) / decrypt_s,
    }


def random_plaintexts(n_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Return gradient pairs as plaintext rows. Shapes: result: uint8[n_rows, 16]."""
    g, h = FORMAT.encode_pairs(rng.uniform(-1, 1, n_rows), rng.uniform(0, 0.25, n_rows))
    return FORMAT.plaintext_rows(g, h)


def _encrypt_to_wire(encryptor: Encryptor, plaintexts: np.ndarray) -> np.ndarray:
    return encryptor.arithmetic.to_wire(encryptor.encrypt(plaintexts))
