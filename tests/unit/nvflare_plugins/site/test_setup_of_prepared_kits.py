"""Kits as FLARE's own ``provision`` and ``deploy prepare`` write them: set up, checked, and what would be forgotten."""

from __future__ import annotations

import contextlib
import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from nvflare.tool.deploy.deploy_commands import prepare_deployment

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import parse
from nvflare_plugins.site.flare_boundary import GUARD_STARTED, Role, check_set_up, gaps
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.runtimes import Runtime, check_memory_is_kept, is_prepared, runtime_of, site_name
from nvflare_plugins.site.setup import SetupOptions, check_files, set_up, warnings_of, workspaces
from poc_workspace import run_poc
from tests.support.provisioning import provision

CONFIGS = {
    "docker": {"runtime": "docker", "parent": {"docker_image": "veilboost:1"}},
    "k8s": {"runtime": "k8s", "parent": {"docker_image": "veilboost:1"}},
    "slurm": {"runtime": "slurm", "job_launcher": {"sandbox": "none", "python_path": "/usr/bin/python3"}},
}
APART = ("docker", "k8s")
KEPT_IN = "/data/default/kept"


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = Path(run_poc.__file__).with_name("project.yml")
    return provision(project, tmp_path_factory.mktemp("provisioned"))


@pytest.fixture
def kits(provisioned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(provisioned, tmp_path / "prod_00"))


def prepared(kit: Path, runtime: str) -> Path:
    config = kit.parent / f"{runtime}.yaml"
    config.write_text(yaml.safe_dump(CONFIGS[runtime]))
    with contextlib.redirect_stdout(None):
        prepare_deployment(Namespace(kit=str(kit), output=None, config=str(config)))
    return kit / "prepared" / runtime


def mount(kit: Path, data: Path) -> None:
    """Mount a folder with data and one for what is kept, as an operator does it by hand."""
    datasets = {"rows": {"source": str(data), "mode": "ro"}, "kept": {"source": "/srv/kept", "mode": "rw"}}
    text = yaml.safe_dump({"format_version": 2, "studies": {"default": {"datasets": datasets}}})
    (kit / "local" / "study_runtime.yaml").write_text(text)


def restart(kit: Path) -> None:
    """Leave the note that the guard leaves when FLARE starts."""
    (kit / GUARD_STARTED).write_text("{}")


@pytest.mark.parametrize("runtime", CONFIGS)
@pytest.mark.parametrize("role", ["server", "site-1"])
def test_prepared_kits_are_recognised_set_up_and_then_complete(
    kits: Path, tmp_path: Path, runtime: str, role: str
) -> None:
    kit = prepared(kits / role, runtime)
    assert workspaces(kit) == [(kit, Role.SERVER if role == "server" else Role.SITE)] and is_prepared(kit)
    assert runtime_of(kit) is (Runtime(runtime) if runtime in APART else Runtime.PROCESS)
    assert list(gaps(kit))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.csv").touch()
    mount(kit, tmp_path / "rows")
    options = SetupOptions({"a": "/data/default/rows/a.csv"}, keep_in=KEPT_IN) if runtime in APART else SetupOptions()
    set_up(kit, options)
    components = {c["id"]: c for c in json.loads((kit / "local" / "resources.json").read_text())["components"]}
    assert f"{runtime}_launcher" in components and "resource_manager" in components
    with pytest.raises(ConfigurationError, match="not restarted"):
        check_set_up(kit, role)
    restart(kit)
    check_set_up(kit, role)
    assert set_up(kit, options) == []


@pytest.mark.parametrize("runtime", APART)
def test_a_container_must_not_forget_what_was_released(kits: Path, runtime: str) -> None:
    kit = prepared(kits / "site-1", runtime)
    with pytest.raises(ConfigurationError, match=r"registry, ledgers, runs, ledger_heads.*forget.*--keep-in"):
        set_up(kit)
    with pytest.raises(ConfigurationError, match=r"on no mount with mode rw.*study_runtime.*kept: .*mode: rw"):
        set_up(kit, SetupOptions(keep_in=KEPT_IN))
    mount(kit, kits)
    set_up(kit, SetupOptions(keep_in=KEPT_IN))
    policy = SitePolicy.load(kit, "site-1")
    assert all(str(path).startswith(f"{KEPT_IN}/site-1/") for path in (policy.ledgers, policy.ledger_heads))
    check_memory_is_kept(kit, policy)


def test_a_job_in_a_container_refuses_a_policy_whose_memory_ends_with_it(kits: Path) -> None:
    set_up(kits / "site-1")  # as a process all is well, and deploy prepare copies the policy
    check_memory_is_kept(kits / "site-1", SitePolicy.load(kits / "site-1", "site-1"))
    kit = prepared(kits / "site-1", "docker")
    with pytest.raises(ConfigurationError, match=r"site-1: registry, ledgers.*Remedy"):
        check_memory_is_kept(kit, SitePolicy.load(kit, "site-1"))
    assert any(str(kit) in line for line in warnings_of(kits / "site-1"))


def test_data_are_looked_at_where_a_mount_has_them_on_this_machine(kits: Path, tmp_path: Path) -> None:
    kit = prepared(kits / "site-1", "docker")
    data = tmp_path / "rows"
    data.mkdir()
    mount(kit, data)
    paths = {"a": "/data/default/rows/a.csv"}
    with pytest.raises(ConfigurationError, match=f"there is no file {data}/a.csv"):
        check_files(kit, paths)
    (data / "a.csv").touch()
    check_files(kit, paths)
    with pytest.raises(ConfigurationError, match=r"data set 'b' \(/srv/b.csv\) is on no mount"):
        set_up(kit, SetupOptions({"b": "/srv/b.csv"}, keep_in=KEPT_IN))


