"""A session: what the sites of one job attempt share after they have authenticated each other.

Four exchanges open it. Nothing private leaves a site before it has checked the second:

1. hello: nonce, fresh X25519 public key, certificates, hashes of the site's policy and of the job
   (``nvflare_plugins.attempt.handshake``);
2. signature over the transcript of all hellos;
3. proof: to each peer apart a MAC under the pair's secret, and a random share of the group secret, sealed to it;
4. a MAC under the group secret, which shows that all sites derived the same one.

The server relays all of it and holds none of the keys. If it exchanges a public key for its own, the transcripts differ
and exchange 2 fails, in an unsigned session exchange 3. What is for one peer goes to it alone: what a site gets grows
with the number of sites, and not with its square. Keys live in memory, for one attempt; a restart opens a new session.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.key_agreement import (
    DOMAIN,
    KEY_SIZE_BYTES,
    EphemeralKey,
    check_confirmation,
    confirm_key,
    derive_group_secret,
    derive_key,
    derive_pair_secret,
    encode_fields,
    hash_transcript,
)
from he_processors.masks import PairwiseMasks
from he_processors.pair_macs import PairMacs
from he_processors.randomness import OS_RANDOMNESS
from he_processors.sealing import SealedBox
from he_processors.sum_tags import SumTags
from nvflare_plugins.attempt.handshake import (
    Hello,
    Peer,
    Proof,
    SessionPolicy,
    check_hellos,
    check_transcript_signature,
    handshake_statement,
)
from nvflare_plugins.site.certificates import Identity, fingerprint, verify_signature
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.envelope import Codec, pack_list, unpack_list

_PAIR = "pair"
_GROUP = "group"


class SessionChannel(Protocol):
    """What a session needs of ``nvflare_plugins.wire.channel.Channel``."""

    site: str
    sites: tuple[str, ...]
    rank: int
    world: int
    job_id: str
    attempt: str

    def gather(self, kind: Kind, payload: bytes, codec: Codec = ...) -> list[bytes]: ...

    def broadcast(self, kind: Kind, payload: bytes | None, codec: Codec = ...) -> bytes: ...

    def route(self, kind: Kind, parts: Sequence[bytes]) -> list[bytes]: ...


def open_session(channel: SessionChannel, identity: Identity, policy: SessionPolicy, binding: bytes) -> Session:
    """Authenticate all sites to each other and derive the keys of this attempt.

    Privacy: what leaves the site is public or sealed; nothing of it is derived from rows.
    Security: against a server that is curious, or that changes messages, the keys are known to the sites only,
        provided that all certificates are honest; in an unsigned session a server that changes messages can read them.

    Args:
        binding: hash of parameters and profile, which must be equal at all sites.

    Raises:
        AuthenticationError: a peer, or this site, does not prove who it is to the satisfaction of this site's policy.
        ConfigurationError: a peer runs another release or job configuration.
        ProtocolError: malformed, changed, doubled or misplaced messages.
    """
    if identity.site != channel.site:
        raise AuthenticationError(f"the certificate of this site names {identity.site}, FLARE calls it {channel.site}")
    if not identity.is_signed and not policy.unsigned_sessions:
        raise AuthenticationError("this site has no certificate, and its policy (unsigned_sessions) demands one")
    key = EphemeralKey()
    mine = Hello.new(identity, key.public, policy, binding)
    received = channel.gather(Kind.HANDSHAKE, mine.pack(), Codec.PUBLIC)
    peers = check_hellos(received, mine, channel.rank, channel.sites, identity, policy)
    session_id = hash_transcript(channel.job_id, channel.attempt, binding, [peer.participant for peer in peers])
    pair_secrets = {
        rank: derive_pair_secret(key.agree(peer.hello.public_key), session_id, channel.rank, rank)
        for rank, peer in enumerate(peers)
        if rank != channel.rank
    }
    _exchange_signatures(channel, identity, peers, session_id)
    boxes = _PairBoxes(channel.rank, session_id, pair_secrets)
    group_secret = _agree_group_secret(channel, session_id, pair_secrets, boxes)
    return Session(channel, identity, peers, session_id, binding, pair_secrets, group_secret, boxes)


def _exchange_signatures(channel: SessionChannel, identity: Identity, peers: list[Peer], session_id: bytes) -> None:
    signature = identity.sign(handshake_statement(session_id, channel.rank)) if identity.is_signed else b""
    received = channel.gather(Kind.HANDSHAKE, signature, Codec.PUBLIC)
    for rank in range(channel.world):
        if rank != channel.rank:
            with _of_site(channel.sites[rank]):
                check_transcript_signature(received[rank], peers[rank], session_id, rank)


def _agree_group_secret(
    channel: SessionChannel, session_id: bytes, pair_secrets: Mapping[int, bytes], boxes: _PairBoxes
) -> bytes:
    me, own = channel.rank, OS_RANDOMNESS.bytes(KEY_SIZE_BYTES)
    parts, shares = [b""] * channel.world, [own] * channel.world
    for peer, secret in pair_secrets.items():
        confirmation = confirm_key(secret, session_id, _PAIR, me, peer)
        parts[peer] = Proof(confirmation, boxes.seal(peer, own, _GROUP)).pack()
    received = channel.route(Kind.GROUP_KEY, parts)
    for peer, secret in pair_secrets.items():
        proof = Proof.unpack(received[peer])
        with _of_site(channel.sites[peer]):
            check_confirmation(proof.confirmation, secret, session_id, _PAIR, peer, me)
        shares[peer] = boxes.open(peer, proof.share, _GROUP)
    if any(len(share) != KEY_SIZE_BYTES for share in shares):
        raise ProtocolError("a peer's share of the group key has another length")
    secret = derive_group_secret(shares, session_id)
    # Addressed to the group, whose "rank" is one past the last site's.
    mac = confirm_key(secret, session_id, _GROUP, me, channel.world)
    macs = channel.gather(Kind.HANDSHAKE, mac, Codec.PUBLIC)
    for rank in range(channel.world):
        check_confirmation(macs[rank], secret, session_id, _GROUP, rank, channel.world)
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
        self._rank = rank
        self._to = {peer: SealedBox(s, session_id, rank, peer) for peer, s in pair_secrets.items()}
        self._from = {peer: SealedBox(s, session_id, peer, rank) for peer, s in pair_secrets.items()}

    def seal_to_each(self, plaintext: bytes, purpose: str) -> bytes:
        """Return one message that holds the plaintext sealed to every peer apart; this site's own part is empty."""
        parts = [
            b"" if rank == self._rank else self.seal(rank, plaintext, purpose) for rank in range(len(self._to) + 1)
        ]
        return pack_list(parts)

    def open_own_part(self, sender: int, message: bytes, purpose: str) -> bytes:
        """Open this site's part of what ``sender`` sealed to each. Raises: ProtocolError, AuthenticationError."""
        return self.open(sender, unpack_list(message, len(self._to) + 1)[self._rank], purpose)

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
        pair_secrets: by peer's rank.
        group_secret: known to all sites, not to the server.
        masks: this session's masks.
        tags: makes and checks the tags of its sums.
        macs: makes and checks the MACs of what its sites give to all.
        certificate_fingerprints: hex SHA-256 by site; sites without certificate are absent.
    """

    def __init__(
        self,
        channel: SessionChannel,
        identity: Identity,
        peers: list[Peer],
        session_id: bytes,
        binding: bytes,
        pair_secrets: dict[int, bytes],
        group_secret: bytes,
        boxes: _PairBoxes,
    ) -> None:
        self.session_id = session_id
        self.site = channel.site
        self.sites = channel.sites
        self.rank = channel.rank
        self.world = channel.world
        self.signed = all(peer.certificate is not None for peer in peers)
        self.pair_secrets = pair_secrets
        self.group_secret = group_secret
        self.masks = PairwiseMasks(session_id, channel.rank, pair_secrets, group_secret)
        self.tags = SumTags(session_id, channel.rank, pair_secrets, group_secret)
        self.macs = PairMacs(session_id, channel.rank, pair_secrets)
        self.certificate_fingerprints = {
            peer.hello.site: fingerprint(peer.certificate).hex() for peer in peers if peer.certificate is not None
        }
        self._channel = channel
        self._identity = identity
        self._peers = peers
        self._binding = binding
        self._boxes = boxes
        self._to_all = SealedBox(group_secret, session_id, channel.rank, None)
        self._from = [SealedBox(group_secret, session_id, rank, None) for rank in range(channel.world)]
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
        sealed = None if secret is None else self._boxes.seal_to_each(secret, "shared secret")
        message = self._channel.broadcast(Kind.HE_SECRET, sealed, Codec.SEALED)
        return secret if secret is not None else self._boxes.open_own_part(0, message, "shared secret")

    def hmac(self, purpose: str, data: bytes) -> bytes:
        """Return an HMAC-SHA256 under the group key, which the server can neither make nor test guesses with.

        Security: keyed per session and purpose, so hashes of the same data in different jobs cannot be linked.
        """
        self._require_open()
        key = derive_key(self.group_secret, self.session_id, "hmac", purpose)
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
        return encode_fields(f"{DOMAIN}/statement", self.session_id, data)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ProtocolError("the session is closed: its keys are gone")
