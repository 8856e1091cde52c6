"""What a job's configuration can call at a site or server: by FLARE's own builder, with the list that set-up writes.

The worked attack: a client configuration that nests the function which merges options into a site's policy.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import os
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.utils.class_loader import load_class

from jobs import examples
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.flare_boundary import (
    CONTROLLER,
    EXECUTOR,
    OUR_PACKAGES,
    TRACKING_RECEIVER,
    Role,
    own_components,
)
from nvflare_plugins.site.setup import set_up
from tests.golden.test_golden_set_up import build

JOBS = Path(examples.__file__).parent
ROLES = {"fed_client.json": Role.SITE, "fed_server.json": Role.SERVER, None: Role.SIMULATOR}


def set_up_as(folder: Path, startup: str | None) -> list[str]:
    """Return the allow-list that set-up really writes."""
    if startup is not None:
        (folder / "startup").mkdir(parents=True)
        (folder / "startup" / startup).write_text("{}")
    set_up(folder)
    return json.loads((folder / "local" / "resources.json").read_text())["class_allow_list"]


def what_may_start(paths: list[str], entries: list[str]) -> list[str]:
    """FLARE's own rule."""
    matches = ComponentPathAuthorizer._path_matches_prefix
    listed = ComponentPathAuthorizer._normalize_allow_list(entries)
    return [path for path in paths if any(matches(path, entry) for entry in listed)]


def our_modules() -> Iterator[str]:
    for package in OUR_PACKAGES:
        yield package
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            yield module.name


@pytest.fixture(scope="module")
def callables() -> list[str]:
    """Every dotted path under our packages that leads to something callable, whoever wrote it; methods included."""
    found = []
    for name in our_modules():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # needs what is not installed here
        for attribute, value in vars(module).items():
            if callable(value):
                found.append(f"{name}.{attribute}")
                if inspect.isclass(value):
                    found += [f"{name}.{attribute}.{method}" for method in vars(value)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("startup", ROLES)
def test_only_the_listed_classes_can_be_built(tmp_path: Path, startup: str | None, callables: list[str]) -> None:
    entries = set_up_as(tmp_path / "w", startup)
    expected = set(own_components(ROLES[startup]))
    assert set(entries) == expected and len(callables) > 5000
    passed = what_may_start([*callables, *DEFAULT_CLASS_ALLOW_LIST], entries)
    # FLARE's rule lets attributes of a listed class pass, but its loader cannot load them.
    attributes = [path for path in passed if path not in expected]
    assert all(any(path.startswith(f"{name}.") for name in expected) for path in attributes)
    for path in attributes:
        with pytest.raises(TypeError, match="Can't load class"):
            load_class(path)
    assert set(passed) - set(attributes) == expected


def test_roles_start_only_their_side() -> None:
    assert set(own_components(Role.SITE)) == {EXECUTOR}
    assert set(own_components(Role.SERVER)) == {CONTROLLER, TRACKING_RECEIVER}
    for path in (EXECUTOR, CONTROLLER):
        assert inspect.isclass(load_class(path)), path


def paths_in(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("path"), str):
            yield node["path"]
        for value in node.values():
            yield from paths_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from paths_in(value)


def test_kept_job_folders_need_no_more() -> None:
    for side, role in (("client", Role.SITE), ("server", Role.SERVER)):
        files = list(JOBS.glob(f"*/app/config/config_fed_{side}.json"))
        used = {path for file in files for path in paths_in(json.loads(file.read_text()))}
        assert len(files) > 10 and used == set(own_components(role))


def test_what_is_listed_writes_nothing_when_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a constructor opened a file")

    built = [load_class(path) for path in own_components(Role.SIMULATOR)]
    job = HorizontalJob("a", "b").to_dict()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    for cls in built:
        cls(job) if cls.__name__.endswith("Controller") else cls()
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


# -- the attack
# ---------------------------------------------------------------------------------------------------------


def rewriting(module: str) -> dict:
    """The call that rewrites a policy, as a job writes it."""
    wishes = {"profiles": ["plain"], "consents": ["plain_profile", "exact_cuts"]}
    return {
        "path": f"{module}._merge_policy",
        "args": {
            "workspace": {"path": f"{module}.Path", "args": {}},
            "role": {"path": f"{module}.Role", "args": {"value": "simulator workspace"}},
            "options": {"path": f"{module}.SetupOptions", "args": wishes},
        },
    }


HONEST = {
    "format_version": 2,
    "executors": [{"tasks": ["veilboost_train"], "executor": {"path": EXECUTOR, "args": {}}}],
}


def nested(call: dict) -> list[dict]:
    """The configuration with the call in every place where FLARE looks for components."""
    executor = {"path": EXECUTOR, "args": {"anything": call}}
    return [
        {**HONEST, "executors": [{"tasks": ["veilboost_train"], "executor": executor}]},
        {**HONEST, "components": [{"id": "x", **call}]},
        {**HONEST, "components": [{"id": "x", "config_type": "dict", **call}]},
        {**HONEST, "task_result_filters": [{"tasks": ["*"], "filters": [call]}]},
    ]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    set_up(tmp_path)
    (tmp_path / "startup").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_cannot_rewrite_a_sites_policy(workspace: Path) -> None:
    policy = workspace / "local" / "veilboost.json"
    before = policy.read_bytes()
    build(HONEST, "client", workspace)
    for module in ("nvflare_plugins.site.setup", "nvflare_plugins.cli.sites.site_setup", f"{EXECUTOR}.execute"):
        for config in nested(rewriting(module)):
            # An attribute of a listed class passes FLARE's rule, but it is in no module that could be loaded.
            with pytest.raises(Exception, match="Can't load class" if "Executor" in module else "not in allow_list"):
                build(config, "client", workspace)
            assert policy.read_bytes() == before


def test_the_attack_is_one(workspace: Path) -> None:
    """With an entry that covers the function, the same configuration rewrites the policy: the list is what stops it."""
    resources = workspace / "local" / "resources.json"
    document = json.loads(resources.read_text())
    document["class_allow_list"].append("nvflare_plugins.site.setup.")
    resources.write_text(json.dumps(document))
    call = rewriting("nvflare_plugins.site.setup")
    with suppress(Exception):  # what it builds is no component, but it has been built
        build({**HONEST, "components": [{"id": "x", **call}]}, "client", workspace)
    policy = json.loads((workspace / "local" / "veilboost.json").read_text())
    assert policy["allowed_profiles"] == ["plain"] and policy["consents"]["exact_cuts"]
