"""A finished model as treelite's checkpoint: ``treelite.Model.deserialize`` reads it.

Every objective and booster of horizontal jobs converts, categories and vector leaves included. ``multi:softmax``
answers the probabilities of the classes, of which XGBoost predicts the largest.
"""

from __future__ import annotations

import numpy as np

from nvflare_plugins.scoring.conversion import Floats, as_text, check, facts, missing
from nvflare_plugins.scoring.errors import ScoringError
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.model_json import bare_model, trees_model

LIBRARY, EXTRA = "treelite", "treelite"
ATTRIBUTE = "veilboost"


def to_treelite(model: FinishedModel) -> bytes:
    """Return the checkpoint; its attributes hold the facts on columns, categories and classes under ``veilboost``.

    Raises:
        ScoringError: treelite is not installed, does not read the model, or would answer otherwise than XGBoost.
    """
    try:
        import treelite
        from treelite import gtil
    except ImportError as error:
        raise missing(LIBRARY, EXTRA, error) from None
    document = model.document()
    for tree in trees_model(document["learner"])["trees"]:
        del tree["sum_hessian"]
    try:
        converted = treelite.frontend.from_xgboost_json(bare_model(document))
    except treelite.TreeliteError:
        raise ScoringError(
            f"{model.name} cannot be converted: treelite {treelite.__version__} does not read it"
        ) from None
    converted.get_header_accessor().set_field("attributes", as_text({ATTRIBUTE: facts(model)}))

    def answer(rows: Floats) -> Floats:
        return np.asarray(gtil.predict(converted, rows), dtype=np.float32)

    check(model, LIBRARY, answer, labels=False)
    content: bytes = converted.serialize_bytes()
    return content
