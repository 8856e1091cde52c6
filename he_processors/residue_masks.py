"""Pairwise masks modulo p = 2^61 - 1 for the few words that travel with every sum: its tags, and flags.

As masks.py: for every pair of sites i < j both derive the same keystream, site i adds it, site j subtracts it, and
one site adds a keystream of the key that all share, which every site takes off the total. What is masked is short and
comes with every message, so that setting up a cipher for each message and pair would be most of the cost: here a pair
has one AES-256 key for the whole session, and the block for residue k of message c is the encryption of (c, k).
Messages are numbered by the session's never-reset counter, so no block is used twice. A block of 128 bits, taken
modulo p, is uniform up to 2^-67.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.field61 import MODULUS
from he_processors.key_agreement import KEY_SIZE_BYTES, derive_key

_BLINDER = 0
_BLOCK = struct.Struct("<QQ")


class ResidueMasks:
    """Masks the residues of one site and unblinds their sums, for one session.

    Security: as ``PairwiseMasks``, modulo p. A counter masks once.
    """

    def __init__(self, session_id: bytes, rank: int, pair_secrets: Mapping[int, bytes], group_secret: bytes) -> None:
        """Prepare the keys of a session; arguments as of ``PairwiseMasks``. Raises: ValueError."""
        if set(pair_secrets) | {rank} != set(range(len(pair_secrets) + 1)):
            raise ValueError("pair_secrets must hold exactly the other ranks of the session")
        if not session_id or any(len(s) != KEY_SIZE_BYTES for s in (*pair_secrets.values(), group_secret)):
            raise ValueError(f"a session id and secrets of {KEY_SIZE_BYTES} bytes are required")
        self._rank, self._last_counter = rank, -1
        self._pairs = {
            peer: _cipher(derive_key(secret, session_id, "residues/pair", min(rank, peer), max(rank, peer)))
            for peer, secret in sorted(pair_secrets.items())
        }
        self._group: CipherContext | None = _cipher(derive_key(group_secret, session_id, "residues/group"))

    def mask(self, residues: NDArray[np.uint64], counter: int) -> NDArray[np.uint64]:
        """Return the residues plus this site's masks for a message.

        Shapes: residues: uint64[k], each below p; result: uint64[k], each below p.

        Raises:
            ProtocolError: the counter was passed already, or the session is closed.
        """
        group = self._open_group()
        if counter <= self._last_counter:
            raise ProtocolError(f"counter {counter} was passed already: a message is masked only once")
        self._last_counter = counter
        blocks, masked = _blocks(counter, residues.size), residues.tolist()
        for peer, cipher in self._pairs.items():
            masked = _added(masked, _stream(cipher, blocks), -1 if peer < self._rank else 1)
        if self._rank == _BLINDER:
            masked = _added(masked, _stream(group, blocks), 1)
        return _residues(masked)

    def unblind(self, total: NDArray[np.uint64], counter: int) -> NDArray[np.uint64]:
        """Return the sum over all sites from the total that came back. Shapes: total, result: uint64[k], below p.

        Raises:
            ProtocolError: this message has not been masked here, or the session is closed.
        """
        group = self._open_group()
        if counter > self._last_counter:
            raise ProtocolError(f"counter {counter} has not been masked by this site yet")
        return _residues(_added(total.tolist(), _stream(group, _blocks(counter, total.size)), -1))

    def close(self) -> None:
        """Forget all keys; every later call fails."""
        self._pairs.clear()
        self._group = None

    def _open_group(self) -> CipherContext:
        if self._group is None:
            raise ProtocolError("the session of these masks is closed: its keys are gone")
        return self._group


def _cipher(key: bytes) -> CipherContext:
    # Block by block: the blocks that are encrypted are numbers which never come again, as in counter mode.
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305


def _blocks(counter: int, n: int) -> bytes:
    return b"".join(_BLOCK.pack(counter, number) for number in range(n))


def _stream(cipher: CipherContext, blocks: bytes) -> list[int]:
    """Return a number of 128 bits for each block, which the caller takes modulo p."""
    data = cipher.update(blocks)
    return [int.from_bytes(data[i : i + _BLOCK.size], "little") for i in range(0, len(data), _BLOCK.size)]


def _added(numbers: list[int], more: list[int], sign: int) -> list[int]:
    return [number + sign * one for number, one in zip(numbers, more, strict=True)]


def _residues(numbers: list[int]) -> NDArray[np.uint64]:
    return np.array([number % MODULUS for number in numbers], dtype=np.uint64)
