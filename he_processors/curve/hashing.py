"""Hashing of byte strings to elements of ristretto255.

Reference: RFC 9380, appendix B (hash_to_ristretto255) with expand_message_xmd of section 5.3.1 and SHA-512.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from he_processors.curve.interface import Curve, Points

_UNIFORM_BYTES = 64
_SHA512_BLOCK = 128


def hash_to_ristretto(curve: Curve, messages: Sequence[bytes], tag: bytes) -> Points:
    """Hash every message to an element whose logarithm nobody knows.

    Shapes: result: Points[n].

    Args:
        tag: the domain separation tag; what is hashed under one tag says nothing about hashes under another.

    Raises:
        ValueError: the tag is empty or longer than 255 bytes.
    """
    if not 1 <= len(tag) <= 255:
        raise ValueError("a domain separation tag has 1 to 255 bytes")
    suffix = tag + bytes([len(tag)])
    first = hashlib.sha512(bytes(_SHA512_BLOCK))
    rest = _UNIFORM_BYTES.to_bytes(2, "big") + b"\0" + suffix
    uniform = bytearray()
    for message in messages:
        state = first.copy()
        state.update(message + rest)
        uniform += hashlib.sha512(state.digest() + b"\1" + suffix).digest()
    return curve.from_uniform(np.frombuffer(uniform, dtype=np.uint8).reshape(-1, _UNIFORM_BYTES))
