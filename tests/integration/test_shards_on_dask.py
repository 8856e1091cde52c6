"""Sites whose rows are in shards over real Dask workers: what threads give, no rows left behind, named losses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.kinds.tuning.site import run_tuning_site
from nvflare_plugins.pooled import shards
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.wire.envelope import Kind, unpack
from tests.support.federation import Federation, Parties, succeed
from tests.support.horizontal_jobs import LOGISTIC, table
from tests.support.local_cluster import LocalDask, local_cluster, stall, worker_of
from tests.support.private_federation import DATA, PrivateFederation, job_of
from tests.support.shards import in_shards
from tests.support.tunings import result_of

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.slow

POLICY = {"consents": {"tuning": 100_000}, "min_rows_per_node": 0}


def sites(folder: Path, cluster: LocalDask | None = None, **of_cluster: Any) -> Parties:
    """Three sites with the same folds wherever they are made; the second one's rows lie in a folder of files."""
    parties = Parties(folder, 3, POLICY)
    for number, site in enumerate(parties.sites):
        random = np.random.default_rng(number)
        values = random.normal(size=(900, 5)).astype(np.float32)
        frame = pd.DataFrame(values, columns=[f"secretive{i}" for i in range(5)])
        frame = frame.assign(y=(frame.sum(axis=1) + random.normal(size=900) > 0).astype(np.int64))
        parties.give(site, "train", frame)
        registry = parties.workspace(site) / "veilboost_registry" / site
        registry.mkdir(mode=0o700, parents=True)
        Memory(registry, site, None).secret("registry", bytes([number]) * 32)
    parts = parties.workspace("site-2") / "parts"
    parts.mkdir()
    frame = pd.read_parquet(parties.workspace("site-2") / "train.parquet")
    for number, part in enumerate(np.array_split(np.arange(len(frame)), 3)):
        frame.iloc[part].to_parquet(parts / f"{number}.parquet", index=False)
    memory = "passes" if of_cluster.get("workers_read") else "whole"
    parties.set_policy("site-2", data_sets={"train": {"path": "parts", "memory": memory}})
    if cluster is not None:
        parties.set_policy("site-2", cluster={"scheduler": cluster.address, "workers": 2, **of_cluster})
    return parties


def job(num_rounds: int = 3) -> TuningJob:
    return TuningJob.from_dict(
        {
            "data_set": "train",
            "label": "y",
            "params": {"objective": "binary:logistic", "max_bin": 16, "eval_metric": ["logloss", "auc"]},
            "trials": [{"max_depth": 2}, {"max_depth": 4}],
            "folds": 2,
            "num_rounds": num_rounds,
        }
    )


@pytest.mark.parametrize("reads", [False, True], ids=["handed out", "read"])
def test_a_tuning_on_workers_gives_the_scores_of_threads(
    reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = sites(tmp_path / "threads")
    with monkeypatch.context() as patch:
        in_shards(patch, {"site-2": 2})
        succeed(threads.run(run_tuning_site, job()))
    with local_cluster(2) as cluster:
        parties = sites(tmp_path / "dask", cluster, workers_read=reads)
        succeed(parties.run(run_tuning_site, job()))
        logs = "".join(path.read_text(errors="replace") for path in cluster.folder.glob("*.log"))
        left = sum(path.stat().st_size for path in cluster.folder.rglob("*") if path.is_file())
    assert result_of(parties) == result_of(threads)
    assert "secretive" not in logs and "Traceback" not in logs and left < 10_000  # rows of 18,000 bytes are on no disk


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("worker", r"worker 1 of this site's cluster was lost.* \(trial 1 of 2, fold 1 of 2\)"),
        ("scheduler", r"of this site's cluster was lost.* \(trial 1 of 2, fold 1 of 2\)"),
        ("stalled", r"worker 0 of this site's cluster did not answer within 20 s.* \(trial 1 of 2, fold 1 of 2\)"),
    ],
)
def test_what_is_lost_amid_a_trial_is_named_and_all_sites_end(what: str, words: str, tmp_path: Path) -> None:
    seen: list[bytes] = []

    def acting_once(act: Callable[[], None]) -> Callable[[bytes], bytes]:
        def tamper(frame: bytes) -> bytes:
            if unpack(frame).kind is Kind.HISTOGRAM:
                seen.append(frame)
                if len(seen) == 10:
                    act()
            return frame

        return tamper

    with local_cluster(2) as cluster:
        acts = {
            "worker": lambda: os.kill(cluster.pids[1], signal.SIGKILL),
            "scheduler": lambda: os.kill(cluster.scheduler_pid, signal.SIGKILL),
            "stalled": lambda: os.kill(cluster.pids[0], signal.SIGSTOP),
        }
        parties = sites(tmp_path, cluster, deadline_s=20.0 if what == "stalled" else 60.0)
        # So long that even what Dask notices late ends it.
        outcomes = parties.run(run_tuning_site, job(2000), tamper={"site-2": acting_once(acts[what])})
    with pytest.raises(WorkerFailure, match=words):
        succeed({"site-2": outcomes["site-2"]})
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    assert not list(tmp_path.rglob("tuning.json"))


