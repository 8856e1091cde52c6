"""Sites whose rows are in shards over real Dask workers: the bytes of threads, and named losses without a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.pooled import shards
from nvflare_plugins.pooled.job import HorizontalJob
from tests.support.federation import Federation, succeed
from tests.support.horizontal_jobs import LOGISTIC, table
from tests.support.local_cluster import LocalDask, local_cluster, stall, worker_of
from tests.support.private_federation import DATA, PrivateFederation, job_of
from tests.support.shards import in_shards

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.slow


def federation_of(folder: Path, cluster: LocalDask | None = None, workers: int = 2, **of_cluster: object) -> Federation:
    folder.mkdir()
    federation = Federation(folder)
    federation.give_data("train", table(600))
    federation.set_registry_keys()
    if cluster is not None:
        federation.set_policy("site-2", cluster={"scheduler": cluster.address, "workers": workers, **of_cluster})
    return federation


def job(num_rounds: int = 3, **fields: object) -> HorizontalJob:
    params = {**LOGISTIC, "eval_metric": ["logloss"], "subsample": 0.7}
    return HorizontalJob("train", "y", params, num_rounds, profile="masks", evaluate_training=True, **fields)


def after_round(number: int, act: Callable[[], None]):
    """Return a hook that acts once site-2 has finished a round, while its workers go on with the next."""

    def on_progress(site: str):
        def progress(record, total):
            if site == "site-2" and record.round == number:
                act()

        return progress

    return on_progress


def test_horizontal_on_workers_gives_the_bytes_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = federation_of(tmp_path / "threads")
    with monkeypatch.context() as patch:
        in_shards(patch, {"site-2": 2})
        succeed(threads.run(job()))
    with local_cluster(2) as cluster:
        federation = federation_of(tmp_path / "dask", cluster)
        succeed(federation.run(job()))
        logs = "".join(path.read_text(errors="replace") for path in cluster.folder.glob("*.log"))
        left = sum(path.stat().st_size for path in cluster.folder.rglob("*") if path.is_file())
    assert federation.model() == threads.model()
    assert federation.metrics("site-2") == threads.metrics("site-2")
    assert "feature" not in logs and "Traceback" not in logs
    assert left < 10_000  # logs alone: rows of 15,000 bytes are on no disk
    evidence = b"".join(path.read_bytes() for path in (tmp_path / "dask").rglob("*.jsonl"))
    assert cluster.address.encode() not in evidence


def test_private_trees_on_workers(tmp_path: Path) -> None:
    with local_cluster(2) as cluster:
        federation = PrivateFederation(tmp_path)
        entry = {"path": f"{DATA}.parquet", "privacy": {"epsilon": 3.0, "delta": 1e-4}}
        federation.set_policy(
            "site-2", data_sets={DATA: {**entry, "cluster": {"scheduler": cluster.address, "workers": 2}}}
        )
        federation.run_private(job_of()).succeed()
    assert federation.model()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("worker", "worker 1 of this site's cluster was lost"),
        ("scheduler", "scheduler of this site's cluster|worker . of this site's cluster was lost"),
        ("stalled", "worker 0 of this site's cluster did not answer within 20 s"),
    ],
)
def test_what_is_lost_amid_the_training_is_named_and_all_sites_end(what: str, words: str, tmp_path: Path) -> None:
    with local_cluster(2) as cluster:
        acts = {
            "worker": lambda: os.kill(cluster.pids[1], signal.SIGKILL),
            "scheduler": lambda: os.kill(cluster.scheduler_pid, signal.SIGKILL),
            "stalled": lambda: stall(cluster.pids[0]),
        }
        federation = federation_of(tmp_path / "sites", cluster, deadline_s=20.0 if what == "stalled" else 60.0)
        # So long that even what Dask notices late ends it.
        outcomes = federation.run(job(2000), on_progress=after_round(1, acts[what]), notices_death=True)
    with pytest.raises(WorkerFailure, match=words):
        succeed({"site-2": outcomes["site-2"]})
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    assert not list(tmp_path.rglob("model.json"))


def test_a_job_goes_on_from_its_checkpoint_after_a_worker_was_lost(tmp_path: Path) -> None:
    with local_cluster(2) as cluster:
        whole = federation_of(tmp_path / "whole", cluster)
        succeed(whole.run(job(6)))
        federation = federation_of(tmp_path / "sites", cluster)
        kill = after_round(2, lambda: os.kill(cluster.pids[1], signal.SIGKILL))
        lost = federation.run(job(6, checkpoint_every=1), on_progress=kill, notices_death=True)
        assert isinstance(lost["site-2"], WorkerFailure)
    with local_cluster(2) as cluster:
        federation.set_policy("site-2", cluster={"scheduler": cluster.address, "workers": 2})
        succeed(federation.run(job(6, checkpoint_every=1, resume_from="job"), "again"))
    assert federation.model("again") == whole.model()


@pytest.mark.parametrize(
    ("when", "first"),
    [("while rows are handed out", (0,)), ("amid", (2, 3)), ("after the last tree", (4, None))],
)
def test_a_job_that_waits_goes_on_once_a_killed_worker_is_back(
    when: str, first: tuple[int | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel kills one that takes too much memory: Dask starts it again, and its rows are handed out anew."""
    with local_cluster(2, nanny=True) as cluster:
        whole = federation_of(tmp_path / "whole", cluster)
        succeed(whole.run(job(5)))
        federation, waiting = federation_of(tmp_path / "sites", cluster), job(5, on_lost_site="wait")

        def kill() -> None:
            os.kill(worker_of(cluster.pids[1]), signal.SIGKILL)

        with monkeypatch.context() as patch:
            hook = after_round({"amid": 2, "after the last tree": 4}.get(when, 99), kill)
            if when == "while rows are handed out":
                patch.setattr(shards, "note_rows", lambda workers, runs: kill())
            lost = federation.run(waiting, on_progress=hook, notices_death=True)
        with pytest.raises(WorkerLost, match="worker 1 of this site's cluster was lost"):
            succeed({"site-2": lost["site-2"]})
        succeed(federation.run(waiting, number=2))
    assert federation.model() == whole.model()
    rounds = federation.record("site-2").rounds
    assert (rounds[0].round if rounds else None) in first  # not from the first


