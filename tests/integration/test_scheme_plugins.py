"""An additive scheme of others in vertical jobs: loaded from files that each party has pinned, and no others."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from he_processors.additive_schemes import Scheme
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import PlanRequest
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.evidence.audit import threat_model
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.threat_model import is_horizontal, notes_for
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.kinds.vertical import key_owner
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.planner import plan
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site import policy
from nvflare_plugins.site.policy import SitePolicy, hash_of
from nvflare_plugins.site.protocols import PROTOCOLS
from tests.support import plugins
from tests.support.federation import Parties, succeed
from tests.support.he_toys import toy_paillier
from tests.support.vertical_jobs import PARAMS, central, federation, job, merged, run, table

NAME = "acme_damgard_jurik"
PROFILE = f"scheme.{NAME}"
FIELDS = {"profile": PROFILE, "num_rounds": 2}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    plugins.forget()
    yield plugins.install(tmp_path / "packages", monkeypatch, package=plugins.SCHEME_PACKAGE)
    plugins.forget()


@pytest.fixture
def quick_primes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the primes of keys once: of the length that jobs ask for."""
    import acme_numbers.damgard_jurik as scheme  # type: ignore[import-not-found]

    monkeypatch.setattr(scheme, "generate_paillier_key", lambda key_bits, **options: toy_paillier(key_bits))


def pin(**changes: str) -> dict[str, str]:
    return {"distribution": "acme-numbers", "version": "0.2.0", "sha256": hash_of("acme-numbers"), **changes}


def parties_of(folder: Path, **options: int) -> Parties:
    made = federation(folder, **options)
    made.set_policies(plugins={NAME: pin()}, min_key_bits=2048)
    return made


def trained(folder: Path, n_rows: int, **fields: object) -> Parties:
    parties = parties_of(folder, n_sites=2, widths=(2, 2), n_rows=n_rows)
    succeed(run(parties, job(**{**FIELDS, **fields})))
    reference = central(table(n_rows + 90, 4).iloc[:n_rows], 2, fields.get("params", PARAMS))
    assert (
        json.loads(merged(parties))["learner"]["gradient_booster"]
        == json.loads(reference.save_raw("json"))["learner"]["gradient_booster"]
    )
    return parties


@pytest.mark.usefixtures("every_report")
def test_a_scheme_of_others_trains_the_centralized_model_and_the_evidence_names_its_files(
    tmp_path: Path, packages: Path, quick_primes: None
) -> None:
    parties = trained(tmp_path / "sites", 30, key_bits=2048, params={**PARAMS, "max_depth": 2, "max_bin": 8})
    folder = tmp_path / "exported"
    folder.mkdir()
    for site in parties.sites:
        log = export_name(site)
        (folder / log).write_bytes((parties.run_folder(site) / "evidence" / log).read_bytes())
    text = (folder / export_name("site-2")).read_text()
    assert hash_of("acme-numbers") in text and '"PLUGIN"' in text and "decisional composite residuosity" in text
    assert "security_bits" not in text  # of a scheme of others nobody here knows
    report = (parties.run_folder("site-2") / "report.html").read_text()
    assert f"{NAME} acme-numbers 0.2.0" in report and "decisional composite residuosity" in report
    packages.rename(tmp_path / "gone")
    plugins.forget()
    (found,) = verify([folder]).attempts
    assert found.failures == ("the log of server is missing",) and not plugins.imported()


@pytest.mark.slow
def test_keys_of_real_length_train_the_centralized_model(tmp_path: Path) -> None:
    trained(tmp_path / "sites", 300, key_bits=3072)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({}, f"names no plugin {NAME}"),
        ({"sha256": ""}, "without the hash of its files, which encrypt gradients"),
        ({"sha256": "0" * 64}, "are not those that the policy"),
        ({"version": "0.2.1"}, "but version 0.2.0 is installed"),
        ({"distribution": "acme-veil"}, "no distribution acme-veil"),
    ],
)
def test_a_party_that_pins_other_files_or_none_refuses_before_any_import(
    tmp_path: Path, pins: dict[str, str], said: str
) -> None:
    parties = parties_of(tmp_path / "sites")
    parties.set_policies(plugins={NAME: pin(**pins)} if pins else {})
    errors = [str(outcome) for outcome in run(parties, job(**FIELDS)).values()]
    assert any(said in error for error in errors), errors
    assert not plugins.imported() and not list((tmp_path / "sites").rglob("masked_model.json"))


def test_parties_with_different_files_do_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each party's own pin fits its own files, the agreement still names the one that differs."""
    real = policy.load_plugin
    pinned = SitePolicy.from_dict({"plugins": {NAME: pin()}}, workspace=tmp_path, site="site-1")
    monkeypatch.setattr(policy, "load_plugin", lambda of_site, *rest: real(pinned, *rest))
    parties = parties_of(tmp_path / "sites")
    parties.set_policy("site-3", plugins={NAME: pin(sha256="1" * 64)})
    outcomes = run(parties, job(**FIELDS))
    assert any(re.search("site-3 runs plugin acme-numbers 0.2.0 sha256 1111", str(one)) for one in outcomes.values())


