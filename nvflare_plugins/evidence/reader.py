"""Reading evidence: the attempts of a job, how each ended, which went on from which, and links between sites."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from he_processors.errors import ProtocolError
from nvflare_plugins.base.checks import too_old
from nvflare_plugins.base.files import held_by_nobody, make_folder, sync_folder, write_durably
from nvflare_plugins.evidence.format import (
    EXPORT_SUFFIX,
    FORMAT,
    FORMATS_BEFORE,
    GENESIS,
    MAX_LINE_BYTES,
    SERVER,
    Earlier,
    Record,
    SignedHead,
    chain_line,
    export_name,
    is_name,
    parse_line,
    read_chain,
    read_link,
    read_time,
    seal_statement,
    time_text,
)
from nvflare_plugins.evidence.log import Signer, utc_now
from nvflare_plugins.wire.envelope import Kind

# Read one evidence log strictly: chain, fields and types, and the order that a log of its own can have.
#
# Nothing read here is trusted. What a log says is compared with what the other parties' logs say in ``evidence_audit``.


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


def _enter(log: Log, record: Record) -> None:  # noqa: C901 - a branch for each type of record
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


# Evidence of a job that went on without lost sites: what its attempts must say alike, and whose log may be missing.
#
# An attempt without sites of the attempts before it names them in its session's record (``SITES_FACT``), which every
# site of that attempt signs. It need not name those of attempts that ended when only keys and terms were sealed: for
# its sites the job begins with it. A site that never came back hands in no log of the attempts that it took part in.
# That is no fault where the attempt that completed the job says so; it hides no record of any other party.


SITES_FACT = "without_sites"
"""The fact of a session that names the lost sites."""

_TERMS = frozenset(kind.name for kind in (Kind.GROUP_KEY, Kind.AGREEMENT, Kind.HE_SECRET))

Attempts = Mapping[tuple[str, str], Sequence[Log]]
"""The logs of each attempt, by job and attempt."""


def named(sites: Iterable[str]) -> dict[str, str]:
    """Return the fact that an attempt goes on without sites; none where it goes on without none."""
    text = ", ".join(sites)
    return {SITES_FACT: text} if text else {}


def lost_of(logs: Iterable[Log]) -> frozenset[str]:
    """Return the sites that an attempt says it went on without."""
    facts = (log.session["protection"].get(SITES_FACT) for log in logs if log.session is not None)
    return frozenset(site for fact in facts if isinstance(fact, str) for site in fact.split(", "))


def excused(attempts: Attempts, job_id: str) -> frozenset[str]:
    """Return the sites that may hand in no log of an attempt of a job that was not completed."""
    return frozenset().union(
        *(lost_of(logs) for (of_job, _), logs in attempts.items() if of_job == job_id and _is_completed(logs))
    )


def contradictions(attempts: Attempts) -> Iterator[str]:
    """Yield what attempts of one job say of their sites that cannot be together, one sentence each."""
    for (job_id, attempt), logs in sorted(attempts.items()):
        sites, lost = _sites_of(logs), lost_of(logs)
        if sites & lost:
            yield f"job {job_id}, attempt {attempt} says that it went on without a site of its own"
        if not _is_completed(logs) or not sites:
            continue
        if len({log.session["protection"].get(SITES_FACT) for log in logs if log.session is not None}) > 1:
            yield f"job {job_id}, attempt {attempt}: its sites do not say alike without whom it went on"
        for (other_job, other), others in sorted(attempts.items()):
            if other_job == job_id and _sites_of(others) - sites - lost and _has_begun(others):
                yield (
                    f"job {job_id}, attempt {attempt} does not say that it went on without "
                    f"{', '.join(sorted(_sites_of(others) - sites - lost))}, of attempt {other}"
                )
        known = frozenset().union(*(_sites_of(others) for (of_job, _), others in attempts.items() if of_job == job_id))
        if len(attempts) > 1 and lost - known:
            yield f"job {job_id}, attempt {attempt} says that it went on without sites that no attempt had"


def ended_early(attempts: Attempts, job_id: str, attempt: str) -> bool:
    """Return whether an attempt ended before anything of rows was sent, and another attempt completed its job.

    Logs of such an attempt may be missing: sites may die before they have any. Whoever hides one could as well hide the
    whole attempt; what it could tell of rows is nothing.
    """
    is_completed = any(of == job_id and one != attempt and _is_completed(logs) for (of, one), logs in attempts.items())
    return is_completed and not _has_begun(attempts[job_id, attempt])


def _has_begun(logs: Iterable[Log]) -> bool:
    return any(log.parts or any(map(_tells_of_rows, log.messages)) for log in logs)


def _tells_of_rows(message: Message) -> bool:
    """Whether a message is more than keys and terms: trees and conversations are sealed too, between their parties."""
    return message.private and (message.codec != "SEALED" or message.kind not in _TERMS)


def _sites_of(logs: Iterable[Log]) -> frozenset[str]:
    return frozenset(site for log in logs if log.session is not None for site in log.session["sites"])


def _is_completed(logs: Sequence[Log]) -> bool:
    return bool(logs) and all(log.completed for log in logs)


# Evidence of ended attempts of a job: put aside before the next one begins, and closed where a process died.
#
# A job that waits for a lost site has several attempts, each with logs of its own. The logs of the last one lie where
# they always do; those of the attempts before attempt n lie beside them, in a folder that ``before_attempt`` names.


PARTIAL_SUFFIX = ".partial"
DIED = "the process ended without closing this log"
MAX_ATTEMPTS = 99
N_CLOSINGS = 2  # all agree on the result; all have it on the disk
_TORN = re.compile(r"\..+\.[0-9]+\.[0-9]+\.partial")  # of ``written_atomically``, which holds it; no other is touched
_FOLDER = re.compile(r"evidence_before_attempt_([1-9][0-9]?)")


def before_attempt(number: int) -> str:
    """Return the name of the folder with the evidence of what came before an attempt."""
    return f"evidence_before_attempt_{number}"


def put_aside(evidence: Path, number: int, signer: Signer | None, clock: Callable[[], datetime] = utc_now) -> None:
    """Make room for the evidence of an attempt: what is there moves to the folder beside it, whole.

    A log that a dead process left is closed first. If the process ended while this went on, the rest is done now.

    Args:
        evidence: the folder in which every attempt writes its logs.
        number: of the attempt that begins.
        signer: signs with this party's certificate key, as in the sessions before; None where there is none.

    Raises:
        FileExistsError: evidence was put aside for an attempt of this number already, which is never overwritten.
        OSError: it cannot be moved.
    """
    aside = evidence.with_name(before_attempt(number))
    for partial in sorted(evidence.glob(f"*{EXPORT_SUFFIX}{PARTIAL_SUFFIX}")):
        end_torn(partial, signer, clock)
    names = sorted(path.name for path in evidence.iterdir()) if evidence.is_dir() else []
    if not names:
        return
    make_folder(aside)
    there = [name for name in names if (aside / name).exists()]
    if there:
        raise FileExistsError(f"evidence before attempt {number} exists already: {there[0]}")
    for name in names:
        os.replace(evidence / name, aside / name)
    for folder in (aside, evidence, evidence.parent):
        sync_folder(folder)


def set_aside(run: Path) -> dict[int, list[Path]]:
    """Return the logs of earlier attempts of a run, by the number of the attempt before which they were put aside."""
    found = ((_FOLDER.fullmatch(path.name), path) for path in sorted(run.iterdir()) if path.is_dir())
    return {int(match[1]): sorted(path.glob(f"*{EXPORT_SUFFIX}")) for match, path in found if match}


def earlier_log(run: Path, party: str) -> Earlier | None:
    """Return what a party's log of the attempt before was, the last that lies in its run folder; None if there is none.

    A file that was cut counts with its last whole line. One of which nothing can be read is as good as lost.

    Raises:
        OSError: it cannot be read.
    """
    for _, paths in sorted(set_aside(run).items(), reverse=True):
        for path in paths:
            if path.name == export_name(party) and (found := _last_of(path)) is not None:
                return found
    return None


def _last_of(path: Path) -> Earlier | None:
    with path.open("rb") as file:
        first = file.readline(MAX_LINE_BYTES + 1)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 2 * (MAX_LINE_BYTES + 1), 0))  # the last whole line, and one that was torn
        last = (file.read().split(b"\n")[:-1] or [b""])[-1]
    with contextlib.suppress(ProtocolError):
        return Earlier.read(parse_line(first.removesuffix(b"\n")).get("attempt"), parse_line(last).get("hash"))
    return None


def end_torn(partial: Path, signer: Signer | None, clock: Callable[[], datetime] = utc_now) -> None:
    """Close the log of a process that died, as its owner: what it had written stays, and its end says that it died.

    If the party had heard that all sites had their results on the disk, the attempt was completed, and the end says so.

    A line that was torn when the process ended, and whatever else does not follow, is left out. A log of which nothing
    can be read is removed.
    """
    records, lines, head = _readable(partial)
    path = partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX))
    if records and records[-1]["type"] == "seal":  # it lacked its name alone
        os.replace(partial, path)
        sync_folder(path.parent)
        _reserve_of(partial).unlink(missing_ok=True)
        return
    if records:
        if records[-1]["type"] != "end":
            status, reason = ("completed", "") if _all_have_written(records) else ("aborted", DIED)
            body: Record = {"type": "end", "status": status, "reason": reason, "time": time_text(clock())}
            line, head = chain_line(head, {**body, "n": len(lines)})
            lines.append(line)
        seal: Record = {"type": "seal", "n": len(lines), "signature": None}
        signed = any(record["type"] == "session" and record.get("signed") is True for record in records)
        if signed and signer is not None:
            seal["signature"] = signer(seal_statement(seal, head)).hex()
        lines.append(chain_line(head, seal)[0])
        write_durably(path, b"\n".join(lines) + b"\n")
    partial.unlink()
    _reserve_of(partial).unlink(missing_ok=True)


def all_have_written(partial: Path) -> bool:
    """Return whether a log without end says that all sites had their results on the disk. Raises: OSError."""
    return _all_have_written(_readable(partial)[0])


def _all_have_written(records: Sequence[Record]) -> bool:
    """Whether the last exchange of ``SiteAttempt.all_have_written`` was answered: the second of its kind.

    A site records each answer that it received. The server receives from every site, and records each answer once.
    """
    answered = "sent" if records and records[0].get("role") == SERVER else "received"
    found = [one for one in records if (one.get("kind"), one.get("direction")) == (Kind.CLOSING.name, answered)]
    return len(found) == N_CLOSINGS


def _reserve_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name.removesuffix(PARTIAL_SUFFIX)}.reserve")


def dead_logs(runs: Path) -> Iterator[Path]:
    """Yield the logs without end below a site's runs whose process has died, each held here meanwhile."""
    yield from held_by_nobody(sorted(runs.glob(f"*/evidence/*{EXPORT_SUFFIX}{PARTIAL_SUFFIX}")))


