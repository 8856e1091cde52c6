"""Sessions: each test of the second half tries to break a requirement of sessions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from he_processors.errors import AuthenticationError, ConfigurationError, ProtocolError
from he_processors.key_agreement import EphemeralKey
from he_processors.masks import MessageLabel
from nvflare_plugins.attempt.session import Hello, Proof
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.site.certificates import Identity, fingerprint, verify_signature
from nvflare_plugins.site.protocols import Span
from nvflare_plugins.wire.envelope import Codec, Kind, pack_list, unpack_list
from tests.support.sessions import (
    Authority,
    Policy,
    names,
    open_all,
    run_at_all,
    signed_sites,
    unsigned_sites,
)

HELLO, SIGNATURE, PROOF, GROUP = range(4)
OPEN = Policy(unsigned_sessions=True)


def fails(outcome, error: type[Exception], match: str = "", at: int | None = None) -> None:
    """Some site (or the given one) refuses for this reason, and no site ends with an open session."""
    causes = [e for e in outcome.errors if e is not None]
    assert causes, outcome.results
    chosen = causes[0] if at is None else outcome.errors[at]
    assert isinstance(chosen, error) and match in str(chosen), outcome.results
    assert all(isinstance(result, Exception) for result in outcome.results)


# -- what a session gives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_sites_share_keys_the_relay_lacks(world):
    outcome = open_all(signed_sites(world))
    sessions = outcome.sessions
    assert len({s.session_id for s in sessions}) == len({s.group_secret for s in sessions}) == 1
    for a in sessions:
        assert a.signed and set(a.pair_secrets) == set(range(world)) - {a.rank}
        for b in sessions:
            assert a.rank == b.rank or a.pair_secrets[b.rank] == b.pair_secrets[a.rank]
    secrets = {s for session in sessions for s in session.pair_secrets.values()}
    assert len(secrets) == world * (world - 1) // 2
    wire = b"".join(part for exchange in outcome.relay.seen for part in exchange)
    assert not any(secret in wire for secret in (*secrets, sessions[0].group_secret))
    kinds = [(kind, codec) for kind, codec, _ in outcome.channels[0].sent]
    public = (Kind.HANDSHAKE, Codec.PUBLIC)
    assert kinds == [public, public, (Kind.GROUP_KEY, Codec.SEALED), public]


def test_unsigned_sessions_by_every_sites_own_policy():
    sessions = open_all(unsigned_sites(), [OPEN] * 3).sessions
    assert not any(session.signed for session in sessions)
    assert sessions[0].certificate_fingerprints == {} and sessions[0].head_verifier() is None
    assert sessions[0].sign(b"x") is None
    sessions[0].verify(1, b"x", None)
    with pytest.raises(AuthenticationError):
        sessions[0].verify(1, b"x", b"signature")


def test_attempts_share_nothing():
    first, second = (open_all(signed_sites()).sessions[0] for _ in range(2))
    assert first.session_id != second.session_id
    assert first.group_secret != second.group_secret
    assert not set(first.pair_secrets.values()) & set(second.pair_secrets.values())


def test_masks_of_the_session_cancel():
    sessions = open_all(signed_sites()).sessions
    label, values = MessageLabel(9, "HISTOGRAM", "update:0", 5), np.arange(5, dtype=np.uint64)
    total = sum((s.masks.mask(values, label) for s in sessions), np.zeros(5, dtype=np.uint64))
    np.testing.assert_array_equal(sessions[1].masks.unblind(total, label), 3 * values)


def test_group_messages():
    a, b, c = open_all(signed_sites()).sessions
    sealed = a.seal_to_all(b"document", "agreement")
    assert b.open_from(0, sealed, "agreement") == a.open_from(0, sealed, "agreement") == b"document"
    with pytest.raises(AuthenticationError):
        c.open_from(1, sealed, "agreement")
    with pytest.raises(AuthenticationError):
        c.open_from(0, sealed, "checkpoint")
    assert c.open_from(0, sealed, "agreement") == b"document"
    with pytest.raises(ProtocolError, match="replayed"):
        c.open_from(0, sealed, "agreement")


def test_pair_messages_open_at_their_reader_only_once_and_for_their_purpose():
    a, b, c = open_all(signed_sites()).sessions
    sealed = a.seal_for(1, b"request", "training")
    assert b"request" not in sealed
    with pytest.raises(AuthenticationError):
        c.open_of(0, sealed, "training")
    with pytest.raises(AuthenticationError):
        b.open_of(2, sealed, "training")
    with pytest.raises(AuthenticationError):
        b.open_of(0, sealed, "inference")
    assert b.open_of(0, sealed, "training") == b"request"
    with pytest.raises(ProtocolError):
        b.open_of(0, sealed, "training")


def test_hmac_is_keyed_by_session_and_purpose():
    a, b, _ = open_all(signed_sites()).sessions
    other = open_all(signed_sites()).sessions[0]
    assert a.hmac("model", b"m") == b.hmac("model", b"m")
    assert len({a.hmac("model", b"m"), a.hmac("cuts", b"m"), a.hmac("model", b"n"), other.hmac("model", b"m")}) == 4


def test_statements():
    a, b, _ = open_all(signed_sites()).sessions
    signature = a.sign(b"data")
    b.verify(0, b"data", signature)
    for rank, data, given in ((1, b"data", signature), (0, b"Data", signature), (0, b"data", b""), (0, b"data", None)):
        with pytest.raises(AuthenticationError):
            b.verify(rank, data, given)
    other = open_all(signed_sites()).sessions[1]
    with pytest.raises(AuthenticationError):
        other.verify(0, b"data", signature)


def test_evidence_facts_and_head_verifier():
    a, b, _ = open_all(signed_sites()).sessions
    facts, others = a.evidence_facts(), b.evidence_facts()
    for name in ("sites", "signed", "public_key_fingerprints", "certificate_fingerprints", "parameters_hash"):
        assert facts[name] == others[name]
    assert set(facts["public_key_fingerprints"]) == set(names(3))
    signature = facts["signer"](b"head")
    b.head_verifier()("site-1", b"head", signature)
    for site in ("site-2", "server"):
        with pytest.raises(AuthenticationError):
            b.head_verifier()(site, b"head", signature)


def test_shared_secrets_reach_every_site_sealed():
    outcome = open_all(signed_sites())
    sessions, secret = outcome.sessions, b"homomorphic key" * 100
    given = [secret, None, None]
    tasks = [lambda r=r: sessions[r].share_secret(given[r]) for r in range(3)]
    assert run_at_all(outcome.relay, tasks) == [secret] * 3
    assert outcome.channels[0].sent[-1][:2] == (Kind.HE_SECRET, Codec.SEALED)
    assert b"homomorphic key" not in b"".join(outcome.relay.seen[-1])
    with pytest.raises(ValueError, match="rank 0"):
        sessions[1].share_secret(secret)


def test_closing_forgets_the_keys():
    session = open_all(signed_sites()).sessions[0]
    session.close()
    assert session.pair_secrets == {} and session.group_secret == b""
    for use in (
        lambda: session.hmac("model", b""),
        lambda: session.seal_to_all(b"", "x"),
        lambda: session.open_from(1, b"", "x"),
        lambda: session.share_secret(b""),
        lambda: session.sign(b""),
        lambda: session.masks.mask(np.zeros(1, dtype=np.uint64), MessageLabel(1, "x", "y", 1)),
    ):
        with pytest.raises(ProtocolError, match="closed"):
            use()


# -- certificates and policies ----------------------------------------------------------------------------------------


def test_an_unsigned_site_needs_its_own_policys_consent():
    fails(open_all(unsigned_sites()), AuthenticationError, "policy")


def test_an_unsigned_peer_is_refused_by_a_policy_that_demands_signatures():
    sites = signed_sites()
    sites[1] = Identity.unsigned("site-2")
    fails(open_all(sites, [Policy(), OPEN, Policy()]), AuthenticationError, "site-2 shows no certificate", at=0)


def test_a_site_that_signs_meets_unsigned_peers_by_a_key_of_its_own():
    """What lets sites without certificates meet says nothing of a site that has one: a server could be such a peer."""
    sites = signed_sites()
    sites[1] = Identity("site-2", root=sites[0].root, server_names=sites[0].server_names)
    fails(open_all(sites, [OPEN] * 3), AuthenticationError, "Policy keys: unsigned_peers", at=0)
    mixed = Policy(unsigned_peers=True)
    fails(open_all(sites, [mixed] * 3), AuthenticationError, "unsigned_sessions", at=1)
    sessions = open_all(sites, [mixed, OPEN, mixed]).sessions
    assert not any(session.signed for session in sessions)
    assert set(sessions[0].certificate_fingerprints) == {"site-1", "site-3"}


def test_a_stripped_certificate_is_no_downgrade():
    """The server removes site 2's certificate on its way to site 1, whose policy happens to accept unsigned peers."""

    def strip(number, reader, parts):
        if number == HELLO and reader != 1:
            parts[1] = dataclasses.replace(Hello.unpack(parts[1]), chain=()).pack()
        return parts

    fails(open_all(signed_sites(), [OPEN] * 3, tamper=strip), AuthenticationError)


