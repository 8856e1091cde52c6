"""Whole vertical jobs with parties on real Dask workers: the same model, no private value in what Dask writes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import WorkerLost
from nvflare_plugins.kinds.alignment import intersection as blinding
from nvflare_plugins.kinds.vertical import histogram_maker
from tests.integration.test_vertical_jobs import nothing_written, overlapping, same
from tests.support.federation import succeed
from tests.support.local_cluster import local_cluster, make_tls_files, worker_of
from tests.support.threads import wait_until
from tests.support.vertical_jobs import central, federation, job, merged, run, table

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.slow
TRAIN = table(390).iloc[:300]


def on(found, site: str, address: str, n_workers: int, **more: object) -> None:
    cluster = {"scheduler": address, "workers": n_workers, "deadline_s": 20, **more}
    found.set_policy(site, cluster=cluster, allowed_profiles=["plain", "paillier"], min_key_bits=2048)


def written_by(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_over_tls_the_model_is_the_same_and_nothing_private_is_written(tmp_path) -> None:
    files = make_tls_files(tmp_path / "tls")
    options = ("--tls-ca-file", files["ca"], "--tls-cert", files["cert"], "--tls-key", files["key"])
    parties = federation(tmp_path)
    parties.set_policy("site-3", min_key_bits=2048)
    with local_cluster(2, protocol="tls", options=options) as cluster:
        for site in ("site-1", "site-2"):
            on(parties, site, cluster.address, 2 if site == "site-2" else 1, security=files)
        succeed(run(parties, job(profile="paillier", key_bits=2048, num_rounds=1)))
        seen = written_by(cluster.folder)
    assert same(merged(parties), central(TRAIN, 1))
    values = TRAIN.drop(columns="y").to_numpy().ravel()
    planted = [repr(float(v)).encode() for v in values[np.isfinite(values)][:500]]
    planted += [np.float32(v).tobytes() * 2 for v in values[:50]]
    assert b"Start worker at" in seen, "the control: what the workers wrote was looked at"
    assert not [one for one in planted if one in seen]
    assert b"SumShard" not in seen and b"encrypt" not in seen.lower()


def test_a_client_without_the_certificates_gets_no_worker(tmp_path) -> None:
    from distributed import Client

    files = make_tls_files(tmp_path / "tls")
    options = ("--tls-ca-file", files["ca"], "--tls-cert", files["cert"], "--tls-key", files["key"])
    other = make_tls_files(tmp_path / "other")
    parties = federation(tmp_path)
    with local_cluster(1, protocol="tls", options=options) as cluster:
        on(parties, "site-2", cluster.address, 1, security=other)
        outcomes = run(parties, job())
        assert "scheduler that the policy names cannot be reached" in str(outcomes["site-2"])
        with pytest.raises((OSError, TypeError, ValueError, RuntimeError)):
            Client(cluster.address, timeout=5)
    assert nothing_written(parties)


def test_a_worker_killed_while_the_job_runs_ends_it_and_it_resumes_without(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(histogram_maker, "GRADIENT_BLOCK_ROWS", 1 << 13)
    parties = federation(tmp_path)
    training = {"num_rounds": 120, "checkpoint_every": 1}
    with local_cluster(2) as cluster:
        on(parties, "site-2", cluster.address, 2)

        def kill_after_a_checkpoint() -> None:
            wait_until(lambda: list(parties.run_folder("site-2").rglob("*checkpoint*")))
            os.kill(cluster.pids[1], signal.SIGKILL)

        killer = threading.Thread(target=kill_after_a_checkpoint)
        killer.start()
        outcomes = run(parties, job(**training))
        killer.join()
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values()), outcomes
    assert "worker 1 of this site's cluster was lost" in str(outcomes["site-2"])
    parties.set_policy("site-2", cluster=None)
    succeed(run(parties, job(num_rounds=122, checkpoint_every=0, resume_from="job"), "resumed"))
    assert same(merged(parties, "resumed"), central(TRAIN, 122))


def test_a_job_that_waits_outlives_workers_lost_in_its_alignment_and_amid_its_trees(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(blinding, "LEAST_POINTS", 0)
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.LEAST_IDS", 0)
    parties, common = overlapping(tmp_path)
    waiting = job(alignment="first", num_rounds=60, on_lost_site="wait")
    with local_cluster(2, nanny=True) as cluster:
        on(parties, "site-2", cluster.address, 2)
        whole = blinding.SpreadKey.blind

        def kill() -> None:
            os.kill(worker_of(cluster.pids[1]), signal.SIGKILL)

        def kill_then_blind(self: blinding.SpreadKey, points: list[bytes]) -> list[bytes]:
            kill()
            return whole(self, points)

        with monkeypatch.context() as patch:
            patch.setattr(blinding.SpreadKey, "blind", kill_then_blind)
            assert isinstance(run(parties, waiting)["site-2"], WorkerLost)

        def kill_after_a_checkpoint() -> None:
            wait_until(lambda: list(parties.run_folder("site-2").rglob("*checkpoint*")))
            kill()

        killer = threading.Thread(target=kill_after_a_checkpoint)
        killer.start()
        assert isinstance(run(parties, waiting, number=2)["site-2"], WorkerLost)
        killer.join()
        succeed(run(parties, waiting, number=3))
    assert same(merged(parties), central(common, 60))
    assert any("resuming job after" in line for line in parties.said["site-2"])
