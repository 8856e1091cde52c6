"""The rules of release judge models as SACRO-ML's structural attack does, where both look at the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.data.table import Table
from nvflare_plugins.dossier.structure import Trained, judge
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.site.policy_values import ReleaseRules
from tests.support.examples import quick

SAME = {  # of SACRO-ML's results: the rule that asks the same
    "dof_risk": "min_degrees_of_freedom",
    "unnecessary_risk": "allow_unnecessary_risk",
    "k_anonymity_risk": "max_share_in_small_groups",
    "class_disclosure_risk": "max_share_certain",
    "smallgroup_risk": "max_share_in_small_cells",
}
SETTINGS = [
    {"max_depth": depth, "n_estimators": rounds, "min_child_weight": weight, "learning_rate": rate, "reg_lambda": decay}
    for depth, rounds, weight, rate, decay in (
        (1, 3, 1, 0.3, 1),
        (2, 2, 50, 0.3, 1),
        (3, 100, 1, 0.3, 1),
        (4, 3, 0.5, 0.3, 1),
        (4, 4, 1.5, 0.3, 1),
        (4, 12, 1.6, 0.3, 1),
        (4, 13, 3, 0.3, 1),
        (4, 62, 3.1, 0.3, 1),
        (4, 63, 6, 0.3, 1),
        (6, 63, 6.1, 0.3, 1),
        (6, 200, 0.1, 1.0, 1),
        (1, 1, 200, 0.3, 1),
        (3, 60, 0, 1.0, 0),
    )
]
KNOWN = {
    (2, "few"): "k0lkmlnlnln0t",
    (2, "coarse"): "00g0202gihi0g",
    (2, "certain"): "00g02gigigi0o",
    (3, "few"): "k0llnlnlnln0t",
    (3, "coarse"): "0ghgigihjhj0p",
    (3, "certain"): "00g02gigigi0o",
}
"""Verdicts of SACRO-ML 2.0.1 on models of these settings, a digit of base 32 each: the risks of ``SAME`` in order."""
_DIGITS = "0123456789abcdefghijklmnopqrstuv"


@pytest.mark.parametrize(
    ("classes", "data"),
    quick(KNOWN, (2, "few"), (3, "certain")),
)
def test_the_verdicts_are_those_of_sacro(classes: int, data: str) -> None:
    assert "".join(_ours(*_fitted(classes, data, settings)) for settings in SETTINGS) == KNOWN[classes, data]


def test_every_verdict_is_asked_for() -> None:
    digits = [_DIGITS.index(digit) for known in KNOWN.values() for digit in known]
    assert len(digits) == len(KNOWN) * len(SETTINGS)
    assert all({digit >> place & 1 for digit in digits} == {0, 1} for place in range(len(SAME)))


@pytest.mark.skipif(importlib.util.find_spec("sacroml") is None, reason="needs SACRO-ML (pip install sacroml)")
@pytest.mark.parametrize(("classes", "data"), KNOWN)
def test_the_known_verdicts_are_what_sacro_says(classes: int, data: str, tmp_path: Path) -> None:
    from sacroml.attacks.structural_attack import StructuralAttack
    from sacroml.attacks.target import Target

    found = ""
    for settings in SETTINGS:
        features, label, model, _ = _fitted(classes, data, settings)
        rows = {"X_train": features, "y_train": label, "X_test": features, "y_test": label}
        attack = StructuralAttack(output_dir=str(tmp_path), write_report=False)
        attack.attack(Target(model=model, dataset_name="synthetic", **rows))
        found += _digit([bool(getattr(attack.results, name)) for name in SAME])
    assert found == KNOWN[classes, data]


Fitted = tuple[np.ndarray, np.ndarray, xgb.XGBClassifier, dict]


def _fitted(classes: int, data: str, settings: dict) -> Fitted:
    random = np.random.default_rng(classes)
    n = 120 if data == "few" else 3000
    features = random.normal(size=(n, 4)) if data == "few" else random.integers(0, 3, (n, 4)).astype(float)
    noise = 0 if data == "certain" else random.integers(0, 2, n)
    label = (((features[:, 0] > 0) + (features[:, 1] > 1) + noise) % classes).astype(np.int64)
    return features, label, xgb.XGBClassifier(**settings, n_jobs=1).fit(features, label), settings


def _ours(features: np.ndarray, label: np.ndarray, model: xgb.XGBClassifier, settings: dict) -> str:
    booster = model.get_booster()
    booster.feature_names = list("abcd")
    table = Table(features.astype(np.float32), tuple("abcd"), ("float",) * 4, label.astype(np.float32), "y")
    trained = Trained(settings["n_estimators"], settings, covers_are_of_rows=False, weighs_rows=False)
    finished = FinishedModel(bytes(booster.save_raw("json")), "model.json")
    found = {one.rule: one for one in judge(finished, table, trained, ReleaseRules())}
    return _digit([not found[rule].holds for rule in SAME.values()])


def _digit(risks: list[bool]) -> str:
    return _DIGITS[sum(risk << place for place, risk in enumerate(risks))]
