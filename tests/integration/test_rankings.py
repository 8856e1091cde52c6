"""Ranking jobs: what is refused, by name or without a word on rows, and rows that do not count."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.row_floors import TOO_FEW
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import ProtectedSums
from tests.support import vertical_jobs
from tests.support.examples import slow
from tests.support.federation import Federation, Parties, SiteDied, dies_at, succeed

RANK = {"objective": "rank:ndcg", "max_depth": 2, "max_bin": 8}


def frame(n_queries: int = 60, size: int = 8) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n_queries * size, 3)).astype(np.float32)
    label = np.clip(np.round(x[:, 0] + rng.normal(size=len(x))), 0, 4)
    query = np.repeat([f"q{n}" for n in range(n_queries)], size)
    return pd.DataFrame(x, columns=["a", "b", "c"]).assign(y=label.astype(np.float32), query=query, w=2.0)


def rank(folder, rows: pd.DataFrame, params: dict | None = None, **fields: Any) -> tuple[Federation, dict]:
    federation = Federation(folder, 3, fields.pop("policy", {}))
    number = rows.groupby("query", sort=False, dropna=False).ngroup().to_numpy()
    federation.give_data("train", rows, [np.flatnonzero(number % 3 == one) for one in range(3)])
    fields = {"query": "query", "features": ["a", "b", "c"], **fields}
    return federation, federation.run(HorizontalJob("train", "y", {**RANK, **(params or {})}, 2, **fields))


JOBS: dict[str, tuple[Callable[[], Any], str]] = {
    "no query": (lambda: HorizontalJob("train", "y", RANK), "rank:ndcg needs query"),
    "no query, vertical": (lambda: VerticalJob("bank", "train", "y", RANK), "rank:ndcg needs query"),
    "no ranking": (lambda: HorizontalJob("train", "y", {}, query="q"), "read only by objectives rank:ndcg"),
    "no ranking, vertical": (lambda: VerticalJob("bank", "train", "y", {}, query="q"), "read only by objectives"),
    "lost site": (lambda: HorizontalJob("train", "y", RANK, query="q", on_lost_site="continue"), "Use 'wait'"),
    "mediated": (lambda: HorizontalJob("train", "y", RANK, query="q", engine="xgboost"), "set engine='own'"),
    "tuning": (lambda: TuningJob("train", "y", RANK, trials=[{}]), "rank:ndcg is refused in a tuning"),
    "vertical tuning": (
        lambda: VerticalTuningJob("bank", "train", "y", RANK, trials=[{}]),
        "rank:ndcg is refused in a tuning",
    ),
    "bagging": (lambda: BaggingJob("train", "y", RANK).parameters(["a"]), "rank:ndcg is refused in bagging"),
    "buckets": (
        lambda: BucketJob(active="bank", data_set="train", label="y", params=RANK, epsilon=1.0),
        "rank:ndcg is refused in this kind",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_that_no_site_would_see(name: str) -> None:
    make, said = JOBS[name]
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_words_of_32_bits_and_queries_as_features_are_refused(tmp_path) -> None:
    for number, (fields, said) in enumerate(
        (({"word_bits": 32}, "set word_bits to 64"), ({"features": ["a", "query"]}, "weight, group or id column"))
    ):
        _, outcomes = rank(tmp_path / str(number), frame(), **fields)
        assert all(isinstance(one, ConfigurationError) for one in outcomes.values())
        assert said.lower() in str(next(iter(outcomes.values()))).lower()


def only_fifth(rows: pd.DataFrame) -> pd.Series:
    return rows.index == 4


ROWS: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], dict, dict, str]] = {
    "no query": (lambda rows: rows.assign(query=rows["query"].mask(only_fifth(rows))), {}, {}, "query column lacks"),
    "two weights": (
        lambda rows: rows.assign(w=rows.w + only_fifth(rows)),
        {},
        {"weight": "w"},
        "differ from row to row",
    ),
    "half": (lambda rows: rows.assign(y=rows.y + 0.5 * only_fifth(rows)), {}, {}, "whole numbers from 0 to 31"),
    "negative": (
        lambda rows: rows.assign(y=rows.y - 9 * only_fifth(rows)),
        {"ndcg_exp_gain": False},
        {},
        "labels must be 0 or greater",
    ),
    "grades under map": (lambda rows: rows, {"eval_metric": "map"}, {}, "map: labels must be 0 or 1"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_cannot_be_ranked(tmp_path, caplog, name: str) -> None:
    change, params, fields, reason = ROWS[name]
    _, outcomes = rank(tmp_path, change(frame()), params, policy={"share_data_errors": False}, **fields)
    assert reason in caplog.text
    assert all(isinstance(one, Exception) and reason not in str(one) for one in outcomes.values())


def test_rows_of_queries_without_pairs_are_no_effective_rows(tmp_path) -> None:
    """A column that puts all rows but a few into queries of their own would else show sums over these few."""
    rows = frame()
    alone = rows.assign(query=[f"r{n}" if n >= 48 else f"q{n // 8}" for n in rows.index])
    policy = {"min_effective_rows": 100}
    _, outcomes = rank(tmp_path / "few", alone, policy=policy)
    assert all(TOO_FEW in str(one) for one in outcomes.values())
    succeed(rank(tmp_path / "enough", rows, policy=policy)[1])


def test_what_the_sites_learn_of_queries(tmp_path, monkeypatch) -> None:
    """Nothing before training, their number with weights, and each site's under mean."""
    rows, counted, seen = frame(61), ProtectedSums.sum_counts, list[list[int]]()

    def listened(self: ProtectedSums, kind: Kind, own: np.ndarray) -> np.ndarray:
        found = counted(self, kind, own)
        seen.append(found.tolist())
        return found

    monkeypatch.setattr(ProtectedSums, "sum_counts", listened)
    weighted, drawn = {"weight": "w"}, {"lambdarank_pair_method": "mean"}
    for params, fields, expected in (({}, {}, []), ({}, weighted, [61]), (drawn, {}, [21, 20, 20])):
        seen.clear()
        succeed(rank(tmp_path / str(expected), rows, params, **fields)[1])
        assert max((one[4:] for one in seen if one[0] == len(rows)), key=len) == expected


