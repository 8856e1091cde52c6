"""What a kind of job makes of the cluster that a policy names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from nvflare_plugins.cluster.workers import Work
from nvflare_plugins.formatting import counted, human_bytes
from nvflare_plugins.report.run_record import ReportSection
from nvflare_plugins.site.policy.policy import SitePolicy


class OnCluster(Enum):
    """USED: the site's part runs on it. NOT_NEEDED: it runs in the site's process, and the report says so."""

    USED = "used"
    NOT_NEEDED = "not needed"


def shards_line(n_rows: int, n_workers: int) -> str:
    """Return, for this site's own log, how its rows are divided."""
    return f"{counted(n_workers, 'worker')} of this site's cluster, each with {n_rows // n_workers:,} rows or one more"


def work_section(work: Sequence[Work]) -> ReportSection:
    """Return what each worker has done, for this site's own report."""
    longest = max((one.seconds for one in work), default=0.0)
    rows = [
        (
            str(number),
            "; ".join(f"{n:,} {done}" for done, n in one.rows.items()),
            str(one.calls),
            f"{one.seconds:.1f}",
            f"{100 * one.seconds / longest:.0f} %" if longest else "",
            human_bytes(one.bytes_to),
            human_bytes(one.bytes_from),
            human_bytes(one.bytes_to_others) if one.bytes_to_others else "",
        )
        for number, one in enumerate(work)
    ]
    columns = ("worker", "rows", "calls", "seconds busy", "of the slowest", "to it", "from it", "to others")
    return ReportSection("Workers", columns=columns, rows=tuple(rows))


def not_used(policy: SitePolicy, data_sets: Iterable[str | None]) -> tuple[str, ...]:
    """Return, for this site's log and report, that a job leaves a cluster aside which the policy names for its rows."""
    named = {name for name in data_sets if name is not None and policy.cluster_for(name) is not None}
    return tuple(
        f"The cluster that the policy names for data set {name!r} was not used: jobs of this kind run in the site's "
        "own process."
        for name in sorted(named)
    )


def evaluated_elsewhere(policy: SitePolicy, data_set: str, eval_set: str | None) -> tuple[str, ...]:
    """Return, for this site's report, that a cluster is left aside which the policy names for evaluation rows alone."""
    theirs = None if eval_set is None else policy.cluster_for(eval_set)
    ours = policy.cluster_for(data_set)
    if theirs is None or (ours is not None and ours.scheduler == theirs.scheduler):
        return ()
    return (
        f"The cluster that the policy names for data set {eval_set!r} was not used: a training has that of the rows on "
        f"which it trains, data set {data_set!r}.",
    )


def in_own_process(policy: SitePolicy, data_set: str, what: str) -> tuple[str, ...]:
    """Return, for this site's report, that a training leaves a cluster aside. Args: what: has to; "" if nothing."""
    if not what or policy.cluster_for(data_set) is None:
        return ()
    named = f"The cluster that the policy names for data set {data_set!r} was not used"
    return (f"{named}: {what} runs in the site's own process.",)
