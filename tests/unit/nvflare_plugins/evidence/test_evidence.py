"""The evidence log: chain, salts, leaks refused, heads, sealing, durability."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
from pathlib import Path

import pytest

from he_processors.errors import AuthenticationError, ProtocolError
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.evidence import format as lines_module
from nvflare_plugins.evidence import log as evidence_module
from nvflare_plugins.evidence.format import (
    GENESIS,
    SignedHead,
    canonical,
    chain_line,
    export_name,
    parse_line,
    read_chain,
    read_time,
    time_text,
)
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.wire.envelope import commitment
from tests.simulation.disk import Disk


def make_log(folder: Path, site: str = "site-1", profile: str = "masks", **more) -> EvidenceLog:
    return EvidenceLog(folder / export_name(site), site, "job", "00ff", profile, **more)


def send(log: EvidenceLog, counter: int = 0, codec: str = "MASKED", payload: bytes = b"x" * 8, **more) -> None:
    log.record("sent", counter, "HISTOGRAM", "update:0", codec, 1, payload, private=True, **more)


def records(path: Path) -> list[dict]:
    return [record for record, _ in read_chain(path)]


def test_chain_hash_known_answer():
    # Fixed once; a change of it makes old evidence unreadable.
    body = {"n": 0, "type": "open"}
    assert canonical(body) == b'{"n":0,"type":"open"}'
    assert chain_line(GENESIS, body)[1].hex() == "f1296528a1e5edde2268544d21de5cee14ff0acd7cc60913ecc79f3b9bcb1d98"
    assert commitment(b"payload", bytes(16)) == "2a20b36fdd042dd595911c0c6651aa04a910f3e5cceff638ad1058a066864355"
    assert commitment(b"payload") == "7be2ceb06ab5c31445174f9246b0532ab106c2699999e64feb5339c4d1413665"


def test_a_round_survives_a_loss_of_power_with_the_name_of_its_file(tmp_path, monkeypatch):
    disk = Disk(tmp_path / "site")
    (tmp_path / "site").mkdir()
    fsync = lambda descriptor: disk.synced(Path(os.readlink(f"/proc/self/fd/{descriptor}")))  # noqa: E731
    monkeypatch.setattr(os, "fsync", fsync)
    log = make_log(tmp_path / "site")
    log.round(0)
    send(log, payload=b"y" * 100)
    for seed in range(20):
        left = Path(shutil.copytree(tmp_path / "site", tmp_path / f"left-{seed}"))
        disk.lose_power(left, random.Random(seed))
        kept = (left / "site-1.evidence.jsonl.partial").read_bytes().splitlines()
        assert [json.loads(line)["type"] for line in kept[:2]] == ["open", "round"]


def test_finished_name_means_finished_log(tmp_path):
    log = make_log(tmp_path)
    send(log)
    log.flush()
    assert not log.path.exists() and (tmp_path / "site-1.evidence.jsonl.partial").exists()
    log.end("completed")
    path = log.close()
    assert path == log.path and [r["type"] for r in records(path)] == ["open", "message", "end", "seal"]
    assert log.close() == path


def test_evidence_is_never_overwritten(tmp_path):
    make_log(tmp_path).close()
    with pytest.raises(FileExistsError):
        make_log(tmp_path)


def test_log_closed_without_end_says_aborted(tmp_path):
    log = make_log(tmp_path)
    end = records(log.close())[-2]
    assert end["type"] == "end" and end["status"] == "aborted"


@pytest.mark.parametrize("profile", ["masks", "bfv", "ckks"])
@pytest.mark.parametrize("codec", ["PLAIN", "PLAIN_32", "PUBLIC"])
@pytest.mark.parametrize("direction", ["sent", "received"])
def test_private_message_in_clear_is_refused_and_not_recorded(tmp_path, profile, codec, direction):
    log = make_log(tmp_path, profile=profile)
    head = log.signed_head()
    with pytest.raises(ProtocolError, match="HISTOGRAM pass in clear"):
        log.record(direction, 0, "HISTOGRAM", "update:0", codec, 1, b"secret", private=True)
    assert log.signed_head() == head


def test_message_record_holds_sizes_and_hash_but_no_payload(tmp_path):
    log = make_log(tmp_path)
    send(log, 7, payload=b"\x01\x02secret", salt=b"s" * 16)
    path = log.close()
    assert records(path)[1] == {
        "type": "message",
        "n": 1,
        "direction": "sent",
        "counter": 7,
        "kind": "HISTOGRAM",
        "phase": "update:0",
        "codec": "MASKED",
        "private": True,
        "n_values": 1,
        "size": 8,
        "sha256": commitment(b"\x01\x02secret", b"s" * 16),
        "salt": "frame",
        "peers": ["server"],
        "hash": records(path)[1]["hash"],
    }
    assert b"secret" not in path.read_bytes()


def test_plain_payloads_are_salted_and_the_salts_stay_private(tmp_path):
    log = make_log(tmp_path, profile="plain")
    send(log, 0, "PLAIN", b"\x05")
    send(log, 1, "PLAIN", b"\x05")
    path = log.close()
    first, second = records(path)[1:3]
    assert first["sha256"] != second["sha256"] != commitment(b"\x05")
    salts = tmp_path / "site-1.evidence.salts"
    assert stat.S_IMODE(salts.stat().st_mode) == 0o600
    kept = [json.loads(line) for line in salts.read_bytes().splitlines()]
    assert [k["n"] for k in kept] == [1, 2]
    assert commitment(b"\x05", bytes.fromhex(kept[0]["salt"])) == first["sha256"]
    assert kept[0]["salt"].encode() not in path.read_bytes()


@pytest.mark.parametrize("codec", ["MASKED", "BFV", "CKKS", "PLAIN"])
def test_sums_are_never_committed_to_without_a_salt_and_the_server_keeps_no_opening(tmp_path, codec):
    """An unsalted hash of masked sums can be tested by whoever knows the masks: the other sites together."""
    for site, role in (("site-1", "site"), ("server", "server")):
        log = make_log(tmp_path, site, "plain", role=role)
        send(log, codec=codec)
        send(log, 1, codec=codec, salt=b"s" * 16)
        own, given = records(log.close())[1:3]
        assert (own["salt"], given["salt"]) == ("private", "frame")
        assert given["sha256"] == commitment(b"x" * 8, b"s" * 16)
        assert commitment(b"x" * 8) not in (own["sha256"], given["sha256"])
        assert (tmp_path / f"{site}.evidence.salts").exists() == (role == "site")


@pytest.mark.parametrize("codec", ["PUBLIC", "SEALED"])
def test_what_holds_nothing_to_guess_needs_no_salt(tmp_path, codec):
    log = make_log(tmp_path)
    log.record(
        "sent", 0, "AGREEMENT" if codec == "SEALED" else "CLOSING", "setup:0", codec, 0, b"x", private=codec == "SEALED"
    )
    [record] = records(log.close())[1:2]
    assert (record["salt"], record["sha256"]) == (None, commitment(b"x"))


def test_salt_of_the_frame_makes_both_ends_agree(tmp_path):
    one, two = make_log(tmp_path, profile="plain"), make_log(tmp_path, "server", "plain", role="server")
    send(one, codec="PLAIN", salt=b"s" * 16)
    two.record(
        "received", 0, "HISTOGRAM", "update:0", "PLAIN", 1, b"x" * 8, private=True, peers=("site-1",), salt=b"s" * 16
    )
    assert records(one.close())[1]["sha256"] == records(two.close())[1]["sha256"]
    with pytest.raises(ValueError, match="16 bytes"):
        send(make_log(tmp_path, "site-2", "plain"), codec="PLAIN", salt=b"short")


def test_equal_but_distinct_payloads_hash_alike_whatever_was_hashed_before(tmp_path):
    log = make_log(tmp_path)
    payloads = [b"a" * 8, b"b" * 8, bytes(bytearray(b"a" * 8))]
    for counter, payload in enumerate([payloads[0], payloads[0], payloads[1], payloads[2]]):
        send(log, counter, payload=payload, salt=b"s" * 16)
    digests = [r["sha256"] for r in records(log.close())[1:5]]
    assert digests == [commitment(p, b"s" * 16) for p in (payloads[0], payloads[0], payloads[1], payloads[2])]


class Keys:
    """Stand-in for certificates: a signature is the statement under the site's word."""

    def signer(self, site: str):
        return lambda statement: site.encode() + b":" + statement[:20] + statement[-40:]

    def verify(self, site: str, statement: bytes, signature: bytes) -> None:
        if signature != self.signer(site)(statement):
            raise AuthenticationError("signature")


