"""Data sets that are never held whole, in kinds of job beside horizontal ones: results as of one held file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import RowPasses, Table
from nvflare_plugins.kinds.bagging.training import run_bagging_site
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import DpBoostServer
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site
from nvflare_plugins.kinds.federboost_vertical.tables import load_rows
from nvflare_plugins.pages.run_record import RunRecord
from tests.support import bagging
from tests.support.examples import slow
from tests.support.federation import Federation, Parties, succeed
from tests.support.private_federation import BUDGET, DATA, PrivateFederation, frame_of, job_of
from tests.support.seeded_randomness import SeededRandomness
from tests.support.vertical_jobs import POLICY, give_columns, merged, run, table
from tests.support.vertical_jobs import job as vertical_job

EVENT = GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW)


def in_parts(sites: Federation | Parties, name: str, at: tuple[str, ...] = ()) -> None:
    """Put a data set of one file into a folder of three, in other row groups. Args: at: sites, all if there is none."""
    for site in at or sites.sites:
        folder, file = sites.workspace(site) / "parts" / name, sites.workspace(site) / f"{name}.parquet"
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.read_parquet(file)
        for number, rows in enumerate(np.array_split(np.arange(len(frame)), 3)):
            frame.iloc[rows].to_parquet(folder / f"{number}.parquet", index=False, row_group_size=37)
        file.unlink()


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note who reads in passes."""
    reads: list[str] = []
    real = RowPasses._values

    def values(self: RowPasses, name: str, column: Any) -> Any:
        reads.append(name)
        return real(self, name, column)

    monkeypatch.setattr(RowPasses, "_values", values)
    return reads


