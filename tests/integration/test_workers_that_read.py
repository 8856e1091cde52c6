"""Workers that read the Parquet files of a data set themselves: the models of rows handed out, and no other rows."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.kinds.private_trees.job import PrivateTreesJob
from nvflare_plugins.pooled import growing as grown_training
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.shards import ShardedRows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.workers.shards import comparing, reads_in_passes
from nvflare_plugins.workers.workers import Workers
from tests.support.federation import Federation, succeed
from tests.support.local_cluster import local_cluster
from tests.support.private_federation import DATA, PrivateFederation, frame_of, job_of
from tests.support.shards import OtherMount, in_shards
from tests.support.workers_here import workers_here

COLORS = ["rot", "grün", "blau"]
CLUSTER = {"scheduler": "tcp://127.0.0.1:8786", "workers": 2}
LOGISTIC = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 16}
# So that a file with another value inside has the same length and footer.
BARE = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 50}


def rows_of(n_rows: int = 600, seed: int = 7) -> pd.DataFrame:
    """Numbers with gaps, dates as text, categories, weights, and labels of which some are missing."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({f"x{i}": rng.normal(size=n_rows) for i in range(3)})
    frame["größe"] = rng.choice(COLORS, n_rows)
    frame["seit"] = [f"{1 + day}.01.2020" for day in rng.integers(0, 28, n_rows)]
    frame["w"] = rng.gamma(2, size=n_rows)
    frame["y"] = (frame.x0 + (frame["größe"] == "rot") + rng.normal(size=n_rows) > 0.5).astype(np.float64)
    for column, every in (("x0", 7), ("größe", 11), ("seit", 13), ("y", 17)):
        frame.loc[::every, column] = None
    return frame


def write_parts(folder: Path, frame: pd.DataFrame, n_parts: int = 3) -> None:
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(frame)), n_parts)):
        frame.iloc[part].to_parquet(folder / f"{number}-März.parquet", index=False, **BARE)


def federation_of(folder: Path, memory: str | None = None) -> Federation:
    """Three sites, the first one's rows in folders. Args: memory: "whole" has its process hand them out."""
    folder.mkdir()
    made = Federation(folder)
    for site, seed in zip(made.sites, (1, 2, 3), strict=True):
        (made.workspace(site) / "local").mkdir(parents=True)
        sets: dict[str, Any] = {}
        for name, frame in (("rows", rows_of(seed=seed)), ("held_out", rows_of(40, seed + 9))):
            if site == "site-1":
                write_parts(made.workspace(site) / name, frame)
                sets[name] = {"path": name, "memory": memory}
            else:
                frame.to_parquet(made.workspace(site) / f"{name}.parquet", index=False)
                sets[name] = {"path": f"{name}.parquet"}
            sets[name] |= {"drop_unlabelled": True, "dates": {"seit": "D.MM.YYYY"}}
        made.set_policy(site, data_sets=sets)
    made.set_registry_keys()
    return made


def job(**changes: object) -> HorizontalJob:
    params = {**LOGISTIC, "subsample": 0.7, "eval_metric": ["logloss", "auc"]}
    fields = {
        "data_set": "rows",
        "label": "y",
        "categories": {"größe": COLORS},
        "params": params,
        "num_rounds": 2,
        "profile": "masks",
        "eval_data_set": "held_out",
        "evaluate_training": True,
    }
    return HorizontalJob.from_dict({**fields, **changes})


def second_elsewhere(n_workers: int) -> Workers:
    here = workers_here(n_workers)
    here._links[1] = OtherMount("rows")  # type: ignore[index]
    return here


def failure_at_site_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Federation], None] = lambda made: None
) -> VeilBoostError:
    """Train on two workers of site-1, of which the second may see other files; return what ended it there."""
    made = federation_of(folder)
    shutil.copytree(made.workspace("site-1") / "rows", made.workspace("site-1") / "other")
    prepare(made)
    in_shards(monkeypatch, {"site-1": 2}, second_elsewhere)
    found = made.run(job())["site-1"]
    assert isinstance(found, VeilBoostError) and not list(folder.rglob("model.json"))
    return found


