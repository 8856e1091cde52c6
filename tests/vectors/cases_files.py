"""Vectors of evidence and ledgers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dp_components import events, ledger
from dp_components.accounting import count_events
from nvflare_plugins.evidence import format
from nvflare_plugins.evidence.log import EvidenceLog
from tests.vectors.drawn import Case, damages, drawn

_AT = "2026-01-31T12:00:00Z"
_ROW = events.NeighbouringRelation.ADD_OR_REMOVE_ROW
Records = list[dict[str, Any]]


def _clock() -> datetime:
    return datetime(2026, 1, 31, 12, tzinfo=UTC)


def site_log(signed: bool, role: str = "site") -> bytes:
    """Return the log of a small job, as the product writes it."""
    site = "site-1" if role == "site" else "server"
    with tempfile.TemporaryDirectory() as folder:
        log = EvidenceLog(Path(folder) / "log", site, "job-1", "00" * 16, "masks", role=role, clock=_clock)
        if role == "site":
            log.session(
                sites=["site-1", "site-2"],
                signed=signed,
                public_key_fingerprints={"site-1": "ab" * 32, "site-2": "cd" * 32},
                certificate_fingerprints={"site-1": "ef" * 32} if signed else {},
                parameters_hash="12" * 32,
                policy_hash="34" * 32,
                versions={"xgboost": "3.2.0"},
                certificate="PEM" if signed else None,
                protection={"key_bits": 61},
                signer=(lambda statement: drawn(statement.hex(), 64)) if signed else None,
            )
            log.content("sent", "site-2", format.Content.BLINDED_IDS, format.Protection.BLINDED, 2048)
            log.spend("leaf sums", "gaussian(2)", 0.25, 1e-06)
            log.local("ROOT_SUM", "update:0", "from the root histogram")
        log.record("sent", 0, "HANDSHAKE", "setup:0", "PUBLIC", 0, b"hello", private=False)
        log.record(
            "received", 1, "HISTOGRAM", "update:0", "MASKED", 4, b"\1" * 48, private=True, salt=drawn("salt", 16)
        )
        log.round(0)
        if role == "site":
            own = log.signed_head()
            log.countersign({site: own, "site-2": format.SignedHead("site-2", 5, drawn("head")).to_bytes()}, None)
            log.model("model.json", 1234, drawn("model"))
        log.end("completed")
        return log.close().read_bytes()


def _again(data: bytes, change: Callable[[Records], None]) -> bytes:
    """Return a log with changed records, numbered and hashed again as a forger without a key would."""
    records = [format.parse_line(line) for line in data.splitlines()]
    change(records)
    previous, lines = bytes(32), []
    for n, record in enumerate(records):
        line, previous = format.chain_line(previous, {**{k: v for k, v in record.items() if k != "hash"}, "n": n})
        lines.append(line + b"\n")
    return b"".join(lines)


def _set(records: Records, type_: str, **values: Any) -> None:
    next(r for r in records if r["type"] == type_).update(values)


def _evidence() -> Iterator[Case]:
    before = {"earlier_attempt": "11" * 16, "earlier_digest": drawn("earlier").hex()}
    good, lines = site_log(False), site_log(False).splitlines(keepends=True)
    logs = {
        "of a site": good,
        "of a site, signed": site_log(True),
        "of the server": site_log(False, "server"),
        "cut after a record": b"".join(lines[:4]),
        "of a later attempt": _again(good, lambda rs: _set(rs, "open", number=3, **before)),
        "of a later attempt without an earlier log": _again(good, lambda rs: _set(rs, "open", number=2)),
    }
    for name, data in logs.items():
        yield f"evidence {name}", "evidence", {"log": data.decode()}
    again: dict[str, Callable[[Records], Any]] = {
        "a record after the seal": lambda rs: rs.append(rs[-1]),
        "no opening": lambda rs: rs.pop(0),
        "two sessions": lambda rs: rs.insert(2, rs[1]),
        "a message after the end": lambda rs: rs.insert(-1, next(r for r in rs if r["type"] == "message")),
        "a seal without an end": lambda rs: rs.pop(-2),
        "the first attempt with one before": lambda rs: _set(rs, "open", **before),
        "half of a link": lambda rs: _set(rs, "open", number=2, earlier_attempt="11" * 16),
        "the digest of a link cut": lambda rs: _set(rs, "open", number=2, **{**before, "earlier_digest": "ab" * 31}),
        "attempt 0": lambda rs: _set(rs, "open", number=0),
        "no number of the attempt": lambda rs: rs[0].pop("number"),
        "the first format": lambda rs: _set(rs, "open", format="veilboost-evidence-1"),
        "the second format": lambda rs: _set(rs, "open", format="veilboost-evidence-2"),
        "another format": lambda rs: _set(rs, "open", format="veilboost-evidence-9"),
        "a server's role": lambda rs: _set(rs, "open", role="server"),
        "a name with a path": lambda rs: _set(rs, "open", job_id="../x"),
        "a field more": lambda rs: _set(rs, "round", x=1),
        "a field of another type": lambda rs: _set(rs, "round", round="0"),
        "true for a number": lambda rs: _set(rs, "round", round=True),
        "an unknown type": lambda rs: _set(rs, "round", type="turn"),
        "a negative size": lambda rs: _set(rs, "message", size=-1),
        "a direction": lambda rs: _set(rs, "message", direction="lost"),
        "a salt of its own": lambda rs: _set(rs, "message", salt="none"),
        "an epsilon that is infinite": lambda rs: _set(rs, "spend", epsilon="1e999"),
        "an epsilon in words": lambda rs: _set(rs, "spend", epsilon="nan"),
        "another ending": lambda rs: _set(rs, "end", status="done"),
        "a time of another form": lambda rs: _set(rs, "end", time="2026-1-31T12:00:00Z"),
        "a time that is none": lambda rs: _set(rs, "end", time="2026-02-30T12:00:00Z"),
        "a head without a digest": lambda rs: _set(rs, "heads", heads=[{"site": "site-1"}]),
    }
    bad = {name: _again(good, change) for name, change in again.items()}
    raw = {
        "empty": b"",
        "no line feed": good[:-1],
        "a bit": good.replace(b'"size":5', b'"size":4', 1),
        "a record dropped": b"".join(lines[:2] + lines[3:]),
        "two records exchanged": b"".join([lines[0], lines[2], lines[1], *lines[3:]]),
        "a record twice": b"".join([*lines[:2], *lines[1:]]),
        "a blank": good.replace(b'":"open"', b'": "open"', 1),
        "a fraction": good.replace(b'"n":0', b'"n":0.0', 1),
        "a key twice": good.replace(b'{"attempt"', b'{"n":0,"attempt"', 1),
        "no JSON": b"{}\n" + good,
        "beyond ASCII": good.replace(b"model.json", "mödel.json".encode(), 1),
        "a number of twenty digits": good.replace(b'"size":1234', b'"size":12345678901234567890', 1),
    }
    for name, data in {**bad, **raw}.items():
        yield f"evidence: {name}", "evidence", {"log": data.decode()}
    where = {"job_id": "job-1", "attempt": "00" * 16}
    for signature in (None, drawn("signature", 64)):
        data = format.SignedHead("site-1", 12, drawn("digest"), signature).to_bytes()
        yield f"head, signed {signature is not None}", "head", {**where, "data": data.hex()}
    head = format.SignedHead("site-1", 12, drawn("digest")).to_dict()
    changes = {
        "short digest": {**head, "digest": "ab"},
        "capital letters": {**head, "digest": head["digest"].upper()},
        "no record": {**head, "n_records": 0},
        "a field more": {**head, "x": 1},
        "a path": {**head, "site": "../x"},
        "empty signature": {**head, "signature": ""},
    }
    yield from damages("head", "head", where, {name: format.canonical(value) for name, value in changes.items()})
    yield from damages("head", "head", where, {"no JSON": b"{", "no object": b"[]", "beyond ASCII": "ä".encode()})
    seal = format.parse_line(logs["of a site, signed"].splitlines()[-1])
    body = {key: value for key, value in seal.items() if key not in ("hash", "signature")} | {"signature": None}
    yield "seal", "seal", {"body": body, "previous": drawn("previous").hex()}


def journal(records: list[ledger.Record]) -> bytes:
    """Return a ledger's file."""
    check, lines = "", []
    for record in records:
        line, check = ledger._line({**record, "at": _AT}, check)
        lines.append(line)
    return b"".join(lines)


