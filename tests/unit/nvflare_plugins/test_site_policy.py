"""A site's policy: strict file, safe defaults, refusals that name the key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.site_policy import JobTerms, SitePolicy, template

SITES = ("site-1", "site-2", "site-3")
JOB = JobTerms(profile="masks", data_set="credit")


def policy(tmp_path: Path, **document: object) -> SitePolicy:
    document.setdefault("data_sets", {"credit": {"path": "data/{site}.csv"}})
    return SitePolicy.from_dict(document, workspace=tmp_path, site="site-1")


def test_the_template_is_the_default_policy(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(template({"credit": "data/{site}.csv"}))
    loaded = SitePolicy.load(tmp_path, "site-1")
    assert loaded == policy(tmp_path)
    assert loaded.check_job(JOB, SITES).path == tmp_path / "data" / "site-1.csv"
    assert loaded.registry == tmp_path / "veilboost_registry" / "site-1"
    assert not any(getattr(loaded.consents, name) for name in loaded.consents.__dataclass_fields__)


REFUSALS = [
    ({}, {"profile": "plain"}, SITES, "allowed_profiles"),
    ({}, {"profile": "ckks"}, SITES, "allowed_profiles"),
    ({"allowed_profiles": ["plain"]}, {"profile": "plain"}, SITES, "consents.plain_profile"),
    ({}, {"exact_cuts": True}, SITES, "consents.exact_cuts"),
    ({}, {"min_rows_per_cut": 9}, SITES, "min_rows_per_cut"),
    ({}, {"key_bits": 2048}, SITES, "min_key_bits"),
    ({"tracking": False}, {"tracking": True}, SITES, "tracking"),
    ({}, {"data_set": "bank"}, SITES, "data_sets"),
    ({"min_sites": 2, "max_colluders": 0}, {}, SITES[:2], "consents.fewer_than_three_sites"),
    ({"consents": {"fewer_than_three_sites": True}}, {}, SITES[:2], "min_sites"),
    ({"consents": {"fewer_than_three_sites": True}, "min_sites": 2}, {}, SITES[:2], "max_colluders"),
    ({"max_colluders": 2}, {}, SITES, "max_colluders"),
    ({"min_sites": 4}, {}, SITES, "min_sites"),
]


@pytest.mark.parametrize(("document", "job", "sites", "key"), REFUSALS)
def test_refusals_name_the_policy_key(tmp_path: Path, document: dict, job: dict, sites: tuple, key: str) -> None:
    with pytest.raises(PolicyRefusal, match=f"policy of site-1.*Policy key: {key}\\. Remedy: "):
        policy(tmp_path, **document).check_job(replace(JOB, **job), sites)


def test_consents_open_what_they_name(tmp_path: Path) -> None:
    consents = {"plain_profile": True, "exact_cuts": True, "fewer_than_three_sites": True}
    open_policy = policy(tmp_path, allowed_profiles=["plain"], consents=consents, min_sites=1, max_colluders=0)
    open_policy.check_job(replace(JOB, profile="plain", exact_cuts=True), SITES[:2])
    open_policy.check_job(replace(JOB, profile="plain"), SITES[:1])


@pytest.mark.parametrize("sites", [("site-2", "site-3", "site-4"), ("site-1", "site-2", "site-2", "site-3")])
def test_a_site_list_without_this_site_or_with_a_repeat_is_refused(tmp_path: Path, sites: tuple) -> None:
    with pytest.raises(ConfigurationError):
        policy(tmp_path).check_sites(sites)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"min_site": 2}, "Did you mean 'min_sites'"),
        ({"consents": {"exact_cut": True}}, "Did you mean 'exact_cuts'"),
        ({"consents": {"exact_cuts": 1}}, "consents.exact_cuts must be true or false"),
        ({"data_sets": {"a": {"path": "x.csv", "lodaer": "m:f"}}}, "Did you mean 'loader'"),
        ({"data_sets": {"a": {}}}, "path"),
        ({"data_sets": {"a": {"path": "x.dat"}}}, "format"),
        ({"data_sets": {"a": {"path": "x.csv", "loader": "os.system"}}}, "loader"),
        ({"data_sets": {"a": {"path": "x.csv", "separator": ";;"}}}, "separator"),
        ({"allowed_profiles": ["masks", "none"]}, "allowed_profiles"),
        ({"allowed_profiles": "masks"}, "allowed_profiles"),
        ({"min_key_bits": 1024}, "at least 2048"),
        ({"min_sites": True}, "min_sites"),
        ({"min_sites": 0}, "min_sites"),
        ({"max_colluders": -1}, "max_colluders"),
        ({"unsigned_sessions": "yes"}, "unsigned_sessions"),
        ({"pinned_fingerprints": {"site-2": "abc"}}, "pinned_fingerprints"),
        ({"registry": ""}, "registry"),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path: Path, document: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        policy(tmp_path, **document)


def test_missing_broken_and_ambiguous_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="site-setup"):
        SitePolicy.load(tmp_path, "site-1")
    (tmp_path / "local").mkdir()
    file = tmp_path / "local" / "veilboost.json"
    for text, said in (("{", "JSON"), ("[]", "object"), ('{"min_sites": 3, "min_sites": 1}', "twice")):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=said):
            SitePolicy.load(tmp_path, "site-1")


@pytest.mark.parametrize("site", ["../etc", "a/b", "", "..", "a b"])
def test_a_site_name_cannot_walk_out_of_a_path(tmp_path: Path, site: str) -> None:
    with pytest.raises(ConfigurationError):
        SitePolicy.from_dict({}, workspace=tmp_path, site=site)


def test_inputs_are_plain_names_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "model.json").write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "inputs" / "link.json").symlink_to(tmp_path / "secret.json")
    own = policy(tmp_path)
    assert own.input_file("model.json") == tmp_path / "inputs" / "model.json"
    for name in ("../secret.json", "/etc/passwd", "link.json", "absent.json", "", "..", "a\\b"):
        with pytest.raises(PolicyRefusal, match="inputs"):
            own.input_file(name)


def test_fingerprints_and_key_floor(tmp_path: Path) -> None:
    pinned = policy(tmp_path, pinned_fingerprints={"site-2": ":".join(["AB"] * 32)}).pinned_fingerprints
    assert pinned == {"site-2": "ab" * 32}
    low = SitePolicy.from_dict({"min_key_bits": 512}, workspace=tmp_path, site="a", key_bits_floor=512)
    assert low.min_key_bits == 512
    assert json.loads(template())["min_key_bits"] == 3072
