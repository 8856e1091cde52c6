"""What a DPBoost job says. Everything in it is public: nothing may be looked up in the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.dpboost.losses import LogisticLoss, Loss, SquaredLoss
from dp_components.dpboost.plan import DpBoostPlan, RowSharing
from dp_components.split_candidates.candidates import MAX_CANDIDATES, Candidates, FeatureBounds, as_candidates
from dp_components.split_candidates.uniform import uniform_candidates
from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import (
    are_bounds,
    check_fields,
    expect,
    is_entry,
    is_list,
    is_mapping,
    is_number,
    is_text,
    is_whole,
    seconds,
)

PROFILE = "dp_trusted"
VARIANTS = ("dpboost", "para", "seq")
_BELOW = 1 - 1e-9  # so that a budget equal to the job's promise is enough for it, whatever the last digits do


@dataclass(frozen=True, slots=True)
class DpBoostJob:
    """One training: same columns at every site, other rows; regression, or labels 0 and 1.

    Privacy: pure epsilon towards adding or removing the rows of one person, up to ``rows_per_person`` of them in the
        union of the sites; towards everyone but the server, which sees the exact sums over all sites.

    Attributes:
        data_set: name of the training set in every site's policy, with an id column and a pure privacy budget. The ids
            must stay with their rows for good: a row chooses its trees by its id.
        label: label column.
        epsilon: what this job spends.
        feature_bounds: public (low, high) of every numeric feature.
        categories: public list of each categorical column, in the order in which splits cut it; other values count
            as missing.
        features: columns to train on, in this order; None takes those with bounds, then those with categories.
        label_bounds: public (low, high) of the label of a regression, which is clamped to them; None for labels 0
            and 1.
        label_classes: public list of the label's two values, if it is not 0 and 1.
        variant: ``dpboost``, or the slides' baselines ``para`` (equal shares of rows) and ``seq`` (each tree on all).
        n_trees, depth, learning_rate, ridge: T, depth, eta, lambda.
        trees_per_ensemble: T_e; None puts all trees into one ensemble.
        start_share: part of epsilon that pays for the mean of the label, from which a regression then starts; 0 starts
            from the middle of its bounds. 0.05 is a good choice unless the mean is known to lie there.
        n_candidates: split candidates of a numeric feature, evenly spaced between its bounds.
        rows_per_person: most rows of one person; the noise grows with it.
        deadline_s: longest time that an exchange may wait for the slowest site; 0 derives it from the job's size.
    """

    data_set: str
    label: str
    epsilon: float
    feature_bounds: dict[str, list[float]] = field(default_factory=dict)
    categories: dict[str, list[Any]] = field(default_factory=dict)
    features: list[str] | None = None
    label_bounds: list[float] | None = None
    label_classes: list[Any] | None = None
    variant: str = "dpboost"
    n_trees: int = 50
    trees_per_ensemble: int | None = None
    depth: int = 6
    learning_rate: float = 0.1
    ridge: float = 0.1
    start_share: float = 0.0
    n_candidates: int = 32
    rows_per_person: int = 1
    profile: str = PROFILE
    tracking: bool = False
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("data_set", "label"):
            expect(f"{name} must be a non-empty text", is_text(getattr(self, name)))
        expect("epsilon must be a number above 0", is_number(self.epsilon) and self.epsilon > 0)
        expect(f"profile must be {PROFILE}: the server chooses splits by exact sums", self.profile == PROFILE)
        expect("metrics are sums over rows that nothing pays for: tracking must be off", self.tracking is False)
        expect(f"variant must be one of {', '.join(VARIANTS)}", self.variant in VARIANTS)
        expect("rows_per_person must be a whole number of at least 1", is_whole(self.rows_per_person, 1))
        expect(f"n_candidates must be 1 to {MAX_CANDIDATES}", is_whole(self.n_candidates, 1, MAX_CANDIDATES))
        seconds("deadline_s", self.deadline_s)
        bounds, classes = self.label_bounds, self.label_classes
        expect("label_bounds must be two numbers, the lower one first", bounds is None or are_bounds(bounds))
        is_pair = classes is None or (is_list(classes, is_entry) and len(classes) == 2)
        expect("label_classes must be two values", is_pair)
        expect("label_bounds are for a regression, label_classes for two classes", None in (classes, bounds))
        is_share = is_number(self.start_share) and 0 <= self.start_share < 1
        expect("start_share must be a number from 0 to less than 1", is_share)
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
        features = self.features
        expect("features must be a list of column names", features is None or is_list(features, is_text))
        is_bounded = is_mapping(self.feature_bounds) and all(map(are_bounds, self.feature_bounds.values()))
        expect("feature_bounds must give each column two finite numbers, the lower one first", is_bounded)
        is_listed = is_mapping(self.categories) and all(
            is_list(v, is_entry) and 2 <= len(v) <= MAX_CANDIDATES + 1 for v in self.categories.values()
        )
        most = MAX_CANDIDATES + 1
        expect(f"categories must give each column a list of 2 to {most} texts or whole numbers", is_listed)
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

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DpBoostJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown or missing fields, or a value that is not allowed.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**check_fields(document, known, ("data_set", "label", "epsilon")))
