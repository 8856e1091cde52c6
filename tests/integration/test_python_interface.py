"""The program of jobs/PYTHON.md in FLARE's simulator: a run that goes well, one that is refused, one interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import veilboost as vb
import xgboost as xgb
from nvflare.recipe import SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.api.federation import part_files
from nvflare_plugins.evidence.verification import Verdict
from nvflare_plugins.kinds.vertical.model import Part, merge, read_part
from nvflare_plugins.recipes import VerticalXGBRecipe
from nvflare_plugins.site.setup import SetupOptions, set_up
from tests.unit.nvflare_plugins.api.test_simulator import running

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.sim, pytest.mark.slow]
HOSTILE = "a<b>&\"'"  # what a label's class may be called


def tables(folder: Path, seed: int = 0) -> dict[str, object]:
    """Return three sites' tables that differ in separator, encoding, names, decimal mark and form of the label."""
    rng = np.random.default_rng(seed)
    rows = pd.DataFrame({"size": rng.normal(170, 9, 900).round(1), "ward": rng.choice(["Köln", "Süd"], 900)})
    rows["born"] = pd.to_datetime(rng.integers(0, 15_000, 900), unit="D")
    rows["died"] = np.where(rows["size"] + 20 * (rows["ward"] == "Süd") > 180, HOSTILE, "no")
    berlin, ulm, kiel = rows[:300], rows[300:600], rows[600:]
    ulm.assign(born=ulm["born"].dt.strftime("%d.%m.%Y")).to_csv(folder / "ulm.csv", index=False, sep=";")
    kiel = kiel.assign(born=kiel["born"].dt.strftime("%Y-%m-%d")).rename(columns={"size": "Größe"})
    kiel.to_csv(folder / "kiel.txt", index=False, sep="\t", decimal=",", encoding="cp1252")
    how = {"separator": "\t", "encoding": "cp1252", "decimal": ",", "rename": {"Größe": "size"}}
    return {
        "berlin": berlin,
        "ulm": vb.read(folder / "ulm.csv", separator=";", dates={"born": "DD.MM.YYYY"}),
        "kiel": vb.read(folder / "kiel.txt", dates={"born": "YYYY-MM-DD"}, **how),
    }


def test_three_tables_that_differ_become_a_model_a_history_and_evidence(tmp_path: Path) -> None:
    sites = tables(tmp_path)
    berlin = sites["berlin"]
    assert isinstance(berlin, pd.DataFrame)
    (tmp_path / "others").mkdir()
    fed = vb.simulate(sites, "died", folder=tmp_path / "fed", evaluation=tables(tmp_path / "others", seed=1))
    features = ["size", "ward", "born"]
    run = fed.train(vb.Horizontal(max_depth=3, features=features), rounds=4, profile="masks", name="credit")
    assert list(run.sites) == ["berlin", "kiel", "ulm"] and run.get_status() is None
    assert len(run.history) == 4 and run.history["eval-auc"].iloc[-1] > 0.95 and run.best_round in range(4)
    rows = berlin[features]
    scores = run.model.predict_proba(rows)
    assert (run.model.predict(rows) == berlin["died"]).mean() > 0.9 and scores.shape == (300, 2)
    texts = rows.assign(born=rows["born"].dt.strftime("%d.%m.%Y"))
    assert np.array_equal(run.sites["ulm"].model.predict_proba(texts), scores)  # as that site's policy reads dates
    assert run.model.explain(rows).shape == (300, 4) and len(run.model.feature_importances_) == 3
    assert run.evidence.verify().verdict is Verdict.UNSIGNED and run.report.path.is_file()
    assert set(run.compare("ulm", "held_out")["verdict"]) and "<b>&" not in run._repr_html_()
    with pytest.raises(vb.SitesRefused) as refused:
        fed.train(vb.Horizontal(features=features), profile="plain")
    assert set(refused.value.reasons) == set(sites)
    assert all("allowed_profiles. Remedy" in one[0] for one in refused.value.reasons.values())


def test_the_example_of_the_vertical_recipe_runs_as_it_stands(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(rng.normal(size=(400, 3)), columns=["a", "b", "c"]).assign(id=[f"c{n:03}" for n in range(400)])
    rows["default"] = (rows["a"] + rows["b"] > 0).astype(int)
    for site, columns in {"bank": ["id", "a", "default"], "shop": ["id", "b"], "telco": ["id", "c"]}.items():
        rows[columns].to_csv(tmp_path / f"{site}.csv", index=False)
    paths = {"loans": str(tmp_path / "{site}.csv")}
    set_up(tmp_path / "ws" / "credit", SetupOptions(paths, ids={"loans": "id"}, added_profiles=("elgamal",)))
    recipe = VerticalXGBRecipe(
        "credit", active="bank", data_set="loans", label="default", alignment="first", profile="elgamal",
        params={"objective": "binary:logistic", "max_bin": 32}, num_rounds=2, sites=["bank", "shop", "telco"],
    )  # fmt: skip
    run = recipe.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path / "ws")))
    assert isinstance(run, vb.Run) and list(run.sites) == ["bank", "shop", "telco"] and len(run.history) == 2
    assert run.evidence.verify().sound and run.reasons == {} and run.get_result() == str(tmp_path / "ws" / "credit")
    with pytest.raises(ConfigurationError, match="one party's part of a vertical model"):
        _ = run.model


