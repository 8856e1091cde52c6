"""Which releases of XGBoost are known."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.versions import RELEASES, installed_release, known_release


def test_the_installed_release_is_known():
    assert xgb.__version__.startswith(installed_release().version + ".")


@pytest.mark.parametrize(
    "version", [f"{release.version}.{patch}" for release in RELEASES for patch in ("0", "7", "1rc2")]
)
def test_patches_of_known_releases_are_known(version):
    assert version.startswith(known_release(version).version)


@pytest.mark.parametrize("version", ["3.1.3", "3.4.0", "3.4.1", "3.20.0", "3.2", "4.0.0", "", "nonsense"])
def test_other_releases_are_refused_by_name(version):
    with pytest.raises(ConfigurationError, match=rf"xgboost {version}, whose messages .* 3\.2 and 3\.3: pip install"):
        known_release(version)


def test_a_build_without_federated_learning_is_refused(monkeypatch):
    monkeypatch.setattr(xgb, "build_info", lambda: {"USE_FEDERATED": False})
    with pytest.raises(ConfigurationError, match="built without federated learning"):
        installed_release()


def test_a_model_holds_no_state_of_a_generator():
    """XGBoost 3.3 keeps it in its configuration, which is never shipped: it tells how much a site has drawn."""
    rng = np.random.default_rng(0)
    matrix = xgb.DMatrix(rng.normal(size=(50, 3)), label=rng.integers(0, 2, 50))
    booster = xgb.train({"subsample": 0.5, "colsample_bytree": 0.5}, matrix, 2)
    assert b"rng_state" not in bytes(booster.save_raw("json"))
    assert ("rng_state" in booster.save_config()) == (installed_release().version != "3.2")
