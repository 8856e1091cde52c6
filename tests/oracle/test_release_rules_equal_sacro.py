"""The rules of release judge models as SACRO-ML's structural attack does, where both look at the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.data.table import Table
from nvflare_plugins.dossier.structure import Trained, judge
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.site.policy_values import ReleaseRules

pytest.importorskip("sacroml", reason="SACRO-ML 2.0 in an environment of its own")
SAME = {  # of SACRO-ML's results: the rule that asks the same
    "dof_risk": "min_degrees_of_freedom",
    "unnecessary_risk": "allow_unnecessary_risk",
    "k_anonymity_risk": "max_share_in_small_groups",
    "class_disclosure_risk": "max_share_certain",
    "smallgroup_risk": "max_share_in_small_cells",
}
SETTINGS = [
    {"max_depth": depth, "n_estimators": rounds, "min_child_weight": weight, "learning_rate": rate}
    for depth, rounds, weight, rate in (
        (1, 3, 1, 0.3),
        (2, 2, 50, 0.3),
        (3, 100, 1, 0.3),
        (4, 3, 0.5, 0.3),
        (4, 4, 1.5, 0.3),
        (4, 12, 1.6, 0.3),
        (4, 13, 3, 0.3),
        (4, 62, 3.1, 0.3),
        (4, 63, 6, 0.3),
        (6, 63, 6.1, 0.3),
        (6, 200, 0.1, 1.0),
        (1, 1, 200, 0.3),
    )
] + [{"max_depth": 3, "n_estimators": 60, "min_child_weight": 0, "learning_rate": 1.0, "reg_lambda": 0}]


def test_the_verdicts_are_those_of_sacro(tmp_path: Path) -> None:
    seen = {
        (name, at_risk)
        for classes in (2, 3)
        for data in ("few", "coarse", "certain")
        for settings in SETTINGS
        for name, at_risk in _compared(*_rows(classes, data), settings, tmp_path)
    }
    assert seen == {(name, at_risk) for name in SAME for at_risk in (True, False)}  # each verdict has been asked for


def _rows(classes: int, data: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(classes)
    n = 120 if data == "few" else 3000
    features = random.normal(size=(n, 4)) if data == "few" else random.integers(0, 3, (n, 4)).astype(float)
    noise = 0 if data == "certain" else random.integers(0, 2, n)
    return features, (((features[:, 0] > 0) + (features[:, 1] > 1) + noise) % classes).astype(np.int64)


def _compared(features: np.ndarray, label: np.ndarray, settings: dict, folder: Path) -> Iterator[tuple[str, bool]]:
    from sacroml.attacks.structural_attack import StructuralAttack
    from sacroml.attacks.target import Target

    model = xgb.XGBClassifier(**settings, n_jobs=1).fit(features, label)
    rows = {"X_train": features, "y_train": label, "X_test": features, "y_test": label}
    attack = StructuralAttack(output_dir=str(folder), write_report=False)
    attack.attack(Target(model=model, dataset_name="synthetic", **rows))
    booster = model.get_booster()
    booster.feature_names = list("abcd")
    table = Table(features.astype(np.float32), tuple("abcd"), ("float",) * 4, label.astype(np.float32), "y")
    trained = Trained(settings["n_estimators"], settings, covers_are_of_rows=False, weighs_rows=False)
    finished = FinishedModel(bytes(booster.save_raw("json")), "model.json")
    ours = {one.rule: one for one in judge(finished, table, trained, ReleaseRules())}
    for name, rule in SAME.items():
        theirs = getattr(attack.results, name)
        assert bool(theirs) is not ours[rule].holds, (settings, name, ours[rule].measured)
        yield name, bool(theirs)
