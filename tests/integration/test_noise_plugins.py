"""Noise of others in private jobs: priced at every site and at the server from the files that each has pinned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.plan import PlanRequest
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.private_trees.job import JobPlan
from nvflare_plugins.kinds.private_trees.noisy_sums import noise_at_site, server_of
from nvflare_plugins.kinds.private_trees.planner import plan
from nvflare_plugins.site import policy
from nvflare_plugins.site.policy import SitePolicy, hash_of
from tests.support import plugins
from tests.support.private_federation import BUDGET, DATA, PrivateFederation, job_of

NAME = "acme_staircase"
PURE = {"method": "pure", "trust": "trusted_aggregator", "delta": None, "epsilon": 1.0, "components": {"n_trees": 4}}
NOISED = {**PURE, "noise": f"plugin.{NAME}"}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plugins.forget()
    plugins.install(tmp_path / "packages", monkeypatch, package=plugins.NOISE_PACKAGE)
    yield
    plugins.forget()


def pin(**changes: str) -> dict[str, str]:
    return {"distribution": "acme-noise", "version": "0.3.0", "sha256": hash_of("acme-noise"), **changes}


def server(folder: Path, **changes: str) -> Path:
    (folder / "local").mkdir(parents=True)
    document = {"plugins": {NAME: pin(**changes)}}
    (folder / "local" / "veilboost_server.json").write_text(json.dumps(document))
    return folder


def federation(folder: Path, **changes: object) -> PrivateFederation:
    made = PrivateFederation(folder, **{"plugins": {NAME: pin()}, **changes})
    for site in made.sites:
        made.set_budget(site, {**BUDGET, "pure_epsilon": 2.0})
    return made


@pytest.mark.usefixtures("every_report")
def test_a_mechanism_of_others_trains_private_trees(tmp_path: Path) -> None:
    sites = federation(tmp_path / "sites")
    run = sites.run_private(job_of(**NOISED), server_at=server(tmp_path / "server")).succeed()
    assert len({outcome.hmac for outcome in run.outcomes.values()}) == 1
    release = f"{NAME} acme-noise 0.3.0 sha256 {hash_of('acme-noise')}"
    assert len(run.server_spends) == 4
    _, event, epsilon, delta = run.server_spends[-1]
    assert "integer_noise" in event and release in event and "shift 65 n_coordinates 2" in event
    assert 0.999 < epsilon <= 1.0 and delta == 0
    for site in sites.sites:
        spent = sites.ledger(site).job_spent("job")
        assert 0.999 < spent.pure_epsilon <= 1.0 and spent.mu_squared == 0
        folder = sites.workspace(site) / "runs" / "job"
        evidence = (folder / "evidence" / f"{site}.evidence.jsonl").read_text()
        assert f'"noise":"{release}"' in evidence.replace('": "', '":"') and evidence.count("integer_noise") == 4
        assert release in (folder / "report.html").read_text()
    folders = [sites.workspace(site) / "runs" / "job" / "evidence" for site in sites.sites]
    assert verify(folders).failures == ()


def test_its_noise_is_told_as_large_as_it_is(tmp_path: Path) -> None:
    """An edge in 8 integers costs a little more than a ratio at each: 14 in 100 more noise than Laplace."""
    data_sets = {DATA: {"path": "a.parquet", "privacy": {**BUDGET, "pure_epsilon": 2.0}}}
    policy = SitePolicy.from_dict({"plugins": {NAME: pin()}, "data_sets": data_sets}, workspace=tmp_path, site="site-1")
    others = noise_at_site(policy, job_of(**NOISED))
    theirs, ours = JobPlan.of(job_of(**NOISED), 3, (), others), JobPlan.of(job_of(**PURE), 3)
    assert 1.05 < theirs.training.leaf_noise[0] / ours.training.leaf_noise[0] < 1.3
    assert theirs.epsilon_after_rounds()[-1] == pytest.approx(1.0, rel=1e-6)
    shown = plan(PlanRequest(policy=policy), job_of(**NOISED)).text
    assert "derived from the mass function" in shown and NAME in shown
    with pytest.raises(ConfigurationError, match="plan at a site whose policy names it"):
        plan(PlanRequest(), job_of(**NOISED))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sha256": "0" * 64}, "are not those that the policy"),
        ({"version": "0.3.1"}, "but version 0.3.0 is installed"),
        ({"sha256": ""}, "needs sha256"),
        ({"distribution": "acme-other"}, "no distribution acme-other"),
    ],
)
def test_a_server_refuses_other_files_before_any_import(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(VeilBoostError, match=said):
        server_of(job_of(**NOISED), 3, server(tmp_path / "server", **changes))
    assert not plugins.imported()


def test_a_server_that_pins_nothing_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(PolicyRefusal, match=f"pins no plugin {NAME}"):
        server_of(job_of(**NOISED), 3, tmp_path)
    assert not plugins.imported()


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({}, f"names no plugin {NAME}"),
        ({"version": "0.3.1"}, "but version 0.3.0 is installed"),
        ({"sha256": "0" * 64}, "are not those that the policy"),
        ({"sha256": ""}, "without the hash of its files"),
    ],
)
def test_a_site_that_pins_other_files_or_none_refuses(tmp_path: Path, pins: dict[str, str], said: str) -> None:
    sites = federation(tmp_path / "sites")
    at = server(tmp_path / "server")
    sites.set_policy("site-2", plugins={NAME: pin(**pins)} if pins else {})
    run = sites.run_private(job_of(**NOISED), server_at=at)
    assert said in str(run.error("site-2")) and isinstance(run.error("site-2"), PolicyRefusal)
    assert not run.server_spends and not list((tmp_path / "sites").rglob("model.json"))


def test_sites_with_different_files_do_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each site's own pin fits its own files, the agreement still names the one that differs."""
    real = policy.load_plugin
    monkeypatch.setattr(policy, "load_plugin", lambda of_site, *rest: real(sites_policy, *rest))
    sites_policy = SitePolicy.from_dict({"plugins": {NAME: pin()}}, workspace=tmp_path, site="site-1")
    sites = federation(tmp_path / "sites")
    sites.set_policy("site-3", plugins={NAME: pin(sha256="1" * 64)})
    run = sites.run_private(job_of(**NOISED), server_at=server(tmp_path / "server"))
    assert "another value of 'noise_of_others'" in str(run.error("site-1")) and not run.server_spends


def test_a_server_whose_mechanism_draws_something_else_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = server(tmp_path / "server")
    staircase = metadata.entry_points(group="veilboost.noises", name=NAME)[NAME].load()
    module = __import__(f"{type(staircase.calibrate(1.0, 9, 1)).__module__}", fromlist=["Staircase"])
    drawn = module.Staircase.draw
    monkeypatch.setattr(module.Staircase, "draw", lambda self, n, bits: drawn(self, n, bits) // 2)
    with pytest.raises(ConfigurationError, match="not drawn from the mass function"):
        server_of(job_of(**NOISED), 3, at)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trust": "distributed"}, "shares of it"),
        ({"method": "default", "delta": 1e-6}, "Choose method=pure"),
        ({"components": {"candidates": "mixed"}}, "paid candidates"),
        ({"noise": "acme"}, "plugin.NAME"),
    ],
)
def test_a_job_refuses_noise_where_nothing_is_derived(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        job_of(**{**NOISED, **fields})


def test_no_plan_is_made_without_the_files() -> None:
    with pytest.raises(ConfigurationError, match="not loaded here"):
        JobPlan.of(job_of(**NOISED), 3)
