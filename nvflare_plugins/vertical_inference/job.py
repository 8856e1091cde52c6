"""What a job with a finished vertical model says. Where parts and data lie, each site's own policy and runs say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from nvflare_plugins.checks import check_fields, expect, is_text, job_id_or_none, one_of, seconds
from nvflare_plugins.vertical.job import ALIGN_FIRST
from nvflare_plugins.vertical_inference.inference import BATCH_ROWS

PROFILE = "vertical_model"  # the one way in which such a job protects its messages; the evidence names it
_MAX_BATCH_ROWS = 1 << 20


class Action(Enum):
    """What to do with the model."""

    PREDICT = "predict"
    EXPLAIN = "explain"
    MERGE = "merge"


class FileFormat(Enum):
    """Form of the file with predictions or explanations."""

    PARQUET = "parquet"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """One use of a vertical model by all of its parties. Results are at the active party alone.

    Attributes:
        model: id of the job that trained the model. Every site reads its part from that job's run folder, or from
            ``<id>.<site>.json`` in its input folder.
        action: ``predict``; ``explain`` (SHAP values; every passive party's policy must consent to ``explain``); or
            ``merge`` (one ordinary XGBoost model; every passive party must consent to ``merge_model``).
        data_set: name in every site's policy of the rows to predict or explain.
        rows: [first, end): positions in the aligned set; None takes all of it.
        rounds: ``all``, ``best`` (up to the best round of early stopping), or [first, end) boosting rounds.
        alignment: ``first`` finds the common rows by private set intersection; the id of a finished job of the same
            sites takes those that it found (a training job that aligned this data set will do; a set is aligned only
            once); None means that the files of all sites hold the same rows in the same order.
        file_format: ``parquet`` or ``csv``.
        batch_rows: rows that are on their way at the same time; the result does not depend on it.
        deadline_s: longest time that an exchange may wait for the slowest site; 0 derives it.
    """

    profile: ClassVar[str] = PROFILE
    tracking: ClassVar[bool] = False

    model: str
    action: str = Action.PREDICT.value
    data_set: str | None = None
    rows: list[int] | None = None
    rounds: str | list[int] = "all"
    alignment: str | None = None
    file_format: str = FileFormat.PARQUET.value
    batch_rows: int = BATCH_ROWS
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        expect("model must be the id of the job that trained it", is_text(self.model))
        job_id_or_none("model", self.model)
        one_of("action", self.action, [action.value for action in Action])
        one_of("file_format", self.file_format, [one.value for one in FileFormat])
        expect("data_set must be a non-empty text, or be left out", self.data_set is None or is_text(self.data_set))
        job_id_or_none("alignment", self.alignment, ALIGN_FIRST)
        if self.action == Action.MERGE.value:
            unused = [name for name in ("data_set", "rows", "alignment") if getattr(self, name) is not None]
            expect(f"merging needs no {', '.join(unused)}", not unused)
            expect("a merged model has all rounds", self.rounds == "all")
        else:
            expect(f"{self.action} needs a data_set", self.data_set is not None)
        expect("rows must be two positions, [first, end)", self.rows is None or _is_range(self.rows))
        is_rounds = self.rounds in ("all", "best") if isinstance(self.rounds, str) else _is_range(self.rounds)
        expect("rounds must be all, best, or two numbers, [first, end)", is_rounds)
        is_size = type(self.batch_rows) is int and 1 <= self.batch_rows <= _MAX_BATCH_ROWS
        expect(f"batch_rows must be a whole number from 1 to {_MAX_BATCH_ROWS}", is_size)
        seconds("deadline_s", self.deadline_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> InferenceJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown or missing fields, or a value that is not allowed.
        """
        return cls(**check_fields(document, {field.name for field in dataclasses.fields(cls)}, ("model",)))


def _is_range(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(type(n) is int for n in value):
        return False
    return bool(0 <= value[0] < value[1])
