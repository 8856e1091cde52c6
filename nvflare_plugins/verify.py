"""``veilboost verify``: check the evidence of a job and print what it shows, in a table a person can read.

Input is a folder (or files) with the logs that sites and server exported; the server's job result holds them all, so
that nothing else is needed. With ``rootCA.pem`` beside them, or ``--root-ca``, certificates are checked too.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from he_processors.errors import ProtocolError
from nvflare_plugins.evidence_audit import Audit, CertificateAuthority, audit
from nvflare_plugins.evidence_certificates import FlareAuthority
from nvflare_plugins.threat_model import CODEC_PROTECTION, THREAT_MODELS
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.contents import Content, Protection
from nvflare_plugins.wire.evidence_format import EXPORT_SUFFIX, SERVER
from nvflare_plugins.wire.evidence_reader import Log, read_log
from nvflare_plugins.wording import human_bytes, printable

ROOT_CERTIFICATE = "rootCA.pem"
MAX_FILES = 10_000
_MAX_EVENTS = 8

SHOWS = "It shows: the parties' records agree, message by message, on what left each site and under which protection."
DOES_NOT_SHOW = (
    "It does not show: that inputs were honest, that randomness was good, that the bytes behind a hash were what their "
    "label says, or that nothing left by another way (side channels, timing)."
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages of one kind under one protection, summed over the sites. Units: bytes."""

    kind: str
    codec: str
    private: bool
    messages: int
    bytes_out: int
    bytes_in: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What one party said to another inside sealed messages, summed up. Units: bytes."""

    sender: str
    receiver: str
    what: str
    protection: str
    messages: int
    size: int


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome for a folder of evidence.

    Attributes:
        attempts: one audit per job attempt found.
        failures: what is wrong with the files themselves, before any audit.
        rooted: whether the certificates of signed attempts were checked against a root that the caller gave.
    """

    attempts: tuple[Audit, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...] = ()
    rooted: bool = True

    @property
    def verified(self) -> bool:
        """Whether every attempt holds and the last word of every job is a completed attempt."""
        done = {audit.job_id for audit in self.attempts if audit.completed}
        complete = all(audit.job_id in done for audit in self.attempts)
        sound = not self.failures and not any(audit.failures for audit in self.attempts)
        return bool(self.attempts) and complete and sound


