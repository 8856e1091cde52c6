"""Paillier's cryptosystem (Eurocrypt 1999) with g = n + 1; keys and ciphertexts interchange with ``phe``."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import (
    DEFAULT_KEY_BITS,
    AdditiveScheme,
    PrivateKey,
    PublicKey,
    RandomiserSource,
    Scheme,
    StaysInProcess,
    check_key_bits,
)
from he_processors.bignum import registry
from he_processors.bignum.interface import (
    ModBatch,
    Residues,
    add,
    add_rows,
    byte_width,
    constant,
    from_wide,
    ints_from_rows,
    less_than,
    lift,
    product,
    random_rows_below,
    rows_from_ints,
    scale,
    shift_signed,
    sum_rows,
    widen,
)
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError, VeilBoostError
from he_processors.randomness import BULK_RANDOMNESS, OS_RANDOMNESS, RandomSource, random_below

# Paillier keys, and primes whose group of units has a known generator.


# Primes whose group of units has a known generator.
#
# p = 2 k q' + 1 with q' prime and k small, so that p - 1 is factored and a generator of Z_p* can be checked. Powers of
# the generator with a uniform exponent below p - 1 are then uniform over the whole group: the key owner draws exactly
# the textbook distribution of randomisers, by table.


_COFACTOR_BITS = 16
# Enough Miller-Rabin rounds, after GMP's Baillie-PSW, for an error far below 2^-100 on a random candidate.
_PRIMALITY_ROUNDS = 40


@dataclass(frozen=True, slots=True, repr=False)
class StructuredPrime(StaysInProcess):
    """A prime with the full factorisation of p - 1 behind its generator. Secret."""

    p: int
    generator: int

    def __repr__(self) -> str:
        return f"StructuredPrime({self.p.bit_length()} bits)"


def generate_structured_prime(bits: int, source: RandomSource = OS_RANDOMNESS) -> StructuredPrime:
    """Generate p = 2 k q' + 1 = 3 (mod 4) of exactly ``bits`` bits, its two top bits set, and a generator.

    Args:
        bits: length of the prime, at least 64.
        source: randomness for q', k and the generator.
    """
    if bits < 64:
        raise ValueError("a structured prime has at least 64 bits")
    low, high = 3 << (bits - 2), 1 << bits
    while True:
        q_prime = _random_prime(bits - _COFACTOR_BITS, source)
        # k odd makes p = 3 (mod 4); every k from k_low gives p in [low, high), and k < 2^16.
        k_low, k_high = -(-(low - 1) // (2 * q_prime)), (high - 2) // (2 * q_prime)
        for _ in range(k_high - k_low):
            k = (k_low + random_below(k_high - k_low + 1, source)) | 1
            p = 2 * k * q_prime + 1
            if low <= p < high and gmpy2.is_prime(p, _PRIMALITY_ROUNDS):
                return StructuredPrime(p, _find_generator(p, _prime_factors(k) | {2, q_prime}, source))


def is_generator(candidate: int, p: int, prime_factors: set[int]) -> bool:
    """Tell whether ``candidate`` generates Z_p*, given every prime factor of p - 1."""
    return all(gmpy2.powmod(candidate, (p - 1) // factor, p) != 1 for factor in prime_factors)


def _random_prime(bits: int, source: RandomSource) -> int:
    while True:
        candidate = random_below(1 << bits, source) | (1 << (bits - 1)) | 1
        if gmpy2.is_prime(candidate, _PRIMALITY_ROUNDS):
            return candidate


def _find_generator(p: int, prime_factors: set[int], source: RandomSource) -> int:
    while True:
        candidate = 2 + random_below(p - 3, source)
        if is_generator(candidate, p, prime_factors):
            return candidate


def _prime_factors(k: int) -> set[int]:
    """Return the prime factors of a small number by trial division."""
    factors, divisor = set(), 2
    while divisor * divisor <= k:
        while k % divisor == 0:
            factors.add(divisor)
            k //= divisor
        divisor += 1
    if k > 1:
        factors.add(k)
    return factors


# Paillier keys.
#
# Security: decisional composite residuosity. 3072 bits are the default (128-bit strength); 2048 must be asked for
# (112-bit strength); shorter keys are refused outside tests.


# Prime factors closer than 2^(|n|/2 - 100) would let Fermat's method find them.
_MIN_DISTANCE_SLACK_BITS = 100


@dataclass(frozen=True, repr=False)
class PaillierPublicKey(PublicKey):
    """The public key: n. Ciphertexts are units modulo n^2."""

    scheme = Scheme.PAILLIER

    @cached_property
    def modulus(self) -> int:
        """Return n^2, the ciphertext modulus."""
        return self.n * self.n

    @property
    def plaintext_bits(self) -> int:
        """Return the capacity: full decryption returns every |plaintext| < 2^plaintext_bits."""
        return self.key_bits - 2

    def embed(self, arithmetic: ModBatch, plaintexts: NDArray[np.uint8]) -> Residues:
        """Return 1 + m n. Raises: CapacityExceeded: a plaintext is not in (-n, n)."""
        # 1 + m n = (m + s) n + (1 - s n): the shift s makes narrow rows non-negative without widening them to n.
        shifted = shift_signed(plaintexts)
        shift = 1 << (8 * shifted.shape[1] - 1)
        if shift > self.n and not np.all(less_than(shifted, shift + self.n) & ~less_than(shifted, shift - self.n + 1)):
            raise CapacityExceeded("a plaintext is not in the range of this key; nothing was encrypted")
        opened = scale(arithmetic, from_wide(arithmetic, shifted), constant(arithmetic, self.n))
        return add(arithmetic, opened, constant(arithmetic, 1 - shift * self.n))

    def randomisers(self, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS) -> PublicRandomisers:
        """Open uniform n-th residues."""
        return PublicRandomisers(self, arithmetic, source)


@dataclass(frozen=True, repr=False)
class PaillierPrivateKey(PrivateKey):
    """The private key: the factors of n, the larger first, and generators of their unit groups where known."""

    p: int
    q: int
    p_generator: int | None = None
    q_generator: int | None = None

    def __post_init__(self) -> None:
        if self.p <= self.q:
            raise ValueError("the larger prime comes first")

    @classmethod
    def from_primes(cls, p: int, q: int, *, allow_toy_keys: bool = False) -> PaillierPrivateKey:
        """Take over a key made elsewhere, from ``phe`` for one.

        The structure of its primes is unknown, so encryption draws s^p instead of powers of a generator.

        Args:
            p, q: the primes, in either order.
            allow_toy_keys: accept short keys; True in tests only.

        Raises:
            ConfigurationError: the length is refused, or these are not two primes that make a usable key.
        """
        p, q = max(p, q), min(p, q)
        key_bits = (p * q).bit_length()
        check_key_bits(key_bits, allow_toy_keys=allow_toy_keys)
        is_balanced = p.bit_length() == q.bit_length() and _is_far_apart(p, q, key_bits)
        if not is_balanced or not (gmpy2.is_prime(p, 40) and gmpy2.is_prime(q, 40)) or not _is_invertible(p, q):
            raise ConfigurationError("an imported Paillier key is not the product of two suitable primes")
        return cls(p, q)

    @cached_property
    def public_key(self) -> PaillierPublicKey:
        """Return the public half."""
        return PaillierPublicKey(self.p * self.q)

    def decryptor(self, backend: str = registry.AUTO) -> PaillierDecryptor:
        """Open decryption."""
        return PaillierDecryptor(self, backend)

    def randomisers(self, arithmetic: ModBatch, backend: str, source: RandomSource) -> OwnerRandomisers:
        """Open uniform n-th residues, drawn modulo both primes."""
        halves = (self.p, self.p_generator), (self.q, self.q_generator)
        return OwnerRandomisers(arithmetic, *(_subgroup(*half, backend, source) for half in halves))


def generate_paillier_key(
    key_bits: int = DEFAULT_KEY_BITS, source: RandomSource = OS_RANDOMNESS, *, allow_toy_keys: bool = False
) -> PaillierPrivateKey:
    """Generate a key whose owner can draw randomisers by table.

    Args:
        key_bits: length of n; 3072 (128-bit strength) or 2048 (112-bit strength) or more.
        source: randomness.
        allow_toy_keys: accept shorter keys; True in tests only.

    Raises:
        ConfigurationError: the length is refused.
    """
    check_key_bits(key_bits, allow_toy_keys=allow_toy_keys)
    while True:
        halves = [generate_structured_prime(key_bits // 2, source) for _ in range(2)]
        larger, smaller = sorted(halves, key=lambda prime: prime.p, reverse=True)
        p, q = larger.p, smaller.p
        if _is_far_apart(p, q, key_bits) and math.gcd(p - 1, q - 1) == 2 and _is_invertible(p, q):
            return PaillierPrivateKey(p, q, larger.generator, smaller.generator)


def _is_far_apart(p: int, q: int, key_bits: int) -> bool:
    return p - q > 1 << max(key_bits // 2 - _MIN_DISTANCE_SLACK_BITS, key_bits // 4)


def _is_invertible(p: int, q: int) -> bool:
    """Tell whether gcd(n, phi(n)) = 1, which decryption and the distribution of n-th powers rest on."""
    return math.gcd(p * q, (p - 1) * (q - 1)) == 1


# Random n-th residues: drawn by anybody or by the key owner, made ahead, and used to re-randomise.


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
    """Uniform n-th residues, or other powers, for whoever has the public key."""

    def __init__(
        self,
        public_key: PublicKey,
        arithmetic: ModBatch,
        source: RandomSource = BULK_RANDOMNESS,
        exponent: int | None = None,
    ) -> None:
        """Args: exponent: of x, which is uniform among the units below n; None is n."""
        self._n, self._exponent = public_key.n, public_key.n if exponent is None else exponent
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
                return self._arithmetic.pow_const(bases, self._exponent)


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

    def __init__(self, public_key: PublicKey, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS) -> None:
        self.arithmetic = arithmetic
        self._source = source
        residues = public_key.randomisers(arithmetic, source).draw(1 + N_SUBSET_BASES)
        base = ints_from_rows(arithmetic.to_wire(arithmetic.take(residues, np.zeros(1, dtype=np.int64))))[0]
        self._exponent_bytes = (public_key.key_bits + EXPONENT_SLACK_BITS + 7) // 8
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


# Paillier encryption in batches: c = (1 + m n) r^n modulo n^2.
#
# Reference: Paillier 1999, section 4, with g = n + 1.


class Encryptor:
    """Encrypts signed integers under a scheme over big numbers, with randomisers from a source, usually a pool.

    Security: one fresh randomiser for each plaintext; a failed batch loses the randomisers it took.
    """

    def __init__(self, public_key: PublicKey, arithmetic: ModBatch, randomisers: RandomiserSource) -> None:
        self.public_key = public_key
        self.arithmetic = arithmetic
        self.randomisers = randomisers

    def encrypt(self, plaintexts: NDArray[np.uint8]) -> Residues:
        """Encrypt signed integers.

        Shapes: plaintexts: uint8[n, width], two's complement, little-endian; result: Residues[n].

        Raises:
            CapacityExceeded, ValueError: as ``PublicKey.embed``; nothing is encrypted then.
        """
        n_rows = default_block_rows(self.arithmetic)
        starts = range(0, max(1, len(plaintexts)), n_rows)
        embedded = [self.public_key.embed(self.arithmetic, plaintexts[i : i + n_rows]) for i in starts]
        blocks = [self.arithmetic.mul(block, self.randomisers.draw(len(block))) for block in embedded]
        return blocks[0] if len(blocks) == 1 else self.arithmetic.concat(blocks)


def owner_encryptor(
    private_key: PrivateKey,
    backend: str = registry.AUTO,
    source: RandomSource = BULK_RANDOMNESS,
    block_rows: int | None = None,
) -> Encryptor:
    """Open encryption by the key owner, with a pool that can be filled ahead (``encryptor.randomisers.fill``)."""
    arithmetic = registry.open_backend(backend, private_key.public_key.modulus)
    randomisers = private_key.randomisers(arithmetic, backend, source)
    return Encryptor(private_key.public_key, arithmetic, RandomiserPool(arithmetic, randomisers, block_rows))


def public_encryptor(
    public_key: PublicKey, backend: str = registry.AUTO, source: RandomSource = BULK_RANDOMNESS
) -> Encryptor:
    """Open encryption with the public key alone."""
    arithmetic = registry.open_backend(backend, public_key.modulus)
    randomisers = public_key.randomisers(arithmetic, source)
    return Encryptor(public_key, arithmetic, RandomiserPool(arithmetic, randomisers))


def _subgroup(prime: int, generator: int | None, backend: str, source: RandomSource) -> SubgroupSource:
    """Open the uniform source of p-th powers modulo p^2, by table if a generator of Z_p* is known."""
    arithmetic = registry.open_backend(backend, prime * prime)
    if generator is None:
        return PrimePowers(arithmetic, prime, source)
    return GeneratorPowers(arithmetic, pow(generator, prime, prime * prime), prime - 1, source)


# Paillier decryption in batches: modulo both primes, each by a logarithm in a subgroup.


# Decryption modulo one prime: the discrete logarithm in the subgroup of order p modulo p^2.
#
# For c = g^m x^n the power c^(p-1) keeps only m: L(c^(p-1) mod p^2) / L(g^(p-1) mod p^2) = m modulo p, where L(x) = (x
# - 1) / p.
#
# Security: the result is m modulo p. By itself it would reveal p to whoever knows a plaintext that is not below p.


REFUSED = "a ciphertext is not a unit of its modulus"


def check_ciphertexts(ciphertexts: NDArray[np.uint8], public_key: PaillierPublicKey) -> None:
    """Refuse what is no ciphertext, before any of it is decrypted.

    Shapes: ciphertexts: uint8[n, width].

    Raises:
        ProtocolError: with one fixed message, if one is zero, not below the modulus or not coprime to it.
    """
    if not np.all(less_than(ciphertexts, public_key.modulus)):
        raise ProtocolError(REFUSED)
    total, n = gmpy2.mpz(1), gmpy2.mpz(public_key.n)
    for ciphertext in ints_from_rows(ciphertexts):
        total = total * ciphertext % n
    if gmpy2.gcd(total, n) != 1:
        raise ProtocolError(REFUSED)


class OnePrimeLogarithm(StaysInProcess):
    """Recovers m modulo p from ciphertexts. Secret."""

    def __init__(self, p: int, g: int, backend: str = registry.AUTO) -> None:
        """Prepare the logarithm to base ``g``, an element whose order modulo p^2 is a multiple of p."""
        self.p = p
        self._p = gmpy2.mpz(p)
        self._square = gmpy2.mpz(p) ** 2
        self._arithmetic = registry.open_backend(backend, p * p)
        self._inverse = gmpy2.invert(self._logarithm(gmpy2.powmod(g, p - 1, self._square)), self._p)

    def recover(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Return m modulo p for each ciphertext.

        Shapes: ciphertexts: uint8[n, width]; result: n integers in [0, p).

        Raises:
            ProtocolError: a ciphertext is not a unit modulo p.
        """
        width = byte_width(int(self._square))
        reduced = rows_from_ints((gmpy2.mpz(c) % self._square for c in ints_from_rows(ciphertexts)), width)
        powers = self._arithmetic.pow_const(self._arithmetic.from_wire(reduced), self.p - 1)
        values = ints_from_rows(self._arithmetic.to_wire(powers))
        return [int(self._logarithm(gmpy2.mpz(value)) * self._inverse % self._p) for value in values]

    def _logarithm(self, value: int) -> int:
        quotient: int
        quotient, rest = gmpy2.f_divmod(value - 1, self._p)
        if rest:
            raise ProtocolError(REFUSED)
        return quotient


