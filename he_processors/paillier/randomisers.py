"""Random n-th residues: drawn by anybody or by the key owner, made ahead, and used to re-randomise."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import RandomiserSource, StaysInProcess
from he_processors.bignum.interface import ModBatch, Residues, add, constant, lift, product, scale
from he_processors.bignum.rows import add_rows, ints_from_rows, random_rows_below, rows_from_ints, sum_rows, widen
from he_processors.errors import VeilBoostError
from he_processors.paillier.keys import PaillierPublicKey
from he_processors.randomness import BULK_RANDOMNESS, RandomSource

# Random n-th residues drawn by the key owner, prime by prime.
#
# Modulo each prime power x^n runs over the whole subgroup of order p - 1 as x runs over the units, uniformly. The owner
# therefore draws a uniform element of each subgroup and joins the two by the Chinese remainder theorem: exactly the
# distribution of x^n for uniform x, at a fraction of the cost.


class ArithmeticFault(VeilBoostError):
    """A result of the big-number arithmetic is wrong: this machine must not encrypt."""


@dataclass(frozen=True, slots=True, repr=False)
class SubgroupElements:
    """Elements of one prime's subgroup, and what their product must be."""

    residues: Residues
    expected_product: int


class SubgroupSource(Protocol):
    """Draws uniform elements of the subgroup of order p - 1 modulo a prime or its square. Secret."""

    arithmetic: ModBatch

    def draw(self, n: int) -> SubgroupElements: ...


class GeneratorPowers(StaysInProcess):
    """Uniform subgroup elements as powers of a known generator, from a table.

    Security: exponents are uniform in [0, order), by rejection, so the elements are exactly uniform.
    """

    def __init__(self, arithmetic: ModBatch, generator: int, order: int, source: RandomSource) -> None:
        self.arithmetic = arithmetic
        self._generator = generator
        self._order = order
        self._source = source
        self._table = arithmetic.fixed_base(generator, (order - 1).bit_length())

    def draw(self, n: int) -> SubgroupElements:
        """Draw ``n`` elements. Shapes: result: Residues[n]."""
        exponents = random_rows_below(n, self._order, self._source)
        residues = self._table.pow(exponents)
        expected = gmpy2.powmod(self._generator, sum_rows(exponents) % self._order, self.arithmetic.modulus)
        return SubgroupElements(residues, int(expected))


class PrimePowers(StaysInProcess):
    """Uniform subgroup elements modulo p^2 as s^p with s uniform in [1, p): for primes without a known generator."""

    def __init__(self, arithmetic: ModBatch, p: int, source: RandomSource) -> None:
        self.arithmetic = arithmetic
        self._p = p
        self._source = source

    def draw(self, n: int) -> SubgroupElements:
        """Draw ``n`` elements. Shapes: result: Residues[n]."""
        below = widen(random_rows_below(n, self._p - 1, self._source), self.arithmetic.width)
        bases = self.arithmetic.from_wire(add_rows(below, rows_from_ints([1], self.arithmetic.width)))
        expected = gmpy2.powmod(product(self.arithmetic, bases), self._p, self.arithmetic.modulus)
        return SubgroupElements(self.arithmetic.pow_const(bases, self._p), int(expected))


class OwnerRandomisers:
    """Uniform n-th residues modulo the product of two coprime moduli.

    Security: for the key owner only. Every batch is checked against the product that its exponents predict, modulo
        both primes: a fault in one half would let any receiver factor the modulus.
    """

    def __init__(self, arithmetic: ModBatch, larger: SubgroupSource, smaller: SubgroupSource) -> None:
        """Take the two halves, the one with the larger modulus first."""
        if larger.arithmetic.modulus <= smaller.arithmetic.modulus:
            raise ValueError("the half with the larger modulus comes first")
        self.arithmetic = arithmetic
        self._larger = larger
        self._smaller = smaller
        large, small = larger.arithmetic.modulus, smaller.arithmetic.modulus
        inverse = int(gmpy2.invert(small, large))
        self._inverse = constant(larger.arithmetic, inverse)
        self._minus_inverse = constant(larger.arithmetic, -inverse)
        self._small_modulus = constant(arithmetic, small)

    def draw(self, n: int) -> Residues:
        """Draw ``n`` fresh n-th residues.

        Shapes: result: Residues[n].

        Raises:
            ArithmeticFault: the batch fails its check; none of it is returned.
        """
        large, small = self._larger.draw(n), self._smaller.draw(n)
        joined = self._join(large.residues, small.residues)
        total = product(self.arithmetic, joined)
        if (
            total % self._larger.arithmetic.modulus != large.expected_product
            or total % self._smaller.arithmetic.modulus != small.expected_product
        ):
            raise ArithmeticFault("a batch of randomisers failed its check; nothing was encrypted with it")
        return joined

    def _join(self, large: Residues, small: Residues) -> Residues:
        """Chinese remainder, Garner's form: small + M_small * ((large - small) / M_small mod M_large)."""
        upper, lower = self._larger.arithmetic, self._smaller.arithmetic
        quotient = add(
            upper,
            scale(upper, large, self._inverse),
            scale(upper, lift(upper, lower, small), self._minus_inverse),
        )
        shifted = scale(self.arithmetic, lift(self.arithmetic, upper, quotient), self._small_modulus)
        return add(self.arithmetic, shifted, lift(self.arithmetic, lower, small))