def find_evidence(paths: Iterable[Path]) -> list[Path]:
    """Return the exported logs among files and (recursively) in folders; links are not followed.

    Raises:
        FileNotFoundError: a path does not exist.
        ProtocolError: more files than any job has.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*" + EXPORT_SUFFIX) if p.is_file() and not p.is_symlink())
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"no such file or folder: {path}")
        if len(found) > MAX_FILES:
            raise ProtocolError(f"more than {MAX_FILES} evidence files")
    return found


def verify(paths: Sequence[Path], root: x509.Certificate | None = None) -> Verification:
    """Check all evidence found under ``paths``; the same file handed in twice counts once."""
    result = verify_files(find_evidence(paths), FlareAuthority(root))
    if not any(attempt.signed for attempt in result.attempts):
        return result
    if root is None:
        note = "no root certificate given: signatures were checked against the certificates in the logs only"
    else:
        note = f"certificates were checked against the root with SHA-256 {root.fingerprint(hashes.SHA256()).hex()}"
    return dataclasses.replace(result, notes=(*result.notes, note), rooted=root is not None)


def verify_files(files: Sequence[Path], authority: CertificateAuthority) -> Verification:
    """As ``verify``, for given files and with another way to judge certificates."""
    attempts: dict[tuple[str, str], list[Log]] = defaultdict(list)
    failures: list[str] = []
    seen: set[bytes] = set()
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            log = read_log(file)
            attempts[log.job_id, log.attempt].append(log)
        except ProtocolError as error:
            failures.append(f"{file.name}: {error}")
    if not files:
        failures.append("no evidence found")
    audits = tuple(audit(logs, authority) for _, logs in sorted(attempts.items()))
    return Verification(audits, tuple(failures))


def traffic(logs: Iterable[Log]) -> list[Traffic]:
    """Sum up the messages of the sites by kind and protection, in the order in which kinds first appeared."""
    totals: dict[tuple[str, str, bool], list[int]] = {}
    for log in logs:
        for message in log.messages if log.role == "site" else ():
            entry = totals.setdefault((message.kind, message.codec, message.private), [0, 0, 0])
            if message.direction == "sent":
                entry[0] += 1
                entry[1] += message.size
            else:
                entry[2] += message.size
    return [Traffic(*key, *values) for key, values in totals.items()]


# -- for people -------------------------------------------------------------------------------------------------------


def render(result: Verification) -> str:
    """Return the outcome as text."""
    lines: list[str] = []
    for attempt in result.attempts:
        lines += [*_heading(attempt), "", *_table(attempt), "", *_contents(attempt), *_spending(attempt)]
        lines += [*_local(attempt), *_threats(attempt)]
        lines += [f"  note: {printable(text)}" for text in attempt.notes]
        lines += [f"  FAILED: {printable(text)}" for text in attempt.failures]
        lines.append("")
    lines += [f"  note: {printable(text)}" for text in result.notes]
    lines += [f"  FAILED: {printable(text)}" for text in result.failures]
    if result.notes or result.failures:
        lines.append("")
    lines += [SHOWS, DOES_NOT_SHOW, "", _verdict(result)]
    return "\n".join(lines)


def _heading(attempt: Audit) -> Iterator[str]:
    yield f"Job {attempt.job_id}, attempt {attempt.attempt}, profile {attempt.profile}"
    yield f"  parties   {', '.join(attempt.sites)} and {SERVER}"
    yield f"  attempt   {'completed' if attempt.completed else 'NOT COMPLETED'}"
    if attempt.signed:
        yield "  signed    by every site's certificate"
    else:
        yield "  UNSIGNED  anyone who holds these files could have written them; only their agreement was checked"
    if attempt.profile == "plain":
        yield "  PROFILE PLAIN: private messages travelled IN CLEAR, as this profile says. Nothing was protected."


def _table(attempt: Audit) -> Iterator[str]:
    rows = [("message", "what", "msgs", "out", "in", "protection and against whom")]
    for item in traffic(attempt.logs):
        known = Kind.__members__.get(item.kind)
        protection = CODEC_PROTECTION.get(item.codec, "UNKNOWN") if item.private else "public, nothing to protect"
        if not item.private and item.codec == "SEALED":
            protection = CODEC_PROTECTION["SEALED"]
        meaning = known.meaning if known is not None else "not in the catalogue"
        sizes = (f"{item.messages}", human_bytes(item.bytes_out), human_bytes(item.bytes_in))
        rows.append((printable(item.kind), meaning, *sizes, protection))
    return _columns(rows)


def contents(logs: Iterable[Log]) -> list[Contents]:
    """Sum up what sealed messages held, by sender, receiver, content and protection."""
    totals: dict[tuple[str, str, str, str], list[int]] = {}
    for log in logs:
        for part in log.parts:
            if part.direction == "sent":
                entry = totals.setdefault((log.site, part.peer, part.what, part.protection), [0, 0])
                entry[0] += 1
                entry[1] += part.size
    return [Contents(*key, *values) for key, values in totals.items()]


def _contents(attempt: Audit) -> Iterator[str]:
    rows = [("from", "to", "msgs", "bytes", "", "content inside sealed messages, and its protection from the reader")]
    for item in contents(attempt.logs):
        content = Content.__members__.get(item.what)
        meaning = content.meaning if content is not None else "not in the catalogue"
        known = Protection.__members__.get(item.protection)
        protection = known.value if known is not None else "UNKNOWN"
        size = human_bytes(item.size)
        rows.append((item.sender, item.receiver, f"{item.messages}", size, "", f"{meaning}: {protection}"))
    if len(rows) > 1:
        yield from _columns(rows)
        yield ""


def _spending(attempt: Audit) -> Iterator[str]:
    """What each party's releases cost, as it recorded them."""
    for log in attempt.logs:
        if log.spends:
            last = log.spends[-1]
            name = printable(log.site)
            yield (
                f"  privacy spent at {name}: epsilon {last.epsilon} at delta {last.delta}, {len(log.spends)} releases"
            )
            events = dict.fromkeys(printable(spend.event) for spend in log.spends)
            yield from (f"    {event}" for event in list(events)[:_MAX_EVENTS])
    if any(log.spends for log in attempt.logs):
        yield ""


