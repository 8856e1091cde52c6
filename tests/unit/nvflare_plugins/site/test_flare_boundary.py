"""The check before every job: what it misses in a workspace, and that set-up leaves nothing for it to miss."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from nvflare.apis.event_type import EventType
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.tool.deploy.deploy_common import SLURM_CLIENT_LAUNCHER, _patch_resources

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.flare_boundary import (
    AUTHORIZATION,
    COMM_CONFIG,
    EXTRAS,
    GUARD_FILE,
    GUARD_STARTED,
    JOB_GUARD_FILE,
    LOCAL,
    RESOURCES,
    SHELL_RIGHTS,
    Role,
    check_set_up,
    check_tracking,
    gaps,
    granted,
    leftovers,
    without_denied,
)
from nvflare_plugins.site.setup import SetupOptions, leftover_gaps, missing, set_up, warnings_of
from tests.support.hostile_apps import HONEST

RIGHTS = {"format_version": "1.0", "permissions": {"project_admin": "any", "lead": {"byoc": "o:site", "ls": "any"}}}


def kit(folder: Path, role: str | None = "client") -> Path:
    (folder / "local").mkdir(parents=True)
    (folder / "startup").mkdir()
    if role is not None:
        (folder / "startup" / f"fed_{role}.json").write_text("{}")
        (folder / f"{AUTHORIZATION}.default").write_text(json.dumps(RIGHTS))
    return folder


def ready(folder: Path, options: SetupOptions = SetupOptions()) -> Path:
    set_up(folder, options)
    (folder / GUARD_STARTED).write_text("{}")
    return folder


def change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize("role", ["client", "server", None])
@pytest.mark.parametrize("extra", [(), *((name,) for name in EXTRAS)])
def test_set_up_leaves_no_gap(tmp_path: Path, role: str | None, extra: tuple[str, ...]) -> None:
    check_set_up(ready(kit(tmp_path / "x", role), SetupOptions(allow=extra)), "x")


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"class_allow_list": ["*"]}, "has *"),
        ({"class_allow_list": ["nvflare_plugins.flare."]}, "has nvflare_plugins.flare."),
        ({"class_allow_list": []}, "lacks"),
        ({"class_allow_list": "all"}, "no class_allow_list"),
        ({"class_list_enforcement_mode": "warn"}, "class_list_enforcement_mode"),
        ({"allow_log_streaming": True}, "stream"),
        ({"allow_log_streaming": 0}, "stream"),
    ],
)
@pytest.mark.parametrize("role", ["client", None])
def test_resources_that_were_put_back_are_found(tmp_path: Path, keys: dict, what: str, role: str | None) -> None:
    folder = ready(kit(tmp_path / "x", role))
    change(folder / RESOURCES, **keys)
    with pytest.raises(ConfigurationError, match="veilboost site-setup") as error:
        check_set_up(folder, "site-1")
    assert what in str(error.value) and "site-1 is not completely set up" in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "[]", "\x00"])
def test_lost_or_spoilt_files_are_found(tmp_path: Path, content: str | None) -> None:
    """``nvflare deploy prepare`` removes resources.json; new provisioning begins without any of them."""
    for file, what in (
        (RESOURCES, "resources"),
        (AUTHORIZATION, "authorization"),
        (GUARD_FILE, "guard"),
        (
            JOB_GUARD_FILE,
            "processes",
        ),
    ):
        folder = ready(kit(tmp_path / f"{what}"))
        (folder / file).unlink() if content is None else (folder / file).write_text(content)
        assert any(what in gap for gap in gaps(folder)), file
        (folder / file).unlink(missing_ok=True)
        ready(folder)
        assert not list(gaps(folder))


@pytest.mark.parametrize("role", ["client", "server"])
def test_the_sites_own_settings_of_messages_stand_where_flare_finds_them_first(tmp_path: Path, role: str) -> None:
    folder = kit(tmp_path / "x", role)
    top, own = folder / COMM_CONFIG, folder / LOCAL / COMM_CONFIG
    ready(folder)
    assert json.loads(top.read_text()) == {} and not list(gaps(folder))
    for change_it in (
        lambda: own.write_text('{"allow_adhoc_conns": false}'),
        lambda: own.rename(own.with_name(f"{COMM_CONFIG}.default")),
        lambda: own.write_text('{"internal": {"scheme": "tcp"}}'),
        lambda: top.write_text("{}"),
        lambda: top.unlink(),
        lambda: (top.unlink(), top.symlink_to(own)),
    ):
        change_it()
        wanted = next(path for path in (own, own.with_name(f"{COMM_CONFIG}.default")) if path.is_file()).read_bytes()
        is_same = top.is_file() and not top.is_symlink() and top.read_bytes() == wanted
        assert is_same or [gap for gap in gaps(folder) if COMM_CONFIG in gap] == list(gaps(folder)) != []
        ready(folder)
        assert not list(gaps(folder)) and top.read_bytes() == wanted and not top.is_symlink()


def test_settings_of_messages_in_another_format_are_refused(tmp_path: Path) -> None:
    folder = ready(kit(tmp_path / "x"))
    (folder / LOCAL / "comm_config.conf").write_text("x = ${?HOME}")
    assert any("comm_config.conf is in a format that is not read here" in gap for gap in gaps(folder))
    with pytest.raises(ConfigurationError, match="write it as"):
        set_up(folder)


JOB = "0d1b2c3d-0000-4000-8000-000000000001"


def test_what_old_jobs_have_left_is_named_with_the_remedy(tmp_path: Path) -> None:
    folder = ready(kit(tmp_path / "x"))
    app = folder / JOB / "app_site-1"
    for name, content in {**HONEST, "config/.__nvfl_sig.json": b"{}"}.items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_bytes(content)
    for written in ("log.txt", "meta.json", "stats_pool_summary.json", "veilboost_waits.json", "tb_events/site-1/e.v2"):
        (folder / JOB / written).parent.mkdir(parents=True, exist_ok=True)
        (folder / JOB / written).write_text("{}")
    (folder / LOCAL / "custom").mkdir()
    (folder / LOCAL / "custom" / "own.py").touch()
    assert leftovers(folder) == [] == list(leftover_gaps(folder, Role.SITE))
    bad = [
        *("app_site-1/config/comm_config.json", "app_site-1/x.py", "app_site-1/config/config_fed_client.conf"),
        *("app_site-1/custom/a.txt", "site-2/resources.json", "fed_client.json", "deep/er/fed_server.yml.default"),
        *("comm_config.conf", "code.pyc", "native.so"),
    ]
    for name in bad:
        (folder / JOB / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / JOB / name).touch()
    (folder / JOB / "link").symlink_to(folder / LOCAL)
    (folder / "json.py").touch()
    found = {f"{JOB}/{name}" for name in [*bad, "link", "app_site-1/custom"]} | {"json.py"}
    assert set(leftovers(folder)) == found and leftovers(folder, is_foreign=True)
    for said in (" ".join(missing(folder)[folder]), " ".join(warnings_of(folder))):
        assert f"and {len(found) - 5} more" in said and "SECURITY.md" in said and "delete these folders" in said
    assert list(leftover_gaps(folder, Role.SIMULATOR)) == []


def test_what_deploy_prepare_leaves_is_found(tmp_path: Path) -> None:
    """FLARE's own step writes resources.json.default anew, with its list and streaming; resources.json goes."""
    folder = ready(kit(tmp_path / "x"))
    default = {
        "class_allow_list": list(DEFAULT_CLASS_ALLOW_LIST),
        "class_list_enforcement_mode": "enforce",
        "allow_log_streaming": True,
        "components": [],
    }
    (folder / f"{RESOURCES}.default").write_text(json.dumps(default))
    assert not list(gaps(folder))
    _patch_resources(folder, "slurm_launcher", SLURM_CLIENT_LAUNCHER, {"sandbox": "none"})
    assert [gap for gap in gaps(folder) if "lacks" in gap or "stream" in gap] == list(gaps(folder))
    assert len(list(gaps(folder))) == 2
    ready(folder)
    assert not list(gaps(folder)) and len(json.loads((folder / RESOURCES).read_text())["components"]) == 2


