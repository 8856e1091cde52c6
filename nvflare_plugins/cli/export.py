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

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.failures import reason_of
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.cli.outputs import check_output

ONNX, TREELITE = ".onnx", ".treelite"


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
        from nvflare_plugins.scoring.export import strip_sum_hessian

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
    from nvflare_plugins.scoring.export import to_onnx, to_treelite
    from nvflare_plugins.scoring.model import FinishedModel

    return (to_onnx if suffix == ONNX else to_treelite)(FinishedModel.read(options.model))
