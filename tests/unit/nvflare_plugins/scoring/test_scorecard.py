"""Scorecards: a row's points are the model's margin, known answers by hand and of optbinning, and what is refused."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.scoring import ScoringError
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.scorecard import Scaling, Scorecard, ScoredBin
from tests.support.scoring import CATEGORIES, CLASSES, NAMES, positions, train

STUMPS = {"objective": "binary:logistic", "max_depth": 1, "eta": 0.5}
PROFILE = "veilboost-profile-1"


def bin_of(card: Scorecard, feature: str, value: float) -> ScoredBin:
    """Return the one line of the card that a value is in."""
    listed = CATEGORIES.get(feature)
    named = None if listed is None or math.isnan(value) else str(listed[int(value)])
    found = [
        one
        for one in card.bins
        if one.feature == feature
        and (
            one.bin == "missing"
            if math.isnan(value)
            else named in one.bin.split(", ")
            if named is not None
            else one.bin != "missing"
            and (one.low is None or value >= np.float32(one.low))
            and (one.high is None or value < np.float32(one.high))
        )
    ]
    assert len(found) == 1, (feature, value, found)
    return found[0]


def profile_of(edges: dict[str, list[float]], counts: dict[str, list[list[int]]], classes: list[Any]) -> dict[str, Any]:
    """Return a profile with these edges, or a bin for each category, and missing values last."""
    features = []
    for name, of_bins in counts.items():
        table = np.array(of_bins, dtype=float)
        share = table / table.sum(axis=0)
        weights = np.log(share / share[:, ::-1])
        if name in edges:
            ends = [None, *edges[name], None]
            values = [
                {"low": low, "high": high, "values": True, "missing": False} for low, high in itertools.pairwise(ends)
            ]
            empty: dict[str, Any] = {"low": None, "high": None, "values": False, "missing": True}
        else:
            values = [{"categories": [str(one)], "missing": False} for one in CATEGORIES[name]]
            empty = {"categories": [], "missing": True}
        bins = [*values, *([empty] if len(values) < len(table) else [])]
        told = zip(bins, table.tolist(), weights.tolist(), strict=True)
        features.append({"name": name, "bins": [{**one, "counts": c, "weights_of_evidence": w} for one, c, w in told]})
    return {"format": PROFILE, "classes": [{"class": str(one), "rows": 1} for one in classes], "features": features}


def some_profile(folder: Path) -> Path:
    edges = {name: [-0.5, 0.25] for name in NAMES if name not in CATEGORIES}
    counts = {name: [[10, 20], [30, 10], [20, 30], [5, 5]] for name in NAMES}
    path = folder / "profile.json"
    path.write_text(json.dumps(profile_of(edges, counts, CLASSES)))
    return path


@pytest.mark.parametrize("with_profile", [False, True])
@pytest.mark.parametrize("params", [{}, {"booster": "dart", "rate_drop": 0.5}, {"max_cat_to_onehot": 1}])
def test_points_of_a_row_add_up_to_its_margin(params: dict[str, Any], with_profile: bool, tmp_path: Path) -> None:
    trained = train(tmp_path, {**STUMPS, **params}, classes=CLASSES, rounds=40)
    scaling = Scaling(pdo=30, score=500, odds=20)
    profile = some_profile(tmp_path) if with_profile else None
    card = Scorecard(FinishedModel.read(trained.path), scaling, profile)
    used = list(dict.fromkeys(one.feature for one in card.bins))
    assert set(used) & {*CATEGORIES} and set(used) - {*CATEGORIES}, "the card has numbers and categories"
    values = positions(trained.rows)
    values[:20] = np.nan
    rows = xgb.DMatrix(values, feature_names=NAMES, feature_types=trained.matrix.feature_types, enable_categorical=True)
    margins = trained.booster.predict(rows, output_margin=True)
    lines = [[bin_of(card, name, row[NAMES.index(name)]) for name in used] for row in values]
    points = [math.fsum(one.points for one in of_row) for of_row in lines]
    np.testing.assert_allclose(points, scaling.offset + scaling.factor * margins, atol=2e-4)
    assert scaling.factor == pytest.approx(-30 / math.log(2))
    if with_profile:
        of_profile = {
            one["name"]: one["bins"] for one in json.loads((tmp_path / "profile.json").read_text())["features"]
        }
        for of_row in lines[20:60]:
            for one in of_row:
                edge = np.searchsorted([-0.5, 0.25], -9 if one.low is None else one.low, side="right")
                if one.feature not in CATEGORIES and one.bin != "missing":
                    assert one.woe == -of_profile[one.feature][edge]["weights_of_evidence"][1]
        assert all(one.woe is not None and one.profile_bin for one in card.bins)


def test_points_by_hand() -> None:
    """One threshold at 2, leaves 0.3 and -0.4, missing values to the right, base 0.25: ln(1/3) of log-odds."""
    values = np.array([[1.0], [3.0]], np.float32)
    booster = xgb.train(
        {**STUMPS, "base_score": 0.25, "lambda": 0, "min_child_weight": 0},
        xgb.DMatrix(values, [1, 0], feature_names=["a"]),
        1,
    )
    document = json.loads(booster.save_raw("json"))
    (tree,) = document["learner"]["gradient_booster"]["model"]["trees"]
    tree["split_conditions"], tree["default_left"] = [2.0, 0.3, -0.4], [0, 0, 0]
    card = Scorecard(FinishedModel(json.dumps(document).encode(), "m.json"), Scaling(pdo=20, score=600, odds=50))
    assert [(one.bin, one.low, one.high) for one in card.bins] == [
        ("(-inf, 2)", None, 2.0),
        ("[2, inf)", 2.0, None),
        ("missing", None, None),
    ]
    base = 600 - 20 * math.log2(50) + 20 * math.log2(3)  # odds of the first class are 3 to 1 before any column
    assert [one.points for one in card.bins] == pytest.approx(
        [base - 20 * 0.3 / math.log(2), base + 20 * 0.4 / math.log(2), base + 20 * 0.4 / math.log(2)], abs=1e-4
    )
    whole = Scorecard(FinishedModel(json.dumps(document).encode(), "m.json"), Scaling(is_whole=True))
    assert [one.points for one in whole.bins] == [510, 530, 530]
    other = Scorecard(FinishedModel(json.dumps(document).encode(), "m.json"), Scaling(is_reversed=True))
    total = 600 + 20 * math.log2(math.exp(0.3) / 3 / 50)
    assert other.bins[0].points == pytest.approx(total, abs=1e-4)


# Counts of the second and the first class by two columns of 0 and 1, and what optbinning 1.0.0 makes of these rows with
# one split each, LogisticRegression(C=1e12), pdo 20, odds 50, 600 points.
COUNTS = {(0, 0): (256, 760), (0, 1): (160, 825), (1, 0): (555, 452), (1, 1): (393, 599)}
SCORES = {(0, 0): 517.98533407, (0, 1): 535.22382975, (1, 0): 481.61215681, (1, 1): 498.85065249}
WOE = {"a": [0.678813, -0.555698], "b": [-0.257082, 0.287026]}
POINTS = {"a": [273.065267, 236.692090], "b": [244.920067, 262.158563]}


def test_a_converged_model_has_the_points_of_optbinning(tmp_path: Path) -> None:
    rows = np.array([key for key in COUNTS for _ in range(2)], np.float32)
    label, weight = [1, 0] * 4, [n for counts in COUNTS.values() for n in counts]
    matrix = xgb.DMatrix(rows, label, weight=weight, feature_names=["a", "b"])
    booster = xgb.train({**STUMPS, "lambda": 0, "min_child_weight": 0, "max_bin": 4}, matrix, 200)
    of_column: dict[str, list[list[int]]] = {"a": [[0, 0], [0, 0]], "b": [[0, 0], [0, 0]]}
    for (a, b), (second, first) in COUNTS.items():
        for name, value in (("a", a), ("b", b)):
            of_column[name][value][0] += first
            of_column[name][value][1] += second
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_of({"a": [1.0], "b": [1.0]}, of_column, [0, 1])))
    card = Scorecard(FinishedModel(bytes(booster.save_raw("json")), "m.json"), Scaling(20, 600, 50), profile)
    for name, woe in WOE.items():
        lines = [one for one in card.bins if one.feature == name and one.bin != "missing"]
        assert [one.woe for one in lines] == pytest.approx(woe, abs=1e-6)
        low, high = POINTS[name]
        assert lines[1].points - lines[0].points == pytest.approx(high - low, abs=2e-3)
    for (a, b), score in SCORES.items():
        total = bin_of(card, "a", a).points + bin_of(card, "b", b).points
        assert total == pytest.approx(score, abs=2e-3)


# -- the command, and what is refused ---------------------------------------------------------------------------------


def test_the_command_writes_the_card_as_csv_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, profile = train(tmp_path, STUMPS, classes=CLASSES).path, some_profile(tmp_path)
    for name in ("card.csv", "card.json"):
        assert main(["scorecard", str(model), str(tmp_path / name), "--profile", str(profile), "--pdo", "40"]) == 0
    lines = list(csv.DictReader((tmp_path / "card.csv").open(encoding="utf-8")))
    document = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert [one["bin"] for one in lines] == [one["bin"] for one in document["bins"]]
    assert list(lines[0]) == ["feature", "bin", "low", "high", "profile_bin", "woe", "leaf", "points"]
    assert document["pdo"] == 40 and document["format"] == "veilboost-scorecard-1"
    assert (tmp_path / "card.csv").stat().st_mode & 0o777 == 0o600
    assert main(["scorecard", str(model), str(tmp_path / "card.txt")]) == 1
    assert "must end in .csv or .json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_depth": 2}, "train with max_depth 1"),
        ({"objective": "reg:squarederror"}, "no model of the log-odds of two classes"),
        ({"objective": "multi:softprob", "num_class": 3}, "no model of the log-odds of two classes"),
        ({"gamma": 1e9}, "splits on no column"),
    ],
)
def test_models_that_are_no_card(params: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=text):
        Scorecard(FinishedModel.read(train(tmp_path, {**STUMPS, **params}).path))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda told: told.update(format="other"), "no profile that this version reads"),
        (lambda told: told.pop("features"), "is no profile"),
        (lambda told: told["classes"].pop(), "is of the classes nein, and the model of nein, ja"),
        (lambda told: told["features"].pop(0), "lacks columns of the model: 'Größe"),
        (lambda told: told["features"][3]["bins"][0].update(categories=["x"]), "other categories than the model"),
    ],
)
def test_profiles_that_do_not_fit(change: Any, text: str, tmp_path: Path) -> None:
    model, path = train(tmp_path, STUMPS, classes=CLASSES).path, some_profile(tmp_path)
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigurationError, match=text):
        Scorecard(FinishedModel.read(model), profile=path)


@pytest.mark.parametrize("scaling", [{"pdo": 0.0}, {"odds": -1.0}, {"pdo": math.nan}, {"score": math.inf}])
def test_scalings_that_are_none(scaling: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(scaling))} must be a number"):
        Scaling(**scaling)