# -- trainings ---------------------------------------------------------------------------------------------------------


def federation_of(folder: Path, cluster: LocalDask | None = None, workers: int = 2, **of_cluster: object) -> Federation:
    folder.mkdir()
    federation = Federation.of(folder, train=table(600))
    federation.set_registry_keys()
    if cluster is not None:
        federation.set_policy("site-2", cluster={"scheduler": cluster.address, "workers": workers, **of_cluster})
    return federation


def training(num_rounds: int = 3, **fields: object) -> HorizontalJob:
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
        succeed(threads.run(training()))
    with local_cluster(2) as cluster:
        federation = federation_of(tmp_path / "dask", cluster)
        succeed(federation.run(training()))
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
        outcomes = federation.run(training(2000), on_progress=after_round(1, acts[what]), notices_death=True)
    with pytest.raises(WorkerFailure, match=words):
        succeed({"site-2": outcomes["site-2"]})
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    assert not list(tmp_path.rglob("model.json"))


def test_a_job_goes_on_from_its_checkpoint_after_a_worker_was_lost(tmp_path: Path) -> None:
    with local_cluster(2) as cluster:
        whole = federation_of(tmp_path / "whole", cluster)
        succeed(whole.run(training(6)))
        federation = federation_of(tmp_path / "sites", cluster)
        kill = after_round(2, lambda: os.kill(cluster.pids[1], signal.SIGKILL))
        lost = federation.run(training(6, checkpoint_every=1), on_progress=kill, notices_death=True)
        assert isinstance(lost["site-2"], WorkerFailure)
    with local_cluster(2) as cluster:
        federation.set_policy("site-2", cluster={"scheduler": cluster.address, "workers": 2})
        succeed(federation.run(training(6, checkpoint_every=1, resume_from="job"), "again"))
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
        succeed(whole.run(training(5)))
        federation, waiting = federation_of(tmp_path / "sites", cluster), training(5, on_lost_site="wait")

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
    waiting = training(5, on_lost_site="wait")
    with local_cluster(2) as cluster:
        federation, addresses = federation_of(tmp_path / "sites", cluster), {cluster.address}
        end = after_round(2, lambda: os.kill(cluster.scheduler_pid, signal.SIGKILL))
        lost = federation.run(waiting, on_progress=end, notices_death=True)
        assert isinstance(lost["site-2"], WorkerLost)
    with local_cluster(2, port=int(cluster.address.rpartition(":")[2])) as cluster:
        assert {cluster.address} == addresses
        succeed(federation.run(waiting, number=2))
        whole = federation_of(tmp_path / "whole", cluster)
        succeed(whole.run(training(5)))
    assert federation.model() == whole.model()


def test_two_jobs_at_once_share_the_workers_of_a_site(tmp_path: Path) -> None:
    with local_cluster(2) as cluster:
        both = [federation_of(tmp_path / name, cluster) for name in ("one", "two")]
        with ThreadPoolExecutor(2) as threads:
            for outcomes in threads.map(lambda one: one.run(training(20)), both):
                succeed(outcomes)
        alone = federation_of(tmp_path / "alone", cluster)
        succeed(alone.run(training(20)))
    assert both[0].model() == both[1].model() == alone.model()
