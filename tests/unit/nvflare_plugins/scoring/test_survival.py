"""Scores of survival models: concordance against all pairs, chances against distributions, and the local page."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from scipy import stats

from nvflare_plugins.pages.model_charts import kaplan_meier, time_figures
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.scoring import ScoringError, VeilBoostSurvival, load_model
from nvflare_plugins.scoring.comparison import Metric, compare, compare_run
from nvflare_plugins.scoring.explanation import concordance, negative_log_likelihood, survival
from nvflare_plugins.site.policy import SitePolicy
from tests.support.federation import Federation, label_facts, succeed
from tests.support.survival import AFT, FORMS, times

NOISE = {"normal": stats.norm, "logistic": stats.logistic, "extreme": stats.gumbel_l}


def of_all_pairs(bounds: np.ndarray, predicted: np.ndarray) -> float:
    points = []
    for (_, end), one in zip(bounds, predicted, strict=True):
        for (begin, last), other in zip(bounds, predicted, strict=True):
            if np.isfinite(end) and (end < begin or (end == begin and last > begin)):
                points.append((np.sign(other - one) + 1) / 2)
    return float(np.mean(points))


@pytest.mark.parametrize("n_rows", [6, 50, 64, 65, 400])
@pytest.mark.parametrize("has_intervals", [False, True])
def test_concordance_is_that_of_all_pairs(n_rows: int, has_intervals: bool) -> None:
    random = np.random.default_rng(n_rows)
    time = random.integers(1, n_rows // 2 + 2, n_rows).astype(float)
    width = random.integers(0, 3, n_rows) if has_intervals else 0
    bounds = np.stack([time, np.where(random.random(n_rows) < 0.4, np.inf, time + width)], axis=1)
    predicted = random.integers(0, n_rows // 3 + 1, n_rows).astype(float)
    assert concordance(bounds, predicted) == pytest.approx(of_all_pairs(bounds, predicted))
    assert concordance(bounds, -time) < 0.5 <= concordance(bounds, time)
    assert np.isnan(concordance(np.array([[1.0, np.inf]] * 3), np.arange(3.0)))


def test_rows_with_one_event_show_no_difference() -> None:
    """Some draws leave the event out, and have no concordance; they say nothing of any model."""
    time = np.arange(1.0, 41.0, dtype=np.float32)
    label = np.stack([time, np.where(time == 5, time, np.inf)], axis=1).astype(np.float32)
    table = SimpleNamespace(label=label, weight=None, n_rows=40)
    metric = Metric("concordance", is_higher_better=True, measure=lambda y, s, w: concordance(y, s))
    (found,) = compare((metric,), table, np.roll(time, 2), None, np.roll(time, 1))
    assert np.isfinite([found.low, found.high]).all() and "no difference" in found.verdict


@pytest.mark.parametrize("noise", NOISE)
def test_chances_are_those_of_the_noise(noise: str) -> None:
    loss = {"aft_loss_distribution": noise, "aft_loss_distribution_scale": "0.7"}
    predicted, at = np.array([1.0, 5.0, 200.0]), 9.0
    expected = NOISE[noise].sf(np.log(at), loc=np.log(predicted), scale=0.7)
    assert survival(loss, predicted, at) == pytest.approx(expected, rel=1e-9)
    assert survival(loss, predicted, 0.0).tolist() == [1, 1, 1]


def test_a_kaplan_meier_curve_of_known_answers() -> None:
    """Six rows, the textbook's way: two deaths at 3, one of the four left at 5, and none after."""
    time, event = np.array([3.0, 3, 4, 5, 7, 3]), np.array([True, True, False, True, False, False])
    at, shares = kaplan_meier(time, event)
    assert at.tolist() == [3, 5] and shares == pytest.approx([4 / 6, 4 / 6 * 1 / 2])
    nothing = time_figures(np.array([[3, np.inf]], np.float32), np.ones(1), lambda at: np.ones(1))
    assert nothing is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    frame, federation = times("bounds", 2_400, 4), Federation(tmp_path_factory.mktemp("run"))
    federation.give_data("train", frame[:1500])
    federation.give_data("eval", frame[1500:])
    federation.set_registry_keys()
    params = {**AFT, "max_depth": 3, "eta": 0.1, "aft_loss_distribution_scale": 0.8, "max_bin": 32}
    succeed(federation.run(HorizontalJob("train", FORMS["bounds"], params, 25, eval_data_set="eval")))
    return federation


