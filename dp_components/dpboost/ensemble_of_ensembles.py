"""Ensemble of ensembles (EoE): boosting over disjoint rows inside an ensemble, over the same rows between ensembles."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS
from dp_components.dpboost.plan import DpBoostPlan
from dp_components.dpboost.single_tree import (
    Loss,
    SplitTable,
    SquaredLoss,
    TreeRows,
    assign_records,
    release_start,
    start_sums,
    train_single_tree,
    tree_outputs,
)
from dp_components.events import Release
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.split_candidates.candidates import Candidates, Columns

Publish = Callable[[str, Callable[[], Release]], NDArray[np.int64]]
"""(query, make) -> value: charges the release before it hands it out, as ``Ledger.release`` with its job does."""


@dataclass(frozen=True, slots=True, eq=False)
class SiteData:
    """A site's rows. None of it leaves the site but sums.

    Shapes: columns: float32[n_features, n_rows], held or read when they are asked for; label: float64[n_rows];
        record_ids: one stable text per row.
    """

    site: str
    columns: Columns
    label: NDArray[np.float64]
    record_ids: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.columns.shape) != 2 or self.label.shape != (self.columns.shape[1],):
            raise ValueError("columns are a matrix of features by rows, with one label per row")
        if len(self.record_ids) != self.label.size:
            raise ValueError("every row needs a record identifier")


@dataclass(frozen=True, slots=True, eq=False)
class DpBoostModel:
    """Released trees and the public data to read them with.

    Shapes: trees: int64[n_trees, n_values], each row as ``train_single_tree`` gives it.
    Units:  start: 2^-LEAF_BITS, as leaves.
    """

    candidates: Candidates
    loss: Loss
    learning_rate: float
    trees: NDArray[np.int64]
    start: int = 0

    def scores(self, bins: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return start and trees added up. Shapes: bins: uint8[n_features, n_rows]; result: float64[n_rows]."""
        start = start_scores(self.start, bins.shape[1])
        return add_trees(start, self.trees, bins, SplitTable.of(self.candidates), self.learning_rate)

    def predict(self, columns: ArrayLike) -> NDArray[np.float64]:
        """Return the predicted value, or the probability of 1. Shapes: columns: float32[n_features, n_rows]."""
        return self.loss.prediction(self.scores(self.candidates.bin_rows(np.asarray(columns, dtype=np.float32))))


class EnsembleTrainer:
    """Trains the ensembles of one model one after the other."""

    def __init__(
        self,
        sites: Sequence[SiteData],
        candidates: Candidates,
        loss: Loss,
        plan: DpBoostPlan,
        key: bytes,
        randomness: RandomSource = OS_RANDOMNESS,
    ) -> None:
        """Bin the rows.

        Args:
            sites: all sites, under names that differ.
            candidates: public split candidates, or ones that were paid for; never values of the data.
            loss: with its public bounds.
            plan: parameters and budget.
            key: of the rows' assignment to trees, the same at all sites.
            randomness: source of the noise.

        Raises:
            ValueError: no site, two sites of one name, other features than the candidates have, impossible labels, or
                a start that is paid for two classes.
        """
        if not sites or len({site.site for site in sites}) != len(sites):
            raise ValueError("training needs sites, under names that differ")
        if any(site.columns.shape[0] != len(candidates.of_feature) for site in sites):
            raise ValueError("a site has other features than the split candidates")
        if plan.start_share and not isinstance(loss, SquaredLoss):
            raise ValueError("a paid start is for regressions: with two classes the trees could not outweigh it")
        self._sites, self._plan, self._loss, self._key, self._randomness = sites, plan, loss, key, randomness
        self._table = SplitTable.of(candidates)
        self._bins = [candidates.bin_rows(site.columns) for site in sites]
        self._targets = [loss.target(site.label.astype(np.float64)) for site in sites]

    def start(self, start: int = 0) -> list[NDArray[np.float64]]:
        """Return the scores before the first tree, for each site. Shapes: float64[n_rows]."""
        return [start_scores(start, target.size) for target in self._targets]

    def release_start(self) -> Release:
        """Release the score to start from. Privacy: ``plan.start_event()``."""
        gradients = (self._loss.gradient(np.zeros(target.size), target) for target in self._targets)
        total = np.sum([start_sums(grad) for grad in gradients], axis=0)
        return release_start(total, self._plan.start_epsilon, self._randomness)

    def train_ensemble(self, ensemble: int, scores: Sequence[NDArray[np.float64]]) -> Release:
        """Train the trees of one ensemble, each on the rows that are assigned to it.

        Shapes:  scores: float64[n_rows] for each site, of the trees before; value: int64[n_trees, n_values].
        Privacy: what one tree costs: a record is in one tree only, wherever the others' are.

        Reference: DPBoost, Algorithm 2.
        """
        plan = self._plan
        trees_of_rows = [
            assign_records(self._key, site.site, site.record_ids, ensemble, plan.row_shares(ensemble))
            for site in self._sites
        ]
        scores, trees = list(scores), []
        for tree in range(plan.ensemble_size(ensemble)):
            rows = [self._rows_of(i, trees_of_rows[i] == tree, scores[i]) for i in range(len(self._sites))]
            settings = plan.tree_settings(ensemble, tree)
            released = train_single_tree(rows, self._table, settings, self._randomness).value
            trees.append(released)
            scores = self.advance(scores, released[np.newaxis])
        return Release(np.stack(trees), plan.ensemble_event())

    def advance(self, scores: Sequence[NDArray[np.float64]], trees: NDArray[np.int64]) -> list[NDArray[np.float64]]:
        """Add released trees to every site's scores."""
        return [
            add_trees(score, trees, bins, self._table, self._plan.learning_rate)
            for score, bins in zip(scores, self._bins, strict=True)
        ]

    def _rows_of(self, site: int, is_assigned: NDArray[np.bool_], scores: NDArray[np.float64]) -> TreeRows:
        grad = self._loss.gradient(scores[is_assigned], self._targets[site][is_assigned])
        return TreeRows(self._bins[site][:, is_assigned], grad, self._table)


