"""Ciphertexts of BFV and CKKS as plain residues: wire format and key-less addition.

A symmetric RLWE ciphertext is two polynomials over a product of primes. What travels are their residues, nothing of
SEAL's own serialisation: a header of fixed length, then per prime the residues in as many bytes as the prime needs.
Adding two ciphertexts adds residues modulo each prime, so the server needs numpy only: no key, no context, and
no parser of a C++ library ever sees bytes that came over the network.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource

KEY_ID_BYTES = 16
POLYNOMIALS = 2
MAX_VALUES = 1 << 32

_PUBLIC_MAGIC = b"VLHP"
_CIPHERTEXT_MAGIC = b"VLHC"
_VERSION = 1
_PUBLIC = struct.Struct("<4sBBI16s")
_HEADER = struct.Struct("<4sBBI16sQ")
_PLANES = (("<u4", 32), ("<u2", 16), ("u1", 8))


@dataclass(frozen=True, slots=True)
class RingScheme:
    """The constants of one scheme; they never travel, only ``code`` does.

    Attributes:
        name: for messages.
        code: number on the wire.
        poly_degree: N, coefficients per polynomial.
        primes: the ciphertext modulus as a product of primes, each = 1 mod 2N.
        values_per_ciphertext: how many values one ciphertext holds.
        max_summands: how many ciphertexts may be added before noise could reach a result.
    """

    name: str
    code: int
    poly_degree: int
    primes: tuple[int, ...]
    values_per_ciphertext: int
    max_summands: int

    def n_ciphertexts(self, n_values: int) -> int:
        """Return how many ciphertexts hold ``n_values`` values."""
        return -(-n_values // self.values_per_ciphertext)

    def body_size(self, n_values: int) -> int:
        """Return the bytes behind the header of a message of ``n_values`` values."""
        bytes_per_position = sum(_width(prime) for prime in self.primes)
        return self.n_ciphertexts(n_values) * POLYNOMIALS * self.poly_degree * bytes_per_position

    def message_size(self, n_values: int) -> int:
        """Return the bytes of a whole message of ``n_values`` values."""
        return _HEADER.size + self.body_size(n_values)


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """What everyone, the server included, may know of a key.

    Attributes:
        key_id: 16 random bytes drawn with the key.
        n_summands: how many sites' messages are added at most.
    """

    key_id: bytes
    n_summands: int

    @classmethod
    def new(cls, scheme: RingScheme, n_summands: int, randomness: RandomSource = OS_RANDOMNESS) -> KeyFacts:
        """Draw the id of a new key. Raises: ValueError, if the scheme cannot add that many messages."""
        if not 1 <= n_summands <= scheme.max_summands:
            raise ValueError(f"{scheme.name} adds between 1 and {scheme.max_summands} messages")
        return cls(randomness.bytes(KEY_ID_BYTES), n_summands)

    def pack(self, scheme: RingScheme) -> bytes:
        """Return the public parameters that the server gets."""
        return _PUBLIC.pack(_PUBLIC_MAGIC, _VERSION, scheme.code, self.n_summands, self.key_id)

    @classmethod
    def unpack(cls, data: bytes, scheme: RingScheme) -> KeyFacts:
        """Parse what ``pack`` wrote. Raises: ProtocolError."""
        if len(data) != _PUBLIC.size:
            raise ProtocolError(f"{scheme.name} parameters of {len(data)} bytes, {_PUBLIC.size} are due")
        magic, version, code, n_summands, key_id = _PUBLIC.unpack(data)
        if (magic, version, code) != (_PUBLIC_MAGIC, _VERSION, scheme.code):
            raise ProtocolError(f"not the parameters of {scheme.name} in this version of VeilBoost")
        if not 1 <= n_summands <= scheme.max_summands:
            raise ProtocolError(f"{scheme.name} parameters announce {n_summands} summands")
        return cls(key_id, n_summands)


@dataclass(frozen=True, slots=True)
class RingMessage:
    """One encrypted vector.

    Attributes:
        n_values: how many values it holds.
        n_summands: how many fresh ciphertexts were added into it.
        residues: per prime, uint64[n_ciphertexts, 2, poly_degree], each below the prime.
    """

    n_values: int
    n_summands: int
    residues: tuple[NDArray[np.uint64], ...]

    def pack(self, scheme: RingScheme, key_id: bytes) -> bytes:
        """Return the bytes that travel."""
        header = _HEADER.pack(_CIPHERTEXT_MAGIC, _VERSION, scheme.code, self.n_summands, key_id, self.n_values)
        parts = [header]
        for prime, values in zip(scheme.primes, self.residues, strict=True):
            parts += [(values >> np.uint64(shift)).astype(dtype).tobytes() for dtype, shift, _ in _planes(prime)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes, scheme: RingScheme, facts: KeyFacts) -> RingMessage:
        """Parse and check a message, fresh or added.

        Raises:
            ProtocolError: other scheme, version or key, more summands than agreed, a length that does not fit the
                announced number of values, a residue that is not below its prime.
        """
        if len(data) < _HEADER.size:
            raise ProtocolError(f"{scheme.name} message of {len(data)} bytes is shorter than its header")
        magic, version, code, n_summands, key_id, n_values = _HEADER.unpack_from(data)
        if (magic, version, code) != (_CIPHERTEXT_MAGIC, _VERSION, scheme.code):
            raise ProtocolError(f"not a {scheme.name} message of this version of VeilBoost")
        if key_id != facts.key_id:
            raise ProtocolError(f"{scheme.name} message under another key")
        if not 1 <= n_summands <= facts.n_summands:
            raise ProtocolError(f"{scheme.name} message of {n_summands} summands, at most {facts.n_summands} are due")
        if not 1 <= n_values <= MAX_VALUES or len(data) - _HEADER.size != scheme.body_size(n_values):
            raise ProtocolError(f"{scheme.name} message of {len(data)} bytes does not hold {n_values} values")
        return cls(n_values, n_summands, _unpack_body(memoryview(data)[_HEADER.size :], scheme, n_values))


class MessageSum:
    """The sum of fresh messages of several sites, added as they come; the order does not matter.

    Security: needs no key and learns nothing but sizes. Every byte is checked before it is used: a message that is
        refused has not been added.
    Capacity: at most the number of summands in the public parameters.
    """

    def __init__(self, public_parameters: bytes, scheme: RingScheme) -> None:
        """Raises: ProtocolError, for malformed parameters."""
        self._scheme, self._facts = scheme, KeyFacts.unpack(public_parameters, scheme)
        self._total: RingMessage | None = None
        self._n_added = 0

    def add(self, payload: bytes) -> None:
        """Add a message. Raises: ProtocolError if it is malformed, of another length, or one too many."""
        scheme, total = self._scheme, self._total
        if self._n_added == self._facts.n_summands:
            n_due = self._facts.n_summands
            raise ProtocolError(f"{self._n_added + 1} {scheme.name} messages to add, between 1 and {n_due} are due")
        message = _unpack_fresh(payload, scheme, self._facts)
        if total is None:
            self._total = message
        elif message.n_values != total.n_values:
            raise ProtocolError(f"{scheme.name} messages of {message.n_values} and {total.n_values} values")
        else:
            for prime, sums, values in zip(scheme.primes, total.residues, message.residues, strict=True):
                _add_modulo(sums, values, np.uint64(prime))
        self._n_added += 1

    def pack(self) -> bytes:
        """Return the sum as it travels. Raises: ProtocolError if nothing was added."""
        if self._total is None:
            raise ProtocolError(f"no {self._scheme.name} message to add, at least one is due")
        total = RingMessage(self._total.n_values, self._n_added, self._total.residues)
        return total.pack(self._scheme, self._facts.key_id)


def add_messages(public_parameters: bytes, payloads: Sequence[bytes], scheme: RingScheme) -> bytes:
    """Add the fresh messages of several sites (see ``MessageSum``).

    Raises:
        ProtocolError: malformed parameters or messages, messages of different lengths, too many of them.
    """
    total = MessageSum(public_parameters, scheme)
    for payload in payloads:
        total.add(payload)
    return total.pack()


def _unpack_fresh(payload: bytes, scheme: RingScheme, facts: KeyFacts) -> RingMessage:
    message = RingMessage.unpack(payload, scheme, facts)
    if message.n_summands != 1:
        raise ProtocolError(f"{scheme.name} message of a site is a sum already")
    return message


def _add_modulo(sums: NDArray[np.uint64], values: NDArray[np.uint64], prime: np.uint64) -> None:
    for total, value in zip(sums, values, strict=True):  # one ciphertext at a time stays in the cache
        total += value
        np.minimum(total, total - prime, out=total)  # below the prime already: total - prime wraps and is larger


def _width(prime: int) -> int:
    return (prime.bit_length() + 7) // 8


def _planes(prime: int) -> list[tuple[str, int, int]]:
    """Return (dtype, shift, bytes) of the pieces that a residue is cut into.

    Pieces of 4, 2 and 1 bytes in arrays of their own convert at memory speed; rows of 5 or 7 bytes do not.
    """
    pieces, shift, missing = [], 0, _width(prime)
    for dtype, n_bits in _PLANES:
        while missing * 8 >= n_bits:
            pieces.append((dtype, shift, n_bits // 8))
            shift += n_bits
            missing -= n_bits // 8
    return pieces


def _unpack_body(body: memoryview, scheme: RingScheme, n_values: int) -> tuple[NDArray[np.uint64], ...]:
    shape = (scheme.n_ciphertexts(n_values), POLYNOMIALS, scheme.poly_degree)
    n_residues = shape[0] * shape[1] * shape[2]
    start, residues = 0, []
    for prime in scheme.primes:
        values = np.zeros(n_residues, dtype=np.uint64)
        for dtype, shift, n_bytes in _planes(prime):
            piece = np.frombuffer(body, dtype=dtype, count=n_residues, offset=start).astype(np.uint64)
            values |= piece << np.uint64(shift)
            start += n_residues * n_bytes
        if int(values.max()) >= prime:
            raise ProtocolError(f"{scheme.name} message holds a residue that is not below its prime")
        residues.append(values.reshape(shape))
    return tuple(residues)
