"""What a finished model makes of one site's rows, as figures: curves of two classes, confusion, SHAP values.

Privacy: purely local; the figures show values of single rows, and belong on pages for this site alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.data.table import Table
from nvflare_plugins.pages.model_charts import (
    ClassFigures,
    RowFigures,
    beeswarm,
    class_figures,
    counted_scores,
    time_figures,
    waterfall,
)
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from nvflare_plugins.scoring.survival import survival

_MOST_CLASSES = 20


def row_figures(model: FinishedModel, table: Table, scores: NDArray[np.float64]) -> RowFigures:
    """Draw a model's answers for rows of this site, and how they come about.

    Shapes: scores: float64[n_rows] of numbers or of the second of two classes, float64[n_rows, n_classes] else.

    Args:
        table: whose label is a number, a place among the model's classes, or bounds of a time.
    """
    if later := model.direction_of_times:
        loss = model.loss_of_times
        chances = None if loss is None else lambda at: survival(loss, scores, at)
        times = time_figures(table.label, later * scores, chances)
        return RowFigures(None, (), *_shown(model, table, []), times)
    names = [str(one) for one in model.classes or ()]
    known = np.isin(table.label, range(len(names)))  # rows without weight may be of no class
    label, scores = table.label[known].astype(int), scores[known]
    classes: ClassFigures | None = None
    confusion: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if len(names) == 2 and model.has_probabilities:
        classes = class_figures(counted_scores(scores, label == 1), names[1])
    elif 2 <= len(names) <= _MOST_CLASSES:
        found = (scores if scores.ndim == 1 else scores.argmax(axis=1)).astype(int)
        counts = np.bincount(label * len(names) + found, minlength=len(names) ** 2).reshape(len(names), -1)
        confusion = tuple(zip(names, map(tuple, counts.tolist()), strict=True))
    return RowFigures(classes, confusion, *_shown(model, table, names))


def _shown(model: FinishedModel, table: Table, names: list[str]) -> tuple[str, str, str]:
    """Return what ``_explained`` does, or why there is nothing."""
    try:
        return _explained(model, next(iter(table.blocks())), names)
    except ScoringError as error:
        return "", "", str(error)


def _explained(model: FinishedModel, values: NDArray[np.float32], names: list[str]) -> tuple[str, str, str]:
    """Return the swarm of the first block's rows, the waterfall of one of them, and what they explain.

    Raises:
        ScoringError: SHAP values would be wrong.
    """
    shap = model.contributions(values)
    output = int(np.abs(shap[:, :, :-1]).sum(axis=(0, 2)).argmax())  # of several classes that which moves most
    of_output, features = shap[:, output], [one.name for one in model.features]
    lists = {one.name: one.categories for one in model.features if one.categories is not None}
    row = int(of_output.sum(axis=1).argmax())
    words = (
        f"They explain the margin of {names[output] if shap.shape[1] > 1 else names[1] if names else 'the prediction'}."
    )
    return (
        beeswarm(features, of_output[:, :-1], values, lists),
        waterfall(features, of_output[row, :-1], values[row], float(of_output[row, -1]), lists),
        words,
    )