def test_heads_are_checked_and_recorded(tmp_path):
    keys = Keys()
    logs = {site: make_log(tmp_path, site, signer=keys.signer(site)) for site in ("site-1", "site-2")}
    for log in logs.values():
        log.round(0)
    heads = {site: log.signed_head() for site, log in logs.items()}
    for log in logs.values():
        log.countersign(heads, keys.verify)
    record = records(logs["site-1"].close())[2]
    assert record["type"] == "heads"
    assert [SignedHead.from_dict(h).to_bytes() for h in record["heads"]] == list(heads.values())


def test_bad_heads_are_refused(tmp_path):
    keys = Keys()
    log = make_log(tmp_path, signer=keys.signer("site-1"))
    peer = SignedHead("site-2", 5, b"d" * 32)
    signed = SignedHead("site-2", 5, b"d" * 32, keys.signer("site-2")(peer.statement("job", "00ff")))
    other_attempt = SignedHead("site-2", 5, b"d" * 32, keys.signer("site-2")(peer.statement("job", "00fe"))[:-1])
    with pytest.raises(AuthenticationError, match="not signed"):
        log.countersign({"site-2": peer.to_bytes()}, keys.verify)
    with pytest.raises(AuthenticationError):
        log.countersign({"site-2": other_attempt.to_bytes()}, keys.verify)
    with pytest.raises(ProtocolError, match="names another site"):
        log.countersign({"site-3": signed.to_bytes()}, keys.verify)
    with pytest.raises(ProtocolError, match="not the one this site sent"):
        log.countersign({"site-1": SignedHead("site-1", 1, b"d" * 32).to_bytes()}, None)
    log.countersign({"site-2": signed.to_bytes()}, keys.verify)
    with pytest.raises(ProtocolError, match="does not go forward"):
        log.countersign({"site-2": signed.to_bytes()}, keys.verify)


