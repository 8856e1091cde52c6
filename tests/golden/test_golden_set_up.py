"""Job folders and set-up sites from before: FLARE still builds the one, and the other still runs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import shutil
from pathlib import Path

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from nvflare.private.fed.utils.fed_utils import authorize_build_component

from he_processors.errors import ConfigurationError
from jobs import examples
from nvflare_plugins.flare.kinds import kind_of, read_job
from nvflare_plugins.site.flare_boundary import (
    CLASS_PATHS,
    CONTROLLER,
    EXECUTOR,
    GUARD,
    GUARD_STARTED,
    JOB_GUARD,
    Role,
    check_folder,
    check_set_up,
    is_removed,
    own_components,
)
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.profiles import REMOVED_PROFILES
from nvflare_plugins.site.setup import set_up
from tests.golden.write_history import policy_values

HERE = Path(__file__).parent
SHIPPED = json.loads((HERE / "job_folders.json").read_text())
KITS = {"client": "hospital-a", "server": "server"}
PAIR = {"client": EXECUTOR, "server": CONTROLLER}


def kit(tmp_path: Path, name: str) -> Path:
    """Return a copy of a set-up workspace."""
    return Path(shutil.copytree(HERE / "set_up" / name, tmp_path / name))


def build(config: dict, side: str, workspace: Path) -> list:
    """Build a configuration as FLARE's job process does at a site or server; return its executors or controllers."""
    path = workspace / f"config_fed_{side}.json"
    path.write_text(json.dumps(config))
    args = argparse.Namespace(
        sp_scheme="tcp", sp_target="x:1", client_name="site-1", job_id="j", workspace=str(workspace)
    )
    context, folder = FLContext(), Workspace(str(workspace), "site-1" if side == "client" else "server")
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, folder, private=True)
    context.set_prop(FLContextKey.CURRENT_JOB_ID, "j", private=False)
    context.set_prop(FLContextKey.JOB_META, {}, private=True, sticky=False)
    if side == "client":
        configurator = ClientJsonConfigurator(folder, str(path), args, str(workspace), [])
    else:
        configurator = ServerJsonConfigurator(folder, str(path), args, str(workspace), [])
    configurator.set_component_build_authorizer(authorize_build_component, fl_ctx=context, event_handlers=[])
    configurator.configure()
    if side == "client":
        return [row.executor for row in configurator.executors]
    return [workflow.controller for workflow in configurator.workflows]


OF_KINDS = {  # the classes that folders before 0.12 name
    "alignment.Alignment": "alignment",
    "bucket_ldp.Bucket": "federboost_vertical",
    "dpboost.DpBoost": "dpboost",
    "horizontal.Horizontal": "horizontal",
    "inference.Inference": "vertical_inference",
    "private_trees.PrivateTrees": "private_trees",
    "vertical.Vertical": "vertical",
}


@pytest.mark.parametrize("folder", SHIPPED["folders"])
def test_a_folder_that_names_classes_of_before_is_refused_by_name_with_the_remedy(folder: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "config").mkdir(parents=True)
    for side in KITS:
        file = app / "config" / f"config_fed_{side}.json"
        file.write_text(json.dumps(SHIPPED["folders"][folder][side]))
        with pytest.raises(ConfigurationError, match=r"names nvflare_plugins\.flare\..*removed.*export the recipe"):
            check_folder(app)
        file.unlink()
    with pytest.raises(
        ConfigurationError, match=r"names nvflare_plugins\.flare\..*Controller, which.*export the recipe"
    ):
        (app / "config" / "config_fed_server.json").write_text(json.dumps(SHIPPED["folders"][folder]["server"]))
        read_job(tmp_path)


