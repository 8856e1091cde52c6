"""Read one evidence log strictly: chain, fields and types, and the order that a log of its own can have.

Nothing read here is trusted. What a log says is compared with what the other parties' logs say in ``evidence_audit``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from he_processors.errors import ProtocolError
from nvflare_plugins.checks import too_old
from nvflare_plugins.evidence.format import (
    FORMAT,
    FORMATS_BEFORE,
    GENESIS,
    SERVER,
    Earlier,
    Record,
    SignedHead,
    is_name,
    read_chain,
    read_time,
)

_TEXT_MAP = "text map"
_TEXT_LIST = "text list"
_TEXT_OR_NONE = "text or null"
_NAME = "name"
_DECIMAL = "decimal number as text"
_NUMBER = re.compile(r"[0-9][0-9.]{0,39}(?:e[+-]?[0-9]{1,4})?", re.ASCII)

_FIELDS: dict[str, dict[str, object]] = {
    "open": {
        "format": str,
        "role": str,
        "site": str,
        "job_id": str,
        "attempt": str,
        "profile": str,
        "time": str,
        "number": int,
        "earlier_attempt": _TEXT_OR_NONE,
        "earlier_digest": _TEXT_OR_NONE,
    },
    "session": {
        "sites": _TEXT_LIST,
        "signed": bool,
        "public_keys": _TEXT_MAP,
        "certificates": _TEXT_MAP,
        "certificate": _TEXT_OR_NONE,
        "parameters_hash": str,
        "policy_hash": str,
        "versions": _TEXT_MAP,
        "protection": _TEXT_MAP,
        "time": str,
    },
    "message": {
        "direction": str,
        "counter": int,
        "kind": _NAME,
        "phase": str,
        "codec": _NAME,
        "private": bool,
        "n_values": int,
        "size": int,
        "sha256": str,
        "salt": _TEXT_OR_NONE,
        "peers": _TEXT_LIST,
    },
    "content": {"direction": str, "peer": _NAME, "what": _NAME, "protection": _NAME, "size": int},
    "spend": {"query": str, "event": str, "epsilon": _DECIMAL, "delta": _DECIMAL},
    "local": {"kind": _NAME, "phase": str, "how": str},
    "round": {"round": int},
    "model": {"name": str, "size": int, "hmac": str},
    "heads": {"heads": list},
    "end": {"status": str, "reason": str, "time": str},
    "seal": {"signature": _TEXT_OR_NONE},
}
_NAMES = {kind: {"type", "n", "hash", *expected} for kind, expected in _FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Message:
    """One message as one party recorded it. Units: ``size`` in bytes."""

    n: int
    direction: str
    counter: int
    kind: str
    phase: str
    codec: str
    private: bool
    n_values: int
    size: int
    sha256: str
    salt: str | None
    peers: tuple[str, ...]

    def content(self) -> tuple[object, ...]:
        """Return what sender and receiver of the same bytes must have recorded alike."""
        digest = None if self.salt == "private" else self.sha256
        return (self.kind, self.phase, self.codec, self.private, self.n_values, self.size, digest)


@dataclass(frozen=True, slots=True)
class Part:
    """What one sealed message held, as one of its two parties recorded it. Units: ``size`` in bytes."""

    direction: str
    peer: str
    what: str
    protection: str
    size: int


@dataclass(frozen=True, slots=True)
class Spend:
    """A noised release, and what the job had spent with it. epsilon and delta are decimal texts."""

    query: str
    event: str
    epsilon: str
    delta: str


@dataclass(slots=True)
class Log:
    """One party's log of one job attempt.

    Attributes:
        digests: hash after each record, bytes[32] each.
        heads: (record number, heads of all parties that it holds).
        times: by the party's own clock, of its records of opening, session and end.
        number: of the attempt in its job, from 1.
        earlier: the party's own log of the attempt before, as it says; None if it says that it has none.
    """

    path: Path
    role: str
    site: str
    job_id: str
    attempt: str
    profile: str
    digests: list[bytes]
    number: int
    earlier: Earlier | None
    times: dict[str, datetime] = field(default_factory=dict)
    session: Record | None = None
    messages: list[Message] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    spends: list[Spend] = field(default_factory=list)
    local: list[tuple[str, str, str]] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    heads: list[tuple[int, list[SignedHead]]] = field(default_factory=list)
    models: list[Record] = field(default_factory=list)
    end: Record | None = None
    seal: Record | None = None

    @property
    def unfinished(self) -> bool:
        """Whether the file ends without a seal, as after a crash."""
        return self.seal is None

    @property
    def completed(self) -> bool:
        """Whether this party says that the attempt was completed."""
        return self.end is not None and self.end["status"] == "completed"

    def digest_before(self, n: int) -> bytes:
        """Return the hash of the record before record ``n``."""
        return self.digests[n - 1] if n else GENESIS


def read_log(path: Path) -> Log:
    """Read and check one log on its own.

    Raises:
        ProtocolError: broken chain, unknown or malformed record, an order that no log can have, or an earlier format.
        OSError: the file cannot be read.
    """
    log: Log | None = None
    for record, digest in read_chain(path):
        if log is None and record.get("format") in FORMATS_BEFORE:
            raise ProtocolError(str(too_old(f"evidence of format {record['format']}", "0.8", "verify it")))
        _check_fields(record)
        if log is None:
            log = _open(path, record)
        else:
            _enter(log, record)
        if "time" in record:
            log.times[record["type"]] = read_time(record["time"])
        log.digests.append(digest)
    if log is None:
        raise ProtocolError("the evidence file is empty")
    return log


def _open(path: Path, record: Record) -> Log:
    if record["type"] != "open" or record["format"] != FORMAT:
        raise ProtocolError("the first record is not the opening of a log of this format")
    role, site = record["role"], record["site"]
    if role not in ("site", "server") or (role == "server") != (site == SERVER):
        raise ProtocolError("the log belongs neither to a site nor to the server")
    names = (site, record["job_id"], record["attempt"], record["profile"])
    if not all(map(is_name, names)):
        raise ProtocolError("the log is opened with a name that is not allowed")
    number, before = record["number"], (record["earlier_attempt"], record["earlier_digest"])
    earlier = None if before == (None, None) else Earlier.read(*before)
    if number < 1 or (number == 1 and earlier is not None):
        raise ProtocolError("the log is opened with a number that no attempt has")
    return Log(path, role, *names, digests=[], number=number, earlier=earlier)


def _enter(log: Log, record: Record) -> None:
    kind, n = record["type"], record["n"]
    if log.seal is not None:
        raise ProtocolError(f"record {n} stands after the seal")
    if log.end is not None and kind != "seal":
        raise ProtocolError(f"record {n} ({kind}) stands after the end of the attempt")
    if kind == "message":
        log.messages.append(_message(record))
    elif kind == "content":
        log.parts.append(Part(**{name: record[name] for name in Part.__dataclass_fields__}))
        if record["direction"] not in ("sent", "received") or record["size"] < 0:
            raise ProtocolError(f"record {n} is not a possible content")
    elif kind == "spend":
        log.spends.append(_spend(record))
    elif kind == "local":
        log.local.append((record["kind"], record["phase"], record["how"]))
    elif kind == "round":
        log.rounds.append((n, record["round"]))
    elif kind == "heads":
        log.heads.append((n, [SignedHead.from_dict(head) for head in record["heads"]]))
    elif kind == "model":
        log.models.append(record)
    elif kind == "session" and log.session is None:
        log.session = record
    elif kind == "end" and record["status"] in ("completed", "aborted"):
        log.end = record
    elif kind == "seal" and log.end is not None:
        log.seal = record
    else:
        raise ProtocolError(f"record {n} ({kind}) cannot stand here")


def _spend(record: Record) -> Spend:
    try:
        numbers = [float(record[name]) for name in ("epsilon", "delta")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= number < float("inf") for number in numbers):
        raise ProtocolError(f"record {record['n']} is not a possible spending of privacy")
    return Spend(**{name: record[name] for name in Spend.__dataclass_fields__})


def _message(record: Record) -> Message:
    values = {key: value for key, value in record.items() if key not in ("type", "hash")}
    values["peers"] = tuple(record["peers"])
    message = Message(**values)
    in_range = message.counter >= 0 and message.n_values >= 0 and message.size >= 0
    if message.direction not in ("sent", "received") or not in_range or message.salt not in (None, "frame", "private"):
        raise ProtocolError(f"record {message.n} is not a possible message")
    return message


def _check_fields(record: Record) -> None:
    kind = record["type"] if isinstance(record.get("type"), str) else ""
    expected = _FIELDS.get(kind)
    if expected is None or record.keys() != _NAMES[kind]:
        raise ProtocolError(f"record {record['n']} is of no known type or has other fields than its type")
    for name, kind in expected.items():
        if not _is(record[name], kind):
            raise ProtocolError(f"record {record['n']}: field {name} is not of its type")


def _is(value: Any, kind: object) -> bool:
    if kind is _NAME:
        return is_name(value)
    if kind is _DECIMAL:
        return isinstance(value, str) and _NUMBER.fullmatch(value) is not None
    if kind is _TEXT_MAP:
        return isinstance(value, dict) and all(type(item) in (str, int) for item in value.values())
    if kind is _TEXT_LIST:
        return isinstance(value, list) and all(map(is_name, value))
    if kind is _TEXT_OR_NONE:
        return value is None or type(value) is str
    return type(value) is kind
