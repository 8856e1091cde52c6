"""Alignment of data sets between parties: the same rows in the same order, or a clear refusal and nothing learnt."""

from __future__ import annotations

import base64
import hashlib
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.curve.equal_logarithms import PROOF_BYTES
from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import REGISTRY_TEXT, DataRefusal, JobAborted, PolicyRefusal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.kinds.alignment.align import _Offer, _reserve_together, align, confirm
from nvflare_plugins.kinds.alignment.intersection import POINT_BYTES
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy_values import Consents
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Kind, unpack
from tests.support.alignment import encode, party_names, run_parties
from tests.support.federation import SiteDied, dies_at
from tests.support.memories import memory_in, told

NAMES = party_names(3)


def sets(n_parties: int, seed: int = 0, n: int = 40) -> list[list[str]]:
    """Overlapping sets of ids that occur nowhere else, in an own order at each party."""
    source = random.Random(seed)
    pool = [f"Zebra-{number:04d}-id" for number in range(n)]
    return [source.sample(pool, n - 5 * (party + 1)) for party in range(n_parties)]


def run(
    folder: Path, ids: list[dict[str, list[str]]], say: Any = None, session_of: Any = None, **more: Any
) -> list[Any]:
    def take_part(channel, session, policy):
        own = {name: encode(of_set) for name, of_set in ids[channel.rank].items()}
        if session_of is not None:
            session = session_of(channel.rank, session)
        with align(channel, session, own, policy, say or (lambda text: None), channel.recorder) as found:
            return found

    return run_parties(folder, len(ids), take_part, **more)


@pytest.mark.parametrize("n_parties", [2, 3, 4])
def test_all_parties_end_with_the_same_rows_in_the_same_order(tmp_path, n_parties):
    train, test = sets(n_parties, 1), sets(n_parties, 2, 30)
    test = [[f"T{one}" for one in of_set] for of_set in test]
    outcomes = run(tmp_path, [{"train": a, "test": b} for a, b in zip(train, test, strict=True)])
    for name, of_parties in (("train", train), ("test", test)):
        common = sorted(set.intersection(*map(set, of_parties)))
        for own, found in zip(of_parties, outcomes, strict=True):
            assert [own[row] for row in found[name].positions] == common
            assert found[name].n_rows == len(own) and found[name].n_common == len(common)
        assert len({found[name].proof for found in outcomes}) == 1
    assert len({found["train"].fingerprint for found in outcomes}) == n_parties
    assert outcomes[0]["train"].proof != outcomes[0]["test"].proof


def test_proofs_of_two_jobs_cannot_be_linked(tmp_path):
    ids = [{"train": one} for one in sets(2)]
    proofs = {run(tmp_path / job, ids)[0]["train"].proof for job in ("one", "two")}
    assert len(proofs) == 2


def test_results_of_one_alignment_confirm_each_other_and_others_do_not(tmp_path):
    held = [run(tmp_path / job, [{"train": one} for one in sets(3)]) for job in ("one", "two")]

    def confirmed(chosen):
        return run_parties(tmp_path / "later", 3, lambda c, s, p: confirm(c, s, [chosen[c.rank]["train"]]))

    assert confirmed(held[0]) == [None] * 3
    outcomes = confirmed([held[0][0], held[1][1], held[0][2]])
    assert any(isinstance(outcome, ProtocolError) and "alignments held" in str(outcome) for outcome in outcomes)
    assert all(isinstance(outcome, (ProtocolError, JobAborted)) for outcome in outcomes)


# -- guards -----------------------------------------------------------------------------------------------------------


def refused(outcomes: list[Any], text: str, by: type[Exception] = PolicyRefusal) -> None:
    assert all(isinstance(outcome, (by, JobAborted)) and text in str(outcome) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, by) for outcome in outcomes)
    assert not any("Zebra" in str(outcome) for outcome in outcomes)


def conversations(frames: list[tuple[str, bytes]]) -> int:
    return sum(unpack(frame).kind is Kind.CONVERSATION for _, frame in frames)