def _ledgers() -> dict[str, list[ledger.Record]]:
    identity = ledger.LedgerIdentity("site-1", "credit", _ROW, 2)
    gaussian = events.DiscreteGaussianEvent(2.0, _ROW, ((16.0, 4), (8.0, 1)), 2)
    part = events.DisjointPartEvent(events.ExponentialEvent(0.25, _ROW), "ensemble 3", 1)
    laplace = events.DiscreteLaplaceEvent(0.125, _ROW, ((16.0, 4), (8.0, 4)), 20, 2)
    plan = count_events(
        events.ComposedEvent((events.RepeatedEvent(gaussian, 10), events.LaplaceEvent(0.5, _ROW), laplace, part))
    )
    spent = [count_events(event) for event in (gaussian, events.LaplaceEvent(0.5, _ROW))]
    begun: list[ledger.Record] = [
        {"record": "ledger", "version": 1, **asdict(identity), "relation": _ROW.value},
        {"record": "budget", "epsilon": 4.0, "delta": 1e-5, "pure_epsilon": 1.0, "zcdp_rho": 0.0},
    ]
    value = np.array([[1, -2], [3, (1 << 40)]])
    running = [
        *begun,
        {"record": "open", "job": "job-1", "plan": ledger._documents(plan), "can_resume": True},
        ledger.release_record("job-1", "leaf sums of tree 0", spent[0], value),
        ledger.release_record("job-1", "start", spent[1], np.array(7)),
        {"record": "interrupt", "job": "job-1"},
    ]
    ended = [*running[:-1], {"record": "close", "job": "job-1"}]
    state = ledger.LedgerState()
    for record in ended:
        state.apply({**record, "at": _AT})
    return {
        "begun": begun,
        "a job under way": running[:-1],
        "a job interrupted": running,
        "a job resumed": [*running, {"record": "resume", "job": "job-1"}],
        "a job that has ended": ended,
        "jobs summed up": ledger.summarise_closed([{**record, "at": _AT} for record in ended], state),
        "rows of a person raised": [*begun, {"record": "person", "rows_per_person": 3}, {"record": "head"}],
        "records lost": [*begun, {"record": "lost", "spent": [0.5, 0.25, 0.0, 1e-9]}, {"record": "head"}],
        "other events": [
            *begun,
            {
                "record": "open",
                "job": "j",
                "plan": [{"count": 1, **events.event_document(events.GaussianEvent(1.5, _ROW))}],
                "ends_with_process": True,
            },
        ],
    }