def _local(attempt: Audit) -> Iterator[str]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for log in attempt.logs:
        for kind, _, how in log.local:
            counts[kind, how] += 1
    if counts:
        yield "  answered without leaving a site:"
        yield from (f"    {printable(kind)} x{n}: {printable(how)}" for (kind, how), n in sorted(counts.items()))
        yield ""


def _threats(attempt: Audit) -> Iterator[str]:
    model = THREAT_MODELS.get(attempt.profile)
    if model is not None:
        yield "  who could learn what about another site's rows, beyond the model:"
        yield from (f"    {who + ':':<26}{what}" for who, what in model.rows())
        yield ""


def _verdict(result: Verification) -> str:
    if not result.verified:
        aborted = not result.failures and not any(attempt.failures for attempt in result.attempts)
        return "NOT VERIFIED: the job was not completed" if aborted and result.attempts else "NOT VERIFIED"
    unsigned = "" if all(attempt.signed for attempt in result.attempts) else " (UNSIGNED)"
    if not result.rooted:
        unsigned += " (signatures only against the certificates in the logs: give --root-ca)"
    plain = any(attempt.profile == "plain" for attempt in result.attempts)
    return f"VERIFIED{unsigned}" + (": but profile plain protects nothing" if plain else "")


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(w) if 2 <= i <= 4 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
        if number == 0:
            yield "  " + "  ".join("-" * w for w in widths)


# -- for programs -----------------------------------------------------------------------------------------------------


def to_json(result: Verification) -> dict[str, Any]:
    """Return the outcome as JSON values."""
    return {
        "verified": result.verified,
        "failures": list(result.failures),
        "notes": list(result.notes),
        "attempts": [
            {
                "job_id": a.job_id,
                "attempt": a.attempt,
                "profile": a.profile,
                "sites": list(a.sites),
                "completed": a.completed,
                "signed": a.signed,
                "failures": list(a.failures),
                "notes": list(a.notes),
                "messages": [
                    {
                        "kind": t.kind,
                        "codec": t.codec,
                        "private": t.private,
                        "messages": t.messages,
                        "bytes_out": t.bytes_out,
                        "bytes_in": t.bytes_in,
                    }
                    for t in traffic(a.logs)
                ],
                "contents": [dataclasses.asdict(item) for item in contents(a.logs)],
                "spent": {
                    log.site: {"epsilon": log.spends[-1].epsilon, "delta": log.spends[-1].delta}
                    for log in a.logs
                    if log.spends
                },
            }
            for a in result.attempts
        ],
    }


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``veilboost verify``."""
    parser = subparsers.add_parser(
        "verify",
        help="check the evidence of a job",
        description="Check the evidence of a job: chains, signatures, agreement of sites and server, protection of "
        "every private message. Exit code 0 if it holds, 1 if not.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folder or files of exported evidence")
    parser.add_argument("--root-ca", type=Path, help=f"the project's {ROOT_CERTIFICATE} (default: beside the evidence)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(func=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        result = verify(arguments.paths, _root(arguments.root_ca, arguments.paths))
    except (OSError, ValueError, ProtocolError) as error:
        print(f"veilboost verify: {error}", file=sys.stderr)
        return 1
    print(json.dumps(to_json(result), indent=2) if arguments.json else render(result))
    return 0 if result.verified else 1


def _root(given: Path | None, paths: Sequence[Path]) -> x509.Certificate | None:
    if given is None:
        beside = [folder / ROOT_CERTIFICATE for path in paths for folder in (path, path.parent)]
        given = next((path for path in beside if path.is_file()), None)
    if given is None:
        return None
    try:
        return x509.load_pem_x509_certificate(given.read_bytes())
    except ValueError:
        raise ValueError(f"{given} is no certificate in PEM form") from None
