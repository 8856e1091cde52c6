"""What a DPBoost job says. Everything in it is public: nothing may be looked up in the rows."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le, Len, Lt
from numpy.typing import NDArray

from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan, RowSharing
from dp_components.dpboost.single_tree import LogisticLoss, Loss, SquaredLoss
from dp_components.split_candidates.candidates import (
    MAX_CANDIDATES,
    Candidates,
    FeatureBounds,
    as_candidates,
    uniform_candidates,
)
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument, MostAttempts, OnLostParty
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import (
    AS_GIVEN,
    STRICT,
    Bounds,
    BoundsOfColumns,
    Entry,
    Name,
    Names,
    Number,
    OneOf,
    Positive,
    Rounds,
    Seconds,
    TwoEntries,
    Whole,
    Words,
    document,
)
from nvflare_plugins.data.labels import OneColumn

PROFILE = "dp_trusted"
KEPT_FILE = "dpboost_kept"
"""What an attempt leaves to the next, in the run's folder (server.py)."""
_MOST = MAX_CANDIDATES + 1  # categories
VARIANTS = ("dpboost", "para", "seq")
_BELOW = 1 - 1e-9  # so that a budget equal to the job's promise is enough for it, whatever the last digits do


Categories = Annotated[
    dict[Name, Annotated[list[Entry], Len(2, _MOST)]],
    Words(f"an object that gives each column a list of 2 to {_MOST} texts or whole numbers"),
]