@pytest.mark.parametrize("strict", NAMES)
def test_the_strictest_partys_least_intersection_counts(tmp_path, strict):
    ids = [{"train": one} for one in sets(3)]
    n_common = len(set.intersection(*(set(one["train"]) for one in ids)))
    policy = {strict: {"vertical": {"min_intersection": n_common + 1}}}
    refused(run(tmp_path, ids, policies=policy), "vertical.min_intersection")
    policy = {strict: {"vertical": {"min_intersection": n_common}}}
    assert run(tmp_path / "again", ids, policies=policy)[0]["train"].n_common == n_common


def test_disjoint_sets_are_refused_whatever_the_policy_says(tmp_path):
    ids = [{"train": [f"Zebra{rank}{number}" for number in range(9)]} for rank in range(2)]
    policies = {name: {"vertical": {"min_intersection": 1}} for name in NAMES[:2]}
    refused(run(tmp_path, ids, policies=policies), "fewer rows in common")


def test_a_set_smaller_than_the_least_intersection_sends_nothing(tmp_path):
    frames: list[tuple[str, bytes]] = []
    ids = [{"train": [f"Zebra{n}" for n in range(9)]}, {"train": ["Zebra1"]}]
    policies = {"party-a": {"vertical": {"min_intersection": 5}}}
    refused(run(tmp_path, ids, policies=policies, frames=frames), "min_intersection")
    assert conversations(frames) == 0


def test_sizes_that_differ_too_much_are_refused_before_ids_leave(tmp_path):
    frames: list[tuple[str, bytes]] = []
    ids = [{"train": [f"Zebra{n}" for n in range(50)]}, {"train": ["Zebra1", "Zebra2"]}]
    policies = {"party-b": {"vertical": {"min_intersection": 1, "max_size_ratio": 24}}}
    refused(run(tmp_path, ids, policies=policies, frames=frames), "vertical.max_size_ratio")
    assert conversations(frames) == 0
    policies["party-b"]["vertical"]["max_size_ratio"] = 25
    assert run(tmp_path / "again", ids, policies=policies)[0]["train"].n_common == 2


def test_other_data_sets_are_refused(tmp_path):
    ids = [{"train": ["Zebra"]}, {"trial": ["Zebra"]}]
    refused(run(tmp_path, ids), "do not align the same data sets", ProtocolError)


def test_a_second_alignment_needs_consent(tmp_path):
    ids = [{"train": one} for one in sets(2)]
    run(tmp_path, ids, job_id="first")
    frames: list[tuple[str, bytes]] = []
    refused(run(tmp_path, ids, job_id="second", frames=frames), "in job first")
    assert conversations(frames) == 0
    consent = {name: {"consents": {"recompute_with_changes": True}} for name in NAMES}
    assert run(tmp_path, ids, job_id="third", policies=consent)[0]["train"].n_common


