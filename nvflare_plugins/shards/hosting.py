"""Where the shards of a data set are, as the site's policy says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvflare_plugins.cluster.dask_workers import open_workers
from nvflare_plugins.cluster.workers import Workers
from nvflare_plugins.site.policy.policy import SitePolicy


def shards_of(policy: SitePolicy, data_set: str) -> int:
    """Return into how many shards a training cuts the rows of a data set; 1 without a cluster."""
    cluster = policy.cluster_for(data_set)
    return 1 if cluster is None else cluster.workers


@contextmanager
def workers_of(policy: SitePolicy, data_set: str) -> Iterator[Workers | None]:
    """Open the workers that a policy names for a data set; None where its rows stay in this process.

    Raises:
        ConfigurationError: they are not usable, see ``open_workers``.
    """
    cluster = policy.cluster_for(data_set)
    if cluster is None:
        yield None
        return
    with open_workers(cluster) as workers:
        yield workers
