"""Where the shards of a data set are, as the site's policy says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from he_processors.errors import ConfigurationError
from nvflare_plugins.cluster.dask_workers import open_workers
from nvflare_plugins.cluster.workers import Workers
from nvflare_plugins.data_sets.declaration import EXTERNAL, DataSet
from nvflare_plugins.site.policy.policy import SitePolicy


def shards_of(policy: SitePolicy, data_set: str) -> int:
    """Return into how many shards a training cuts the rows of a data set; 1 without a cluster."""
    cluster = policy.cluster_for(data_set)
    return 1 if cluster is None else cluster.workers


def check_one_cluster(policy: SitePolicy, data_set: str, eval_set: str | None) -> None:
    """Refuse to give evaluation rows to workers that the policy does not name for them.

    Raises:
        ConfigurationError: both sets name a cluster, and not the same.
    """
    ours, theirs = policy.cluster_for(data_set), None if eval_set is None else policy.cluster_for(eval_set)
    if ours is not None and theirs is not None and ours.scheduler != theirs.scheduler:
        raise ConfigurationError(
            f"the workers that train on data set {data_set!r} hold the evaluation rows too, and the policy names "
            f"another cluster for data set {eval_set!r}. Policy keys: data_sets.{eval_set}.cluster, "
            f"data_sets.{data_set}.cluster. Remedy: name the same in both, or evaluate on another data set."
        )


def reads_in_passes(policy: SitePolicy, data_set: str, specs: Iterable[DataSet]) -> bool:
    """Tell whether the site's process may do without holding rows: it trains alone, or has workers that read.

    Args:
        data_set: on whose cluster the job trains.
        specs: all that it reads.

    Raises:
        ConfigurationError: the policy wants rows read in passes which nobody would read, or bins in files at workers.
    """
    cluster = policy.cluster_for(data_set)
    if cluster is None:
        return True
    for spec in specs:
        if spec.in_passes and not cluster.workers_read:
            raise ConfigurationError(
                f"data set {spec.name!r} is read in passes, and workers of a cluster are given rows that the site's "
                f"process holds. Policy keys: cluster.workers_read, data_sets.{spec.name}.memory. Remedy: have workers "
                'read the files themselves (true), where they reach them, or let the process hold all rows ("whole").'
            )
        if spec.memory == EXTERNAL:
            raise ConfigurationError(
                f"data set {spec.name!r} keeps bins in files, and workers of a cluster hold theirs. "
                f'Policy key: data_sets.{spec.name}.memory. Remedy: say that they may ("passes").'
            )
    return cluster.workers_read


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
