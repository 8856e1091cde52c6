"""New rows for a vertical model: what is refused before anything runs, how tables are read, whose ids scores have."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import veilboost as vb
from nvflare.recipe import ProdEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.api.federation import Simulator, by_id, reader_as_trained
from nvflare_plugins.data.declaration import DataSet, IdForm
from nvflare_plugins.kinds.vertical.model import ActivePart, PartyColumns, PassivePart, PrivateSplit
from tests.support.vertical_parts import write_parts
from tests.unit.nvflare_plugins.vertical.test_model_files import booster

N = 120
ACTIVE = ActivePart(booster(), ("age",), (PartyColumns("shop", ("f0", "f1")), PartyColumns("telco", ("f0",))))
SHOP = PassivePart({(0, 1): PrivateSplit(1, np.float32(0.1), True)}, ("spent", "debt"), ("f0", "f1"))
TELCO = PassivePart({}, ("late",), ("f0",))


def tables(folder: Path) -> dict[str, Any]:
    people = pd.DataFrame({"person": [f"P{n:03}" for n in range(N)], "age": np.arange(N) + 0.5})
    bank = people.assign(default=np.where(people["age"] > 60, "ja", "nein"))
    shop = pd.DataFrame({"KUNDE": people["person"], "AUSGABEN": people["age"], "debt": people["age"]})
    shop.to_csv(folder / "shop.csv", index=False, sep=";")
    how = {"separator": ";", "rename": {"KUNDE": "person", "AUSGABEN": "spent"}}
    return {
        "bank": vb.read(bank, columns={"default": {"ja": 1, "nein": 0}}),
        "shop": vb.read(folder / "shop.csv", **how, missing=["?"]),
        "telco": people[["person"]].assign(late=people["age"]),
    }


@pytest.fixture
def fed(tmp_path: Path) -> vb.Federation:
    return vb.simulate(tables(tmp_path), "default", folder=tmp_path / "fed")


@pytest.fixture
def run(fed: vb.Federation) -> vb.Run:
    """A training as the simulator would have left it."""
    method, root = vb.vertical(id="person"), fed.folder / "runs" / "001-train"
    job = fed.recipe(method).job
    fed._write_policies(root / "train", method, ())
    folders = {site: root / "train" / site / "veilboost_runs" / "simulate_job" for site in fed.sites}
    write_parts(folders, {"bank": ACTIVE, "shop": SHOP, "telco": TELCO}, "bank", "simulate_job")
    return vb.Run(Simulator(fed.sites, root, progress=False), "simulate_job", "train", job)


@pytest.fixture
def new(fed: vb.Federation) -> dict[str, Any]:
    people = pd.DataFrame({"person": [f"P{n:03}" for n in range(N, 2 * N)], "age": 3.0})
    shop = people.rename(columns={"age": "spent"}).assign(debt=1.0)
    return {"bank": people, "shop": shop, "telco": people.rename(columns={"age": "late"})}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take the jobs that would be run, and end there."""
    jobs: list[Any] = []

    def stop(self: Any, env: Any) -> None:
        jobs.append(self.job)
        raise KeyboardInterrupt

    monkeypatch.setattr("nvflare_plugins.recipes.recipe.JobRecipe.run", stop)
    return jobs


def test_rows_that_all_sites_can_read_become_a_job_over_their_parts(
    fed: vb.Federation, run: vb.Run, new: dict[str, Any], asked: list[Any]
) -> None:
    for _ in range(2):  # rows under another name each time: what was asked before is not counted
        with pytest.raises(KeyboardInterrupt):
            fed.predict(run, new, rounds="best")
    first, second = asked
    assert (first.model, first.action, first.alignment, first.rounds) == ("simulate_job", "predict", "first", "best")
    assert first.data_set != second.data_set and set(fed._readers) == {"rows"}
    for site in fed.sites:
        (part,) = (fed.folder / "memory" / site / "inputs").iterdir()
        assert part.name == f"simulate_job.{site}.json" and part.stat().st_mode & 0o777 == 0o600


def test_what_new_rows_lack_is_told_of_all_sites_before_anything_runs(
    fed: vb.Federation, run: vb.Run, new: dict[str, Any], asked: list[Any]
) -> None:
    new |= {"shop": new["shop"].drop(columns=["debt"]), "telco": new["telco"].rename(columns={"person": "persons"})}
    with pytest.raises(vb.SitesRefused, match="nothing was scored") as error:
        fed.predict(run, new)
    assert set(error.value.reasons) == {"shop", "telco"} and not asked
    assert "there is no column 'debt'" in error.value.reasons["shop"][0]
    assert "no column 'person', the id" in error.value.reasons["telco"][0]