def test_head_statement_binds_job_attempt_site_and_place():
    head = SignedHead("site-1", 3, b"d" * 32)
    statements = {
        head.statement("job", "a"),
        head.statement("job", "b"),
        head.statement("job2", "a"),
        SignedHead("site-2", 3, b"d" * 32).statement("job", "a"),
        SignedHead("site-1", 4, b"d" * 32).statement("job", "a"),
        SignedHead("site-1", 3, b"e" * 32).statement("job", "a"),
    }
    assert len(statements) == 6


def test_signed_session_needs_signer_and_certificate(tmp_path):
    facts = {
        "sites": ["site-1"],
        "public_key_fingerprints": {},
        "certificate_fingerprints": {},
        "parameters_hash": "ab",
        "policy_hash": "cd",
        "versions": {"xgboost": "3.2.0"},
    }
    log = make_log(tmp_path)
    with pytest.raises(ValueError, match="signer"):
        log.session(signed=True, **facts)
    log.session(signed=False, **facts)
    assert records(log.close())[1]["signed"] is False


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "a\nb", ".hidden", "x" * 200, "a\x1b[2J"])
def test_names_that_are_paths_or_unprintable_are_refused(tmp_path, name):
    with pytest.raises(ProtocolError):
        export_name(name)
    with pytest.raises(ValueError):
        EvidenceLog(tmp_path / "x.evidence.jsonl", name, "job", "0", "masks")
    with pytest.raises(ProtocolError):
        SignedHead.from_dict({"site": name, "n_records": 1, "digest": "00" * 32, "signature": None})


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b'{"a":1.5}',
        b'{"a":NaN}',
        b'{"b":1,"a":1}',
        b'{"a":1,"a":1}',
        b'{"a": 1}',
        b"\xff",
        b'{"a":"\xc3\xa9"}',
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"a":' + b"9" * 5_000 + b"}",
        b'{"a":"' + b"x" * (1 << 20) + b'"}',
    ],
)
def test_hostile_lines_are_refused(line):
    with pytest.raises(ProtocolError):
        parse_line(line)


def test_file_without_last_line_end_or_with_a_huge_line_is_refused(tmp_path):
    path = make_log(tmp_path).close()
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ProtocolError, match="middle of a line"):
        records(path)
    path.write_bytes(data + b"9" * (2 << 20) + b"\n")
    with pytest.raises(ProtocolError):
        records(path)


