"""Grids of rows: what is rounded to them can be added over all rows, and what could not be is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from he_processors.errors import CapacityExceeded
from nvflare_plugins.base.errors import ROWS_TEXT
from nvflare_plugins.growth.site_sums import WIDE_BITS, rows_on_grid
from nvflare_plugins.pooled.job import HorizontalJob
from tests.oracle.test_horizontal_equals_central import breast, regression
from tests.support.federation import Federation, succeed


@pytest.mark.parametrize("n_rows", [1, 2, 5, 1_000_000])
def test_rows_that_are_as_large_as_agreed_fit_and_larger_ones_do_not(n_rows: int) -> None:
    bound = 3
    exponent = bound + n_rows.bit_length() - WIDE_BITS
    rows = np.array([2.0**bound, -(2.0**bound), 2.5 * 2.0**exponent, 0.0])
    found = rows_on_grid("labels", rows, exponent, n_rows)
    assert found.dtype == np.int64 and n_rows * int(found[0]) <= 2**WIDE_BITS
    assert found.tolist() == [2 ** (bound - exponent), -(2 ** (bound - exponent)), 2, 0]
    for value in (np.nextafter(2.0**bound, np.inf), -16.0, np.inf, np.nan):
        with pytest.raises(CapacityExceeded, match="labels: a row is larger than the sites have agreed on"):
            rows_on_grid("labels", np.array([0.0, value]), exponent, n_rows)
    assert rows_on_grid("labels", np.empty(0), exponent, n_rows).size == 0


@pytest.mark.parametrize("objective", ["reg:absoluteerror", "reg:quantileerror"])
def test_the_scale_of_a_smooth_loss_never_overflows_unnoticed(
    tmp_path: Path, objective: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is protected under plain: a sum that does not fit a word would come back as another number."""
    federation = Federation(tmp_path, policy={"share_data_errors": False})
    federation.give_data("large", regression(breast(), 1e12))
    federation.give_data("train", regression(breast()))
    params = {"objective": objective} | ({"quantile_alpha": 0.5} if "quantile" in objective else {})
    fields = {"profile": "plain", "engine": "own", "arithmetic": "3.4"}
    succeed(federation.run(HorizontalJob("large", "label", params, 1, **fields), "large"))
    for site in federation.sites:
        inputs = federation.workspace(site) / "inputs"
        inputs.mkdir()
        (inputs / "large.json").write_bytes(federation.model("large"))
    outcomes = federation.run(HorizontalJob("train", "label", params, 1, initial_model="large.json", **fields), "far")
    assert all(isinstance(one, Exception) for one in outcomes.values())
    assert any(ROWS_TEXT in str(one) for one in outcomes.values())
    assert "residual roots: a row is larger than the sites have agreed on" in caplog.text
