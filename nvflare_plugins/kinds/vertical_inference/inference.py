"""Predictions of a vertical model: the active party walks rows down its trees and asks owners along each row's path.

Rows have no names here: both sides hold the same set of rows in the same order, cut into batches, and a question names
a batch and positions in it. A party that is asked about anything else gives one fixed error, which tells neither what
was wrong nor what would be right.

Privacy: an owner learns which rows reach its nodes, and so the paths through them. The active party learns for each row
    one ordered bit (below the threshold or not; rows without a value go the default way) at each node that the row
    reaches. An owner remembers from training which of its splits lie below which, and answers for a row along one path
    of a tree at most, the one that its own answers have begun. Which way a row went at nodes of others it must believe
    the active party. Budgets (``prediction_budget``) bound how often a row is asked for.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.base.files import write_results
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import canonical_ids, load_ids
from nvflare_plugins.data.table import RowPasses, load_table
from nvflare_plugins.data.tabular_files import TabularFile
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.kinds.alignment.job import Alignment
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical import model as vertical_model
from nvflare_plugins.kinds.vertical.conversation import FlowControl
from nvflare_plugins.kinds.vertical_inference.job import BATCH_ROWS, Action, InferenceJob
from nvflare_plugins.site.memory.budgets import PredictionBudget, ScoringBudget
from nvflare_plugins.xgb.model_json import declared_classes

_BINARY, _MULTICLASS = ("binary:logistic", "binary:hinge"), ("multi:softprob", "multi:softmax")


def batches(n_rows: int, batch_rows: int) -> list[slice]:
    """Cut a set of rows into batches, the same at every party."""
    return [slice(start, min(start + batch_rows, n_rows)) for start in range(0, n_rows, batch_rows)]


class PathOwner:
    """A passive party while predictions are made. Not safe for concurrent use."""

    def __init__(self, part: vertical_model.PassivePart, features: NDArray[np.float32], batch_rows: int = BATCH_ROWS):
        """Shapes: features: float32[n_rows, n_features] in the order of ``part.columns``; NaN is missing."""
        self._table = part.table
        self._features = features
        self._batches = batches(features.shape[0], batch_rows)
        self._batch = -1
        self._paths = vertical_model.AnsweredPaths(0)

    def answer(self, request: messages.Message) -> messages.DecisionAnswer:
        """Tell which of the named rows go left at the named nodes.

        Raises:
            ProtocolError: an unknown batch, row or node, a node that is not on a row's path, a node asked twice in a
                batch, or a batch asked again after the next one; always with the same text.
        """
        if not isinstance(request, messages.DecisionRequest) or len(request.queries) > len(self._table):
            raise ProtocolError(vertical_model.REFUSED)
        self._turn_to(request.data_set)
        return messages.DecisionAnswer(tuple(self._decide(query) for query in request.queries))

    def answer_bytes(self, question: bytes) -> bytes:
        """Answer a question in its byte form, as ``answer``."""
        try:
            request = messages.from_bytes(question)
        except ProtocolError:
            raise ProtocolError(vertical_model.REFUSED) from None
        return messages.to_bytes(self.answer(request))

    def _turn_to(self, batch: int) -> None:
        if batch == self._batch:
            return
        if not self._batch < batch < len(self._batches):
            raise ProtocolError(vertical_model.REFUSED)
        self._batch = batch
        rows = self._batches[batch]
        self._paths = vertical_model.AnsweredPaths(rows.stop - rows.start)

    def _decide(self, query: messages.PathQuery) -> messages.Bits:
        place = (query.tree, query.node)
        here = self._features[self._batches[self._batch]]
        if place not in self._table or query.rows.n != here.shape[0]:
            raise ProtocolError(vertical_model.REFUSED)
        split, rows = self._table[place], query.rows.unpack()
        goes_left = split.goes_left(here[rows, split.feature])
        self._paths.follow(query.tree, query.node, split, rows, goes_left)
        return messages.Bits.of(goes_left)


@dataclass(frozen=True, slots=True, repr=False)
class Predictions:
    """What XGBoost's ``predict`` returns with and without ``output_margin``, and the class where there is one.

    Shapes: margin: float32[n_rows] or float32[n_rows, n_outputs]; value: as from XGBoost; classes: int64[n_rows].

    Attributes:
        classes: places in the label's list.
    """

    margin: NDArray[np.float32]
    value: NDArray[np.float32]
    classes: NDArray[np.int64] | None


def parties_of(
    part: vertical_model.ActivePart, links: Mapping[str, messages.PassiveLink], n_rows: int
) -> tuple[messages.Party, ...]:
    """Place the model's passive parties behind their links.

    Raises:
        ConfigurationError: a party of the model is absent; its name is in the message.
    """
    absent = sorted(party.site for party in part.parties if party.site not in links)
    if absent:
        raise ConfigurationError(f"the model cannot predict without {', '.join(absent)}")
    return messages.place_parties(
        len(part.columns),
        # How many bins training had does not matter here.
        [
            (party.site, messages.PartySchema((n_rows,), (1,) * len(party.aliases), party.aliases), links[party.site])
            for party in part.parties
        ],
    )


def rounds_of(part: vertical_model.ActivePart, rounds: str | list[int]) -> tuple[int, int]:
    """Return the first round to use and the one after the last.

    Args:
        rounds: "all", "best" (up to the best round of early stopping) or [first, end], as XGBoost's iteration_range.

    Raises:
        ConfigurationError: the model has no such rounds.
    """
    indptr = json.loads(part.booster)["learner"]["gradient_booster"]["model"]["iteration_indptr"]
    n_rounds = len(indptr) - 1
    if rounds == "all":
        return 0, n_rounds
    if rounds == "best":
        if part.best_round is None:
            raise ConfigurationError("the model was trained without early stopping: it has no best round")
        return 0, part.best_round + 1
    if isinstance(rounds, str):
        raise ConfigurationError("rounds are all, best, or the first one and the one after the last")
    first, end = rounds
    if not 0 <= first < end <= n_rounds:
        raise ConfigurationError(f"the model has {n_rounds} rounds; the job asks for others")
    return first, end


def predict(
    part: vertical_model.ActivePart,
    links: Mapping[str, messages.PassiveLink],
    own: NDArray[np.float32],
    rounds: str | list[int] = "all",
    batch_rows: int = BATCH_ROWS,
    deadline_s: float = 600.0,
    on_batch: Callable[[int, int], None] = lambda done, n: None,
) -> Predictions:
    """Predict at the active party, equal to centralized XGBoost in every bit.

    Shapes: own: float32[n_rows, n_own_columns]; the passive parties hold the same rows in the same order.

    Args:
        links: ways to the passive parties by name; each leads to a ``PathOwner`` with the same ``batch_rows``.
        on_batch: called with the number of batches done and of all.

    Raises:
        ConfigurationError: the links are not to the parties of this model, or it has no such rounds.
        ProtocolError: an answer is not what the protocol allows.
        JobAborted: a party did not answer in time.
    """
    parties = parties_of(part, links, own.shape[0])
    first, end = rounds_of(part, rounds)
    model = vertical_model.FederatedModel(part.booster, parties, len(part.columns), deadline_s)
    parts = batches(own.shape[0], batch_rows)
    margins, values = [], []
    for number, rows in enumerate(parts):
        margins.append(model.margin(own[rows], number, end, first))
        values.append(model.output(margins[-1]))
        on_batch(number + 1, len(parts))
    margin, value = np.concatenate(margins), np.concatenate(values)
    return Predictions(margin, value, classes_of(part, value))


def class_names(part: vertical_model.ActivePart) -> tuple[str | int, ...]:
    """Return the label's classes as the training declared them, else 0, 1, ...; nothing for a regression.

    Raises:
        ConfigurationError: the model carries other classes than it has outputs.
    """
    learner = json.loads(part.booster)["learner"]
    if learner["objective"]["name"] not in (*_MULTICLASS, *_BINARY):
        return ()
    n_outputs = max(int(learner["learner_model_param"]["num_class"]), 2)
    try:
        return declared_classes(learner.get("attributes", {}), n_outputs) or tuple(range(n_outputs))
    except (ValueError, RecursionError):
        raise ConfigurationError(
            f"the model carries label classes that are not the {n_outputs} of its outputs"
        ) from None


def classes_of(part: vertical_model.ActivePart, value: NDArray[np.float32]) -> NDArray[np.int64] | None:
    """Return places in the label's list by the rule of XGBoost's classifier; None for a regression."""
    objective = json.loads(part.booster)["learner"]["objective"]["name"]
    if objective == "multi:softprob":
        result: NDArray[np.int64] | None = value.argmax(axis=1)
        return result
    if objective == "multi:softmax":
        return value.astype(np.int64)
    if objective in _BINARY:
        return (value > 0.5).astype(np.int64)
    return None


# The rows that a job with a vertical model is about: one party's columns of them, in the order of all parties.
#
# Privacy: everything here stays at the site. Errors travel: they hold no value, id or count.


@dataclass(frozen=True, slots=True, repr=False)
class Rows:
    """Rows in their order.

    Shapes: features: float32[n_rows, n_columns], NaN is missing.

    Attributes:
        ids: canonical ids; None if the policy names no id column for the data set.
        first: position of the first row in the whole set.
    """

    features: NDArray[np.float32]
    ids: tuple[bytes, ...] | None
    first: int = 0

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return int(self.features.shape[0])

    def aligned(self, alignment: Alignment) -> Rows:
        """Return the common rows in the common order."""
        ids = None if self.ids is None else tuple(self.ids[place] for place in alignment.positions)
        return Rows(alignment.take(self.features), ids)

    def part(self, rows: list[int] | None) -> Rows:
        """Return the rows from a position on and before another.

        Raises:
            ConfigurationError: there are no such rows; how many there are is not said.
        """
        if rows is None:
            return self
        first, end = _range(rows, self.n_rows)
        return Rows(self.features[first:end], None if self.ids is None else self.ids[first:end], first)

    def names(self) -> list[str]:
        """Return what names the rows at this site from job to job: ids, or positions where there are none."""
        if self.ids is None:
            return [str(self.first + row) for row in range(self.n_rows)]
        return [one.decode() for one in self.ids]


@dataclass(frozen=True, slots=True, repr=False)
class UnreadRows:
    """Rows of a data set that is read in passes: those that a job names are held once they are known, and no others.

    Attributes:
        ids: as of ``Rows``.
    """

    passes: RowPasses
    ids: tuple[bytes, ...] | None

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return self.passes.n_rows

    def aligned(self, alignment: Alignment) -> UnreadRows:
        """Return the common rows in the common order."""
        alignment.check_length(self.n_rows)
        ids = None if self.ids is None else tuple(self.ids[place] for place in alignment.positions)
        return UnreadRows(self.passes.taken(alignment.positions), ids)

    def part(self, rows: list[int] | None) -> Rows:
        """Read the rows from a position on and before another.

        Raises:
            DataRefusal: there are no such rows, or a file has changed.
        """
        first, end = _range(rows, self.n_rows)
        features = self.passes.taken(np.arange(first, end)).held()
        return Rows(features, None if self.ids is None else self.ids[first:end], first)


def _range(rows: list[int] | None, n_rows: int) -> tuple[int, int]:
    """Return the first row that a job names and the end. Raises: DataRefusal: there are no such rows."""
    first, end = (0, n_rows) if rows is None else rows
    if end > n_rows:  # how many there are is not said
        raise DataRefusal("the job asks for rows that the data set does not have")
    return first, end


def load_rows(
    data_set: DataSet,
    columns: tuple[str, ...],
    categories: Mapping[str, tuple[str, ...]] | None = None,
    *,
    unknown_is_missing: bool = False,
    held_by: str | None = None,
) -> Rows | UnreadRows:
    """Load the columns that a model was trained on; where the policy wants no data set held, nothing but the ids.

    Args:
        categories: public list of each categorical column. A category of the list that training never saw is none of
            any split's; one outside the list is refused.
        unknown_is_missing: categories outside the list count as missing instead.
        held_by: what needs all rows at once, if something does.

    Raises:
        ConfigurationError: the file cannot be read, lacks a column or an id, or holds what is no number.
    """
    if columns:
        table = load_table(
            data_set,
            label=None,
            features=columns,
            categories=categories,
            unknown_is_missing=unknown_is_missing,
            with_ids=True,
            takes_passes=held_by is None,
            held_by=held_by or "",
        )
        ids = (
            None
            if table.ids is None
            else tuple(canonical_ids(table.ids, data_set.name, data_set.missing, data_set.id_form))
        )
        return Rows(table.features, ids) if table.passes is None else UnreadRows(table.passes, ids)
    ids = None if data_set.id is None else tuple(load_ids(data_set))
    n_rows = len(ids) if ids is not None else _count_rows(data_set)
    return Rows(np.empty((n_rows, 0), dtype=np.float32), ids)


def _count_rows(data_set: DataSet) -> int:
    file = TabularFile(data_set)
    if not file.column_names:
        raise ConfigurationError(f"data set {data_set.name!r} has no columns")
    name = file.column_names[0]
    return len(file.read([], [name])[name])


# What a passive party charges for the rows that it answers for: times, or with the consent ``scoring`` bits.


RowBudget = PredictionBudget | ScoringBudget


def budget_of(run: Run, part: vertical_model.PassivePart) -> RowBudget:
    """Return the budget that the site's policy asks for: charged, durably, before anything about the rows leaves."""
    policy, data_set = run.context.policy, str(run.job.data_set)
    if not policy.consents.gives("scoring"):
        return PredictionBudget(policy, data_set)
    explains = run.action is Action.EXPLAIN
    what = f"{run.identity.model_id}, {'explained' if explains else 'predicted'}"
    return ScoringBudget(policy, data_set, what, bits_of(part, explains=explains))


