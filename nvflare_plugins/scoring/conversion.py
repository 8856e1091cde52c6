"""A finished model in the form of another library, for places that have neither VeilBoost nor XGBoost.

What is written answers as XGBoost does, and was asked before it is written: rows at, just below and just above the
model's own thresholds, and rows that lack values, must get XGBoost's predictions. Covers (``sum_hessian``), from which
row counts follow, are taken out, as in every copy that leaves a site.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.base.formatting import printable
from nvflare_plugins.scoring.errors import ScoringError
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.model_json import trees_model

Floats = NDArray[np.float32]
_PROBES = 256
_TOLERANCE = 1e-5  # of max(1, |prediction|): other libraries add the same float32 leaves in another order
_DECIDED = 1e-4  # margins that a class hangs on must be so far apart to be compared
_LABELS = ("multi:softmax", "binary:hinge")


def facts(model: FinishedModel) -> dict[str, Any]:
    """Return what a caller must know to fill in rows and read answers, as JSON values."""
    return {
        "features": [feature.name for feature in model.features],
        "categories": {one.name: list(one.categories) for one in model.features if one.categories is not None},
        "classes": None if model.classes is None else list(model.classes),
        "objective": model.objective,
        **({} if model.clipped_at is None else {"gradients_clipped_at": model.clipped_at}),
        "rows": "float32, columns in the order of features; categories by their position in the list; NaN is missing",
    }


def splits_by_sets(document: dict[str, Any]) -> bool:
    """Tell whether a tree of a model document splits a column by a set of more than one category."""
    trees = trees_model(document["learner"])["trees"]
    return any(size > 1 for tree in trees for size in tree["categories_sizes"])


def has_vector_leaves(document: dict[str, Any]) -> bool:
    """Tell whether the trees of a model document were grown with multi_output_tree."""
    trees = trees_model(document["learner"])["trees"]
    return any(int(tree["tree_param"].get("size_leaf_vector", 1)) > 1 for tree in trees)


def probes(model: FinishedModel) -> Floats:
    """Return rows on which two readers of a model would part. Shapes: result: float32[256, n_features]."""
    document = model.document()
    at: list[set[float]] = [{0.0} for _ in model.features]
    for tree in trees_model(document["learner"])["trees"]:
        nodes = zip(tree["left_children"], tree["split_indices"], tree["split_conditions"], strict=True)
        for left, feature, threshold in nodes:
            if left != -1:
                at[feature].add(float(threshold))
    draw = np.random.default_rng(0)  # any rows will do
    rows = np.empty((_PROBES, len(model.features)), dtype=np.float32)
    for place, feature in enumerate(model.features):
        if feature.categories is not None:
            rows[:, place] = draw.integers(0, len(feature.categories), _PROBES)
        else:
            exact = np.array(sorted(at[place]), dtype=np.float32)[draw.integers(0, len(at[place]), _PROBES)]
            around = [exact, np.nextafter(exact, np.float32(-np.inf)), np.nextafter(exact, np.float32(np.inf))]
            rows[:, place] = np.choose(draw.integers(0, 3, _PROBES), around)
        rows[draw.random(_PROBES) < 0.1, place] = np.nan
    return rows


def check(model: FinishedModel, library: str, answer: Callable[[Floats], Floats], labels: bool = True) -> None:
    """Refuse a conversion whose answers are not XGBoost's.

    Args:
        answer: float32[n_rows, n_features] -> XGBoost's ``predict`` of these rows, as converted.
        labels: objectives that predict classes give them; else the probabilities of these.

    Raises:
        ScoringError: an answer differs.
    """
    rows = probes(model)
    found = np.asarray(answer(rows), dtype=np.float64).reshape(len(rows), -1)
    as_labels = labels or model.objective != "multi:softmax"
    answers = model.predict(rows) if as_labels else model.probabilities(rows)
    wanted = answers.reshape(len(rows), -1).astype(np.float64)
    decided = np.ones(len(rows), dtype=np.bool_)
    if model.objective in _LABELS and as_labels:
        margins = model.predict(rows, output_margin=True).reshape(len(rows), -1).astype(np.float64)
        both = np.column_stack([margins, np.zeros(len(rows))]) if margins.shape[1] == 1 else margins
        ordered = np.sort(both, axis=1)
        decided = ordered[:, -1] - ordered[:, -2] > _DECIDED
    same_shape = found.shape == wanted.shape
    if not same_shape or not (np.abs(found - wanted) <= _TOLERANCE * np.maximum(1, np.abs(wanted)))[decided].all():
        raise ScoringError(
            f"{model.name} is not converted: {library} answers otherwise than XGBoost does for this model. Export a "
            "copy in XGBoost's own form (a name that ends in .json)"
        )


def refusal(model: FinishedModel, library: str, why: str) -> ScoringError:
    """Return the error for a model that a library cannot hold."""
    return ScoringError(
        f"{model.name} cannot be converted to {library}: {why}. Export a copy in XGBoost's own form (a name that ends "
        "in .json), or another format"
    )


def missing(library: str, extra: str, error: ImportError) -> ScoringError:
    """Return the error for a library that is not installed."""
    reason = printable(str(error), 200)
    return ScoringError(f"{library} is not installed ({reason}): pip install 'veilboost[{extra}]'")


def as_text(document: object) -> str:
    """Return facts as a library's attribute holds them."""
    return json.dumps(document, ensure_ascii=False)
