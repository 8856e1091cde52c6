"""Key agreement between the sites of one job attempt, and the messages that are sealed with what it gives."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Key agreement between the sites of one job attempt: fresh X25519 keys, HKDF, transcript, confirmation.
#
# The order of the protocol is the business of ``nvflare_plugins.attempt.session``. This file holds its arithmetic:
# values in, bytes out, no state and no network. Everything that is hashed goes through ``encode_fields``, so that two
# different lists of fields can never give the same bytes.


KEY_SIZE_BYTES = 32
NONCE_SIZE_BYTES = 32

DOMAIN = "veilboost/1"
"""First field of everything that is hashed, signed or derived."""

Field = bytes | str | int

_HEAD, _INTEGER = struct.Struct("<cQ"), struct.Struct("<cQQ")


def encode_fields(*fields: Field) -> bytes:
    """Encode a list of fields so that different lists never give equal bytes.

    Each field becomes a type letter, its length as a 64-bit number and its content. Integers are unsigned 64-bit.

    Raises:
        ValueError: an integer outside [0, 2^64).
        TypeError: a field of another type.
    """
    parts: list[bytes] = []
    for field in fields:
        if isinstance(field, str):
            content = field.encode("utf-8")
            parts += (_HEAD.pack(b"s", len(content)), content)
        elif isinstance(field, int) and not isinstance(field, bool):
            if not 0 <= field < 2**64:
                raise ValueError("an integer field must lie in [0, 2^64)")
            parts.append(_INTEGER.pack(b"i", 8, field))
        elif isinstance(field, bytes):
            parts += (_HEAD.pack(b"b", len(field)), field)
        else:
            raise TypeError(f"cannot encode a field of type {type(field).__name__}")
    return b"".join(parts)


def derive_key(secret: bytes, salt: bytes, purpose: str, *context: Field, length: int = KEY_SIZE_BYTES) -> bytes:
    """Derive a key for one purpose from a secret: HKDF-SHA256 with the purpose and its context as info.

    Security: keys of different purposes, salts or contexts are computationally independent; knowing one tells
        nothing about the secret or the others.
    Reference: RFC 5869; RFC 7748 section 6.1 asks for this step after X25519.
    """
    info = encode_fields(f"{DOMAIN}/{purpose}", *context)
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=salt, info=info).derive(secret)


def extract_key(secret: bytes) -> bytes:
    """Return what ``expand_key`` derives keys from, where many are needed: the first half of HKDF-SHA256, without salt.

    Security: as secret as what it is made from.
    Reference: RFC 5869, section 2.2.
    """
    return hmac.digest(bytes(KEY_SIZE_BYTES), secret, "sha256")


def expand_key(extracted: bytes, info: bytes) -> bytes:
    """Return the key of 32 bytes that ``derive_key`` gives for a secret, no salt, and the encoded purpose and context.

    Reference: RFC 5869, section 2.3, of which 32 bytes are the first block.
    """
    return hmac.digest(extracted, info + b"\x01", "sha256")


@dataclass(frozen=True, slots=True)
class Participant:
    """What one site contributes to the transcript, by its position in the sorted list of sites.

    Attributes:
        site: name, the common name of its certificate.
        role: "site" or "unsigned site"; the transcript binds it.
        nonce: 32 fresh random bytes of this attempt.
        public_key: X25519, 32 bytes, fresh for this attempt.
        certificate_fingerprint: SHA-256 of the certificate, empty in an unsigned session.
        policy_hash: SHA-256 of what the site's own policy allows.
        protocols: lowest and highest protocol that it speaks in this job.
    """

    site: str
    role: str
    nonce: bytes
    public_key: bytes
    certificate_fingerprint: bytes
    policy_hash: bytes
    protocols: tuple[int, int]


def hash_transcript(
    job_id: str, attempt: str, binding: bytes, protocol: int, participants: Sequence[Participant]
) -> bytes:
    """Hash everything the sites must agree on before they trust each other's keys.

    Security: a server that swaps a public key, a nonce, a certificate, a name, a policy's hash, the protocols that a
        site speaks, the order of the sites, the job, the attempt or the parameters at any site gives that site another
        transcript: its signatures and confirmations then fail at the others, and theirs at it.

    Args:
        job_id: the job, as the federation names it.
        attempt: the attempt at this job; a restart has another one.
        binding: hash of parameters and profile, equal at all sites.
        protocol: the one that the sites follow.
        participants: in rank order.

    Returns:
        32 bytes; also the session id.
    """
    fields: list[Field] = [f"{DOMAIN}/transcript", job_id, attempt, binding, protocol, len(participants)]
    for rank, p in enumerate(participants):
        fields += [rank, p.site, p.role, p.nonce, p.public_key, p.certificate_fingerprint, p.policy_hash, *p.protocols]
    return hashlib.sha256(encode_fields(*fields)).digest()


class EphemeralKey:
    """An X25519 key of one job attempt. It lives in memory only and is dropped after the pair secrets are derived."""

    def __init__(self, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._private = X25519PrivateKey.from_private_bytes(randomness.bytes(KEY_SIZE_BYTES))
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def agree(self, peer_public: bytes) -> bytes:
        """Return the raw X25519 result; only ``derive_pair_secret`` may use it.

        Raises:
            ProtocolError: not a public key, or a point of small order, whose result is all zero.
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError:
            raise ProtocolError("a peer's X25519 public key is malformed or of small order") from None
        if not any(shared):
            raise ProtocolError("a peer's X25519 public key is of small order")
        return shared


def derive_pair_secret(shared: bytes, session_id: bytes, rank: int, peer: int) -> bytes:
    """Derive the secret of two sites from their X25519 result, bound to the transcript and to both ranks.

    Security: known to these two sites only. Symmetric: both orders of the ranks give the same bytes.
    """
    return derive_key(shared, session_id, "pair-secret", min(rank, peer), max(rank, peer))


def derive_group_secret(shares: Sequence[bytes], session_id: bytes) -> bytes:
    """Derive the secret that all sites share from the random shares of all, in rank order.

    Security: unknown to the server as long as one share is random and was sealed to the sites only.
    """
    return derive_key(encode_fields(*shares), session_id, "group-secret", len(shares))


def confirm_key(secret: bytes, session_id: bytes, purpose: str, sender: int, recipient: int) -> bytes:
    """Return the MAC by which ``sender`` proves to ``recipient`` that it holds ``secret`` in this session.

    Security: names the direction, so a MAC sent back to its author does not pass for the peer's.
    """
    key = derive_key(secret, session_id, "confirmation-key", purpose)
    return hmac.digest(key, encode_fields(f"{DOMAIN}/confirmation", purpose, sender, recipient), "sha256")


def check_confirmation(mac: bytes, secret: bytes, session_id: bytes, purpose: str, sender: int, recipient: int) -> None:
    """Check the MAC of ``confirm_key`` in constant time.

    Raises:
        AuthenticationError: it is not the one that the sender would send.
    """
    if not hmac.compare_digest(mac, confirm_key(secret, session_id, purpose, sender, recipient)):
        raise AuthenticationError(
            f"rank {sender} holds another {purpose} key: the messages between the sites were changed on their way"
        )


# Sealed messages between sites: authenticated encryption that the relaying server cannot open or change.
#
# FLARE's TLS ends at the server, so what only sites may read is sealed once more, end to end.


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
