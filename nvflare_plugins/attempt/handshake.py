"""The messages by which the sites of one attempt get to know each other: hello and proof.

A hello carries what a site contributes: a nonce, a fresh public key, its certificate chain. Once a site holds all
hellos, it signs their transcript; then it proves to every peer, apart, that it derived the same secret. Nothing here is
derived from rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from he_processors.errors import AuthenticationError, ConfigurationError, ProtocolError
from he_processors.key_agreement import DOMAIN, KEY_SIZE_BYTES, NONCE_SIZE_BYTES, Participant, encode_fields
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.formatting import printable
from nvflare_plugins.site.certificates import (
    Identity,
    check_site_chain,
    fingerprint,
    public_key_bytes,
    verify_signature,
)
from nvflare_plugins.wire.envelope import pack_list, unpack_list

_FORMAT = b"veilboost-hello-2"
_MAX_HELLO = 1 << 17
_MAX_CHAIN = 8
_HASH_BYTES = 32

SIGNED_ROLE = "site"
UNSIGNED_ROLE = "unsigned site"


class SessionPolicy(Protocol):
    """What the handshake asks of the site's own policy; a job or a peer cannot change it."""

    @property
    def unsigned_sessions(self) -> bool:
        """Whether peers without certificates are accepted by a site that has none."""

    @property
    def unsigned_peers(self) -> bool:
        """Whether they are accepted by a site that has one."""

    @property
    def pinned_fingerprints(self) -> Mapping[str, str]:
        """SHA-256 of the certificate, in hex, by site."""

    def fingerprint(self) -> str:
        """SHA-256, in hex, of what the policy allows."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What one site tells all others first.

    Attributes:
        site: its name.
        nonce: 32 fresh random bytes.
        public_key: X25519, fresh for this attempt.
        policy_hash: SHA-256 of what the site's own policy allows; the transcript makes the site stand by it.
        binding: hash of parameters and profile, which must be equal at all sites.
        release: version of VeilBoost.
        chain: certificates in DER form, leaf first; empty for a site that cannot sign.
    """

    site: str
    nonce: bytes
    public_key: bytes
    policy_hash: bytes
    binding: bytes
    release: str
    chain: tuple[bytes, ...]

    @classmethod
    def new(cls, identity: Identity, public_key: bytes, policy: SessionPolicy, binding: bytes) -> Hello:
        """Make this site's hello for a new attempt."""
        chain = tuple(certificate.public_bytes(Encoding.DER) for certificate in identity.chain)
        nonce = OS_RANDOMNESS.bytes(NONCE_SIZE_BYTES)
        policy_hash = bytes.fromhex(policy.fingerprint())
        return cls(identity.site, nonce, public_key, policy_hash, binding, version("veilboost"), chain)

    def pack(self) -> bytes:
        """Return the bytes that travel."""
        fixed = [_FORMAT, self.site.encode(), self.nonce, self.public_key, self.policy_hash, self.binding]
        return pack_list([*fixed, self.release.encode(), bytes([len(self.chain)]), pack_list(list(self.chain))])

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Parse a peer's hello. Raises: ProtocolError."""
        if len(data) > _MAX_HELLO:
            raise ProtocolError("a hello is too long")
        format_, site, nonce, public_key, policy_hash, binding, release, count, chain = unpack_list(data, 9)
        if format_ != _FORMAT:
            raise ProtocolError("a hello is of another version: all sites must run the same VeilBoost")
        sizes = (len(nonce), len(public_key), len(policy_hash), len(count))
        if sizes != (NONCE_SIZE_BYTES, KEY_SIZE_BYTES, _HASH_BYTES, 1) or count[0] > _MAX_CHAIN:
            raise ProtocolError("a hello is malformed")
        try:
            names = site.decode(), release.decode()
        except UnicodeDecodeError:
            raise ProtocolError("a hello is malformed") from None
        return cls(names[0], nonce, public_key, policy_hash, binding, names[1], tuple(unpack_list(chain, count[0])))


