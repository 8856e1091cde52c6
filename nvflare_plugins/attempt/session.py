"""A session: what the sites of one job attempt share after they have authenticated each other and agreed."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import platform
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from he_processors import key_agreement
from he_processors.errors import AuthenticationError, ConfigurationError, ProtocolError
from he_processors.masks import PairwiseMasks
from he_processors.randomness import OS_RANDOMNESS
from he_processors.sum_tags import PairMacs, SumTags
from nvflare_plugins.base.checks import is_whole
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.data.declaration import MOST_ROWS
from nvflare_plugins.data.schema import Schema, compare
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.site.certificates import (
    Identity,
    check_site_chain,
    fingerprint,
    public_key_bytes,
    verify_signature,
)
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Floors
from nvflare_plugins.site.protocols import Span, spoken
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Codec, Kind, pack_list, unpack_list

# The messages by which the sites of one attempt get to know each other: hello and proof.
#
# A hello carries what a site contributes: a nonce, a fresh public key, its certificate chain. Once a site holds all
# hellos, it signs their transcript; then it proves to every peer, apart, that it derived the same secret. Nothing here
# is derived from rows.


_FORMAT = b"veilboost-hello-3"  # frozen: a site reads it before it knows which release the other runs
_PROTOCOLS = struct.Struct("<HH")
_PARTS = 10
_START = 4 + 8 * _PARTS  # of the first part
_MAX_HELLO = 1 << 17
_MAX_CHAIN = 8
_HASH_BYTES = 32

SIGNED_ROLE = "site"
UNSIGNED_ROLE = "unsigned site"


@dataclass(frozen=True, slots=True)
class Hello:
    """What one site tells all others first.

    Attributes:
        site: its name.
        nonce: 32 fresh random bytes.
        public_key: X25519, fresh for this attempt.
        policy_hash: SHA-256 of what the site's own policy allows; the transcript makes the site stand by it.
        binding: hash of parameters and profile, which must be equal at all sites.
        release: version of VeilBoost, for people.
        protocols: what the site speaks in jobs of this kind.
        chain: certificates in DER form, leaf first; empty for a site that cannot sign.
    """

    site: str
    nonce: bytes
    public_key: bytes
    policy_hash: bytes
    binding: bytes
    release: str
    protocols: Span
    chain: tuple[bytes, ...]

    @classmethod
    def new(cls, identity: Identity, public_key: bytes, policy: SitePolicy, kind: str, binding: bytes) -> Hello:
        """Make this site's hello for a new attempt. Raises: as ``spoken``."""
        chain = tuple(certificate.public_bytes(Encoding.DER) for certificate in identity.chain)
        nonce = OS_RANDOMNESS.bytes(key_agreement.NONCE_SIZE_BYTES)
        policy_hash = bytes.fromhex(policy.fingerprint())
        protocols = spoken(kind, policy.least_protocol)
        return cls(identity.site, nonce, public_key, policy_hash, binding, _version("veilboost"), protocols, chain)

    def pack(self) -> bytes:
        """Return the bytes that travel."""
        fixed = [_FORMAT, self.site.encode(), self.nonce, self.public_key, self.policy_hash, self.binding]
        said = [self.release.encode(), _PROTOCOLS.pack(*self.protocols)]
        return pack_list([*fixed, *said, bytes([len(self.chain)]), pack_list(list(self.chain))])

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Parse a peer's hello. Raises: ProtocolError."""
        if len(data) > _MAX_HELLO:
            raise ProtocolError("a hello is too long")
        if not data.startswith(_FORMAT, _START):
            raise ProtocolError("a hello is of no form that is known here: run VeilBoost 0.14 or newer at every site")
        format_, *parts = unpack_list(data, _PARTS)
        site, nonce, public_key, policy_hash, binding, release, protocols, count, chain = parts
        sizes = (len(nonce), len(public_key), len(policy_hash), len(protocols), len(count))
        due = (key_agreement.NONCE_SIZE_BYTES, key_agreement.KEY_SIZE_BYTES, _HASH_BYTES, _PROTOCOLS.size, 1)
        if format_ != _FORMAT or sizes != due or count[0] > _MAX_CHAIN:
            raise ProtocolError("a hello is malformed")
        span = Span(*_PROTOCOLS.unpack(protocols))
        if not 1 <= span.least <= span.most:
            raise ProtocolError("a hello is malformed")
        try:
            names = site.decode(), release.decode()
        except UnicodeDecodeError:
            raise ProtocolError("a hello is malformed") from None
        certificates = tuple(unpack_list(chain, count[0]))
        return cls(names[0], nonce, public_key, policy_hash, binding, names[1], span, certificates)


