"""site-setup on every kind of workspace: what it changes, and what it must never change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main, parse
from nvflare_plugins.site.flare_boundary import CONTROLLER, EXECUTOR, GUARD, TRACKING_RECEIVER, Role, gaps, granted
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.profiles import DEFAULT_PROFILES
from nvflare_plugins.site.setup import SetupOptions, set_up, warnings_of, workspaces

AT_SERVER = [CONTROLLER, TRACKING_RECEIVER]
OLD_PREFIX = "nvflare_plugins.flare."
FLARES_RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": "any",
        "org_admin": {"submit_job": "none", "view": "any", "operate": "o:site", "shell_commands": "o:site"},
        "lead": {"submit_job": "any", "manage_job": "n:submitter", "byoc": "any", "Cat": "any"},
        "member": {"view": "any"},
    },
}


def kit(path: Path, role: str = "client") -> Path:
    (path / "startup").mkdir(parents=True)
    (path / "local").mkdir()
    (path / "startup" / f"fed_{role}.json").write_text("{}")
    default = {
        "format_version": 2,
        "class_allow_list": list(DEFAULT_CLASS_ALLOW_LIST),
        "components": [{"id": "kept"}],
    }
    (path / "local" / "resources.json.default").write_text(json.dumps(default))
    (path / "local" / "authorization.json.default").write_text(json.dumps(FLARES_RIGHTS))
    return path


def written(path: Path, name: str) -> dict:
    return json.loads((path / "local" / name).read_text())


def resources(path: Path) -> dict:
    return json.loads((path / "local" / "resources.json").read_text())


def test_a_profile_is_added_to_what_a_policy_allows(tmp_path):
    folder = tmp_path / "ws"
    set_up(folder, SetupOptions(added_profiles=("elgamal",)))
    policy = SitePolicy.load(folder, "site-1")
    assert policy.allowed_profiles == (*DEFAULT_PROFILES, "elgamal")
    set_up(folder, SetupOptions(profiles=("masks",)))
    assert set_up(folder, SetupOptions(added_profiles=("masks", "elgamal")))
    assert SitePolicy.load(folder, "site-1").allowed_profiles == ("masks", "elgamal")
    assert not set_up(folder, SetupOptions(added_profiles=("elgamal",)))


def test_new_simulator_workspace(tmp_path: Path) -> None:
    folder = tmp_path / "ws"
    changes = set_up(folder, SetupOptions({"train": "/data/{site}/train.csv"}))
    assert len(changes) == 6 and any("without certificates" in text for text in changes)
    assert resources(folder)["class_allow_list"] == [EXECUTOR, *AT_SERVER]
    assert not (folder / "local" / "authorization.json").exists()
    policy = SitePolicy.load(folder, "site-2")
    assert policy.unsigned_sessions and policy.min_sites == 3 and policy.allowed_profiles == DEFAULT_PROFILES
    assert policy.data_set("train").path == Path("/data/site-2/train.csv")


def test_production_site_is_strict(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    assert any("restart" in text for text in set_up(site))
    document = resources(site)
    assert document["class_allow_list"] == [EXECUTOR]
    assert document["class_list_enforcement_mode"] == "enforce"
    assert document["components"] == [{"id": "kept"}]
    assert document["allow_log_streaming"] is False
    assert written(site, "veilboost__p_resources.json") == GUARD
    policy = SitePolicy.load(site, "hospital-a")
    assert not policy.unsigned_sessions and not policy.consents.plain_profile and not policy.data_sets


def test_second_call_changes_nothing(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    wishes = SetupOptions({"train": "/d.csv"}, ("masks",), ("exact_cuts",), 4, 2)
    assert set_up(site, wishes)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (site / "local").iterdir()}
    assert set_up(site, wishes) == [] and set_up(site) == []
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (site / "local").iterdir()}


def test_existing_policy_changes_only_where_asked(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    (site / "local" / "veilboost.json").write_text(json.dumps({"min_sites": 5, "data_sets": {"a": {"path": "/a.csv"}}}))
    assert set_up(site, SetupOptions({"b": "/b.csv"}))[-1:] == [
        f'{site}/local/veilboost.json: data_sets.b.path = "/b.csv"'
    ]
    document = json.loads((site / "local" / "veilboost.json").read_text())
    assert document == {"min_sites": 5, "data_sets": {"a": {"path": "/a.csv"}, "b": {"path": "/b.csv"}}}


def test_id_columns_are_written_beside_the_paths(tmp_path: Path) -> None:
    set_up(tmp_path / "ws", SetupOptions({"a": "/a.csv", "b": "/b.csv"}, ids={"a": "customer"}))
    policy = SitePolicy.load(tmp_path / "ws", "site-1")
    assert (policy.data_set("a").id, policy.data_set("b").id) == ("customer", None)


def test_budgets_keep_what_else_a_policy_says_of_privacy(tmp_path: Path) -> None:
    set_up(tmp_path / "ws", SetupOptions({"a": "/a.csv"}, budgets={"a": {"epsilon": 2.0, "delta": 1e-6}}))
    path = tmp_path / "ws" / "local" / "veilboost.json"
    document = json.loads(path.read_text())
    document["data_sets"]["a"]["privacy"]["rows_per_person"] = 3
    path.write_text(json.dumps(document))
    assert set_up(tmp_path / "ws", SetupOptions(budgets={"a": {"epsilon": 2.0, "delta": 1e-6}})) == []
    set_up(tmp_path / "ws", SetupOptions(budgets={"a": {"epsilon": 4.0, "delta": 1e-6}}))
    budget = SitePolicy.load(tmp_path / "ws", "site-1").data_set("a").privacy
    assert (budget.epsilon, budget.delta, budget.rows_per_person) == (4.0, 1e-6, 3)


def test_every_part_of_a_budget_can_be_set_from_the_command_line(tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    data.touch()
    for text, expected in (
        ("a=2,1e-6,pure_epsilon=0.5,rows_per_person=3", (2.0, 1e-6, 0.5, 3)),
        ("a=4,1e-7,rows_per_person=5", (4.0, 1e-7, 0.5, 5)),
        ("a=4,0,pure_epsilon=4", (4.0, 0.0, 4.0, 5)),
    ):
        options = parse(["site-setup", str(tmp_path / "ws"), "--data-set", f"a={data}", "--budget", text])
        assert options.func(options) == 0
        budget = SitePolicy.load(tmp_path / "ws", "site-1").data_set("a").privacy
        assert (budget.epsilon, budget.delta, budget.pure_epsilon, budget.rows_per_person) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a=1",
        "a=1,2,3",
        "a=x,1e-6",
        "=1,1e-6",
        "a=1,1e-6,pure=1",
        "a=1,1e-6,rows_per_person=1.5",
        "a=1,1e-6,epsilon=3",
        "a=1,1e-6,pure_epsilon=1,pure_epsilon=2",
    ],
)
def test_budgets_that_are_none_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["site-setup", str(tmp_path), "--budget", text])
    assert "NAME=" in capsys.readouterr().err


def test_a_file_says_what_options_say_and_options_come_on_top(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    by_options, by_file = tmp_path / "options", tmp_path / "file"
    path = str(tmp_path / "a.csv")
    words = ["--data-set", f"a={path}", "--consent", "exact_cuts", "--separator", "a=;", "--min-sites", "4"]
    assert main(["site-setup", str(by_options), *words]) == 0
    wanted = {"data_sets": {"a": {"path": path, "separator": ";"}}, "consents": {"exact_cuts": True}, "min_sites": 3}
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    from_file = ["site-setup", str(by_file), "--policy", str(tmp_path / "wanted.json"), "--min-sites", "4"]
    assert main(from_file) == 0 and main(from_file) == 0
    policies = [json.loads((folder / "local" / "veilboost.json").read_text()) for folder in (by_options, by_file)]
    of_place = [policy.pop("inputs") for policy in policies]
    assert policies[0] == policies[1] and len({*of_place}) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ('{"min_sites": 3, "min_sites": 2}', "stands there twice"),
        ('{"floor": 1}', "floor"),
        ('{"data_sets": {"a": {"path": "/none/a.csv"}}}', "there is no file"),
    ],
)
def test_a_file_that_no_policy_is_is_refused_before_anything_changes(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wanted.json").write_text(text)
    assert main(["site-setup", str(tmp_path / "ws"), "--policy", str(tmp_path / "wanted.json")]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "ws").exists()


@pytest.mark.parametrize("key", ["registry", "ledgers", "ledger_heads", "runs"])
def test_a_file_cannot_have_what_is_remembered_forgotten(key: str, tmp_path: Path) -> None:
    assert main(["site-setup", str(tmp_path / "ws")]) == 0
    old, new = getattr(SitePolicy.load(tmp_path / "ws", "site"), key), tmp_path / "elsewhere"
    old.mkdir(parents=True, exist_ok=True)
    (old / "remembered").touch()
    wanted = SetupOptions(policy={key: str(new)})
    for _ in range(2):  # a folder that is not there yet, and one that is and lacks what is remembered
        with pytest.raises(ConfigurationError, match=f"{key}: .* would be forgotten"):
            set_up(tmp_path / "ws", wanted)
        new.mkdir(exist_ok=True)
    (new / "remembered").touch()
    set_up(tmp_path / "ws", wanted)
    assert getattr(SitePolicy.load(tmp_path / "ws", "site"), key) == new


def test_existing_resources_are_merged_not_replaced(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    (site / "local" / "resources.json").write_text(json.dumps({"class_allow_list": ["x.Y"], "own": 1}))
    set_up(site)
    changed = {"class_list_enforcement_mode": "enforce", "allow_log_streaming": False}
    assert resources(site) == {"class_allow_list": [EXECUTOR, "x.Y"], **changed, "own": 1}


@pytest.mark.parametrize(
    "before",
    [
        [*DEFAULT_CLASS_ALLOW_LIST, OLD_PREFIX],
        ["*"],
        [EXECUTOR, "nvflare_plugins."],
        ["nvflare_plugins.flare.site_guard", "he_processors.", "nvflare_plugins.flare.horizontal"],
        ["nvflare.private.", "nvflare.private.fed.utils.fed_utils", "os.", "subprocess.run", "builtins.eval"],
    ],
    ids=["earlier_version", "everything", "own_package", "own_modules", "internals"],
)
def test_entries_that_cover_more_than_components_are_taken_out(tmp_path: Path, before: list) -> None:
    site = kit(tmp_path / "hospital-a")
    document = {"class_allow_list": before, "class_list_enforcement_mode": "warn"}
    (site / "local" / "resources.json").write_text(json.dumps(document))
    set_up(site)
    assert resources(site)["class_allow_list"] == [EXECUTOR]
    assert resources(site)["class_list_enforcement_mode"] == "enforce"


def test_flares_components_must_be_asked_for_and_stay_until_taken_back(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    server = kit(tmp_path / "server", "server")
    for folder in (site, server):
        set_up(folder, SetupOptions(allow=("monitoring", "mlflow")))
        listed = resources(folder)["class_allow_list"]
        assert any("metrics_collector" in name for name in listed)
        assert any("mlflow" in name for name in listed) is (folder == server)
        assert set_up(folder) == []
    set_up(site, SetupOptions(allow=("flare",)))
    assert set(DEFAULT_CLASS_ALLOW_LIST) < set(resources(site)["class_allow_list"])
    assert set_up(site, SetupOptions({"a": "/a.csv"})) and set(DEFAULT_CLASS_ALLOW_LIST) < set(
        resources(site)["class_allow_list"]
    )
    set_up(site, SetupOptions(allow=("none",)))
    assert resources(site)["class_allow_list"] == [EXECUTOR]


def test_removed_classes_leave_the_list_and_what_a_site_let_in_beside_them_stays(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    old = "nvflare_plugins.flare.horizontal.HorizontalExecutor"
    for known in ([EXECUTOR], []):
        listed = {"class_allow_list": [old, *known, *DEFAULT_CLASS_ALLOW_LIST, "x.Y"]}
        (site / "local" / "resources.json").write_text(json.dumps(listed))
        assert f"class_allow_list has {old}" in " ".join(gaps(site))
        set_up(site)
        assert set(resources(site)["class_allow_list"]) == {EXECUTOR, *DEFAULT_CLASS_ALLOW_LIST, "x.Y"}


@pytest.mark.parametrize("role", ["client", "server"])
def test_no_role_has_custom_code_or_shell_commands_and_every_other_right_stays(tmp_path: Path, role: str) -> None:
    folder = kit(tmp_path / "x", role)
    set_up(folder)
    after = written(folder, "authorization.json")["permissions"]
    assert granted(FLARES_RIGHTS) and granted(written(folder, "authorization.json")) == []
    for name, rights in after.items():
        assert rights["byoc"] == rights["shell_commands"] == "none" and "Cat" not in rights, name
    assert after["member"]["view"] == "any" and after["lead"]["manage_job"] == "n:submitter"
    assert all(after["project_admin"][right] == "any" for right in ("submit_job", "operate", "view", "get_job_log"))
    assert set_up(folder) == []


def test_a_kit_without_rights_gets_all_but_these(tmp_path: Path) -> None:
    """FLARE asks nobody where neither file is there."""
    site = kit(tmp_path / "hospital-a")
    (site / "local" / "authorization.json.default").unlink()
    set_up(site)
    document = written(site, "authorization.json")
    assert granted(document) == [] and document["permissions"]["lead"]["submit_job"] == "any"


@pytest.mark.parametrize("before", [{}, {"allow_log_streaming": True}], ids=["unsaid", "as_provisioned"])
def test_log_files_of_a_site_stay_there(tmp_path: Path, before: dict) -> None:
    site = kit(tmp_path / "hospital-a")
    listed = {"class_allow_list": [EXECUTOR], **before}
    (site / "local" / "resources.json").write_text(json.dumps(listed))
    assert any("log files stay" in text for text in set_up(site))
    assert resources(site)["allow_log_streaming"] is False


def test_data_and_results_in_flares_workspace_are_warned_of(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    (tmp_path / "data").mkdir()
    (site / "link").symlink_to(tmp_path / "data")
    paths = {"in": str(site / "a.csv"), "linked": str(site / "link" / "b.csv"), "out": str(tmp_path / "data" / "c.csv")}
    set_up(site, SetupOptions(paths))
    text = "\n".join(warnings_of(site))
    assert "'in'" in text and "'linked'" in text and "'out'" not in text and "registry, ledgers, runs lie" in text
    for name in paths:
        set_up(site, SetupOptions({name: f"/elsewhere/{name}.csv"}))
    set_up(site, SetupOptions(keep_in=str(tmp_path / "kept")))
    assert warnings_of(site) == []
    policy = SitePolicy.load(site, "hospital-a")
    assert policy.ledgers == tmp_path / "kept" / "hospital-a" / "veilboost_ledgers"
    assert warnings_of(tmp_path / "new_simulator") == []


def test_results_move_only_after_what_is_remembered_has(tmp_path: Path) -> None:
    site = kit(tmp_path / "hospital-a")
    set_up(site)
    ledgers = SitePolicy.load(site, "hospital-a").ledgers
    ledgers.mkdir(parents=True)
    (ledgers / "credit.ledger").write_text("spent")
    with pytest.raises(ConfigurationError, match="ledgers: move"):
        set_up(site, SetupOptions(keep_in=str(tmp_path / "kept")))
    assert SitePolicy.load(site, "hospital-a").ledgers == ledgers
    target = tmp_path / "kept" / "hospital-a" / "veilboost_ledgers"
    target.parent.mkdir(parents=True)
    ledgers.rename(target)
    set_up(site, SetupOptions(keep_in=str(tmp_path / "kept")))
    assert SitePolicy.load(site, "hospital-a").ledgers == target


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
    assert resources(production / "server")["class_allow_list"] == AT_SERVER
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


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative").mkdir()
    (tmp_path / "relative" / "site-1.csv").touch()
    arguments = [
        "site-setup",
        str(tmp_path / "ws"),
        "--data-set",
        "train=relative/{site}.csv",
        "--min-sites",
        "2",
        "--profile",
        "plain",
        "--consent",
        "plain_profile",
        "--max-colluders",
        "0",
    ]
    args = parse(arguments)
    assert args.func(args) == 0 and "relative/{site}.csv" in capsys.readouterr().out
    policy = SitePolicy.load(tmp_path / "ws", "site-1")
    assert policy.data_set("train").path == Path.cwd() / "relative" / "site-1.csv"
    assert policy.consents.plain_profile and (policy.min_sites, policy.max_colluders) == (2, 0)
    assert args.func(args) == 0 and "nothing to change" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse(["site-setup", str(tmp_path), "--data-set", "nonsense"])
