"""Cox regression of several sites equals XGBoost's trees on Breslow's derivatives of times rounded to the grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.growth.survival import signed_places
from nvflare_plugins.kinds.horizontal import site as horizontal_site
from nvflare_plugins.pooled.job import HorizontalJob
from tests.support import breslow, survival
from tests.support.examples import slow
from tests.support.federation import Federation, central_model, leaf_difference, succeed

ROUNDS = 4
LABEL = survival.FORMS["events"]
PARAMS = {"objective": "survival:cox", "max_depth": 3, "max_bin": 32}


class Grids:
    """The grids that the sites agree on, in order; the same at all sites."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[np.ndarray] = []
        real = horizontal_site.search_times

        def kept(*args):
            self.found.append(real(*args))
            return self.found[-1]

        monkeypatch.setattr(horizontal_site, "search_times", kept)

    def of_sets(self, n_sites: int) -> list[np.ndarray]:
        """Return the grid of each set."""
        alike = [self.found[i : i + n_sites] for i in range(0, len(self.found), n_sites)]
        unique = {grid.tobytes(): grid for grid in self.found}
        assert len(self.found) % n_sites == 0 and len(alike) >= len(unique)
        return sorted(unique.values(), key=lambda grid: -grid.size)


def frame_of(n_rows: int = 1_500, seed: int = 0) -> pd.DataFrame:
    frame = survival.times("events", n_rows, seed=seed)
    return frame.assign(w=np.random.default_rng(seed).gamma(2.0, size=n_rows).astype(np.float32))


def train(folder: Path, frame: pd.DataFrame, profile: str = "masks", n_sites: int = 3, *, params=PARAMS, **fields):
    federation = Federation.of(folder, n_sites, train=frame)
    federation.set_registry_keys()
    job = HorizontalJob("train", LABEL, params, ROUNDS, profile, **{"cuts": "exact", **fields})
    succeed(federation.run(job))
    return federation


def central(frame: pd.DataFrame, grid: np.ndarray, cuts, params: dict, weight: str | None = None) -> xgb.Booster:
    """Train stock XGBoost on our naive derivatives."""
    labels = signed_places(frame.days.to_numpy(np.float32), frame.death.to_numpy() == 1, grid)
    weights = np.ones(len(frame)) if weight is None else frame[weight].to_numpy(np.float64)

    def derivatives(margins: np.ndarray, _: xgb.DMatrix) -> tuple[np.ndarray, np.ndarray]:
        return breslow.derivatives(margins.astype(np.float64), np.abs(labels), labels > 0, weights)

    settings = {**params, "objective": "reg:squarederror", "base_score": 0.0, "disable_default_eval_metric": True}
    return central_model(frame.drop(columns=["w"]), LABEL, settings, cuts, ROUNDS, obj=derivatives)


@pytest.mark.parametrize(
    ("profile", "fields"),
    [
        ("masks", {}),
        *slow(("plain", {"time_bins": 5})),
        ("masks", {"weight": "w", "time_bins": 12}),
        ("bfv", {"time_bins": 20}),
        ("ckks", {"time_bins": 20}),
    ],
)
def test_models_equal_trees_on_naive_derivatives(tmp_path, monkeypatch, profile, fields):
    grids, frame = Grids(monkeypatch), frame_of()
    features = [name for name in frame if name.startswith("x")]
    params = {**PARAMS, "min_child_weight": 30.0}
    federation = train(tmp_path, frame, profile, params=params, features=features, **fields)
    (grid,) = grids.of_sets(3)
    assert 5 <= grid.size + 1 <= fields.get("time_bins", 256)
    events = np.bincount(np.searchsorted(grid, frame.days.to_numpy(np.float32), side="right")[frame.death == 1])
    assert events.min() >= 10
    reference = central(frame, grid, federation.cuts(), params, fields.get("weight"))
    assert leaf_difference(federation.model(), reference) <= 1e-6
    coarser = central(frame, grid[::2], federation.cuts(), params, fields.get("weight"))
    assert leaf_difference(federation.model(), coarser) > 1e-3


def test_the_metric_is_breslows_on_each_sets_own_grid(tmp_path, monkeypatch):
    grids, frame = Grids(monkeypatch), frame_of(2_000).drop(columns=["w"])
    held_out = frame.iloc[1_500:]
    federation = Federation.of(tmp_path, train=frame.iloc[:1_500], eval=held_out)
    federation.set_registry_keys()
    fields = {"eval_data_set": "eval", "evaluate_training": True, "cuts": "exact"}
    succeed(federation.run(HorizontalJob("train", LABEL, PARAMS, ROUNDS, **fields)))
    model = xgb.Booster(model_file=bytearray(federation.model()))
    sets = zip((frame.iloc[:1_500], held_out), grids.of_sets(3), ("train", "eval"), strict=True)
    for rows, grid, name in sets:
        labels = signed_places(rows.days.to_numpy(np.float32), rows.death.to_numpy() == 1, grid)
        matrix = xgb.DMatrix(rows[model.feature_names].to_numpy(np.float32), labels, feature_names=model.feature_names)
        for number, row in enumerate(federation.record("site-1").rounds):
            after = slice(0, number + 1)
            margins = model.predict(matrix, output_margin=True, iteration_range=(0, after.stop)).astype(np.float64)
            exact = breslow.partial_likelihood(margins, np.abs(labels), labels > 0, np.ones(len(rows)))
            assert row.metrics[f"{name}-cox-nloglik"] == pytest.approx(exact / (labels > 0).sum(), rel=1e-9)
            theirs = float(model[after].eval(matrix).split(":")[1])  # of XGBoost itself, on the rounded times
            assert row.metrics[f"{name}-cox-nloglik"] == pytest.approx(theirs, rel=1e-5)


def test_models_are_the_same_bytes_for_any_number_of_sites_on_one_grid(tmp_path, monkeypatch):
    """Sites see other bits of a grid, so that the grid is fixed here; sums of rows are the same for all."""
    edges = np.array([3, 6, 10, 20, 40], np.float32)
    monkeypatch.setattr(horizontal_site, "search_times", lambda *_: edges)
    frame = frame_of().drop(columns=["w"])
    models = {train(tmp_path / str(n), frame, n_sites=n).model() for n in (3, 5)}
    assert len(models) == 1
