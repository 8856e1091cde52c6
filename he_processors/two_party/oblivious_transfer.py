"""Oblivious transfer between two parties: 128 transfers on the curve, extended to as many as are asked for.

The owner of an offset D gets labels q, the chooser with a bit r of its own gets t = q + r D (addition is XOR). So the
chooser has one of q and q + D, and does not know D; the owner does not know which. These are labels of garbled
circuits as they are (``garbling``), and keys of two messages once they are hashed (``products_with_bits``).

Security: honest but curious parties. The transfers on the curve rest on Diffie-Hellman in ristretto255 and BLAKE2b as a
    random oracle; the extension on AES-128 in counter mode, one stream for each column that never repeats. Both are
    made for one attempt of a job and forgotten with it. Nothing runs in constant time.
References: Chou, Orlandi, The simplest protocol for oblivious transfer (Latincrypt 2015); Ishai, Kilian, Nissim,
    Petrank, Extending oblivious transfers efficiently (Crypto 2003); Gilboa (Crypto 1999).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from he_processors.curve.interface import GROUP_ORDER, RISTRETTO_BYTES, Curve, Points, base_point, rows_of
from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below

KEY_BITS = 128
"""Transfers on the curve, columns of the extension, and bits of a label."""
LABEL_BYTES = KEY_BITS // 8
Labels = NDArray[np.uint64]
"""uint64[2, n]: 128-bit labels as two words. The lowest bit of the first word is a label's color."""

CHOICE_BYTES = KEY_BITS * RISTRETTO_BYTES
_SWAPS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


class TransferSender:
    """Offers 128 pairs of keys, of which the other party gets one each: it becomes the chooser of an extension."""

    def __init__(self, curve: Curve, randomness: RandomSource = OS_RANDOMNESS) -> None:
        """Draw the one scalar; ``offer`` is its public point. Shapes: offer: 32 bytes."""
        self._curve, self._scalar = curve, 1 + random_below(GROUP_ORDER - 1, randomness)
        self._point = _times(curve, base_point(curve), self._scalar)
        self.offer = curve.to_ristretto(self._point).tobytes()

    def key_pairs(self, choices: bytes) -> list[tuple[bytes, bytes]]:
        """Derive both keys of each transfer from the chooser's points.

        Raises:
            ProtocolError: not 128 elements of ristretto255.
        """
        points = _elements(self._curve, choices, KEY_BITS)
        shared = self._curve.mul(points, rows_of([self._scalar] * KEY_BITS))
        taken = self._curve.negate(_times(self._curve, self._point, self._scalar))
        others = self._curve.add(shared, self._curve.concat([taken] * KEY_BITS))
        both = (_keys(self._curve, self.offer, choices, one) for one in (shared, others))
        return list(zip(*both, strict=True))


class TransferChooser:
    """Chooses one key of each pair: it becomes the owner of an extension, with the bits of its offset as choices."""

    def __init__(self, curve: Curve, offer: bytes, offset: int, randomness: RandomSource = OS_RANDOMNESS) -> None:
        """Choose by the 128 bits of ``offset``; ``choices`` is what the sender needs: 4,096 bytes.

        Raises:
            ProtocolError: the offer is not an element of ristretto255, or the neutral one.
        """
        point = _elements(curve, offer, 1)
        if not any(offer):
            raise ProtocolError("the offer of oblivious transfers is the neutral element")
        scalars = rows_of([random_below(GROUP_ORDER, randomness) for _ in range(KEY_BITS)])
        own = curve.fixed_base(base_point(curve)).mul(scalars)
        both = curve.concat([own, curve.add(own, curve.concat([point] * KEY_BITS))])
        chosen = [place + KEY_BITS * (offset >> place & 1) for place in range(KEY_BITS)]
        self.choices = curve.to_ristretto(curve.take(both, np.array(chosen, dtype=np.int64))).tobytes()
        self.keys = _keys(curve, offer, self.choices, curve.fixed_base(point).mul(scalars))