@dataclass(frozen=True, slots=True)
class Peer:
    """A site of the session, this one included, after its hello was checked."""

    hello: Hello
    certificate: x509.Certificate | None

    @property
    def participant(self) -> key_agreement.Participant:
        """What the transcript says of it."""
        hello = self.hello
        role, certificate = UNSIGNED_ROLE, b""
        if self.certificate is not None:
            role, certificate = SIGNED_ROLE, fingerprint(self.certificate)
        return key_agreement.Participant(
            hello.site, role, hello.nonce, hello.public_key, certificate, hello.policy_hash, hello.protocols
        )


def check_hellos(
    received: Sequence[bytes], mine: Hello, rank: int, sites: Sequence[str], identity: Identity, policy: SitePolicy
) -> list[Peer]:
    """Check the hellos of all sites, in rank order.

    Raises:
        ProtocolError: malformed, in another order, changed or doubled.
        ConfigurationError: a site runs another job configuration.
        AuthenticationError: a certificate is missing or not acceptable to this site's policy.
    """
    hellos = [_hello_of(site, data) for site, data in zip(sites, received, strict=True)]
    if hellos[rank] != mine:
        raise ProtocolError("the server returned another hello for this site than it sent")
    for hello, site in zip(hellos, sites, strict=True):
        if hello.site != site:
            raise ProtocolError(f"a hello of another site stands in the place of {site}")
        if hello.binding != mine.binding:
            raise ConfigurationError(f"{site} was started with another job configuration than this site")
    _refuse_doubles([hello.nonce for hello in hellos], "nonce")
    _refuse_doubles([hello.public_key for hello in hellos], "public key")
    now = datetime.now(UTC)
    peers = [Peer(hello, _check_certificate(hello, identity, policy, now)) for hello in hellos]
    _refuse_doubles([public_key_bytes(p.certificate) for p in peers if p.certificate is not None], "certificate key")
    return peers


def _hello_of(site: str, data: bytes) -> Hello:
    try:
        return Hello.unpack(data)
    except ProtocolError as error:
        raise ProtocolError(f"{site}: {error}") from None


def agreed_protocol(hellos: Sequence[Hello], kind: str) -> int:
    """Return the highest protocol that all sites speak.

    Security: each site works it out from what all have said, and the transcript covers both. A server that changes what
        a site says is noticed like one that changes a key.

    Raises:
        ConfigurationError: there is none; the message names two sites and what to do.
    """
    lacks = min(hellos, key=lambda hello: hello.protocols.most)
    asks = max(hellos, key=lambda hello: hello.protocols.least)
    if asks.protocols.least <= lacks.protocols.most:
        return lacks.protocols.most
    a, b = (f"{one.site} (VeilBoost {printable(one.release, 40)})" for one in (lacks, asks))
    raise ConfigurationError(
        f"{a} speaks protocol {lacks.protocols} of {kind} jobs, and {b} protocol {asks.protocols}: update VeilBoost at "
        f"{lacks.site}. Where the release at {asks.site} still speaks the lower one, its policy may name it. Policy "
        f"key: least_protocol.{kind}"
    )


def _check_certificate(hello: Hello, identity: Identity, policy: SitePolicy, now: datetime) -> x509.Certificate | None:
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
    return key_agreement.encode_fields(f"{key_agreement.DOMAIN}/handshake", session_id, rank)


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


def _refuse_doubles(values: Sequence[bytes], what: str) -> None:
    if len(set(values)) != len(values):
        raise ProtocolError(f"two sites show the same {what}")


