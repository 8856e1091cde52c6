"""How long FLARE may take, and the signs of life in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from nvflare_plugins.attempt.job_context import Job
from nvflare_plugins.wire.envelope import MAX_FRAME_BYTES

# Every timeout of a job under FLARE, in one place, and how it follows from what is sent.
#
# Nothing is ever waited for without end:
#
# * Sites and server send each other a sign of life each BEAT_INTERVAL_S, whatever they work on. The server ends the
#   job when a site has been silent for SILENCE_LIMIT_S, and names it; a site ends its part when the server has been.
#   Any message counts as a sign of life. Shorter silence (a lost line, a stopped process) is survived.
# * A site whose part has not begun is slow, or gone. FLARE's main process there sends the server's a heartbeat each 10
#   s, whatever the job's process loads; the server's job hears of it (kept_jobs.py). Where these stop, SILENCE_LIMIT_S
#   counts from the last one. Where they go on, or where none are handed on (the simulator), START_SILENCE_S does.
# * A site that hears nothing of its own frame for QUERY_INTERVAL_S asks the server what has become of it
#   (transport.py).
# * A site that lives and sends signs but is missing from an exchange has ``exchange_deadline_s``: the slowest site's
#   local work between two exchanges, plus the transfer of the messages that this exchange really has.
# * After the last exchange nothing is left to be missing from: who has not reported REPORT_S, or the job's own
#   longer deadline, after the first site that is done is not waited for. One party may have a long result to write
#   by then.
# * A site's own wait for a reply is the last resort against a server that sends signs and never answers.
# * After the end of a job a site's work has STOP_GRACE_S to return. Work that does not (XGBoost waits without end
#   for a thread that the system refused) is left behind, evidence and report are made without it, and the process is
#   left.
# * FLARE's own knobs do not matter to the training: it runs inside one task without time limit. Before the task all
#   sites must be there within START_TIMEOUT_S.


QUERY_INTERVAL_S = 10.0
START_TIMEOUT_S = 120.0
ABORT_POLL_S = 0.2
EXPIRE_POLL_S = 1.0
HEARTBEAT_S = 30.0  # a line in the site's log; the next one after twice as long
LONGEST_SILENCE_S = 3600.0
ABORT_GRACE_S = 20.0  # after a failure: for the other sites to hand in their evidence

BEAT_INTERVAL_S = 10.0
SILENCE_LIMIT_S = 90.0  # eight beats lost in a row

READY_INTERVAL_S = 2.0  # a site's process without a task says that it waits for one
READY_FRESH_S = 10.0  # and is believed to for so long
GO_ON_AFTER_S = 15.0  # without a lost site, where the job does; a process that died is back sooner
GIVE_UP_AFTER_S = 45.0  # of a site whose end was not why the attempt ended, and that is away all the same
PAUSE_LINE_S = 60.0  # between two lines that say for whom a job waits
FIRST_PAUSE_S = 5.0  # before a site tries again what time mends; doubled each time
LONGEST_PAUSE_S = 300.0
REMIND_INTERVAL_S = 5.0  # the server says again that an attempt has ended, to sites that go on with it
RESTART_PAUSE_S = 1.0  # before a job's process that died is started again; doubled each time it dies at once
LONGEST_RESTART_PAUSE_S = 30.0
FAULT_ANSWER_S = 2.0  # for the server to hear why a process could not begin, and before it is said again
FAULT_TRIES = 15

STOP_GRACE_S = 15.0  # shorter than ABORT_GRACE_S, so that the report still reaches the server
# FLARE kills a process 10 s after it asked it to stop, which must be enough for these one after the other.
STOP_ANSWER_S = 3.0  # the server waits for the sites to say that FLARE stops them too: who cannot say so is gone
STOP_REASON_S = 5.0  # a site waits for what the server makes of it
FLARE_STOP_GRACE_S = 3.0
COMMUNICATOR_S = 60.0  # for XGBoost to open or to close its end of the federation
LEAVE_S = 30.0  # for FLARE to hand the report over and to leave a process in which work is stuck

LOCAL_WORK_S = 600.0  # reading data, building the matrix, one tree level, encrypting: for tables up to some 10^7 rows
REPORT_S = LOCAL_WORK_S  # for the last site to report, after the first one did: no exchange is open any more
START_SILENCE_S = LOCAL_WORK_S  # for a site's process to start and to take the task
ASSUMED_BYTES_PER_SECOND = 1.25e6  # a 10 Mbit/s line
SITE_MARGIN_S = 60.0
DISK_ANSWER_S = 30.0  # for a log that is being brought to the disk, before a job that failed ends without it


def resend_pause_s(size_bytes: int) -> float:
    """Return how long bytes already sent may be on their way before they are sent again."""
    return 5.0 + size_bytes / 1e6


def transfer_s(size_bytes: int) -> float:
    """Return how long so many bytes may be on their way."""
    return size_bytes / ASSUMED_BYTES_PER_SECOND


def exchange_deadline_s(job: Job, message_bytes: int = 0) -> float:
    """Return how long the server waits for the slowest site in one exchange.

    The job's own deadline if it has one; else local work, and the transfer of what is really sent meanwhile: the answer
    before this exchange, and its largest message.
    """
    return job.deadline_s or LOCAL_WORK_S + transfer_s(message_bytes)


def site_timeout_s(job: Job) -> float:
    """Return how long a site waits for one reply: longer than the server may wait for another site."""
    return exchange_deadline_s(job, 2 * MAX_FRAME_BYTES) + SITE_MARGIN_S


# Who has given a sign of life, and how long the others have been silent.


LONGEST_STEP_S = 5.0


class LifeSigns:
    """Counts how long each of the others has been silent.

    Only time in which this process itself was running counts. After a pause (a stopped process, a suspended machine)
    the others' signs lie unread in this process's own buffers: it must read them before it may take anyone for dead.
    So of a longer time between two looks only LONGEST_STEP_S counts; look about once a second.

    Attributes:
        lasted_s: how long it has counted.
        sees_machines: it is told of machines that live, also where nothing else is heard of them.

    Threads: any thread may call any method.
    """

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._silent_s = dict.fromkeys(names, 0.0)
        self._begun: set[str] = set()
        self.lasted_s, self.sees_machines = 0.0, False
        self._looked_at = clock()

    def heard(self, name: str) -> None:
        """Take note of any message of ``name``."""
        with self._lock:
            self._silent_s[name] = 0.0
            self._begun.add(name)

    def lives(self, name: str) -> None:
        """Take note that the machine of ``name`` is there, though it may not have begun; of others nothing is noted."""
        with self._lock:
            self.sees_machines = True
            if name in self._silent_s and name not in self._begun:
                self._silent_s[name] = 0.0

    def has_begun(self, name: str) -> bool:
        """Return whether anything was ever heard of ``name``."""
        return name in self._begun

    def silent_s(self, name: str) -> float:
        """Return for how many seconds nothing was heard of ``name``."""
        with self._lock:
            now = self._clock()
            step = min(now - self._looked_at, LONGEST_STEP_S)
            self._looked_at = now
            self.lasted_s += step
            for other in self._silent_s:
                self._silent_s[other] += step
            return self._silent_s[name]
