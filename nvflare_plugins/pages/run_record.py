"""The record of a run, from which its pages are made, and the data sets that it used."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import too_old
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import printable, utc
from nvflare_plugins.wire.envelope import is_larger_better

if TYPE_CHECKING:
    from dp_components.split_candidates.candidates import Columns
    from nvflare_plugins.data.table import Table

# A data set as a site used it in a run: rows, columns, public lists, what the classes of the label mean.
#
# Privacy: rows and missing values are counts of this site's own data. They stand in the site's own record and report
# and nowhere else.


TRAINING, EVALUATION, ALIGNMENT, SCORING = "training", "evaluation", "alignment", "scoring"


@dataclass(frozen=True, slots=True)
class DataFacts:
    """One data set of a run.

    Attributes:
        use: "training", "evaluation", "alignment" or "scoring".
        rows: rows of this site that took part.
        columns: names of the features, in the order of the model; of a party of a vertical job, its own.
        missing: column -> how many of these rows have no value; columns without such are left out.
        categories: column -> its public list.
        label: name of the label column; "" where there is none.
        label_classes: what the label's values 0, 1, ... mean; empty where labels are numbers.
        weight: name of the column of weights; "" where there is none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", coerce_numbers_to_str=True)  # of classes
    name: str
    use: str
    rows: int
    columns: tuple[str, ...] = ()
    missing: dict[str, int] = field(default_factory=dict)
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    label: str = ""
    label_classes: tuple[str, ...] = ()
    weight: str = ""

    @classmethod
    def of(cls, table: Table, name: str, use: str = TRAINING) -> Self:
        """Return the facts of a table."""
        return cls(
            name,
            use,
            table.n_rows,
            table.feature_names,
            {name: n for name, n in zip(table.feature_names, table.n_missing, strict=True) if n},
            dict(table.categories),
            table.label_name,
            table.label_classes or (),
            table.weight_name or "",
        )


def texts(entries: Sequence[object] | None) -> tuple[str, ...]:
    """Return a job's list of classes or categories as texts."""
    return tuple(map(str, entries or ()))


def missing_of(names: Sequence[str], columns: Columns) -> dict[str, int]:
    """Count what is missing, column by column. Shapes: columns: float32[n_features, n_rows], NaN is missing."""
    counts = [int(np.count_nonzero(np.isnan(column))) for column in columns]
    return {name: n for name, n in zip(names, counts, strict=True) if n}


# ``run.json``: what a site keeps about one run, and what ``veilboost report`` is made from.
#
# The file stays at the site, in the run's folder, beside the model and the evidence. It holds no row, gradient or key.


