"""What is refused before a private byte leaves a site: unsupported parameters, other columns, jobs and versions."""

from __future__ import annotations

import socket
import threading

import pandas as pd
import pytest

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt import session
from nvflare_plugins.pooled import attempt as pooled_attempt
from tests.support import federation as support
from tests.support.federation import Federation, succeed
from tests.support.hostile_jobs import (
    assert_failed_cleanly,
    private_frames,
    small_job,
    small_table,
)
from tests.support.memories import states

# -----------------------------------------------------------------------


UNSUPPORTED = {
    "approx": {"tree_method": "approx"},
    "exact": {"tree_method": "exact"},
    "gblinear": {"booster": "gblinear"},
    "survival": {"objective": "survival:cox"},
    "aft": {"objective": "survival:aft"},
    "refresh": {"process_type": "update"},
    "updater": {"updater": "refresh"},
    "gpu": {"device": "cuda"},
    "sampling": {"sampling_method": "gradient_based"},
    "broadcast": {"debug_synchronize": True},
    "cache": {"max_cached_hist_node": 1},
    "margin": {"base_margin": [0.0]},
    "typo": {"max_dept": 3},
    "weights": {"feature_weights": [1, 2, 3]},
    "two quantiles": {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]},
    "metric": {"eval_metric": "ndcg"},
    "custom": {"objective": "my:own"},
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_parameters_are_refused_before_anything_is_sent(federation, what):
    frames: list = []
    base = {"objective": "binary:logistic", "max_bin": 8}
    outcomes = federation.run(small_job(params={**base, **UNSUPPORTED[what]}), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    [name] = [key for key in UNSUPPORTED[what] if key != "quantile_alpha"] or ["quantile_alpha"]
    refusals = [str(e) for e in outcomes.values() if isinstance(e, ConfigurationError)]
    value = str(UNSUPPORTED[what][name])
    assert refusals and all(name in text or value in text or "quantile_alpha" in text for text in refusals)
    assert not frames


def give(federation: Federation, site: str, frame: pd.DataFrame) -> None:
    frame.to_parquet(federation.workspace(site) / "train.parquet", index=False)


OTHER_DATA = {
    "column": (lambda f: f.rename(columns={"b": "b2"}), "b2"),
    "order": (lambda f: f[["b", "a", "c", "y"]], "'b'"),
    "more": (lambda f: f.assign(z=1.0), "'z'"),
    "fewer": (lambda f: f.drop(columns="c"), "'c'"),
}


@pytest.mark.parametrize("what", OTHER_DATA)
def test_other_columns_are_refused_by_name_before_a_private_byte(federation, what):
    change, name = OTHER_DATA[what]
    give(federation, "site-2", change(small_table().iloc[:20]))
    frames: list = []
    outcomes = federation.run(small_job(), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    refusals = [str(e) for e in outcomes.values() if isinstance(e, ConfigurationError)]
    assert refusals and all(name in text for text in refusals)
    assert not private_frames(frames)


# Each site reads the job from the same server; a changed one at one site must still be found.
OTHER_JOBS = {
    "categories": {"categories": {"a": ["0", "1"]}, "unknown_category_is_missing": True},
    "label_classes": {"label_classes": ["1", "0"]},
    "parameters": {"params": {"objective": "binary:logistic", "eta": 0.1}},
    "profile": {"profile": "bfv"},
    "rounds": {"num_rounds": 9},
}


@pytest.mark.parametrize("what", OTHER_JOBS)
def test_another_job_at_one_site_is_refused_before_a_private_byte(federation, monkeypatch, what):
    real = support.run_site

    def run_site(job, place, *rest):
        return real(small_job(**OTHER_JOBS[what]) if place.site == "site-2" else job, place, *rest)

    monkeypatch.setattr(support, "run_site", run_site)
    frames: list = []
    outcomes = federation.run(small_job(), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(e, (ConfigurationError, ProtocolError)) for e in outcomes.values())
    assert not private_frames(frames)


def test_another_wheel_at_one_site_is_refused_before_a_private_byte(federation, monkeypatch):
    real_run, real_versions, this = support.run_site, session.versions, threading.local()

    def run_site(job, place, *rest):
        this.site = place.site
        return real_run(job, place, *rest)

    def versions():
        return {**real_versions(), **({"xgboost": "3.2.99"} if this.site == "site-2" else {})}

    monkeypatch.setattr(support, "run_site", run_site)
    monkeypatch.setattr(pooled_attempt, "versions", versions)
    frames: list = []
    # Where the sites grow the trees, they agree on an arithmetic instead of the wheel.
    outcomes = federation.run(small_job(engine="xgboost"), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(e, ConfigurationError) and "xgboost 3.2.99" in str(e) for e in outcomes.values())
    assert not private_frames(frames)


@pytest.mark.parametrize("said", ["1.0", "9.9", "3.2.99", ""])
def test_an_arithmetic_that_nobody_knows_is_refused_before_a_private_byte(federation, monkeypatch, said):
    real_run, real, this = support.run_site, pooled_attempt.arithmetic_here, threading.local()

    def run_site(job, place, *rest):
        this.site = place.site
        return real_run(job, place, *rest)

    monkeypatch.setattr(support, "run_site", run_site)
    monkeypatch.setattr(pooled_attempt, "arithmetic_here", lambda job: said if this.site == "site-2" else real(job))
    frames: list = []
    outcomes = federation.run(small_job(engine="own"), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    refusal = outcomes["site-1"]
    assert isinstance(refusal, ConfigurationError) and "no arithmetic that is known here (3.2, 3.3, 3.4)" in str(
        refusal
    )
    assert not private_frames(frames)


def test_a_run_that_one_registry_refuses_is_remembered_nowhere(federation):
    """Otherwise the other sites could not train again without the one that refuses."""
    federation.set_policies(consents={})
    succeed(federation.run(small_job(cuts="quantile"), "first"))
    give(federation, "site-3", small_table().iloc[41:60])  # one row less: site-3's registry refuses
    before = {site: states(federation.workspace(site), site) for site in federation.sites}
    outcomes = federation.run(small_job(cuts="quantile"), "second")
    assert any("recompute_with_changes" in str(e) for e in outcomes.values())
    assert {site: states(federation.workspace(site), site) for site in federation.sites} == before
    assert all(before.values())


def test_a_web_proxy_never_sees_xgboosts_messages(federation, monkeypatch):
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.1)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        succeed(federation.run(small_job()))
        with pytest.raises(TimeoutError):
            proxy.accept()
