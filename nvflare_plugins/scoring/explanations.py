"""SHAP values of a finished model as columns of a file, and the picture of its strongest features.

SHAP values explain the margin: log-odds for binary:logistic, a score for each class under multi:softprob, the logarithm
of the answer for count:poisson, reg:gamma and reg:tweedie, the answer itself for other regressions. Those of a row, and
the bias, add up to its margin.

Reference: Lundberg et al., Consistent individualized feature attribution for tree ensembles (2018), algorithm 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.formatting import number
from nvflare_plugins.report.charts import Bar, horizontal_bars, picture
from nvflare_plugins.scoring.model import FinishedModel

_MOST_BARS = 20
_BIAS = "bias"


def shap_columns(model: FinishedModel, contributions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Return SHAP values by the name of their column: shap.FEATURE, or shap.CLASS.FEATURE; last the bias, shap_bias.

    Shapes: contributions: as ``FinishedModel.contributions``; float32[n_rows] each.
    """
    n_outputs = contributions.shape[1]
    outputs = [""] if n_outputs == 1 else [f".{one}" for one in model.classes or ()]
    columns: dict[str, NDArray[np.float32]] = {}
    for output, of_class in enumerate(outputs):
        names = [*(f"shap{of_class}.{feature.name}" for feature in model.features), f"shap_{_BIAS}{of_class}"]
        columns |= {name: contributions[:, output, place] for place, name in enumerate(names)}
    return columns


class Strengths:
    """Mean absolute SHAP values of a model's features, over rows that are seen some at a time."""

    def __init__(self, model: FinishedModel) -> None:
        self._model, self.n_rows = model, 0
        self._sums: NDArray[np.float64] = np.zeros(len(model.features))

    def add(self, contributions: NDArray[np.float32]) -> None:
        """Take rows into account. Shapes: contributions: as ``FinishedModel.contributions``."""
        if contributions.shape[0]:
            self.n_rows += contributions.shape[0]
            self._sums += np.abs(contributions[:, :, :-1].astype(np.float64)).mean(axis=1).sum(axis=0)

    def ranked(self) -> list[tuple[str, float]]:
        """Return features with their mean over at least one row, the largest first."""
        strength = self._sums / self.n_rows
        order = np.argsort(-strength, kind="stable")
        return [(self._model.features[place].name, float(strength[place])) for place in order]

    def picture(self) -> bytes:
        """Return the strongest features of at least one row as SVG."""
        ranked = [entry for entry in self.ranked() if entry[1] > 0][:_MOST_BARS]
        bars = [Bar(name, value, number(value)) for name, value in ranked]
        caption = f"Mean |SHAP value| of the margin over {self.n_rows:,} rows"
        return picture(horizontal_bars(bars), caption).encode()
