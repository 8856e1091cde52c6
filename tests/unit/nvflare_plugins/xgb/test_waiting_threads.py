"""XGBoost's threads do not spin away the cores that other sites of one machine, and the mediator, need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORT = "import nvflare_plugins, xgboost"
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def displayed(**given: str) -> str:
    """Return what XGBoost's OpenMP library says of its settings in a fresh process."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **given},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("XGBoost's OpenMP library here is not GNU's")
    return done.stderr


def test_threads_turn_for_microseconds_before_they_sleep() -> None:
    assert "GOMP_SPINCOUNT = '10000'" in displayed()


@pytest.mark.parametrize(
    "given", [{"GOMP_SPINCOUNT": "77"}, pytest.param({"OMP_WAIT_POLICY": "ACTIVE"}, marks=pytest.mark.slow)]
)
def test_what_the_operator_says_holds(given: dict[str, str]) -> None:
    told = displayed(**given)
    assert "GOMP_SPINCOUNT = '10000'" not in told
    ((name, value),) = given.items()
    assert f"{name} = '{value}'" in told
