"""What a policy may say of a cluster, and which jobs take it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.workers import worker_connection
from nvflare_plugins.workers.shards import check_one_cluster
from nvflare_plugins.workers.worker_connection import check_worker, installed, source_digest
from nvflare_plugins.workers.workers import evaluated_elsewhere, not_used

FILES = {"ca": "tls/ca.pem", "cert": "tls/cert.pem", "key": "tls/key.pem"}
LOOPBACK = {"scheduler": "tcp://127.0.0.1:8786", "workers": 2}


def policy_of(site_wide: object = None, of_data_set: object = None) -> SitePolicy:
    data_set: dict[str, Any] = {"path": "a.csv"} | ({} if of_data_set is None else {"cluster": of_data_set})
    document = {"data_sets": {"a": data_set, "b": {"path": "b.csv"}}, "cluster": site_wide}
    return SitePolicy.from_dict(document, workspace=Path("/somewhere"), site="one")


def test_a_data_set_has_its_own_cluster_or_the_sites() -> None:
    policy = policy_of({"scheduler": "tls://dask.bank:8786", "workers": 4, "security": FILES}, LOOPBACK)
    own, general = policy.cluster_for("a"), policy.cluster_for("b")
    assert own is not None and own.workers == 2 and own.security is None
    assert general is not None and general.security is not None
    assert general.security.key == Path("/somewhere/tls/key.pem")
    assert policy_of().cluster_for("a") is None and policy_of().cluster_for("unknown") is None


def test_a_cluster_in_a_policy_of_several_sites_is_for_those_that_it_names() -> None:
    assert policy_of({**LOOPBACK, "sites": ["two", "one"]}).cluster_for("b") is not None
    assert policy_of({**LOOPBACK, "sites": ["two"]}).cluster_for("b") is None


def test_what_a_policy_allows_does_not_depend_on_its_cluster() -> None:
    assert policy_of().fingerprint() == policy_of(LOOPBACK).fingerprint()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({**LOOPBACK, "scheduler": "tcp://10.0.0.7:8786"}, "cluster.scheduler must be tls://host:port"),
        ({**LOOPBACK, "scheduler": "tcp://127.0.0.1.evil.org:8786"}, "cluster.scheduler must be tls://"),
        ({**LOOPBACK, "scheduler": "ucx://127.0.0.1:8786"}, "cluster.scheduler must be tls://"),
        ({**LOOPBACK, "scheduler": "tcp://127.300.1.1:8786"}, "cluster.scheduler must be tls://"),
        ({**LOOPBACK, "scheduler": "tcp://127.0.0.\u0661:8786"}, "cluster.scheduler must be tls://"),
        ({**LOOPBACK, "scheduler": "tls://10.0.0.7:8786"}, "cluster.security is missing"),
        ({**LOOPBACK, "security": FILES}, "uses no certificates"),
        ({**LOOPBACK, "workers": 0}, "cluster.workers must be a whole number from 1"),
        ({**LOOPBACK, "worker": 2}, "did you mean workers"),
        ({"scheduler": "tcp://localhost:8786"}, "cluster lacks workers"),
        ({**LOOPBACK, "scheduler": "tls://h:1", "security": {"ca": "x"}}, "cluster.security lacks cert, key"),
    ],
)
def test_what_is_not_protected_or_not_known_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace(".", r"\.")):
        policy_of(given)
    with pytest.raises(ConfigurationError, match=words.split()[-1]):
        policy_of(None, given)


def test_jobs_that_use_no_cluster_say_so_of_data_sets_that_have_one() -> None:
    assert not_used(policy_of(), ["a", None]) == ()
    (said,) = not_used(policy_of(None, LOOPBACK), ["b", None, "a", "a"])
    assert "data set 'a' was not used" in said


def test_evaluation_rows_go_to_no_cluster_that_the_policy_does_not_name_for_them() -> None:
    other = {**LOOPBACK, "scheduler": "tcp://127.0.0.1:9"}
    check_one_cluster(policy_of(LOOPBACK), "a", "b")
    check_one_cluster(policy_of(LOOPBACK, {**LOOPBACK, "workers": 1}), "a", "b")
    check_one_cluster(policy_of(None, LOOPBACK), "b", "a")
    check_one_cluster(policy_of(LOOPBACK, other), "a", None)
    for training, evaluated in ("ab", "ba"):
        with pytest.raises(
            ConfigurationError, match=rf"data_sets\.{evaluated}\.cluster.*Remedy: name the same in both"
        ):
            check_one_cluster(policy_of(LOOPBACK, other), training, evaluated)
    assert evaluated_elsewhere(policy_of(LOOPBACK), "a", "b") == ()
    assert evaluated_elsewhere(policy_of(None, LOOPBACK), "a", "b") == ()
    (said,) = evaluated_elsewhere(policy_of(None, LOOPBACK), "b", "a")
    assert "data set 'a' was not used" in said


def test_a_worker_must_be_as_this_process_is() -> None:
    good: dict[str, Any] = {**installed(), "sources": source_digest(), "threads": 1, "spills": False}
    check_worker(0, good)
    for change, words in (
        ({"xgboost": "3.1.0"}, "worker 1 .* has xgboost: 3.1.0, not"),
        ({"numpy": "none"}, "has numpy: none"),
        ({"veilboost": "0.1 \x1b[0m"}, r"has veilboost: \?, not"),
        ({"native modules": "00"}, "native modules: another build"),
        ({"sources": "00"}, "another VeilBoost of the same version"),
        ({"threads": 2}, "--nthreads 1"),
        ({"spills": True}, "SPILL=False"),
        ({"spills": None}, "SPILL=False"),
        ({"threads": True}, "--nthreads 1"),
        ({"sources": np.zeros(2)}, "another VeilBoost"),
        ({"numpy": np.zeros(2)}, "has numpy"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            check_worker(1, {**good, **change})


@pytest.mark.parametrize("package", ["he_processors", "dp_components"])
def test_a_worker_with_other_sources_of_any_package_is_told_apart(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = source_digest()
    found = getattr(worker_connection, package)
    copied = shutil.copytree(Path(found.__file__).parent, tmp_path / package, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(found, "__file__", str(copied / "__init__.py"))
    assert source_digest() == here
    next(copied.rglob("[a-z]*.py")).write_bytes(b"# another one")
    assert source_digest() != here