def test_a_site_compares_its_own_model_of_times(run: Federation) -> None:
    folder = run.run_folder("site-1")
    found = compare_run(folder, SitePolicy.load(run.workspace("site-1"), "site-1"))
    assert [one.name for one in found.metrics] == ["concordance", "aft-nloglik"]
    assert 0.6 < found.metrics[0].federated < 1 and found.metrics[0].is_higher_better
    pooled = run.metrics("site-1")["eval-aft-nloglik"]
    assert abs(found.metrics[1].federated - pooled) < 0.5  # of a third of the rows
    assert found.rows is not None and found.rows.times is not None
    assert "without an event" in found.rows.times.kaplan_meier and "calibrated" in found.rows.times.calibration
    assert "rows whose time lies in an interval are not in them" in found.rows.times.words


def test_a_site_compares_its_own_model_of_hazards(tmp_path) -> None:
    frame, federation = times("events", 1_200, 4), Federation(tmp_path)
    federation.give_data("train", frame[:800])
    federation.give_data("eval", frame[800:])
    federation.set_registry_keys()
    params = {"objective": "survival:cox", "max_depth": 3, "max_bin": 32}
    succeed(federation.run(HorizontalJob("train", FORMS["events"], params, 15, eval_data_set="eval")))
    folder = federation.run_folder("site-1")
    found = compare_run(folder, SitePolicy.load(federation.workspace("site-1"), "site-1"))
    (index,) = found.metrics
    assert index.name == "concordance" and min(index.federated, index.alone) > 0.6 and index.tuned is not None


def test_the_estimator_predicts_times_and_scores_by_concordance(run: Federation) -> None:
    model = load_model(run.run_folder("site-1") / "model.json")
    frame = times("bounds", 300, 4, seed=1)
    rows = frame.drop(columns=["from", "to"])
    assert isinstance(model, VeilBoostSurvival)
    stock = xgb.Booster(model_file=bytearray(run.model()))
    predicted = model.predict(rows)
    assert np.array_equal(predicted, stock.predict(xgb.DMatrix(rows)))
    bounds = np.stack(list(label_facts(frame, FORMS["bounds"]).values()), axis=1).astype(float)
    score = model.score(rows, frame.rename(columns={"from": "lower", "to": "upper"})[["lower", "upper"]])
    assert score == concordance(bounds, predicted.astype(float)) > 0.6
    of_events = times("events", 300, 4, seed=1)
    both = pd.DataFrame({"t": of_events.days, "e": of_events.death.astype(bool)})
    assert 0.6 < model.score(of_events.drop(columns=["days", "death"]), both.to_numpy()) < 1
    chances = model.predict_survival(rows, [1.0, 20.0, 400.0])
    assert chances.shape == (300, 3) and (np.diff(chances, axis=1) < 0).all()
    loss = {"aft_loss_distribution": "normal", "aft_loss_distribution_scale": "0.8"}
    assert negative_log_likelihood(loss, bounds, predicted.astype(float), np.ones(300)) < 6


def test_a_model_of_hazards_orders_rows_and_names_no_chance(tmp_path) -> None:
    frame = times("signed", 400, 3)
    rows = xgb.DMatrix(frame.drop(columns="days"), label=frame.days)
    xgb.train({"objective": "survival:cox", "max_depth": 2}, rows, 8).save_model(tmp_path / "model.json")
    model = load_model(tmp_path / "model.json")
    events = np.stack([frame.days.abs(), frame.days > 0], axis=1)
    assert isinstance(model, VeilBoostSurvival) and model.score(frame.drop(columns="days"), events) > 0.6
    with pytest.raises(ScoringError, match="predicts hazards"):
        model.predict_survival(frame.drop(columns="days"), [1.0])
