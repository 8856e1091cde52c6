"""The POC: a site has a Dask cluster, one of its workers is killed, and the job goes on by itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from poc_workspace.run_poc import Poc
from tests.poc.test_lost_sites import ROUNDS, attempts, check_result, job_of, submitted
from tests.poc.test_poc import rounds_done, site_log, wait_until
from tests.support.local_cluster import local_cluster, worker_of

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
pytestmark = [pytest.mark.poc, pytest.mark.slow]


def test_a_job_goes_on_by_itself_after_a_worker_of_a_sites_cluster_was_killed(tmp_path: Path) -> None:
    with local_cluster(2, nanny=True) as cluster, Poc(tmp_path / "poc") as poc:
        path = poc.kits / "site-2" / "local" / "veilboost.json"
        policy = {**json.loads(path.read_text()), "cluster": {"scheduler": cluster.address, "workers": 2}}
        path.write_text(json.dumps(policy))
        outcome: dict = {}
        thread = submitted(poc, outcome)
        job_id = job_of(poc, set())
        wait_until(lambda: rounds_done(poc, "site-2", job_id) >= 10, 120)
        os.kill(worker_of(cluster.pids[1]), signal.SIGKILL)
        wait_until(lambda: attempts(poc, "site-2", job_id) == 2, 120)
        thread.join(400)
        check_result(poc, outcome, 2)
        log = site_log(poc, "site-2", job_id)
        assert "worker 1 of this site's cluster was lost" in log
        assert log.count("worker 1 of 2 is tcp://127.0.0.1:") == 2
        assert f"round {ROUNDS} of {ROUNDS}" in log and "workers in rounds" in log and "the slowest is" in log
        assert "workers in rounds" not in site_log(poc, "site-1", job_id)