def end_dead(runs: Path, goes_on: Callable[[str], bool], certificate: str, signer: Signer | None) -> list[str]:
    """Clear up what killed processes left in a site's runs, as its owner: logs are ended as in ``end_torn``.

    Args:
        goes_on: whether a job's next process is to end its log.
        certificate: this site's, in PEM form. The log of a session under another one stays as it is.

    Returns:
        The jobs whose logs were ended.

    Raises:
        OSError: something cannot be written.
    """
    torn = f".*{PARTIAL_SUFFIX}"
    for partial in held_by_nobody(
        one for one in [*runs.glob(torn), *runs.glob(f"*/{torn}")] if _TORN.fullmatch(one.name)
    ):
        partial.unlink()
    ended = []
    for partial in dead_logs(runs):
        job_id = partial.parent.parent.name
        sessions = [record for record in _readable(partial)[0] if record.get("type") == "session"]
        _reserve_of(partial).unlink(missing_ok=True)
        if not goes_on(job_id) and all(one.get("certificate") in (None, certificate) for one in sessions):
            end_torn(partial, signer)
            ended.append(job_id)
    return ended


def _readable(partial: Path) -> tuple[list[dict[str, Any]], list[bytes], bytes]:
    """Return the records that follow from each other, their lines and the hash of the last."""
    records: list[dict[str, Any]] = []
    lines: list[bytes] = []
    head = GENESIS
    for line in partial.read_bytes().split(b"\n")[:-1]:  # a line that does not end was torn
        try:
            record, head = read_link(line, head, len(lines))
        except ProtocolError:
            break
        records.append(record)
        lines.append(line)
    return records, lines, head


