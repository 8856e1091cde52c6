"""The server's side of one run of a job: frames, evidence, results, and the one reason if it fails.

Knows cells and sites, but nothing of FLARE's workflow: the controller drives it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.base.checks import check_plain
from nvflare_plugins.base.declared import values_of
from nvflare_plugins.base.errors import time_mends
from nvflare_plugins.base.files import make_folder, write_atomically
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import MAX_ATTEMPTS, N_CLOSINGS, before_attempt, earlier_log, put_aside
from nvflare_plugins.flare.metrics import ServerMetrics
from nvflare_plugins.flare.timeouts import DISK_ANSWER_S, REPORT_S, SILENCE_LIMIT_S, START_SILENCE_S, STOP_ANSWER_S
from nvflare_plugins.flare.transport import Cell, FrameServer
from nvflare_plugins.flare.work import Beats
from nvflare_plugins.wire.aggregation import Aggregator, OpenSum
from nvflare_plugins.wire.envelope import ATTEMPT_BYTES, Frame, Kind, Phase, Transfer

COMPLETED = "completed"
FAILED = "failed"
CANNOT_GO_ON = "cannot go on"  # without the sites that are lost: the job has to wait for them
INTERRUPTED = "interrupted"  # the site has lost its FLARE process or the server, and would go on
_STATUSES = (COMPLETED, FAILED, CANNOT_GO_ON, INTERRUPTED)
RESULT_FOLDER = "veilboost"
EVIDENCE_FOLDER = "evidence"
SUMMARY_FILE = "summary.json"
MAX_ERROR_CHARS = 2000
MAX_EVIDENCE_BYTES = 1 << 30
MAX_SUMMARY_CHARS = 1 << 20
_HMAC = re.compile(r"[0-9a-f]{64}")

Spend = Callable[[str, str, float, float], None]
"""Records a private release in the evidence: (query, event, epsilon so far, delta)."""

ServerSum = Callable[[Frame, bytes, Spend], bytes]
"""Turns added words into the answer, and says in the server's evidence what that cost."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What a site hands in at the end of its task.

    Privacy: the summary and the evidence are what leaves the site; neither holds a row, a gradient or the model.

    Attributes:
        earlier: evidence of attempts of the job that ended before, by the number of the attempt before which it was put
            aside.
        model_hmac: hex, keyed under the sites' group key: equal for equal models, and of no use to the server else.
    """

    status: str
    error: str = ""
    model_hmac: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    evidence: bytes = b""
    earlier: Mapping[int, bytes] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return FOBS-serialisable values."""
        earlier = {str(number): content for number, content in self.earlier.items()}
        return {**values_of(self), "summary": json.dumps(dict(self.summary)), "earlier": earlier}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SiteReport:
        """Read what a site sent.

        Raises:
            ProtocolError: it is not a report.
        """
        status, evidence = document.get("status"), document.get("evidence", b"")
        texts = [document.get(name, "") for name in ("error", "model_hmac", "summary")]
        if status not in _STATUSES or not all(isinstance(text, str) for text in texts):
            raise ProtocolError("a result that is not one")
        if texts[1] and not _HMAC.fullmatch(texts[1]):
            raise ProtocolError("a result with an unusable hash of the model")
        if not isinstance(evidence, (bytes, bytearray)) or len(evidence) > MAX_EVIDENCE_BYTES:
            raise ProtocolError("a result with unusable evidence")
        try:
            summary = json.loads(texts[2][:MAX_SUMMARY_CHARS] or "{}")
            check_plain("the summary", summary)
        except (ValueError, RecursionError, ConfigurationError):
            raise ProtocolError("a result whose summary is not JSON, or too large") from None
        if not isinstance(summary, dict):
            raise ProtocolError("a result whose summary is not an object")
        earlier = _earlier(document.get("earlier", {}))
        return cls(status, printable(texts[0].strip(), MAX_ERROR_CHARS), texts[1], summary, bytes(evidence), earlier)


def _earlier(document: object) -> dict[int, bytes]:
    numbers = {str(number): number for number in range(2, MAX_ATTEMPTS + 1)}
    if not isinstance(document, dict) or not set(document) <= set(numbers):
        raise ProtocolError("a result with unusable evidence of earlier attempts")
    contents = list(document.values())
    is_usable = all(isinstance(one, (bytes, bytearray)) for one in contents)
    if not is_usable or sum(map(len, contents)) > MAX_EVIDENCE_BYTES:
        raise ProtocolError("a result with unusable evidence of earlier attempts")
    return {numbers[name]: bytes(content) for name, content in document.items()}


