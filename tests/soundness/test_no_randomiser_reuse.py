"""No randomiser twice: across batches, threads, forked and spawned processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from he_processors.bignum.interface import rows_from_ints
from he_processors.curve.interface import AFFINE_BYTES
from he_processors.elgamal.bin_sums import Hider
from he_processors.paillier import Encryptor, Rerandomiser, owner_encryptor
from tests.support.elgamal_toys import ToyLevel
from tests.support.he_toys import signed_rows, toy_paillier
from tests.support.threads import in_threads

KEY = toy_paillier()


def zeros(encryptor: Encryptor, n: int) -> list[bytes]:
    """Encrypt zeros: such a ciphertext is its randomiser."""
    rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows([0] * n)))
    return [row.tobytes() for row in rows]


def _zeros_of_a_new_encryptor(n: int) -> list[bytes]:
    return zeros(owner_encryptor(KEY), n)


def test_across_batches_of_a_filled_pool() -> None:
    encryptor = owner_encryptor(KEY, block_rows=64)
    encryptor.randomisers.fill(150)
    seen = [c for n in (1, 40, 3, 100, 100) for c in zeros(encryptor, n)]
    assert len(set(seen)) == len(seen)


def test_across_threads_that_share_an_encryptor() -> None:
    encryptor = owner_encryptor(KEY, block_rows=32)
    seen: list[list[bytes]] = [[] for _ in range(4)]

    def work(worker: int) -> None:
        for n in (5, 17, 40):
            encryptor.randomisers.fill(30)
            seen[worker] += zeros(encryptor, n)

    in_threads(work, range(4))
    flat = list(itertools.chain.from_iterable(seen))
    assert len(flat) == 4 * 62 and len(set(flat)) == len(flat)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_across_a_fork_with_a_filled_pool() -> None:
    encryptor = owner_encryptor(KEY, "gmpy2")
    encryptor.randomisers.fill(60)
    received = []
    for _ in range(2):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(b"".join(zeros(encryptor, 30)))
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            data = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        width = encryptor.arithmetic.width
        received += [data[i : i + width] for i in range(0, len(data), width)]
    ours = zeros(encryptor, 60)
    assert len(received) == 60
    assert len(set(ours + received)) == 120


def test_across_spawned_processes() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        parts = list(executor.map(_zeros_of_a_new_encryptor, [20, 20, 20]))
    flat = list(itertools.chain.from_iterable(parts))
    assert len(set(flat)) == 60


def test_across_rerandomisations_of_threads_and_forks() -> None:
    encryptor = owner_encryptor(KEY, "gmpy2")
    rerandomiser = Rerandomiser(KEY.public_key, encryptor.arithmetic)

    def draw(n: int) -> list[bytes]:
        return [row.tobytes() for row in encryptor.arithmetic.to_wire(rerandomiser.draw(n))]

    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"".join(draw(10)))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    width = encryptor.arithmetic.width
    seen = [data[i : i + width] for i in range(0, len(data), width)] + draw(10) + draw(10)
    assert len(set(seen)) == 30


@pytest.mark.parametrize("n_ready", [0, 13, 40])
def test_masks_of_sums_that_were_made_ahead_are_used_once(n_ready: int) -> None:
    """Also by a forked process, which has the same memory. What is hidden is the neutral element: the masks show."""
    arithmetic = owner_encryptor(KEY, "gmpy2").arithmetic
    rerandomiser = Rerandomiser(KEY.public_key, arithmetic)
    level = ToyLevel()
    hider = Hider(level.key.public_key, level.curve)
    ones = arithmetic.from_wire(rows_from_ints([1] * 10, arithmetic.width))

    def draw() -> list[bytes]:
        hidden = arithmetic.to_wire(rerandomiser.rerandomise(ones))
        columns = [level.curve.to_affine(column) for column in hider.draw(10).columns]
        return [b"".join(parts) for parts in zip(*(map(bytes, rows) for rows in (hidden, *columns)), strict=True)]

    for masks in (rerandomiser, hider):
        masks.fill(n_ready)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"".join(draw()))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    ours = draw() + draw()
    size = len(ours[0])
    seen = [data[i : i + size] for i in range(0, len(data), size)] + ours
    ends = [0, arithmetic.width, *range(arithmetic.width + AFFINE_BYTES, size + 1, AFFINE_BYTES)]
    for first, last in itertools.pairwise(ends):
        assert len({one[first:last] for one in seen}) == 30