def test_a_server_that_does_not_pin_the_scheme_ends_the_job_and_none_imports_it(tmp_path: Path) -> None:
    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    server = SimpleNamespace(_engine=SimpleNamespace(get_workspace=lambda: workspace))
    (tmp_path / "local").mkdir()
    for document in (None, {"plugins": {}}, {"plugins": {"other": pin()}}):
        if document is not None:
            (tmp_path / "local" / "veilboost_server.json").write_text(json.dumps(document))
        with pytest.raises(PolicyRefusal, match=f"pins no plugin {NAME}"):
            JobController._open_plugin(server, job(**FIELDS))
    (tmp_path / "local" / "veilboost_server.json").write_text(json.dumps({"plugins": {NAME: pin()}}))
    assert JobController._open_plugin(server, job(**FIELDS)) is None
    assert server._pinned == pin()["sha256"] and not plugins.imported()


def test_a_party_refuses_where_the_server_pins_other_files(tmp_path: Path) -> None:
    at_site = SitePolicy.from_dict({"plugins": {NAME: pin()}}, workspace=tmp_path, site="site-1")
    place = {"policy": at_site, "server_speaks": PROTOCOLS["vertical"]}
    for other in ("", "0" * 64):
        with pytest.raises(ConfigurationError, match=f"the server pins other files of plugin {NAME} than site-1"):
            key_owner.choose_scheme(job(**FIELDS), SimpleNamespace(**place, server_pins=other))
    assert not plugins.imported()
    at_both = SimpleNamespace(**place, server_pins=pin()["sha256"])
    assert key_owner.choose_scheme(job(**FIELDS), at_both).facts and not key_owner.choose_scheme(job(), at_both).facts


def test_a_private_key_that_may_show_itself_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_primes: None
) -> None:
    import acme_numbers.damgard_jurik as scheme

    monkeypatch.setattr(scheme.DamgardJurikPrivateKey, "__repr__", lambda self: str(self.primes.p), raising=False)
    outcomes = run(parties_of(tmp_path / "sites"), job(**FIELDS, key_bits=2048))
    assert any("may show themselves" in str(one) for one in outcomes.values()), outcomes


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("SCHEME = 1", "no AdditiveScheme"),
        ("from he_processors.paillier import PAILLIER as SCHEME", "another name than its entry point"),
        ("raise ValueError('a secret of the site')", r"cannot be imported at site-\d \(ValueError\)"),
    ],
)
def test_what_is_no_usable_scheme_is_refused(tmp_path: Path, packages: Path, source: str, complaint: str) -> None:
    (packages / "acme_numbers" / "damgard_jurik.py").write_text(source + "\n")
    outcomes = run(parties_of(tmp_path / "sites"), job(**FIELDS))
    assert any(re.search(complaint, str(one)) for one in outcomes.values()), outcomes
    assert not any("secret" in str(one) for one in outcomes.values())


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    parties = parties_of(tmp_path / "sites")
    parties.set_policy(
        "site-2", **{**parties.policy_of("site-2"), "cluster": {"scheduler": "tcp://127.0.0.1:1", "workers": 2}}
    )
    assert any("whose workers load no plugins" in str(one) for one in run(parties, job(**FIELDS)).values())


def test_an_active_party_that_announces_a_key_of_another_scheme_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_primes: None
) -> None:
    real = key_owner.EncryptedGradientOwner.__init__

    def paillier(self: key_owner.EncryptedGradientOwner, *of: object) -> None:
        real(self, *of)
        self.setup = dataclasses.replace(self.setup, scheme=Scheme.PAILLIER.value)

    monkeypatch.setattr(key_owner.EncryptedGradientOwner, "__init__", paillier)
    outcomes = run(parties_of(tmp_path / "sites"), job(**FIELDS, key_bits=2048))
    assert any("another scheme than the job's" in str(one) for one in outcomes.values()), outcomes


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (VerticalJob, {"preset": "sealed"}, "preset sealed needs profile paillier"),
        (VerticalJob, {"preset": "noised", "epsilon": 1.0, "delta": 1e-6}, "preset noised needs profile paillier"),
        (VerticalJob, {"profile": f"plugin.{NAME}"}, "scheme.NAME"),
        (VerticalJob, {"profile": "scheme.a b"}, "scheme.NAME"),
        (VerticalJob, {"point_bytes": 32}, "option of profile elgamal"),
        (VerticalTuningJob, {}, "profile"),
        (HorizontalJob, {}, "plugin.NAME"),
    ],
)
def test_jobs_refuse_what_a_scheme_of_others_is_not_for(kind: type, fields: dict[str, object], said: str) -> None:
    base = {**FIELDS, "data_set": "data", "label": "y"}
    if kind is not HorizontalJob:
        base["active"] = "site-1"
    with pytest.raises(ConfigurationError, match=said):
        kind.from_dict({**base, **fields})


def test_no_plan_is_made_of_what_others_wrote() -> None:
    request = PlanRequest(sites=2, rows=100, features=2, foreign_features=(2,))
    with pytest.raises(ConfigurationError, match="no plan"):
        plan(request, job(**FIELDS))


def test_its_threat_model_is_that_of_vertical_jobs() -> None:
    model, paillier = threat_model(PROFILE, {"claims notes": "Rests on nothing."}), threat_model("paillier")
    assert model.rows() == paillier.rows() and model.ciphertexts == "PLUGIN" and model.notes == ("Rests on nothing.",)
    assert not is_horizontal(PROFILE) and is_horizontal("plugin.x")
    assert set(notes_for(PROFILE)) < set(notes_for("paillier"))
