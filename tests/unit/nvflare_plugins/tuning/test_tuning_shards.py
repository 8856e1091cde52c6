"""Tunings over shards: folds, scores and models of sites that are one process each, and faults by name."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.kinds.tuning import folds
from nvflare_plugins.kinds.tuning.folds import runs_of_chosen
from nvflare_plugins.kinds.tuning.job import TuningJob, in_trial
from nvflare_plugins.kinds.tuning.site import run_tuning_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.workers.worker_connection import PartHost
from nvflare_plugins.workers.workers import Workers, WorkerSilent
from tests.support.federation import Parties, dies_at, succeed
from tests.support.shards import OtherMount, in_shards
from tests.support.tunings import result_of
from tests.support.workers_here import workers_here

POLICY = {"consents": {"tuning": 1000}, "min_rows_per_node": 0}
GIVEN = {"objective": "binary:logistic", "max_bin": 16}
COLORS = ["rot", "grün"]


def rows(seed: int, n_rows: int = 1500) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(random.normal(size=(n_rows, 3)).astype(np.float32), columns=["a", "b", "größe"])
    amount = frame.a + frame.b * frame["größe"] + random.normal(size=n_rows)
    frame = frame.mask(random.random(frame.shape) < 0.05)
    return frame.assign(
        farbe=random.choice(COLORS, n_rows),
        y=(amount > 0.3).astype(np.int64),
        amount=amount,
        level=np.digitize(amount, [-0.5, 0.5]),
        # Those of the first half are in few groups: a shard may lack rows of a fold.
        person=np.where(np.arange(n_rows) < n_rows // 2, 0, random.integers(1, n_rows // 3, n_rows)),
        id=[f"id-{seed}-{row}" for row in range(n_rows)],
    )


def sites(folder: Path, memory: str | None = None) -> Parties:
    """Three sites, with the same folds wherever they are made.

    Args:
        memory: of the first one's rows, which then lie in a folder of files.
    """
    parties = Parties(folder, 3, POLICY)
    for number, name in enumerate(parties.sites):
        parties.give(name, "train", rows(number), id="id")
        registry = parties.workspace(name) / "veilboost_registry" / name
        registry.mkdir(mode=0o700, parents=True)
        Memory(registry, name, None).secret("registry", bytes([number]) * 32)
    if memory is not None:
        frame, parts = rows(0), parties.workspace("site-1") / "parts"
        parts.mkdir()
        for number, part in enumerate(np.array_split(np.arange(len(frame)), 3)):
            frame.iloc[part].to_parquet(parts / f"{number}-März.parquet", index=False)
        parties.set_policy("site-1", data_sets={"train": {"path": "parts", "id": "id", "memory": memory}})
    return parties


def job(**changes: Any) -> TuningJob:
    fields = {
        "data_set": "train",
        "label": "y",
        "features": ["a", "b", "größe", "farbe"],
        "categories": {"farbe": COLORS},
        "params": {**GIVEN, "eval_metric": ["logloss", "auc"]},
        "trials": [{"max_depth": 2, "eta": 0.5}, {"max_depth": 3, "colsample_bytree": 0.7}],
        "folds": 2,
        "num_rounds": 3,
        "engine": "xgboost",
        **changes,
    }
    return TuningJob.from_dict(fields)


ONE = {"trials": [{"max_depth": 2, "eta": 0.5}], "num_rounds": 2}

CASES: list[Any] = [
    ONE,
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"group": "person", "early_stopping_rounds": 1, "num_rounds": 6}, marks=pytest.mark.slow),
    pytest.param({"params": {**GIVEN, "subsample": 0.5, "eval_metric": "aucpr"}}, marks=pytest.mark.slow),
    pytest.param({"profile": "bfv"}, marks=pytest.mark.slow),
    *(
        pytest.param({"label": label, "params": {**GIVEN, "objective": objective, **more}}, marks=pytest.mark.slow)
        for objective, label, more in (
            ("reg:squarederror", "amount", {"eval_metric": ["mae", "rmse"]}),
            ("multi:softprob", "level", {"num_class": 3, "eval_metric": ["mlogloss", "auc"]}),
        )
    ),
]


@pytest.mark.parametrize("engine", ["xgboost", "own"])
@pytest.mark.parametrize("changes", CASES)
def test_scores_and_models_are_those_of_sites_in_one_process(
    changes: dict[str, Any], engine: str, models: dict[bytes, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, made = [], []
    for number, shards in enumerate(({}, {"site-1": 3, "site-2": 1})):
        models.clear()
        parties = sites(tmp_path / f"{number}")
        with monkeypatch.context() as patch:
            in_shards(patch, shards)
            succeed(parties.run(run_tuning_site, job(**changes, engine=engine)))
        found.append(result_of(parties))
        made.append(set(models))
    assert found[0] == found[1] and made[0] == made[1] and len(made[0]) == 2 * len(found[0]["trials"])


@pytest.mark.parametrize("shards", [{}, {"site-1": 3, "site-2": 2}])
def test_rows_whose_trees_the_sites_grow_are_binned_once_for_all_folds(
    shards: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    bind = folds.bin_rows
    monkeypatch.setattr(folds, "bin_rows", lambda *args: made.append(args[2]) or bind(*args))
    in_shards(monkeypatch, shards)
    succeed(sites(tmp_path).run(run_tuning_site, job(num_rounds=1, engine="own")))
    assert len(made) == (3 + 2 + 1 if shards else 3) and sum(made) == 3 * 1500


def test_workers_get_their_rows_and_make_their_bins_once_and_the_report_says_what_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    bind = folds.training_matrix
    monkeypatch.setattr(folds, "training_matrix", lambda *args: made.append(args[0].n_rows) or bind(*args))
    parties = sites(tmp_path)
    in_shards(monkeypatch, {"site-1": 3, "site-2": 2})
    succeed(parties.run(run_tuning_site, job(trials=[{"max_depth": 1}, {"max_depth": 2}], num_rounds=1)))
    assert len(made) == 2 * (3 + 2 + 1), "once for each fold, whatever the trials"
    record = RunRecord.read(parties.run_folder("site-1"))
    assert [one.title for one in record.sections][-1] == "Workers" and len(record.sections[-1].rows) == 3
    assert not any("not used" in note for note in record.notes)
    assert RunRecord.read(parties.run_folder("site-3")).sections[-1].title != "Workers"


def test_rows_that_are_drawn_are_cut_where_the_shards_are() -> None:
    chosen = np.array([1, 0, 1, 0, 0, 0, 1, 1, 1], dtype=bool)
    runs = runs_of_chosen(chosen, [slice(0, 3), slice(3, 6), slice(6, 6), slice(6, 9)])
    places = np.flatnonzero(chosen)
    assert [places[run].tolist() for run in runs] == [[0, 2], [], [], [6, 7, 8]]


# -- workers that read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["xgboost", "own"])
@pytest.mark.parametrize(
    ("n_workers", "changes"),
    [
        (2, ONE),
        pytest.param(3, {"params": {**GIVEN, "subsample": 0.5, "eval_metric": "auc"}}, marks=pytest.mark.slow),
        pytest.param(40, {"group": "person", "folds": 2}, marks=pytest.mark.slow),  # some without rows of a fold
    ],
)
def test_workers_that_read_find_what_is_handed_out(
    n_workers: int,
    changes: dict[str, Any],
    engine: str,
    models: dict[bytes, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, made = [], []
    in_shards(monkeypatch, {"site-1": n_workers})
    for memory in ("whole", "passes"):
        models.clear()
        parties = sites(tmp_path / memory, memory)
        succeed(parties.run(run_tuning_site, job(**changes, engine=engine)))
        found.append(result_of(parties))
        made.append(set(models))
    assert found[0] == found[1] and made[0] == made[1] and len(made[0]) == 2 * len(found[0]["trials"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.head(100), "worker 1 of this site's cluster: file 3 by name of data set 'train' is ano"),
        (None, "worker 1 of this site's cluster: file 2 by name of data set 'train' cannot be read"),
    ],
    ids=["another version", "none"],
)
def test_a_worker_that_sees_other_files_is_named_before_any_trial(
    change: Callable[[pd.DataFrame], pd.DataFrame] | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties = sites(tmp_path, "passes")
    other = parties.workspace("site-1") / "other"
    if change is not None:
        shutil.copytree(parties.workspace("site-1") / "parts", other)
        change(pd.read_parquet(other / "2-März.parquet")).to_parquet(other / "2-März.parquet", index=False)

    def second_elsewhere(n_workers: int) -> Workers:
        here = workers_here(n_workers)
        here._links[1] = OtherMount("parts")  # type: ignore[index]
        return here

    in_shards(monkeypatch, {"site-1": 2}, second_elsewhere)
    outcome = parties.run(run_tuning_site, job())["site-1"]
    assert isinstance(outcome, WorkerFailure) and words in str(outcome)
    assert "trial" not in str(outcome) and "März" not in str(outcome)


def test_rows_in_passes_need_workers_that_read(tmp_path: Path) -> None:
    parties = sites(tmp_path, "passes")
    parties.set_policy("site-1", cluster={"scheduler": "tcp://127.0.0.1:9", "workers": 2})
    outcome = parties.run(run_tuning_site, job())["site-1"]
    assert isinstance(outcome, ConfigurationError) and "cluster.workers_read" in str(outcome)


# -- workers that are lost --------------------------------------------------------------------------------------------


class Dies:
    """A worker that is gone at the n-th thing that it is asked in the work over its shard."""

    def __init__(self, number: int, method: str) -> None:
        self._host, self._left, self._method = PartHost(), number, method

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        self._left -= args[:1] == (self._method,)
        if self._left == 0:
            raise WorkerLost("worker 1 of this site's cluster was lost")
        answer: tuple[str, Any, str] = getattr(self._host, function)(*args)
        return answer


def shards_at_work() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "veilboost_shard"}


def have_ended(shards: set[threading.Thread]) -> bool:
    until = time.monotonic() + 60
    for thread in shards:
        thread.join(max(until - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in shards)


@pytest.fixture
def desks() -> Iterator[list[PartHost]]:
    """Desks of a test, which end with it: a shard whose site has lost another one is told nothing more."""
    before, made = shards_at_work(), list[PartHost]()
    yield made
    for desk in made:
        desk.end()
    assert have_ended(shards_at_work() - before)


@pytest.mark.parametrize(
    ("number", "method", "where"),
    [
        (2, "listen", ""),  # amid its bins
        (1, "train", " (trial 1 of 2, fold 1 of 2)"),
        pytest.param(4, "train", " (trial 2 of 2, fold 2 of 2)", marks=pytest.mark.slow),
        (30, "reply", " (trial 1 of 2, fold 1 of 2)"),
    ],
)
def test_a_worker_that_is_lost_ends_the_job_at_all_sites_which_says_where(
    number: int, method: str, where: str, desks: list[PartHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_dies(n_workers: int) -> Workers:
        here = workers_here(n_workers)
        here._links[1] = Dies(number, method)  # type: ignore[index]
        desks.extend(link._host for link in here._links)  # type: ignore[attr-defined]
        return here

    parties = sites(tmp_path)
    in_shards(monkeypatch, {"site-1": 2}, second_dies)
    outcomes = parties.run(run_tuning_site, job(num_rounds=6))
    assert isinstance(outcomes["site-1"], WorkerLost)
    assert str(outcomes["site-1"]) == f"worker 1 of this site's cluster was lost{where}"
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    assert not list(tmp_path.rglob("tuning.json"))


def test_a_worker_that_does_not_answer_amid_a_trial_is_named_with_it() -> None:
    with (
        pytest.raises(WorkerSilent, match=r"worker 1 .* within 20 s .* \(trial 1 of 2, fold 2 of 3\)"),
        in_trial(1, 2, 2, 3),
    ):
        raise WorkerSilent.of(1, 20.0)


def test_a_site_that_is_lost_amid_a_trial_leaves_no_shard_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, before = sites(tmp_path), shards_at_work()
    in_shards(monkeypatch, {"site-1": 3})
    outcomes = parties.run(run_tuning_site, job(**ONE), tamper={"site-3": dies_at(Kind.HISTOGRAM, 3)})
    assert isinstance(outcomes["site-1"], VeilBoostError) and "(trial 1 of 1, fold 1 of 2)" in str(outcomes["site-1"])
    assert have_ended(shards_at_work() - before)