# -- private trees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *slow({"method": "dp_tr_newton_ih", "components": {"n_trees": 4}}),
        {"method": "dp_gbm", "components": {"n_trees": 2}, "weight": "w", "max_weight": 2.0},
        *slow({"method": "dp_tr_newton", "components": {"n_trees": 4, "grower": "xgboost"}}),
    ],
    ids=["default", "refined_candidates", "greedy", "that_xgboost_once_held"],
)
def test_private_trees_are_those_of_held_rows(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = frame_of(missing=True)
    frame["w"] = np.random.default_rng(1).uniform(0, 4, len(frame))
    frame["label"] = frame.label.where(np.arange(len(frame)) % 50 != 0)  # rows that are left out
    frame.loc[3, "x1"] = 1e40  # and a value that is clipped
    reads, models = noted_reads(monkeypatch), []
    for mode in ("file", "parts"):
        sites = PrivateFederation(tmp_path / mode, frame)
        path = f"{DATA}.parquet"
        if mode == "parts":
            in_parts(sites, DATA)
            path = f"parts/{DATA}"
        sites.set_policies(data_sets={DATA: {"path": path, "privacy": BUDGET}})
        features = [f"x{i}" for i in range(4)] + ["colour"]
        job = job_of(trust="trusted_aggregator", features=features, structure_seed=5, **changes)
        sites.run_private(job, server_noise=lambda sums, *_: Release(np.asarray(sums), EVENT)).succeed()
        assert bool(reads) == (mode == "parts")
        models.append(sites.model())
    assert models[0] == models[1]


def test_private_trees_that_need_all_rows_say_so(tmp_path: Path) -> None:
    sites = PrivateFederation(tmp_path)
    for site in sites.sites:
        held = {"path": f"{DATA}.parquet", "memory": "external", "privacy": BUDGET}
        sites.set_policy(site, data_sets={DATA: held})
    run = sites.run_private(job_of(components={"n_trees": 2}))
    with pytest.raises(ConfigurationError, match=r"a private training holds them.*memory \("):
        raise run.error("site-1")


# -- vertical training ------------------------------------------------------------------------------------------------


PASSIVE = ("site-2", "site-3")
COLORS = ["red", "green", "blue", "none of them"]


def vertical_parties(folder: Path, mode: str) -> Parties:
    """Three parties with numbers and categories, two with rows in an order of their own, one file or several."""
    parties, rng = Parties(folder, 3, {**POLICY, "vertical": {"min_intersection": 50}}), np.random.default_rng(6)
    frame = table(420, 5).assign(id=[f"row {number}" for number in range(420)])
    frame.insert(3, "color", rng.choice(COLORS[:3], 420))
    frame.loc[rng.random(420) < 0.1, "color"] = None
    frame.loc[frame.index[-20:], "color"] = COLORS[3]  # which no row of the training set has
    for name, rows in (("data", frame.iloc[:330]), ("held", frame.iloc[330:])):
        give_columns(parties, name, rows, (1, 3, 2))
        for number, site in enumerate(PASSIVE):
            path = parties.workspace(site) / f"{name}.parquet"
            own = pd.read_parquet(path).iloc[7 * number :]  # fewer rows than the others
            own.sample(frac=1, random_state=number).to_parquet(path, index=False)
        if mode == "parts":
            in_parts(parties, name)
            for site in parties.sites:
                sets = parties.policy_of(site)["data_sets"]
                parties.set_policy(site, data_sets={**sets, name: {**sets[name], "path": f"parts/{name}"}})
    return parties


@pytest.mark.parametrize("preset", [*slow("exact"), "guarded"])
def test_vertical_parties_train_on_rows_that_are_read_in_passes(
    tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, found = noted_reads(monkeypatch), []
    for mode in ("file", "parts"):
        parties = vertical_parties(tmp_path / mode, mode)
        common = {
            "alignment": "first",
            "categories": {"site-2": {"color": COLORS}},
            "eval_data_set": "held",
            "evaluate_training": True,
            "preset": preset,
            "num_rounds": 3,
        }
        succeed(run(parties, vertical_job(**common), "first"))
        # A model to go on from brings thresholds that are no cuts of these rows.
        succeed(run(parties, vertical_job(**{**common, "data_set": "held", "initial_model": "first"}), "second"))
        metrics = [RunRecord.read(parties.run_folder("site-1", one)).rounds[-1].metrics for one in ("first", "second")]
        found.append((merged(parties, "first"), merged(parties, "second"), metrics))
        assert bool(reads) == (mode == "parts")
    assert found[0] == found[1]


def test_buckets_of_rows_are_made_of_held_rows_alone(tmp_path: Path) -> None:
    pd.DataFrame({"id": ["a"], "x": [1.0]}).to_parquet(tmp_path / "rows.parquet")
    spec = DataSet("rows", tmp_path / "rows.parquet", "parquet", id="id", memory="passes")
    with pytest.raises(ConfigurationError, match=r"holds all rows at once.*data_sets\.rows\.memory"):
        load_rows(spec, ["x"], None, None, None)  # type: ignore[arg-type]


def test_no_vertical_party_keeps_bins_in_files_and_each_says_why(tmp_path: Path) -> None:
    parties = vertical_parties(tmp_path, "file")
    for site in ("site-1", "site-2"):
        sets = parties.policy_of(site)["data_sets"]
        parties.set_policy(site, data_sets={**sets, "data": {**sets["data"], "memory": "external"}})
    outcomes = run(parties, vertical_job(categories={"site-2": {"color": COLORS}}))
    for site in ("site-1", "site-2"):
        with pytest.raises(ConfigurationError, match=r"a vertical training holds them.*data_sets\.data\.memory"):
            raise outcomes[site]  # type: ignore[misc]


# -- bagging and DPBoost ----------------------------------------------------------------------------------------------


def told(parties: Parties, name: str) -> None:
    """Have every site's policy name the folder of ``in_parts``."""
    in_parts(parties, name)
    for site in parties.sites:
        sets = parties.policy_of(site)["data_sets"]
        parties.set_policy(site, data_sets={name: {**sets[name], "path": f"parts/{name}"}})


@pytest.mark.parametrize("params", [{}, *slow({"max_bin": 300, "grow_policy": "lossguide", "max_leaves": 6})])
def test_bagged_trees_are_those_of_held_rows(
    tmp_path: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table.blocks, "__defaults__", (100,))
    reads, models = noted_reads(monkeypatch), []
    for mode in ("file", "parts"):
        parties = bagging.sites(tmp_path / mode)
        if mode == "parts":
            told(parties, "train")
        succeed(parties.run(run_bagging_site, bagging.job(params={**bagging.PARAMS, **params})))
        models.append(bagging.model(parties))
        assert bool(reads) == (mode == "parts")
    assert models[0] == models[1]


def test_dpboost_grows_the_same_trees_on_rows_that_it_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, models = noted_reads(monkeypatch), []
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"id": np.arange(300), "a": rng.random(300), "b": rng.random(300), "y": rng.integers(0, 2, 300)}
    )
    frame.loc[::9, "a"], frame.loc[::11, "id"] = np.nan, None
    public = {"data_set": "rows", "label": "y", "epsilon": 2.0, "feature_bounds": {"a": [0, 1], "b": [0, 1]}}
    job = DpBoostJob.from_dict({**public, "variant": "seq", "n_trees": 2, "depth": 2, "n_candidates": 8})
    policy = {"unsigned_sessions": True, "data_sets": {}, "allowed_profiles": ["dp_trusted"]}
    for mode in ("file", "parts"):
        parties = Parties(tmp_path / mode, 3, policy)
        for number, site in enumerate(parties.sites):
            budget = {"epsilon": 9.0, "delta": 1e-6, "pure_epsilon": 8.0}
            parties.give(site, "rows", frame.iloc[number::3], id="id", privacy=budget)
        if mode == "parts":
            told(parties, "rows")
        server = DpBoostServer(job, SeededRandomness(1))
        answer = lambda frame, total: server.answer(frame, total, lambda *_: None)  # noqa: E731, B023
        succeed(parties.run(run_dpboost_site, job, on_sum=answer))
        models.append((parties.run_folder("site-1") / "model.json").read_bytes())
        facts = RunRecord.read(parties.run_folder("site-1")).data[0]
        assert facts.rows < 100 and 0 < facts.missing["a"] < facts.rows
        assert bool(reads) == (mode == "parts")
    assert models[0] == models[1]