def test_a_job_that_waits_goes_on_with_a_cluster_that_was_started_anew(tmp_path: Path) -> None:
    """Another scheduler at the same address, and workers at others."""
    waiting = job(5, on_lost_site="wait")
    with local_cluster(2) as cluster:
        federation, addresses = federation_of(tmp_path / "sites", cluster), {cluster.address}
        end = after_round(2, lambda: os.kill(cluster.scheduler_pid, signal.SIGKILL))
        lost = federation.run(waiting, on_progress=end, notices_death=True)
        assert isinstance(lost["site-2"], WorkerLost)
    with local_cluster(2, port=int(cluster.address.rpartition(":")[2])) as cluster:
        assert {cluster.address} == addresses
        succeed(federation.run(waiting, number=2))
        whole = federation_of(tmp_path / "whole", cluster)
        succeed(whole.run(job(5)))
    assert federation.model() == whole.model()


def test_two_jobs_at_once_share_the_workers_of_a_site(tmp_path: Path) -> None:
    with local_cluster(2) as cluster:
        both = [federation_of(tmp_path / name, cluster) for name in ("one", "two")]
        with ThreadPoolExecutor(2) as threads:
            for outcomes in threads.map(lambda one: one.run(job(20)), both):
                succeed(outcomes)
        alone = federation_of(tmp_path / "alone", cluster)
        succeed(alone.run(job(20)))
    assert both[0].model() == both[1].model() == alone.model()
