"""Every timeout of a job under FLARE, in one place, and how it follows from the job's size.

Inside an exchange nothing is ever waited for without end:

* A site that hears nothing for QUERY_INTERVAL_S asks the server (transport.py). Silence alone never ends a job.
* The server ends the job when a site is missing from an exchange for `exchange_deadline_s`: the slowest site's local
  work between two exchanges plus the transfer of the largest message, both from the job's size.
* A site gives up SITE_MARGIN_S later than the server would, so that the server's message, which names the missing
  site, is the one that everyone reads.
* FLARE's own knobs do not matter to the training: it runs inside one task without time limit, and its heartbeats only
  decide how soon a dead job process is noticed. Before the task all sites must be there within START_TIMEOUT_S.
"""

from __future__ import annotations

from nvflare_plugins.place import Job

QUERY_INTERVAL_S = 10.0
START_TIMEOUT_S = 120.0
ABORT_POLL_S = 0.2
EXPIRE_POLL_S = 1.0
HEARTBEAT_S = 30.0
SITE_MARGIN_S = 60.0
ABORT_GRACE_S = 20.0  # after a failure: for the other sites to hand in their evidence

LOCAL_WORK_S = 600.0  # reading data, building the matrix, one tree level, encrypting: for tables up to some 10^7 rows
ASSUMED_BYTES_PER_SECOND = 1.25e6  # a 10 Mbit/s line


def resend_pause_s(size_bytes: int) -> float:
    """Return how long bytes already sent may be on their way before they are sent again."""
    return 5.0 + size_bytes / 1e6


def exchange_deadline_s(job: Job) -> float:
    """Return how long the server waits for the slowest site in one exchange.

    The job's own deadline if it has one; else two transfers (up and down) of its largest message, plus local work.
    """
    return job.deadline_s or LOCAL_WORK_S + 2 * job.largest_message_bytes / ASSUMED_BYTES_PER_SECOND


def site_timeout_s(job: Job) -> float:
    """Return how long a site waits for the server in one exchange: longer than the server for the slowest site."""
    return exchange_deadline_s(job) + SITE_MARGIN_S
