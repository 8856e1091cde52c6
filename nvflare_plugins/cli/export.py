"""``veilboost export``: a copy of a model that may leave the site.

XGBoost writes into every node how much hessian its rows weigh (``sum_hessian``), from which row counts follow. A copy
for others has NaN there and says so in an attribute; structure, thresholds and leaves, which predictions need, stay
and go on telling something about the data. SHAP values weigh the paths of a tree by that hessian: from such a copy
XGBoost 3.2 gives NaN and 3.3 an error. Under any number, 0 among them, one of the two gives values that look right and
are not.

By the suffix of its name the copy is ONNX (``.onnx``) or treelite's checkpoint (``.treelite``), neither of which holds
a hessian; else it is XGBoost's own JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.files import write_atomically
from nvflare_plugins.xgb.model_json import model_bytes

STRIPPED_ATTRIBUTE = "veilboost_sum_hessian"
STRIPPED_NOTE = "set to NaN before the model left its site; cover and SHAP values are not available"
ONNX, TREELITE = ".onnx", ".treelite"


def strip_sum_hessian(model: bytes) -> bytes:
    """Return a JSON model with every ``sum_hessian`` set to NaN and an attribute that says so.

    Raises:
        ConfigurationError: not a JSON model of XGBoost.
    """
    document = _parse(model)
    for tree in _trees(document):
        tree["sum_hessian"] = [float("nan")] * len(tree["sum_hessian"])
    document["learner"].setdefault("attributes", {})[STRIPPED_ATTRIBUTE] = STRIPPED_NOTE
    return model_bytes(document)


def _parse(model: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(model)
        document["learner"]["gradient_booster"]
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(
            "this file is not a JSON model of XGBoost (a part of a vertical model is none: the action merge makes one)"
        ) from None
    return document


def _trees(document: dict[str, Any]) -> list[dict[str, Any]]:
    booster = document["learner"]["gradient_booster"]
    booster = booster.get("gbtree", booster)  # dart wraps its trees
    try:
        trees: list[dict[str, Any]] = booster["model"]["trees"]
        return trees
    except (KeyError, TypeError):
        raise ConfigurationError("the model holds no trees") from None


def run(options: argparse.Namespace) -> int:
    """Write the copy."""
    suffix = options.output.suffix.lower()
    if suffix in (ONNX, TREELITE):
        write_atomically(options.output, _converted(options, suffix))
        what = "row counts are not in it"
    else:
        try:
            model = options.model.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read {options.model}: {error.strerror}") from None
        write_atomically(options.output, strip_sum_hessian(model))
        what = "sum_hessian is NaN throughout, so that no SHAP values come from it"
    print(f"wrote {options.output}: {what}; thresholds and leaves still tell about the data")
    return 0


def _converted(options: argparse.Namespace, suffix: str) -> bytes:
    """Return the model in another library's form, which is loaded for it alone."""
    from nvflare_plugins.scoring.model import FinishedModel
    from nvflare_plugins.scoring.onnx_model import to_onnx
    from nvflare_plugins.scoring.treelite_model import to_treelite

    return (to_onnx if suffix == ONNX else to_treelite)(FinishedModel.read(options.model))