def test_a_refusal_of_one_registry_is_no_alignment_at_the_others(tmp_path):
    one, other = sets(2)
    run(tmp_path, [{"train": one}, {"train": other}], job_id="first")
    fresh = [f"new{number}" for number in range(9)]
    refused(run(tmp_path, [{"late": fresh}, {"late": other}], job_id="second"), REGISTRY_TEXT, DataRefusal)
    assert told(memory_in(tmp_path / "party-a", "party-a"), "SELECT job_id FROM alignments") == [("first",)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_whatever_ends_an_alignment_before_ids_leave_it_is_not_remembered(tmp_path, monkeypatch, error):
    """One that ran out of memory, or was stopped, between reservation and first id stayed reserved for ever."""
    seen = []

    def stops(registry: AlignmentRegistry, runs: Any) -> None:
        seen.extend(told(memory, "SELECT is_sent FROM alignments"))
        raise error

    monkeypatch.setattr(AlignmentRegistry, "mark_sent", stops)
    memory = Memory(tmp_path, "party-a")
    registry = AlignmentRegistry(memory, Consents())
    channel = SimpleNamespace(job_id="job", sites=("party-a",), world=1, rank=0, gather=lambda *_: [b""])
    session = SimpleNamespace(seal_to_all=lambda *_: b"")
    with pytest.raises(error):
        _reserve_together(channel, session, registry, {"train": [b"Zebra"]})
    assert seen == [(0,)], "reserved, and durably so, before anything can leave"
    assert told(memory, "SELECT * FROM alignments") == []


def test_an_alignment_counts_before_its_first_id_leaves(tmp_path, monkeypatch):
    heard = []

    def listen(channel: Any, kind: Kind, *more: Any) -> Any:
        if kind is Kind.CONVERSATION:
            heard.append(told(memory_in(tmp_path / channel.site, channel.site), "SELECT is_sent FROM alignments"))
        return real(channel, kind, *more)

    real = Channel.route
    monkeypatch.setattr(Channel, "route", listen)
    run(tmp_path, [{"train": one} for one in sets(2)])
    assert heard and all(sent == [(2,)] for sent in heard)
    assert told(memory_in(tmp_path / "party-a", "party-a"), "SELECT is_sent FROM alignments") == [(1,)], "has a result"


@pytest.mark.parametrize("hook", ["tamper", "tamper_reply"])
@pytest.mark.parametrize("nth", [3, 4, 5])
def test_a_party_that_is_lost_at_the_end_leaves_nobody_without_a_way_on(tmp_path, hook, nth):
    """All may align again, or all keep what the refusal tells them to use."""
    ids, kept = [{"train": one} for one in sets(3)], {}

    def take_part(channel, session, policy):
        own = {name: encode(of_set) for name, of_set in ids[channel.rank].items()}
        with align(channel, session, own, policy) as found:
            kept[channel.job_id, channel.rank] = found["train"]
        return found

    dies = {hook: {"party-b": dies_at(Kind.AGREEMENT, nth)}}
    outcomes = run_parties(tmp_path, 3, take_part, job_id="lost", patient=False, **dies)
    assert isinstance(outcomes[1], SiteDied)
    if (nth, hook) == (5, "tamper"):
        assert all("submit the job again" in str(outcomes[rank]) for rank in (0, 2))
    again = run_parties(tmp_path, 3, take_part, job_id="again")
    if any(isinstance(outcome, Exception) for outcome in again):
        assert (nth, hook) == (5, "tamper_reply"), again
        refused(again, "use the alignment of that job (alignment='lost')")
        held = [kept["lost", rank] for rank in range(3)]
        assert run_parties(tmp_path, 3, lambda c, s, p: confirm(c, s, [held[c.rank]]), job_id="use") == [None] * 3
    else:
        assert len({found["train"].proof for found in again}) == 1


def test_ids_that_are_not_different_are_a_callers_mistake(tmp_path):
    outcomes = run(tmp_path, [{"train": ["Zebra", "Zebra"]}] * 2)
    assert any(isinstance(outcome, ValueError) for outcome in outcomes)


# -- hostile parties --------------------------------------------------------------------------------------------------


class Proxy:
    """A session of which a test replaces single methods."""

    def __init__(self, session: Any, **methods: Any):
        self._session, self._methods = session, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._session, name)


def test_a_party_with_another_order_or_other_rows_is_noticed_by_all(tmp_path):
    def session_of(rank: int, session: Any) -> Any:
        def lie(purpose: str, data: bytes) -> bytes:
            return session.hmac(purpose, data[::-1] if purpose.startswith("aligned rows") else data)

        return Proxy(session, hmac=lie) if rank == 1 else session

    outcomes = run(tmp_path, [{"train": one} for one in sets(3)], session_of=session_of)
    assert all(isinstance(outcome, (ProtocolError, JobAborted)) for outcome in outcomes)
    assert any("aligned rows of train" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'[{"train": 0}, 1, 1]',
        b'[{"train": 1e9}, 1, 1]',
        b"[" * 5000,
        b"[1, 1, 1]",
        b'[{"train": true}, 1, 1]',
        b'[{"train": 999999999999}, 1, 1]',
        b'[{"train": 5}, 1, 1, 1]',
    ],
)
def test_a_hostile_offer_ends_the_job(tmp_path, offer):
    def session_of(rank: int, session: Any) -> Any:
        lie = Proxy(session, seal_to_all=lambda plain, purpose: session.seal_to_all(offer, purpose))
        return lie if rank else session

    outcomes = run(tmp_path, [{"train": one} for one in sets(2)], session_of=session_of)
    assert all(isinstance(outcome, (ProtocolError, JobAborted)) for outcome in outcomes), outcomes


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_offer_is_read_or_refused(data):
    try:
        offer = _Offer.from_bytes(data)
    except ProtocolError:
        return
    assert _Offer.from_bytes(offer.to_bytes()) == offer


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 100), max_size=4))
def test_offers_come_back(sizes):
    offer = _Offer.of({name: [b""] * size for name, size in sizes.items()}, VerticalRules())
    assert _Offer.from_bytes(offer.to_bytes()) == offer and offer.sizes == sizes


