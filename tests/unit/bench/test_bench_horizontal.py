"""The benchmark of horizontal training on tiny tables: its last line has every figure of every lane, and it judges."""

from __future__ import annotations

import json

import pytest
import xgboost as xgb

from nvflare_plugins.growth._native import NUMPY
from nvflare_plugins.wire.profiles import Profile
from tests.bench import bench_horizontal
from tests.bench.bench_horizontal import AIMS, GROUPS, bench_alone, bench_sites
from tests.bench.horizontal_data import TableShape
from tests.bench.horizontal_lanes import OWN, UNTAGGED

TINY = TableShape(3_000, 4, 0.3)
is_federated = bool(xgb.build_info().get("USE_FEDERATED"))


@pytest.mark.slow
def test_the_last_line_has_the_figures_of_each_lane(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(bench_horizontal, "ALONE", (TINY,))
    monkeypatch.setattr(bench_horizontal, "CREDIT_CARD", TINY)
    bench_horizontal.main(["--only", "growing", "sites", "--rounds", "3", "--lanes", "native", "own_plain"])
    out, said = capfd.readouterr()
    result = json.loads(out.splitlines()[-1])
    (alone,), sites = result["growing"], result["sites"]
    assert {"central", "own", "central_2", "own_2", f"own_{NUMPY}"} <= set(alone["lanes"])
    assert set(sites["lanes"]) == {"central", "own_plain", *(["native"] if is_federated else [])}
    for lane in (*alone["lanes"].values(), *sites["lanes"].values()):
        assert lane["identical_to_central"] and min(lane["wall_s"], lane["cpu_s"], lane["peak_mib"]) > 0
    assert alone["ratios"].keys() <= AIMS.keys() and "own / central" in alone["ratios"]
    own = sites["lanes"]["own_plain"]
    # Up to five levels are divided: that many exchanges, of pairs of 8 bytes each way.
    assert 1 <= own["exchanges"] <= 5 and own["bytes"] > 2 * 2 * 8 * TINY.n_features
    assert all(name.split(",")[0] in AIMS for part in (alone, sites) for name in part["missed"])
    assert "medians over rounds" in said


def test_every_lane_is_a_way_to_train() -> None:
    profiles = {one.value for one in Profile}
    for name in (name for group in GROUPS for name in group):
        assert name in ("native", UNTAGGED) or name.removeprefix(OWN) in profiles


@pytest.mark.slow
def test_an_aim_that_is_missed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The control: with an aim that nothing meets, the quotient is among the missed."""
    monkeypatch.setattr(bench_horizontal, "variants", lambda: (NUMPY,))
    monkeypatch.setitem(AIMS, "own / central", {"cpu": 0.0})
    missed = bench_alone(tmp_path, 3, TINY, is_large=False)["missed"]
    assert "own / central, cpu" in missed
    assert bench_sites(tmp_path / "none", 3, TINY, AIMS, []) == {}
