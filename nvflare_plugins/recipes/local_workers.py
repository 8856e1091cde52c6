"""A Dask cluster on this machine for one of the sites of a script's simulated federation."""

from __future__ import annotations

import atexit
import json
import logging
import stat
import sys
from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.site.policy_values import POLICY_FILE


def put_on_cluster(workspace: Path, site: str, n_workers: int) -> None:
    """Start a Dask cluster on this machine's loopback until this process ends, and name it in one site's policy.

    The policy is then what it was before: the next run would wait for a scheduler that has gone.

    Raises:
        ConfigurationError: Dask is not installed, or the workspace has no policy.
    """
    if n_workers < 1:
        raise ConfigurationError("--workers must be at least 1")
    path = workspace / POLICY_FILE
    if not path.is_file():
        raise ConfigurationError(f"{workspace} has no policy: run `veilboost site-setup` on it first")
    before, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    try:
        import dask
        from distributed import LocalCluster
    except ImportError:
        raise ConfigurationError("--workers needs Dask: pip install 'veilboost[cluster]'") from None
    # What jobs/CLUSTER.md asks of every worker: one thread, and nothing that Dask writes to a disk.
    dask.config.set({"distributed.worker.memory.target": False, "distributed.worker.memory.spill": False})
    cluster = LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=logging.CRITICAL,  # of workers that end with this process
    )
    atexit.register(cluster.close)
    atexit.register(write_atomically, path, before, mode)
    # The simulator gives all sites one policy.
    named = {"scheduler": cluster.scheduler_address, "workers": n_workers, "sites": [site]}
    policy = {**json.loads(before), "cluster": named}
    write_atomically(path, json.dumps(policy, indent=2).encode(), 0o600)
    sys.stdout.write(f"{site} has {n_workers} workers behind {cluster.scheduler_address}\n")