def _impossible(good: dict[str, list[ledger.Record]]) -> dict[str, list[ledger.Record]]:
    begun, running = good["begun"], good["a job under way"]
    event = {"count": 1, "event": "gaussian", "noise_multiplier": 1.0, "relation": _ROW.value}

    def opened(**changes: Any) -> list[ledger.Record]:
        return [*begun, {"record": "open", "job": "j", "plan": [{**event, **changes}]}]

    release = running[3]
    return {
        "no beginning": begun[1:],
        "two beginnings": [*begun, begun[0]],
        "version 2": [{**begun[0], "version": 2}],
        "an unknown record": [*begun, {"record": "gift"}],
        "an unknown relation": [{**begun[0], "relation": "friends"}],
        "no rows of a person": [{**begun[0], "rows_per_person": 0}],
        "rows of a person lowered": [*begun, {"record": "person", "rows_per_person": 2}],
        "a field more": [*begun, {"record": "person", "rows_per_person": 3, "x": 1}],
        "a job twice": [*running, running[2]],
        "a release of no job": [*begun, release],
        "a query twice": [*running, release],
        "a release while interrupted": [*good["a job interrupted"], {**release, "query": "x"}],
        "resumed without need": [*running, {"record": "resume", "job": "job-1"}],
        "a value of another shape": [*running[:3], {**release, "shape": [3]}],
        "a value that is no base64": [*running[:3], {**release, "value": "@"}],
        "an unknown event": opened(event="magic"),
        "an event with a field more": opened(x=1),
        "no count": [
            *begun,
            {"record": "open", "job": "j", "plan": [{k: v for k, v in event.items() if k != "count"}]},
        ],
        "a count of nothing": opened(count=0),
        "a count that is true": opened(count=True),
        "a multiplier of nothing": opened(noise_multiplier=0),
        "a multiplier in words": opened(noise_multiplier="1"),
        "closed without being open": [*begun, {"record": "close", "job": "j"}],
        "resumable in words": [*begun, {"record": "open", "job": "j", "plan": [], "can_resume": "yes"}],
    }