# Random n-th residues drawn with the public key alone: x^n for uniform x.
#
# Slow, and exactly the textbook distribution. Short exponents over one public base would need a further assumption and
# are not offered.


class PublicRandomisers:
    """Uniform n-th residues for whoever has the public key."""

    def __init__(
        self, public_key: PaillierPublicKey, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS
    ) -> None:
        self._n = public_key.n
        self._arithmetic = arithmetic
        self._source = source

    def draw(self, n: int) -> Residues:
        """Draw ``n`` fresh n-th residues. Shapes: result: Residues[n]."""
        width = self._arithmetic.width
        while True:
            below = widen(random_rows_below(n, self._n - 1, self._source), width)
            bases = self._arithmetic.from_wire(add_rows(below, rows_from_ints([1], width)))
            # A base that shares a factor with n would be no unit. It never happens for a real key; toy keys meet it.
            if math.gcd(product(self._arithmetic, bases), self._n) == 1:
                return self._arithmetic.pow_const(bases, self._n)


# A stock of randomisers made ahead, each handed out once.
#
# Randomisers do not depend on the data, so the key owner makes them while other parties compute. One randomiser on two
# plaintexts reveals their difference, so taking is erasing, under a lock, and a forked process starts empty.


# Enough rows to keep the lanes busy and to spread the cost of a batch's check, few enough to stay in cache; a GPU
# needs more.
BLOCK_ROWS = 1 << 13
_DEVICE_BLOCK_ROWS = 1 << 18


class Batches(Protocol):
    """What a pool needs to know of the batches that it hands out: a backend's residues, or rows of points."""

    name: str

    def take(self, batch: Any, index: NDArray[np.int64]) -> Any:
        """Gather rows. Shapes: index: int64[m]."""

    def concat(self, parts: list[Any]) -> Any:
        """Join batches in order."""


def default_block_rows(arithmetic: Batches) -> int:
    """Return how many rows suit the backend."""
    return _DEVICE_BLOCK_ROWS if arithmetic.name == "cuda" else BLOCK_ROWS


class RandomiserPool(StaysInProcess):
    """Randomisers in blocks, in memory only.

    Security: a randomiser leaves the pool before it is returned, and never comes back, also when the encryption that
        took it fails. The pool is emptied in a forked child, and again checks the process id at every use, for forks
        that run no Python hooks. Threads take disjoint rows. Pools are not shared between keys or devices. Python
        does not overwrite memory that it frees: whoever reads the process's memory is outside the threat model.
    """

    def __init__(self, arithmetic: Batches, source: RandomiserSource, block_rows: int | None = None) -> None:
        """Open an empty pool that makes ``block_rows`` randomisers at a time, by default what suits the backend."""
        if block_rows is None:
            block_rows = default_block_rows(arithmetic)
        if block_rows < 1:
            raise ValueError("block_rows must be at least 1")
        self._arithmetic = arithmetic
        self._source = source
        self._block_rows = block_rows
        self._forget()
        _POOLS.add(self)

    def __len__(self) -> int:
        """Return the randomisers ready now."""
        with self._guard():
            return sum(len(block) for block in self._blocks)

    def fill(self, n: int) -> None:
        """Make randomisers until at least ``n`` are ready; callers may fill from a thread of their own."""
        while True:
            missing = n - len(self)
            if missing <= 0:
                return
            owner = os.getpid()
            block = self._source.draw(min(missing, self._block_rows))
            with self._guard():
                if os.getpid() == owner:
                    self._blocks.append(block)

    def draw(self, n: int) -> Residues:
        """Take ``n`` randomisers out of the pool, making those that are missing.

        Shapes: result: Residues[n].
        """
        taken = self._take(n)
        missing = n - sum(len(block) for block in taken)
        while missing > 0 or not taken:  # also for no rows: a batch needs one part
            taken.append(self._source.draw(min(missing, self._block_rows)))
            missing -= len(taken[-1])
        return taken[0] if len(taken) == 1 else self._arithmetic.concat(taken)

    def clear(self) -> None:
        """Drop all randomisers."""
        with self._guard():
            self._blocks.clear()

    def _take(self, n: int) -> list[Residues]:
        taken: list[Residues] = []
        with self._guard():
            while n > 0 and self._blocks:
                block = self._blocks.popleft()
                if len(block) > n:
                    rows = np.arange(len(block), dtype=np.int64)
                    self._blocks.appendleft(self._arithmetic.take(block, rows[n:]))
                    block = self._arithmetic.take(block, rows[:n])
                taken.append(block)
                n -= len(block)
        return taken

    def _guard(self) -> threading.Lock:
        """Return the lock, after dropping what a parent process made."""
        if os.getpid() != self._process_id:
            self._forget()
        return self._lock

    def _forget(self) -> None:
        # The lock is new as well: in a forked child the old one may be held by a thread that no longer exists.
        self._lock = threading.Lock()
        self._blocks: deque[Residues] = deque()
        self._process_id = os.getpid()