# A session: what the sites of one job attempt share after they have authenticated each other.
#
# Four exchanges open it. Nothing private leaves a site before it has checked the second:
#
# 1. hello: nonce, fresh X25519 public key, certificates, hashes of the site's policy and of the job
# (``nvflare_plugins.attempt.session``); 2. signature over the transcript of all hellos; 3. proof: to each peer apart
# a MAC under the pair's secret, and a random share of the group secret, sealed to it; 4. a MAC under the group secret,
# which shows that all sites derived the same one.
#
# The server relays all of it and holds none of the keys. If it exchanges a public key for its own, the transcripts
# differ and exchange 2 fails, in an unsigned session exchange 3. What is for one peer goes to it alone: what a site
# gets grows with the number of sites, and not with its square. Keys live in memory, for one attempt; a restart opens a
# new session.


_PAIR = "pair"
_GROUP = "group"


def open_session(channel: Channel, identity: Identity, policy: SitePolicy, kind: str, binding: bytes) -> Session:
    """Authenticate all sites to each other and derive the keys of this attempt.

    Privacy: what leaves the site is public or sealed; nothing of it is derived from rows.
    Security: against a server that is curious, or that changes messages, the keys are known to the sites only,
        provided that all certificates are honest; in an unsigned session a server that changes messages can read them.

    Args:
        kind: of the job, whose protocol the sites agree on.
        binding: hash of parameters and profile, which must be equal at all sites.

    Raises:
        AuthenticationError: a peer, or this site, does not prove who it is to the satisfaction of this site's policy.
        ConfigurationError: a peer runs another job configuration, or there is no protocol that all sites speak.
        PolicyRefusal: this site's policy asks for a higher protocol than its release speaks.
        ProtocolError: malformed, changed, doubled or misplaced messages.
    """
    if identity.site != channel.site:
        raise AuthenticationError(f"the certificate of this site names {identity.site}, FLARE calls it {channel.site}")
    if not identity.is_signed and not policy.unsigned_sessions:
        raise AuthenticationError("this site has no certificate, and its policy (unsigned_sessions) demands one")
    key = key_agreement.EphemeralKey()
    mine = Hello.new(identity, key.public, policy, kind, binding)
    received = channel.gather(Kind.HANDSHAKE, mine.pack(), Codec.PUBLIC)
    peers = check_hellos(received, mine, channel.rank, channel.sites, identity, policy)
    protocol = agreed_protocol([peer.hello for peer in peers], kind)
    participants = [peer.participant for peer in peers]
    session_id = key_agreement.hash_transcript(channel.job_id, channel.attempt, binding, protocol, participants)
    pair_secrets = {
        rank: key_agreement.derive_pair_secret(key.agree(peer.hello.public_key), session_id, channel.rank, rank)
        for rank, peer in enumerate(peers)
        if rank != channel.rank
    }
    _exchange_signatures(channel, identity, peers, session_id)
    boxes = _PairBoxes(channel.rank, session_id, pair_secrets)
    group_secret = _agree_group_secret(channel, session_id, pair_secrets, boxes)
    return Session(channel, identity, peers, session_id, binding, pair_secrets, group_secret, boxes)


def _exchange_signatures(channel: Channel, identity: Identity, peers: list[Peer], session_id: bytes) -> None:
    signature = identity.sign(handshake_statement(session_id, channel.rank)) if identity.is_signed else b""
    received = channel.gather(Kind.HANDSHAKE, signature, Codec.PUBLIC)
    for rank, peer in enumerate(peers):
        if rank != channel.rank:
            with _of_site(channel.sites[rank]):
                if peer.certificate is not None:
                    verify_signature(peer.certificate, handshake_statement(session_id, rank), received[rank])


