"""A federation of one's own tables: what is found before anything runs, and what each simulated site is told."""

from __future__ import annotations

import json
import re
import stat
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import veilboost as vb

from he_processors.errors import ConfigurationError
from nvflare_plugins.api.federation import HELD_OUT, ROWS
from nvflare_plugins.flare.kinds import read_job
from nvflare_plugins.recipes import HorizontalXGBRecipe
from nvflare_plugins.recipes.recipe import JobRecipe, write_folder
from nvflare_plugins.site.policy import SitePolicy

SITES = ("berlin", "ulm", "kiel")


def table(seed: int, n: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "größe [cm]": rng.normal(170, 9, n).round(1),
            "ward": rng.choice(["Köln", "Süd"], n),
            "died": rng.choice(["no", "yes"], n),
        }
    )


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    table(1).to_csv(tmp_path / "ulm.csv", index=False)
    table(2).to_csv(tmp_path / "kiel.txt", index=False, sep="\t", decimal=",", encoding="cp1252")
    kiel = vb.read(tmp_path / "kiel.txt", separator="\t", encoding="cp1252", decimal=",")
    return {"berlin": table(0), "ulm": tmp_path / "ulm.csv", "kiel": kiel}


def renamed(files: dict[str, Any]) -> dict[str, Any]:
    """The same without marks in names, which no job takes."""
    name = {"größe [cm]": "size"}
    kiel = files["kiel"]
    kiel = vb.read(kiel.path, **{**kiel.options, "rename": name})
    return {"berlin": files["berlin"].rename(columns=name), "ulm": vb.read(files["ulm"], rename=name), "kiel": kiel}


def federation(sites: dict[str, Any], tmp_path: Path, **more: Any) -> vb.Federation:
    return vb.simulate(sites, "died", folder=tmp_path / "fed", **more)


def refused(sites: dict[str, Any], tmp_path: Path, **more: Any) -> dict[str, list[str]]:
    with pytest.raises(vb.SitesRefused) as error:
        federation(sites, tmp_path).recipe(**more)
    return error.value.reasons


def checked(fed: vb.Federation, method: Any, **more: Any) -> None:
    """Do what comes between a recipe and FLARE."""
    fed._write_policies(fed.folder / "ws", method, ())
    fed._check_job(fed.recipe(method, **more).job, fed.folder / "ws")