def test_pinned_fingerprints():
    sites = signed_sites()
    pins = {"site-2": fingerprint(sites[1].chain[0]).hex()}
    assert open_all(sites, [Policy(pinned_fingerprints=pins)] * 3).sessions
    # A second certificate in the same name, from the same root: what only a pin can notice.
    sites[1] = Authority().identity("site-2", 7)
    assert open_all(sites).sessions
    fails(open_all(sites, [Policy(pinned_fingerprints=pins), Policy(), Policy()]), AuthenticationError, "pinned", at=0)
    pinned_but_open = Policy(True, pinned_fingerprints=pins)
    fails(open_all(unsigned_sites(), [pinned_but_open, OPEN, OPEN]), AuthenticationError, "site-2", at=0)


def test_a_server_certificate_is_no_site():
    authority = Authority()
    server = authority.issue("server1", 8, server_default_host="server1")
    sites = signed_sites()
    sites[2] = authority.identity("server1", 8, server)
    outcome = open_all(sites, sites=["site-1", "site-2", "server1"])
    assert "name of a server" in str(next(e for e in outcome.errors if e is not None))
    # The server's certificate and key, shown under a site's name.
    sites[2] = dataclasses.replace(sites[2], site="site-3")
    fails(open_all(sites), AuthenticationError, "names another party")