@pytest.mark.parametrize("side", KITS)
@pytest.mark.parametrize("folder", SHIPPED["folders"])
def test_flare_builds_the_jobs_of_shipped_folders_under_the_list_of_a_set_up_site(
    folder: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = kit(tmp_path, KITS[side])
    set_up(workspace)
    monkeypatch.chdir(tmp_path)
    config = json.loads(json.dumps(SHIPPED["folders"][folder][side]))
    component = config["workflows"][0] if side == "server" else config["executors"][0]["executor"]
    kind = OF_KINDS[
        component["path"].removeprefix("nvflare_plugins.flare.").removesuffix(PAIR[side].rpartition(".Job")[2])
    ]
    component.update(path=PAIR[side], args={**component.get("args", {}), "kind": kind})
    (built,) = build(config, side, workspace)
    assert built.kind == kind
    if side == "server":
        job = kind_of(kind).job.from_dict(built.job)
        given = component["args"]["job"]
        assert given and {name: job.to_dict()[name] for name in given} == given


def test_the_list_is_what_lets_them_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = kit(tmp_path, KITS["client"])
    monkeypatch.chdir(tmp_path)
    path = workspace / "local" / "resources.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "class_allow_list": []}))
    with pytest.raises(Exception, match="not in allow_list"):
        build({"executors": [{"tasks": ["*"], "executor": {"path": EXECUTOR, "args": {}}}]}, "client", workspace)


def test_no_class_path_or_argument_that_was_ever_public_is_gone() -> None:
    public = json.loads((HERE / "class_paths.json").read_text())
    assert public.keys() <= CLASS_PATHS.keys()
    assert {path: sorted(set(CLASS_PATHS[path]) & set(names)) for path, names in public.items()} == public
    for path, names in CLASS_PATHS.items():
        module, _, name = path.rpartition(".")
        taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert set(names) <= set(taken), path
        needed = {one.name for one in taken.values() if one.default is one.empty and one.kind not in (2, 4)}
        assert needed <= set(names), path


def test_job_folders_and_set_up_files_name_public_class_paths_alone() -> None:
    listed = {path for role in Role for path in own_components(role)}
    components = [one for guard in (GUARD, JOB_GUARD) for one in guard["components"]]
    for path in examples.FOLDER.glob("*/app/config/*.json"):
        config = json.loads(path.read_text())
        components += [*config.get("workflows", []), *config["components"]]
        components += [one["executor"] for one in config.get("executors", [])]
    assert listed | {one["path"] for one in components} == set(CLASS_PATHS)
    for one in components:
        assert set(one.get("args", {})) <= set(CLASS_PATHS[one["path"]]), one["path"]


def allow_list(workspace: Path) -> list[str]:
    return json.loads((workspace / "local" / "resources.json").read_text())["class_allow_list"]


@pytest.mark.parametrize("name", KITS.values())
def test_a_workspace_that_an_earlier_version_set_up_is_told_what_completes_it(name: str, tmp_path: Path) -> None:
    """CHANGELOG.md says so: 0.9.1 has closed more than the versions before."""
    workspace = kit(tmp_path, name)
    with pytest.raises(
        ConfigurationError, match=r"guard of its jobs' processes .* is missing.*veilboost site-setup DIR"
    ):
        check_set_up(workspace, name)
    complete(workspace, name)
    check_set_up(workspace, name)


def complete(workspace: Path, name: str) -> None:
    """Set a workspace up again, and restart it."""
    set_up(workspace)
    shutil.copy(HERE / "set_up" / name / GUARD_STARTED, workspace / GUARD_STARTED)  # as the restart leaves it


@pytest.mark.parametrize("name", KITS.values())
def test_one_that_lacks_a_component_is_told_the_command_that_completes_it(name: str, tmp_path: Path) -> None:
    workspace = kit(tmp_path, name)
    complete(workspace, name)
    path, before = workspace / "local" / "resources.json", allow_list(workspace)
    cut = [entry for entry in before if not entry.endswith((".JobExecutor", ".JobController"))]
    assert cut != before
    path.write_text(json.dumps({**json.loads(path.read_text()), "class_allow_list": cut}))
    with pytest.raises(ConfigurationError, match=r"lacks components of VeilBoost.*veilboost site-setup DIR"):
        check_set_up(workspace, name)
    complete(workspace, name)
    check_set_up(workspace, name)
    assert {entry for entry in before if not is_removed(entry)} <= set(allow_list(workspace))
    assert not any(map(is_removed, allow_list(workspace)))


@pytest.mark.parametrize("side", KITS)
def test_a_kind_that_came_later_runs_after_another_set_up_and_not_before(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = kit(tmp_path, KITS[side])
    monkeypatch.chdir(tmp_path)
    config = json.loads((examples.FOLDER / "bagging" / "app" / "config" / f"config_fed_{side}.json").read_text())
    with pytest.raises(Exception, match="not in allow_list"):
        build(config, side, workspace)
    before = allow_list(workspace)
    set_up(workspace)
    (built,) = build(config, side, workspace)
    kept = {entry for entry in before if not is_removed(entry)}
    assert built.kind == "bagging" and kept < set(before) and kept <= set(allow_list(workspace))


@pytest.mark.parametrize(("name", "site"), [("hospital-a", "hospital-a"), ("every-key", "site-1")])
def test_a_stored_policy_says_what_it_said(name: str, site: str, tmp_path: Path) -> None:
    workspace = kit(tmp_path, name)
    golden = json.loads((workspace / "policy_read_as.json").read_text())
    golden["allowed_profiles"] = [one for one in golden["allowed_profiles"] if one not in REMOVED_PROFILES]
    now = policy_values(SitePolicy.load(workspace, site))
    assert _known(now, golden) == golden


def test_setting_up_again_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    workspace = kit(tmp_path, "hospital-a")
    set_up(workspace)
    golden = json.loads((workspace / "policy_read_as.json").read_text())
    assert _known(policy_values(SitePolicy.load(workspace, "hospital-a")), golden) == golden


def _known(now: object, golden: object) -> object:
    """Return of what a policy says now only the keys that it had then: later versions may have more."""
    if isinstance(now, dict) and isinstance(golden, dict):
        return {key: _known(value, golden[key]) for key, value in now.items() if key in golden}
    return now
