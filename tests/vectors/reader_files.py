"""The reader's part for evidence and ledgers; see `reader.py`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tests.vectors.form import Given, blob
from tests.vectors.reader import Refused, require

# -- 9. Evidence ------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.@ -]{0,126}[A-Za-z0-9_])?")
_DECIMAL = re.compile(r"[0-9][0-9.]{0,39}(?:e[+-]?[0-9]{1,4})?", re.ASCII)
_HEX = re.compile(r"(?:[0-9a-f]{2})+")


def _name(value: Any) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value)) and ".." not in value


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_name, value))


def _map(value: Any) -> bool:
    return isinstance(value, dict) and all(type(one) in (str, int) for one in value.values())


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return type(value) is int


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _optional(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _spent(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(_DECIMAL.fullmatch(value)) and math.isfinite(float(value))
    except ValueError:
        return False


def _time(value: Any) -> bool:
    try:
        moment = datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except (TypeError, ValueError):
        return False
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") == value


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) in (str, type(None)) and value in values


Rules = dict[str, Callable[[Any], bool]]
_WAY = _one_of("sent", "received")
TYPES: dict[str, Rules] = {
    "open": {"format": _text, "role": _one_of("site", "server"), "site": _name, "job_id": _name, "attempt": _name}
    | {"profile": _name, "time": _time, "number": _number, "earlier_attempt": _optional, "earlier_digest": _optional},
    "session": {"sites": _names, "signed": _flag, "public_keys": _map, "certificates": _map, "versions": _map}
    | {"protection": _map, "certificate": _optional, "parameters_hash": _text, "policy_hash": _text, "time": _time},
    "message": {"direction": _WAY, "counter": _count, "kind": _name, "phase": _text, "codec": _name, "private": _flag}
    | {"n_values": _count, "size": _count, "sha256": _text, "salt": _one_of(None, "frame", "private"), "peers": _names},
    "content": {"direction": _WAY, "peer": _name, "what": _name, "protection": _name, "size": _count},
    "spend": {"query": _text, "event": _text, "epsilon": _spent, "delta": _spent},
    "local": {"kind": _name, "phase": _text, "how": _text},
    "round": {"round": _number},
    "model": {"name": _text, "size": _number, "hmac": _text},
    "heads": {"heads": lambda value: isinstance(value, list)},
    "end": {"status": _one_of("completed", "aborted"), "reason": _text, "time": _time},
    "seal": {"signature": _optional},
}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _parsed(line: bytes) -> Any:
    def integer(digits: str) -> int:
        require(len(digits.lstrip("-")) <= 19)
        return int(digits)

    def refuse(_: str) -> Any:
        raise Refused

    require(line.isascii())
    try:
        return json.loads(line, parse_int=integer, parse_float=refuse, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refused from None


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max((_depth(one) for one in inner), default=0)


def _head_of(value: Any) -> dict[str, Any]:
    require(isinstance(value, dict) and set(value) == {"site", "n_records", "digest", "signature"})
    require(_name(value["site"]) and type(value["n_records"]) is int and value["n_records"] >= 1)
    require(isinstance(value["digest"], str) and len(value["digest"]) == 64 and _HEX.fullmatch(value["digest"]))
    signature = value["signature"]
    require(signature is None or (isinstance(signature, str) and _HEX.fullmatch(signature)))
    return dict(value)


def evidence(given: Given) -> Any:
    *lines, rest = given["log"].encode().split(b"\n")
    require(lines and not rest)
    before, records = bytes(32), []
    for n, line in enumerate(lines):
        record = _parsed(line)
        require(len(line) <= 2**20 and isinstance(record, dict) and _depth(record) <= 33 and _canonical(record) == line)
        require(type(record.get("n")) is int and record["n"] == n)
        body = {key: value for key, value in record.items() if key != "hash"}
        before = hashlib.sha256(b"veilboost evidence record v1\0" + before + _canonical(body)).digest()
        require(record.get("hash") == before.hex())
        records.append(record)
    return {**_told(records), "records": len(records), "head": before.hex()}


def _told(records: list[dict[str, Any]]) -> dict[str, Any]:
    link = ("number", "earlier_attempt", "earlier_digest")
    seen: list[str] = []
    for record in records:
        rules = TYPES.get(record.get("type")) if isinstance(record.get("type"), str) else None
        require(rules is not None)
        assert rules is not None
        require(set(record) == {"type", "n", "hash", *rules})
        require(all(rule(record[name]) for name, rule in rules.items()))
        kind = record["type"]
        require((kind == "open") == (not seen) and "seal" not in seen)
        require(kind not in ("session", "end") or kind not in seen)
        require((kind == "seal") == ("end" in seen))
        seen.append(kind)
    first = records[0]
    require(first["format"] == "veilboost-evidence-3")
    number, attempt, digest = (first[name] for name in link)
    require(number >= 1 and (attempt is None) == (digest is None) and (number > 1 or digest is None))
    require(digest is None or (_name(attempt) and len(digest) == 64 and bool(_HEX.fullmatch(digest))))
    require((first["role"] == "server") == (first["site"] == "server"))

    def of(kind: str, *names: str) -> list[Any]:
        return [[record[name] for name in names] for record in records if record["type"] == kind]

    heads = [[_head_of(head)["site"] for head in heads] for (heads,) in of("heads", "heads")]
    return {
        **{name: first[name] for name in ("role", "site", "job_id", "attempt", "profile")},
        "link": [first.get(name) for name in link],
        "messages": of("message", "direction", "counter", "kind", "size", "sha256", "salt"),
        "contents": of("content", "direction", "peer", "what", "protection", "size"),
        "spends": of("spend", "query", "epsilon", "delta"),
        "rounds": [number for (number,) in of("round", "round")],
        "heads": heads,
        "completed": of("end", "status") == [["completed"]],
        "sealed": "seal" in seen,
    }


def head(given: Given) -> Any:
    found = _head_of(_parsed(blob(given["data"])))
    names = ("site", "n_records", "digest")
    statement = {name: found[name] for name in names} | {name: given[name] for name in ("job_id", "attempt")}
    signed = _canonical({"domain": "veilboost evidence head v1", **statement}).decode()
    return {
        "site": found["site"],
        "records": found["n_records"],
        "digest": found["digest"],
        "signature": found["signature"],
        "statement": signed,
    }


def seal(given: Given) -> Any:
    signed = {"domain": "veilboost evidence seal v1", "previous": given["previous"], "body": given["body"]}
    return {"statement": _canonical(signed).decode()}


# -- 10. Ledgers ------------------------------------------------------------------------------------------------------

RELATIONS = ("add_or_remove_row", "replace_row", "change_label", "change_value")


def _need(condition: object) -> None:
    require(condition, "damaged")


def _size(value: Any) -> bool:
    return type(value) in (int, float) and 1e-20 <= value <= 1e20


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 1


def _scales(value: Any) -> bool:
    pairs = isinstance(value, list) and value and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return bool(pairs) and all(_size(scale) and _whole(count) for scale, count in value)


EVENTS: dict[str, Rules] = {
    "gaussian": {"noise_multiplier": _size},
    "discrete_gaussian": {"noise_multiplier": _size, "n_shares": _whole, "scales": _scales},
    "laplace": {"epsilon": _size},
    "discrete_laplace": {"epsilon": _size, "grid_bits": _whole, "n_shares": _whole, "scales": _scales},
    "exponential": {"epsilon": _size},
    "local_randomised_response": {"epsilon": _size, "n_values": _whole},
    "concentrated": {"rho": _size},
}
Counted = Counter[str]


def _events(documents: Any) -> Counted:
    _need(isinstance(documents, list))
    counts: Counted = Counter()
    for document in documents:
        _need(isinstance(document, dict))
        event = dict(document)
        count = event.pop("count", None)
        _need(_whole(count))
        rules, relation = EVENTS.get(str(event.get("event"))), event.get("relation")
        _need(rules is not None and relation in RELATIONS)
        assert rules is not None
        part = {"partition", "part"} if "partition" in event else set()
        _need(set(event) == {"event", "relation", *rules, *part} and all(rule(event[n]) for n, rule in rules.items()))
        if part:
            _need(isinstance(event["partition"], str) and 1 <= len(event["partition"]) <= 100)
            _need(type(event["part"]) is int and event["part"] >= 0 and relation != "replace_row")
        counts[json.dumps(event, sort_keys=True)] += count
    return counts


def _listed(counts: Counted) -> list[Any]:
    pairs = [[json.loads(event), count] for event, count in counts.items()]
    return sorted(pairs, key=lambda pair: json.dumps(pair, sort_keys=True))


class Ledger:
    """What the records of a ledger add up to."""

    def __init__(self) -> None:
        self.identity: dict[str, Any] | None = None
        self.budget: dict[str, Any] | None = None
        self.open: dict[str, Any] = {}
        self.closed: dict[str, Any] = {}
        self.lost = [0.0] * 4
        self.has_head = False

    def take(self, record: dict[str, Any]) -> None:
        kind, at = record.get("record"), record.get("at")
        _need(isinstance(at, str) and (kind == "ledger") == (self.identity is None))
        method = getattr(self, f"take_{kind}", None) if isinstance(kind, str) else None
        _need(method)
        assert method is not None
        values = {name: value for name, value in record.items() if name not in ("record", "at")}
        try:
            method(at, **values)
        except (TypeError, KeyError, ValueError, IndexError, binascii.Error):
            raise Refused("damaged") from None

    def take_ledger(
        self, at: str, *, version: Any, site: Any, data_set: Any, relation: Any, rows_per_person: Any
    ) -> None:
        _need(version == 1 and relation in RELATIONS and _whole(rows_per_person))
        self.identity = {"site": site, "data_set": data_set, "relation": relation, "rows_per_person": rows_per_person}

    def take_budget(self, at: str, *, epsilon: Any, delta: Any, pure_epsilon: Any, zcdp_rho: Any) -> None:
        self.budget = {"epsilon": epsilon, "delta": delta, "pure_epsilon": pure_epsilon, "zcdp_rho": zcdp_rho}

    def take_person(self, at: str, *, rows_per_person: Any) -> None:
        assert self.identity is not None
        _need(_whole(rows_per_person) and rows_per_person > self.identity["rows_per_person"])
        self.identity["rows_per_person"] = rows_per_person

    def take_open(
        self, at: str, *, job: Any, plan: Any, ends_with_process: Any = False, can_resume: Any = False
    ) -> None:
        self._new(job)
        _need(isinstance(ends_with_process, bool) and isinstance(can_resume, bool))
        self.open[job] = {"plan": _events(plan), "spent": Counter(), "releases": 0, "replies": {}}
        self.open[job] |= {"interrupted": False, "at": at}

    def take_release(self, at: str, *, job: Any, query: Any, events: Any, shape: Any, value: Any) -> None:
        running = self.open[job]
        _need(not running["interrupted"] and query not in running["replies"])
        flat = np.frombuffer(base64.b64decode(value, validate=True), dtype="<i8")
        running["replies"][query] = flat.reshape(shape).tolist()
        running["spent"] += _events(events)
        running["releases"] += 1

    def take_interrupt(self, at: str, *, job: Any) -> None:
        _need(not self.open[job]["interrupted"])
        self.open[job]["interrupted"] = True

    def take_resume(self, at: str, *, job: Any) -> None:
        _need(self.open[job]["interrupted"])
        self.open[job]["interrupted"] = False

    def take_close(self, at: str, *, job: Any) -> None:
        ended = self.open.pop(job)
        self.closed[job] = [ended["at"], at, ended["releases"], _listed(ended["spent"])]

    def take_closed(self, at: str, *, job: Any, opened: Any, spent: Any, n_releases: Any) -> None:
        self._new(job)
        self.closed[job] = [opened, at, n_releases, _listed(_events(spent))]

    def take_history(self, at: str, *, spendings: Any, jobs: Any) -> None:
        known = [_listed(_events(events)) for events in spendings]
        for job, (opened, closed, n_releases, number) in jobs.items():
            self._new(job)
            _need(isinstance(opened, str) and isinstance(closed, str))
            _need(type(n_releases) is int and type(number) is int and min(n_releases, number) >= 0)
            self.closed[job] = [opened, closed, n_releases, known[number]]

    def take_head(self, at: str) -> None:
        self.has_head = True

    def take_lost(self, at: str, *, spent: Any) -> None:
        self.lost = [a + b for a, b in zip(self.lost, spent, strict=True)]

    def _new(self, job: Any) -> None:
        _need(job not in self.open and job not in self.closed)


def _check(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:32]


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Refused("damaged") from None


def ledger(given: Given) -> Any:
    whole = given["journal"].encode()
    whole = whole[: whole.rfind(b"\n") + 1]
    state, check, ends = Ledger(), "", set()
    n_bytes = 0
    for line in whole.splitlines(keepends=True):
        record = _document(line)
        _need(isinstance(record, dict) and isinstance(record.get("check"), str))
        ending = f', "check": "{record.pop("check")}"}}\n'.encode()
        _need(line.endswith(ending))
        check = _check(check, line[: -len(ending)] + b"}")
        _need(ending == f', "check": "{check}"}}\n'.encode())
        state.take(record)
        n_bytes += len(line)
        ends.add((n_bytes, check))
    is_whole = None
    if "head" in given:
        is_whole = any(place in ends for place in _places(_document(given["head"].encode())))
    jobs = {
        name: {**job, "plan": _listed(job["plan"]), "spent": _listed(job["spent"])} for name, job in state.open.items()
    }
    for job in jobs.values():
        del job["at"]
    return {
        "identity": state.identity,
        "budget": state.budget,
        "open": jobs,
        "closed": state.closed,
        "lost": state.lost,
        "has_head": state.has_head,
        "bytes": n_bytes,
        "whole": is_whole,
    }


def _places(document: Any) -> list[tuple[int, str]]:
    _need(isinstance(document, dict) and {"position", "following", "spent"} <= set(document))
    spent = document["spent"]
    _need(isinstance(spent, list) and len(spent) == 4)
    _need(all(type(one) in (int, float) and 0 <= one < math.inf for one in spent))
    places = [document["position"], *([] if document["following"] is None else [document["following"]])]
    for place in places:
        _need(isinstance(place, list) and len(place) == 2 and _whole(place[0]))
        _need(isinstance(place[1], str) and len(place[1]) == 32)
    return [(n, check) for n, check in places]


FORMATS: dict[str, Callable[[Given], Any]] = {"evidence": evidence, "head": head, "seal": seal, "ledger": ledger}