def test_foreign_expired_and_shared_certificates():
    for wrong in (
        Authority(101).issue("site-3", 2),
        Authority().issue("site-3", 2, days=(-9, -2)),
        Authority().issue("site-3", 2, role="lead"),
    ):
        sites = signed_sites()
        sites[2] = Authority().identity("site-3", 2, wrong)
        fails(open_all(sites), AuthenticationError, "site-3")
    sites = signed_sites()
    sites[2] = Authority().identity("site-3", 1)  # issued to site 2's key
    fails(open_all(sites), ProtocolError, "certificate key")


def test_a_stolen_certificate_without_its_key():
    sites = signed_sites()
    sites[2] = dataclasses.replace(sites[2], _private_key=signed_sites()[1]._private_key)
    fails(open_all(sites), AuthenticationError, "signature", at=0)


def test_an_identity_of_another_site():
    sites = signed_sites()
    sites[0] = dataclasses.replace(sites[0], site="site-9")
    fails(open_all(sites), AuthenticationError, "site-9", at=0)


@pytest.mark.parametrize(
    ("part", "content", "words"),
    [
        (0, b"older", "run VeilBoost 0.14 or newer"),
        (1, b"\xff", "malformed"),
        (2, b"short", "malformed"),
        (8, b"\xff", "malformed"),
        (7, bytes(4), "malformed"),
        (7, b"\2\0\1\0", "malformed"),
    ],
    ids=["format", "site", "nonce", "certificates", "no protocol", "empty range"],
)
def test_a_hello_of_another_form_is_refused(part, content, words):
    parts = list(unpack_list(Hello.new(signed_sites(1)[0], b"k" * 32, Policy(), "horizontal", b"b" * 32).pack(), 10))
    parts[part] = content
    with pytest.raises(ProtocolError, match=words):
        Hello.unpack(pack_list(parts))


