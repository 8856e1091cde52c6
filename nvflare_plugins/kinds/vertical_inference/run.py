"""What the steps of one attempt with a finished model share, and the files that it leaves."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.files import write_atomically, write_results
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.kinds.vertical.conversation import FlowControl
from nvflare_plugins.kinds.vertical.messages import Message
from nvflare_plugins.kinds.vertical.model_files import ModelIdentity
from nvflare_plugins.kinds.vertical_inference.inference import Predictions
from nvflare_plugins.kinds.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.kinds.vertical_inference.rows import Rows

# What the steps of one attempt of a job with a finished vertical model share, whatever the job does with it.


@dataclass(frozen=True, slots=True)
class Run:
    """What the steps of one attempt share."""

    attempt: SiteAttempt
    identity: ModelIdentity

    @property
    def job(self) -> InferenceJob:
        job: InferenceJob = self.attempt.job
        return job

    @property
    def context(self) -> SiteContext:
        return self.attempt.context

    @property
    def action(self) -> Action:
        return Action(self.job.action)

    @property
    def active_rank(self) -> int:
        return self.context.sites.index(self.identity.active)

    def give_active(self, content: bytes, what: Content) -> None:
        """Give the active party what the owners' consent allows."""
        self.attempt.route_sealed(self.job.action, {self.active_rank: content}, what, Protection.CLEAR)

    def take_from_owners(self, what: Content) -> dict[str, bytes]:
        """Return what each passive party gave, at the active party."""
        parts = self.attempt.route_sealed(self.job.action, {}, what, Protection.CLEAR)
        given = {site: part for site, part in zip(self.context.sites, parts, strict=True) if site != self.context.site}
        missing = [site for site, part in given.items() if not part]
        if missing:
            raise ProtocolError(f"{missing[0]} did not give its part")
        return given


def pace_of(run: Run, n_splits: int) -> FlowControl:
    """Return the pace of the conversation; a question names every split at most once."""
    longest = 1024 + n_splits * (16 + run.job.batch_rows // 8)
    return dataclasses.replace(FlowControl.within(run.attempt.timeout_s), message_bytes=longest)


class ContentNotes:
    """Notes in the evidence what passes between the active party and the owners of splits."""

    def __init__(self, attempt: SiteAttempt):
        self._evidence = attempt.evidence

    def sent(self, peer: str, message: Message, size: int) -> None:
        self.note("sent", peer, Content.DECISION_REQUEST, size)

    def received(self, peer: str, message: Message, size: int) -> None:
        self.note("received", peer, Content.DECISIONS, size)

    def note(self, direction: str, peer: str, what: Content, size: int) -> None:
        self._evidence.content(direction, peer, what, Protection.CLEAR, size)


# What a job with a vertical model leaves at the active party: predictions, SHAP values, the merged model.
#
# Files appear whole or not at all, and are for the owner of the process alone.


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