# Paillier decryption in batches, by Chinese remainder.


class PaillierDecryptor:
    """Full decryption: every plaintext in (-n/2, n/2).

    Capacity: |plaintext| < 2^plaintext_bits.
    """

    def __init__(self, private_key: PaillierPrivateKey, backend: str = registry.AUTO) -> None:
        self.public_key = private_key.public_key
        self.plaintext_bits = self.public_key.plaintext_bits
        n = self.public_key.n
        self._p_half = OnePrimeLogarithm(private_key.p, n + 1, backend)
        self._q_half = OnePrimeLogarithm(private_key.q, n + 1, backend)
        self._q_inverse = int(gmpy2.invert(private_key.q, private_key.p))

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt.

        Shapes: ciphertexts: uint8[n, width] in wire form; result: n signed integers.

        Raises:
            ProtocolError: a ciphertext is not a unit below n^2.
        """
        check_ciphertexts(ciphertexts, self.public_key)
        p, q = self._p_half.p, self._q_half.p
        halves = zip(self._p_half.recover(ciphertexts), self._q_half.recover(ciphertexts), strict=True)
        joined = (in_q + q * ((in_p - in_q) * self._q_inverse % p) for in_p, in_q in halves)
        return [centred(plaintext, self.public_key.n) for plaintext in joined]


def centred(residue: int, modulus: int) -> int:
    """Return the representative of smallest magnitude."""
    return residue - modulus if residue > modulus // 2 else residue


PAILLIER = AdditiveScheme(
    "paillier", "Rests on decisional composite residuosity.", PaillierPublicKey, generate_paillier_key
)
