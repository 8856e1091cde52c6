"""``site-setup --example``: what the job folders of this project ask for is there, and nobody's policy suffers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError
from jobs import examples as jobs
from nvflare_plugins.cli.main import parse
from nvflare_plugins.recipes import examples
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import SetupOptions, missing, set_up

FOLDERS = sorted(path.parent for path in Path(jobs.__file__).parent.glob("*/meta.json"))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "ws"
    options = parse(["site-setup", str(folder), "--example"])
    assert options.func(options) == 0
    return folder


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_what_a_job_folder_names_is_there(workspace: Path, folder: Path) -> None:
    config = json.loads((folder / "app" / "config" / "config_fed_server.json").read_text())
    job = config["workflows"][0]["args"]["job"]
    named = [job.get("data_set"), job.get("eval_data_set"), *job.get("data_sets", [])]
    for site in examples.SITES:
        policy = SitePolicy.load(workspace, site)
        assert all(policy.data_set(name).path.is_file() for name in named if name)
        assert job.get("profile", "masks") in policy.allowed_profiles


def test_horizontal_and_vertical_examples_share_no_name(workspace: Path) -> None:
    data_sets = SitePolicy.load(workspace, "site-1").data_sets
    assert {name for name, data_set in data_sets.items() if data_set.id is None} == {
        "breast",
        "breast_test",
        "credit2",
        "loans",
        "searches",
        "searches_test",
        "stays",
        "stays_test",
    }
    assert jobs.recipe("bagging").job.data_set == "breast"


def test_check_finds_nothing_missing(workspace: Path) -> None:
    assert missing(workspace) == {workspace: []}


def test_data_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    set_up(tmp_path / "ws", SetupOptions({"credit": "/srv/credit.csv"}))
    before = {path: path.read_bytes() for path in (tmp_path / "ws").rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match=r"speaks of data set 'credit'.*Remedy"):
        examples.prepare(tmp_path / "ws")
    assert before == {path: path.read_bytes() for path in (tmp_path / "ws").rglob("*") if path.is_file()}


def test_a_site_of_another_name_is_refused(tmp_path: Path) -> None:
    kit = tmp_path / "hospital-a"
    (kit / "startup").mkdir(parents=True)
    (kit / "startup" / "fed_client.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="site-1, site-2, site-3"):
        examples.prepare(kit)
    assert not (tmp_path / "example_data").exists()


def test_example_stands_alone(tmp_path: Path) -> None:
    options = parse(["site-setup", str(tmp_path / "ws"), "--example", "--profile", "masks"])
    with pytest.raises(ConfigurationError, match="--example stands alone"):
        options.func(options)


def test_a_model_that_was_trained_here_is_kept_for_prediction(workspace: Path) -> None:
    part = {"site-1": "vertical_model.json", "site-2": "private_table.json", "site-3": "private_table.json"}
    for site, name in part.items():
        (workspace / site / "veilboost_runs" / "simulate_job").mkdir(parents=True)
        (workspace / site / "veilboost_runs" / "simulate_job" / name).write_text(site)
    assert any("trained here last" in line for line in examples.prepare(workspace))
    for site in part:
        assert SitePolicy.load(workspace, site).input_file(f"simulate_job.{site}.json").read_text() == site