# -- a server that interferes -----------------------------------------------------------------------------------------


def replace_hello(rank: int, seen_by: set[int], **changes):
    def tamper(number, reader, parts):
        if number == HELLO and reader in seen_by:
            parts[rank] = dataclasses.replace(Hello.unpack(parts[rank]), **changes).pack()
        return parts

    return tamper


@pytest.mark.parametrize("policy", [Policy(), OPEN], ids=["signed", "unsigned"])
def test_a_swapped_public_key(policy):
    """The classic man in the middle, without knowledge of any certificate key."""
    sites = signed_sites() if policy is not OPEN else unsigned_sites()
    tamper = replace_hello(1, {0, 2}, public_key=EphemeralKey().public)
    fails(open_all(sites, [policy] * 3, tamper=tamper), AuthenticationError)


def test_a_swapped_nonce_policy_or_binding():
    fails(open_all(signed_sites(), tamper=replace_hello(1, {0}, nonce=b"n" * 32)), AuthenticationError)
    fails(open_all(signed_sites(), tamper=replace_hello(1, {0}, policy_hash=b"p" * 32)), AuthenticationError)
    fails(open_all(signed_sites(), tamper=replace_hello(1, {0}, binding=b"c" * 32)), ConfigurationError, "site-2")


def test_own_hello_changed_on_the_way_back():
    fails(open_all(signed_sites(), tamper=replace_hello(1, {1}, nonce=b"n" * 32)), ProtocolError, "another hello", at=1)


def test_a_site_started_with_other_parameters():
    bindings = [b"b" * 32, b"x" * 32, b"b" * 32]
    fails(open_all(signed_sites(), bindings=bindings), ConfigurationError, "another job configuration")


def test_another_attempt_number():
    fails(open_all(signed_sites(), attempts=["00", "01", "00"]), AuthenticationError)


def test_reordered_hellos():
    def swap(number, reader, parts):
        return [parts[1], parts[0], parts[2]] if number == HELLO and reader == 2 else parts

    fails(open_all(signed_sites(), tamper=swap), ProtocolError, "place", at=2)


@pytest.mark.parametrize("at", [2, 0])
def test_a_key_that_comes_twice(at):
    """The server hands the first site's public key out as the second's: to a third site, and to the first itself."""

    def double(number, reader, parts):
        if number == HELLO and reader == at:
            copied = Hello.unpack(parts[0])
            parts[1] = dataclasses.replace(Hello.unpack(parts[1]), public_key=copied.public_key).pack()
        return parts

    fails(open_all(signed_sites(), tamper=double), ProtocolError, "same public key", at=at)


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little")])
def test_public_keys_of_small_order(point):
    fails(open_all(signed_sites(), tamper=replace_hello(1, {0}, public_key=point)), ProtocolError, "small order", at=0)


def test_replayed_hello_and_signature_of_an_old_attempt():
    old = open_all(signed_sites()).relay.seen

    def replay(number, reader, parts):
        if number in (HELLO, SIGNATURE) and reader != 1:
            parts[1] = old[number][1]
        return parts

    fails(open_all(signed_sites(), tamper=replay), AuthenticationError, "signature", at=0)


def test_reflected_confirmations():
    """Each site gets its own MACs back in its peers' names."""

    def reflect(number, reader, parts):
        if number == PROOF:
            mine = unpack_list(parts[reader], 3)
            for rank in {0, 1, 2} - {reader}:
                theirs = unpack_list(parts[rank], 3)
                mac = Proof.unpack(mine[rank]).confirmation
                theirs[reader] = dataclasses.replace(Proof.unpack(theirs[reader]), confirmation=mac).pack()
                parts[rank] = pack_list(theirs)
        return parts

    fails(open_all(unsigned_sites(), [OPEN] * 3, tamper=reflect), AuthenticationError, "pair key")
    fails(open_all(signed_sites(), tamper=reflect), AuthenticationError, "pair key")


