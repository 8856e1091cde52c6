"""Sites that send nonsense: a clear error at every site, and nothing half-written."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable

import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt import session as agreement
from nvflare_plugins.attempt.session import Hello, Session
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.envelope import Codec, FrameType, Kind, Operation, Phase, TrainingStep, pack_list, unpack
from tests.support.examples import quick
from tests.support.federation import succeed
from tests.support.hostile_jobs import (
    KINDS,
    OF_LATTICES,
    assert_failed_cleanly,
    at,
    everywhere,
    job_with,
    on_frame,
    private_frames,
    small_job,
    with_fields,
)
from tests.support.memories import states

# -------------------------------------------------------------------------------------------


NONSENSE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[:-1],
    "noise": lambda data: os.urandom(len(data)),
    "payload longer": on_frame(lambda f: dataclasses.replace(f, payload=f.payload + bytes(8))),
}


MORE_NONSENSE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "header only": lambda data: data[:20],
    "trailing byte": lambda data: data + b"\0",
    "oversized": lambda data: data + bytes(1 << 20),
    "payload shorter": on_frame(lambda f: dataclasses.replace(f, payload=f.payload[:-8])),
    "other version": lambda data: data[:4] + b"\x01" + data[5:],
    "other magic": lambda data: b"NOPE" + data[4:],
    "other attempt": with_fields(attempt=bytes(16)),
    "other rank": with_fields(rank=0),
    "rank out of range": with_fields(rank=60_000),
    "counter ahead": on_frame(lambda f: dataclasses.replace(f, counter=f.counter + 1)),
    "counter behind": on_frame(lambda f: dataclasses.replace(f, counter=f.counter - 1)),
    "counter far ahead": with_fields(counter=2**64 - 1),
    "other kind": with_fields(kind=Kind.METRIC),
    "other operation": with_fields(operation=Operation.GATHER),
    "in clear": with_fields(codec=Codec.PLAIN),
    "as words of 32 bits": with_fields(codec=Codec.MASKED_32),
    "as a ciphertext": with_fields(codec=Codec.BFV),
    "other phase": with_fields(moment=TrainingStep(Phase.EVALUATE, 0)),
    "other round": with_fields(moment=TrainingStep(Phase.UPDATE, 7)),
    "more values": on_frame(lambda f: dataclasses.replace(f, n_values=f.n_values + 1)),
    "four billion values": with_fields(n_values=2**32),
    "beyond all values": with_fields(n_values=2**63),
    "as the server's": with_fields(type=FrameType.RESULT),
    "an abort": with_fields(type=FrameType.ABORT),
    "attachment": with_fields(attachment=b"x" * 100),
    "long attachment": with_fields(attachment=bytes(1 << 21)),
}


@pytest.mark.parametrize(("kind", "what"), everywhere(NONSENSE, KINDS, "noise"))
def test_nonsense_from_a_site_at_every_exchange(federation, kind, what):
    outcomes = federation.run(job_with(kind), tamper={"site-2": at(kind, NONSENSE[what])})
    assert_failed_cleanly(federation, outcomes)


@pytest.mark.parametrize("what", MORE_NONSENSE)
def test_more_nonsense_in_a_histogram(federation, what):
    job = job_with(Kind.HISTOGRAM)
    outcomes = federation.run(job, tamper={"site-2": at(Kind.HISTOGRAM, MORE_NONSENSE[what], 2)})
    assert_failed_cleanly(federation, outcomes)
    assert what == "attachment" or all("site-2" in str(error) for error in outcomes.values())
    if what in ("nothing", "four billion values", "long attachment"):
        succeed(federation.run(job, "again"))  # nothing is broken


HOSTILE = [*itertools.product(["halved", "flipped"], OF_LATTICES, ["bfv", "ckks"])]


@pytest.mark.parametrize(
    ("what", "kind", "profile"), quick(HOSTILE, *HOSTILE[0:8:4], *HOSTILE[3:8:4], *HOSTILE[9::4], *HOSTILE[10::4])
)
def test_hostile_ciphertexts_and_keys(federation, profile, kind, what):
    changes = {
        "halved": lambda f: dataclasses.replace(f, payload=f.payload[: len(f.payload) // 2] or b"?"),
        "flipped": lambda f: dataclasses.replace(f, payload=bytes([f.payload[0] ^ 255]) + f.payload[1:]),
    }
    sender = "site-1" if kind in (Kind.HE_SECRET, Kind.HE_PUBLIC) else "site-2"
    job = dataclasses.replace(job_with(kind), profile=profile)
    outcomes = federation.run(job, tamper={sender: at(kind, on_frame(changes[what]))})
    assert_failed_cleanly(federation, outcomes)


NO_KEYS = {
    "nothing": lambda key: b"",
    "cut short": lambda key: key[: len(key) // 2],
    "longer": lambda key: key + b"\0",
    "noise": lambda key: bytes(255 - byte for byte in key),
}
PAIRS = [*itertools.product(NO_KEYS, ["bfv", "ckks"])]


@pytest.mark.parametrize(("what", "profile"), quick(PAIRS, *PAIRS[0::4], *PAIRS[3::4]))
def test_a_key_that_is_no_key_leaves_no_run_behind(federation, monkeypatch, profile, what):
    """It is properly sealed: nothing of the rows has left anyone yet, so the same rows may train with other sites."""
    share = Session.share_secret

    def lie(session: Session, secret: bytes | None) -> bytes:
        shared = share(session, secret if secret is None else NO_KEYS[what](secret))
        return shared if secret is None else secret

    monkeypatch.setattr(Session, "share_secret", lie)
    frames: list = []
    outcomes = federation.run(small_job(profile=profile), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(outcomes[site], ProtocolError) for site in ("site-2", "site-3")), outcomes
    assert not private_frames(frames)
    assert [states(federation.workspace(site), site) for site in federation.sites] == [[]] * 3


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little")], ids=["zero", "one"])
def test_a_session_key_of_small_order_leaves_no_run_behind(federation, monkeypatch, point):
    """Whoever knows the result of such a key would know the keys of the pair: the server could read what is sealed."""
    new = Hello.new

    def lie(identity: Identity, public_key: bytes, *rest: object) -> Hello:
        return new(identity, point if identity.site == "site-2" else public_key, *rest)

    monkeypatch.setattr(Hello, "new", lie)
    frames: list = []
    outcomes = federation.run(small_job(), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(e, ProtocolError) and "small order" in str(e) for e in outcomes.values()), outcomes
    assert not private_frames(frames)
    assert [states(federation.workspace(site), site) for site in federation.sites] == [[]] * 3


def test_a_replayed_frame_is_refused(federation):
    kept: list[bytes] = []

    def replay(data: bytes) -> bytes:
        if unpack(data).kind is Kind.HISTOGRAM:
            kept.append(data)
        return kept[0] if len(kept) > 1 else data

    outcomes = federation.run(job_with(Kind.HISTOGRAM), tamper={"site-3": replay})
    assert_failed_cleanly(federation, outcomes)


def test_a_peer_with_deeply_nested_terms_is_refused(federation, monkeypatch):
    real = agreement.Terms.to_bytes
    deep = pack_list([b"[" * 100_000] * 6)
    senders = iter([True])
    monkeypatch.setattr(agreement.Terms, "to_bytes", lambda self: deep if next(senders, False) else real(self))
    assert_failed_cleanly(federation, federation.run(small_job()))
