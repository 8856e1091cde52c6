"""What a private job may say, what is refused by name, and what its plan costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from dp_components.accounting import compose, gaussian_limit
from dp_components.errors import PrivacyRefusal
from dp_components.leaf_weights import TWO_CLASSES, Number, SeveralClasses, Times
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.check import use_of
from nvflare_plugins.growth.survival import AftLoss
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.private_trees import job as job_plan
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.methods import PRESETS, WeightUpdate, resolve_method
from nvflare_plugins.kinds.private_trees.planner import leaf_noise, lines, report_sections, summarise, trust_text
from nvflare_plugins.wire.envelope import Kind
from tests.support import survival
from tests.support.private_federation import PUBLIC, PrivateFederation, job_of


def refused(match: str, **changes: object) -> None:
    with pytest.raises(ConfigurationError, match=match):
        PrivateTreesJob.from_dict({**PUBLIC, **changes})


def test_a_job_survives_json() -> None:
    job = job_of(
        method="dp_ebm_newton",
        trust="trusted_aggregator",
        features=["x1", "colour"],
        feature_bounds={"x1": [0, 2.5]},
        categories={"colour": ["a", "b"]},
    )
    assert PrivateTreesJob.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert job.profile == "dp_trusted" and job_of().profile == "dp_distributed"
    assert job.bounds_of("x1") == FeatureBounds(0.0, 2.5) and job.bounds_of("colour") == FeatureBounds(0.0, 1.0)


@pytest.mark.parametrize(
    "name",
    [
        "eval_data_set",
        "eval_metric",
        "evaluate_training",
        "early_stopping_rounds",
        "params",
        "base_score",
        "scale_pos_weight",
        "initial_model",
        "cuts",
        "num_rounds",
    ],
)
def test_what_nothing_pays_for_is_refused_by_name(name: str) -> None:
    refused(f"{name} is refused in private training", **{name: "anything"})


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("unknown fields: surprise", {"surprise": 1}),
        ("tracking must be off", {"tracking": True}),
        ("delta is missing: method pure alone", {"delta": None}),
        ("delta is given, and a pure method has none", {"method": "pure"}),
        ("delta is given, and a pure method has none", {"components": {"query": "pure"}}),
        ("query=pure is for weight_update=newton", {"method": "dp_rf", "components": {"query": "pure"}}),
        ("trust=local is refused for a pure", {"method": "pure", "delta": None, "trust": "local", "n_rows": 9}),
        ("epsilon must be", {"epsilon": 0.0}),
        ("epsilon must be", {"epsilon": float("nan")}),
        ("delta must be", {"delta": 1.0}),
        ("max_weight, their public bound", {"weight": "w"}),
        ("max_weight must be", {"weight": "w", "max_weight": 0}),
        ("colluders must be at least 1", {"colluders": 0}),
        ("would know all of the noise", {"n_sites": 3, "colluders": 3}),
        ("cannot be resumed", {"trust": "trusted_aggregator", "resume_from": "job"}),
        ("trust='nobody' is unknown", {"trust": "nobody"}),
        ("method='best' is unknown", {"method": "best"}),
        ("unknown components: lambda", {"components": {"lambda": 1}}),
        ("exact quantiles are data", {"components": {"candidates": "quantile"}}),
        ("split_method='magic' is unknown", {"components": {"split_method": "magic"}}),
        ("depth must be a whole number from 1 to 7", {"components": {"depth": 8}}),
        ("grower='me' is unknown", {"components": {"grower": "me"}}),
        ("refreshes totally random trees", {"method": "feverless", "components": {"grower": "xgboost"}}),
        ("refreshes totally random trees", {"method": "dp_tr_newton_ih", "components": {"grower": "xgboost"}}),
        (
            "multiple of batch_size",
            {"method": "dp_tr_newton", "components": {"grower": "xgboost", "n_trees": 10, "batch_size": 4}},
        ),
        ("it is made for the logistic loss", {"components": {"weight_update": "gradient"}}),
        ("rows_per_person", {"rows_per_person": 0}),
        ("lacks public bounds of x9", {"features": ["x0", "x9"]}),
        ("what is no feature: colour", {"features": ["x0", "x1", "x2", "x3"]}),
        ("two finite numbers", {"feature_bounds": {"x0": [1.0, 1.0]}}),
        ("both given for colour", {"feature_bounds": {"colour": [0, 1]}}),
    ],
)
def test_refusals(match: str, changes: dict) -> None:
    refused(match, **changes)


def test_missing_fields_are_named() -> None:
    with pytest.raises(ConfigurationError, match="lacks epsilon"):
        PrivateTreesJob.from_dict({"data_set": "a", "label": "b"})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves(name: str) -> None:
    method = resolve_method(name, {}, 5)
    assert method.n_trees % method.batch_size == 0 and not method.as_published


def test_components_change_a_preset_one_by_one() -> None:
    method = resolve_method(
        "dp_tr_newton",
        {
            "candidates": "dp_quantile",
            "query": "joint",
            "n_trees": 30,
            "batch_size": 10,
            "interactions": "random",
            "n_features_per_tree": 2,
            "learning_rate": 1,
        },
        5,
    )
    assert (method.candidates.name, method.query.name, method.n_trees, method.batch_size) == (
        "DP_QUANTILE",
        "JOINT",
        30,
        10,
    )
    assert "changed" in method.name
    assert resolve_method("dp_rf", {"n_trees": 40}, 5).batch_size == 40


PLANNED = ["default", "default_2026_11", "few_rounds", "dp_rf", "dp_ebm_newton", "feverless", "pure"]


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("trust", ["distributed", "trusted_aggregator"])
@pytest.mark.parametrize("rows_per_person", [1, 3])
def test_the_plan_costs_what_the_job_promises_and_just_fits_an_equal_budget(
    name: str, trust: str, rows_per_person: int
) -> None:
    plan = JobPlan.of(job_of(method=name, trust=trust, rows_per_person=rows_per_person, components={}), 3)
    cost = compose(plan.releases.events).for_person(rows_per_person)
    pure = {"pure_epsilon": plan.job.epsilon} if name == "pure" else {}
    assert cost.fits(gaussian_limit(plan.job.epsilon, plan.job.at_delta, **pure))
    assert 0.9999 * plan.job.epsilon < cost.epsilon(plan.job.at_delta) <= plan.job.epsilon
    after = plan.epsilon_after_rounds()
    assert len(after) == plan.releases.n_rounds and after == sorted(after)
    assert after[-1] == pytest.approx(cost.epsilon(plan.job.at_delta), rel=1e-6)


@pytest.mark.parametrize("name", ["default", "feverless", "batch_ih_ebm_25"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (8.0, 1e-9), (10.0, 1e-6), (64.0, 1e-12)])
def test_a_job_keeps_its_epsilon_and_delta_discrete_noise_included(name: str, epsilon: float, delta: float) -> None:
    """(8, 1e-9) was once accepted at a true delta of 1.9e-8, and from epsilon 10 on a plan said "epsilon inf"."""
    columns = {f"x{i}": [0, 1] for i in range(23)}
    job = job_of(method=name, components={}, epsilon=epsilon, delta=delta, feature_bounds=columns, categories={})
    plan = JobPlan.of(job, 3)
    cost = compose(plan.releases.events)
    assert cost.delta(epsilon) <= delta
    for budget in (epsilon, 64.0):
        assert cost.fits(gaussian_limit(budget, delta))
    assert f"epsilon {epsilon:g} at delta" in "\n".join(lines(summarise(plan)))


def test_a_plan_whose_noise_does_not_keep_the_jobs_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_plan, "_BELOW", 1.001)
    with pytest.raises(ConfigurationError, match=r"keeps epsilon 1 at delta .* only, and the job promises 1e-05"):
        JobPlan.of(job_of(components={}), 3)


def test_promises_that_protect_nobody_are_refused() -> None:
    for changes in ({"epsilon": 65.0}, {"epsilon": 1e6}, {"delta": 0.5}, {"delta": 0.011}, {"delta": 0.0}):
        refused("must be a number above 0", **changes)


def test_a_pure_job_in_figures() -> None:
    """By hand: 80 queries share epsilon 2; on G the scale is 0.6 * 80 / 2 = 24, root 2 of that its deviation."""
    plan = JobPlan.of(job_of(method="pure", components={}, epsilon=2.0), 3)
    g, h = 24 * math.sqrt(2 * 1.5), 12 * math.sqrt(2 * 1.5)
    assert plan.training.leaf_noise == pytest.approx((g, h), rel=1e-5)
    assert plan.training.ridge == pytest.approx(1 + 2 * g, rel=1e-5)
    [event] = {event for release in plan.releases.releases for event in release.event.events}
    assert (event.grid_bits, event.n_shares) == (20, 2) and [count for _, count in event.scales] == [16, 16]
    assert [scale for scale, _ in event.scales] == pytest.approx([24 * 2**20, 12 * 2**20], rel=1e-5)
    assert compose(plan.releases.events).parts() == pytest.approx((0.0, 2.0, 0.0, 0.0))
    text = "\n".join(lines(summarise(plan)))
    assert "pure epsilon 2, without a delta" in text and "computational" in text and "80 messages" in text
    assert "computational" not in trust_text(JobPlan.of(job_of(method="pure", trust="trusted_aggregator"), 3))
    paid = JobPlan.of(job_of(method="pure", components={"candidates": "mixed"}, epsilon=2.0), 3).releases
    assert paid.cell_noise.multiplier == pytest.approx(1 / 0.2) and paid.cell_noise.sensitivity.bound == 5 * 2**20
    assert paid.tree_noise.multiplier == pytest.approx(80 / 1.8)


def test_an_epsilon_that_no_noise_keeps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ask for more epsilon"):
        JobPlan.of(job_of(method="pure", components={}, epsilon=1e-8), 3)


def test_too_few_sites_for_the_noise_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot tolerate 2 colluder"):
        JobPlan.of(job_of(colluders=2), 2)
    with pytest.raises(ConfigurationError, match="meant for 4 sites; 3 take part"):
        JobPlan.of(job_of(n_sites=4), 3)
    refused("needs n_rows", trust="local")
    refused("needs n_rows", n_rows=100)


def test_fewer_or_more_sites_than_calibrated_are_refused() -> None:
    trust = JobPlan.of(job_of(), 3).training.trust
    trust.check_sites(3)
    for n_sites, error in ((2, PrivacyRefusal), (4, ConfigurationError)):
        with pytest.raises(error):
            trust.check_sites(n_sites)


def test_distributed_noise_is_larger_by_the_missing_shares() -> None:
    trusted, shared = (summarise(JobPlan.of(job_of(trust=t), 3)) for t in ("trusted_aggregator", "distributed"))
    assert shared.leaf_noise[0] / trusted.leaf_noise[0] == pytest.approx(1.5**0.5)
    assert trusted.ridge == pytest.approx(1 + 5 * trusted.leaf_noise[0])


def test_local_noise_is_that_of_all_rows() -> None:
    trusted = summarise(JobPlan.of(job_of(trust="trusted_aggregator"), 3))
    local = JobPlan.of(job_of(trust="local", n_rows=900), 3)
    assert summarise(local).leaf_noise[0] / trusted.leaf_noise[0] == pytest.approx(2 * 30)
    assert not local.training.trust.is_trusted_aggregator and local.job.profile == "dp_local"
    assert local.epsilon_after_rounds()[-1] == pytest.approx(1.0, rel=1e-4)
    assert "leaf included" in trust_text(local)


def test_noise_of_scores_is_told_of_boosted_random_trees_for_two_classes_alone() -> None:
    plan = JobPlan.of(job_of(components={}), 3).training
    noise = leaf_noise(plan, b"model")
    assert noise is not None and noise.model_sha256 == hashlib.sha256(b"model").hexdigest()
    assert (noise.gradient, noise.hessian) == plan.leaf_noise
    assert (noise.update, noise.query, noise.scale, noise.clip) == ("newton", "clipped", 0.3, 2.0)
    for others in (
        {"method": "feverless"},
        {"method": "dp_rf"},
        {"components": {"batch_size": 7}},
        {"label_classes": ["a", "b", "c"]},
    ):
        assert leaf_noise(JobPlan.of(job_of(**{"components": {}, **others}), 3).training, b"") is None


def test_the_summary_says_what_matters() -> None:
    plan = JobPlan.of(job_of(components={}), 3)
    text = "\n".join(lines(summarise(plan)))
    assert "epsilon 1 at delta 1e-05" in text and "301 messages" in text and "1 of which may pool" in text
    sections = report_sections(plan, 0.5, "The ledger fits.")
    assert len(sections[1].curves[0].points) == 300
    assert not any("from noise" in name for name, _ in sections[0].rows)
    known = dict(report_sections(plan, 0.5, "The ledger fits.", np.array([0.1, 0.1, 0.1, 0.2]))[0].rows)
    assert known["score before the probability, ± from noise"].startswith("0.196 for half of the rows, 0.333 for nine")
    assert summarise(JobPlan.of(job_of(method="few_rounds", components={}), 3)).n_messages == 25


# -- numbers and several classes ---------------------------------------------------------------------------------------


NUMBERS = {"label_bounds": [0, 30]}
CLASSES = {"label_classes": ["a", "b", "c"]}
TIMES = {"label": {"time": "t", "event": "e"}, "label_bounds": [1, 400]}


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
def test_refusals_of_targets(match: str, changes: dict) -> None:
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
