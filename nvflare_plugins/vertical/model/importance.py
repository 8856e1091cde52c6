"""How much each feature contributes to a vertical model, under the aliases that the parties chose.

Importance needs gains, covers and counts of splits, which the active party's part holds for all features; thresholds
play no role. The numbers are those of the centralized model, with its names in the place of the aliases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xgboost as xgb

from nvflare_plugins.files import inert_csv, write_atomically
from nvflare_plugins.vertical.model.model_files import ActivePart
from nvflare_plugins.xgb.model_json import NO_LISTS, model_bytes

KINDS = ("weight", "gain", "total_gain", "cover", "total_cover")
FILE_NAME = "importance.csv"


@dataclass(frozen=True, slots=True)
class FeatureImportance:
    """One feature. Attributes: party: "" for the active party; kinds as XGBoost's ``get_score`` names them."""

    party: str
    feature: str
    weight: float
    gain: float
    total_gain: float
    cover: float
    total_cover: float


def feature_importance(part: ActivePart, first_round: int = 0, end_round: int | None = None) -> list[FeatureImportance]:
    """Return the importance of every feature, the greatest total gain first; a feature without a split has zeros.

    Privacy: local at the active party, which has learnt gains and covers in training.
    """
    document = json.loads(part.booster)
    features = [("", name) for name in part.columns]
    features += [(party.site, alias) for party in part.parties for alias in party.aliases]
    # By position: XGBoost would not take the same name twice, and parties may choose equal ones.
    document["learner"]["feature_names"] = [f"f{i}" for i in range(len(features))]
    document["learner"]["feature_types"] = ["float"] * len(features)
    document["learner"]["gradient_booster"]["model"]["cats"] = NO_LISTS
    booster = xgb.Booster(model_file=bytearray(model_bytes(document)))
    booster = booster[first_round : end_round if end_round is not None else booster.num_boosted_rounds()]
    scores: dict[str, dict[str, Any]] = {kind: booster.get_score(importance_type=kind) for kind in KINDS}
    rows = [
        FeatureImportance(party, feature, **{kind: float(scores[kind].get(f"f{i}", 0.0)) for kind in KINDS})
        for i, (party, feature) in enumerate(features)
    ]
    return sorted(rows, key=lambda row: -row.total_gain)


def write_importance(folder: Path, rows: list[FeatureImportance]) -> Path:
    """Write ``importance.csv``. Privacy: aliases and sums over rows; no threshold."""
    lines = [(row.party, row.feature, *(repr(getattr(row, kind)) for kind in KINDS)) for row in rows]
    return write_atomically(folder / FILE_NAME, inert_csv([("party", "feature", *KINDS), *lines]))