def test_slurm_kits_are_warned_that_the_next_prepare_deletes_them(kits: Path) -> None:
    kit = prepared(kits / "site-1", "slurm")
    set_up(kit)
    assert any("deploy prepare` deletes this kit" in text for text in warnings_of(kit))


def test_preparing_again_takes_the_set_up_back_and_check_says_so(kits: Path) -> None:
    kit = prepared(kits / "server", "docker")
    set_up(kit)
    restart(kit)
    assert list(gaps(kit)) == []
    assert list(gaps(prepared(kits / "server", "docker")))


def test_a_study_runtime_that_flare_cannot_read_is_refused_by_name(kits: Path) -> None:
    kit = prepared(kits / "site-1", "docker")
    (kit / "local" / "study_runtime.yaml").write_text("format_version: 1\n")
    with pytest.raises(ConfigurationError, match=r"study_runtime\.yaml cannot be read"):
        set_up(kit, SetupOptions(keep_in=KEPT_IN))


def test_a_site_is_called_as_its_certificate_says_wherever_the_kit_lies(kits: Path, tmp_path: Path) -> None:
    kit = Path(shutil.move(kits / "site-1", tmp_path / "flare"))
    (tmp_path / "site-1.csv").touch()
    check_files(kit, {"a": str(tmp_path / "{site}.csv")})
    assert site_name(kit) == "site-1" and site_name(tmp_path) == tmp_path.name


def test_keep_in_takes_the_ledgers_heads_along_unless_there_are_some(kits: Path, tmp_path: Path) -> None:
    """A ledger without its head is refused: heads must not stay in a kit that is provisioned anew."""
    kept = SetupOptions(keep_in=str(tmp_path / "kept"))
    set_up(kits / "site-1", kept)
    assert SitePolicy.load(kits / "site-1", "site-1").ledger_heads.is_relative_to(tmp_path / "kept")
    set_up(kits / "site-2")
    heads = SitePolicy.load(kits / "site-2", "site-2").ledger_heads
    heads.mkdir(parents=True)
    (heads / "a.head").touch()
    (tmp_path / "kept" / "site-2" / "veilboost_registry").mkdir(parents=True)
    set_up(kits / "site-2", kept)
    assert SitePolicy.load(kits / "site-2", "site-2").ledger_heads == heads


def run(*arguments: str) -> int:
    options = parse(["site-setup", *arguments])
    return options.func(options)


def test_check_says_what_is_missing_changes_nothing_and_exits_with_a_code(
    kits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = kits / "site-1"
    before = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    assert run(str(kit), "--check") == 1
    said = capsys.readouterr().out
    assert "not complete" in said and "class_allow_list" in said and "guard" in said and "no site policy" in said
    assert before == {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    (tmp_path / "a.csv").touch()
    run(str(kit), "--data-set", f"a={tmp_path / 'a.csv'}")
    restart(kit)
    assert run(str(kit), "--check") == 0 and "complete" in capsys.readouterr().out
    (tmp_path / "a.csv").unlink()
    assert run(str(kit), "--check") == 1 and "'a': there is no file" in capsys.readouterr().out
    (tmp_path / "parts").mkdir()
    for path in ("parts", "parts/*.parquet"):
        (tmp_path / "parts" / "1.parquet").touch()
        run(str(kit), "--data-set", f"a={tmp_path / path}", "--memory", "a=external")
        capsys.readouterr()
        assert run(str(kit), "--check") == 0 and "no file" not in capsys.readouterr().out
        assert SitePolicy.load(kit, "site-1").data_sets["a"].memory == "external"
    (tmp_path / "parts" / "1.parquet").unlink()
    assert run(str(kit), "--check") == 1 and "'a': there is no file" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="--check stands alone"):
        run(str(kit), "--check", "--profile", "masks")


def test_check_speaks_of_a_broken_policy(kits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(kits / "site-1")
    (kits / "site-1" / "local" / "veilboost.json").write_text('{"min_site": 3}')
    assert run(str(kits / "site-1"), "--check") == 1 and "min_site" in capsys.readouterr().out


def test_upgrade_completes_the_list_and_offers_without_switching_anything_on(
    kits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = kits / "site-1"
    with pytest.raises(ConfigurationError, match="never set up"):
        run(str(kit), "--upgrade")
    set_up(kit)
    path, list_path = kit / "local" / "veilboost.json", kit / "local" / "resources.json"
    policy = json.loads(path.read_text())
    del policy["consents"]["score_histogram"], policy["max_rounds"]
    policy["allowed_profiles"] = ["masks"]
    path.write_text(json.dumps(policy))
    old = json.loads(list_path.read_text())
    complete = list(old["class_allow_list"])
    old["class_allow_list"] = complete[:-1]
    list_path.write_text(json.dumps(old))
    before, read_before = path.read_bytes(), SitePolicy.load(kit, "site-1").fingerprint()
    capsys.readouterr()
    assert run(str(kit), "--upgrade") == 0
    said = capsys.readouterr().out
    assert "consents.score_histogram = false unless said" in said and "max_rounds = 5000 unless said" in said
    assert "profile elgamal is not allowed: --add-profile elgamal" in said and "min_sites" not in said
    assert path.read_bytes() == before and SitePolicy.load(kit, "site-1").fingerprint() == read_before
    assert set(json.loads(list_path.read_text())["class_allow_list"]) == set(complete)
