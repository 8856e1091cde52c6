"""The attacks find what was planted, find nothing where nothing is, and say nothing of single rows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve

from dp_components.accounting import PrivacyCost, TradeOff
from nvflare_plugins.data.table import Table
from nvflare_plugins.dossier import attacks
from nvflare_plugins.dossier import attacks as membership
from nvflare_plugins.dossier import attacks as statistics
from nvflare_plugins.dossier.attacks import (
    AttackReport,
    area_under_curve,
    difference,
    hits,
    hits_with_interval,
    run_attacks,
    share,
)
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.model_json import with_lists

NAMES = ("age", "dose", "ward")
LISTS = {"ward": ["north", "south", "east"]}
TYPES = ("float", "float", "c")
DEEP = {"objective": "binary:logistic", "max_depth": 8, "eta": 0.5, "min_child_weight": 0, "nthread": 1, "seed": 0}


def rows(n: int, seed: int) -> Table:
    """Return rows whose label is mostly noise: what a model knows of it, it has learnt by heart."""
    random = np.random.default_rng(seed)
    features = np.column_stack([random.normal(size=(n, 2)), random.integers(0, 3, n)]).astype(np.float32)
    label = (features[:, 0] + 3 * random.normal(size=n) > 0).astype(np.float32)
    return Table(features, NAMES, TYPES, label, "outcome", categories={"ward": tuple(LISTS["ward"])})


def model_of(table: Table, params: dict = DEEP, n_rounds: int = 30) -> FinishedModel:
    matrix = xgb.DMatrix(
        table.features, table.label, feature_names=list(NAMES), feature_types=list(TYPES), enable_categorical=True
    )
    booster = xgb.train(params, matrix, n_rounds)
    return FinishedModel(with_lists(bytes(booster.save_raw("json")), NAMES, LISTS, None), "model.json")


@pytest.fixture(scope="module", autouse=True)
def _few_repetitions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "N_REFERENCES", 4)
        patch.setattr(statistics, "_RESAMPLINGS", 50)
        yield


@pytest.fixture(scope="module")
def groups() -> tuple[Table, Table]:
    return rows(400, 1), rows(300, 2)


@pytest.fixture(scope="module")
def of_members(groups) -> AttackReport:
    return run_attacks(model_of(groups[0]), DEEP, ("train", groups[0]), ("test", groups[1]), None)


def test_a_model_that_has_learnt_its_rows_by_heart_is_found_out(of_members: AttackReport) -> None:
    loss, reference = of_members.model
    assert loss.area.low > 0.8 and reference.area.low > 0.8
    assert reference.hits.low > 0.05
    assert of_members.none is not None and of_members.none.area.low < 0.5 < of_members.none.area.high
    assert of_members.notes == ()


def test_a_model_of_other_rows_gives_nothing_away_while_the_control_does(groups) -> None:
    others = run_attacks(model_of(rows(400, 3)), DEEP, ("train", groups[0]), ("test", groups[1]), None)
    for one in others.model:
        assert one.area.low < 0.5 < one.area.high and one.hits.value < 0.05
    assert all(one.gain.low < 0 < one.gain.high for one in others.values)
    assert min(one.area.low for one in others.unprotected) > 0.7


def test_hidden_values_of_learnt_rows_are_told_and_those_of_others_are_not(of_members: AttackReport) -> None:
    found = {one.feature: one for one in of_members.values}
    assert set(found) == set(NAMES) and found["ward"].n_values == 3
    assert max(one.gain.low for one in found.values()) > 0.05
    for one in found.values():
        assert one.others.low < one.common + 0.1  # no better than its commonest value, which is near chance here


@pytest.mark.parametrize(
    ("objective", "classes", "labels"),
    [("reg:squarederror", 0, 0), ("multi:softprob", 3, 3), ("multi:softmax", 3, 3), ("binary:hinge", 0, 2)],
)
def test_every_kind_of_model_is_attacked(groups, objective: str, classes: int, labels: int) -> None:
    random = np.random.default_rng(4)
    tables = [
        replace(
            table,
            label=(random.integers(0, labels, table.n_rows) if labels else random.normal(size=table.n_rows)).astype(
                np.float32
            ),
        )
        for table in groups
    ]
    params = {**DEEP, "objective": objective, **({"num_class": classes} if classes else {})}
    report = run_attacks(model_of(tables[0], params, 20), {}, ("train", tables[0]), ("test", tables[1]), None)
    assert report.reason == "" and max(one.area.low for one in report.model) > 0.6


def test_groups_that_differ_by_themselves_are_said_to(groups) -> None:
    training, other = groups
    moved = replace(other, label=np.ones_like(other.label), features=other.features + np.float32([50, 0, 0]))
    report = run_attacks(model_of(training), {}, ("train", training), ("test", moved), None)
    assert "differ by themselves" in report.notes[0]
    same = run_attacks(model_of(training), {}, ("train", training), ("test", training), None)
    assert any("equal a row of the training" in note for note in same.notes)


def test_too_few_rows_are_said_to_be(groups) -> None:
    few = rows(60, 9)
    report = run_attacks(model_of(few), {}, ("train", few), ("test", groups[1]), None)
    assert "60 usable rows" in report.reason and report.model == ()
    assert "not run" in attacks.build_page(report, "job", "site-1")


def test_the_bound_stands_beside_the_attacks(groups) -> None:
    mu = 0.3
    limit = TradeOff.of(PrivacyCost(mu_squared=mu**2)), "the ledger"
    report = run_attacks(model_of(groups[0]), {}, ("train", groups[0]), ("test", groups[1]), limit)
    assert report.bound is not None
    assert report.bound.hits == pytest.approx(norm.cdf(norm.ppf(0.01) + mu), abs=2e-3)
    assert len(report.value_bounds) == len(report.values)
    page = attacks.build_page(report, "job", "site-1")
    assert f"{report.bound.area:.3f}" in page and "right in" in page and "No bound is proven" not in page
    assert "The accounted privacy allows" in report.summary


def test_no_row_score_or_value_is_told(groups, of_members: AttackReport) -> None:
    said = json.dumps(of_members.to_dict()) + attacks.build_page(of_members, "job", "site-1")
    for table in groups:
        for value in table.features[:, :2].ravel()[:200]:
            assert f"{value:.4f}" not in said
    for attacked in of_members.to_dict()["model"]:
        assert all(number == round(number, 3) for number in (*attacked["auc"], *attacked["tpr_at_1_percent_fpr"]))


def test_areas_and_hits_are_the_known_ones_and_their_intervals_hold_them() -> None:
    random = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        members, others = random.normal(size=150) + 1, random.normal(size=120)
        found = area_under_curve(members, others)
        covered += found.low <= norm.cdf(1 / np.sqrt(2)) <= found.high
    truth = np.concatenate([np.ones(150), np.zeros(120)])
    assert found.value == pytest.approx(roc_auc_score(truth, np.concatenate([members, others])))
    assert 85 <= covered <= 100  # 95 % of 100, five standard errors below
    tied = area_under_curve(np.asarray([1.0, 1.0, 2.0]), np.asarray([1.0, 0.0]))
    assert tied.value == pytest.approx((0.5 + 1 + 0.5 + 1 + 1 + 1) / 6)
    false, true, _ = roc_curve(truth, np.concatenate([members, others]), drop_intermediate=False)
    for rate in (0.013, 0.1, 0.55):
        assert hits(members, others, rate) == pytest.approx(np.interp(rate, false, true))
    assert hits(np.zeros(50), np.zeros(50)) == pytest.approx(0.01), "ties are a toss of a coin"
    assert hits(np.ones(50), np.zeros(50)) == 1
    many = random.normal(size=20_000)
    wide = hits_with_interval(many + 1, random.normal(size=20_000))
    assert wide.low <= norm.cdf(norm.ppf(0.01) + 1) <= wide.high


def test_shares_have_wilsons_intervals() -> None:
    half = share(50, 100)
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert share(0, 20).low == 0 and share(20, 20).high == 1
    change = difference(share(56, 70), share(48, 80))  # Newcombe (1998), table II, example (a), method 10
    assert (change.low, change.high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))