def test_tables_that_differ_in_form_alone_make_one_job(files: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(renamed(files), tmp_path)
    check = fed.check()
    assert check and check.rows == dict.fromkeys(SITES, 120)
    assert check.features == ("size", "ward") and check.categories == {"ward": ["Köln", "Süd"]}
    job = fed.recipe(vb.Horizontal(max_depth=3), rounds=7, profile="bfv").job
    assert (job.num_rounds, job.profile, job.label_classes) == (7, "bfv", ["no", "yes"])
    assert job.params == {"objective": "binary:logistic", "max_depth": 3, "eval_metric": "auc"}


def test_the_job_is_that_of_the_recipe_and_says_nothing_of_this_machine(files: dict[str, Any], tmp_path: Path) -> None:
    made = federation(renamed(files), tmp_path).recipe(vb.Horizontal(eval_metric="logloss"), name="credit")
    folder = write_folder(made, tmp_path / "jobs")
    assert HorizontalXGBRecipe("credit", **made.job.to_dict()).job == read_job(folder) == made.job
    text = "".join(path.read_text() for path in folder.rglob("*.json"))
    assert str(tmp_path) not in text and not any(site in text for site in SITES)


def test_a_name_with_marks_is_refused_with_what_renames_it(files: dict[str, Any], tmp_path: Path) -> None:
    reasons = refused(files, tmp_path)
    assert set(reasons) == set(SITES)
    assert all("rename={'größe [cm]': 'größe _cm_'}" in one[0] for one in reasons.values())


@pytest.mark.parametrize("name", ["", "a b", "../up", "a,b", "server", "Köln", "st.mary", "-x", "a" * 64, 3, "lo\ncal"])
def test_a_name_that_flare_refuses_is_refused_at_once(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no name for a simulated site"):
        federation({"berlin": table(0), name: table(1), "kiel": table(2)}, tmp_path)
    assert not (tmp_path / "fed").exists()


def test_a_site_cannot_be_there_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there twice"):
        federation({"ulm": table(0), "Ulm": table(1), "kiel": table(2)}, tmp_path)


def test_columns_that_no_reader_makes_equal_are_told_at_every_site(files: dict[str, Any], tmp_path: Path) -> None:
    sites = renamed(files)
    sites["berlin"] = sites["berlin"].drop(columns="ward")
    sites["ulm"] = table(1).rename(columns={"größe [cm]": "sizes"})
    reasons = refused(sites, tmp_path)
    assert set(reasons) == {"berlin", "ulm", "kiel"}
    assert any("no column 'ward', which ulm, kiel has. Remedy" in one for one in reasons["berlin"])
    assert any("no column 'size'" in one and "did you mean 'sizes'? Remedy" in one for one in reasons["ulm"])
    assert any("no column 'sizes'" in one for one in reasons["kiel"])
    assert federation(sites, tmp_path).check().problems == reasons
    chosen = renamed(files) | {"berlin": renamed(files)["berlin"].assign(extra=1.5)}
    assert federation(chosen, tmp_path).recipe(vb.Horizontal(features=["size"])).job.features == ["size"]


def test_names_and_spellings_that_differ_are_read_alike_by_each_policy(files: dict[str, Any], tmp_path: Path) -> None:
    other = table(1).rename(columns={"größe [cm]": "SIZE"}).replace({"ward": {"Köln": "KÖLN"}})
    said = other.assign(died=np.where(other["died"] == "yes", 1, 0))
    fed = federation(renamed(files) | {"ulm": said}, tmp_path, holdout=0.2)
    check = fed.check()
    assert check and {"renamed there", "spelt otherwise at ulm"} <= {
        words for words in ("renamed there", "spelt otherwise at ulm") if any(words in one for one in check.united)
    }
    job = fed.recipe().job
    assert (job.features, job.categories) == (["size", "ward"], {"ward": ["Köln", "Süd"]})
    assert job.label_classes is None and job.params["objective"] == "binary:logistic"  # yes and no are 1 and 0
    for name in (ROWS, HELD_OUT):
        entry = fed._entry(name, "ulm", vb.Horizontal())
        assert entry["rename"] == {"SIZE": "size"} and entry["columns"] == {"ward": {"KÖLN": "Köln"}}
    checked(fed, vb.Horizontal())


@pytest.mark.parametrize("holdout", [0, 0.2])
def test_what_a_reader_says_of_a_column_holds_under_the_name_that_all_sites_share(
    holdout: float, files: dict[str, Any], tmp_path: Path
) -> None:
    sites = renamed(files)
    for site, name in (("ulm", "SMOKES"), ("berlin", "smokes"), ("kiel", "smokes")):
        rows = table(1).rename(columns={"größe [cm]": "size"})
        answers = np.where(rows["size"] > 170, "Yes", "No")
        sites[site] = vb.read(rows.assign(**{name: answers}), columns={name: "yes/no"})
    fed = federation(sites, tmp_path, holdout=holdout)
    assert "smokes" in fed.recipe().job.features
    checked(fed, vb.Horizontal())
    assert fed._readers[ROWS]["ulm"].options["columns"] == {"smokes": "yes/no"}


def test_a_column_of_numbers_here_and_texts_there_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    sites = renamed(files) | {"berlin": table(0).rename(columns={"größe [cm]": "size"}).assign(ward=np.arange(120) % 7)}
    (reason,) = refused(sites, tmp_path)["all sites"]
    assert "'ward' holds numbers at berlin, texts at ulm and kiel" in reason and "columns" in reason


def test_problems_of_all_sites_come_at_once_with_what_reads_the_file(files: dict[str, Any], tmp_path: Path) -> None:
    sites = renamed(files)
    sites["kiel"] = vb.read(files["kiel"].path, separator="\t", decimal=",")  # in another encoding
    sites["ulm"] = vb.read(files["ulm"], separator=";")
    sites["berlin"] = sites["berlin"].drop(columns="died")
    reasons = refused(sites, tmp_path)
    assert any("encoding='windows-1252'" in one for one in reasons["kiel"])
    assert any("separator=','" in one for one in reasons["ulm"])
    assert any("no column 'died', the label" in one for one in reasons["berlin"])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (table(0).iloc[:0], "no rows"),
        (table(0).assign(ward=[["a"]] * 120), "holds lists"),
        (table(0).assign(ward=[{}] * 120), "holds lists"),
        (pd.concat([table(0), table(0)[["ward"]]], axis=1), "there twice"),
        ([1, 2], "is no table"),
        ("nowhere.csv", "there is no file"),
    ],
)
def test_what_is_no_table_is_refused_by_its_site(broken: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words) as error:
        federation({"berlin": table(1), "ulm": table(2), "kiel": broken}, tmp_path).recipe()
    assert "kiel" in str(error.value)