def train(
    sites: Sequence[SiteData],
    candidates: Candidates,
    loss: Loss,
    plan: DpBoostPlan,
    key: bytes,
    publish: Publish,
    randomness: RandomSource = OS_RANDOMNESS,
) -> DpBoostModel:
    """Train a model with a pure epsilon of ``plan.epsilon``, under a trusted aggregator.

    Privacy: adding or removing a record of any site; ``plan.event()`` says what it costs. Every ensemble passes
        through ``publish`` before the next one sees it.

    Args:
        sites: as in ``EnsembleTrainer``, like the next four.
        candidates: see there.
        loss: see there.
        plan: see there.
        key: see there.
        publish: usually ``partial(ledger.release, job_id)``, after ``ledger.open_job(job_id, plan.event())``.
        randomness: source of the noise.

    Raises:
        ValueError: arguments that do not fit together.
        PrivacyRefusal: from ``publish``: the budget does not allow it.
    """
    trainer = EnsembleTrainer(sites, candidates, loss, plan, key, randomness)
    start = 0
    if plan.start_share:
        start = int(publish(_query("start", candidates, loss, plan, key, []), trainer.release_start)[0])
    scores = trainer.start(start)
    ensembles: list[NDArray[np.int64]] = []
    for ensemble in range(plan.n_ensembles):
        before = [np.array([start]), *ensembles]
        query = _query(f"ensemble {ensemble}", candidates, loss, plan, key, before)
        trees = publish(query, partial(trainer.train_ensemble, ensemble, scores))
        scores = trainer.advance(scores, trees)
        ensembles.append(trees)
    return DpBoostModel(candidates, loss, plan.learning_rate, np.concatenate(ensembles), start)


def start_scores(start: int, n_rows: int) -> NDArray[np.float64]:
    """Return every row's score before the first tree. Shapes: float64[n_rows]. Units: start: 2^-LEAF_BITS."""
    return np.full(n_rows, math.ldexp(start, -LEAF_BITS))


def add_trees(
    scores: NDArray[np.float64],
    trees: NDArray[np.int64],
    bins: NDArray[np.uint8],
    table: SplitTable,
    learning_rate: float,
) -> NDArray[np.float64]:
    """Return scores plus the trees' outputs.

    Shapes: scores, result: float64[n_rows]; bins: uint8[n_features, n_rows].
    """
    for tree in trees:
        scores = scores + learning_rate * tree_outputs(table, tree, bins)
    return scores


def _query(
    what: str,
    candidates: Candidates,
    loss: Loss,
    plan: DpBoostPlan,
    key: bytes,
    before: Sequence[NDArray[np.int64]],
) -> str:
    """Name everything that a release depends on beside the rows."""
    digest = hashlib.sha256(f"{plan!r} {loss!r} {candidates.counts!r} ".encode())
    for part in (*candidates.of_feature, *before):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(hashlib.sha256(key).digest())
    return f"dpboost {what} {digest.hexdigest()}"