def test_new_rows_are_scored_by_all_parties_and_by_the_callers_own_ids(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(rng.normal(size=(800, 3)), columns=["a", "b", "c"]).assign(id=[f"Äb{n:03}" for n in range(800)])
    rows["ward"] = rng.choice(["Köln", "Süd"], 800)
    rows["default"] = np.where(rows["a"] + rows["b"] + (rows["ward"] == "Süd") > 0.5, HOSTILE, "no")

    def tables(part: pd.DataFrame, seed: int, *label: str) -> dict[str, pd.DataFrame]:
        shop = part[["id", "b", "ward"]].assign(id=part["id"].str.upper())  # other parties write ids otherwise
        sites = {"bank": part[["id", "a", *label]], "shop": shop, "telco": part[["id", "c"]]}
        return {site: frame.sample(frac=0.9, random_state=seed + n) for n, (site, frame) in enumerate(sites.items())}

    known, new = tables(rows[:500], 0, "default"), tables(rows[400:], 3)  # some of the new rows were trained on
    known["shop"].to_csv(tmp_path / "known.csv", index=False, sep=";", encoding="cp1252")
    new["shop"].to_csv(tmp_path / "new.csv", index=False, sep=";", encoding="cp1252")
    shop = vb.read(tmp_path / "known.csv", separator=";", encoding="cp1252")
    allowed = {"allowed_profiles": ["elgamal"]}
    fed = vb.simulate({**known, "shop": shop}, "default", folder=tmp_path / "fed", policy=allowed)
    run = fed.train(vb.vertical(id="id", max_depth=3, max_bin=32), rounds=3, profile="elgamal")
    scores = fed.predict(run, {**new, "shop": tmp_path / "new.csv"})

    common = set(new["telco"]["id"]) & {rows["id"][row] for row in new["shop"].index}
    assert scores.index.tolist() == [one for one in new["bank"]["id"] if one in common] and len(scores) > 200
    files = part_files(run, fed.folder, fed.sites)
    parts: dict[str, Any] = {site: read_part(file, site, Part).part for site, file in files.items()}
    joined = rows.set_index("id").loc[scores.index].assign(ward=lambda one: (one["ward"] == "Süd").astype(float))
    owned = [column for site in ("bank", "shop", "telco") for column in parts[site].columns]
    held = [(1, parts["shop"].table), (1 + len(parts["shop"].columns), parts["telco"].table)]
    booster = xgb.Booster(model_file=bytearray(merge(parts["bank"].booster, 1, held)))
    booster.feature_names = booster.feature_types = None
    margins = booster.predict(xgb.DMatrix(joined[owned].to_numpy(np.float32)), output_margin=True)
    np.testing.assert_array_equal(scores["margin"].to_numpy(np.float32), margins)
    assert (scores["class"] == joined["default"]).mean() > 0.7 and scores["margin"].nunique() > 4
    assert [path.parts[-4] for path in fed.folder.rglob("predictions.*")] == ["bank"]
    with pytest.raises(vb.SitesRefused, match=r"vertical\.min_intersection\. Remedy"):
        fed.predict(run, {site: frame[:50] for site, frame in new.items()})


LONG = """
import sys
import numpy as np
import pandas as pd
from nvflare_plugins.api.federation import simulate
from nvflare_plugins.api.methods import Horizontal
rows = pd.DataFrame({"x": np.random.default_rng(0).normal(size=900)})
rows["y"] = (rows["x"] > 0).astype(int)
fed = simulate({site: rows[n::3] for n, site in enumerate(("berlin", "ulm", "kiel"))}, "y", folder=sys.argv[1])
try:
    fed.train(Horizontal(), rounds=5_000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_a_killed_kernel_leaves_nothing_running(how: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STARTED_BY": str(os.getpid())}
    command = [sys.executable, "-c", LONG, str(tmp_path / "fed")]
    caller = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 240
        logs = tmp_path / "fed" / "runs" / "001-train" / "train"
        while not any("round 1 of" in path.read_text() for path in logs.glob("*/log.txt")):
            assert caller.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        assert len(running()) >= 5  # the watcher, the simulator, three sites
        begin = time.monotonic()
        caller.send_signal(how)
        assert caller.communicate(timeout=60)[0].strip() == ("interrupted" if how is signal.SIGINT else "")
        while running() and time.monotonic() < begin + 60:
            time.sleep(0.1)
        assert running() == []
        assert not [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    finally:
        caller.kill()