def test_a_label_that_differs_or_says_nothing_is_refused(tmp_path: Path) -> None:
    sites = {site: table(n).drop(columns="größe [cm]") for n, site in enumerate(SITES)}
    mixed = {site: frame.replace({"died": {"yes": "dead", "no": "alive"}}) for site, frame in sites.items()}
    mixed["ulm"] = sites["ulm"].assign(died=np.arange(120) % 2)
    with pytest.raises(ConfigurationError, match="needs a list at berlin, kiel and none at ulm"):
        federation(mixed, tmp_path).recipe()
    constant = {site: frame.assign(died=1) for site, frame in sites.items()}
    with pytest.raises(ConfigurationError, match="single value"):
        federation(constant, tmp_path).recipe()


def test_classes_from_1_on_and_numbers_are_told_apart(tmp_path: Path) -> None:
    sites = {site: table(n).drop(columns="größe [cm]").assign(age=np.arange(120)) for n, site in enumerate(SITES)}
    grades = {site: frame.assign(died=np.arange(120) % 7 + 1) for site, frame in sites.items()}
    job = federation(grades, tmp_path).recipe().job
    assert job.label_classes == [*range(1, 8)] and job.params["num_class"] == 7
    amounts = {site: frame.assign(died=np.arange(120) / 7) for site, frame in sites.items()}
    assert federation(amounts, tmp_path).recipe().job.params["objective"] == "reg:squarederror"