@pytest.mark.parametrize("consents", [False, True])
def test_queries_that_are_spread_over_sites(tmp_path, caplog, consents: bool) -> None:
    """Where names mean the same everywhere: only those are found that two sites have, and each site is told its own."""
    caplog.set_level("INFO")
    rows, policy = frame(400), {"consents": {"compare_queries": consents}}
    _, outcomes = rank(tmp_path / "apart", rows, policy=policy, compare_queries=True)
    if not consents:
        assert all("consents.compare_queries" in str(one) for one in outcomes.values())
        return
    succeed(outcomes)
    federation = Federation(tmp_path / "spread", 3, policy)
    number = rows.groupby("query", sort=False).ngroup().to_numpy()
    parts = [np.flatnonzero(number % 3 == one) for one in range(3)]
    parts[2] = np.append(parts[2], parts[0][:3])
    federation.give_data("train", rows, parts)
    outcomes = federation.run(HorizontalJob("train", "y", RANK, 2, query="query", compare_queries=True))
    assert all("some queries have rows at several sites" in str(one) for one in outcomes.values())
    told = [one.getMessage() for one in caplog.records if "stands at another site" in one.getMessage()]
    assert sorted(one.rpartition(": ")[2] for one in told) == ["0 of 133", "1 of 134", "1 of 134"]
    succeed(federation.run(HorizontalJob("train", "y", RANK, 2, query="query"), job_id="without"))


def test_another_column_of_queries_is_a_change_of_the_rows(tmp_path) -> None:
    rows = frame().assign(other=np.repeat([f"o{n}" for n in range(48)], 10))
    federation, outcomes = rank(tmp_path, rows, policy={"consents": {}})
    succeed(outcomes)
    job = HorizontalJob("train", "y", RANK, 2, query="other", features=["a", "b", "c"])
    assert all("recompute_with_changes" in str(one) for one in federation.run(job, job_id="other").values())


@pytest.mark.parametrize(("how", "method"), [*slow(("wait", "mean")), ("resume", "topk")])
def test_a_ranking_goes_on_to_the_same_model(tmp_path, how: str, method: str) -> None:
    params = {**RANK, "lambdarank_pair_method": method}

    def started(name: str) -> Federation:
        federation, rows = Federation(tmp_path / name, 3), frame()
        federation.give_data("train", rows, np.array_split(np.arange(len(rows)), [160, 320]))
        return federation

    def job(**fields: Any) -> HorizontalJob:
        return HorizontalJob("train", "y", params, 4, query="query", weight="w", checkpoint_every=1, **fields)

    whole, lost = started("whole"), started("lost")
    succeed(whole.run(job(arithmetic="3.3")))
    waits = {"on_lost_site": "wait"} if how == "wait" else {}
    first = "job" if how == "wait" else "first"
    died = lost.run(job(arithmetic="3.3", **waits), first, tamper={"site-2": dies_at(Kind.HISTOGRAM, 5)})
    assert isinstance(died["site-2"], SiteDied)
    again = waits or {"resume_from": "first"}
    succeed(lost.run(job(arithmetic="3.3", **again), number=2 if how == "wait" else 1))
    assert lost.model() == whole.model()


def test_a_vertical_job_ranks_at_the_party_that_has_the_queries(tmp_path, caplog) -> None:
    """The same model as centralized training of the same queries, also where rows lie in no order of these."""
    rows = vertical_jobs.table(300)
    rows["y"] = np.random.default_rng(1).integers(0, 4, len(rows)).astype(np.float32)
    query = np.random.default_rng(2).integers(0, 20, len(rows))
    parties = Parties(tmp_path, 3, {**vertical_jobs.POLICY, "share_data_errors": False})
    vertical_jobs.give_columns(parties, "data", rows, (2, 3, 1))
    own = rows[["c0", "c1", "y"]].assign(query=query)
    parties.give("site-1", "data", own)
    params = {"objective": "rank:ndcg", "max_depth": 3, "max_bin": 16, "base_score": 0.0}
    of = vertical_jobs.job(params=params, query="query", evaluate_training=True)
    succeed(vertical_jobs.run(parties, of))
    order = np.argsort(query, kind="stable")
    table = rows[[f"c{n}" for n in range(6)]].to_numpy(np.float32)
    matrix = xgb.DMatrix(table[order], label=rows.y.to_numpy()[order], qid=query[order])
    told: dict[str, Any] = {}
    settings = {"tree_method": "hist", "nthread": 1, "verbosity": 0, **params}
    xgb.train(settings, matrix, of.num_rounds, evals=[(matrix, "train")], evals_result=told, verbose_eval=False)
    record = json.loads((parties.workspace("site-1") / "runs" / "job" / "run.json").read_text())
    found = [row["metrics"]["train-ndcg@32"] for row in record["rounds"]]
    assert found == pytest.approx(told["train"]["ndcg@32"], abs=1e-9) and found[-1] > found[0] > 0.5
    parties.give("site-1", "data", own.assign(w=1.0 + (own.index == 0)))
    wrong = vertical_jobs.job(params=params, query="query", weight="w")
    assert all(isinstance(one, Exception) for one in vertical_jobs.run(parties, wrong, "wrong").values())
    assert "differ from row to row" in caplog.text
