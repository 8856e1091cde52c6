"""``veilboost export``: a copy of a model that may leave the site.

XGBoost writes into every node how much hessian its rows weigh (``sum_hessian``), from which row counts follow. A copy
for others has NaN there and says so in an attribute; structure, thresholds and leaves, which predictions need, stay
and go on telling something about the data. SHAP values weigh the paths of a tree by that hessian: from such a copy
XGBoost 3.2 gives NaN and 3.3 an error. Under any number, 0 among them, one of the two gives values that look right and
are not.

By the suffix of its name the copy is XGBoost's own JSON (``.json``), ONNX (``.onnx``) or treelite's checkpoint
(``.treelite``); the last two hold no hessian.
"""

from __future__ import annotations

import argparse
import json

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.failures import reason_of
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.cli.outputs import check_output
from nvflare_plugins.xgb.model_json import model_bytes, trees_model

STRIPPED_ATTRIBUTE = "veilboost_sum_hessian"
STRIPPED_NOTE = "set to NaN before the model left its site; cover and SHAP values are not available"
ONNX, TREELITE = ".onnx", ".treelite"
_NO_MODEL = "this file is not a JSON model of XGBoost (a part of a vertical model is none: the action merge makes one)"


def strip_sum_hessian(model: bytes) -> bytes:
    """Return a JSON model with every ``sum_hessian`` set to NaN and an attribute that says so.

    Raises:
        ConfigurationError: not a JSON model of XGBoost.
    """
    try:
        document = json.loads(model)
        learner = document["learner"]
        trees = trees_model(learner)["trees"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigurationError(_NO_MODEL) from None
    try:
        for tree in trees:
            tree["sum_hessian"] = [float("nan")] * len(tree["sum_hessian"])
        learner.setdefault("attributes", {})[STRIPPED_ATTRIBUTE] = STRIPPED_NOTE
        return model_bytes(document)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigurationError("the model holds a tree that is none, or is damaged: copy it again") from None


def run(options: argparse.Namespace) -> int:
    """Write the copy."""
    output, suffix = options.output, options.output.suffix.lower()
    check_output("the copy", output, ".json", ONNX, TREELITE)
    if output.exists() and options.model.exists() and output.samefile(options.model):
        raise ConfigurationError(f"{output} is the model itself, which would lose its covers: name another file")
    if suffix in (ONNX, TREELITE):
        content, what = _converted(options, suffix), "row counts are not in it"
    else:
        try:
            model = options.model.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read {options.model}: {error.strerror}") from None
        content = strip_sum_hessian(model)
        what = "sum_hessian is NaN throughout, so that no SHAP values come from it"
    try:
        write_atomically(output, content)
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {reason_of(error)}") from None
    print(f"wrote {output}: {what}; thresholds and leaves still tell about the data")
    return 0


def _converted(options: argparse.Namespace, suffix: str) -> bytes:
    """Return the model in another library's form, which is loaded for it alone."""
    from nvflare_plugins.scoring.model import FinishedModel
    from nvflare_plugins.scoring.onnx_model import to_onnx
    from nvflare_plugins.scoring.treelite_model import to_treelite

    return (to_onnx if suffix == ONNX else to_treelite)(FinishedModel.read(options.model))