def test_records_go_nowhere_after_close(tmp_path):
    log = make_log(tmp_path)
    log.close()
    with pytest.raises(ValueError, match="closed"):
        send(log)
    assert os.listdir(tmp_path) == ["site-1.evidence.jsonl"]


class SmallDisk:
    """Stands in for the module ``os`` in evidence/log.py: a folder that holds so many bytes, or fails with ``code``."""

    def __init__(self, folder: Path, size: int, code: int = errno.ENOSPC):
        self._folder, self._size, self._code = folder, size, code

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, descriptor: int, content: bytes) -> int:
        free = self._size - sum(path.stat().st_size for path in self._folder.iterdir())
        if free <= 0:
            raise OSError(self._code, os.strerror(self._code), str(self._folder))
        return os.write(descriptor, bytes(content)[:free])  # what fits, as a disk does


@pytest.mark.parametrize("room", [0, 1, 100, 70_000, 140_000])
@pytest.mark.parametrize("signed", [False, True])
def test_a_full_disk_leaves_whole_evidence_that_says_so(tmp_path, monkeypatch, room, signed):
    monkeypatch.setattr(lines_module, "os", SmallDisk(tmp_path, (1 << 18) + room))
    log = make_log(tmp_path, signer=(lambda statement: b"s" * 64) if signed else None)
    with pytest.raises(OSError) as raised:
        for number in range(10_000):
            send(log, number)
            if number % 50 == 49:
                log.round(number // 50)
    log.abandon(reason_of(raised.value))
    end, seal = records(log.path)[-2:]
    assert (end["status"], seal["type"]) == ("aborted", "seal") and "the disk is full" in end["reason"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith((".reserve", ".partial"))]


def test_a_disk_that_is_full_at_the_last_moment_does_not_undo_the_job(tmp_path, monkeypatch):
    log = make_log(tmp_path)
    send(log)
    log.flush()
    monkeypatch.setattr(lines_module, "os", SmallDisk(tmp_path, (1 << 18) + 50))
    log.end("completed")
    assert records(log.close())[-2]["status"] == "completed"


@pytest.mark.parametrize("operation", ["write", "fsync"])
@pytest.mark.parametrize("again", [EvidenceLog.close, lambda log: log.abandon("the disk")])
def test_a_log_whose_seal_the_disk_refused_at_first_has_one_seal(tmp_path, monkeypatch, operation, again):
    log = make_log(tmp_path)
    log.end("completed")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="once"):
        patch.setattr(lines_module.os, operation, lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "once")))
        log.close()
    again(log)
    assert [r["type"] for r in records(log.path)] == ["open", "end", "seal"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_broken_disk_does_not_hide_why_the_attempt_ended(tmp_path, monkeypatch, caplog, code):
    log = make_log(tmp_path)
    monkeypatch.setattr(lines_module, "os", SmallDisk(tmp_path, 0, code))
    log.abandon("a peer has gone")
    assert "has no end" in caplog.text and str(tmp_path) not in caplog.text
    assert log.close() == log.path and not log.path.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"site": "../site-2"},
        {"n_records": 0},
        {"n_records": True},
        {"digest": "00" * 31},
        {"digest": "0G" * 32},
        {"signature": "AB"},
    ],
    ids=str,
)
def test_heads_of_another_form_are_refused(change):
    head = SignedHead("site-2", 5, b"d" * 32).to_dict()
    assert SignedHead.from_dict(head).to_dict() == head
    with pytest.raises(ProtocolError, match="evidence head"):
        SignedHead.from_dict({**head, **change})


@pytest.mark.parametrize("text", ["2026-1-31T12:00:00Z", "2026-02-30T12:00:00Z", "2026-01-31 12:00:00", ""])
def test_times_of_another_form_are_refused(text):
    assert time_text(read_time("2026-01-31T12:00:00Z")) == "2026-01-31T12:00:00Z"
    with pytest.raises(ProtocolError, match="a time in evidence"):
        read_time(text)


def test_a_record_that_found_no_memory_leaves_the_chain_as_it_was(tmp_path, monkeypatch):
    log = make_log(tmp_path)
    send(log)
    with monkeypatch.context() as patch:
        patch.setattr(evidence_module, "chain_line", lambda head, body: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            send(log, 1)
    log.abandon("memory")
    assert [r["type"] for r in records(log.path)] == ["open", "message", "end", "seal"]
