"""What a site remembers of its policy: the keys that changed since the last job, and nothing that others could read."""

from __future__ import annotations

from pathlib import Path

from nvflare_plugins.site.memory.store import Memory, policy_changes
from nvflare_plugins.site.policy import SitePolicy


def policy(folder: Path, **document: object) -> SitePolicy:
    return SitePolicy.from_dict(document, workspace=folder, site="site-1")


def test_changes_are_named_once(tmp_path: Path) -> None:
    assert policy_changes(policy(tmp_path)) == [] and policy_changes(policy(tmp_path)) == []
    wider = policy(tmp_path, consents={"exact_cuts": True}, data_sets={"new": {"path": "x.csv"}}, min_sites=2)
    assert policy_changes(wider) == ["consents.exact_cuts", "data_sets.new", "min_sites"]
    assert policy_changes(wider) == []
    assert policy_changes(policy(tmp_path)) == ["consents.exact_cuts", "data_sets.new", "min_sites"]


def test_budgets_and_paths_count_as_policy(tmp_path: Path) -> None:
    for entry in ({"path": "a.csv"}, {"path": "b.csv"}, {"path": "b.csv", "privacy": {"epsilon": 9.0, "delta": 1e-6}}):
        last = policy_changes(policy(tmp_path, data_sets={"a": entry}))
    assert last == ["data_sets.a"]


def test_the_memory_holds_no_policy(tmp_path: Path) -> None:
    one = policy(tmp_path, data_sets={"secret-name": {"path": "/secret/path.csv"}})
    policy_changes(one)
    assert b"/secret/path" not in Memory.open(one).path.read_bytes()
