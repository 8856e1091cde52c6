"""Commitments to wire bytes: the hash by which evidence names a payload."""

from __future__ import annotations

import hashlib

SALT_BYTES = 16
UNSALTED_CODECS = frozenset({"PUBLIC", "SEALED"})
"""Codecs of which a hash tells nobody more than he has; every other payload is committed to with a salt.

PUBLIC holds nothing of a row. SEALED is authenticated encryption under a fresh key and nonce: who lacks the key cannot
compute the bytes of a guess, who has it reads the content anyway. The others are guessable by somebody who sees
evidence but not the payload: sums in clear (PLAIN) by anyone; masked sums (MASKED) by those who know the masks, which
are the W - 1 other sites together, or the only other one. Where the sites receive exact sums they could subtract their
own parts anyway; where a trusted server adds noise they could not, and an unsalted hash would show them the exact sums.
BFV and CKKS bring randomness of their own; one rule for all sums is easier to check.
"""
_PAYLOAD_DOMAIN = b"veilboost evidence payload v1\0"


class Commitment:
    """The SHA-256 that stands for wire bytes in a log, of bytes that may come in pieces. Its length is theirs.

    Privacy: with 16 random bytes that only the payload's sender and its receivers know, the result tells nobody else
        anything, whatever he guesses (SHA-256 taken for a random function): each of 2^128 salts makes every payload as
        likely as any other. Salts travel in the frame and never in evidence.
    """

    def __init__(self, salt: bytes = b"", payload: bytes | memoryview = b"") -> None:
        self.salt = salt
        self._digest = hashlib.sha256(_PAYLOAD_DOMAIN + bytes([len(salt)]) + salt)
        self._size = 0
        self.update(payload)

    def update(self, piece: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._digest.update(piece)
        self._size += len(piece)

    def __len__(self) -> int:
        return self._size

    def hexdigest(self) -> str:
        """Return the hash of the bytes so far."""
        return self._digest.hexdigest()


def commitment(payload: bytes, salt: bytes = b"") -> str:
    """Return the hex SHA-256 that stands for wire bytes in a log (see ``Commitment``)."""
    return Commitment(salt, payload).hexdigest()
