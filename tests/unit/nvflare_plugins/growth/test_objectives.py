from __future__ import annotations

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth import float32
from nvflare_plugins.growth.objectives import ARITHMETICS, NOT_FINITE, Objective, largest_pairs
from nvflare_plugins.xgb.objectives import COX, OBJECTIVES
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters
from tests.support.survival import label_of

OF_ITS_OWN = {
    "multi:softprob": {"num_class": 4},
    "multi:softmax": {"num_class": 4},
    "reg:quantileerror": {"quantile_alpha": 0.7},
}


def _job(name: str, **more: object) -> TrainingParameters:
    label = label_of({"objective": name})
    return check_parameters({"objective": name, **OF_ITS_OWN.get(name, {}), **more}, ["a"], [], label=label)


def _rows(objective: Objective, n: int = 5_000, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    labels = rng.random(n).astype(np.float32)
    if objective.n_outputs > 1:
        labels = rng.integers(0, objective.n_outputs, n).astype(np.float32)
    elif objective.name.startswith("binary"):
        labels = (labels < 0.3).astype(np.float32)
    elif objective.name.startswith("survival:"):
        labels = np.stack([labels, np.where(labels < 0.3, np.inf, labels)], axis=1).astype(np.float32)
    margins = (spread * rng.normal(size=(n, objective.n_outputs))).astype(np.float32)
    return margins, labels, rng.gamma(2.0, size=n).astype(np.float32)


@pytest.mark.skipif(float32.native is None, reason="no C here: there is one of the two")
@pytest.mark.parametrize("name", ["binary:logistic", "reg:logistic", "binary:logitraw", "multi:softprob"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_gradients_in_c_are_those_of_numpy(name: str, weighted: bool, spread: float) -> None:
    more = {} if name.startswith("multi") else {"scale_pos_weight": 1.7}
    objective = Objective.of_job(_job(name, **more), "3.2")
    margins, labels, weights = _rows(objective, spread=spread)
    given = weights if weighted else None
    own = objective.gradients(margins, labels, given)
    twin = np.empty_like(own)
    objective.gradients_in_numpy(margins, labels, given, np.float32(0), twin)
    assert own.tobytes() == twin.tobytes() and np.ptp(own) > 0.5


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(  # others are bounded in test_cox.py and test_ranking.py
    "name", [name for name in OBJECTIVES if name != COX and not name.startswith("rank:")]
)
def test_rows_stay_within_the_public_bounds(name: str, arithmetic: str) -> None:
    parameters = _job(name)
    objective = Objective.of_job(parameters, arithmetic)
    margins, labels, weights = _rows(objective)
    labels = labels + np.float32(0.01) if objective.n_outputs == 1 and name.startswith(("reg", "count")) else labels
    scale = (
        objective.scale(float(objective.scale_rows(margins, labels, None).sum()), len(labels))
        if (objective.is_smooth)
        else np.float32(0)
    )
    pairs = objective.gradients(margins, labels, weights, scale)
    assert pairs.shape == (objective.n_outputs, len(labels), 2) and pairs.dtype == np.float32
    for bound, found in zip(objective.row_bounds(parameters.objective), np.abs(pairs).max(axis=(0, 1)), strict=True):
        assert bound is None or found <= bound * weights.max() * (1 + 1e-6)
    assert np.array_equal(largest_pairs(pairs), np.abs(pairs).max(axis=1))


def test_no_row_has_no_largest_pair() -> None:
    assert largest_pairs(np.empty((1, 0, 2), np.float32)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_threads_share_the_rows_of_log_loss(is_weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective.of_job(_job("binary:logistic"), "3.3")
    margins, labels, weights = _rows(objective)
    given = weights if is_weighted else None
    expected = np.empty((1, labels.size, 2), np.float32)
    objective.gradients_in_numpy(margins, labels, given, np.float32(0), expected)
    monkeypatch.setattr("nvflare_plugins.growth.objectives._ROWS_PER_THREAD", 7)
    for threads in ("1", "3"):
        monkeypatch.setenv("VEILBOOST_THREADS", threads)
        assert np.array_equal(objective.gradients(margins, labels, given), expected)


@pytest.mark.parametrize("name", ["count:poisson", "reg:squarederror", "reg:gamma", "binary:logistic"])
def test_gradients_beyond_float32_end_the_job_with_one_text(name: str) -> None:
    objective = Objective.of_job(_job(name), "3.3")
    margins = np.array([[1e3 if name == "count:poisson" else 3e38]], np.float32)
    label, weight = np.array([-3e38 if name == "reg:squarederror" else 1.0], np.float32), None
    if name in ("reg:gamma", "binary:logistic"):
        margins, weight = np.array([[-200.0]], np.float32), np.array([np.inf], np.float32)
    with pytest.raises(ConfigurationError) as caught:
        objective.gradients(margins, label, weight)
    assert str(caught.value) == NOT_FINITE


def test_losses_are_smooth_from_3_4_on() -> None:
    for name in ("reg:absoluteerror", "reg:quantileerror"):
        smooth = [Objective.of_job(_job(name), arithmetic) for arithmetic in ARITHMETICS]
        assert [one.is_smooth for one in smooth] == [False, False, True]
        assert [one.adaptive_leaf for one in smooth] == [True, True, False]
    assert not Objective.of_job(_job("reg:squarederror"), "3.4").is_smooth


def test_the_scale_of_no_weight_is_zero_and_moves_nothing() -> None:
    objective = Objective.of_job(_job("reg:quantileerror"), "3.4")
    margins, labels, weights = _rows(objective)
    assert objective.scale(0.0, 0.0) == 0
    assert not objective.gradients(margins, labels, weights, objective.scale(0.0, 0.0)).any()


def test_parameters_are_the_numbers_that_xgboost_reads() -> None:
    """Its reader of decimals is not exact: 1.527247277 is one unit of the last place lower there."""
    objective = Objective.of_job(_job("binary:logistic", scale_pos_weight=1.527247277), "3.2")
    assert objective.scale_pos_weight == np.float32("1.52724719") != np.float32(1.527247277)


def test_an_arithmetic_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'3\.5' is not known; known are 3\.2, 3\.3, 3\.4"):
        Objective.of_job(_job("binary:logistic"), "3.5")


@pytest.mark.parametrize(
    ("name", "score"), [("count:poisson", 0.0), ("reg:gamma", np.inf), ("reg:squarederror", np.nan)]
)
def test_a_first_prediction_that_is_no_number_is_refused(name: str, score: float) -> None:
    with pytest.raises(ConfigurationError, match="give base_score, or look at the label"):
        Objective.of_job(_job(name), "3.2").margins_of(np.array([score], np.float32))


def test_one_class_alone_still_has_a_margin() -> None:
    margins = Objective.of_job(_job("binary:logistic"), "3.2").margins_of(np.array([0.0, 1.0], np.float32))
    assert -14 < margins[0] < -13 and 13 < margins[1] < 14


def test_softmax_predicts_classes_and_softprob_their_shares() -> None:
    margins = np.array([[0.0, 2.0, 1.0, -1.0]], np.float32)
    assert Objective.of_job(_job("multi:softprob"), "3.2").evaluated(margins).sum() == pytest.approx(1.0, abs=1e-6)