def test_a_data_frame_can_have_a_reader_and_its_dates_are_dates(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    days = [date(2020, 1, 1) + timedelta(days=n) for n in range(120)]
    some = sites["ulm"].assign(day=days, died=[None, *sites["ulm"]["died"][1:]])
    sites = {site: frame.assign(day=pd.to_datetime(days)) for site, frame in sites.items()} | {"ulm": some}
    assert "drop_unlabelled=True" in refused(sites, tmp_path)["ulm"][0]
    fed = federation(sites | {"ulm": vb.read(some, drop_unlabelled=True)}, tmp_path)
    assert fed.recipe(vb.Horizontal(features=["size", "day"])).job.features == ["size", "day"]
    assert fed._entry(ROWS, "ulm", vb.Horizontal())["dates"] == {"day": "YYYY-MM-DD"}
    assert "day" not in fed.check().features
    with pytest.raises(vb.SitesRefused, match="no column is left"):
        federation({site: frame[["died", "day"]] for site, frame in sites.items() if site != "ulm"}, tmp_path).recipe()


def test_dates_as_texts_are_left_out_and_stop_only_a_job_that_names_them(tmp_path: Path) -> None:
    rows = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    days = [f"2024-{1 + n % 12:02}-{1 + n % 28:02}" for n in range(120)]
    fed = federation({site: one.assign(admitted=days) for site, one in rows.items()}, tmp_path)
    assert fed.check() and any("holds dates" in one for one in fed.check().notes["ulm"])
    assert fed.recipe().job.features == ["size", "ward"]
    checked(fed, vb.Horizontal())
    with pytest.raises(vb.SitesRefused, match="YYYY-MM-DD'"):
        checked(fed, vb.Horizontal(features=["size", "admitted"]))


def test_a_reader_names_the_column_of_ids_which_is_no_feature(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    sites = {site: frame.assign(stay=np.arange(120) / 2) for site, frame in sites.items()}
    assert "stay" in federation(sites, tmp_path).check().features
    texts = {site: vb.read(frame.astype({"stay": str}), id="stay") for site, frame in sites.items()}
    fed = federation(texts, tmp_path)
    assert fed.check().features == ("size", "ward") and fed._entry(ROWS, "ulm", vb.Horizontal())["id"] == "stay"


def test_a_column_of_one_value_at_one_site_is_still_a_feature(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    sites["ulm"]["size"] = 170.0
    assert federation(sites, tmp_path).check().features == ("size", "ward")


def test_each_site_has_its_own_policy_with_its_own_reader(files: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(renamed(files), tmp_path, budget=(2, 1e-5), policy={"min_effective_rows": 50})
    workspace = tmp_path / "ws"
    fed._write_policies(workspace, vb.Horizontal(), ())
    of = {site: SitePolicy.load(workspace, site) for site in SITES}
    assert [of[site].data_set(ROWS).separator for site in SITES] == [",", ",", "\t"]
    assert of["kiel"].data_set(ROWS).encoding == "windows-1252"
    assert of["berlin"].registry != of["ulm"].registry and of["ulm"].min_effective_rows == 50
    private = [*(fed.folder / "data").rglob("*"), *workspace.glob("local/veilboost-*.json")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in private}
    assert modes == {0o600, 0o700} and len(private) == 2 + 3
    (workspace / "startup").mkdir()
    (workspace / "startup" / "fed_client.json").write_text("{}")
    assert SitePolicy.load(workspace, "kiel").data_sets == {}  # a kit has one policy


def test_held_out_rows_are_the_others_and_keep_their_texts(files: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(renamed(files), tmp_path, holdout=0.25)
    parts = {name: pd.read_parquet(fed.folder / "data" / "kiel" / f"{name}.parquet") for name in (ROWS, HELD_OUT)}
    assert [len(parts[ROWS]), len(parts[HELD_OUT])] == [90, 30]
    assert parts[ROWS]["size"].str.contains(",").any()  # as the site wrote it: its policy says what that means
    made = fed.recipe()
    assert made.job.eval_data_set == HELD_OUT and not made.job.evaluate_training


@pytest.mark.parametrize("has_label", [True, False])
def test_rows_that_are_alike_are_held_out_together_or_where_columns_are_dealt_by_place(
    has_label: bool, tmp_path: Path
) -> None:
    rows = table(0, 40).rename(columns={"größe [cm]": "size"})
    rows = pd.concat([rows, rows, rows], ignore_index=True)
    others = rows if has_label else rows.drop(columns="died")
    fed = federation({"berlin": rows, "ulm": others, "kiel": others}, tmp_path, holdout=0.3)
    found = [
        [pd.read_parquet(fed.folder / "data" / site / f"{name}.parquet")[["size", "ward"]] for name in (ROWS, HELD_OUT)]
        for site in SITES
    ]
    assert all(len(one) + len(other) == 120 for one, other in found)
    shared = [len(one.merge(other)) for one, other in found]
    assert all(n == 0 if has_label else n > 0 for n in shared)
    assert has_label or all(len(other) == 36 and other.equals(found[0][1]) for _, other in found)


def test_a_selection_goes_to_the_sites_with_what_the_tables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    fed, given = federation(sites, tmp_path), []
    monkeypatch.setattr(fed, "_run", lambda made, method, *consents, progress: given.append((made.job, consents)))
    fed.select(vb.Horizontal(max_depth=2), rounds=3, folds=2, shadows=1)
    job, consents = given[0]
    assert (job.features, job.label_classes, job.params["max_depth"]) == (["size", "ward"], ["no", "yes"], 2)
    assert job.information_value and consents == ("tuning=18", "feature_profile")
    fed.select(vb.Horizontal(objective="reg:squarederror"), rounds=3, folds=2, group="ward")
    job, consents = given[1]
    assert (job.features, job.information_value, consents) == (["size"], False, ("tuning=6",))
    with pytest.raises(ConfigurationError, match="min_features=3 and there are 2 columns"):
        fed.select(min_features=3)
    with pytest.raises(ConfigurationError, match="surprise"):
        fed.select(surprise=1)


def test_rows_by_column_have_the_label_at_one_site(tmp_path: Path) -> None:
    both = table(0).rename(columns={"größe [cm]": "size"}).assign(person=[f"P{n:03}" for n in range(120)])
    sites = {"bank": both[["person", "ward", "died"]], "shop": both[["person", "size"]]}
    made = federation(sites, tmp_path).recipe(vb.vertical(id="person", max_depth=2), rounds=3, profile="elgamal")
    job = made.job
    assert (job.active, job.alignment, job.features) == ("bank", "first", {"bank": ["ward"], "shop": ["size"]})
    assert job.categories == {"bank": {"ward": ["Köln", "Süd"]}}
    checked(federation(sites, tmp_path), vb.vertical(id="person"))  # each party's list is its own
    with pytest.raises(ConfigurationError, match="at one site alone"):
        federation(dict.fromkeys(sites, both), tmp_path).recipe(vb.vertical(id="person"))


def test_a_private_job_says_what_the_caller_says_and_nothing_of_the_tables(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    fed = federation(sites, tmp_path)
    made = fed.recipe(vb.private(budget=(1, 1e-5), bounds={"size": (120, 220)}, label_classes=["no", "yes"]))
    assert made.job.feature_bounds == {"size": [120, 220]} and not made.job.categories
    assert (made.job.epsilon, made.job.delta) == (1.0, 1e-5)
    assert "epsilon" in fed.plan(vb.private(budget=(1, 1e-5), bounds={"size": (120, 220)}, label_classes=["no", "yes"]))
    with pytest.raises(ConfigurationError, match="feature_bounds"):
        fed.recipe(vb.private(budget=(1, 1e-5), label_classes=["no", "yes"]))


def test_a_pure_job_has_an_epsilon_and_no_delta(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    public = {"bounds": {"size": (120, 220)}, "label_classes": ["no", "yes"]}
    fed, method = federation(sites, tmp_path), vb.private(budget=2, method="pure", **public)
    made = fed.recipe(method)
    assert (made.job.epsilon, made.job.delta, made.job.method) == (2.0, None, "pure")
    assert "pure epsilon 2, without a delta" in fed.plan(method)
    entry = fed._entry("rows", "berlin", method)["privacy"]
    assert entry == {"epsilon": 2.0, "delta": 0.0, "pure_epsilon": 2.0}
    whole = federation(sites, tmp_path / "whole", budget=(3, 1e-5))
    assert whole._entry("rows", "berlin", method)["privacy"] == {"epsilon": 3.0, "delta": 1e-5, "pure_epsilon": 2.0}
    for wrong, match in (
        ({"budget": (2, 1e-6), "method": "pure"}, "delta is given"),
        ({"budget": 2}, "delta is missing"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            fed.recipe(vb.private(**wrong, **public))


def test_bounds_that_no_value_meets_are_said_before_anything_runs(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    method = vb.private(budget=(1, 1e-5), bounds={"size": (1.2, 2.2)}, label_classes=["no", "yes"])
    check = federation(sites, tmp_path).check(method)
    assert sorted(check.problems) == sorted(SITES)
    for [text] in check.problems.values():
        assert "no value of 'size' lies within its bounds, 1.2 to 2.2" in text


def test_a_column_that_a_private_job_names_is_missed_before_anything_runs(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    sites["ulm"] = sites["ulm"].rename(columns={"size": "SIZE", "died": "Died"})
    method = vb.private(budget=(1, 1e-5), bounds={"size": (120, 220)}, label_classes=["no", "yes"])
    check = federation(sites, tmp_path).check(method)
    assert list(check.problems) == ["ulm"]
    assert [re.findall("mean '(\\w+)'", one) for one in check.problems["ulm"]] == [["Died"], ["SIZE"]]


def test_a_private_job_asks_for_classes_where_it_would_leave_out_rows(tmp_path: Path) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    sites["kiel"] = sites["kiel"].assign(died=(sites["kiel"]["died"] == "yes").astype(int))
    check = federation(sites, tmp_path).check(vb.private(budget=(1, 1e-5), bounds={"size": (120, 220)}))
    assert sorted(check.problems) == ["berlin", "ulm"]
    assert all("label_classes=[...]" in one for some in check.problems.values() for one in some)


def test_a_private_training_is_charged_before_it_runs_and_also_where_it_fails(tmp_path: Path, monkeypatch) -> None:
    sites = {site: table(n).rename(columns={"größe [cm]": "size"}) for n, site in enumerate(SITES)}
    method = vb.private(budget=(1, 1e-6), bounds={"size": (120, 220)}, label_classes=["no", "yes"])
    fed = federation(sites, tmp_path, budget=(1.5, 1e-5))

    def broken_off(recipe: object, environment: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(JobRecipe, "run", broken_off)
    with pytest.raises(KeyboardInterrupt):
        fed.train(method)
    for again in (fed, federation(sites, tmp_path, budget=(1.5, 1e-5))):  # also where Python was started anew
        with pytest.raises(ConfigurationError, match=r"asks for the budget.* is left"):
            again.train(method)
    with pytest.raises(KeyboardInterrupt):
        fed.train(vb.private(budget=(0.5, 1e-6), bounds={"size": (120, 220)}, label_classes=["no", "yes"]))
    with pytest.raises(ConfigurationError, match="is spent"):
        fed.train(method)
    without = federation(sites, tmp_path)  # the same folder: what was spent there is known
    with pytest.raises(ConfigurationError, match="would not be charged to"):
        without.train(vb.Horizontal())


def test_a_plan_knows_the_shape(files: dict[str, Any], tmp_path: Path) -> None:
    text = federation(renamed(files), tmp_path).plan(rounds=5, profile="masks")
    assert re.search(r"360 rows", text) or "360" in text


def test_what_policies_refuse_comes_before_anything_runs(files: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(renamed(files), tmp_path)
    for profile, rounds, key in (("plain", 10, "allowed_profiles"), ("masks", 100_000, "max_rounds")):
        with pytest.raises(vb.SitesRefused) as error:
            checked(fed, vb.Horizontal(), rounds=rounds, profile=profile)
        assert set(error.value.reasons) == set(SITES)
        assert all(f"Policy key: {key}. Remedy" in one[0] for one in error.value.reasons.values())
        assert all("simulate(" in one[0] for one in error.value.reasons.values())
    checked(fed, vb.Horizontal())
    two = federation({"a": table(0)[["ward", "died"]], "b": table(1)[["ward", "died"]]}, tmp_path)
    with pytest.raises(vb.SitesRefused, match="fewer_than_three_sites"):
        checked(two, vb.Horizontal())
    few = {site: table(n, 30)[["ward", "died"]] for n, site in enumerate(SITES)}
    with pytest.raises(vb.SitesRefused, match="have 90 rows"):
        checked(federation(few, tmp_path), vb.Horizontal())


def test_policies_are_as_json_says(files: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(renamed(files), tmp_path, consents=("plain_profile",))
    fed._write_policies(tmp_path / "ws", vb.Horizontal(), ("tuning=40",))
    document = json.loads((tmp_path / "ws" / "local" / "veilboost-ulm.json").read_text())
    assert {name for name, given in document["consents"].items() if given} == {"plain_profile", "tuning"}
    assert document["consents"]["tuning"] == 40


def searches(seed: int, n: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    search = np.repeat(np.arange(n), 5)
    found = {"search": search, "match": rng.random(5 * n), "price": rng.gamma(2.0, 9.0, 5 * n)}
    return pd.DataFrame(found).assign(relevance=rng.integers(0, 3, 5 * n))


def test_rankings_name_their_queries_once_and_hold_out_whole_ones(tmp_path: Path) -> None:
    tables = {site: searches(n) for n, site in enumerate(SITES)}
    fed = vb.simulate(tables, "relevance", query="search", holdout=0.25, folder=tmp_path / "fed")
    job = fed.recipe().job
    assert (job.query, job.features, job.label_classes) == ("search", ["match", "price"], None)
    assert job.params == {"objective": "rank:ndcg", "eval_metric": "ndcg"}
    drawn = vb.Horizontal(objective="rank:pairwise", lambdarank_pair_method="mean")
    assert fed.recipe(drawn).job.params == {"objective": "rank:pairwise", "lambdarank_pair_method": "mean"}
    assert fed.recipe(vb.Horizontal(objective="reg:squarederror")).job.query is None
    for site in SITES:
        rest, held = (pd.read_parquet(fed._readers[name][site].path) for name in (ROWS, HELD_OUT))
        assert held.search.nunique() == 10 and not set(held.search) & set(rest.search)
        assert len(held) + len(rest) == len(tables[site])
    columns = {"a": tables["ulm"].drop(columns=["price"]), "b": tables["ulm"][["price"]]}
    dealt = vb.simulate(columns, "relevance", query="search", holdout=0.25, folder=tmp_path / "columns")
    held = [pd.read_parquet(dealt._readers[HELD_OUT][site].path) for site in columns]
    assert held[0].search.nunique() == 10 and held[0].match.isin(tables["ulm"].match).all()
    assert (held[1].price.to_numpy() == tables["ulm"].price[tables["ulm"].search.isin(held[0].search)]).all()
    job = dealt.recipe(vb.vertical()).job
    assert (job.query, job.features) == ("search", {"a": ["match"], "b": ["price"]})
    lacking = tables | {"ulm": tables["ulm"].rename(columns={"search": "suche"})}
    with pytest.raises(vb.SitesRefused, match="there is no column 'search', the query"):
        vb.simulate(lacking, "relevance", query="search", folder=tmp_path / "other").recipe()