# Attempts of a job that are not shown: each log names its own party's log of the attempt before.
#
# A log that is named must be there, whole up to where it is named and unchanged: the later log is signed, so that
# whoever hands over evidence cannot leave out an attempt without leaving out all later logs of the sites that took part
# in it. A party without such a log says so; that is nobody's fault (its disk may be new), but a reader should know.


def left_out(attempts: Attempts) -> Iterator[str]:
    """Yield the attempts that logs name and that are missing, changed or out of order, one sentence each."""
    for log, here, before in _links(attempts):
        if log.earlier is None:
            continue
        if before is None:
            yield (
                f"{here} follows an attempt that is left out: the log of {log.site} of attempt "
                f"{log.earlier.attempt} is not here. Hand in the folders evidence_before_attempt_N too"
            )
        elif bytes.fromhex(log.earlier.digest) not in before.digests:
            yield (
                f"{here} follows another log of {log.site} of attempt {log.earlier.attempt} than the one here: "
                "one was rewritten or cut"
            )
        elif before.number >= log.number:
            yield f"{here} of {log.site} follows attempt {before.attempt}, whose number is {before.number}"
    yield from _numbered_alike(attempts)


def not_shown(attempts: Attempts) -> Iterator[str]:
    """Yield what attempts before others the logs do not show, without a fault that evidence could tell."""
    for log, here, before in _links(attempts):
        if log.number > 1 and log.earlier is None:
            yield f"{here}: {log.site} says that it has no log of one before: it took part in none, or lost it"
        if before and log.earlier and bytes.fromhex(log.earlier.digest) in before.digests[:-1]:
            yield f"{here}: {log.site} has less of its log of attempt {before.attempt} than is here"


def _links(attempts: Attempts) -> Iterator[tuple[Log, str, Log | None]]:
    """Yield each log, what its attempt is called, and the log that it names as that of the attempt before, if here."""
    for (job_id, attempt), logs in sorted(attempts.items()):
        for log in sorted(logs, key=lambda log: log.site):
            before = () if log.earlier is None else attempts.get((log.job_id, log.earlier.attempt), ())
            named = next((one for one in before if one.site == log.site), None)
            yield log, f"job {job_id}, attempt {attempt} (number {log.number})", named


def _numbered_alike(attempts: Attempts) -> Iterator[str]:
    """Yield attempts of one job that have one number."""
    seen: dict[tuple[str, int], str] = {}
    for (job_id, attempt), logs in sorted(attempts.items()):
        for number in sorted({log.number for log in logs}):
            other = seen.setdefault((job_id, number), attempt)
            if other != attempt:
                yield f"job {job_id}: attempts {other} and {attempt} both have number {number}"
