"""What a kind of job makes of the cluster that a policy names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from he_processors.errors import PolicyRefusal
from nvflare_plugins.cluster.workers import Work
from nvflare_plugins.formatting import counted, human_bytes
from nvflare_plugins.report.run_record import ReportSection
from nvflare_plugins.site.policy.policy import SitePolicy


class OnCluster(Enum):
    """USED: the site's part runs on it. NOT_NEEDED: it runs in the site's process. REFUSED: the job does not run."""

    USED = "used"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"


def shards_line(n_rows: int, n_workers: int) -> str:
    """Return, for this site's own log, how its rows are divided."""
    return f"{counted(n_workers, 'worker')} of this site's cluster, each with {n_rows // n_workers:,} rows or one more"


def work_section(work: Sequence[Work]) -> ReportSection:
    """Return what each worker has done, for this site's own report."""
    rows = [
        (str(number), str(one.calls), f"{one.seconds:.1f}", human_bytes(one.bytes_to), human_bytes(one.bytes_from))
        for number, one in enumerate(work)
    ]
    return ReportSection("Workers", columns=("worker", "calls", "seconds", "to it", "from it"), rows=tuple(rows))


def not_used(policy: SitePolicy, data_sets: Iterable[str | None]) -> tuple[str, ...]:
    """Return, for this site's log and report, that a job leaves a cluster aside which the policy names for its rows."""
    named = {name for name in data_sets if name is not None and policy.cluster_for(name) is not None}
    return tuple(
        f"The cluster that the policy names for data set {name!r} was not used: jobs of this kind run in the site's "
        "own process."
        for name in sorted(named)
    )


def in_own_process(policy: SitePolicy, data_set: str, what: str) -> tuple[str, ...]:
    """Return, for this site's report, that a training leaves a cluster aside. Args: what: has to; "" if nothing."""
    if not what or policy.cluster_for(data_set) is None:
        return ()
    named = f"The cluster that the policy names for data set {data_set!r} was not used"
    return (f"{named}: {what} runs in the site's own process.",)


def refuse_cluster(policy: SitePolicy, data_sets: Iterable[str | None]) -> None:
    """Refuse a job that cannot run on the cluster which the policy names for its rows: they may not fit one process.

    Raises:
        PolicyRefusal: the policy names one for a data set of the job.
    """
    for name in data_sets:
        if name is not None and policy.cluster_for(name) is not None:
            raise PolicyRefusal(
                f"the policy of {policy.site} names a cluster for data set {name!r}, and jobs of this kind do not run "
                "on one. Policy keys: cluster, data_sets.<name>.cluster. Remedy: name the cluster only at data sets "
                "of jobs that can use it (vertical, horizontal, private trees), or leave it out."
            )
