from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np

import he_processors
from he_processors.randomness import BULK_RANDOMNESS, OS_RANDOMNESS, random_below


def test_lengths_are_exact() -> None:
    for n in (0, 1, 4095, 4096, 100_001):
        assert len(BULK_RANDOMNESS.bytes(n)) == n


def test_no_two_requests_are_alike() -> None:
    blocks = [BULK_RANDOMNESS.bytes(n) for n in (64, 64, 8192, 8192)]
    assert blocks[0] != blocks[1] and blocks[2] != blocks[3]


def test_bytes_are_uniform() -> None:
    # chi-squared over 256 values, n = 1,000,000; 1 - 1e-7 quantile of chi2(255) is about 385. A constant key or a
    # counter that wraps would also repeat blocks.
    data = np.frombuffer(BULK_RANDOMNESS.bytes(1_000_000), dtype=np.uint8)
    counts = np.bincount(data, minlength=256)
    assert ((counts - data.size / 256) ** 2).sum() / (data.size / 256) < 385
    blocks = data.reshape(-1, 16)
    assert len(np.unique(blocks, axis=0)) == len(blocks)


def test_a_forked_child_draws_other_bytes() -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, BULK_RANDOMNESS.bytes(4096))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    assert theirs != BULK_RANDOMNESS.bytes(4096)


def test_integers_below_a_bound_are_uniform() -> None:
    # chi2(4), 1 - 1e-7 quantile 39; drawing modulo 5 of a byte would give about 1 : 0.98, of three bits 2 : 1.
    counts = Counter(random_below(5, OS_RANDOMNESS) for _ in range(20_000))
    assert set(counts) == set(range(5))
    assert sum((count - 4000) ** 2 / 4000 for count in counts.values()) < 39


def test_no_other_module_draws_randomness() -> None:
    forbidden = re.compile(r"urandom|getrandom|import (secrets|random)\b|np\.random|default_rng")
    root = Path(he_processors.__file__).parent
    users = [path.name for path in root.rglob("*.py") if forbidden.search(path.read_text(encoding="utf-8"))]
    assert users == ["randomness.py"]
