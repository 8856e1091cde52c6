"""Hashing to elements of ristretto255, and proofs that one key turned one element into another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.interface import (
    GROUP_ORDER,
    RISTRETTO_BYTES,
    SCALAR_BYTES,
    Curve,
    Points,
    base_point,
    rows_of,
)
from he_processors.errors import ProtocolError
from he_processors.key_agreement import DOMAIN, encode_fields
from he_processors.randomness import RandomSource, random_below

# Proofs of equal discrete logarithms in ristretto255: that one key, committed to, turned one element into another.
#
# Whoever holds k shows, for K = k G, that a "product" is k times a "base", and nothing else about k. Many pairs are
# shown at once: their sums under weights that a hash draws from all of them are in that ratio if each pair is, and
# otherwise but for a chance of 2^-128 (``weighted_sums``).
#
# Reference: Chaum and Pedersen, "Wallet databases with observers" (1992), made non-interactive by Fiat and Shamir; for
# the weights Bellare, Garay and Rabin, "Fast batch verification" (1998).


WEIGHT_BYTES = 16
PROOF_BYTES = 2 * SCALAR_BYTES
_FEW_POINTS = 1_000  # to add them up bit by bit takes fewer additions than to put them into buckets
_DIGITS = 256


def commitment(curve: Curve, secret: int) -> bytes:
    """Return secret G."""
    return curve.to_ristretto(curve.fixed_base(base_point(curve)).mul(rows_of([secret]))).tobytes()


def draw_weights(transcript: bytes, n: int) -> NDArray[np.uint8]:
    """Draw weights of 128 bits from a hash over all that they weigh. Shapes: result: uint8[n, 16]."""
    stream = hashlib.shake_256(encode_fields(DOMAIN, "equal logarithms, weights", transcript))
    return np.frombuffer(stream.digest(n * WEIGHT_BYTES), dtype=np.uint8).reshape(n, WEIGHT_BYTES)


def weighted_sums(curve: Curve, batches: Sequence[Points], weights: NDArray[np.uint8]) -> list[bytes]:
    """Return for each batch the sum of weight times point, encoded.

    Shapes: batches: Points[n] each; weights: uint8[n, width], little-endian, width a power of two.

    Many points are added up by the digits of their weights first; each digit's sum then counts like one point.
    """
    n, width = weights.shape
    levels = []
    if n >= _FEW_POINTS:
        order = np.concatenate([np.argsort(digits, kind="stable") for digits in weights.T])
        keys = (weights + _DIGITS * np.arange(width, dtype=np.uint16)).ravel()
        levels.append(curve.segment_sums(order.astype(np.int32), _starts(keys, width * _DIGITS), n))
        n, weights = width * _DIGITS, np.zeros((width, _DIGITS, width), dtype=np.uint8)
        weights[np.arange(width), :, np.arange(width)] = np.arange(_DIGITS, dtype=np.uint8)
    bits, order = np.nonzero(np.unpackbits(weights.reshape(n, width), axis=1, bitorder="little").T)
    levels.append(curve.segment_sums(order.astype(np.int32), _starts(bits, 8 * width), n))
    return [_added(curve, points, levels) for points in batches]


def _added(curve: Curve, points: Points, levels: Sequence[Callable[[Points], Points]]) -> bytes:
    for sums_of in levels:
        points = sums_of(points)
    while len(points) > 1:  # the sum at place i counts 2^i times
        half = len(points) // 2
        points = curve.add(points[:half], curve.double(points[half:], half))
    return curve.to_ristretto(points).tobytes()


def prove(curve: Curve, secret: int, transcript: bytes, product: bytes, randomness: RandomSource) -> bytes:
    """Prove that an element is ``secret`` times another, which is product / secret.

    Args:
        transcript: a hash over all that the proof is about: session, prover and place, commitments, elements.
    """
    inverse, nonce = pow(secret, -1, GROUP_ORDER), 1 + random_below(GROUP_ORDER - 1, randomness)
    base = curve.mul(_element(curve, product), rows_of([inverse]))
    ours = curve.to_ristretto(curve.mul(curve.concat([base_point(curve), base]), rows_of([nonce, nonce])))
    encoded = curve.to_ristretto(base).tobytes()
    challenge = _challenge(transcript, commitment(curve, secret), encoded, product, ours.tobytes())
    return rows_of([challenge, nonce - challenge * secret]).tobytes()


def holds(curve: Curve, transcript: bytes, committed: bytes, base: bytes, product: bytes, proof: bytes) -> bool:
    """Return whether a proof shows that product / base is the key committed to.

    Args:
        committed, base, product: encodings of elements.
    """
    challenge, response = (int.from_bytes(proof[place : place + SCALAR_BYTES], "little") for place in (0, SCALAR_BYTES))
    if len(proof) != PROOF_BYTES or max(challenge, response) >= GROUP_ORDER:
        return False
    try:
        left = curve.concat([base_point(curve), _element(curve, base)])
        right = curve.concat([_element(curve, committed), _element(curve, product)])
    except ProtocolError:
        return False
    theirs = curve.add(
        curve.mul(left, rows_of([response, response])), curve.mul(right, rows_of([challenge, challenge]))
    )
    return challenge == _challenge(transcript, committed, base, product, curve.to_ristretto(theirs).tobytes())


def _challenge(transcript: bytes, committed: bytes, base: bytes, product: bytes, nonces: bytes) -> int:
    content = encode_fields(DOMAIN, "equal logarithms, challenge", transcript, committed, base, product, nonces)
    return int.from_bytes(hashlib.sha512(content).digest(), "little") % GROUP_ORDER


def _element(curve: Curve, encoded: bytes) -> Points:
    if len(encoded) != RISTRETTO_BYTES:
        raise ProtocolError("an element has another size")
    return curve.from_ristretto(np.frombuffer(encoded, dtype=np.uint8).reshape(1, -1))


def _starts(keys: NDArray[np.int64] | NDArray[np.uint16], n: int) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=n))]).astype(np.int64)


# Hashing of byte strings to elements of ristretto255.
#
# Reference: RFC 9380, appendix B (hash_to_ristretto255) with expand_message_xmd of section 5.3.1 and SHA-512.


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