def _agree_group_secret(
    channel: Channel, session_id: bytes, pair_secrets: Mapping[int, bytes], boxes: _PairBoxes
) -> bytes:
    me, own = channel.rank, OS_RANDOMNESS.bytes(key_agreement.KEY_SIZE_BYTES)
    parts, shares = [b""] * channel.world, [own] * channel.world
    for peer, secret in pair_secrets.items():
        confirmation = key_agreement.confirm_key(secret, session_id, _PAIR, me, peer)
        parts[peer] = Proof(confirmation, boxes.seal(peer, own, _GROUP)).pack()
    received = channel.route(Kind.GROUP_KEY, parts)
    for peer, secret in pair_secrets.items():
        proof = Proof.unpack(received[peer])
        with _of_site(channel.sites[peer]):
            key_agreement.check_confirmation(proof.confirmation, secret, session_id, _PAIR, peer, me)
        shares[peer] = boxes.open(peer, proof.share, _GROUP)
    if any(len(share) != key_agreement.KEY_SIZE_BYTES for share in shares):
        raise ProtocolError("a peer's share of the group key has another length")
    secret = key_agreement.derive_group_secret(shares, session_id)
    # Addressed to the group, whose "rank" is one past the last site's.
    mac = key_agreement.confirm_key(secret, session_id, _GROUP, me, channel.world)
    macs = channel.gather(Kind.HANDSHAKE, mac, Codec.PUBLIC)
    for rank in range(channel.world):
        key_agreement.check_confirmation(macs[rank], secret, session_id, _GROUP, rank, channel.world)
    return secret


@contextlib.contextmanager
def _of_site(site: str) -> Iterator[None]:
    """Name the site that does not prove who it is."""
    try:
        yield
    except AuthenticationError as error:
        raise AuthenticationError(f"{site} does not prove who it is: {error}") from None


class _PairBoxes:
    """Sealed boxes between this site and each peer, one per direction."""

    def __init__(self, rank: int, session_id: bytes, pair_secrets: Mapping[int, bytes]) -> None:
        self._to = {peer: key_agreement.SealedBox(s, session_id, rank, peer) for peer, s in pair_secrets.items()}
        self._from = {peer: key_agreement.SealedBox(s, session_id, peer, rank) for peer, s in pair_secrets.items()}

    def seal(self, recipient: int, plaintext: bytes, purpose: str) -> bytes:
        """Seal a message to one peer."""
        return self._to[recipient].seal(plaintext, purpose.encode())

    def open(self, sender: int, sealed: bytes, purpose: str) -> bytes:
        """Open a message of one peer to this site. Raises: ProtocolError, AuthenticationError."""
        return self._from[sender].open(sealed, purpose.encode())