def test_another_sites_signature():
    def exchange(number, reader, parts):
        if number == SIGNATURE and reader == 0:
            parts[1] = parts[2]
        return parts

    fails(open_all(signed_sites(), tamper=exchange), AuthenticationError, "signature", at=0)


def test_tampered_and_exchanged_group_shares():
    def flip(number, reader, parts):
        if number == PROOF and reader == 0:
            parts[1] = _changed_share(parts[1], lambda share: share[:-1] + bytes([share[-1] ^ 1]))
        return parts

    fails(open_all(signed_sites(), tamper=flip), AuthenticationError, "does not open", at=0)

    def misdirect(number, reader, parts):
        if number == PROOF and reader == 0:
            for_two = Proof.unpack(unpack_list(parts[1], 3)[2]).share
            parts[1] = _changed_share(parts[1], lambda share: for_two)
        return parts

    fails(open_all(signed_sites(), tamper=misdirect), AuthenticationError, "does not open", at=0)

    def misdirect_all(number, reader, parts):
        if number == PROOF and reader == 0:
            for_two = unpack_list(parts[1], 3)[2]
            parts[1] = pack_list([for_two, b"", for_two])
        return parts

    fails(open_all(signed_sites(), tamper=misdirect_all), AuthenticationError, "pair key", at=0)


def _changed_share(message: bytes, change) -> bytes:
    """Change the share for rank 0."""
    parts = unpack_list(message, 3)
    proof = Proof.unpack(parts[0])
    parts[0] = dataclasses.replace(proof, share=change(proof.share)).pack()
    return pack_list(parts)


def test_tampered_group_confirmation():
    def flip(number, reader, parts):
        if number == GROUP and reader == 0:
            parts[1] = bytes(32)
        return parts

    outcome = open_all(signed_sites(), tamper=flip)
    assert isinstance(outcome.results[0], AuthenticationError) and "group key" in str(outcome.results[0])


@pytest.mark.parametrize("exchange", [HELLO, SIGNATURE, PROOF, GROUP])
@pytest.mark.parametrize("content", [b"", b"\0", b"\xff" * 40, bytes(200_000)], ids=["empty", "short", "ff", "long"])
def test_malformed_messages_end_in_a_named_error(exchange, content):
    def replace(number, reader, parts):
        if number == exchange and reader == 0:
            parts[1] = content
        return parts

    result = open_all(signed_sites(), tamper=replace).results[0]
    assert isinstance(result, (ProtocolError, AuthenticationError)) and not isinstance(result, JobAborted)


def test_errors_hold_no_secrets():
    outcome = open_all(signed_sites(), tamper=replace_hello(1, {0, 2}, public_key=EphemeralKey().public))
    for error in outcome.errors:
        assert error is None or len(str(error)) < 200


def test_signatures_of_the_handshake_are_bound_to_it():
    """A signature under the transcript serves for nothing else: its statement names protocol, session and rank."""
    outcome = open_all(signed_sites())
    session = outcome.sessions[0]
    signature = outcome.relay.seen[SIGNATURE][1]
    with pytest.raises(AuthenticationError):
        session.verify(1, session.session_id, signature)
    with pytest.raises(AuthenticationError):
        verify_signature(signed_sites()[1].chain[0], session.session_id, signature)


def test_a_peers_release_steers_no_terminal():
    hostile = "9\x1b[2J\n\u202e" + "x" * 5000
    outcome = open_all(signed_sites(), tamper=replace_hello(1, {0}, release=hostile, protocols=Span(2, 2)))
    texts = [str(error) for error in outcome.errors]
    assert any("(VeilBoost 9?[2J??" in text for text in texts)
    assert all(text.isprintable() and len(text) < 1000 for text in texts if "VeilBoost" in text)