@document
class DpBoostJob(JobDocument):
    """One training: same columns at every site, other rows; regression, or labels 0 and 1.

    Privacy: pure epsilon towards adding or removing the rows of one person, up to ``rows_per_person`` of them in the
        union of the sites; towards everyone but the server, which sees the exact sums over all sites.
    """

    KIND: ClassVar[str] = "dpboost"
    CANNOT_CONTINUE: ClassVar[str] = (
        "the server, which sees exact sums over all sites, would see the lost site's part as their difference"
    )

    data_set: Name
    """Name of the training set in every site's policy, with an id column and a pure privacy budget. The ids
    choose the tree of each row.
    """
    label: OneColumn
    """Label column: 0 and 1, or numbers within ``label_bounds``."""
    epsilon: Positive
    """What this job spends."""
    feature_bounds: BoundsOfColumns = field(default_factory=dict)
    """Public (low, high) of every numeric feature."""
    categories: Categories = field(default_factory=dict)
    """Public list of each categorical column, in the order in which splits cut it; other values count as missing."""
    features: Names | None = None
    """Columns to train on, in this order; None takes those with bounds, then those with categories."""
    label_bounds: Bounds | None = None
    """Public (low, high) of the label of a regression, which is clamped to them; None for labels 0 and 1."""
    label_classes: TwoEntries | None = None
    """Public list of the label's two values, if it is not 0 and 1."""
    variant: Annotated[str, OneOf(*VARIANTS)] = "dpboost"
    """``dpboost``, or the slides' baselines ``para`` (equal shares of rows) and ``seq`` (each tree on all)."""
    n_trees: Rounds = 50
    """Trees in all, T."""
    trees_per_ensemble: Rounds | None = None
    """T_e, trees that share the rows; None puts all trees into one ensemble. Several ensembles share epsilon and boost
    one another: in our measurements that helped at epsilon 40 and more, if at all. At epsilon 1 to 10 one ensemble with
    all of the budget was best (tests/bench/RESULTS.md).
    """
    depth: Rounds = 6
    """Levels of a tree."""
    learning_rate: Number = 0.1
    """Learning rate, eta."""
    ridge: Number = 0.1
    """Ridge of the leaves, lambda."""
    start_share: Annotated[float, STRICT, Ge(0), Lt(1), AS_GIVEN, Words("a number from 0 to less than 1")] = 0.0
    """Part of epsilon that pays for the mean of the label, from which a regression then starts; 0 starts from the
    middle of its bounds. 0.05 is a good choice unless the mean is known to lie there.
    """
    n_candidates: Annotated[Whole, Ge(1), Le(MAX_CANDIDATES)] = 32
    """Split candidates of a numeric feature, evenly spaced between its bounds."""
    rows_per_person: Rounds = 1
    """Most rows of one person; the noise grows with it."""
    profile: Annotated[str, OneOf(PROFILE), Words(f"{PROFILE}: the server chooses splits by exact sums")] = PROFILE
    tracking: Annotated[bool, OneOf(False), Words("off: metrics are sums over rows that nothing pays for")] = False
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it from the job's size."""
    on_lost_site: Annotated[str, OneOf(OnLostParty)] = OnLostParty.STOP.value
    """When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and, when the site
    is back, goes on under fresh keys and without a new submission: what the server has answered is not asked again, and
    the exchange in which the site was lost is repeated for the same answer, at no charge.
    """
    lost_site_deadline_s: Seconds = 600.0
    """How long ``on_lost_site="wait"`` waits for a lost site, each time."""
    most_attempts: MostAttempts = 20
    """Attempts of a job that waits; each try after a loss, or after what time mends, is one."""

    def __post_init__(self) -> None:
        one_kind = self.label_classes is None or self.label_bounds is None
        expect("label_bounds are for a regression, label_classes for two classes", one_kind)
        for_regression = self.start_share == 0 or self.label_bounds is not None
        expect("start_share is for regressions: with two classes the trees could not outweigh a start", for_regression)
        self._check_features()
        try:
            self.plan()
        except (ValueError, TypeError) as error:
            raise ConfigurationError(str(error)) from None
        except OverflowError:
            raise ConfigurationError("n_trees, depth, learning_rate or ridge is larger than any model needs") from None

    def _check_features(self) -> None:
        named = [*self.feature_bounds, *self.categories]
        missing = [name for name in self.names if name not in named]
        if missing or not named:
            raise ConfigurationError(
                f"feature_bounds lacks public bounds of {', '.join(missing) or 'every feature'}. Give each numeric "
                "feature (low, high) from public knowledge, never from the rows, and each categorical one its list in "
                "categories"
            )
        extra = sorted(set(named) - set(self.names)) + sorted(set(self.feature_bounds) & set(self.categories))
        expect(f"bounds or categories are given for what is no feature, or twice: {', '.join(extra)}", not extra)

    @property
    def names(self) -> list[str]:
        """The features in order; the same at the server and at all sites."""
        return list(self.features) if self.features is not None else [*self.feature_bounds, *self.categories]

    def loss(self) -> Loss:
        """Return the loss with its public bounds."""
        return LogisticLoss() if self.label_bounds is None else SquaredLoss(FeatureBounds(*self.label_bounds))

    def plan(self) -> DpBoostPlan:
        """Return parameters and budget of one row; a person with more rows gets as much protection as asked for."""
        per_ensemble = self.trees_per_ensemble if self.trees_per_ensemble is not None else self.n_trees
        epsilon = self.epsilon / self.rows_per_person * _BELOW
        common: dict[str, Any] = {
            "depth": self.depth,
            "learning_rate": self.learning_rate,
            "ridge": self.ridge,
            "start_share": self.start_share,
        }
        if self.variant == "seq":
            return DpBoostPlan(epsilon, self.n_trees, 1, clips_over_all_trees=True, **common)
        sharing = RowSharing.EQUAL if self.variant == "para" else RowSharing.GEOMETRIC
        return DpBoostPlan(epsilon, self.n_trees, per_ensemble, sharing=sharing, **common)

    def candidates(self) -> Candidates:
        """Return the public split candidates."""
        return Candidates(tuple(self._candidates_of(name) for name in self.names))

    def _candidates_of(self, name: str) -> NDArray[np.float32]:
        if name in self.categories:
            return np.arange(len(self.categories[name]) - 1, dtype=np.float32)
        return as_candidates(uniform_candidates(FeatureBounds(*self.feature_bounds[name]), self.n_candidates))