class Session:
    """Keys and facts of one open session. ``close`` forgets the keys; nothing works after it.

    Attributes:
        session_id: hash of the transcript, 32 bytes, public.
        site, sites, rank, world: as the channel's.
        signed: every site, this one included, has signed the transcript.
        protocol: the highest that all sites speak; what follows is of it.
        protocols: what each site speaks.
        pair_secrets: by peer's rank.
        group_secret: known to all sites, not to the server.
        masks: this session's masks.
        tags: makes and checks the tags of its sums.
        macs: makes and checks the MACs of what its sites give to all.
        certificate_fingerprints: hex SHA-256 by site; sites without certificate are absent.
    """

    def __init__(
        self,
        channel: Channel,
        identity: Identity,
        peers: list[Peer],
        session_id: bytes,
        binding: bytes,
        pair_secrets: dict[int, bytes],
        group_secret: bytes,
        boxes: _PairBoxes,
    ) -> None:
        self.session_id = session_id
        self.site, self.sites, self.rank, self.world = channel.site, channel.sites, channel.rank, channel.world
        self.signed = all(peer.certificate is not None for peer in peers)
        self.protocols = {peer.hello.site: peer.hello.protocols for peer in peers}
        self.protocol = min(span.most for span in self.protocols.values())
        self.pair_secrets, self.group_secret = pair_secrets, group_secret
        self.masks = PairwiseMasks(session_id, channel.rank, pair_secrets, group_secret)
        self.tags = SumTags(session_id, channel.rank, pair_secrets, group_secret)
        self.macs = PairMacs(session_id, channel.rank, pair_secrets)
        self.certificate_fingerprints = {
            peer.hello.site: fingerprint(peer.certificate).hex() for peer in peers if peer.certificate is not None
        }
        self._channel, self._identity, self._peers = channel, identity, peers
        self._binding, self._boxes = binding, boxes
        self._to_all = key_agreement.SealedBox(group_secret, session_id, channel.rank, None)
        self._from = [key_agreement.SealedBox(group_secret, session_id, rank, None) for rank in range(channel.world)]
        self._is_open = True

    def seal_to_all(self, plaintext: bytes, purpose: str) -> bytes:
        """Seal a message that every site, and no one else, can open."""
        self._require_open()
        return self._to_all.seal(plaintext, purpose.encode())

    def open_from(self, rank: int, sealed: bytes, purpose: str) -> bytes:
        """Open what the site of ``rank`` (possibly this one) sealed to all for the same purpose.

        Raises:
            ProtocolError: malformed, replayed or out of order.
            AuthenticationError: changed, of another sender or for another purpose.
        """
        self._require_open()
        return self._from[rank].open(sealed, purpose.encode())

    def seal_for(self, rank: int, plaintext: bytes, purpose: str) -> bytes:
        """Seal a message that only the site of ``rank`` can open."""
        self._require_open()
        return self._boxes.seal(rank, plaintext, purpose)

    def open_of(self, rank: int, sealed: bytes, purpose: str) -> bytes:
        """Open what the site of ``rank`` sealed for this one for the same purpose.

        Raises:
            ProtocolError: malformed, replayed or out of order.
            AuthenticationError: changed, of another sender, for another recipient or for another purpose.
        """
        self._require_open()
        return self._boxes.open(rank, sealed, purpose)

    def share_secret(self, secret: bytes | None) -> bytes:
        """Hand a secret of rank 0, such as a homomorphic key, to every site; all sites call this at the same point.

        Security: sealed to each peer apart, under the pair's secret.

        Args:
            secret: the secret at rank 0, None elsewhere.

        Returns:
            The secret.

        Raises:
            ProtocolError: a message that is none of a secret.
            AuthenticationError: it was not sealed by rank 0 for this site.
        """
        self._require_open()
        if (secret is None) == (self.rank == 0):
            raise ValueError("exactly rank 0 gives the secret")
        purpose = "shared secret"
        if secret is None:
            parts = unpack_list(self._channel.broadcast(Kind.HE_SECRET, None, Codec.SEALED), self.world)
            return self._boxes.open(0, parts[self.rank], purpose)
        parts = [b"" if rank == self.rank else self._boxes.seal(rank, secret, purpose) for rank in range(self.world)]
        self._channel.broadcast(Kind.HE_SECRET, pack_list(parts), Codec.SEALED)
        return secret

    def hmac(self, purpose: str, data: bytes) -> bytes:
        """Return an HMAC-SHA256 under the group key, which the server can neither make nor test guesses with.

        Security: keyed per session and purpose, so hashes of the same data in different jobs cannot be linked.
        """
        self._require_open()
        key = key_agreement.derive_key(self.group_secret, self.session_id, "hmac", purpose)
        return hmac.digest(key, data, "sha256")

    def sign(self, data: bytes) -> bytes | None:
        """Sign data of this session with the site's certificate; None for a site that cannot sign."""
        self._require_open()
        return self._identity.sign(self._statement(data)) if self._identity.is_signed else None

    def verify(self, rank: int, data: bytes, signature: bytes | None) -> None:
        """Check what the site of ``rank`` got from ``sign``.

        Raises:
            AuthenticationError: a missing signature passes only from a site that entered unsigned, which this site's
                own policy has accepted.
        """
        certificate = self._peers[rank].certificate
        if certificate is None:
            if signature is not None:
                raise AuthenticationError(f"{self.sites[rank]} has no certificate to sign with")
            return
        if signature is None:
            raise AuthenticationError(f"a signature of {self.sites[rank]} is missing")
        verify_signature(certificate, self._statement(data), signature)

    def head_verifier(self) -> Callable[[str, bytes, bytes], None] | None:
        """Return a check of (site, statement, signature) for evidence; None in an unsigned session."""
        if not self.signed:
            return None
        certificates = {peer.hello.site: peer.certificate for peer in self._peers}

        def verify(site: str, statement: bytes, signature: bytes) -> None:
            certificate = certificates.get(site)
            if certificate is None:
                raise AuthenticationError(f"no certificate of {site[:80]} belongs to this session")
            verify_signature(certificate, statement, signature)

        return verify

    def evidence_facts(self) -> dict[str, Any]:
        """Return what the evidence log records of the session, by the names of ``EvidenceLog.session``."""
        hellos = [peer.hello for peer in self._peers]
        return {
            "sites": self.sites,
            "signed": self.signed,
            "public_key_fingerprints": {h.site: hashlib.sha256(h.public_key).hexdigest() for h in hellos},
            "certificate_fingerprints": dict(self.certificate_fingerprints),
            "parameters_hash": self._binding.hex(),
            "certificate": self._identity.chain_pem.decode() if self.signed else None,
            "signer": self._identity.sign if self.signed else None,
        }

    def close(self) -> None:
        """Forget all keys. Python cannot overwrite them; the last references go."""
        self._is_open = False
        self.masks.close()
        self.tags.close()
        self.macs.close()
        self.pair_secrets = {}
        self.group_secret = b""
        del self._boxes, self._to_all, self._from

    def _statement(self, data: bytes) -> bytes:
        return key_agreement.encode_fields(f"{key_agreement.DOMAIN}/statement", self.session_id, data)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ProtocolError("the session is closed: its keys are gone")


