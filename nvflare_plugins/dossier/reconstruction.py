"""Attribute inference: can somebody who has the model, and all of a row but one value, tell that value?

The attack of Fredrikson et al., Privacy in Pharmacogenetics (2014), figure 2: each possible value is put in, and the
one is guessed under which the row's label is likeliest, weighed by how common the value is among others. What is likely
of anybody, in the data or not, is no breach: the attack is made on rows of the training and on others, and the
difference is what the model gave away of its own rows (Yeom et al. 2018, section 4.1).

Privacy: as ``membership``: figures over all rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.dossier.membership import Features, Groups, Labels
from nvflare_plugins.dossier.statistics import Estimate, Scores, difference, share

MAX_FEATURES = 5
_BINS = 8
_MAX_VALUES = 32
_LEAST_ROWS = 50
_CATEGORICAL = "c"

LogLikelihood = Callable[[Features, Labels], Scores]
"""(rows, their labels) -> log of how likely each label is under the model, up to a constant of all rows."""


@dataclass(frozen=True, slots=True)
class Reconstructed:
    """How well one value was guessed.

    Attributes:
        feature: the column that was hidden.
        n_values: what was guessed among: categories, or bins of equally many rows.
        members, others: share guessed right of rows of the training, and of others.
        common: share of the members that is guessed right without a model, by the commonest value of the others.
        gain: members minus others.
    """

    feature: str
    n_values: int
    members: Estimate
    others: Estimate
    common: float
    gain: Estimate


def reconstruct(groups: Groups, place: int, name: str, log_likelihood: LogLikelihood) -> Reconstructed | None:
    """Hide one column and guess it; None if it has one value only or too few rows have any."""
    hidden = [group[:, place] for group in (groups.members, groups.others)]
    known = [~np.isnan(values) for values in hidden]
    if min(int(one.sum()) for one in known) < _LEAST_ROWS:
        return None
    of_others = hidden[1][known[1]]
    edges, values = _values(of_others, groups.feature_types[place] == _CATEGORICAL)
    if values.size < 2:
        return None
    truth = [np.searchsorted(edges, values_[one], side="right") for values_, one in zip(hidden, known, strict=True)]
    common = np.bincount(truth[1], minlength=values.size) + 0.5
    prior = np.log(common / common.sum())
    found = []
    for rows, labels, one, right in (
        (groups.members, groups.of_members, known[0], truth[0]),
        (groups.others, groups.of_others, known[1], truth[1]),
    ):
        guesses = _guess(rows[one], labels[one], place, values, prior, log_likelihood)
        found.append(share(int((guesses == right).sum()), right.size))
    blind = float((truth[0] == int(prior.argmax())).mean())
    return Reconstructed(name, values.size, found[0], found[1], blind, difference(found[0], found[1]))


def _values(of_others: NDArray[np.float32], is_categorical: bool) -> tuple[Features, Features]:
    """Return the edges between what is told apart (float32[k - 1]) and what is put in for each (float32[k])."""
    distinct = np.unique(of_others)
    if is_categorical or distinct.size <= _BINS:
        values = distinct[:_MAX_VALUES]
        return (values[1:]).astype(np.float32), values
    edges = np.unique(np.quantile(of_others, np.linspace(0, 1, _BINS + 1)[1:-1]).astype(np.float32))
    edges = edges[edges > distinct[0]]
    places = np.searchsorted(edges, of_others, side="right")
    values = np.asarray([np.median(of_others[places == k]) for k in range(edges.size + 1)], np.float32)
    return edges, values


def _guess(
    rows: Features, labels: Labels, place: int, values: Features, prior: Scores, log_likelihood: LogLikelihood
) -> NDArray[np.int64]:
    scores = np.empty((values.size, labels.size))
    tried = rows.copy()
    for k, value in enumerate(values):
        tried[:, place] = value
        scores[k] = prior[k] + log_likelihood(tried, labels)
    result: NDArray[np.int64] = scores.argmax(axis=0)
    return result
