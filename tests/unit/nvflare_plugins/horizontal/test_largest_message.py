"""Tables so wide that XGBoost could not hand over a level's histograms are refused before they are summed."""

from __future__ import annotations

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.pooled.mediated.training import training_shape
from nvflare_plugins.xgb.parameters import check_parameters

DEEP: dict[str, object] = {"objective": "binary:logistic", "max_depth": 10}


def test_training_refuses_them() -> None:
    most = ((1 << 31) - 1 - 1024) // (16 * 256)
    training_shape(check_parameters(DEEP, ["a"]), 3, 1, most, False, 0, False)
    with pytest.raises(ConfigurationError, match=rf"those of 256 nodes .* 2 GiB, which is {most:,} bins.*max_bin"):
        training_shape(check_parameters(DEEP, ["a"]), 3, 1, most + 1, False, 0, False)
    one_by_one = check_parameters({**DEEP, "grow_policy": "lossguide"}, ["a"])
    training_shape(one_by_one, 3, 1, most + 1, False, 0, False)


def test_a_plan_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rows", "100000", "--features", "3000", "--depth", "10"]) == 1
    assert "in one message of at most 2 GiB" in capsys.readouterr().err
