"""What a DPBoost model costs, and how its budget and its rows are divided: DPBoost, PARA and SEQ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dp_components.dpboost.geometric_leaf_clipping import clip_bound
from dp_components.dpboost.gradient_based_data_filtering import gradient_sensitivity
from dp_components.dpboost.single_tree import TreeSettings
from dp_components.events import (
    ComposedEvent,
    DisjointPartEvent,
    Event,
    ExponentialEvent,
    LaplaceEvent,
    RepeatedEvent,
)
from dp_components.sensitivity import grid_bound

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
        start_share: part of epsilon that pays for the score to start from (paid_start.py); 0 starts from 0.
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
        grid_bound(self.ridge, 20)
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
        return TreeSettings(self.depth, grid_bound(self.ridge, 20), bound, self.split_epsilon, self.leaf_epsilon)

    def ensemble_event(self) -> Event:
        """Return what an ensemble costs: as much as one tree, because no row is in two of its trees.

        Reference: parallel composition; it holds for trees that are chosen adaptively, too.
        """
        relation = gradient_sensitivity().relation
        splits = RepeatedEvent(ExponentialEvent(self.split_epsilon, relation), self.depth)
        return ComposedEvent((splits, LaplaceEvent(self.leaf_epsilon, relation)))

    def tree_event(self, ensemble: int, tree: int) -> Event:
        """Return what one tree costs as a part of its ensemble, for a ledger that is charged tree by tree.

        The first tree of an ensemble costs as much as all of them, because a record is in one of them only.
        """

        def part(event: ExponentialEvent | LaplaceEvent) -> DisjointPartEvent:
            return DisjointPartEvent(event, f"ensemble {ensemble}", tree)

        relation = gradient_sensitivity().relation
        splits = RepeatedEvent(part(ExponentialEvent(self.split_epsilon, relation)), self.depth)
        return ComposedEvent((splits, part(LaplaceEvent(self.leaf_epsilon, relation))))

    def event(self) -> Event:
        """Return what the model costs: ensembles add up. To be reserved before training (``Ledger.open_job``)."""
        ensembles = RepeatedEvent(self.ensemble_event(), self.n_ensembles)
        return ComposedEvent((self.start_event(), ensembles)) if self.start_share else ensembles

    def events_by_tree(self) -> Event:
        """Return what the model costs in the events that are charged one by one: ``start_event``, ``tree_event``."""
        trees = [
            self.tree_event(ensemble, tree)
            for ensemble in range(self.n_ensembles)
            for tree in range(self.ensemble_size(ensemble))
        ]
        return ComposedEvent((*([self.start_event()] if self.start_share else []), *trees))

    def start_event(self) -> Event:
        """Return what the start costs, where it is paid for."""
        return LaplaceEvent(self.start_epsilon, gradient_sensitivity().relation)
