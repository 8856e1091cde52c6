"""Numbers for a site's or a server's own monitoring, in files that the node exporter of Prometheus collects.

Off unless the environment in which FLARE is started names a folder (``VEILBOOST_METRICS``): a job can neither switch
this on nor choose where. Each job has one file of a few kilobytes, replaced whole every few seconds and readable for
whoever may enter the folder; the files of jobs that have ended go after a day, when another one starts.

Privacy: nothing here travels. A site's file says what that site knows, what is left of its privacy budgets too; the
server's says what the server sees anyway: sizes, order and timing, by site. Labels are names of jobs, sites, data sets,
stages, workers and kinds of message, never a column, an id or a value of data. The server's numbers, not the sites',
are also published on FLARE's data bus, where FLARE's StatsD reporter takes them if a job has one
and the server lets it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nvflare.apis.fl_constant import ReservedTopic
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.metrics.metrics_keys import MetricKeys, MetricTypes

from nvflare_plugins.attempt.job_context import Progress
from nvflare_plugins.base.files import written_atomically
from nvflare_plugins.pages.run_record import RoundRow, Spending
from nvflare_plugins.wire.channel import Transport
from nvflare_plugins.wire.envelope import Transfer, unpack_head
from nvflare_plugins.workers.workers import HELD, Work

FOLDER_VARIABLE = "VEILBOOST_METRICS"
INTERVAL_S = 5.0
KEPT_S = 86400.0  # the file of a job that has ended
RUNNING, COMPLETED, FAILED, LOST = "running", "completed", "failed", "lost"
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")
_HEAD_BYTES = 256  # more than a frame's header

Labels = tuple[tuple[str, str], ...]
Samples = Mapping[Labels, float]

logger = logging.getLogger(__name__)


def metrics_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for metrics; None where there is to be none."""
    name = environment.get(FOLDER_VARIABLE, "")
    return Path(name) if name else None


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` ends in ``_total`` where it only grows; units are in the name."""

    name: str
    words: str
    samples: Samples

    @property
    def is_counter(self) -> bool:
        """Whether it only grows while a job runs."""
        return self.name.endswith("_total")


def rendered(families: Iterable[Family], labels: Labels) -> str:
    """Return metrics in the text format of Prometheus, each with ``labels`` beside its own."""
    lines = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {family.words}")
            lines.append(f"# TYPE {family.name} {'counter' if family.is_counter else 'gauge'}")
        for own, value in family.samples.items():
            named = ",".join(f'{name}="{_escaped(text)}"' for name, text in (*labels, *own))
            lines.append(f"{family.name}{{{named}}} {float(value)!r}")
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsFile:
    """One job's file. What goes wrong is said once, and never ends a job.

    Args:
        folder: None for no file.
        who: the site's name, or "server".
    """

    def __init__(self, folder: Path | None, who: str, job_id: str) -> None:
        stem = _NOT_PLAIN.sub("_", f"veilboost_{who}_{job_id}")
        self._path = None if folder is None else folder / f"{stem}.prom"
        if self._path is not None:
            _remove_old(self._path.parent)

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._path is not None

    def write(self, text: str) -> None:
        """Replace the file."""
        path = self._path
        if path is None:
            return
        try:
            replace_file(path, text.encode())
        except OSError as error:
            logger.warning("no metrics of this job: %s cannot be written (%s)", FOLDER_VARIABLE, type(error).__name__)
            self._path = None


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file whole, readable for all: the folder may be another user's, so that no name is trusted twice."""
    with written_atomically(path) as file:
        os.fchmod(file.fileno(), 0o644)  # whatever the umask, and of this very file: the collector is another user
        file.write(content)


def _remove_old(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.glob("veilboost_*.prom"):
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


class Writer:
    """Writes a file every few seconds in a thread of its own: a folder that hangs holds nothing up."""

    def __init__(self, write: Callable[[], None], interval_s: float = INTERVAL_S) -> None:
        self._write, self._interval_s = write, interval_s
        self._over = threading.Event()
        thread = threading.Thread(target=self._run, name="veilboost_metrics", daemon=True)
        with suppress(RuntimeError):  # the system refuses a thread: then there are no metrics
            thread.start()

    def stop(self) -> None:
        """Write once more, and then no more; does not wait for it."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self._write()
            self._over.wait(self._interval_s)
        self._write()


# -- a site -----------------------------------------------------------------------------------------------------------


class SiteMetrics:
    """What one site knows of its part in a job.

    Args:
        budgets: returns what is spent of the site's budgets; asked at the beginning and at the end.
        clock: seconds since 1970.

    Threads: any thread may call any method.
    """

    def __init__(
        self,
        file: MetricsFile,
        labels: Labels,
        attempt: int,
        budgets: Callable[[], Iterable[Spending]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file, self._labels, self._attempt, self._budgets, self._clock = file, labels, attempt, budgets, clock
        self._lock = threading.Lock()
        self._state, self._round, self._n_rounds = RUNNING, 0, 0
        self._sent: dict[Labels, float] = defaultdict(float)
        self._received: dict[Labels, float] = defaultdict(float)
        self._stages: dict[Labels, float] = defaultdict(float)
        self._waited_s = 0.0
        self._workers: Sequence[Work] = ()
        self._busy_s: dict[Labels, float] = {}
        self._waiting_s: Callable[[], float | None] = lambda: None
        self._spending: tuple[Spending, ...] = ()

    @contextmanager
    def running(self, waiting_s: Callable[[], float | None]) -> Iterator[None]:
        """Write while a block runs, and how it has ended.

        Args:
            waiting_s: for how long the present exchange has been waiting for the others.
        """
        if not self._file.is_on:
            yield
            return
        self._waiting_s = waiting_s
        self._ask_budgets()
        writer = Writer(self.write)
        ended = FAILED
        try:
            yield
            ended = COMPLETED
        finally:
            self._ask_budgets()
            with self._lock:
                self._state = ended
            writer.stop()

    def metered(self, transport: Transport) -> Transport:
        """Return a transport whose bytes are counted."""
        return _Metered(transport, self) if self._file.is_on else transport

    def watched(self, progress: Progress) -> Progress:
        """Return progress whose rounds are counted."""
        return _Watched(progress, self) if self._file.is_on else progress

    def write(self) -> None:
        """Write the file now."""
        with self._lock:
            families = self._families()
        self._file.write(rendered(families, self._labels))

    def exchanged(self, kind: str, n_sent: int, n_received: int, seconds: float) -> None:
        """Count an exchange."""
        with self._lock:
            self._sent[(("message", kind),)] += n_sent
            self._received[(("message", kind),)] += n_received
            self._waited_s += seconds

    def round_done(self, record: RoundRow, n_rounds: int) -> None:
        """Count a round."""
        with self._lock:
            self._round, self._n_rounds = record.round + 1, n_rounds
            for stage, seconds in record.stages.items():
                self._stages[(("stage", stage),)] += seconds

    def note_workers(self, work: Sequence[Work]) -> None:
        """Take note of what workers do."""
        with self._lock:
            self._workers, self._busy_s = work, {}

    def _ask_budgets(self) -> None:
        try:
            self._spending = tuple(self._budgets())
        except Exception as error:  # whatever keeps a ledger from being read, the job itself says
            logger.warning("what is left of privacy budgets is not known for metrics: %s", type(error).__name__)

    def _families(self) -> list[Family]:
        budgets: list[tuple[Spending, Labels]] = [(one, (("data_set", one.data_set),)) for one in self._spending]
        left = {label: max(one.epsilon - one.spent, 0.0) for one, label in budgets if one.spent is not None}
        return [
            Family("veilboost_site_job_state", "1 for the state that the job is in here.", _states(self._state)),
            Family("veilboost_site_updated_seconds", "When this was written, since 1970.", {(): self._clock()}),
            Family("veilboost_site_attempt", "Which attempt of its job this is, from 1.", {(): self._attempt}),
            Family("veilboost_site_round", "Rounds that are done.", {(): self._round}),
            Family(
                "veilboost_site_rounds_planned", "Rounds that the job has; 0 before the first.", {(): self._n_rounds}
            ),
            Family("veilboost_site_stage_seconds_total", "Seconds of rounds by stage.", dict(self._stages)),
            Family("veilboost_site_sent_bytes_total", "Bytes sent, by kind of message.", dict(self._sent)),
            Family("veilboost_site_received_bytes_total", "Bytes received, by kind of message.", dict(self._received)),
            Family("veilboost_site_exchange_seconds_total", "Seconds in exchanges.", {(): self._waited_s}),
            Family("veilboost_site_waiting_seconds", "How long it waits now.", {(): self._waiting_s() or 0.0}),
            Family("veilboost_site_budget_epsilon", "The budget.", {label: one.epsilon for one, label in budgets}),
            Family("veilboost_site_budget_left_epsilon", "What is left of the budget, at its delta.", left),
            *self._of_workers(),
        ]

    def _of_workers(self) -> Iterator[Family]:
        """Yield what the site's own workers have done and do, by their number; nothing where there are none."""
        now = time.perf_counter()
        work: list[tuple[Labels, Work]] = [((("worker", str(n)),), one) for n, one in enumerate(self._workers)]
        # A call's wait for other workers is known, and taken off, when it has ended; a counter must not fall.
        busy = {own: max(one.seconds_until(now), self._busy_s.get(own, 0.0)) for own, one in work}
        self._busy_s = busy
        rows = [(own, word, n) for own, one in work for word, n in list(one.rows.items())]
        held = {own: n for own, word, n in rows if word == HELD}
        done = {(*own, ("done", word)): n for own, word, n in rows if word != HELD}
        told = {own: said[1] for own, one in work if (said := one.told) is not None}  # read once: it may end meanwhile
        sent, received = ({own: getattr(one, way) for own, one in work} for way in ("bytes_to", "bytes_from"))
        asked = {own: float(bool(one.asked)) for own, one in work}
        yield Family("veilboost_site_worker_busy", "1 while it works.", asked)
        yield Family("veilboost_site_worker_busy_seconds_total", "How long it has worked.", busy)
        yield Family("veilboost_site_worker_rows", "Rows of the training that are its own.", held)
        yield Family("veilboost_site_worker_rows_total", "Rows that it has encrypted or blinded.", done)
        yield Family("veilboost_site_worker_rows_read", "Rows of its own that it has read so far, while it does.", told)
        yield Family("veilboost_site_worker_sent_bytes_total", "Bytes sent to it.", sent)
        yield Family("veilboost_site_worker_received_bytes_total", "Bytes received from it.", received)


class _Metered:
    """A transport that counts."""

    def __init__(self, inner: Transport, metrics: SiteMetrics) -> None:
        self._inner, self._metrics = inner, metrics

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Exchange a frame, and count it."""
        kind = unpack_head(frame[:_HEAD_BYTES], len(frame))[0].kind.name
        began = time.perf_counter()
        answer = self._inner.exchange(frame, timeout_s)
        self._metrics.exchanged(kind, len(frame), len(answer), time.perf_counter() - began)
        return answer

    def abort(self, reason: str) -> None:
        """Abort the inner one."""
        self._inner.abort(reason)


class _Watched:
    """Progress that counts."""

    def __init__(self, inner: Progress, metrics: SiteMetrics) -> None:
        self._inner, self._metrics = inner, metrics

    def __call__(self, record: RoundRow, n_rounds: int) -> None:
        """Take note of a finished round."""
        self._metrics.round_done(record, n_rounds)
        self._inner(record, n_rounds)

    def say(self, text: str) -> None:
        """Write one line."""
        self._inner.say(text)

    def note_workers(self, work: Sequence[Work]) -> None:
        """Take note of what workers do."""
        self._metrics.note_workers(work)
        self._inner.note_workers(work)


def _states(now: str) -> Samples:
    return {(("state", state),): float(state == now) for state in (RUNNING, COMPLETED, FAILED, LOST)}


def with_state_lost(text: str) -> str | None:
    """Return the file of a job that runs as that of one whose process was killed; None if it does not run."""
    now, found = re.subn(rf'^(.*_job_state{{.*state="{RUNNING}".*}}) 1.0$', r"\1 0.0", text, flags=re.MULTILINE)
    lost = re.sub(rf'^(.*_job_state{{.*state="{LOST}".*}}) 0.0$', r"\1 1.0", now, flags=re.MULTILINE)
    return lost if found else None


# -- the server -------------------------------------------------------------------------------------------------------


class ServerMetrics:
    """What the server sees of a job: sizes, order and timing, site by site.

    Args:
        clock: seconds since 1970.

    Threads: any thread may call any method.
    """

    def __init__(
        self, file: MetricsFile, labels: Labels, clock: Callable[[], float] = time.time, interval_s: float = INTERVAL_S
    ) -> None:
        self._file, self._labels, self._clock, self._interval_s = file, labels, clock, interval_s
        self._lock = threading.Lock()
        self._state, self._attempt, self._round, self._due = RUNNING, 0, 0, 0.0
        self._received: dict[Labels, float] = defaultdict(float)
        self._sent: dict[Labels, float] = defaultdict(float)
        self._waiting: Samples = {}
        self._silent: Samples = {}
        self._published: dict[tuple[str, Labels], float] = {}

    def transfer(self, transfer: Transfer) -> None:
        """Count the payload of a frame that passed, from one site or to each of several."""
        frame = transfer.frame
        counted = self._received if transfer.direction == "received" else self._sent
        with self._lock:
            self._round = max(self._round, frame.moment.round)
            for site in transfer.sites:
                counted[("site", site), ("message", frame.kind.name)] += len(transfer.commitment)

    def look(self, attempt: int, waiting: Mapping[str, float], silent: Mapping[str, float], state: str = "") -> None:
        """Write and publish, if it is time or the state is another one.

        Args:
            waiting: site -> seconds that the oldest open exchange has waited for it; 0 for those it does not wait for.
            silent: site -> seconds since its last sign of life.
        """
        now = self._clock()
        if now < self._due and state in ("", self._state):
            return
        with self._lock:
            self._due, self._attempt, self._state = now + self._interval_s, attempt, state or self._state
            self._waiting = {(("site", site),): seconds for site, seconds in waiting.items()}
            self._silent = {(("site", site),): seconds for site, seconds in silent.items()}
            families = self._families(now)
        self._file.write(rendered(families, self._labels))
        self._publish(families)

    def _families(self, now: float) -> list[Family]:
        return [
            Family("veilboost_server_job_state", "1 for the state that the job is in.", _states(self._state)),
            Family("veilboost_server_updated_seconds", "When this was written, since 1970.", {(): now}),
            Family("veilboost_server_attempt", "Which attempt of its job this is, from 1.", {(): self._attempt}),
            Family("veilboost_server_round", "The latest round of which a message came, from 0.", {(): self._round}),
            Family("veilboost_server_received_bytes_total", "Payload by site and kind.", dict(self._received)),
            Family("veilboost_server_sent_bytes_total", "Payload by site and kind.", dict(self._sent)),
            Family("veilboost_server_waiting_seconds", "How long all wait for a site; 0 if not.", self._waiting),
            Family("veilboost_server_silent_seconds", "Since a site's last sign of life.", self._silent),
        ]

    def _publish(self, families: Iterable[Family]) -> None:
        """Publish on FLARE's data bus: gauges as they are, of counters what they have grown by."""
        facts = []
        for family in families:
            for own, value in family.samples.items():
                amount = value
                if family.is_counter:
                    amount = value - self._published.get((family.name, own), 0.0)
                    self._published[family.name, own] = value
                facts.append(
                    {
                        MetricKeys.metric_name: family.name,
                        MetricKeys.value: amount,
                        MetricKeys.type: MetricTypes.COUNTER if family.is_counter else MetricTypes.GAUGE,
                        MetricKeys.tags: dict((*self._labels, *own)),
                    }
                )
        try:
            DataBus().publish([ReservedTopic.APP_METRICS], facts)
        except Exception as error:  # a reporter that fails is no reason to end a job
            logger.warning("metrics were not published: %s", type(error).__name__)