@pytest.mark.parametrize(
    ("n_workers", "changes"),
    [
        (2, {}),
        pytest.param(1, {"weight": "w"}, marks=pytest.mark.slow),
        pytest.param(3, {"weight": "w"}, marks=pytest.mark.slow),
        pytest.param(2, {"params": {**LOGISTIC, "objective": "reg:absoluteerror"}}, marks=pytest.mark.slow),
        pytest.param(50, {}, marks=pytest.mark.slow),  # some without a row to evaluate, all with few of a file
    ],
)
def test_models_and_metrics_are_those_of_rows_that_are_handed_out(
    n_workers: int, changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    in_shards(monkeypatch, {"site-1": n_workers, "site-2": 2})
    for name, memory in (("given", "whole"), ("read", None)):
        made = federation_of(tmp_path / name, memory)
        succeed(made.run(job(**changes)))
        found[name] = made.model(), made.cuts().to_lists(), made.metrics("site-1")
    assert found["given"] == found["read"]


def private_federation(folder: Path, name: str = "parts") -> PrivateFederation:
    """Three sites, of which the first has its rows in a folder, or in one file."""
    frame = frame_of(missing=True)
    frame["label"] = frame.label.where(np.arange(len(frame)) % 50 != 0)  # rows that are left out
    frame.loc[3, "x1"] = 1e40  # and a value that is clipped
    made = PrivateFederation(folder, frame)
    write_parts(made.workspace("site-1") / "rows", pd.read_parquet(made.workspace("site-1") / f"{DATA}.parquet"))
    path = "rows" if name == "parts" else f"{DATA}.parquet"
    made.set_policy("site-1", data_sets={DATA: {"path": path, "privacy": {"epsilon": 3.0, "delta": 1e-4}}})
    return made


def private_job(components: dict[str, Any] | None = None, **changes: Any) -> PrivateTreesJob:
    given = {"n_trees": 3, **(components or {})}
    return job_of(trust="trusted_aggregator", structure_seed=5, components=given, **changes)


def no_noise(sums: Any, *_: Any) -> Release:
    return Release(np.asarray(sums), GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW))


