"""One site's part in an alignment job, from its policy to the file with its positions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from he_processors.errors import ConfigurationError
from nvflare_plugins.alignment.align import align
from nvflare_plugins.alignment.blind_shard import LEAST_IDS
from nvflare_plugins.alignment.job import AlignmentJob
from nvflare_plugins.alignment.result import Alignment, save_alignments
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.cluster.dask_workers import open_workers
from nvflare_plugins.cluster.use import OnCluster, in_own_process, work_section
from nvflare_plugins.cluster.workers import Workers
from nvflare_plugins.data_sets.row_ids import load_ids
from nvflare_plugins.report.data_facts import ALIGNMENT, DataFacts
from nvflare_plugins.report.run_record import ReportSection
from nvflare_plugins.site.policy.policy import SitePolicy

_PROTECTION = {"ids": "ECDH on ristretto255, commutative blinding", "false_positives": "none but collisions of SHA-256"}
_TITLE = "Private alignment of rows"
_NOTE = (
    "Rows were aligned by private set intersection. All parties know the sizes of all sets and which of their own ids "
    "are common to all; the file with this site's positions holds no ids."
)


def _prepare(job: AlignmentJob, context: SiteContext) -> dict[str, list[bytes]]:
    """Return the ids of each data set. Raises: ConfigurationError, PolicyRefusal."""
    if len(context.sites) < 2:
        raise ConfigurationError("an alignment needs at least two sites")
    return {name: load_ids(context.policy.data_set(name)) for name in job.data_sets}


def _align(attempt: SiteAttempt, ids: dict[str, list[bytes]]) -> JobResult:
    context = attempt.context
    channel, session, policy = attempt.channel, attempt.session, context.policy
    for name in _small(ids):
        attempt.notes += in_own_process(policy, name, f"aligning fewer than {LEAST_IDS:,} ids")
    with workers_of(policy, ids) as workers, ExitStack() as told:  # before anything is reserved or leaves
        of_clusters = list({id(one): one for one in workers.values()}.values())
        for one in of_clusters:
            attempt.progress = told.enter_context(watched(one, attempt.progress))
        say = attempt.progress.say
        with align(channel, session, ids, policy, say, attempt.evidence, standing=True, workers=workers) as found:
            keyed = attempt.conclude(b"".join(found[name].proof for name in sorted(found)))
            results = list(found.values())
            path = save_alignments(attempt.folder.path, context.job_id, context.site, context.sites, results)
        at_workers = [work_section(one.work) for one in of_clusters]
    attempt.all_have_written()
    attempt.write_record(_TITLE, {}, None, (_section(results), *at_workers), data=_data(attempt, ids))
    return JobResult(keyed.hex(), f"the positions of the common rows are in {path}", {"data_sets": sorted(found)})


def _small(ids: Mapping[str, Collection[bytes]]) -> list[str]:
    return sorted(name for name, of_set in ids.items() if len(of_set) < LEAST_IDS)


@contextmanager
def workers_of(policy: SitePolicy, ids: Mapping[str, Collection[bytes]]) -> Iterator[dict[str, Workers]]:
    """Open the clusters that the policy names for large data sets, each once."""
    found: dict[str, Workers] = {}
    with ExitStack() as open_until_then:
        for name in sorted(set(ids) - set(_small(ids))):
            cluster = policy.cluster_for(name)
            same = [workers for other, workers in found.items() if policy.cluster_for(other) == cluster]
            if cluster is not None:
                found[name] = same[0] if same else open_until_then.enter_context(open_workers(cluster))
        yield found


def _data(attempt: SiteAttempt, ids: dict[str, list[bytes]]) -> tuple[DataFacts, ...]:
    specs = attempt.context.policy.data_sets
    return tuple(DataFacts(name, ALIGNMENT, len(ids[name]), (str(specs[name].id),)) for name in ids)


def _section(found: list[Alignment]) -> ReportSection:
    """Return what the report, which stays at this site, says of the result."""
    rows = tuple((a.data_set, f"{a.n_rows:,}", f"{a.n_common:,}") for a in found)
    return ReportSection("Aligned rows", (_NOTE,), ("data set", "rows here", "rows at all parties"), rows)


align_site = SitePart(
    _prepare, _align, lambda job: job.data_sets, lambda job, ids: _PROTECTION, on_cluster=OnCluster.USED
)
"""Takes part in one attempt of an alignment job.

Privacy: the server learns whether the job succeeded, and see ``intersection.py``; neither sizes nor ids are in the
    result or in what the site says.
"""
