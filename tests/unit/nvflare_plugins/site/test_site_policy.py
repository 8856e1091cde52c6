"""A site's policy: strict file, safe defaults, refusals that name the key."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from he_processors.bignum.registry import AUTO, BACKEND_NAMES
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.site.policy import SitePolicy, template
from nvflare_plugins.site.policy_values import ARITHMETIC, Consents, Floors, JobTerms, noting_consents
from nvflare_plugins.site.profiles import PROFILES

SITES = ("site-1", "site-2", "site-3")
JOB = JobTerms(profile="masks", data_set="credit")


def policy(tmp_path: Path, **document: object) -> SitePolicy:
    document.setdefault("data_sets", {"credit": {"path": "data/{site}.csv"}})
    return SitePolicy.from_dict(document, workspace=tmp_path, site="site-1")


def test_the_template_is_the_default_policy(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(template({"credit": "data/{site}.csv"}))
    loaded = SitePolicy.load(tmp_path, "site-1")
    elsewhere = tmp_path / "veilboost_registry" / "site-1" / "ledger_heads"
    assert loaded == replace(policy(tmp_path), ledger_heads=elsewhere)
    assert policy(tmp_path).ledger_heads == tmp_path / "veilboost_ledgers" / "site-1" / "heads"
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
        ({"min_site": 2}, "did you mean min_sites"),
        ({"consents": {"exact_cut": True}}, "did you mean exact_cuts"),
        ({"consents": {"exact_cuts": 1}}, "consents.exact_cuts must be true or false"),
        ({"data_sets": {"a": {"path": "x.csv", "lodaer": "m:f"}}}, "did you mean loader"),
        ({"data_sets": {"a": {}}}, "data_sets.a lacks path"),
        ({"snapshots": {"a": {"query": "SELECT 1", "folder": "x"}}}, "snapshots.a lacks url"),
        ({"snapshots": {"a": {"name": "b"}}}, "snapshots.a has unknown fields: name"),
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
        ({"min_effective_rows": 0}, "min_effective_rows"),
        ({"min_effective_rows": 10**400}, "min_effective_rows"),
        ({"min_rows_per_node": -1}, "min_rows_per_node"),
        ({"max_bins": 1}, "max_bins"),
        ({"max_depth": 0}, "max_depth"),
        ({"max_rounds": "9"}, "max_rounds"),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path: Path, document: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        policy(tmp_path, **document)


@pytest.mark.parametrize("path", ["a" * 300 + ".csv", "b" * 5000, "file.csv/below.csv", "nul\0.csv"])
def test_a_path_that_nothing_can_lie_at_is_refused_when_it_is_read(tmp_path: Path, path: str) -> None:
    (tmp_path / "file.csv").write_text("x\n1\n")
    with pytest.raises(ConfigurationError, match="credit"):
        data_set = policy(tmp_path, data_sets={"credit": {"path": path, "format": "csv", "id": "x"}}).data_set("credit")
        load_ids(data_set)


def test_missing_broken_and_ambiguous_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="site-setup"):
        SitePolicy.load(tmp_path, "site-1")
    (tmp_path / "local").mkdir()
    file = tmp_path / "local" / "veilboost.json"
    for text, said in (
        ("{", "JSON"),
        ("[]", "object"),
        ('{"min_sites": 3, "min_sites": 1}', "site-1: local/veilboost.json: key 'min_sites' stands there twice"),
    ):
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
    assert json.loads(template())["min_key_bits"] == 3072


def _policy(**document):
    return SitePolicy.from_dict({"data_sets": {"d": {"path": "d.csv"}}, **document}, workspace=Path("/w"), site="a")


def test_new_profiles_rules_and_consents_have_safe_defaults():
    policy = _policy()
    assert "paillier" in policy.allowed_profiles and "dp_distributed" in policy.allowed_profiles
    assert not {"dp_trusted", "dp_local", "plain", "ckks"} & set(policy.allowed_profiles)
    assert not any((policy.consents.exact_bins, policy.consents.merge_model, policy.consents.explain))
    assert policy.data_set("d").privacy is None and policy.data_set("d").id is None
    assert policy.vertical.min_rows_per_node == 20 and policy.arithmetic == "auto"


def test_privacy_ids_and_aliases_of_a_data_set():
    entry = {
        "path": "d.csv",
        "id": "customer",
        "aliases": {"income": "x1"},
        "privacy": {"epsilon": 1, "delta": 1e-6, "rows_per_person": 3},
    }
    data_set = _policy(data_sets={"d": entry}).data_set("d")
    assert data_set.id == "customer" and data_set.aliases == {"income": "x1"}
    budget = data_set.privacy
    assert (budget.epsilon, budget.delta, budget.pure_epsilon, budget.rows_per_person) == (1.0, 1e-6, None, 3)


@pytest.mark.parametrize(
    "privacy",
    [
        {"epsilon": 1.0},
        {"epsilon": 0, "delta": 1e-6},
        {"epsilon": 1, "delta": 1},
        {"epsilon": 1, "delta": -1e-9},
        {"epsilon": float("inf"), "delta": 1e-6},
        {"epsilon": 1, "delta": 1e-6, "rows_per_person": 0},
        [],
        {"epsilon": 1, "delta": 1e-6, "surprise": 1},
        {"epsilon": 1e6, "delta": 1e-6},
        {"epsilon": 65, "delta": 1e-6},
        {"epsilon": 1, "delta": 0.5},
        {"epsilon": 1, "delta": 0.011},
        {"epsilon": 1, "delta": 1e-6, "pure_epsilon": 1.1},
        {"epsilon": 1, "delta": 0},
    ],
)
def test_budgets_that_are_none_are_refused(privacy):
    with pytest.raises(ConfigurationError, match="privacy"):
        _policy(data_sets={"d": {"path": "d.csv", "privacy": privacy}})


def test_a_budget_without_a_delta_is_pure() -> None:
    entry = {"path": "d.csv", "privacy": {"epsilon": 1, "delta": 0, "pure_epsilon": 1}}
    assert _policy(data_sets={"d": entry}).data_set("d").privacy.delta == 0


def test_wrong_rules_aliases_and_backends_are_refused():
    for document in (
        {"vertical": {"max_bins": 0}},
        {"vertical": {"max_binz": 8}},
        {"arithmetic": "abacus"},
        {"data_sets": {"d": {"path": "d.csv", "aliases": {"a": "x", "b": "x"}}}},
    ):
        with pytest.raises(ConfigurationError):
            _policy(**document)


def test_a_removed_profile_is_left_out_with_a_warning_that_names_what_does_its_work(caplog):
    policy = _policy(allowed_profiles=["paillier", "okamoto_uchiyama"])
    assert policy.allowed_profiles == ("paillier",)
    assert "profile okamoto_uchiyama was removed" in caplog.text and "allow elgamal in its place" in caplog.text
    assert policy.allowed() == _policy(allowed_profiles=["paillier"]).allowed()


def test_vertical_jobs_need_two_parties_and_the_policys_protection():
    policy = _policy()
    assert policy.check_vertical(JobTerms("paillier", "d", key_bits=3072), ["a", "b"]).name == "d"
    with pytest.raises(ConfigurationError, match="at least one other party"):
        policy.check_vertical(JobTerms("paillier", "d"), ["a"])
    with pytest.raises(PolicyRefusal, match="min_key_bits"):
        policy.check_vertical(JobTerms("paillier", "d", key_bits=2048), ["a", "b"])
    with pytest.raises(PolicyRefusal, match="allowed_profiles"):
        policy.check_vertical(JobTerms("elgamal", "d"), ["a", "b"])
    with pytest.raises(PolicyRefusal, match=r"consents.exact_bins"):
        policy.check_consent("exact_bins", "does not show its bins", "use the preset guarded")


def test_every_backend_that_a_policy_can_name_is_one():
    assert set(ARITHMETIC) <= {AUTO, *BACKEND_NAMES}


def test_floors_of_several_sites_are_the_largest_of_each(tmp_path: Path) -> None:
    one = policy(tmp_path, min_effective_rows=50, min_rows_per_node=9).floors(3)
    other = policy(tmp_path, min_sites=4).floors(3)
    assert one.largest(other) == other.largest(one) == Floors(100, 9, 4)


@pytest.mark.parametrize(
    ("document", "n_sites", "expected"),
    [
        ({}, 5, 3),
        ({"max_colluders": 3}, 5, 5),
        ({"min_sites": 1}, 5, 3),
        ({"min_sites": 1, "consents": {"fewer_than_three_sites": True}}, 5, 3),
        ({"min_sites": 1, "max_colluders": 0, "consents": {"fewer_than_three_sites": True}}, 5, 2),
        ({"min_sites": 1, "consents": {"fewer_than_three_sites": True}}, 1, 1),
    ],
)
def test_as_many_sites_must_carry_weight_as_must_take_part(
    tmp_path: Path, document: dict, n_sites: int, expected: int
) -> None:
    assert policy(tmp_path, **document).floors(n_sites).sites == expected


def test_the_size_of_a_job_is_limited_by_key(tmp_path: Path) -> None:
    limited = policy(tmp_path, max_bins=64, max_depth=5, max_rounds=10)
    limited.check_size(64, 5, 0, 10)
    limited.check_size(64, 0, 32, 10)
    for size, key in (
        ((65, 5, 0, 10), "max_bins"),
        ((64, 6, 0, 10), "max_depth"),
        ((64, 0, 33, 10), "max_depth"),
        ((64, 5, 0, 11), "max_rounds"),
    ):
        with pytest.raises(PolicyRefusal, match=f"Policy key: {key}."):
            limited.check_size(*size)


def test_two_data_sets_on_one_file_are_refused(tmp_path: Path) -> None:
    """Each would have a budget and a memory of its own for the same rows."""
    file = tmp_path / "data" / "rows.csv"
    file.parent.mkdir()
    file.write_text("a,y\n1,0\n")
    (tmp_path / "link.csv").symlink_to(file)
    (tmp_path / "folder").symlink_to(file.parent)
    os.link(file, tmp_path / "hard.csv")
    (tmp_path / "site-1.csv").symlink_to(file)
    by_links = ("link.csv", "folder/rows.csv", "hard.csv", "{site}.csv")
    for way in ("data/rows.csv", str(file), "data/../data/./rows.csv", *by_links):
        document = {"data_sets": {"one": {"path": "data/rows.csv"}, "two": {"path": way}}}
        with pytest.raises(ConfigurationError, match=r"data_sets\.one and data_sets\.two are one file.*Keep one"):
            SitePolicy.from_dict(document, workspace=tmp_path, site="site-1")
    # Files that do not exist yet are told apart by their resolved paths.
    document = {"data_sets": {"one": {"path": "new/{site}.csv"}, "two": {"path": "new/../new/site-1.csv"}}}
    with pytest.raises(ConfigurationError, match="one file"):
        SitePolicy.from_dict(document, workspace=tmp_path, site="site-1")
    copy = tmp_path / "copy.csv"
    copy.write_bytes(file.read_bytes())
    document = {"data_sets": {"one": {"path": "data/rows.csv"}, "two": {"path": "copy.csv"}}}
    assert len(SitePolicy.from_dict(document, workspace=tmp_path, site="site-1").data_sets) == 2


def test_a_data_set_with_a_budget_takes_private_profiles_only(tmp_path: Path) -> None:
    data_sets = {"d": {"path": "d.csv", "privacy": {"epsilon": 1, "delta": 1e-6}}, "free": {"path": "e.csv"}}
    policy = SitePolicy.from_dict({"data_sets": data_sets}, workspace=tmp_path, site="a")
    for profile in PROFILES:
        policy.data_set_for("free", profile)
        if profile.startswith("dp_"):
            policy.data_set_for("d", profile)
            continue
        with pytest.raises(PolicyRefusal, match=r"privacy budget.*consents\.exact_use_of_budgeted_data.*Remedy"):
            policy.data_set_for("d", profile)
    consents = {"exact_use_of_budgeted_data": True}
    consenting = SitePolicy.from_dict({"data_sets": data_sets, "consents": consents}, workspace=tmp_path, site="a")
    assert consenting.data_set_for("d", "masks").name == "d"


def test_a_site_says_in_its_own_words_what_data_are_for(tmp_path: Path) -> None:
    sets = {
        "a": {"path": "a.csv", "data_protection": {"purpose": "care"}},
        "b": {"path": "b.csv", "data_protection": {"purpose": "research", "retention": "a year"}},
    }
    document = {"data_sets": sets, "data_protection": {"controller": "Example", "purpose": "all else"}}
    policy = SitePolicy.from_dict(document, workspace=tmp_path, site="site-1")
    assert policy.statement(["a"])["purpose"] == "care" and policy.statement(["a"])["controller"] == "Example"
    both = policy.statement(["a", "b", "unknown"])
    assert (both["purpose"], both["retention"], both["legal_basis"]) == ("care; research", "a year", "")
    assert policy.statement([])["purpose"] == "all else"
    bare = SitePolicy.from_dict({"data_sets": sets}, workspace=tmp_path, site="site-1")
    assert bare.fingerprint() == policy.fingerprint(), "words allow nothing"
    for wrong in ({"purpse": "x"}, {"purpose": 3}, {"purpose": "two\nlines"}, {"purpose": "x" * 2001}):
        with pytest.raises(ConfigurationError, match="data_protection"):
            SitePolicy.from_dict({"data_protection": wrong}, workspace=tmp_path, site="site-1")


def test_consents_are_noted_where_they_decide(tmp_path: Path) -> None:
    consents = Consents(plain_profile=True, exact_cuts=True)
    assert consents.gives("exact_cuts"), "outside of an attempt nothing is noted"
    with noting_consents() as used:
        assert consents.gives("plain_profile") and not consents.gives("explain")
    assert used == {"plain_profile"}
    assert consents.gives("exact_cuts") and used == {"plain_profile"}
