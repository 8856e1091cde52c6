"""``veilboost verify``: good evidence passes, and each thing that can be wrong is found and named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil

import pytest

from nvflare_plugins.cli.main import COMMANDS
from nvflare_plugins.cli.options import EXITS
from nvflare_plugins.cli.verify import render
from nvflare_plugins.evidence import log as evidence
from nvflare_plugins.evidence.audit import Audit, grown_fact, protocol_facts
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.verification import Verdict, traffic
from tests.support.evidence_attempts import SITES, Attempt, check, cli, complete_attempt, only_failures, rewrite


@pytest.mark.parametrize("profile", ["masks", "bfv", "ckks", "plain"])
@pytest.mark.parametrize("signed", [False, True])
def test_good_evidence_is_verified(tmp_path, profile, signed):
    result = check(complete_attempt(tmp_path, profile=profile, signed=signed))
    assert result.sound, [a.failures for a in result.attempts]
    [attempt] = result.attempts
    assert (attempt.sites, attempt.signed, attempt.completed, attempt.profile) == (SITES, signed, True, profile)
    text = render(result)
    assert ("UNSIGNED" in text) == (not signed)
    assert ("IN CLEAR" in text) == (profile == "plain")
    assert "does not show" in text and "gradient histograms" in text


def test_the_hash_of_every_sites_policy_is_shown(tmp_path, capsys):
    complete_attempt(tmp_path)
    hashes = {site: hashlib.sha256(site.encode()).hexdigest() for site in SITES}
    cli(tmp_path)
    text = capsys.readouterr().out
    assert all(f"policy    {site}: {policy_hash}" in text for site, policy_hash in hashes.items())
    cli(tmp_path, "--json")
    assert json.loads(capsys.readouterr().out)["attempts"][0]["policies"] == hashes


def test_two_sites_and_no_rounds(tmp_path):
    assert check(complete_attempt(tmp_path, rounds=0, sites=("a", "b"))).sound


def test_table_counts_messages_and_bytes(tmp_path):
    result = check(complete_attempt(tmp_path, rounds=3))
    by_kind = {t.kind: t for t in traffic(result.attempts[0].logs)}
    histogram = by_kind["HISTOGRAM"]
    assert (histogram.messages, histogram.bytes_out, histogram.bytes_in) == (9, 9 * 32, 9 * 32)
    assert histogram.codec == "MASKED" and histogram.private and not by_kind["HANDSHAKE"].private
    assert "ROOT_SUM x9: from the root histogram" in render(result)


@pytest.mark.parametrize("name", [*SITES, "server"])
def test_missing_log(tmp_path, name):
    complete_attempt(tmp_path)
    (tmp_path / export_name(name)).unlink()
    assert f"the log of {name} is missing" in only_failures(tmp_path)


def test_no_evidence_at_all(tmp_path):
    assert "no evidence found" in only_failures(tmp_path)
    text = render(check(tmp_path))
    assert "NOT FOUND" in text and "the parties' records agree" not in text


def test_a_root_that_is_not_there_is_named(tmp_path, capsys):
    complete_attempt(tmp_path / "evidence")
    assert cli(tmp_path / "evidence", "--root-ca", tmp_path / "rootCA.pem") == 5
    assert f"there is no root certificate {tmp_path / 'rootCA.pem'} (--root-ca)" in capsys.readouterr().err
    (tmp_path / "evidence" / "rootCA.pem").write_text("of whoever wrote the evidence")
    assert cli("--json", tmp_path / "evidence", "--root-ca", tmp_path / "evidence" / "rootCA.pem") == 5
    assert json.loads(capsys.readouterr().out)["verdict"] == "NO_ROOT"


def test_a_path_that_is_not_there_is_named_whatever_lies_beside_it(tmp_path, capsys):
    (tmp_path / "rootCA.pem").write_text("no certificate either")
    for root in ([], ["--root-ca", tmp_path / "rootCA.pem"], ["--root-ca", tmp_path / "nowhere.pem"]):
        assert cli(tmp_path / "evidense", *root) == 4
        said = capsys.readouterr().err
        assert f"there is no file or folder {tmp_path / 'evidense'}" in said and "rootCA.pem" not in said
    (tmp_path / "empty").mkdir()
    assert cli(tmp_path / "empty") == 4
    assert capsys.readouterr().out.splitlines()[-1].startswith("NOT FOUND: there is no evidence here")
    assert cli("--json", tmp_path / "evidense") == 4
    assert json.loads(capsys.readouterr().out)["exit_code"] == 4


def test_tampering_a_typo_a_missing_root_and_nothing_shown_have_codes_of_their_own(tmp_path, capsys):
    complete_attempt(tmp_path / "evidence")
    (tmp_path / "evidence" / export_name("site-1")).unlink()
    codes = [cli(tmp_path / "evidence"), cli(tmp_path / "evidense"), cli(tmp_path, "--root-ca", tmp_path / "no.pem")]
    attempt = Attempt(tmp_path / "nothing")
    attempt.open_session()
    attempt.finish()
    codes.append(cli(tmp_path / "nothing"))
    assert codes == [1, 4, 5, 6]
    assert [verdict.value for verdict in Verdict] == list(range(7))
    exits = COMMANDS["verify"].exits
    assert all(exits[verdict.value] != EXITS.get(verdict.value) for verdict in Verdict), "each has a meaning of its own"
    named = (Verdict.VERIFIED, Verdict.UNSIGNED, Verdict.SIGNED, Verdict.EMPTY)
    assert all(exits[verdict.value].startswith(verdict.name) for verdict in named)


@pytest.mark.parametrize("signed", [False, True])
def test_evidence_of_no_message_and_no_round_is_not_verified(tmp_path, capsys, signed):
    attempt = Attempt(tmp_path, signed=signed)
    attempt.open_session()
    attempt.finish()
    result = dataclasses.replace(check(tmp_path), root="aa" * 32)
    assert result.sound and result.verdict is Verdict.EMPTY and not result.verified
    assert "EMPTY: the records of job job show no message and no round" in render(result)
    assert "It shows" not in render(result)


def test_same_file_twice_counts_once_but_two_different_logs_do_not(tmp_path):
    complete_attempt(tmp_path / "a")
    (tmp_path / "b").mkdir()
    copy = tmp_path / "b" / export_name("site-1")
    shutil.copy(tmp_path / "a" / export_name("site-1"), copy)
    assert check(tmp_path).sound
    rewrite(copy, lambda records: records[1].update(size=33))
    assert "2 different logs of site-1" in only_failures(tmp_path)


def test_links_are_not_followed(tmp_path):
    complete_attempt(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / export_name("site-9")).symlink_to("/etc/passwd")
    assert check(tmp_path).sound


def bent(tmp_path, party, direction, at, **changes):
    """Run an attempt in which one party records one message otherwise (None: not at all)."""

    def bend(by, peer, way, count, fields):
        if (by if by != "server" else peer, by == "server", way, count) == (*party, direction, at):
            return {**fields, **changes} if changes else None
        return fields

    return only_failures(complete_attempt(tmp_path, bend=bend))


def test_site_sent_other_bytes_than_the_server_received(tmp_path):
    text = bent(tmp_path, ("site-2", False), "sent", 3, payload=b"other bytes")
    assert "site-2 and the server: exchange 3 (HISTOGRAM)" in text


def test_server_sent_other_bytes_than_the_site_received(tmp_path):
    text = bent(tmp_path, ("site-2", False), "received", 3, payload=b"other bytes")
    assert "site-2 and the server: exchange 3" in text and "different answers at exchange 3" in text


def test_server_gave_one_site_another_answer(tmp_path):
    def bend(by, peer, way, count, fields):
        site = peer if by == "server" else by
        to_site = (by == "server") == (way == "sent")
        return {**fields, "payload": b"forged"} if to_site and site == "site-3" and count == 3 else fields

    text = only_failures(complete_attempt(tmp_path, bend=bend))
    assert "site-3 and site-1 received different answers at exchange 3" in text
    assert "and the server" not in text


def test_missing_records(tmp_path):
    assert "was due" in bent(tmp_path / "1", ("site-2", False), "sent", 3)
    assert "server: exchange 3" in bent(tmp_path / "2", ("site-2", True), "received", 3)


@pytest.mark.parametrize("field", ["counter", "n_values", "kind", "phase"])
def test_fields_that_do_not_fit(tmp_path, field):
    value = {"counter": 9, "n_values": 5, "kind": "METRIC", "phase": "update:9"}[field]
    assert bent(tmp_path, ("site-2", False), "sent", 3, **{field: value})


@pytest.mark.parametrize("profile", ["masks", "bfv", "ckks"])
def test_leak_is_found_even_if_all_parties_call_the_kind_public(tmp_path, profile):
    def bend(by, peer, way, count, fields):
        if fields["kind"] == "HISTOGRAM":
            return {**fields, "codec": "PUBLIC", "private": False}
        return fields

    text = only_failures(complete_attempt(tmp_path, profile=profile, bend=bend))
    assert "HISTOGRAM is recorded as public, which it is not" in text


def test_leak_written_by_a_changed_program(tmp_path):
    complete_attempt(tmp_path)
    for name in (*SITES, "server"):

        def leak(records):
            for record in records:
                if record.get("kind") == "HISTOGRAM":
                    record.update(codec="PLAIN", salt="private")

        rewrite(tmp_path / export_name(name), leak)
    assert "LEAK: private message HISTOGRAM travelled as PLAIN" in only_failures(tmp_path)


@pytest.mark.parametrize(("profile", "codec"), [("masks", "BFV"), ("masks", "CKKS"), ("bfv", "CKKS"), ("ckks", "BFV")])
def test_weaker_protection_than_the_profile_names_is_a_leak(tmp_path, profile, codec):
    def bend(by, peer, way, count, fields):
        return {**fields, "codec": codec} if fields["kind"] == "METRIC" else fields

    assert "LEAK: private message METRIC" in only_failures(complete_attempt(tmp_path, profile=profile, bend=bend))


def test_unknown_kind_and_profile(tmp_path):
    def bend(by, peer, way, count, fields):
        return {**fields, "kind": "SURPRISE"} if fields["kind"] == "METRIC" else fields

    text = only_failures(complete_attempt(tmp_path, bend=bend))
    assert "'SURPRISE' is not in the catalogue" in text
    complete = tmp_path / "other"
    complete_attempt(complete)
    for name in (*SITES, "server"):
        rewrite(complete / export_name(name), lambda records: records[0].update(profile="magic"))
    assert "profile magic is unknown" in only_failures(complete)


def test_sites_with_different_models(tmp_path):
    attempt = Attempt(tmp_path)
    attempt.open_session()
    attempt.round(0)
    attempt.logs["site-2"].model("model.json", 1234, b"x" * 32)
    for site in ("site-1", "site-3"):
        attempt.logs[site].model("model.json", 1234, b"y" * 32)
    attempt.exchange_heads()
    for log in attempt.logs.values():
        log.end("completed")
    assert "site-2 and site-1 ended with different models" in only_failures(attempt.close())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parameters_hash": "bb"}, "different parameters hash"),
        ({"signed": False, "certificate": None}, "different signed"),
        ({"public_key_fingerprints": {}}, "different public keys"),
        ({"versions": {"xgboost": "3.2.1"}}, "versions of xgboost"),
        ({"certificate": "certificate of site-3"}, "names another site"),
        ({"certificate": "certificate of site-2, forged"}, "not the one that the sites verified"),
    ],
)
def test_session_that_the_sites_do_not_agree_on(tmp_path, changes, expected):
    attempt = Attempt(tmp_path, signed=True)
    attempt.open_session(**{"site-2": changes})
    attempt.round(0)
    assert expected in only_failures(attempt.finish())


@pytest.mark.parametrize("by_sites", [True, False])
def test_xgboosts_may_differ_where_the_sites_grew_the_trees_and_nowhere_else(tmp_path, by_sites):
    attempt, facts = Attempt(tmp_path), grown_fact(by_sites=by_sites)
    unlike = {"protection": facts, "versions": {"xgboost": "3.4.1"}}
    attempt.open_session(**{"site-1": {"protection": facts}, "site-2": unlike, "site-3": unlike})
    attempt.round(0)
    if by_sites:
        assert not check(attempt.finish()).failures
    else:
        assert "versions of xgboost" in only_failures(attempt.finish())


_SAID = "protocols that the sites speak"
SPOKEN = protocol_facts(1, {"site-1": (1, 2), "site-2": (1, 1), "site-3": (1, 3)})


@pytest.mark.parametrize("odd", [None, *SPOKEN])
def test_releases_may_differ_where_all_sites_recorded_what_they_speak(tmp_path, odd):
    attempt = Attempt(tmp_path)
    newer = {"protection": SPOKEN, "versions": {"xgboost": "3.2.0", "veilboost": "0.15.0"}}
    lacks = {"protection": {name: value for name, value in SPOKEN.items() if name != odd}}
    attempt.open_session(**{"site-1": lacks, "site-2": newer, "site-3": newer})
    attempt.round(0)
    if odd is None:
        assert check(attempt.finish()).sound
    else:
        assert "site-1" in only_failures(attempt.finish())


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "different versions of veilboost"),
        ({**SPOKEN, "protocol": 2}, "followed protocol 2, on which the sites cannot have agreed"),
        ({**SPOKEN, "protocol": "1"}, "cannot have agreed"),
        (protocol_facts(2, {"site-1": (1, 2), "site-2": (2, 2), "site-3": (2, 3)}) | {"protocol": 1}, "cannot have"),
        (protocol_facts(1, {"site-1": (1, 1), "site-2": (2, 2), "site-3": (1, 2)}), "cannot have agreed"),
        (protocol_facts(1, {"site-1": (1, 1), "site-2": (1, 1)}), "does not record which protocols each site speaks"),
        (protocol_facts(1, dict.fromkeys(("site-1", "site-2", "x"), (1, 1))), "does not record which protocols"),
        ({"protocol": 1}, "does not record which protocols"),
        ({**SPOKEN, _SAID: f"site-1 2-2, {SPOKEN[_SAID]}"}, "does not record which protocols"),  # one site twice
        ({**SPOKEN, _SAID: "site-1 0-1"}, "does not record which protocols"),
    ],
)
def test_a_protocol_that_does_not_follow_from_what_the_sites_speak_is_noticed(tmp_path, facts, expected):
    attempt = Attempt(tmp_path)
    newer = {"versions": {"xgboost": "3.2.0", "veilboost": "0.15.0"}}
    attempt.open_session(**{site: {"protection": facts} | (newer if site == "site-2" else {}) for site in SITES})
    attempt.round(0)
    assert expected in only_failures(attempt.finish())


@pytest.mark.parametrize("odd", [{"key_bits": 2048}, {"epsilon": "9"}, {"preset": "exact"}])
def test_sites_must_have_had_the_same_protection(tmp_path, odd):
    facts = {"key_bits": 3072, "epsilon": "1", "preset": "guarded"}
    attempt = Attempt(tmp_path)
    attempt.open_session(
        **{
            "site-1": {"protection": facts},
            "site-2": {"protection": facts | {"own": "x"}},
            "site-3": {"protection": facts | odd},
        }
    )
    attempt.round(0)
    text = only_failures(attempt.finish())
    assert text.count("different protection") == 1
    assert f"site-3 and site-1 recorded different protection: {next(iter(odd))} is" in text


def test_rewritten_log_contradicts_the_heads_at_the_other_sites(tmp_path):
    # Nothing but a field that no other log repeats: only the heads speak against it.
    complete_attempt(tmp_path)
    rewrite(tmp_path / export_name("site-2"), lambda records: records[3].update(policy_hash="00"))
    assert "head of site-2 that is not in that party's log: one was rewritten" in only_failures(tmp_path)


def test_rewritten_tail_of_a_signed_log_breaks_its_seal(tmp_path):
    complete_attempt(tmp_path, signed=True)

    def change(records):
        assert records[-3]["type"] == "heads"
        records[-3]["heads"].sort(key=lambda head: head["site"], reverse=True)

    rewrite(tmp_path / export_name("site-2"), change)
    assert "signature of the last record does not verify" in only_failures(tmp_path)


def test_forged_signature_of_a_head(tmp_path):
    complete_attempt(tmp_path, signed=True)

    def change(records):
        first = next(r for r in records if r["type"] == "heads")
        first["heads"][1]["signature"] = "00" * 32

    rewrite(tmp_path / export_name("site-1"), change)
    assert "the head of site-2 does not verify" in only_failures(tmp_path)


@pytest.mark.parametrize("place", ["round", "end"])
def test_heads_not_exchanged(tmp_path, place):
    complete_attempt(tmp_path)

    def change(records):
        heads = [i for i, r in enumerate(records) if r["type"] == "heads"]
        del records[heads[0 if place == "round" else -1]]

    rewrite(tmp_path / export_name("site-1"), change)
    expected = {"round": "no heads were exchanged after round 0", "end": "final heads of all sites are missing"}
    assert expected[place] in only_failures(tmp_path)


def test_aborted_attempt_is_consistent_but_not_verified(tmp_path):
    attempt = Attempt(tmp_path)
    attempt.open_session()
    attempt.round(0)
    attempt.logs["site-1"].record("sent", attempt.counter, "HISTOGRAM", "update:1", "MASKED", 1, bytes(8), private=True)
    for log in attempt.logs.values():
        log.end("aborted", "no message from site-2 within 60 s")
    result = check(attempt.close())
    assert not result.sound and result.attempts[0].failures == ()
    assert "NOT VERIFIED: the job was not completed" in render(result)
    assert "no message from site-2" in render(result)
    # The same job, completed at the second attempt: the whole folder holds.
    complete_attempt(tmp_path / "second", attempt="a2", number=2)
    assert check(tmp_path).sound


@pytest.mark.parametrize("kind", ["CONVERSATION", "OWN_TREES"])
def test_no_log_may_be_missing_where_conversations_or_trees_were_sealed_between_sites(tmp_path, kind):
    """A site, or the server for it, could hide what its log of an attempt says of rows."""
    for name, codec in (("early", "AGREEMENT"), ("late", kind)):
        attempt = Attempt(tmp_path / name / "first", profile="elgamal" if kind == "CONVERSATION" else "own_trees")
        attempt.open_session()
        attempt.exchange(codec, "SEALED", "setup:0")
        for log in attempt.logs.values():
            log.end("aborted", "no message from site-2 within 60 s")
        (attempt.close() / export_name("site-2")).unlink()
        complete_attempt(tmp_path / name / "second", attempt="a2", number=2)
    assert check(tmp_path / "early").sound
    assert "the log of site-2 is missing" in only_failures(tmp_path / "late")


def test_unfinished_log(tmp_path):
    complete_attempt(tmp_path)
    path = tmp_path / export_name("site-1")
    rewrite(path, lambda records: records.pop())
    assert "never closed" in only_failures(tmp_path)


def test_private_salts_are_compared_by_size_and_frame_salts_by_content(tmp_path):
    result = check(complete_attempt(tmp_path / "private", profile="plain", salt=b""))
    assert result.sound and "by kind and size, not by content" in render(result)
    result = check(complete_attempt(tmp_path / "frame", profile="plain"))
    assert result.sound and "not by content" not in render(result)


def test_evidence_of_the_time_before_salts_still_verifies_and_still_shows_a_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "UNSALTED_CODECS", frozenset({"PUBLIC", "SEALED", "MASKED"}))
    assert check(complete_attempt(tmp_path / "good")).sound

    def bend(party, peer, direction, counter, fields):
        return {**fields, "payload": b"other"} if (party, direction, counter) == (SERVER, "received", 2) else fields

    result = check(complete_attempt(tmp_path / "bad", bend=bend))
    assert not result.sound


@pytest.mark.parametrize("salt", [b"s" * 16, b""])
def test_a_salt_does_not_hide_a_difference(tmp_path, salt):
    """With the frame's salt contents are compared; were it kept back, sizes still are."""

    def bend(party, peer, direction, counter, fields):
        other = fields["payload"] + b"x" if not salt else b"y" * len(fields["payload"])
        return {**fields, "payload": other} if (party, direction, counter) == (SERVER, "received", 2) else fields

    assert not check(complete_attempt(tmp_path, bend=bend, salt=salt)).sound


def test_command_line(tmp_path, capsys):
    complete_attempt(tmp_path)
    assert cli(tmp_path) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("UNSIGNED: the records of job job agree")
    assert cli("--json", tmp_path) == 2
    document = json.loads(capsys.readouterr().out)
    assert not document["verified"] and document["sound"] and document["verdict"] == "UNSIGNED"
    assert document["exit_code"] == 2 and document["attempts"][0]["messages"][0]["kind"] == "HANDSHAKE"
    (tmp_path / export_name("site-1")).unlink()
    assert cli(tmp_path) == 1


def test_audit_is_a_value(tmp_path):
    [attempt] = check(complete_attempt(tmp_path)).attempts
    assert isinstance(attempt, Audit) and hash(attempt.failures) == hash(())
