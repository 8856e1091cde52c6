"""What a site remembers of its policy: the keys that changed since the last job, and nothing that others could read."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.site.memory.store import Memory, hold_id_form, policy_changes
from nvflare_plugins.site.policy import SitePolicy


def policy(folder: Path, **document: object) -> SitePolicy:
    return SitePolicy.from_dict(document, workspace=folder, site="site-1")


def test_changes_are_named_once(tmp_path: Path) -> None:
    assert policy_changes(policy(tmp_path)) == [] and policy_changes(policy(tmp_path)) == []
    wider = policy(tmp_path, consents={"exact_cuts": True}, data_sets={"new": {"path": "x.csv"}}, min_sites=2)
    assert policy_changes(wider) == ["consents.exact_cuts", "data_sets.new", "min_sites"]
    assert policy_changes(wider) == []
    assert policy_changes(policy(tmp_path)) == ["consents.exact_cuts", "data_sets.new", "min_sites"]


def test_a_key_that_a_later_version_knows_has_changed_only_where_it_is_used(tmp_path: Path) -> None:
    for document, changed in (({}, []), ({"min_sites": 2}, ["min_sites"])):
        policy_changes(policy(tmp_path))
        with Memory.open(policy(tmp_path)).transaction() as db:
            db.execute("DELETE FROM policy_keys WHERE name = 'min_sites'")
        assert policy_changes(policy(tmp_path, **document)) == changed


def test_budgets_and_paths_count_as_policy(tmp_path: Path) -> None:
    for entry in ({"path": "a.csv"}, {"path": "b.csv"}, {"path": "b.csv", "privacy": {"epsilon": 9.0, "delta": 1e-6}}):
        last = policy_changes(policy(tmp_path, data_sets={"a": entry}))
    assert last == ["data_sets.a"]


def test_the_memory_holds_no_policy(tmp_path: Path) -> None:
    one = policy(tmp_path, data_sets={"secret-name": {"path": "/secret/path.csv"}})
    policy_changes(one)
    assert b"/secret/path" not in Memory.open(one).path.read_bytes()


FORM = {"prefix": "PAT-", "ignore_padding": True}


def with_ids(folder: Path, **forms: object) -> SitePolicy:
    entries = {name: {"path": f"{name}.csv", "id": "person", "id_form": form} for name, form in forms.items()}
    return policy(folder, data_sets={"no ids": {"path": "y.csv"}, **entries})


def remember_by_id(folder: Path) -> None:
    with Memory.open(policy(folder)).transaction() as db:
        db.execute("INSERT INTO arrays (id, kind, length) VALUES (7, 'hashes', 0)")
        db.execute("INSERT INTO sent_rows (job_id, row_hashes) VALUES ('job', 7)")


def test_the_form_of_ids_stays_as_it_was_at_first(tmp_path: Path) -> None:
    hold_id_form(policy(tmp_path, data_sets={"no ids": {"path": "y.csv"}}))  # holds nothing
    for _ in range(2):
        hold_id_form(with_ids(tmp_path, a=FORM, b=FORM))
    for changed in ({}, {**FORM, "ignore_case": True}):
        with pytest.raises(PolicyRefusal, match="not what it was"):
            hold_id_form(with_ids(tmp_path, a=changed))
    hold_id_form(with_ids(tmp_path, c=FORM))


def test_a_memory_of_before_there_were_forms_knows_ids_as_written(tmp_path: Path) -> None:
    remember_by_id(tmp_path)
    with pytest.raises(PolicyRefusal, match="not what it was"):
        hold_id_form(with_ids(tmp_path, a=FORM))
    hold_id_form(with_ids(tmp_path, a={}))


def test_a_person_has_one_id_in_all_data_sets(tmp_path: Path) -> None:
    with pytest.raises(PolicyRefusal, match="data sets a, b of site-1 do not have one id_form"):
        hold_id_form(with_ids(tmp_path, a={}, b=FORM))
