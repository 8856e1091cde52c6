"""Membership inference: can somebody who has the model tell rows that it was trained on from others?

Two attacks by somebody who knows the rows, labels included, and has the model:

* ``loss``: what the model fits well was trained on. Yeom et al., Privacy Risk in Machine Learning (2018), section 3.2.
* ``reference``: the offline likelihood-ratio attack. Carlini et al., Membership Inference Attacks From First Principles
  (2022), section VI C: reference models are trained on random halves of all rows at hand; a row is a member if the
  model is surer of its label than those that had not seen it, in units of their spread. A single spread serves all
  rows, which the paper recommends for few reference models.

Privacy: what leaves this module are figures over all rows; no score, row or position of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.dossier.statistics import Estimate, Scores, area_under_curve, hits_with_interval

N_REFERENCES = 16
_LEAST_PROBABILITY = 1e-6
_FEW_VALUES = 1_000_000

Features = NDArray[np.float32]
Labels = NDArray[np.float32]
Sureness = Callable[[Features, Labels], Scores]
"""(rows, their labels) -> how well a model fits each: higher is better."""


@dataclass(frozen=True, slots=True)
class Attacked:
    """How well one attack told members from others. Attributes: hits: share found at 1 % false alarms."""

    name: str
    area: Estimate
    hits: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows that a model was trained on, and others of the same kind.

    Shapes: members: float32[m, n_features]; of_members: float32[m], their labels; others, of_others: as these, for n.
    """

    members: Features
    of_members: Labels
    others: Features
    of_others: Labels
    feature_types: tuple[str, ...]

    @property
    def rows(self) -> Features:
        """All rows, members first."""
        return np.concatenate([self.members, self.others])

    @property
    def labels(self) -> Labels:
        """Their labels."""
        return np.concatenate([self.of_members, self.of_others])


def sureness_of_classes(probabilities: NDArray[np.floating[Any]], labels: Labels) -> Scores:
    """Return log(p / (1 - p)) of each row's own class, as Carlini et al. scale it.

    Shapes: probabilities: floating[n, n_classes]; labels: float32[n], positions of classes.
    """
    own = probabilities[np.arange(labels.size), labels.astype(np.int64)].astype(np.float64)
    own = np.clip(own, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    result: Scores = np.log(own) - np.log1p(-own)
    return result


def sureness_of_numbers(predictions: NDArray[np.floating[Any]], labels: Labels) -> Scores:
    """Return minus the absolute error of a regression. Shapes: both floating[n]."""
    result: Scores = -np.abs(predictions.astype(np.float64) - labels)
    return result


def attack(groups: Groups, target: Sureness, references: Scores) -> list[Attacked]:
    """Run both attacks.

    Args:
        references: float64[2, n_rows]: mean and spread of the references that had not seen a row, members first.
    """
    seen = target(groups.rows, groups.labels)
    mean, spread = references
    n = groups.of_members.size
    named = {"loss": seen, "reference": (seen - mean) / spread}
    return [
        Attacked(name, area_under_curve(scores[:n], scores[n:]), hits_with_interval(scores[:n], scores[n:]))
        for name, scores in named.items()
    ]


def difference_by_themselves(groups: Groups, references: Scores) -> Attacked:
    """Tell whether the two groups differ without any model that had them: only then is a figure about membership."""
    mean, n = references[0], groups.of_members.size
    return Attacked("none", area_under_curve(mean[:n], mean[n:]), hits_with_interval(mean[:n], mean[n:]))


def train_references(groups: Groups, params: Mapping[str, Any], n_rounds: int) -> Scores:
    """Train reference models on random halves of the rows; return what ``attack`` needs of them."""
    rows, labels = groups.rows, groups.labels
    random = np.random.default_rng(0)  # of no secret: which halves decides no row's figure that is shown
    seen = np.full((N_REFERENCES, labels.size), np.nan)
    for number in range(0, N_REFERENCES, 2):  # a half and the other half: each row is out of eight references
        half = random.permutation(labels.size) < labels.size // 2
        for inside in (half, ~half):
            sureness = train(rows[inside], labels[inside], groups.feature_types, params, n_rounds)
            seen[number, ~inside] = sureness(rows[~inside], labels[~inside])
            number += 1
    mean = np.nanmean(seen, axis=0)
    spread = float(np.sqrt(np.nanmean((seen - mean) ** 2))) or 1.0
    return np.stack([mean, np.full(labels.size, spread)])


def train(rows: Features, labels: Labels, types: tuple[str, ...], params: Mapping[str, Any], n_rounds: int) -> Sureness:
    """Train stock XGBoost; return how sure it is of rows. Raises: xgboost.core.XGBoostError."""
    settings = {**params, "verbosity": 0, "nthread": 1 if rows.size < _FEW_VALUES else 2}
    booster = xgb.train(settings, _matrix(rows, types, labels), n_rounds, verbose_eval=False)
    objective = str(params["objective"])

    def sureness(asked: Features, of_asked: Labels) -> Scores:
        found = booster.predict(_matrix(asked, types))
        if objective == "multi:softprob":
            return sureness_of_classes(found, of_asked)
        if objective == "binary:logistic":
            return sureness_of_classes(np.column_stack([1 - found, found]), of_asked)
        return sureness_of_numbers(found, of_asked)

    return sureness


def _matrix(rows: Features, types: tuple[str, ...], labels: Labels | None = None) -> xgb.DMatrix:
    return xgb.DMatrix(rows, label=labels, feature_types=list(types), enable_categorical=True)