class OffsetOwner:
    """Holds an offset D and gets labels q for choices that it does not learn."""

    def __init__(self, offset: int, keys: Sequence[bytes]) -> None:
        """Take the chosen keys. Args: offset: odd, so that the two labels of one bit differ in color."""
        if not offset & 1 or offset >> KEY_BITS:
            raise ValueError("an offset is odd and has 128 bits")
        self.offset = np.frombuffer(offset.to_bytes(LABEL_BYTES, "little"), dtype="<u8").astype(np.uint64)[:, None]
        self._chosen = np.array([offset >> place & 1 for place in range(KEY_BITS)], dtype=bool)
        self._streams = [_stream(key) for key in keys]

    def labels(self, choices: bytes, n: int) -> Labels:
        """Return the labels of ``n`` choices that are zero. Shapes: choices: 128 * ceil(n / 8) bytes; result: [2, n].

        Raises:
            ProtocolError: another length.
        """
        n_bytes = -(-n // 8)
        if len(choices) != KEY_BITS * n_bytes:
            raise ProtocolError("choices of oblivious transfers have the wrong length")
        columns = _columns(self._streams, n_bytes)
        columns ^= np.where(self._chosen[:, None], np.frombuffer(choices, np.uint8).reshape(KEY_BITS, -1), np.uint8(0))
        return _rows(columns, n)


class BitChooser:
    """Chooses labels by bits of its own."""

    def __init__(self, key_pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._streams = [[_stream(pair[which]) for pair in key_pairs] for which in (0, 1)]

    def choose(self, bits: NDArray[np.bool_]) -> tuple[Labels, bytes]:
        """Return the labels of these bits, and what the owner of the offset needs. Shapes: bits: bool[n]; [2, n].

        Security: the bytes are uniform for whoever has one key of each pair.
        """
        n_bytes = -(-bits.size // 8)
        columns = _columns(self._streams[0], n_bytes)
        hidden = columns ^ _columns(self._streams[1], n_bytes)
        hidden ^= np.packbits(bits, bitorder="little")
        return _rows(columns, bits.size), hidden.tobytes()


# Products of one party's number with the other's vector, shared modulo a power of two (Gilboa).


def product_corrections(
    owner: OffsetOwner, labels: Labels, values: NDArray[np.uint64], width: int
) -> tuple[NDArray[np.uint64], bytes]:
    """Share the products of values with numbers whose bits the other party chose.

    Shapes: labels: [2, n * width], of row i's bits from place i * width on; values: uint64[n, m]; result: uint64[n, m],
        the share of value * number modulo 2^width, and bytes for the other party.
    """
    shares, parts = np.zeros_like(values), []
    keys = labels, labels ^ owner.offset
    for row, vector in enumerate(values):
        for place in range(width):
            zero, one = (_pad(key[:, row * width + place], row * width + place, vector.size) for key in keys)
            shares[row] -= zero << np.uint64(place)
            parts.append(_narrow(zero - one + vector, width - place))
    return shares & _mask(width), b"".join(parts)


def product_shares(
    labels: Labels, numbers: Sequence[int], m: int, width: int, corrections: bytes
) -> NDArray[np.uint64]:
    """Return the other share: both add up to value * number modulo 2^width.

    Shapes: labels: [2, n * width]; result: uint64[n, m].

    Raises:
        ProtocolError: corrections of another length.
    """
    if len(corrections) != len(numbers) * m * corrections_bytes(width):
        raise ProtocolError("corrections of shared products have the wrong length")
    shares, at = np.zeros((len(numbers), m), dtype=np.uint64), 0
    for row, number in enumerate(numbers):
        for place in range(width):
            size = m * _n_bytes(width - place)
            pad = _pad(labels[:, row * width + place], row * width + place, m)
            if number >> place & 1:
                pad += _widened(corrections[at : at + size], m)
            shares[row] += pad << np.uint64(place)
            at += size
    return shares & _mask(width)


def corrections_bytes(width: int) -> int:
    """Return the bytes of one value's corrections."""
    return sum(_n_bytes(width - place) for place in range(width))


def _pad(label: Labels, number: int, m: int) -> NDArray[np.uint64]:
    key = hashlib.blake2b(
        label.tobytes(), digest_size=LABEL_BYTES, salt=number.to_bytes(8, "little"), person=b"product"
    )
    return np.frombuffer(_stream(key.digest()).update(bytes(8 * m)), dtype="<u8").astype(np.uint64)


def _n_bytes(width: int) -> int:
    return -(-width // 8)


def _narrow(values: NDArray[np.uint64], width: int) -> bytes:
    """Write the low bits of each value in whole bytes."""
    rows = (values & _mask(width)).astype("<u8").view(np.uint8).reshape(-1, 8)
    return rows[:, : _n_bytes(width)].tobytes()


def _widened(data: bytes, n: int) -> NDArray[np.uint64]:
    rows = np.zeros((n, 8), dtype=np.uint8)
    read = np.frombuffer(data, dtype=np.uint8).reshape(n, -1)
    rows[:, : read.shape[1]] = read
    return rows.view("<u8")[:, 0].astype(np.uint64)


def _mask(width: int) -> np.uint64:
    return np.uint64((1 << width) - 1)


def _times(curve: Curve, point: Points, scalar: int) -> Points:
    return curve.mul(point, rows_of([scalar]))


def _elements(curve: Curve, data: bytes, n: int) -> Points:
    if len(data) != n * RISTRETTO_BYTES:
        raise ProtocolError("points of oblivious transfers have the wrong length")
    return curve.from_ristretto(np.frombuffer(data, dtype=np.uint8).reshape(n, RISTRETTO_BYTES))


def _keys(curve: Curve, offer: bytes, choices: bytes, shared: Points) -> list[bytes]:
    """Hash each shared point, with its number and all that was sent."""
    said = hashlib.blake2b(offer + choices, digest_size=64).digest()
    return [
        hashlib.blake2b(
            row.tobytes() + said, digest_size=16, salt=number.to_bytes(8, "little"), person=b"transfer"
        ).digest()
        for number, row in enumerate(curve.to_ristretto(shared))
    ]


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def _columns(streams: Sequence[CipherContext], n_bytes: int) -> NDArray[np.uint8]:
    """Draw the next bytes of each stream. Shapes: result: uint8[128, n_bytes], writable."""
    zeros = bytes(n_bytes)
    return np.array([np.frombuffer(stream.update(zeros), dtype=np.uint8) for stream in streams])


def _rows(columns: NDArray[np.uint8], n: int) -> Labels:
    """Turn 128 columns of bits, the lowest first, into labels. Shapes: columns: uint8[128, ceil(n / 8)]."""
    n_bytes = columns.shape[1]
    groups = np.ascontiguousarray(columns.reshape(LABEL_BYTES, 8, n_bytes).transpose(0, 2, 1))
    squares = groups.view("<u8")[..., 0].astype(np.uint64)  # of 8 by 8 bits
    for shift, mask in _SWAPS:
        moved = (squares ^ (squares >> np.uint64(shift))) & np.uint64(mask)
        squares ^= moved ^ (moved << np.uint64(shift))
    bytes_of = squares.astype("<u8").view(np.uint8).reshape(LABEL_BYTES, 8 * n_bytes)
    words = np.ascontiguousarray(bytes_of.T).view("<u8")[:n]
    return np.ascontiguousarray(words.T).astype(np.uint64)