# -- what leaves ------------------------------------------------------------------------------------------------------


class Notes:
    """Keeps what an evidence log would be told."""

    def __init__(self) -> None:
        self.contents: list[tuple] = []
        self.payloads: list[bytes] = []

    def transfer(self, transfer) -> None:
        self.payloads.append(bytes(transfer.frame.payload))

    def content(self, *what: Any) -> None:
        self.contents.append(what)


def traces(one: str) -> list[bytes]:
    """Forms in which an id could show: itself, encoded, or hashed without a key."""
    raw = one.encode()
    hashes = [hashlib.new(name, raw) for name in ("sha256", "sha1", "md5", "blake2b")]
    shown = [raw, raw.hex().encode(), base64.b64encode(raw), raw[::-1]]
    return shown + [h.digest() for h in hashes] + [h.hexdigest().encode() for h in hashes]


def test_no_id_leaves_a_party_or_reaches_a_log_or_file(tmp_path, caplog):
    ids = [{"train": one} for one in sets(3)]
    frames: list[tuple[str, bytes]] = []
    said: list[str] = []
    notes = {name: Notes() for name in NAMES}
    with caplog.at_level(logging.DEBUG):
        outcomes = run(tmp_path, ids, say=said.append, frames=frames, recorders=notes)
    assert all(not isinstance(outcome, Exception) for outcome in outcomes)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    haystack = b"".join(frame for _, frame in frames) + written + caplog.text.encode() + "".join(said).encode()
    haystack += b"".join(payload for note in notes.values() for payload in note.payloads)
    assert len(haystack) > 50_000
    everyone = sorted({one for own in ids for one in own["train"]})
    planted = haystack + hashlib.sha256(everyone[0].encode()).digest()
    assert not [trace for one in everyone for trace in traces(one) if trace in haystack]
    assert [trace for trace in traces(everyone[0]) if trace in planted], "the search must be able to find one"


def test_evidence_names_parties_and_protection_and_no_real_size(tmp_path):
    notes = {name: Notes() for name in NAMES}
    run(tmp_path, [{"train": one} for one in sets(3)], recorders=notes)
    for name, note in notes.items():
        block, link = 4 + 64 * POINT_BYTES, 4 + 64 * POINT_BYTES + PROOF_BYTES
        assert {what[2:4] for what in note.contents} == {(Content.BLINDED_IDS, Protection.BLINDED)}
        assert {what[4] for what in note.contents} == {block, link, 2 * link}
        assert {what[1] for what in note.contents} == set(NAMES) - {name}
        sent = [what for what in note.contents if what[0] == "sent"]
        assert len(sent) == 4 + {"party-a": 1, "party-b": 1, "party-c": 2}[name]


def test_the_server_sees_messages_of_one_size_whatever_the_sets(tmp_path):
    seen = []
    for number, size in enumerate((33, 64)):
        frames: list[tuple[str, bytes]] = []
        pool = [f"Zebra{n}" for n in range(size)]
        run(tmp_path / str(number), [{"train": pool}, {"train": pool[: size // 2]}], frames=frames)
        seen.append([len(frame) for _, frame in frames if unpack(frame).kind is Kind.CONVERSATION])
    assert sorted(seen[0]) == sorted(seen[1]) and len(set(seen[0])) == 3  # a block, with a proof or without, or none


def test_progress_is_said_without_numbers_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align._PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.intersection.BLOCK", 16)
    said: list[str] = []
    run(tmp_path, [{"train": one} for one in sets(2)], say=said.append)
    assert "aligning train between party-a, party-b" in said
    assert "aligning train: step 1 of 4, block 1 of 3" in said and "aligning train: step 4 of 4, block 3 of 3" in said
    assert not any("35" in text or "30" in text for text in said)
