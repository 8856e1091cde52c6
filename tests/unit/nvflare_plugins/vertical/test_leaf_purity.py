"""Leaf purity, by hand and in a training whose leaves stock XGBoost names."""

from __future__ import annotations

import csv
import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.kinds.vertical.active_party import LeafPurity, purity_report
from nvflare_plugins.kinds.vertical.guards import MEASURED, Exposure, bins_section
from nvflare_plugins.kinds.vertical.model import KINDS, FeatureImportance, write_importance
from nvflare_plugins.pages.charts import Line, line_chart
from nvflare_plugins.pages.run_record import RunRecord
from tests.support.vertical_federation import Joined, central, federate


def test_known_leaves():
    # A leaf of 3 with labels 1, 1, 0 and one of 5 with labels 0, 0, 0, 0, 1: 2/3 and 4/5 pure, together 6 of 8 rows.
    leaves = np.array([3, 3, 3, 4, 4, 4, 4, 4], dtype=np.int32)
    label = np.array([1, 1, 0, 0, 0, 0, 0, 1], dtype=np.float32)
    assert LeafPurity(label).of(leaves) == 6 / 8
    assert LeafPurity(label).of(np.zeros(8, dtype=np.int32)) == 5 / 8
    assert LeafPurity(np.array([2, 0, 1], dtype=np.float32)).of(np.arange(3, dtype=np.int32)) == 1.0
    with pytest.raises(ValueError):
        LeafPurity(np.empty(0, dtype=np.float32))


def test_the_report_tells_own_rounds_from_shared_ones():
    label = np.array([0, 0, 0, 1], dtype=np.float32)
    assert purity_report([0.9, 0.8, 0.7, 0.6, 0.5, 0.5], 2, 1, label) == pytest.approx(
        {
            "largest class alone": 0.75,
            "first round": 0.85,
            "second round": 0.65,
            "later rounds": 0.575,
            "first round with passive parties": 0.65,
        }
    )
    assert purity_report([0.9], 1, 1, label) == {"largest class alone": 0.75, "first round": 0.9}


def test_no_round_stands_in_the_report_twice():
    """Without own rounds the first one is also the first with passive parties."""
    label = np.array([0, 0, 0, 1], dtype=np.float32)
    names = ["largest class alone", "first round", "second round", "later rounds", "first round with passive parties"]
    for own, expected in ((0, names[:4]), (1, names)):
        assert list(purity_report([0.9, 0.8, 0.7], 1, own, label)) == expected


@pytest.mark.parametrize("own_rounds", [0, 1])
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_training_reports_the_purity_of_xgboosts_own_leaves(own_rounds, parallel):
    rng = np.random.default_rng(1)
    features = rng.normal(size=(300, 5)).astype(np.float32)
    label = (features[:, 0] + 2 * features[:, 3] + rng.normal(size=300) * 0.3 > 0).astype(np.float32)
    params = {"objective": "binary:logistic", "max_depth": 3, "num_parallel_tree": parallel, "colsample_bynode": 0.7}
    joined = Joined(features, label, (2, 3))
    outcome = federate(joined, params, 3, own_rounds=own_rounds)
    # The merged model is an ordinary one; the federated party had no joined table to ask it about.
    merged = xgb.Booster(model_file=bytearray(outcome.merged()))
    leaves = merged.predict(xgb.DMatrix(features, feature_names=merged.feature_names), pred_leaf=True)
    expected = [LeafPurity(label).of(column.astype(np.int32)) for column in leaves.reshape(300, -1).T]
    assert outcome.result.leaf_purities == expected
    if not own_rounds:
        assert np.array_equal(central(joined, params, 3).predict(xgb.DMatrix(features), pred_leaf=True), leaves)


def test_regression_has_none():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(100, 2)).astype(np.float32)
    outcome = federate(Joined(features, features[:, 1], (1, 1)), {"objective": "reg:squarederror", "max_depth": 2}, 1)
    assert outcome.result.leaf_purities == []


# -- what sums tell of bins --------------------------------------------------------------------------------------------


FOUND = Exposure(56, 40, 20.635, 40, 0.0272, 0.0028, 0.02, 48, 5, 33, 12.51, 100)


def test_the_section_says_what_was_released_beside_the_caps():
    section = bins_section(FOUND, "guarded")
    cells = {row[0]: row[1:] for row in section.rows}
    assert cells["sums that a row is in, most"] == ("40", "40")
    assert cells["sums that a row is in, mean"] == ("20.6", "")
    assert cells["equations per row, mean over the rows of a node"] == ("0.003", "0.02")
    assert cells["nodes withheld by this job"] == ("5", "")
    assert cells["splits that divided a row, most"] == ("33", "100")
    assert cells["splits that divided a row, mean"] == ("12.5", "")
    uncapped = dataclasses.replace(FOUND, per_row_cap=None, share_cap=None, split_bits_cap=None)
    exact = bins_section(uncapped, "exact")
    assert [row[2] for row in exact.rows if row[2]] == ["none"] * 3 and "Preset exact" in exact.paragraphs[0]
    run = RunRecord("job", "a", "s", ("s",), "paillier", sections=(section,))
    assert RunRecord.from_dict(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize("so_far", [0.0, 20.6, 5000.0])
def test_the_figure_draws_wherever_the_data_set_lies(so_far):
    section = bins_section(dataclasses.replace(FOUND, per_row_mean=so_far), "guarded")
    lines = [Line(curve.name, i + 1, curve.points) for i, curve in enumerate(section.curves)]
    root = ElementTree.fromstring(line_chart(lines, section.x_label, section.y_label))
    assert len([e for e in root if e.tag == "polyline"]) == len(MEASURED) + 1


def test_more_sums_recover_more_bins():
    assert len(MEASURED) == 3
    for points in MEASURED.values():
        sums, recovered = zip(*points, strict=True)
        assert sorted(sums) == list(sums) and sorted(recovered) == list(recovered)
        assert 0 < recovered[0] < recovered[-1] <= 1


# -- importances -------------------------------------------------------------------------------------------------------


def test_the_file_holds_every_number_exactly(tmp_path):
    rows = [
        FeatureImportance("site-2", "f0", 3.0, 0.1, 1e20, 5.5, 1 / 3),
        FeatureImportance("", "age, in years", 0.0, 0.0, 0.0, 0.0, 0.0),
    ]
    path = write_importance(tmp_path, rows)
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["party"], row["feature"]) for row in read] == [("site-2", "f0"), ("", "age, in years")]
    assert [[float(row[kind]) for kind in KINDS] for row in read] == [[3.0, 0.1, 1e20, 5.5, 1 / 3], [0.0] * 5]