@dataclass(frozen=True, slots=True)
class Peer:
    """A site of the session, this one included, after its hello was checked."""

    hello: Hello
    certificate: x509.Certificate | None

    @property
    def participant(self) -> Participant:
        """What the transcript says of it."""
        hello = self.hello
        role, certificate = UNSIGNED_ROLE, b""
        if self.certificate is not None:
            role, certificate = SIGNED_ROLE, fingerprint(self.certificate)
        return Participant(hello.site, role, hello.nonce, hello.public_key, certificate, hello.policy_hash)


def check_hellos(
    received: Sequence[bytes], mine: Hello, rank: int, sites: Sequence[str], identity: Identity, policy: SessionPolicy
) -> list[Peer]:
    """Check the hellos of all sites, in rank order.

    Raises:
        ProtocolError: malformed, in another order, changed or doubled.
        ConfigurationError: a site runs another release or another job configuration.
        AuthenticationError: a certificate is missing or not acceptable to this site's policy.
    """
    hellos = [Hello.unpack(data) for data in received]
    if hellos[rank] != mine:
        raise ProtocolError("the server returned another hello for this site than it sent")
    for hello, site in zip(hellos, sites, strict=True):
        if hello.site != site:
            raise ProtocolError(f"a hello of another site stands in the place of {site}")
        if hello.release != mine.release:
            raise ConfigurationError(
                f"{site} runs VeilBoost {printable(hello.release, 40)} where this site runs {mine.release}: install "
                "the same version at every site"
            )
        if hello.binding != mine.binding:
            raise ConfigurationError(f"{site} was started with another job configuration than this site")
    _refuse_doubles([hello.nonce for hello in hellos], "nonce")
    _refuse_doubles([hello.public_key for hello in hellos], "public key")
    now = datetime.now(UTC)
    peers = [Peer(hello, _check_certificate(hello, identity, policy, now)) for hello in hellos]
    _refuse_doubles([public_key_bytes(p.certificate) for p in peers if p.certificate is not None], "certificate key")
    return peers


def _check_certificate(
    hello: Hello, identity: Identity, policy: SessionPolicy, now: datetime
) -> x509.Certificate | None:
    """Return the peer's certificate, or None if it has none and this site's own policy accepts that."""
    site, pinned = hello.site, policy.pinned_fingerprints.get(hello.site)
    if not hello.chain:
        key = "unsigned_peers" if identity.is_signed else "unsigned_sessions"
        if not getattr(policy, key) or pinned is not None:
            raise AuthenticationError(
                f"{site} shows no certificate, and this site's policy demands one. Policy keys: {key}, "
                f"pinned_fingerprints. Remedy: have {site} run with its startup kit."
            )
        return None
    if identity.root is None:
        raise AuthenticationError(f"{site} shows a certificate, but this site has no root to check it against")
    leaf = check_site_chain(hello.chain, site, identity.root, identity.server_names, now)
    if pinned is not None and fingerprint(leaf).hex() != pinned:
        raise AuthenticationError(f"{site} shows another certificate than the one pinned in this site's policy")
    return leaf


def handshake_statement(session_id: bytes, rank: int) -> bytes:
    """Return what a site signs to stand by the transcript."""
    return encode_fields(f"{DOMAIN}/handshake", session_id, rank)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a site sends each peer by itself, once that peer's certificate stands by the transcript.

    Attributes:
        confirmation: a MAC under the secret of the two.
        share: of the group secret, sealed under it.
    """

    confirmation: bytes
    share: bytes

    def pack(self) -> bytes:
        """Return the bytes that travel."""
        return pack_list([self.confirmation, self.share])

    @classmethod
    def unpack(cls, data: bytes) -> Proof:
        """Parse a peer's proof. Raises: ProtocolError."""
        return cls(*unpack_list(data, 2))


def check_transcript_signature(signature: bytes, peer: Peer, session_id: bytes, rank: int) -> None:
    """Check that the peer's certificate stands by the transcript. Raises: AuthenticationError."""
    if peer.certificate is not None:
        verify_signature(peer.certificate, handshake_statement(session_id, rank), signature)


def _refuse_doubles(values: Sequence[bytes], what: str) -> None:
    if len(set(values)) != len(values):
        raise ProtocolError(f"two sites show the same {what}")