@pytest.mark.parametrize(
    "changes", [{"method": "dp_tr_newton_ih"}, pytest.param({"method": "dp_gbm"}, marks=pytest.mark.slow)]
)
def test_private_models_are_those_of_rows_that_are_handed_out(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = set()
    for name, n_workers in (("file", 1), ("parts", 1), ("parts", 3)):
        made = private_federation(tmp_path / f"{name}{n_workers}", name)
        with monkeypatch.context() as patch:
            in_shards(patch, {"site-1": n_workers})
            made.run_private(private_job(**changes), server_noise=no_noise).succeed()
        models.add(made.model())
    assert len(models) == 1


def test_a_private_jobs_worker_without_the_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = private_federation(tmp_path)
    in_shards(monkeypatch, {"site-1": 2}, second_elsewhere)
    failure = made.run_private(private_job()).error("site-1")
    assert isinstance(failure, WorkerFailure) and "worker 1 of this site's cluster: file 2 by name" in str(failure)


def test_files_whose_names_are_no_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = federation_of(tmp_path / "sites")
    folder = os.fsencode(made.workspace("site-1") / "rows")
    os.rename(os.path.join(folder, "1-März.parquet".encode()), os.path.join(folder, b"1-M\xe4rz.parquet"))
    in_shards(monkeypatch, {"site-1": 2})
    succeed(made.run(job()))


def test_a_worker_without_the_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_at_site_1(
        tmp_path / "sites", monkeypatch, lambda made: shutil.rmtree(made.workspace("site-1") / "other")
    )
    assert isinstance(failure, WorkerFailure)
    assert "worker 1 of this site's cluster: file 2 by name of data set 'rows' cannot be read" in str(failure)
    assert "cluster.workers_read" in str(failure) and "März" not in str(failure)


def test_a_worker_with_another_version_of_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(made: Federation) -> None:
        rows_of(200, 99).to_parquet(made.workspace("site-1") / "other" / "2-März.parquet", index=False, **BARE)

    failure = failure_at_site_1(tmp_path / "sites", monkeypatch, older)
    assert "worker 1 of this site's cluster: file 3 by name of data set 'rows' is another file" in str(failure)


def test_a_worker_that_reads_other_values_under_the_same_footer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(made: Federation) -> None:
        path = made.workspace("site-1") / "rows" / "2-März.parquet"
        other = made.workspace("site-1") / "other" / "2-März.parquet"
        frame = pd.read_parquet(path)
        frame.loc[150, "x1"] += 1.0
        frame.to_parquet(other, index=False, **BARE)
        ends = [one.read_bytes()[-1000:] for one in (path, other)]
        assert ends[0] == ends[1] and path.read_bytes() != other.read_bytes()

    failure = failure_at_site_1(tmp_path / "sites", monkeypatch, changed)
    assert "worker 1 of this site's cluster reads other rows than the site's own process" in str(failure)


@pytest.mark.parametrize(
    ("where", "who", "words"),
    [
        ((ShardedRows, "of_shards"), ConfigurationError, "has changed, gone or come"),
        ((grown_training, "row_set"), (WorkerFailure, ConfigurationError), "a file has changed"),
    ],
    ids=["before", "amid"],
)
def test_a_file_that_is_replaced_before_bins_are_made_ends_the_job(
    where: tuple[Any, str], who: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation_of(tmp_path / "sites")
    replaced = made.workspace("site-1") / "rows" / "1-März.parquet"
    original = getattr(*where)

    def replace(*args: Any) -> Any:
        if replaced.stat().st_mtime_ns != 1:
            shutil.copy(replaced, tmp_path / "new")
            os.utime(tmp_path / "new", ns=(1, 1))
            os.replace(tmp_path / "new", replaced)
        return original(*args)

    monkeypatch.setattr(*where, replace)
    in_shards(monkeypatch, {"site-1": 2})
    with pytest.raises(who, match=words):
        succeed({"site-1": made.run(job())["site-1"]})


def test_the_sites_own_pass_ends_with_the_training() -> None:
    ended = threading.Event()

    def digests(go_on: Callable[[], None]) -> list[bytes]:
        try:
            while True:
                go_on()
        finally:
            ended.set()

    with pytest.raises(WorkerLost), comparing(lambda *_: [], digests):
        raise WorkerLost("a worker, amid the pass")
    assert ended.wait(60)


def test_who_reads_is_the_policys_matter(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    sets = {"parts": {"path": "parts", "format": "parquet"}, "one": {"path": "one.parquet"}}
    paged = {"paged": {"path": "paged.parquet", "memory": "external"}}

    def takes_passes(**cluster: object) -> bool:
        document = {"data_sets": sets | paged, **({"cluster": CLUSTER | cluster} if cluster else {})}
        policy = SitePolicy.from_dict(document, workspace=tmp_path, site="one")
        return reads_in_passes(policy, "parts", [policy.data_set("parts"), policy.data_set("one")])

    assert takes_passes() and takes_passes(workers_read=True)
    with pytest.raises(ConfigurationError, match=r"'parts' is read in passes.*cluster\.workers_read"):
        takes_passes(workers_read=False)
    policy = SitePolicy.from_dict(
        {"data_sets": paged, "cluster": {**CLUSTER, "workers_read": True}}, workspace=tmp_path, site="one"
    )
    with pytest.raises(ConfigurationError, match="'paged' keeps bins in files"):
        reads_in_passes(policy, "paged", [policy.data_set("paged")])


@pytest.mark.slow
def test_workers_of_dask_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    given = federation_of(tmp_path / "given", "whole")
    with monkeypatch.context() as patch:
        in_shards(patch, {"site-1": 2})
        succeed(given.run(job()))
    with local_cluster(2) as cluster:
        read = federation_of(tmp_path / "read")
        read.set_policy("site-1", cluster={"scheduler": cluster.address, "workers": 2, "workers_read": True})
        succeed(read.run(job()))
    assert read.model() == given.model()
    workers = [section for section in read.record("site-1").sections if section.title == "Workers"]
    assert len(workers[0].rows) == 2


@pytest.mark.slow
def test_private_workers_of_dask_read(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    held = private_federation(tmp_path / "held", "file")
    held.run_private(private_job(), server_noise=no_noise).succeed()
    with local_cluster(2) as cluster:
        read = private_federation(tmp_path / "read")
        read.set_policy("site-1", cluster={"scheduler": cluster.address, "workers": 2, "workers_read": True})
        read.run_private(private_job(), server_noise=no_noise).succeed()
    assert read.model() == held.model()