@dataclass(frozen=True, slots=True)
class ServedJob:
    """What all attempts of a job share at the server.

    Attributes:
        folder: where evidence and summary go; a part of the job's workspace, so that a download brings it.
        on_sum: turns added words into the answer; a trusted aggregator adds its noise there. One for all attempts: of
            what it has answered in one of them it knows in the next.
        deadline_s: how long a site that lives may be missing from an exchange, without the transfer of its messages.
        transfer_s: how long so many bytes may be on their way.
        metrics: the server's own numbers of the job.
        open_plugin: adds messages of the job's plugin, where the server's policy pins it.
        before: an attempt that a process before this one has led, and why that has ended; its sites are told.
        waits_s: how long the job waits for a lost site, also for the report of one that is lost when all have their
            result; None if it does not.
    """

    job_id: str
    profile: str
    folder: Path
    deadline_s: float
    transfer_s: Callable[[int], float] | None = None
    on_sum: ServerSum | None = None
    metrics: ServerMetrics | None = None
    open_plugin: OpenSum | None = None
    before: tuple[str, str] | None = None
    waits_s: float | None = None


class ServerAttempt:
    """Serves the sites of one run of a job until all reported or one failed.

    Args:
        cell: the cell of the server's engine for this job.
        site_cells: site -> name of its job cell, from FLARE's list of authenticated clients.
        clock: seconds, for the sites' signs of life.
        number: of the attempt in its job, from 1. Evidence of the one before is put aside first.
        without: sites of the job that were lost, and that it goes on without.

    Attributes:
        has_trained: a round of training has begun.
        reason: why the attempt failed, or None.
    """

    def __init__(
        self,
        job: ServedJob,
        *,
        cell: Cell,
        site_cells: Mapping[str, str],
        randomness: RandomSource = OS_RANDOMNESS,
        clock: Callable[[], float] = time.monotonic,
        number: int = 1,
        without: Iterable[str] = (),
    ) -> None:
        self._without = sorted(without)
        if number > 1:
            put_aside(job.folder / EVIDENCE_FOLDER, number, None)
        self.number = number
        attempt = randomness.bytes(ATTEMPT_BYTES)
        self.attempt = attempt.hex()
        self.sites = sorted(site_cells)
        self._job_id, self._profile, self._folder = job.job_id, job.profile, job.folder
        self._lock, self._clock = threading.Lock(), clock
        self._report_s, self._waits = max(REPORT_S, job.deadline_s, job.waits_s or 0.0), job.waits_s is not None
        self._n_closings, self._awaited_late = 0, frozenset[str]()
        self.reason: str | None = None
        self._reports: dict[str, SiteReport] = {}
        self._metrics = job.metrics
        self._gone: frozenset[str] = frozenset()
        self._lost: frozenset[str] = frozenset()
        self._completed_at: float | None = None  # when the first site reported that it is done
        self.has_trained = False
        path = job.folder / EVIDENCE_FOLDER / export_name(SERVER)
        earlier = earlier_log(job.folder, SERVER) if number > 1 else None
        self._evidence = EvidenceLog(
            path, SERVER, job.job_id, self.attempt, job.profile, role="server", number=number, earlier=earlier
        )
        self._evidence.flush()  # whenever this process dies, the next one finds a log of the attempt
        on_sum = job.on_sum
        self._aggregator = Aggregator(
            self.sites,
            attempt,
            job.deadline_s,
            self._transfer,
            self._evidence.signed_head,
            on_abort=self.fail,
            on_sum=None if on_sum is None else lambda frame, total: on_sum(frame, total, self._evidence.spend),
            transfer_s=job.transfer_s,
        )
        self._aggregator.add_by(job.open_plugin)
        self._frames = FrameServer(
            cell, self._aggregator, site_cells, self.attempt, self._on_violation, clock, self._on_server_failure
        )
        self._beats = Beats(self._frames.beat)
        if job.before is not None:
            self._frames.end_other(*job.before)

    @property
    def lost(self) -> list[str]:
        """The sites whose loss is why the attempt failed; none if it is anything else."""
        return sorted(self._lost)

    @property
    def has_completed(self) -> bool:
        """Whether some site has reported that it is done: then nothing is to be gone on with."""
        with self._lock:
            return any(report.status == COMPLETED for report in self._reports.values())

    @property
    def cannot_go_on(self) -> bool:
        """Whether some site has said that the attempt cannot be without the sites that are lost."""
        with self._lock:
            return any(report.status == CANNOT_GO_ON for report in self._reports.values())

    @property
    def has_summed(self) -> bool:
        """Whether its sites got a sum: those that it ran without are then no part of the job any more."""
        return self._aggregator.has_summed

    @property
    def missing(self) -> list[str]:
        """The sites that have not reported yet."""
        with self._lock:
            return [site for site in self.sites if site not in self._reports]

    @property
    def awaited(self) -> list[str]:
        """The sites whose report may still come: those that have not reported and are not known to be gone."""
        return [site for site in self.missing if site not in self._gone | self._lost]

    @property
    def starting(self) -> list[str]:
        """The sites of which nothing was heard yet."""
        return [site for site in self.awaited if not self._frames.life_signs.has_begun(site)]

    @property
    def _only_reports_are_missing(self) -> bool:
        """Whether all sites have their results, in a job that waits for what is still to come from them."""
        return self._waits and self._n_closings >= N_CLOSINGS

    def poll(self) -> None:
        """Look after deadlines and signs of life; call about once a second."""
        self._note_metrics()
        silent = [site for site in self.missing if self._is_silent(site)]
        signs = self._frames.life_signs
        slow = [one for one in self.missing if signs.lasted_s > START_SILENCE_S and not signs.has_begun(one)]
        self._gone = frozenset() if self._only_reports_are_missing else frozenset(silent).union(slow)
        if silent:
            hint = " (all sites at once: look at this server's own connection first)" if silent == self.sites else ""
            self.lose(
                silent,
                f"no sign of life from {', '.join(silent)} for {SILENCE_LIMIT_S:.0f} s: the machine, its FLARE process "
                f"or its connection is gone{hint}",
            )
        elif slow:
            what = f"{', '.join(slow)} did not begin within {START_SILENCE_S:.0f} s; see the log of FLARE there"
            self.lose(slow, what)
        self._aggregator.expire()  # last: a site that is not there is lost, and not late
        if self._completed_at is not None and self._clock() - self._completed_at > self._report_s and self.missing:
            late = ", ".join(self.missing)
            though = "" if silent else ", though it gives signs of life"
            self.fail(
                f"no result from {late} within {self._report_s:.0f} s after the first site had ended{though}. Remedy: "
                "look at its disk and at the log of FLARE there; if it was still writing a long result, give the job a "
                "longer deadline_s"
            )

    def _transfer(self, transfer: Transfer) -> None:
        self.has_trained = self.has_trained or transfer.frame.moment.phase is Phase.UPDATE
        self._evidence.transfer(transfer)
        if transfer.frame.kind is Kind.CLOSING and transfer.direction == "sent":
            self._n_closings += 1
            if self._only_reports_are_missing and self._completed_at is None:
                self._completed_at = self._clock()
        if self._metrics is not None:
            self._metrics.transfer(transfer)

    def _note_metrics(self, state: str = "") -> None:
        if self._metrics is not None:
            missing, waiting_s = self._aggregator.waiting_for()
            waiting = {site: waiting_s if site in missing else 0.0 for site in self.sites}
            silent = {site: self._frames.life_signs.silent_s(site) for site in self.sites}
            self._metrics.look(self.number, waiting, silent, state)

    def _is_silent(self, site: str) -> bool:
        signs = self._frames.life_signs
        return signs.silent_s(site) > SILENCE_LIMIT_S and (signs.sees_machines or signs.has_begun(site))

    def lives(self, site: str) -> None:
        """Take note that a site's machine is there, whether or not its part has begun."""
        self._frames.life_signs.lives(site)

    def fail(self, reason: str) -> None:
        """End the attempt: every site gets the reason, wherever it is. The first reason stays."""
        self.lose((), reason)

    def lose(self, sites: Iterable[str], reason: str) -> None:
        """End the attempt because sites are lost; otherwise as ``fail``.

        Where the job waits and all sites have their results, only reports are missing, and are waited for: the next
        process of a lost site ends its record, and reports.
        """
        late = frozenset(sites)
        if self._only_reports_are_missing and late and SERVER not in late:
            if late - self._awaited_late:
                logger.warning("all sites have their results, and a report is waited for: %s", reason)
            self._awaited_late |= late
        else:
            self._end(late, reason)

    def _end(self, sites: Iterable[str], reason: str) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.reason, self._lost = printable(reason.strip(), MAX_ERROR_CHARS), frozenset(sites)
        self._aggregator.abort(self.reason)
        self._frames.abort_sites(self.reason)

    def remind(self) -> None:
        """Say again that the attempt has ended, to sites that have not reported: they may not have heard it."""
        if self.reason is not None:
            self._frames.remind(self.reason, self.missing)

    def stop(self) -> None:
        """End the attempt because FLARE says so, which does not say why.

        When an operator aborts a job, all its sites are stopped and say so. A site that does not is gone, and is why.
        """
        if self.reason is not None:
            return
        deadline = time.monotonic() + STOP_ANSWER_S
        while (gone := [site for site in self.missing if site not in self._frames.stopping]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.02)
        reason = "aborted by an operator, or by FLARE, whose log on the server says why"
        if gone:
            reason += f"; {', '.join(gone)} no longer answered: the job's process there may have ended"
        self.fail(reason)

    def add_report(self, site: str, document: Mapping[str, Any]) -> None:
        """Take the result of a site's task, whatever it is."""
        try:
            report = SiteReport.from_dict(document)
        except ProtocolError as error:
            report = SiteReport(FAILED, f"sent {error}")
        with self._lock:
            self._reports[site] = report
            if report.status == COMPLETED and self._completed_at is None:
                self._completed_at = self._clock()
        if report.status == INTERRUPTED:
            self._end([site], f"{site}: {report.error}")
        elif report.status in (FAILED, CANNOT_GO_ON):
            self.fail(f"{site}: {report.error or 'failed without saying why'}")

    def add_left_out(self, site: str, document: Mapping[str, Any]) -> None:
        """Take the evidence of a site that the attempt goes on without, once it is back and was told."""
        try:
            self._keep_earlier(site, SiteReport.from_dict(document))
        except ProtocolError:
            logger.warning("%s, without which the job goes on, sent no evidence that can be kept", printable(site))

    def finish(self) -> str | None:
        """Write evidence and summary; after an OSError it may be called again.

        Returns:
            Why the attempt failed, or None if all sites completed with the same model.

        Raises:
            OSError: the disk refuses them.
        """
        if self.missing:
            self.fail(f"no result from {', '.join(self.missing)}")
        with self._lock:
            reports = dict(self._reports)  # a site that comes too late changes nothing any more
        hmacs = {report.model_hmac for report in reports.values()}
        if self.reason is None and (len(hmacs) != 1 or hmacs == {""}):
            self.fail("the sites ended with different results, or did not say which: do not use any of them")
        reason = self.reason
        self._note_metrics(COMPLETED if reason is None else FAILED)
        self._beats.stop()
        self._frames.close()
        if reason is None:
            self._evidence.end(COMPLETED)
            self._evidence.close()
        else:  # a thread that hangs on its way to the disk may hold the log: the job has an end all the same
            self._evidence.end_from_outside(reason, DISK_ANSWER_S)
        for site, report in reports.items():
            if report.evidence:
                _write(self._folder / EVIDENCE_FOLDER / export_name(site), report.evidence)
            self._keep_earlier(site, report)
        self._write_summary(reason, reports)
        return reason

    def was_the_last(self, why: str) -> str:
        """Say in the summary why the job does not go on after this attempt, which has failed; return the reason."""
        with self._lock:
            reports = dict(self._reports)
        reason = f"{self.reason}; {why}"
        self._write_summary(reason, reports)
        return reason

    def abandon(self, reason: str) -> None:
        """End the attempt because the server itself cannot go on."""
        self.fail(reason)
        self._evidence.abandon(self.reason or reason)

    def _keep_earlier(self, site: str, report: SiteReport) -> None:
        for number, content in report.earlier.items():
            path = self._folder / before_attempt(number) / export_name(site)
            if number <= self.number and content and not path.exists():
                _write(path, content)

    def _write_summary(self, reason: str | None, reports: Mapping[str, SiteReport]) -> None:
        document = {
            "job_id": self._job_id,
            "attempt": self.attempt,
            "attempts": self.number,
            "without": list(self._without),
            "profile": self._profile,
            "status": COMPLETED if reason is None else FAILED,
            "reason": reason,
            "sites": {
                site: {"status": report.status, "error": report.error, "summary": report.summary}
                for site, report in sorted(reports.items())
            },
        }
        _write(self._folder / SUMMARY_FILE, json.dumps(document, indent=2).encode() + b"\n")

    def _on_violation(self, site: str, text: str) -> None:
        self.fail(f"{site} sent {text}")

    def _on_server_failure(self, text: str, error: Exception) -> None:
        self.lose([SERVER] if time_mends(error) else [], f"the server could not go on: {text}")


def completed_at(run: Path) -> float | None:
    """Return when all sites had completed the job of this folder at the server, seconds since 1970; None if not."""
    path = run / RESULT_FOLDER / SUMMARY_FILE
    try:
        return path.stat().st_mtime if json.loads(path.read_bytes())["status"] == COMPLETED else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def failure_of(run: Path) -> str:
    """Return why the job of this folder at the server has failed, as its summary says; "" if it does not."""
    try:
        reason = json.loads((run / RESULT_FOLDER / SUMMARY_FILE).read_bytes())["reason"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return printable(reason, MAX_ERROR_CHARS) if isinstance(reason, str) else ""


def note_refusal(folder: Path, job_id: str, reason: str) -> None:
    """Write the summary of a job that ends before any attempt. Raises: OSError."""
    document = {"job_id": job_id, "attempts": 0, "status": FAILED, "reason": reason, "sites": {}}
    _write(folder / SUMMARY_FILE, json.dumps(document, indent=2).encode() + b"\n")


def _write(path: Path, content: bytes) -> None:
    make_folder(path.parent)
    write_atomically(path, content)
