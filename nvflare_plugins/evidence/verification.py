"""What can be said of a job's evidence: the verdict on the logs that its sites and its server exported.

Input is a folder (or files) with these logs; the server's job result holds them all.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from he_processors.errors import ProtocolError
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.evidence.audit import MAX_CLOCK_ERROR, Audit, FlareAuthority, audit
from nvflare_plugins.evidence.format import EXPORT_SUFFIX
from nvflare_plugins.evidence.reader import Log, contradictions, ended_early, excused, left_out, not_shown, read_log

MAX_FILES = 10_000
MAX_SENTENCE = 600
NO_EVIDENCE = "no evidence found"


class Verdict(Enum):
    """What can be said of the evidence; each has its own exit code."""

    VERIFIED = 0  # signed by all sites with certificates of the caller's root
    FAILED = 1
    UNSIGNED = 2  # the records agree, but anyone could have written them
    SIGNED = 3  # records and signatures agree, but something was not given to check the certificates against
    NOT_FOUND = 4  # there is no such path, or no evidence at it: nothing was checked
    NO_ROOT = 5  # the root certificate that was named is not there, is none, or lies with the evidence
    EMPTY = 6  # it holds, and shows nothing: no message left a party, and no round was trained


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
        failures: what is wrong beyond any single attempt.
        root: hex SHA-256 of the root certificate that the caller gave, or None.
        unchecked: what stands between signed evidence and VERIFIED: what the caller did not give, with the remedy.
    """

    attempts: tuple[Audit, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...] = ()
    root: str | None = None
    unchecked: tuple[str, ...] = ()

    def __repr__(self) -> str:
        found = {"failures": list(self.failures), "unchecked": list(self.unchecked)}
        lists = "".join(f", {name}: {'; '.join(some)}" for name, some in found.items() if some)
        return f"<Verification {self.verdict.name}, {len(self.attempts)} attempts{lists}>"

    @property
    def sound(self) -> bool:
        """Whether nothing contradicts the evidence and the job was completed; says nothing of who wrote it."""
        done = {audit.job_id for audit in self.attempts if audit.completed}
        complete = all(audit.job_id in done for audit in self.attempts)
        agreed = not self.failures and not any(audit.failures for audit in self.attempts)
        return bool(self.attempts) and complete and agreed

    @property
    def verdict(self) -> Verdict:
        """What can be said of the evidence as a whole."""
        if self.failures == (NO_EVIDENCE,):
            return Verdict.NOT_FOUND
        if not self.sound:
            return Verdict.FAILED
        logs = [log for audit in self.attempts for log in audit.logs]
        if not any(log.parts or log.rounds or any(message.private for message in log.messages) for log in logs):
            return Verdict.EMPTY
        if not all(audit.signed for audit in self.attempts if audit.had_session):
            return Verdict.UNSIGNED
        return Verdict.SIGNED if self.unchecked or self.root is None else Verdict.VERIFIED

    @property
    def verified(self) -> bool:
        """Whether the evidence is sound and signed with certificates of the root that the caller gave."""
        return self.verdict is Verdict.VERIFIED


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


def verify(
    paths: Sequence[Path],
    root: x509.Certificate | None = None,
    servers: Collection[str] = (),
    job: str | None = None,
    at: datetime | None = None,
) -> Verification:
    """Check all evidence found under ``paths``; the same file handed in twice counts once.

    Args:
        root: the project's root certificate, from a startup kit. With it, evidence that is not signed fails.
        servers: names of the project's servers, whose certificates are not those of sites.
        job: id of the job that must be shown; evidence of others is left aside.
        at: when the job ran, if the caller knows it. Else the signers' clocks are believed.
    """
    result = verify_files(find_evidence(paths), FlareAuthority(root, servers), job)
    failures, notes = list(result.failures), list(result.notes)
    for attempt in result.attempts:
        name = f"job {attempt.job_id}, attempt {attempt.attempt}"
        if root is not None and not attempt.signed:
            if attempt.had_session:
                failures.append(f"{name} is not signed by its sites, and with a root certificate it must be")
            else:
                notes.append(f"{name} ended before any site could sign: anyone may have written its records")
        if at is not None and any(abs(moment - at) > MAX_CLOCK_ERROR for moment in (attempt.times or ())[:1]):
            failures.append(f"{name} did not begin at the time given (--at), says its evidence")
    if root is None:
        given = None
    else:
        given = root.fingerprint(hashes.SHA256()).hex()
        notes.append(f"certificates were checked against the root with SHA-256 {given}")
    return dataclasses.replace(
        result, failures=tuple(failures), notes=tuple(notes), root=given, unchecked=tuple(unchecked(root, servers))
    )


def unchecked(root: x509.Certificate | None, servers: Collection[str]) -> Iterator[str]:
    """Yield what the caller did not give to check certificates against, with the remedy."""
    if root is None:
        yield "no root certificate was given: take rootCA.pem from your own startup kit (--root-ca)"
    elif not servers:
        yield (
            "the names of the project's servers are not known, whose certificates look like those of sites: leave "
            "rootCA.pem in its startup kit, or name the servers (--server)"
        )


def _logs_of(files: Sequence[Path]) -> tuple[dict[tuple[str, str], list[Log]], list[str]]:
    """Return the logs of each attempt, each file's once however often it is there, and what cannot be read."""
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
            failures.append(printable(f"{file.name}: {error}", MAX_SENTENCE))
    return attempts, failures


def verify_files(files: Sequence[Path], authority: FlareAuthority, job: str | None = None) -> Verification:
    """As ``verify``, for given files and with another way to judge certificates."""
    attempts, failures = _logs_of(files)
    jobs = sorted({job_id for job_id, _ in attempts})
    notes = []
    if job is not None:
        if jobs and job not in jobs:
            failures.append(printable(f"there is no evidence of job {job}, only of {', '.join(jobs)}", MAX_SENTENCE))
        elif len(jobs) > 1:
            notes.append(f"evidence of {len(jobs) - 1} other jobs was left aside")
    elif len(jobs) > 1:
        text = f"there is evidence of {len(jobs)} jobs; choose one (--job): {', '.join(jobs)}"
        failures.append(printable(text, MAX_SENTENCE))
    if not files:
        failures.append(NO_EVIDENCE)
    chosen = {(of, attempt): logs for (of, attempt), logs in sorted(attempts.items()) if job in (None, of)}
    failures += [printable(text, MAX_SENTENCE) for text in (*contradictions(chosen), *left_out(chosen))]
    notes += [printable(text, MAX_SENTENCE) for text in not_shown(chosen)]
    audits = (
        audit(logs, authority, excused=excused(chosen, of), ended_early=ended_early(chosen, of, attempt))
        for (of, attempt), logs in chosen.items()
    )
    return Verification(tuple(audits), tuple(failures), tuple(notes))


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


def policies(logs: Iterable[Log]) -> dict[str, str]:
    """Return the SHA-256 of what each site's policy allowed at the time, as the site recorded it."""
    sessions = {log.site: log.session for log in logs if log.role == "site"}
    return {site: session["policy_hash"] for site, session in sorted(sessions.items()) if session is not None}


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
