"""Sealed messages between sites: authenticated encryption that the relaying server cannot open or change.

FLARE's TLS ends at the server, so what only sites may read is sealed once more, end to end.
"""

from __future__ import annotations

import os
import struct
import threading

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.key_agreement import derive_key, encode_fields

_HEADER = struct.Struct("<4sBQ")  # magic, version, counter
_MAGIC = b"VLSB"
_VERSION = 1
_TAG_BYTES = 16

SEALED_OVERHEAD_BYTES = _HEADER.size + _TAG_BYTES


class SealedBox:
    """One direction of sealed messages: from one site to another, or from one site to all.

    The sender keeps one object to seal with, each recipient one to open with.

    Security: AES-256-GCM under a key of this direction and session only; the nonce is a counter, so it never repeats
        under a key: threads take it one after the other, and a forked process may not. Header and associated data are
        authenticated. A message that is replayed, reordered, changed, sent back to its author, or sealed in another
        direction or session does not open. Sizes are not hidden.
    """

    def __init__(self, secret: bytes, session_id: bytes, sender: int, recipient: int | None) -> None:
        """Derive the key of the direction.

        Args:
            secret: the pair's secret, or the group's.
            session_id: of the job attempt.
            sender: rank of the site that seals.
            recipient: rank of the site that opens; None for all sites, under the group's secret.
        """
        direction = ("group", sender) if recipient is None else ("pair", sender, recipient)
        self._cipher = AESGCM(derive_key(secret, session_id, "sealing", *direction))
        self._next_counter, self._counting, self._process_id = 0, threading.Lock(), os.getpid()

    def seal(self, plaintext: bytes, associated_data: bytes = b"") -> bytes:
        """Encrypt a message; the result is ``SEALED_OVERHEAD_BYTES`` longer.

        Security: a retry must resend these bytes: sealing again gives another message.

        Raises:
            ProtocolError: in a process that was forked from the one that made this box.
        """
        if os.getpid() != self._process_id:
            raise ProtocolError("a forked process may not seal: its parent uses the same counters")
        with self._counting:
            counter = self._next_counter
            self._next_counter += 1
        header = _HEADER.pack(_MAGIC, _VERSION, counter)
        return header + self._cipher.encrypt(_nonce(counter), plaintext, encode_fields(header, associated_data))

    def open(self, sealed: bytes, associated_data: bytes = b"") -> bytes:
        """Decrypt a message whose counter is higher than that of any message opened before.

        Raises:
            ProtocolError: malformed, replayed or out of order.
            AuthenticationError: changed, or sealed for something else.
        """
        if len(sealed) < SEALED_OVERHEAD_BYTES:
            raise ProtocolError(f"sealed message of {len(sealed)} bytes is too short")
        magic, version, counter = _HEADER.unpack_from(sealed)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ProtocolError("not a sealed message of this version of VeilBoost")
        header = sealed[: _HEADER.size]
        with self._counting:
            due = self._next_counter
            if counter < due:
                raise ProtocolError(f"sealed message {counter} where {due} is due: replayed or out of order")
            try:
                plaintext = self._cipher.decrypt(
                    _nonce(counter), sealed[_HEADER.size :], encode_fields(header, associated_data)
                )
            except InvalidTag:
                raise AuthenticationError(
                    "a sealed message does not open: changed, or meant for another place"
                ) from None
            self._next_counter = counter + 1
        return plaintext


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "little")