def _ledger_cases() -> Iterator[Case]:
    good = _ledgers()
    for name, records in good.items():
        yield f"ledger: {name}", "ledger", {"journal": journal(records).decode()}
    for name, records in _impossible(good).items():
        yield f"ledger refused: {name}", "ledger", {"journal": journal(records).decode()}
    data = journal(good["a job under way"])
    lines = data.splitlines(keepends=True)
    yield "ledger: a line that a crash cut off", "ledger", {"journal": data[:-9].decode()}
    yield "ledger: nothing", "ledger", {"journal": ""}
    raw = {
        "a bit": data.replace(b'"epsilon": 4.0', b'"epsilon": 9.0', 1),
        "a record dropped": b"".join(lines[:2] + lines[3:]),
        "two records exchanged": b"".join([lines[0], lines[2], lines[1], *lines[3:]]),
        "a record twice": b"".join([*lines, lines[-1]]),
        "a blank": data.replace(b'"site": ', b'"site":  ', 1),
        "no JSON": data + b"{\n",
        "no object": data + b"[]\n",
        "no check": data + b'{"record": "head"}\n',
    }
    for name, changed in raw.items():
        yield f"ledger refused: {name}", "ledger", {"journal": changed.decode()}
    records = good["records lost"]
    whole = journal(records)

    def head(n: int, following: int | None = None, **changes: Any) -> str:
        ends = [
            [len(part), json.loads(part.splitlines()[-1])["check"]]
            for part in (journal(records[:k]) for k in (n, following or n))
        ]
        document = {"position": ends[0], "following": ends[1] if following else None, "spent": [0.0, 0.0, 0.0, 0.0]}
        return json.dumps({**document, **changes}) + "\n"

    for name, text in {
        "at its end": head(4),
        "before its end": head(2),
        "of another file, then this one": head(4, 4, position=[len(whole) + 80, "0" * 32]),
        "beyond its end": json.dumps({"position": [len(whole) + 80, "0" * 32], "following": None, "spent": [0.0] * 4}),
    }.items():
        yield f"ledger with a head {name}", "ledger", {"journal": whole.decode(), "head": text}
    for name, text in {
        "empty": "",
        "no object": "[]",
        "three costs": head(4, spent=[0.0] * 3),
        "a cost below nothing": head(4, spent=[-1.0, 0.0, 0.0, 0.0]),
        "no position": head(4, position=None),
        "a position of nothing": head(4, position=[0, "0" * 32]),
        "a short check": head(4, position=[9, "0"]),
    }.items():
        yield f"ledger refused: head {name}", "ledger", {"journal": whole.decode(), "head": text}


def cases() -> Iterator[Case]:
    """Yield the cases."""
    yield from _evidence()
    yield from _ledger_cases()
