"""The recipe refuses early what no site would accept, and writes job folders without code or paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nvflare.recipe import SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe, VerticalXGBRecipe
from nvflare_plugins.site.setup import set_up

MULTI_OUTPUT = {"objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree"}


def export(folder: Path, **settings: object) -> tuple[dict, dict, dict]:
    HorizontalXGBRecipe("test_job", **{"data_set": "d", "label": "y", **settings}).export(str(folder))
    job = folder / "test_job"
    assert not list(job.rglob("custom"))
    app = next(path for path in job.iterdir() if path.is_dir())
    server = next(job.rglob("config_fed_server.json"))
    client = next(job.rglob("config_fed_client.json"))
    assert app
    return tuple(json.loads(path.read_text()) for path in (job / "meta.json", server, client))  # type: ignore[return-value]


def test_export_holds_the_job_and_nothing_else(tmp_path: Path) -> None:
    params = {"objective": "binary:logistic", "max_depth": 4}
    meta, server, client = export(tmp_path, params=params, num_rounds=7, eval_data_set="e", min_rows_per_cut=25)
    args = server["workflows"][0]["args"]
    job = HorizontalJob.from_dict(args["job"])
    assert job == HorizontalJob("d", "y", params, 7, eval_data_set="e", min_rows_per_cut=25)
    assert meta["min_clients"] == 3 and "mandatory_clients" not in meta
    assert client["executors"][0]["executor"]["args"] == {"kind": "horizontal"} and client["components"] == []
    assert [component["id"] for component in server["components"]] == ["tb_receiver"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"profile": "cleartext"}, "profile"),
        ({"cuts": "guess"}, "cuts"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"surprise": 1}, "surprise"),
        ({"params": {"tree_method": "exact"}}, "tree_method"),
        ({"params": {"max_dept": 3}}, "max_dept"),
        ({"params": {"monotone_constraints": {"z": 1}}, "features": ["a", "b"]}, "z"),
        ({"early_stopping_rounds": 3}, "eval_data_set"),
        ({"sites": []}, "sites"),
        ({"sites": ["a", "a"]}, "sites"),
        ({"sites": "bank"}, r"sites=\['bank'\]"),
        ({"params": {"max_bin": 2}}, "max_bin 3 or more"),
        ({"params": MULTI_OUTPUT, "categories": {"c": ["x", "y"]}}, "leave multi_strategy out"),
        ({"sites": ["a", "b"], "min_clients": 3}, "min_clients"),
        ({"label": ""}, "label"),
        ({"label": "weight {kg}"}, "brace"),
        ({"features": ["a", "{$HOME}"]}, "brace"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings: dict, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        HorizontalXGBRecipe("test_job", **{"data_set": "d", "label": "y", **settings})


def test_vector_leaves_without_categories_and_three_bins_are_fine() -> None:
    HorizontalXGBRecipe("test_job", data_set="d", label="y", params={**MULTI_OUTPUT, "max_bin": 3}, sites=("b", "a"))


def test_constraints_on_columns_wait_for_the_columns() -> None:
    params = {"monotone_constraints": {"age": 1}}
    assert HorizontalXGBRecipe("test_job", data_set="d", label="y", params=params).job.params == params


def test_a_simulator_that_is_not_set_up_is_one_clear_error(tmp_path: Path) -> None:
    """It was a hundred lines of FLARE's traceback, after starting three sites."""
    recipe = HorizontalXGBRecipe("test_job", data_set="d", label="y")
    folder = tmp_path / "test_job"
    with pytest.raises(ConfigurationError, match=r"veilboost site-setup .*/test_job --data-set"):
        recipe.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path)))
    assert not folder.exists()
    set_up(folder)
    (folder / "local" / "resources.json").unlink()
    with pytest.raises(ConfigurationError, match="not completely set up"):
        recipe.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path)))


# -- vertical ----------------------------------------------------------------------------------------------------------


FACTS = {"active": "a", "data_set": "d", "label": "y"}


def test_guarded_jobs_ask_for_as_many_bins_as_policies_allow_unless_told():
    assert VerticalXGBRecipe("one", **FACTS).job.params["max_bin"] == 32
    assert VerticalXGBRecipe("two", **FACTS, params={"max_bin": 8}).job.params["max_bin"] == 8
    assert "max_bin" not in VerticalXGBRecipe("three", **FACTS, preset="exact").job.params


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sites": ["b", "c"]}, "active party"),
        ({"profile": "masks"}, "profile"),
        ({"preset": "open"}, "preset"),
        ({"params": {"booster": "dart"}}, "dart"),
        ({"params": {"objective": "rank:ndcg"}}, "rank"),
        ({"key_bits": 1024}, "key_bits"),
        ({"surprise": 1}, "surprise"),
        ({"alignment": "frist"}, "did you mean 'first'"),
    ],
)
def test_what_no_party_would_accept_is_refused_here(wrong, words):
    with pytest.raises(ConfigurationError, match=words):
        VerticalXGBRecipe("job", **{**FACTS, **wrong})
