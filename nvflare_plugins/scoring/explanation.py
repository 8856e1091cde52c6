"""What a finished model makes of one site's rows, as figures: curves of two classes, confusion, SHAP values.

Privacy: purely local; the figures show values of single rows, and belong on pages for this site alone.

How well predicted times order rows, and what chance of survival they mean.

Privacy: purely local; the result is about the rows that it is computed from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.data.table import Table
from nvflare_plugins.pages import model_charts
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.row_blocks import label_fields

_FEW = 64
Scores = NDArray[np.float64]


def concordance(bounds: Scores, predicted: Scores) -> float:
    """Return Harrell's index: of the pairs of which one row's event surely came first, how many are predicted so.

    Ties of predictions count a half; NaN where no pair is ordered. An event comes before what was not seen until the
    same time. Rows whose time lies in an interval are ordered where the intervals do not overlap.

    Shapes: bounds: float64[n_rows, 2], lower and upper, infinite without an event; predicted: float64[n_rows].
    Reference: Harrell et al., Evaluating the yield of medical tests (1982).
    """
    lower, upper = bounds.T
    is_event = np.isfinite(upper)
    # Later rows first; of one time, those without an event at it, then what asks for them, then events at it.
    keys = np.concatenate([lower, upper[is_event]])
    kinds = np.concatenate([np.where(upper > lower, 0, 2), np.ones(int(is_event.sum()), dtype=np.int64)])
    scores, order = np.concatenate([predicted, predicted[is_event]]), np.lexsort((kinds, -keys))
    pairs, points = _ordered(scores[order], kinds[order] == 1)
    return points / pairs if pairs else float("nan")


def _ordered(scores: Scores, asks: NDArray[np.bool_]) -> tuple[float, float]:
    """Count pairs of a row and a later one that asks, and half the ties and all whose row has the larger score."""
    n = scores.size
    if n <= _FEW:
        is_pair = np.triu(np.ones((n, n), dtype=np.bool_), 1) & ~asks[:, None] & asks
        signs = np.sign(scores[:, None] - scores)
        return float(is_pair.sum()), float((is_pair * (signs + 1)).sum() / 2)
    half = n // 2
    before, asking = np.sort(scores[:half][~asks[:half]]), scores[half:][asks[half:]]
    not_above = np.searchsorted(before, asking, side="left") + np.searchsorted(before, asking, side="right")
    pairs, points = float(before.size * asking.size), float(before.size * asking.size) - float(not_above.sum()) / 2
    for part in (slice(half), slice(half, None)):
        more, of_more = _ordered(scores[part], asks[part])
        pairs, points = pairs + more, points + of_more
    return pairs, points


def negative_log_likelihood(loss: Mapping[str, str], bounds: Scores, times: Scores, weight: Scores) -> float:
    """Return XGBoost's aft-nloglik of predicted times. Args: loss: the model's ``aft_loss_param``.

    Shapes: bounds: float64[n_rows, 2]; times, weight: float64[n_rows].
    """
    with np.errstate(divide="ignore"):
        margin = np.log(times)
    matrix = xgb.DMatrix(np.zeros((times.size, 1)), weight=weight, base_margin=margin, **label_fields(bounds))
    params = {**loss, "objective": "survival:aft", "eval_metric": "aft-nloglik", "nthread": 1}
    return float(xgb.Booster(params, [matrix]).eval(matrix).rpartition(":")[2])


def survival(loss: Mapping[str, str], times: Scores, at: Scores | float) -> Scores:
    """Return the chance that each row's event comes after a time, under the model's noise.

    Shapes: times: float64[n_rows], predicted; at: float64, one or as many; result: float64[n_rows].
    Reference: Barnwal, Cho, Hocking, arXiv:2006.04920, table 1.
    """
    from scipy.special import expit, ndtr

    with np.errstate(divide="ignore"):
        z = (np.log(at) - np.log(times)) / float(loss["aft_loss_distribution_scale"])
    of_noise = {"normal": lambda: ndtr(-z), "logistic": lambda: expit(-z)}
    found: Scores = of_noise.get(loss["aft_loss_distribution"], lambda: np.exp(-np.exp(np.minimum(z, 700.0))))()
    return found


_MOST_CLASSES = 20


def row_figures(model: FinishedModel, table: Table, scores: NDArray[np.float64]) -> model_charts.RowFigures:
    """Draw a model's answers for rows of this site, and how they come about.

    Shapes: scores: float64[n_rows] of numbers or of the second of two classes, float64[n_rows, n_classes] else.

    Args:
        table: whose label is a number, a place among the model's classes, or bounds of a time.
    """
    if later := model.direction_of_times:
        loss = model.loss_of_times
        chances = None if loss is None else lambda at: survival(loss, scores, at)
        times = model_charts.time_figures(table.label, later * scores, chances)
        return model_charts.RowFigures(None, (), *_shown(model, table, []), times)
    names = [str(one) for one in model.classes or ()]
    known = np.isin(table.label, range(len(names)))  # rows without weight may be of no class
    label, scores = table.label[known].astype(int), scores[known]
    classes: model_charts.ClassFigures | None = None
    confusion: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if len(names) == 2 and model.has_probabilities:
        classes = model_charts.class_figures(model_charts.counted_scores(scores, label == 1), names[1])
    elif 2 <= len(names) <= _MOST_CLASSES:
        found = (scores if scores.ndim == 1 else scores.argmax(axis=1)).astype(int)
        counts = np.bincount(label * len(names) + found, minlength=len(names) ** 2).reshape(len(names), -1)
        confusion = tuple(zip(names, map(tuple, counts.tolist()), strict=True))
    return model_charts.RowFigures(classes, confusion, *_shown(model, table, names))


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
        model_charts.beeswarm(features, of_output[:, :-1], values, lists),
        model_charts.waterfall(features, of_output[row, :-1], values[row], float(of_output[row, -1]), lists),
        words,
    )
