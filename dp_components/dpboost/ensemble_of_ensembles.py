"""Ensemble of ensembles (EoE): boosting over disjoint rows inside an ensemble, over the same rows between ensembles."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, clip_bound
from dp_components.dpboost.gradient_based_data_filtering import gradient_sensitivity
from dp_components.dpboost.single_tree import (
    Loss,
    SplitTable,
    SquaredLoss,
    TreeRows,
    TreeSettings,
    assign_records,
    release_start,
    start_sums,
    train_single_tree,
    tree_outputs,
)
from dp_components.events import (
    ComposedEvent,
    DisjointPartEvent,
    Event,
    ExponentialEvent,
    LaplaceEvent,
    Release,
    RepeatedEvent,
)
from dp_components.sensitivity import grid_bound
from dp_components.split_candidates.candidates import Candidates, Columns
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# What a DPBoost model costs, and how its budget and its rows are divided: DPBoost, PARA and SEQ.


# The parts are rounded down by a little more than adding them up can round up.
_DOWN = 1 - 2.0**-47
MAX_DEPTH = 12


class RowSharing(Enum):
    """How an ensemble's trees share the rows."""

    GEOMETRIC = "geometric"
    """Tree t gets a share proportional to (1 - eta)^t, as gradients fall: the paper's."""
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class DpBoostPlan:
    """Parameters of a model; the defaults are those of the paper's experiments.

    Attributes:
        epsilon: of the whole model; pure.
        n_trees: T.
        trees_per_ensemble: T_e. Trees of one ensemble use disjoint rows; ensembles use the same rows again.
        depth: of every tree; trees are complete.
        learning_rate: eta.
        ridge: lambda; above 0.
        sharing: how the trees of an ensemble share the rows.
        clips_over_all_trees: whether geometric clipping counts all trees, or begins anew in each ensemble.
        start_share: part of epsilon that pays for the score to start from; 0 starts from 0.
    """

    epsilon: float
    n_trees: int = 50
    trees_per_ensemble: int = 50
    depth: int = 6
    learning_rate: float = 0.1
    ridge: float = 0.1
    sharing: RowSharing = RowSharing.GEOMETRIC
    clips_over_all_trees: bool = False
    start_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_trees", "trees_per_ensemble", "depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1")
        if self.depth > MAX_DEPTH:
            raise ValueError(f"depth must be at most {MAX_DEPTH}")
        if not 0 < self.learning_rate < 1:
            raise ValueError("learning_rate must be between 0 and 1")
        if not 0 < self.epsilon < math.inf:
            raise ValueError("epsilon must be a finite number above 0")
        if not 0 <= self.start_share < 1:
            raise ValueError("start_share must be from 0 to less than 1")
        grid_bound(self.ridge)
        self.tree_settings(self.n_ensembles - 1, self.ensemble_size(self.n_ensembles - 1) - 1)
        self.tree_settings(0, self.ensemble_size(0) - 1)

    @property
    def n_ensembles(self) -> int:
        """N_e."""
        return -(-self.n_trees // self.trees_per_ensemble)

    @property
    def start_epsilon(self) -> float:
        """Budget of the start."""
        return self.epsilon * self.start_share * _DOWN

    @property
    def split_epsilon(self) -> float:
        """Budget of one level of a tree: half of the tree's, divided by the depth."""
        return self.leaf_epsilon / self.depth * _DOWN

    @property
    def leaf_epsilon(self) -> float:
        """Budget of all leaves of a tree: half of the tree's."""
        return self.epsilon * (1 - self.start_share) / self.n_ensembles / 2 * _DOWN

    def ensemble_size(self, ensemble: int) -> int:
        """Return the number of trees; the last ensemble may have fewer."""
        return min(self.trees_per_ensemble, self.n_trees - ensemble * self.trees_per_ensemble)

    def row_shares(self, ensemble: int) -> NDArray[np.float64]:
        """Return the probability of each tree of an ensemble: eta (1 - eta)^t / (1 - (1 - eta)^T_e), or equal ones.

        Shapes: result: float64[ensemble_size].
        """
        size = self.ensemble_size(ensemble)
        falling = 1.0 if self.sharing is RowSharing.EQUAL else 1 - self.learning_rate
        weights = falling ** np.arange(size)
        result: NDArray[np.float64] = weights / weights.sum()
        return result

    def tree_settings(self, ensemble: int, tree: int) -> TreeSettings:
        """Return the settings of one tree, each with the whole budget of its ensemble.

        Raises:
            ValueError: geometric clipping leaves nothing of so late a tree.
        """
        position = tree + (ensemble * self.trees_per_ensemble if self.clips_over_all_trees else 0)
        bound = clip_bound(gradient_sensitivity(), self.learning_rate, position)
        return TreeSettings(self.depth, grid_bound(self.ridge), bound, self.split_epsilon, self.leaf_epsilon)

    def ensemble_event(self) -> Event:
        """Return what an ensemble costs: as much as one tree, because no row is in two of its trees.

        Reference: parallel composition; it holds for trees that are chosen adaptively, too.
        """
        return self._event_of_tree(lambda event: event)

    def tree_event(self, ensemble: int, tree: int) -> Event:
        """Return what one tree costs as a part of its ensemble, for a ledger that is charged tree by tree.

        The first tree of an ensemble costs as much as all of them, because a record is in one of them only.
        """
        return self._event_of_tree(lambda event: DisjointPartEvent(event, f"ensemble {ensemble}", tree))

    def _event_of_tree(self, within: Callable[[ExponentialEvent | LaplaceEvent], Event]) -> Event:
        relation = gradient_sensitivity().relation
        splits = RepeatedEvent(within(ExponentialEvent(self.split_epsilon, relation)), self.depth)
        return ComposedEvent((splits, within(LaplaceEvent(self.leaf_epsilon, relation))))

    def event(self) -> Event:
        """Return what the model costs: ensembles add up. To be reserved before training (``Ledger.open_job``)."""
        ensembles = RepeatedEvent(self.ensemble_event(), self.n_ensembles)
        return ComposedEvent((self.start_event(), ensembles)) if self.start_share else ensembles

    def events_by_tree(self) -> Event:
        """Return what the model costs in the events that are charged one by one: ``start_event``, ``tree_event``."""
        start = [self.start_event()] if self.start_share else []
        places = ((e, tree) for e in range(self.n_ensembles) for tree in range(self.ensemble_size(e)))
        return ComposedEvent((*start, *(self.tree_event(*place) for place in places)))

    def start_event(self) -> Event:
        """Return what the start costs, where it is paid for."""
        return LaplaceEvent(self.start_epsilon, gradient_sensitivity().relation)


# Ensemble of ensembles (EoE): boosting over disjoint rows inside an ensemble, over the same rows between ensembles.


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
        self._candidates, self._table = candidates, SplitTable.of(candidates)
        self._bins = [candidates.bin_rows(site.columns) for site in sites]
        self._targets = [loss.target(site.label.astype(np.float64)) for site in sites]

    def run(self, publish: Publish) -> DpBoostModel:
        """Train; see ``train``."""
        plan, start = self._plan, 0
        if plan.start_share:
            start = int(publish(self._query("start", []), self._release_start)[0])
        scores = [start_scores(start, target.size) for target in self._targets]
        ensembles: list[NDArray[np.int64]] = []
        for ensemble in range(plan.n_ensembles):
            query = self._query(f"ensemble {ensemble}", [np.array([start]), *ensembles])
            ensembles.append(publish(query, partial(self.train_ensemble, ensemble, scores)))
            scores = self._advance(scores, ensembles[-1])
        return DpBoostModel(self._candidates, self._loss, plan.learning_rate, np.concatenate(ensembles), start)

    def train_ensemble(self, ensemble: int, scores: Sequence[NDArray[np.float64]]) -> Release:
        """Train the trees of one ensemble, each on the rows that are assigned to it.

        Shapes:  scores: float64[n_rows] for each site, of the trees before; value: int64[n_trees, n_values].
        Privacy: what one tree costs: a record is in one tree only, wherever the others' are.

        Reference: DPBoost, Algorithm 2.
        """
        plan = self._plan
        shares = plan.row_shares(ensemble)
        trees_of_rows = [
            assign_records(self._key, site.site, site.record_ids, ensemble, shares) for site in self._sites
        ]
        scores, trees = list(scores), []
        for tree in range(plan.ensemble_size(ensemble)):
            rows = [self._rows_of(i, of_rows == tree, scores[i]) for i, of_rows in enumerate(trees_of_rows)]
            settings = plan.tree_settings(ensemble, tree)
            trees.append(train_single_tree(rows, self._table, settings, self._randomness).value)
            scores = self._advance(scores, trees[-1][np.newaxis])
        return Release(np.stack(trees), plan.ensemble_event())

    def _release_start(self) -> Release:
        gradients = (self._loss.gradient(np.zeros(target.size), target) for target in self._targets)
        total = np.sum([start_sums(grad) for grad in gradients], axis=0)
        return release_start(total, self._plan.start_epsilon, self._randomness)

    def _advance(self, scores: Sequence[NDArray[np.float64]], trees: NDArray[np.int64]) -> list[NDArray[np.float64]]:
        """Add released trees to every site's scores."""
        rate, of_sites = self._plan.learning_rate, zip(scores, self._bins, strict=True)
        return [add_trees(score, trees, bins, self._table, rate) for score, bins in of_sites]

    def _rows_of(self, site: int, is_assigned: NDArray[np.bool_], scores: NDArray[np.float64]) -> TreeRows:
        grad = self._loss.gradient(scores[is_assigned], self._targets[site][is_assigned])
        return TreeRows(self._bins[site][:, is_assigned], grad, self._table)

    def _query(self, what: str, before: Sequence[NDArray[np.int64]]) -> str:
        """Name everything that a release depends on beside the rows."""
        candidates = self._candidates
        digest = hashlib.sha256(f"{self._plan!r} {self._loss!r} {candidates.counts!r} ".encode())
        for part in (*candidates.of_feature, *before):
            digest.update(np.ascontiguousarray(part).tobytes())
        digest.update(hashlib.sha256(self._key).digest())
        return f"dpboost {what} {digest.hexdigest()}"


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
        sites, candidates, loss, plan, key: as of ``EnsembleTrainer``.
        publish: usually ``partial(ledger.release, job_id)``, after ``ledger.open_job(job_id, plan.event())``.
        randomness: source of the noise.

    Raises:
        ValueError: arguments that do not fit together.
        PrivacyRefusal: from ``publish``: the budget does not allow it.
    """
    return EnsembleTrainer(sites, candidates, loss, plan, key, randomness).run(publish)


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