def test_a_site_that_was_not_restarted_is_found(tmp_path: Path) -> None:
    folder = kit(tmp_path / "x")
    set_up(folder)
    assert list(gaps(folder)) == ["it was not restarted after the set-up"]
    (folder / GUARD_STARTED).write_text("{}")
    assert not list(gaps(folder)) and set_up(folder) == [] and (folder / GUARD_STARTED).exists()
    (folder / AUTHORIZATION).unlink()
    set_up(folder)
    assert not (folder / GUARD_STARTED).exists()


def test_the_server_may_stream_its_own_log(tmp_path: Path) -> None:
    folder = ready(kit(tmp_path / "x", "server"))
    assert "allow_log_streaming" not in json.loads((folder / RESOURCES).read_text()) and not list(gaps(folder))


@pytest.mark.parametrize("who", ["any", "o:site", "n:submitter", ["not o:other", "any"], "not n:somebody"])
@pytest.mark.parametrize("right", ["byoc", "BYOC", "shell_commands", *SHELL_RIGHTS, "*"])
def test_a_right_in_any_form_is_found_and_taken(who: object, right: str) -> None:
    role = who if right == "*" else {"view": "any", right: who}
    document = {
        "format_version": "1.0",
        "permissions": {"Some Role": role, "other": {"byoc": "none", "cat": "not any"}},
    }
    assert len(granted(document)) == 1
    closed = without_denied(document)
    assert granted(closed) == [] and closed["permissions"]["Some Role"]["view"] == (who if right == "*" else "any")
    assert without_denied(closed) == closed


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"permissions": {"a": "any"}},
        {"format_version": "1.0"},
        {"format_version": "1.0", "permissions": {"a": {"byoc": 1}}},
        {"format_version": "1.0", "permissions": {"a": 7}},
    ],
)
def test_rights_that_flare_cannot_read_count_as_granted(document: object) -> None:
    assert granted(document)


