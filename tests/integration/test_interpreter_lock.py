"""No native call keeps Python's interpreter lock for long: signs of life and aborts need it while a site is at work.

Each case works for seconds at a size that jobs reach. The longest time for which another thread could not run must stay
far below the silence after which a site counts as dead.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors import bfv, ckks
from he_processors.bignum import native
from he_processors.bignum.interface import rows_from_ints
from he_processors.paillier import generate_paillier_key

LONGEST_S = 5.0
RANDOM = np.random.default_rng(0)

pytestmark = pytest.mark.slow


def longest_gap_s(work: Callable[[], object]) -> tuple[float, float]:
    """Return how long the work took, and the longest time for which a thread beside it could not run."""
    begun, done, gaps = threading.Event(), threading.Event(), [0.0]

    def tick() -> None:
        last = time.monotonic()
        begun.set()
        while not done.is_set():
            time.sleep(0.01)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    begun.wait()
    started = time.monotonic()
    try:
        work()
    finally:
        seconds = time.monotonic() - started
        done.set()
        thread.join()
    return seconds, max(gaps)


def modular_powers(variant: str) -> Callable[[], object]:
    modulus = (1 << 6144) - 105
    arithmetic = native.load(variant)(modulus)
    values = [int.from_bytes(RANDOM.bytes(760), "big") for _ in range(64)]
    residues = arithmetic.from_wire(rows_from_ints(values, arithmetic.width))
    exponent = int.from_bytes(RANDOM.bytes(768), "big")
    return lambda: arithmetic.pow_const(residues, exponent)


def lattice(module: object, processor: type) -> Callable[[], object]:
    site = processor(processor.generate(3))
    values = RANDOM.integers(-1000, 1000, 1 << 20)

    def work() -> None:
        payload = site.encrypt(values)
        total = module.add_ciphertexts(site.public_parameters(), [payload] * 3)
        site.decrypt(total, values.size)

    return work


def training() -> Callable[[], object]:
    table = RANDOM.random((1_000_000, 20), dtype=np.float32)
    label = (table[:, 0] > 0.5).astype(np.float32)

    def work() -> None:
        matrix = xgb.QuantileDMatrix(table, label=label, nthread=1)
        xgb.train({"nthread": 1, "max_depth": 8, "objective": "binary:logistic"}, matrix, 2)

    return work


def tables() -> Callable[[], object]:
    frame = pd.DataFrame(RANDOM.random((400_000, 12)))
    text, binary = BytesIO(), BytesIO()
    frame.to_csv(text)
    frame.columns = frame.columns.astype(str)
    frame.to_parquet(binary)

    def work() -> None:
        for _ in range(3):
            pd.read_csv(BytesIO(text.getvalue()))
            pd.read_parquet(BytesIO(binary.getvalue()))

    return work


def long_messages() -> Callable[[], object]:
    message, words = bytes(1 << 28), np.zeros(1 << 26, dtype=np.uint64)

    def work() -> None:
        for _ in range(4):
            hashlib.sha256(b"".join((b"head", message))).digest()
            np.add(words, words, out=words).tobytes()

    return work


def blinding() -> Callable[[], object]:
    pytest.importorskip("he_processors._native._curve")
    from nvflare_plugins.kinds.alignment.intersection import BlindingKey

    items = [number.to_bytes(32, "big") for number in range(20_000)]
    return lambda: BlindingKey(b"test").blind_items(items)


CASES = {
    **{f"powers-{name}": (lambda name=name: modular_powers(name)) for name in native.instruction_sets()},
    "paillier-key": lambda: lambda: [generate_paillier_key(3072) for _ in range(2)],
    "bfv": lambda: lattice(bfv, bfv.BfvProcessor),
    "ckks": lambda: lattice(ckks, ckks.CkksProcessor),
    "xgboost": training,
    "tables": tables,
    "long-messages": long_messages,
    "blinding": blinding,
}


@pytest.mark.parametrize("case", CASES)
def test_other_threads_run_beside_the_large_native_calls(case: str) -> None:
    work = CASES[case]()
    seconds, gap = longest_gap_s(work)
    assert gap < LONGEST_S, f"{seconds:.1f} s, longest gap {gap:.2f} s"


def test_the_measurement_sees_a_lock_that_is_held() -> None:
    """A single call of Python's own big integers keeps the lock for as long as it takes."""
    seconds, gap = longest_gap_s(lambda: 3 ** (1 << 22) // 7)
    assert seconds < 0.1 or gap > seconds / 2
