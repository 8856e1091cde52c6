"""Which releases of XGBoost are known, and what opens a communicator only with one that is."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.pooled.mediated import communicator
from nvflare_plugins.pooled.mediated.communicator import Federated
from nvflare_plugins.xgb.versions import (
    RELEASES,
    WHEELS,
    installed_release,
    installed_wheel,
    known_release,
    known_wheel,
)

PATCHES = ("0", "7", "1rc2")
SPEAK = {release.version for release in RELEASES}


def test_the_installed_wheel_is_known():
    assert xgb.__version__.startswith(installed_wheel().version + ".")


@pytest.mark.parametrize("version", [f"{wheel.version}.{patch}" for wheel in WHEELS for patch in PATCHES])
def test_patches_of_known_releases_are_known(version):
    assert version.startswith(known_wheel(version).version)
    if version[:3] in SPEAK:
        assert version.startswith(known_release(version).version)
    else:
        with pytest.raises(ConfigurationError, match=rf"xgboost {version}, which has no federated .*==3\.3\.\*"):
            known_release(version)


@pytest.mark.parametrize("version", ["3.1.3", "3.5.0", "3.40.0", "3.20.0", "3.2", "4.0.0", "", "nonsense"])
@pytest.mark.parametrize("known", [known_wheel, known_release])
def test_other_releases_are_refused_by_name(version, known):
    with pytest.raises(ConfigurationError, match=rf"xgboost {version}, .* it knows 3\.2 to 3\.4: pip install 'xgb"):
        known(version)


def test_a_build_without_federated_learning_is_refused_where_it_matters(monkeypatch):
    monkeypatch.setattr(xgb, "__version__", "3.3.0")
    monkeypatch.setattr(xgb, "build_info", lambda: {"USE_FEDERATED": False})
    with pytest.raises(ConfigurationError, match="built without federated learning"):
        installed_release()
    assert installed_wheel().version == "3.3"


def test_a_model_holds_no_state_of_a_generator():
    """XGBoost 3.3 keeps it in its configuration, which is never shipped: it tells how much a site has drawn."""
    rng = np.random.default_rng(0)
    matrix = xgb.DMatrix(rng.normal(size=(50, 3)), label=rng.integers(0, 2, 50))
    booster = xgb.train({"subsample": 0.5, "colsample_bytree": 0.5}, matrix, 2)
    assert b"rng_state" not in bytes(booster.save_raw("json"))
    assert ("rng_state" in booster.save_config()) == (installed_wheel().version != "3.2")


@pytest.fixture
def joined(monkeypatch):
    """A communicator that says what it likes; what was called, in order."""
    calls, place = [], [1, 0]
    monkeypatch.setattr(communicator, "installed_release", lambda: RELEASES[0])
    monkeypatch.setattr(xgb.collective, "init", lambda **args: calls.append("init"))
    monkeypatch.setattr(xgb.collective, "finalize", lambda: calls.append("finalize"))
    monkeypatch.setattr(xgb.collective, "is_distributed", lambda: True)
    monkeypatch.setattr(xgb.collective, "get_world_size", lambda: place[0])
    monkeypatch.setattr(xgb.collective, "get_rank", lambda: place[1])
    return SimpleNamespace(calls=calls, place=place)


@pytest.mark.parametrize("place", list(product(range(1, 5), range(4))))
def test_a_communicator_that_joined_other_than_its_sites_ends_the_job(joined, place):
    """3.4 joins nobody and says nothing: every site would train alone."""
    joined.place[:] = place
    mediator = SimpleNamespace(address="", error=None)
    if place == (3, 1):
        with Federated(mediator, 3, 1):
            joined.calls.append("trained")
        assert joined.calls == ["init", "trained", "finalize"]
        return
    with (
        pytest.raises(ConfigurationError, match=rf"of {place[0]} as rank {place[1]} where .* rank 1 of 3, .* without"),
        Federated(mediator, 3, 1),
    ):
        joined.calls.append("trained")
    assert joined.calls == ["init", "finalize"]


def test_no_communicator_opens_on_a_wheel_without_one(joined, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(xgb, "__version__", "3.4.1")
    monkeypatch.setattr(xgb.collective, "init", lambda **args: joined.calls.append("init"))
    with pytest.raises(ConfigurationError, match="no federated communicator"):
        Federated(SimpleNamespace(address="", error=None), 3, 1)
    assert not joined.calls
