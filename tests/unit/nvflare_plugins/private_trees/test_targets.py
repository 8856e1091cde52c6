"""Jobs on numbers and on several classes: what they may say, what is refused by name, and what their plan shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from dp_components.accounting import compose
from dp_components.leaf_weights import TWO_CLASSES, Number, SeveralClasses, Times
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.check import use_of
from nvflare_plugins.growth.survival import AftLoss
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.methods import PRESETS, WeightUpdate
from nvflare_plugins.kinds.private_trees.planner import lines, summarise
from nvflare_plugins.wire.envelope import Kind
from tests.support import survival
from tests.support.private_federation import PUBLIC, PrivateFederation, job_of

NUMBERS = {"label_bounds": [0, 30]}
CLASSES = {"label_classes": ["a", "b", "c"]}
TIMES = {"label": {"time": "t", "event": "e"}, "label_bounds": [1, 400]}


def refused(match: str, **changes: object) -> None:
    with pytest.raises(ConfigurationError, match=match):
        PrivateTreesJob.from_dict({**PUBLIC, **changes})


def test_what_a_label_is() -> None:
    assert job_of().target is TWO_CLASSES and job_of(label_classes=["no", "yes"]).target is TWO_CLASSES
    assert job_of(**CLASSES).target == SeveralClasses(3)
    assert job_of(**NUMBERS).target == Number(FeatureBounds(0.0, 30.0))
    job = job_of(**TIMES, aft_loss_distribution="extreme", aft_loss_distribution_scale=0.5)
    assert job.target == Times(FeatureBounds(1.0, 400.0), AftLoss("extreme", 0.5)) and job.target.middle == 20.0


def test_labels_are_taken_or_left_each_by_itself() -> None:
    label = np.array([0.0, 1.0, 2.0, 3.0, 0.5, -1.0, np.nan], np.float32)
    assert job_of().accepts(label).tolist() == [True, True, False, False, False, False, False]
    assert job_of(**CLASSES).accepts(label).tolist() == [True, True, True, False, False, False, False]
    assert job_of(**NUMBERS).accepts(label).tolist() == [True] * 6 + [False]
    times = np.array([[1, 1], [0, 2], [3, np.inf], [np.nan, np.nan]], np.float32)
    assert job_of(**TIMES).accepts(times).tolist() == [True, True, True, False]


def test_a_look_at_a_table_knows_which_labels_a_job_takes() -> None:
    """``veilboost check``: numbers are no problem for a regression of either kind, and are one for classes."""
    dpboost = DpBoostJob("data", "label", 1.0, {"x": [0.0, 1.0]}, label_bounds=[0.0, 30.0])
    label = np.array([0.0, 2.5, 29.0], np.float32)
    for job, taken in ((job_of(**NUMBERS), True), (dpboost, True), (job_of(), False), (job_of(**CLASSES), False)):
        accepts = use_of(job, None, "site-1", "train").accepts
        assert accepts is not None and bool(accepts(label).all()) is taken


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("label_bounds are for a regression", {**NUMBERS, **CLASSES}),
        ("times need label_bounds", {"label": TIMES["label"]}),
        ("label_bounds: the bounds of times .* above 0", {**TIMES, "label_bounds": [0, 400]}),
        ("has no time to average", {**TIMES, "method": "dp_rf"}),
        ("leave grower away", {**TIMES, "method": "dp_tr_newton", "components": {"grower": "xgboost"}}),
        ("are for times", {**NUMBERS, "aft_loss_distribution_scale": 2}),
        ("label_classes is for a label of one column", {**TIMES, "label_bounds": None, **CLASSES}),
        ("label_classes must be a list of 2 to 64", {"label_classes": ["one"]}),
        ("label_classes must be a list of 2 to 64", {"label_classes": list(range(65))}),
        ("label_bounds must be two finite numbers", {"label_bounds": [3, 3]}),
        ("label_bounds must be a finite number", {"label_bounds": [0, float("inf")]}),
        ("label_bounds: .*too close together", {"label_bounds": [1e9, 1e9 + 1]}),
        (
            "leave grower away to train on label_bounds",
            {**NUMBERS, "method": "dp_tr_newton", "components": {"grower": "xgboost"}},
        ),
        ("label_classes lists 3 .grower.", {**CLASSES, "method": "dp_tr_newton", "components": {"grower": "xgboost"}}),
        ("label_classes lists 3 .query.", {**CLASSES, "method": "dp_tr_newton", "components": {"query": "scalar"}}),
    ],
)
def test_refusals(match: str, changes: dict) -> None:
    refused(match, **{"components": {}, **changes})


@pytest.mark.parametrize("method", PRESETS)
def test_all_methods_train_all_labels(method: str) -> None:
    for label in (NUMBERS, CLASSES, *(() if PRESETS[method](4).weight_update is WeightUpdate.AVERAGING else (TIMES,))):
        assert JobPlan.of(job_of(method=method, components={}, **label), 3).releases.n_queries > 0


@pytest.mark.parametrize("method", ["default", "dp_tr_newton", "dp_ebm_newton", "dp_tr_newton_ih", "feverless"])
@pytest.mark.parametrize("label", [NUMBERS, TIMES, CLASSES, {"label_classes": list(range(20))}])
def test_other_labels_cost_as_many_queries_as_two_classes(method: str, label: dict) -> None:
    """One query a tree, whose noise is that of its own sensitivity; what is drawn adds up to what is promised."""
    two, other = (JobPlan.of(job_of(method=method, components={}, **kind), 3) for kind in ({}, label))
    assert other.releases.n_queries == two.releases.n_queries
    assert other.releases.tree_noise.multiplier == two.releases.tree_noise.multiplier
    assert compose(other.releases.events).mu_squared == pytest.approx(compose(two.releases.events).mu_squared, rel=1e-9)
    delta = compose(other.releases.events).delta(1.0)
    assert 0.9e-5 < delta <= 1e-5
    n_outputs = other.training.target.n_outputs
    for kind in (Kind.NODE_STATS, Kind.HISTOGRAM):
        values = [sum(r.sizes) for r in other.releases.releases if r.kind is kind]
        assert values == [sum(r.sizes) * n_outputs for r in two.releases.releases if r.kind is kind]


def test_plans_say_what_wide_bounds_cost() -> None:
    narrow, wide = (summarise(JobPlan.of(job_of(label_bounds=b), 3)) for b in ([0, 30], [-30, 90]))
    assert wide.label_noise == pytest.approx(4 * narrow.label_noise) and narrow.cut_at == pytest.approx(0.15 * 15)
    assert wide.leaf_noise == narrow.leaf_noise and wide.rows_to_hear == narrow.rows_to_hear
    text = "\n".join(lines(narrow))
    assert "label            a number from 0 to 30; what lies outside counts as the bound" in text
    assert "residuals are cut at 2.25" in text and "rows so far off in a leaf outweigh it" in text
    classes = "\n".join(lines(summarise(JobPlan.of(job_of(**CLASSES), 3))))
    assert "one of 3 classes" in classes and "residuals" not in classes


def test_a_private_model_of_times_orders_them(tmp_path: Path) -> None:
    frame = survival.times("events", 6_000, 4)
    federation = PrivateFederation(tmp_path, frame.assign(days=np.where(frame.index == 7, -3, frame.days)))
    bounds = {f"x{i}": [-3.0, 3.0] for i in range(4)}
    components = {"n_trees": 60}
    job = job_of(**{**TIMES, "label": survival.FORMS["events"]}, feature_bounds=bounds, categories={}, epsilon=2.5)
    federation.run_private(dataclasses.replace(job, components=components)).succeed()
    booster = xgb.Booster(model_file=bytearray(federation.model()))
    predicted = booster.predict(xgb.DMatrix(frame[list(bounds)]))
    assert survival.concordance(frame.days.to_numpy()[:900], frame.death.to_numpy()[:900], predicted[:900]) > 0.7
    assert 1 < np.median(predicted) < 400
