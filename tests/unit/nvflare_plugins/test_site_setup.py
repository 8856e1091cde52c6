"""site-setup on every kind of workspace: what it changes, and what it must never change."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from he_processors.errors import ConfigurationError
from nvflare_plugins.site_setup import (
    ALLOWED_COMPONENTS,
    Role,
    Wishes,
    add_parser,
    set_up,
    workspaces,
)
from nvflare_plugins.site_policy import DEFAULT_PROFILES, SitePolicy


def kit(path: Path, role: str = "client") -> Path:
    (path / "startup").mkdir(parents=True)
    (path / "local").mkdir()
    (path / "startup" / f"fed_{role}.json").write_text("{}")
    default = {"format_version": 2, "class_allow_list": ["nvflare.a.B"], "components": [{"id": "kept"}]}
    (path / "local" / "resources.json.default").write_text(json.dumps(default))
    return path


def resources(path: Path) -> dict:
    return json.loads((path / "local" / "resources.json").read_text())


def test_new_simulator_workspace(tmp_path: Path) -> None:
    folder = tmp_path / "ws"
    changes = set_up(folder, Wishes({"train": "/data/{site}/train.csv"}))
    assert len(changes) == 5 and any("without certificates" in text for text in changes)
    assert resources(folder)["class_allow_list"] == [*DEFAULT_CLASS_ALLOW_LIST, ALLOWED_COMPONENTS]
    policy = SitePolicy.load(folder, "site-2")
    assert policy.unsigned_sessions and policy.min_sites == 3 and policy.allowed_profiles == DEFAULT_PROFILES
    assert policy.data_set("train").path == Path("/data/site-2/train.csv")


def test_production_site_keeps_flares_defaults_and_is_strict(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    set_up(site)
    document = resources(site)
    assert document["class_allow_list"] == ["nvflare.a.B", ALLOWED_COMPONENTS]
    assert document["components"] == [{"id": "kept"}]
    assert document["allow_log_streaming"] is False
    policy = SitePolicy.load(site, "hospital-a")
    assert not policy.unsigned_sessions and not policy.consents.plain_profile and not policy.data_sets


def test_second_call_changes_nothing(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    wishes = Wishes({"train": "/d.csv"}, ("masks",), ("exact_cuts",), 4, 2)
    assert set_up(site, wishes)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (site / "local").iterdir()}
    assert set_up(site, wishes) == [] and set_up(site) == []
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (site / "local").iterdir()}


def test_existing_policy_changes_only_where_asked(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    (site / "local" / "veilboost.json").write_text(json.dumps({"min_sites": 5, "data_sets": {"a": {"path": "/a.csv"}}}))
    assert set_up(site, Wishes({"b": "/b.csv"}))[2:] == [f'{site}/local/veilboost.json: data_sets.b.path = "/b.csv"']
    document = json.loads((site / "local" / "veilboost.json").read_text())
    assert document == {"min_sites": 5, "data_sets": {"a": {"path": "/a.csv"}, "b": {"path": "/b.csv"}}}


def test_id_columns_are_written_beside_the_paths(tmp_path: Path) -> None:
    set_up(tmp_path / "ws", Wishes({"a": "/a.csv", "b": "/b.csv"}, ids={"a": "customer"}))
    policy = SitePolicy.load(tmp_path / "ws", "site-1")
    assert (policy.data_set("a").id, policy.data_set("b").id) == ("customer", None)


def test_budgets_keep_what_else_a_policy_says_of_privacy(tmp_path: Path) -> None:
    set_up(tmp_path / "ws", Wishes({"a": "/a.csv"}, budgets={"a": {"epsilon": 2.0, "delta": 1e-6}}))
    path = tmp_path / "ws" / "local" / "veilboost.json"
    document = json.loads(path.read_text())
    document["data_sets"]["a"]["privacy"]["rows_per_person"] = 3
    path.write_text(json.dumps(document))
    assert set_up(tmp_path / "ws", Wishes(budgets={"a": {"epsilon": 2.0, "delta": 1e-6}})) == []
    set_up(tmp_path / "ws", Wishes(budgets={"a": {"epsilon": 4.0, "delta": 1e-6}}))
    budget = SitePolicy.load(tmp_path / "ws", "site-1").data_set("a").privacy
    assert (budget.epsilon, budget.delta, budget.rows_per_person) == (4.0, 1e-6, 3)


def test_every_part_of_a_budget_can_be_set_from_the_command_line(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    for text, expected in (
        ("a=2,1e-6,pure_epsilon=0.5,rows_per_person=3", (2.0, 1e-6, 0.5, 3)),
        ("a=4,1e-7,rows_per_person=5", (4.0, 1e-7, 0.5, 5)),
    ):
        options = parser.parse_args(
            ["site-setup", str(tmp_path / "ws"), "--data-set", "a=/a.csv", "--budget", text]
        )
        assert options.func(options) == 0
        budget = SitePolicy.load(tmp_path / "ws", "site-1").data_set("a").privacy
        assert (budget.epsilon, budget.delta, budget.pure_epsilon, budget.rows_per_person) == expected


@pytest.mark.parametrize(
    "text",
    ["a", "a=1", "a=1,2,3", "a=x,1e-6", "=1,1e-6", "a=1,1e-6,pure=1", "a=1,1e-6,rows_per_person=1.5",
     "a=1,1e-6,epsilon=3", "a=1,1e-6,pure_epsilon=1,pure_epsilon=2"],
)
def test_budgets_that_are_none_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["site-setup", str(tmp_path), "--budget", text])
    assert "NAME=" in capsys.readouterr().err


def test_existing_resources_are_merged_not_replaced(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    (site / "local" / "resources.json").write_text(json.dumps({"class_allow_list": ["x.Y"], "own": 1}))
    set_up(site)
    changed = {"class_allow_list": ["x.Y", ALLOWED_COMPONENTS], "allow_log_streaming": False}
    assert resources(site) == {**changed, "own": 1}


@pytest.mark.parametrize("before", [{}, {"allow_log_streaming": True}], ids=["unsaid", "as_provisioned"])
def test_log_files_of_a_site_stay_there(tmp_path: Path, before: dict) -> None:
    site = kit(tmp_path / "hospital-a")
    listed = {"class_allow_list": [ALLOWED_COMPONENTS], **before}
    (site / "local" / "resources.json").write_text(json.dumps(listed))
    assert any("log files stay" in text for text in set_up(site))
    assert resources(site) == {"class_allow_list": [ALLOWED_COMPONENTS], "allow_log_streaming": False}


def test_poc_workspace_sets_up_all_sites_and_the_server_of_the_newest_round(tmp_path: Path) -> None:
    for production in ("prod_00", "prod_01"):
        for name, role in (("site-1", "client"), ("site-2", "client"), ("server", "server"), ("admin@x.org", "admin")):
            kit(tmp_path / "example_project" / production / name, role)
    found = workspaces(tmp_path)
    assert [(path.parent.name, path.name, role) for path, role in found] == [
        ("prod_01", "server", Role.SERVER),
        ("prod_01", "site-1", Role.SITE),
        ("prod_01", "site-2", Role.SITE),
    ]
    assert workspaces(tmp_path / "example_project") == found
    set_up(tmp_path)
    production = tmp_path / "example_project" / "prod_01"
    assert not (production / "server" / "local" / "veilboost.json").exists()
    assert ALLOWED_COMPONENTS in resources(production / "server")["class_allow_list"]
    assert not (production / "admin@x.org" / "local" / "resources.json").exists()


@pytest.mark.parametrize("content", ["[]", "{", '{"class_allow_list": "all"}'])
def test_unusable_resources_are_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    site = kit(tmp_path / "hospital-a")
    (site / "local" / "resources.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"resources\.json"):
        set_up(site)
    assert (site / "local" / "resources.json").read_text() == content


def test_foreign_folder_admin_kit_and_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.txt").write_text("")
    with pytest.raises(ConfigurationError, match="no FLARE workspace"):
        set_up(tmp_path / "photos")
    with pytest.raises(ConfigurationError, match="administrator"):
        set_up(kit(tmp_path / "admin@x.org", "admin"))
    with pytest.raises(ConfigurationError, match="not a folder"):
        set_up(tmp_path / "photos" / "holiday.txt")


@pytest.mark.parametrize(
    ("component", "may_run"),
    [
        ("nvflare_plugins.flare.horizontal.HorizontalExecutor", True),
        ("nvflare_plugins.flare.horizontal.HorizontalController", True),
        ("nvflare_plugins.wire.evidence.EvidenceLog", False),
        ("nvflare_plugins_of_someone.flare.Evil", False),
        ("os.system", False),
    ],
)
def test_allow_list_admits_our_components_only(tmp_path: Path, component: str, may_run: bool) -> None:
    """By FLARE's own rule: its other components stay allowed, nothing else of ours may be started by a job."""
    set_up(tmp_path / "ws")
    entries = ComponentPathAuthorizer._normalize_allow_list(resources(tmp_path / "ws")["class_allow_list"])
    assert any(ComponentPathAuthorizer._path_matches_prefix(component, entry) for entry in entries) is may_run


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = ["site-setup", str(tmp_path / "ws"), "--data-set", "train=relative/{site}.csv", "--min-sites", "2",
                 "--profile", "plain", "--consent", "plain_profile", "--max-colluders", "0"]  # fmt: skip
    args = parser.parse_args(arguments)
    assert args.func(args) == 0 and "relative/{site}.csv" in capsys.readouterr().out
    policy = SitePolicy.load(tmp_path / "ws", "site-1")
    assert policy.data_set("train").path == Path.cwd() / "relative" / "site-1.csv"
    assert policy.consents.plain_profile and (policy.min_sites, policy.max_colluders) == (2, 0)
    assert args.func(args) == 0 and "nothing to change" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parser.parse_args(["site-setup", str(tmp_path), "--data-set", "nonsense"])