def tell_all(
    channel: Channel, session: Session, content: bytes, purpose: str, kind: Kind = Kind.AGREEMENT
) -> list[bytes]:
    """Give content to all sites, sealed under the group key; return that of all, in rank order."""
    sealed = channel.gather(kind, session.seal_to_all(content, purpose), Codec.SEALED)
    return [
        content if rank == channel.rank else session.open_from(rank, part, purpose) for rank, part in enumerate(sealed)
    ]


# What all sites must have equal before anything private is sent, compared under the group key.
#
# The server relays sealed documents and learns sizes only.


PLUGIN = "plugin"  # among the versions: distribution and version of the plugin that protects the sums, or ""
ARITHMETIC = "arithmetic"  # among the versions: of trees that the sites grow themselves, whatever XGBoost each has
_PURPOSE = "agreement"
_MAX_DOCUMENT = 1 << 24


def versions() -> dict[str, str]:
    """Return the versions that every site reports. Releases of VeilBoost may differ: sites agree on a protocol."""
    names = ("xgboost", "veilboost", "nvflare", "numpy", "tenseal")
    return {**{name: _version(name) for name in names}, "python": platform.python_version()}


@cache
def _version(name: str) -> str:
    """Return the version of a distribution as it was first asked for: reading it parses all that its author says."""
    return version(name)


@dataclass(frozen=True, slots=True)
class Terms:
    """One site's terms.

    Attributes:
        versions: see ``versions``.
        job: the job as JSON values.
        parameters: checked XGBoost parameters as JSON values.
        schema: columns, types, categories, label.
        start: what training starts from: keyed hash of an initial model, where there is one.
        checkpoints: keyed hash of each checkpoint to go on from, with the cuts beside it, by number of finished rounds.
        floors: the least that the site's policy asks for.
    """

    versions: Mapping[str, str]
    job: Mapping[str, Any]
    parameters: Mapping[str, Any]
    schema: Schema
    start: Mapping[str, str]
    checkpoints: Mapping[str, str]
    floors: Floors = Floors(0, 0, 0)

    def to_bytes(self) -> bytes:
        """Return a canonical encoding."""
        parts = (self.versions, self.job, self.parameters, self.start, self.checkpoints, asdict(self.floors))
        return pack_list([*(json.dumps(part, sort_keys=True).encode() for part in parts), self.schema.to_bytes()])

    @classmethod
    def from_bytes(cls, data: bytes) -> Terms:
        """Parse a peer's terms. Raises: ProtocolError."""
        if len(data) > _MAX_DOCUMENT:
            raise ProtocolError("a peer's terms are too long")
        *documents, schema = unpack_list(data, 7)
        try:
            parsed = [json.loads(document) for document in documents]
        except (ValueError, RecursionError):
            raise ProtocolError("a peer's terms are not valid JSON") from None
        if not all(isinstance(part, dict) for part in parsed):
            raise ProtocolError("a peer's terms are not of the expected form")
        found_versions, job, parameters, start, checkpoints, floors = parsed
        known = {f.name for f in fields(Floors)}
        if set(floors) != known or not all(is_whole(value, 0) and value <= MOST_ROWS for value in floors.values()):
            raise ProtocolError("a peer's terms are not of the expected form")
        return cls(found_versions, job, parameters, Schema.from_bytes(schema), start, checkpoints, Floors(**floors))