def bits_of(part: vertical_model.PassivePart, *, explains: bool) -> int:
    """Return how many distinct bits a row can show: one for each distinct split, and where missing values would go.

    Args:
        explains: positions among all thresholds, and which values are missing, are told.
    """
    splits = {(s.feature, float(s.threshold), s.default_left, s.categories) for s in part.table.values()}
    return len(splits) + (len(part.columns) if explains else 0)


# What the steps of one attempt with a finished model share, and the files that it leaves.

# What the steps of one attempt of a job with a finished vertical model share, whatever the job does with it.


@dataclass(frozen=True, slots=True)
class Run:
    """What the steps of one attempt share."""

    attempt: SiteAttempt
    identity: vertical_model.ModelIdentity

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

    def notes(self) -> messages.ContentRecorder:
        """Return what notes in the evidence what passes between the active party and the owners of splits, in clear."""
        return messages.ContentRecorder(self.attempt.evidence, Protection.CLEAR)

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


def flow_of(run: Run, n_splits: int) -> FlowControl:
    """Return sizes and times of the conversation; a question names every split at most once."""
    longest = 1024 + n_splits * (16 + run.job.batch_rows // 8)
    return dataclasses.replace(FlowControl.within(run.attempt.timeout_s), message_bytes=longest)


# What a job with a vertical model leaves at the active party: predictions, SHAP values, the merged model.
#
# Files appear whole or not at all, and are for the owner of the process alone.


_log = logging.getLogger(__name__)


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
