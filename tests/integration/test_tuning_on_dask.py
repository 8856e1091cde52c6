"""A tuning over real Dask workers: the scores of threads, no rows left behind, named losses without a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.kinds.tuning.site import run_tuning_site
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.wire.envelope import Kind, unpack
from tests.support.federation import Parties, succeed
from tests.support.local_cluster import LocalDask, local_cluster
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