@pytest.mark.parametrize("change", [{"telco": None}, {"post": pd.DataFrame()}])
def test_each_site_has_a_table(
    fed: vb.Federation, run: vb.Run, new: dict[str, Any], change: dict[str, Any], asked: list[Any]
) -> None:
    rows = {site: table for site, table in {**new, **change}.items() if table is not None}
    with pytest.raises(ConfigurationError, match="a table for each of bank, shop, telco, and for no other"):
        fed.predict(run, rows)
    with pytest.raises(ConfigurationError, match="telco: int is no table"):
        fed.predict(run, {**new, "telco": 3})
    assert not asked


def test_other_runs_are_refused_with_what_scores_instead(
    fed: vb.Federation, run: vb.Run, new: dict[str, Any], tmp_path: Path
) -> None:
    rows = new["bank"].assign(age=np.arange(N) / 2, y=np.arange(N) % 2)
    job = vb.simulate(dict.fromkeys("abc", rows), "y", folder=tmp_path / "other").recipe().job
    with pytest.raises(ConfigurationError, match=r"predict_proba\(rows\)"):
        fed.predict(vb.Run(run.exec_env, "simulate_job", "train", job), new)
    (tmp_path / "kit" / "startup").mkdir(parents=True)
    far = vb.Run(ProdEnv(startup_kit_location=str(tmp_path / "kit")), "5d0c", "train", run.job)
    with pytest.raises(ConfigurationError, match=r"VerticalInferenceRecipe\(name, model='5d0c'"):
        fed.predict(far, new)
    stranger = vb.simulate(tables(tmp_path), "default", folder=tmp_path / "stranger")
    with pytest.raises(ConfigurationError, match="not trained by this federation"):
        stranger.predict(run, new)


def test_a_part_that_is_gone_or_was_changed_is_told(fed: vb.Federation, run: vb.Run, new: dict[str, Any]) -> None:
    part = run.folder / "telco" / "veilboost_runs" / "simulate_job" / "private_table.json"
    part.write_text(part.read_text().replace('"late"', '"lame"'))
    with pytest.raises(ConfigurationError, match="part of the model at telco was changed"):
        fed.predict(run, new)
    shutil.rmtree(run.folder / "shop")
    with pytest.raises(ConfigurationError, match=r"shop: its part of the model is gone from .*Remedy: train again"):
        fed.predict(run, new)


def test_tables_are_read_as_they_were_trained_on_unless_a_reader_says_otherwise(
    run: vb.Run, new: dict[str, Any], tmp_path: Path
) -> None:
    def options(site: str, source: Any, part: Any) -> dict[str, Any]:
        return dict(reader_as_trained(site, source, run, part, tmp_path / "rows").options)

    rename = {"KUNDE": "person", "AUSGABEN": "spent"}
    as_then = {"format": "csv", "separator": ";", "missing": ["?"], "id": "person"}
    assert options("shop", tmp_path / "shop.csv", SHOP) == {**as_then, "rename": rename}
    fewer = options("shop", tmp_path / "shop.csv", replace(SHOP, columns=("debt", "more")))
    assert fewer == {**as_then, "rename": {"KUNDE": "person"}}
    assert options("shop", new["shop"], SHOP) == {"format": "parquet", "missing": ["?"], "id": "person"}
    own = vb.read(tmp_path / "shop.csv", separator="|")
    assert options("shop", own, SHOP) == {"format": "csv", "separator": "|", "id": "person"}
    assert options("bank", new["bank"], ACTIVE) == {"format": "parquet", "id": "person", "columns": {}}  # no label


@pytest.mark.parametrize(("file", "ids"), [("csv", ["c2", " C0 ", "C1"]), ("parquet", [2, 10, 1])])
def test_scores_have_the_ids_and_the_order_of_the_active_party(file: str, ids: list[Any], tmp_path: Path) -> None:
    path = tmp_path / f"rows.{file}"
    table = pd.DataFrame({"customer": [*ids, "C9" if file == "csv" else 9], "income": 1.0})
    table.to_csv(path, index=False) if file == "csv" else table.to_parquet(path)
    spec = DataSet(name="new", path=path, format=file, id="customer", id_form=IdForm(ignore_case=True))
    canonical = sorted((str(one).strip().lower(), place) for place, one in enumerate(ids))
    scores = pd.DataFrame({"row": range(3), "id": [one for one, _ in canonical], "margin": [p for _, p in canonical]})
    found = by_id(scores, spec)
    assert found.index.name == "customer" and found.index.tolist() == ids
    assert found["margin"].tolist() == [0, 1, 2] and list(found) == ["margin"]
    assert table.join(found, on="customer")["margin"].tolist()[:3] == [0, 1, 2]


def test_scores_without_ids_are_by_position(tmp_path: Path) -> None:
    spec = DataSet(name="new", path=tmp_path / "rows.csv", format="csv")
    found = by_id(pd.DataFrame({"row": [0, 1], "margin": [0.5, 0.25]}), spec)
    assert found.to_dict("list") == {"margin": [0.5, 0.25]} and found.index.tolist() == [0, 1]
