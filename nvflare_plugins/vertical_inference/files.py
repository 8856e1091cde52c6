"""What a job with a vertical model leaves at the active party: predictions, SHAP values, the merged model.

Files appear whole or not at all, and are for the owner of the process alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nvflare_plugins.files import write_atomically, write_results
from nvflare_plugins.vertical_inference.inference import Predictions
from nvflare_plugins.vertical_inference.rows import Rows

_log = logging.getLogger(__name__)
MERGED_FILE = "merged_model.json"


def write_predictions(
    folder: Path, rows: Rows, predictions: Predictions, classes: Sequence[str | int], file_format: str
) -> Path:
    """Write ``predictions.<format>``: position (and id) of each row, margin, what XGBoost predicts, and the class.

    Args:
        classes: as the training declared them, see ``class_names``; they name the columns of several outputs too.
    """
    columns = _row_columns(rows)
    columns |= _columns("margin", predictions.margin, classes)
    columns |= _columns("probability" if predictions.value.ndim > 1 else "prediction", predictions.value, classes)
    if predictions.classes is not None:
        columns["class"] = _named(classes)[predictions.classes]
    return _write(folder / "predictions", columns, file_format)


def write_contributions(
    folder: Path,
    rows: Rows,
    names: Sequence[str],
    contributions: NDArray[np.float32],
    classes: Sequence[str | int],
    file_format: str,
) -> Path:
    """Write ``contributions.<format>``: SHAP values, one line for each row, or for each row and class.

    Args:
        classes: as ``write_predictions``.

    Shapes: contributions: float32[n_rows, n_features + 1] or float32[n_rows, n_classes, n_features + 1]; bias last.
    """
    columns = _row_columns(rows)
    if contributions.ndim == 3:
        n_classes = contributions.shape[1]
        columns = {name: np.repeat(values, n_classes) for name, values in columns.items()}
        columns["class"] = np.tile(_named(classes), rows.n_rows)
        contributions = contributions.reshape(-1, contributions.shape[2])
    # The prefix keeps apart a feature that is called "row" or "bias".
    columns |= {f"shap_{name}": contributions[:, i] for i, name in enumerate(names)}
    return _write(folder / "contributions", {**columns, "bias": contributions[:, -1]}, file_format)


def write_merged(folder: Path, model: bytes) -> Path:
    """Write the merged model. Privacy: it holds the thresholds of all parties, who have consented to that."""
    return write_atomically(folder / MERGED_FILE, model, mode=0o600)


def _row_columns(rows: Rows) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {"row": np.arange(rows.first, rows.first + rows.n_rows)}
    if rows.ids is not None:
        columns["id"] = np.array([one.decode() for one in rows.ids], dtype=object)
    return columns


def _columns(name: str, values: NDArray[np.float32], classes: Sequence[str | int]) -> dict[str, NDArray[Any]]:
    if values.ndim == 1:
        return {name: values}
    return {f"{name}_{one}": values[:, place] for place, one in enumerate(classes)}


def _named(classes: Sequence[str | int]) -> NDArray[Any]:
    are_numbers = all(isinstance(one, int) for one in classes)
    return np.array(classes) if are_numbers else np.array([str(one) for one in classes], dtype=object)


def _write(stem: Path, columns: dict[str, NDArray[Any]], file_format: str) -> Path:
    path = stem.with_suffix(f".{file_format}")
    changed = write_results(path, pd.DataFrame(columns))
    if changed:
        _log.info("texts in %s that a spreadsheet would compute got an apostrophe before them: %d", path.name, changed)
    return path