FORMAT = "veilboost-run-1"
FILE_NAME, REPORT = "run.json", "report.html"


Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number of a metric. JSON has no NaN: what is none was written as null."""
Span = tuple[str, float, float]
"""A stage, its begin and its end. Units: seconds from the beginning of the round."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One boosting round.

    Attributes:
        seconds: wall time of the round.
        metrics: value per "set-metric", for example "eval-auc".
        stages: seconds per stage ("xgboost", "protect", "network"); what is left of ``seconds`` counts as other.
        spans: when the stages ran here, where that is known.
    """

    round: int
    seconds: float
    metrics: dict[str, Measured] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """This site's messages of one kind under one codec. Units: bytes, seconds."""

    kind: str
    codec: str
    private: bool
    messages: int
    bytes_out: int
    bytes_in: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A learning curve to compare with, for example centralized XGBoost on the pooled test set.

    Attributes:
        name: what the curve is, for the legend.
        metric: metric name without a set, for example "auc"; it is drawn with the curves of that metric.
        values: one value per round, from ``first_round`` on.
    """

    name: str
    metric: str
    values: tuple[Measured, ...]
    first_round: int = 0


@dataclass(frozen=True, slots=True)
class PointCurve:
    """A curve of a report section. ``points`` are (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Something that one kind of job adds to the report: paragraphs, then a chart, bars, a table; each may be empty.

    Attributes:
        columns, rows: a table; every row has as many texts as there are columns.
        scores: rows of two classes by bins of a score, which curves are drawn from: (lower end, first, second).
        bars: (label, value, text at the bar's end).
        curves, x_label, y_label: a line chart over whole numbers.
    """

    title: str
    paragraphs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    bars: tuple[tuple[str, float, str], ...] = ()
    curves: tuple[PointCurve, ...] = ()
    x_label: str = "round"
    y_label: str = ""
    scores: tuple[tuple[float, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Spending:
    """What the ledger of a data set says after the run, over all jobs, towards one person.

    Attributes:
        epsilon, delta: the budget.
        spent: epsilon spent of it, at its delta; None if the ledger could not be read.
    """

    data_set: str
    epsilon: float
    delta: float
    spent: float | None = None


@dataclass(frozen=True, slots=True)
class LeafNoise:
    """How the leaves of a private model of two classes were made, and the noise in them; public.

    Attributes:
        model_sha256: of the bytes of that model.
        update, query: of the method, by their names.
        gradient, hessian: standard deviation of the noise on a leaf's sums G and H.
        ridge, clip, scale: a leaf answers -scale * clip(G / (H + ridge)).
    """

    model_sha256: str
    update: str
    query: str
    gradient: float
    hessian: float
    ridge: float
    clip: float
    scale: float


@dataclass(frozen=True, slots=True)
class BestRound:
    """The best round. Attributes: round: from 0; metric: by which, as "set-metric"."""

    round: int
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything that the report shows of one run at one site.

    Attributes:
        params: XGBoost parameters in effect.
        settings: other settings of the job worth showing (data set name, rounds, cuts, ...).
        cuts: how cut points were agreed (mode, bins, floor, ...).
        registry: outcome of the registry against differencing, one sentence.
        model, evidence: paths relative to the folder of ``run.json``.
        comparison: curves of other trainings.
        notes: sentences for the reader (early stopping, resumed from, 112-bit keys, ...).
        title: what kind of job it was.
        sections: what this kind of job adds to the report.
        started, finished: when this site's attempt began and when its record was written, ISO 8601 in UTC.
        policy_hash: hash of what the site's policy allowed, as in the evidence.
        consents: consents of that policy without which the job would have been refused here.
        data: the data sets, with counts of this site's own rows.
        statement: what the policy says to data-protection officers (``DataProtection``), by its keys.
        spending: ledgers of the data sets that have a privacy budget.
        name: of the job, as whoever submitted it called it; "" where that is not known.
        leaf_noise: of a private model, from which the noise of its scores follows; None of others.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # also of what it holds
    job_id: str
    attempt: str
    site: str
    sites: tuple[str, ...]
    profile: str
    status: str = "completed"
    signed: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: tuple[RoundRow, ...] = ()
    traffic: tuple[TrafficRow, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, Any] = field(default_factory=dict)
    registry: str = ""
    model: str | None = None
    evidence: str | None = None
    best_round: int | None = None
    comparison: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()
    title: str = "Horizontal federated XGBoost"
    sections: tuple[ReportSection, ...] = ()
    started: str = ""
    finished: str = ""
    policy_hash: str = ""
    consents: tuple[str, ...] = ()
    data: tuple[DataFacts, ...] = ()
    statement: dict[str, str] = field(default_factory=dict)
    spending: tuple[Spending, ...] = ()
    name: str = ""
    leaf_noise: LeafNoise | None = None

    @property
    def called(self) -> str:
        """The job's name, or its id where it has none."""
        return self.name or self.job_id

    def best(self, metric: str | None = None) -> BestRound | None:
        """Return the best round by a metric, by default the last one, which early stopping watches; None without one.

        Where training was stopped early, the round that it has found stands for that metric.
        """
        names = list(dict.fromkeys(name for row in self.rounds for name in row.metrics))
        name = names[-1] if metric is None and names else metric or ""
        values = {row.round: row.metrics[name] for row in self.rounds if is_number(row.metrics.get(name))}
        if not values:
            return None
        found = (max if is_larger_better(name) else min)(values, key=values.__getitem__)
        if name == names[-1] and self.best_round is not None and self.best_round in values:
            found = self.best_round
        return BestRound(found, name, values[found])

    @property
    def when(self) -> str:
        """When it ran, to follow the attempt's name; "" where the record does not say."""
        if not self.started:
            return ""
        start, end = utc(self.started), utc(self.finished)
        return f", {start} to {end.removeprefix(start[:11])} UTC by this site's clock"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"format": FORMAT, **_as_json(self)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RunRecord:
        """Read a record strictly.

        Raises:
            ConfigurationError: another format, unknown or missing fields.
        """
        if not isinstance(document, Mapping) or document.get("format") != FORMAT:
            raise ConfigurationError(f"this is not a run record of format {FORMAT}")
        if not {"policy_hash", "data"} <= document.keys():
            raise too_old("the run record", "0.4", "read it")
        values = {name: value for name, value in document.items() if name != "format"}
        try:
            return _adapter().validate_python(values)
        except ValidationError as error:
            wrong = ", ".join(dict.fromkeys(str(one["loc"][0]) for one in error.errors() if one["loc"]))
        except (OverflowError, RecursionError):
            wrong = "its numbers"
        raise ConfigurationError(
            f"the run record is damaged, or of another version: unknown, missing or wrong fields ({printable(wrong)}). "
            "Remedy: copy the run again"
        )

    def write(self, folder: Path) -> Path:
        """Write ``run.json`` into ``folder``, whole or not at all. Returns its path."""
        return write_atomically(folder / FILE_NAME, json.dumps(self.to_dict(), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read ``run.json`` of a run's folder.

        Raises:
            ConfigurationError: no such file, or not a run record.
        """
        try:
            return cls.from_dict(json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ConfigurationError(f"{folder} holds no {FILE_NAME}: it is not the folder of a run") from None
        except (ValueError, RecursionError):
            raise ConfigurationError(f"{folder / FILE_NAME} is not valid JSON") from None


def records_in(runs: Path, unread: list[str] | None = None) -> Iterator[tuple[Path, RunRecord]]:
    """Yield each run's folder and record, in order of their names.

    Args:
        runs: the folder of a site's runs.
        unread: gets what is the matter with runs whose record is damaged, or of another version.
    """
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        try:
            if (folder / FILE_NAME).exists():
                yield folder, RunRecord.read(folder)
        except (ConfigurationError, PermissionError) as error:  # the latter of a job that another user ran
            if unread is not None:
                unread.append(f"{folder.name}: {reason_of(error)}")


def is_number(value: float | None) -> bool:
    """Tell whether a metric has a value: what is none in the record is read as NaN."""
    return value is not None and math.isfinite(value)


@cache
def _adapter() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)


def _as_json(value: Any) -> Any:
    """JSON has no NaN or infinity: a metric that is not a number becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if dataclasses.is_dataclass(value):
        return {each.name: _as_json(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value