_POOLS: weakref.WeakSet[RandomiserPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_POOLS):
        pool._forget()


os.register_at_fork(after_in_child=_forget_all)


# Re-randomisation that holds against the key owner.
#
# The key owner knows every randomiser it drew and the factors of n. A party that returns products of the owner's
# ciphertexts therefore multiplies in a residue of its own: h^a * prod z_i^(b_i) with its own random n-th residues h and
# z_i. The exponent a is longer than the group order by 128 bits, so h^a is uniform over the subgroup that h generates
# (up to 2^-128); the random subset of the z_i makes the coset of that subgroup random as well, which h^a alone would
# not.
#
# Textbook Paillier re-randomisation draws a fresh x^n for each ciphertext, which costs 2048 or more products where this
# costs about 300.


N_SUBSET_BASES = 96
EXPONENT_SLACK_BITS = 128
_SUBSET_BITS = 8


class Rerandomiser(StaysInProcess):
    """Draws fresh encryptions of zero that even the key owner cannot tell from any other.

    Security: the bases are this party's own, from its own randomness, and stay with it: never sent, never taken from
        a message. One re-randomiser serves one key; make a new one for each session.
    """

    def __init__(
        self, public_key: PaillierPublicKey, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS
    ) -> None:
        self.arithmetic = arithmetic
        self._source = source
        residues = PublicRandomisers(public_key, arithmetic, source).draw(1 + N_SUBSET_BASES)
        base = ints_from_rows(arithmetic.to_wire(arithmetic.take(residues, np.zeros(1, dtype=np.int64))))[0]
        self._exponent_bytes = (public_key.n.bit_length() + EXPONENT_SLACK_BITS + 7) // 8
        self._powers = arithmetic.fixed_base(base, 8 * self._exponent_bytes)
        self._subsets = _subset_products(arithmetic, residues)
        self._ready = RandomiserPool(arithmetic, self)

    def fill(self, n: int) -> None:
        """Make fresh encryptions of zero until ``n`` are ready for ``rerandomise``."""
        self._ready.fill(n)

    def draw(self, n: int) -> Residues:
        """Draw ``n`` fresh encryptions of zero. Shapes: result: Residues[n]."""
        exponents = self._random_bytes(n, self._exponent_bytes)
        return self.arithmetic.mul(self._powers.pow(exponents), self._subset_choice(n))

    def rerandomise(self, ciphertexts: Residues) -> Residues:
        """Hide where ciphertexts came from, with what was made ahead and more.

        Shapes: ciphertexts: Residues[n]; result: Residues[n].
        """
        return self.arithmetic.mul(ciphertexts, self._ready.draw(len(ciphertexts)))

    def _subset_choice(self, n: int) -> Residues:
        """Multiply a random subset of the z_i for each row: one table entry for each byte of random bits."""
        n_tables = N_SUBSET_BASES // _SUBSET_BITS
        bits = self._random_bytes(n, n_tables)
        order = bits.astype(np.int32) + (np.arange(n_tables, dtype=np.int32) << _SUBSET_BITS)
        starts = np.arange(n + 1, dtype=np.int64) * n_tables
        return self.arithmetic.segprod(self._subsets, order.reshape(-1), starts)

    def _random_bytes(self, n: int, width: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._source.bytes(n * width), dtype=np.uint8).reshape(n, width)


def _subset_products(arithmetic: ModBatch, residues: Residues) -> Residues:
    """Tabulate the products of all subsets of z_1..z_8, of z_9..z_16, and so on.

    Shapes: residues: Residues[1 + N_SUBSET_BASES], the first one is not used; result: Residues[12 * 256].
    """
    order: list[int] = []
    starts = [0]
    for first in range(1, 1 + N_SUBSET_BASES, _SUBSET_BITS):
        for subset in range(1 << _SUBSET_BITS):
            order += [first + bit for bit in range(_SUBSET_BITS) if subset >> bit & 1]
            starts.append(len(order))
    return arithmetic.segprod(residues, np.array(order, dtype=np.int32), np.array(starts, dtype=np.int64))
