"""Whether a job could use the clusters that a site's policy names, asked without a job."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from he_processors.errors import ConfigurationError
from nvflare_plugins.cluster.dask_workers import open_workers
from nvflare_plugins.cluster.reach import load_certificates
from nvflare_plugins.failures import WorkerFailure
from nvflare_plugins.site.policy.policy import SitePolicy

_SOON = timedelta(days=30)


def cluster_gaps(policy: SitePolicy) -> Iterator[str]:
    """Yield why a job could not use a cluster, one clause for each, or soon could not.

    Connects to each as a job does: its workers are looked at, and get a few bytes, and no row.
    """
    clusters = (policy.cluster, *(data_set.cluster for data_set in policy.data_sets.values()))
    for cluster in dict.fromkeys(one for one in clusters if one is not None):
        try:
            with open_workers(cluster):
                end = None if cluster.security is None else load_certificates(cluster.security)[1]
        except (ConfigurationError, WorkerFailure) as error:
            yield str(error)
            continue
        if end is not None and end - datetime.now(UTC) < _SOON:
            yield f"this site's certificate towards its cluster ends on {end:%Y-%m-%d}: have a new one signed"
