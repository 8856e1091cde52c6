"""Workers of one simulated site: what a script does to the policy, without a cluster."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.recipes.examples import put_on_cluster
from nvflare_plugins.site.policy_values import POLICY_FILE


@pytest.fixture
def at_the_end(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Have a cluster of no workers, and keep what the end of the process is to do."""
    distributed = pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    monkeypatch.setattr("dask.config.set", lambda _: None)  # of the whole process
    due: list[Callable[[], Any]] = []
    cluster = SimpleNamespace(scheduler_address="tcp://127.0.0.1:9", close=lambda: None)
    monkeypatch.setattr(distributed, "LocalCluster", lambda **_: cluster)
    monkeypatch.setattr(atexit, "register", lambda what, *args: due.append(lambda: what(*args)))
    return due


def test_the_policy_names_the_cluster_as_long_as_there_is_one(
    tmp_path: Path, at_the_end: list[Callable[[], Any]]
) -> None:
    policy = tmp_path / POLICY_FILE
    policy.parent.mkdir()
    policy.write_text('{"min_sites":  3}')
    policy.chmod(0o640)
    put_on_cluster(tmp_path, "site-2", 2)
    named = {"scheduler": "tcp://127.0.0.1:9", "workers": 2, "sites": ["site-2"]}
    assert json.loads(policy.read_text()) == {"min_sites": 3, "cluster": named}
    for one in at_the_end:
        one()
    assert policy.read_text() == '{"min_sites":  3}' and policy.stat().st_mode & 0o777 == 0o640


def test_a_workspace_without_a_policy_is_told_before_a_cluster_starts(
    tmp_path: Path, at_the_end: list[Callable[[], Any]]
) -> None:
    with pytest.raises(ConfigurationError, match="site-setup"):
        put_on_cluster(tmp_path, "site-2", 2)
    assert not at_the_end