class Agreed(NamedTuple):
    """What follows from the terms of all sites.

    Attributes:
        n_done: finished rounds of the latest checkpoint that all sites hold alike; 0 if there is none.
        floors: the least that any site's policy asks for, which is the largest of all.
        arithmetic: the lowest that any site named; "" where XGBoost grows the trees.
    """

    n_done: int
    floors: Floors
    arithmetic: str


def agree(channel: Channel, session: Session, mine: Terms) -> Agreed:
    """Compare the terms of all sites.

    Raises:
        ConfigurationError: a difference, named.
    """
    sealed = channel.gather(Kind.AGREEMENT, session.seal_to_all(mine.to_bytes(), _PURPOSE), Codec.SEALED)
    mine = Terms.from_bytes(mine.to_bytes())  # as the peers see it: JSON knows no tuples
    common, floors, arithmetic = dict(mine.checkpoints), mine.floors, mine.versions.get(ARITHMETIC, "")
    for rank, site in enumerate(channel.sites):
        if rank == channel.rank:
            continue
        theirs = Terms.from_bytes(session.open_from(rank, sealed[rank], _PURPOSE))
        compare_versions(mine.versions, theirs.versions, site)
        compare_documents("the job", mine.job, theirs.job, site)
        compare_documents("the parameters", mine.parameters, theirs.parameters, site)
        compare(mine.schema, theirs.schema, site)
        compare_documents("the starting point", mine.start, theirs.start, site)
        floors = floors.largest(theirs.floors)
        arithmetic = lower_arithmetic(arithmetic, theirs.versions.get(ARITHMETIC, ""))
        common = {n: h for n, h in common.items() if theirs.checkpoints.get(n) == h}
    return Agreed(max((int(n) for n in common if n.isdigit()), default=0), floors, arithmetic)


def lower_arithmetic(one: str, other: str) -> str:
    """Return the earlier of two arithmetics."""
    return min(one, other, key=lambda name: tuple(int(part) for part in name.split(".") if part))


def compare_versions(mine: Mapping[str, str], theirs: Mapping[str, Any], site: str) -> None:
    """Refuse a peer that runs another XGBoost or plugin. Raises: ConfigurationError.

    Where the sites grow the trees themselves their XGBoosts may differ, and each names the arithmetic of its own.
    """
    is_grown = ARITHMETIC in mine
    if is_grown and theirs.get(ARITHMETIC) not in tuple(ARITHMETICS):
        raise ConfigurationError(
            f"{site} would grow trees in no arithmetic that is known here ({', '.join(ARITHMETICS)}): install an "
            "XGBoost there that this site knows"
        )
    for name in (*(() if is_grown else ("xgboost",)), *({PLUGIN} & set(mine))):
        if theirs.get(name) != mine[name]:
            raise ConfigurationError(
                f"{site} runs {name} {_shown(theirs.get(name))} where this site runs {mine[name]}: install the same "
                "version at every site"
            )


def _shown(version: object) -> str:
    """Return what a peer calls its version, short and without anything that could steer a terminal or forge a line."""
    return printable(version[:40]) if isinstance(version, str) else "of no known version"


def compare_documents(what: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], site: str) -> None:
    """Refuse a peer whose document differs; the first difference is named. Raises: ConfigurationError."""
    for name in sorted(set(mine) | set(theirs)):
        if mine.get(name) != theirs.get(name):
            raise ConfigurationError(f"{site} has another value of {str(name)[:80]!r} in {what} than this site")