@pytest.mark.parametrize(
    "folder", ["/elsewhere", "../elsewhere", "a/../../b", "..", "a\\..\\b", "C:\\x", "", 5, None, "a\n"]
)
def test_a_job_cannot_have_metrics_written_elsewhere(folder):
    with pytest.raises(ConfigurationError, match=r"tracking receiver writes to .*Remedy: leave tb_folder out"):
        check_tracking([object(), TBAnalyticsReceiver(tb_folder=folder)])


def test_tracking_receivers_of_our_jobs_pass():
    check_tracking([object(), TBAnalyticsReceiver(), TBAnalyticsReceiver(tb_folder="metrics/tb_1.x")])


@pytest.mark.parametrize("folder", ["{outside}", "../outside"])
def test_flares_receiver_itself_writes_only_below_the_jobs_folder(tmp_path, folder):
    """It starts before the controller can refuse the job: should FLARE drop this check, this test says so."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    receiver, context = TBAnalyticsReceiver(tb_folder=folder.format(outside=outside)), MagicMock()
    context.get_prop.return_value = context.get_peer_context.return_value = None
    context.get_engine().get_workspace().get_run_dir.return_value = str(run)
    receiver.handle_event(EventType.START_RUN, context)
    assert not receiver._initialized and not outside.exists()
    receiver = TBAnalyticsReceiver()
    receiver.handle_event(EventType.START_RUN, context)
    assert receiver._initialized and (run / "tb_events").is_dir(), "the test shows nothing"
