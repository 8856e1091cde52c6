"""Ciphertexts as bytes: a fixed header, then fixed-width little-endian residues.

The receiver states what it expects, key and layout and count, and refuses anything else. Nothing in a message is
believed: not a length, not a residue. There are no optional fields, no pickles and no seeds.

Layout (little-endian): magic 4s, version u16, scheme u8, content u8, key bits u32, residue bytes u32, fraction bits
i32, pair bits u16, h bits u16, pairs per ciphertext u32, max additions u64, count u64, key fingerprint 32s.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import PublicKey
from he_processors.bignum.interface import ModBatch, Residues, product
from he_processors.bignum.rows import byte_width
from he_processors.errors import KeyMismatch, ProtocolError
from he_processors.fixed_point import PackingLayout

_MAGIC = b"VBHE"
_VERSION = 1
_HEADER = struct.Struct("<4sHBBIIiHHIQQ32s")


class Content(enum.Enum):
    """What the ciphertexts of a message hold; the value is the code on the wire."""

    PAIRS = 1
    PACKED_BINS = 2


@dataclass(frozen=True, slots=True)
class CiphertextHeader:
    """Everything that fixes the meaning and the length of a message."""

    public_key: PublicKey
    content: Content
    packing: PackingLayout
    count: int

    def to_bytes(self) -> bytes:
        """Return the header's one encoding."""
        pair_format = self.packing.pair_format
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.public_key.scheme.value,
            self.content.value,
            self.public_key.key_bits,
            byte_width(self.public_key.modulus),
            pair_format.fraction_bits,
            pair_format.pair_bits,
            pair_format.h_bits,
            1 if self.content is Content.PAIRS else self.packing.pairs_per_plaintext,
            pair_format.max_additions,
            self.count,
            bytes.fromhex(self.public_key.fingerprint),
        )

    @property
    def message_bytes(self) -> int:
        """Return the length of the whole message."""
        return _HEADER.size + self.count * byte_width(self.public_key.modulus)


def encode_ciphertexts(header: CiphertextHeader, arithmetic: ModBatch, ciphertexts: Residues) -> bytes:
    """Write ciphertexts.

    Shapes:   ciphertexts: Residues[header.count].
    Security: packed bins must have been re-randomised (``pack_and_hide``); single pairs are fresh encryptions.

    Raises:
        KeyMismatch: the arithmetic is not the key's.
        ValueError: the count is not the header's.
    """
    _check_arithmetic(header, arithmetic)
    if len(ciphertexts) != header.count:
        raise ValueError("the number of ciphertexts differs from the header")
    return header.to_bytes() + arithmetic.to_wire(ciphertexts).tobytes()


def decode_ciphertexts(message: bytes | memoryview, expected: CiphertextHeader, arithmetic: ModBatch) -> Residues:
    """Read ciphertexts that arithmetic goes on with.

    Shapes: result: Residues[expected.count].

    Raises:
        ProtocolError: the header differs from ``expected`` in any bit, the length is not exact, or a residue is zero,
            not below the modulus or not coprime to it.
        KeyMismatch: the arithmetic is not the key's.
    """
    return _checked(message, expected, arithmetic)[1]


def decode_for_decryption(
    message: bytes | memoryview, expected: CiphertextHeader, arithmetic: ModBatch
) -> NDArray[np.uint8]:
    """Read ciphertexts to decrypt, after the same checks.

    Shapes: result: uint8[expected.count, width].

    Raises:
        ProtocolError, KeyMismatch: as ``decode_ciphertexts``.
    """
    return _checked(message, expected, arithmetic)[0]


def _checked(
    message: bytes | memoryview, expected: CiphertextHeader, arithmetic: ModBatch
) -> tuple[NDArray[np.uint8], Residues]:
    _check_arithmetic(expected, arithmetic)
    if len(message) != expected.message_bytes:
        raise ProtocolError(f"a ciphertext message has {len(message)} bytes, expected {expected.message_bytes}")
    if bytes(message[: _HEADER.size]) != expected.to_bytes():
        raise ProtocolError("a ciphertext message is for another key, layout, content or count")
    rows = np.frombuffer(message, dtype=np.uint8, offset=_HEADER.size).reshape(expected.count, arithmetic.width)
    residues = arithmetic.from_wire(rows)
    # The product is coprime to n exactly if every residue is; a zero makes it zero.
    if math.gcd(product(arithmetic, residues), expected.public_key.n) != 1:
        raise ProtocolError("a ciphertext is not a unit of its modulus")
    return rows, residues


def _check_arithmetic(header: CiphertextHeader, arithmetic: ModBatch) -> None:
    if arithmetic.modulus != header.public_key.modulus:
        raise KeyMismatch("the arithmetic belongs to another key than the ciphertexts")
