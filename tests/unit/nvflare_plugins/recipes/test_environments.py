"""Where recipes run: names that FLARE refuses, and a proof of concept that is set up between provisioning and start."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvflare.recipe import PocEnv, SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.recipes import HorizontalXGBRecipe, VeilPocEnv, examples, poc_env
from nvflare_plugins.site.flare_boundary import gaps
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import SetupOptions, set_up, workspaces


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))
    return tmp_path / "poc"


def job(name: str = "job") -> HorizontalXGBRecipe:
    return HorizontalXGBRecipe(name, data_set="d", label="y")


@pytest.mark.parametrize("name", ["", "a b", "ä", ".hidden", "-x", "a/b", "a\n", "x" * 129, 7, None])
def test_names_that_flare_refuses_are_refused_at_the_recipe(name: object) -> None:
    with pytest.raises(ConfigurationError, match=r"no name that FLARE takes.*Remedy"):
        job(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 128])
def test_other_names_are_fine(name: str) -> None:
    assert job(name).name == name


def test_flares_own_proof_of_concept_is_refused_before_it_deletes_or_starts_anything(workspace: Path) -> None:
    with pytest.raises(ConfigurationError, match="VeilPocEnv"):
        job().execute(PocEnv(num_clients=3))
    assert not workspace.exists()


@pytest.mark.parametrize("kept", [".", "kept"])
def test_a_memory_in_the_workspace_that_every_run_deletes_is_refused(workspace: Path, kept: str) -> None:
    with pytest.raises(ConfigurationError, match="every run deletes"):
        VeilPocEnv(num_clients=3, kept=workspace / kept)


def test_containers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="docker_image"):
        VeilPocEnv(num_clients=3, kept=tmp_path / "kept", docker_image="x:1")


def test_everything_is_set_up_before_the_first_process_starts(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").touch()
    seen: list[str] = []

    def start(poc_workspace: str, **_: object) -> None:
        for path, _role in workspaces(Path(poc_workspace)):
            assert list(gaps(path)) == ["it was not restarted after the set-up"]
            seen.append(path.name)
        policy = SitePolicy.load(Path(poc_workspace) / "example_project" / "prod_00" / "site-2", "site-2")
        assert policy.registry == tmp_path / "kept" / "site-2" / "veilboost_registry"
        assert policy.ledger_heads.is_relative_to(tmp_path / "kept") and policy.min_sites == 4
        raise InterruptedError

    monkeypatch.setattr(poc_env, "_start_poc", start)
    env = VeilPocEnv(
        num_clients=3, kept=tmp_path / "kept", set_up=SetupOptions({"a": str(tmp_path / "a.csv")}, min_sites=4)
    )
    with pytest.raises(InterruptedError):
        job().execute(env)
    assert sorted(seen) == ["server", "site-1", "site-2", "site-3"]


def test_data_that_are_not_there_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poc_env, "_start_poc", lambda **_: pytest.fail("started"))
    env = VeilPocEnv(num_clients=3, kept=tmp_path / "kept", set_up=SetupOptions({"a": str(tmp_path / "{site}.csv")}))
    with pytest.raises(ConfigurationError, match=r"there is no file .*/site-1.csv"):
        job().execute(env)


def test_sites_that_do_not_come_up_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("Successfully registered client:site-1")
    poc_env.wait_for_sites([tmp_path])
    with pytest.raises(RuntimeError, match=r"was not up.*other/log\.txt"):
        poc_env.wait_for_sites([tmp_path, tmp_path / "other"], timeout_s=0.0)


def test_logs_that_refusals_point_to_outlive_the_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE deletes the workspace after each run, and before the next one."""
    poc = tmp_path / "poc"
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(poc))
    env = VeilPocEnv(num_clients=1, kept=tmp_path / "kept")
    for text in ("august", "september"):
        kit = poc / "example_project" / "prod_00" / "Größe"
        (kit / "startup").mkdir(parents=True)
        (kit / "startup" / "fed_client.json").write_text("{}")
        (kit / "job").mkdir()
        for place in (kit, kit / "job"):
            (place / "log.txt").write_text(text)
        (kit / "job" / "model.json").write_text("{}")
        env.stop(clean_up=True)
        assert not poc.exists()
    kept = sorted((tmp_path / "kept" / "Größe" / "logs").iterdir())
    assert sorted(place.joinpath("job", "log.txt").read_text() for place in kept) == ["august", "september"]
    assert all(place.stat().st_mode & 0o077 == 0 and not list(place.rglob("model.json")) for place in kept)
    env.stop(clean_up=True)
    assert len(list((tmp_path / "kept" / "Größe" / "logs").iterdir())) == 2


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b', "a#b", "a\\b"])
def test_a_workspace_that_flare_cannot_use_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE would start its processes with half a path and give up after a minute."""
    place = tmp_path / name
    with pytest.raises(ConfigurationError, match=r"FLARE starts no job.*Remedy"):
        set_up(place / "ws")
    with pytest.raises(ConfigurationError, match="FLARE starts no job"):
        examples.prepare(place / "ws")
    with pytest.raises(ConfigurationError, match="FLARE starts no job"):
        job().execute(SimEnv(num_clients=3, workspace_root=str(place)))
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(place / "poc"))
    with pytest.raises(ConfigurationError, match="FLARE starts no job"):
        VeilPocEnv(num_clients=3, kept=tmp_path / "kept")
    assert not place.exists()


def test_data_may_lie_where_there_are_spaces(tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "a.csv").touch()
    options = SetupOptions({"a": str(tmp_path / "my data" / "a.csv")}, keep_in=str(tmp_path / "my kept"))
    set_up(tmp_path / "ws", options)
    policy = SitePolicy.load(tmp_path / "ws", "site-1")
    assert policy.data_set("a").path.is_file() and policy.runs == tmp_path / "my kept" / "site-1" / "veilboost_runs"
