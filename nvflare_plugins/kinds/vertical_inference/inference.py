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

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical.messages import (
    Bits,
    DecisionAnswer,
    DecisionRequest,
    Message,
    Party,
    PartySchema,
    PassiveLink,
    PathQuery,
    from_bytes,
    place_parties,
    to_bytes,
)
from nvflare_plugins.kinds.vertical.model import REFUSED, AnsweredPaths, FederatedModel
from nvflare_plugins.kinds.vertical.model_files import ActivePart, PassivePart
from nvflare_plugins.xgb.model_json import declared_classes

BATCH_ROWS = 20_000
_BINARY, _MULTICLASS = ("binary:logistic", "binary:hinge"), ("multi:softprob", "multi:softmax")


def batches(n_rows: int, batch_rows: int) -> list[slice]:
    """Cut a set of rows into batches, the same at every party."""
    return [slice(start, min(start + batch_rows, n_rows)) for start in range(0, n_rows, batch_rows)]


class PathOwner:
    """A passive party while predictions are made. Not safe for concurrent use."""

    def __init__(self, part: PassivePart, features: NDArray[np.float32], batch_rows: int = BATCH_ROWS):
        """Shapes: features: float32[n_rows, n_features] in the order of ``part.columns``; NaN is missing."""
        self._table = part.table
        self._features = features
        self._batches = batches(features.shape[0], batch_rows)
        self._batch = -1
        self._paths = AnsweredPaths(0)

    def answer(self, request: Message) -> DecisionAnswer:
        """Tell which of the named rows go left at the named nodes.

        Raises:
            ProtocolError: an unknown batch, row or node, a node that is not on a row's path, a node asked twice in a
                batch, or a batch asked again after the next one; always with the same text.
        """
        if not isinstance(request, DecisionRequest) or len(request.queries) > len(self._table):
            raise ProtocolError(REFUSED)
        self._turn_to(request.data_set)
        return DecisionAnswer(tuple(self._decide(query) for query in request.queries))

    def answer_bytes(self, question: bytes) -> bytes:
        """Answer a question in its byte form, as ``answer``."""
        try:
            request = from_bytes(question)
        except ProtocolError:
            raise ProtocolError(REFUSED) from None
        return to_bytes(self.answer(request))

    def _turn_to(self, batch: int) -> None:
        if batch == self._batch:
            return
        if not self._batch < batch < len(self._batches):
            raise ProtocolError(REFUSED)
        self._batch = batch
        rows = self._batches[batch]
        self._paths = AnsweredPaths(rows.stop - rows.start)

    def _decide(self, query: PathQuery) -> Bits:
        place = (query.tree, query.node)
        here = self._features[self._batches[self._batch]]
        if place not in self._table or query.rows.n != here.shape[0]:
            raise ProtocolError(REFUSED)
        split, rows = self._table[place], query.rows.unpack()
        goes_left = split.goes_left(here[rows, split.feature])
        self._paths.follow(query.tree, query.node, split, rows, goes_left)
        return Bits.of(goes_left)


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


def parties_of(part: ActivePart, links: Mapping[str, PassiveLink], n_rows: int) -> tuple[Party, ...]:
    """Place the model's passive parties behind their links.

    Raises:
        ConfigurationError: a party of the model is absent; its name is in the message.
    """
    absent = sorted(party.site for party in part.parties if party.site not in links)
    if absent:
        raise ConfigurationError(f"the model cannot predict without {', '.join(absent)}")
    return place_parties(
        len(part.columns),
        # How many bins training had does not matter here.
        [
            (party.site, PartySchema((n_rows,), (1,) * len(party.aliases), party.aliases), links[party.site])
            for party in part.parties
        ],
    )


def rounds_of(part: ActivePart, rounds: str | list[int]) -> tuple[int, int]:
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
    part: ActivePart,
    links: Mapping[str, PassiveLink],
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
    model = FederatedModel(part.booster, parties, len(part.columns), deadline_s)
    parts = batches(own.shape[0], batch_rows)
    margins, values = [], []
    for number, rows in enumerate(parts):
        margins.append(model.margin(own[rows], number, end, first))
        values.append(model.output(margins[-1]))
        on_batch(number + 1, len(parts))
    margin, value = np.concatenate(margins), np.concatenate(values)
    return Predictions(margin, value, classes_of(part, value))


def class_names(part: ActivePart) -> tuple[str | int, ...]:
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


def classes_of(part: ActivePart, value: NDArray[np.float32]) -> NDArray[np.int64] | None:
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
