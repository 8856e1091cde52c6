"""What a job of FederBoost's vertical training says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dp_components.bucket_ldp.edges import MAX_BUCKETS
from dp_components.neighbouring import NeighbouringRelation
from nvflare_plugins.checks import check_fields, expect, is_list, is_number, is_text, is_whole, seconds

PROFILE = "dp_local"


class Unit(Enum):
    """What a passive party's epsilon is for.

    Attributes:
        VALUE: one value of one row, as in the paper. A row with m features then costs up to m times epsilon, and this
            must not be called record-level privacy.
        ROW: a whole row: the features share epsilon.
    """

    VALUE = "value"
    ROW = "row"

    @property
    def relation(self) -> NeighbouringRelation:
        """What neighbouring data sets differ in."""
        return NeighbouringRelation.CHANGE_VALUE if self is Unit.VALUE else NeighbouringRelation.REPLACE_ROW


@dataclass(frozen=True, slots=True)
class BucketJob:
    """One training.

    Attributes:
        data_set: name of the training set in every party's policy; its files share their rows by the id column.
        active: the site with the label.
        label: label column there.
        features: the active party's own features; None means all columns of its file but label and id.
        params: XGBoost parameters.
        num_rounds: boosting rounds.
        epsilon: what each passive party spends, for one ``unit``, edges included.
        unit: "value" or "row" (see ``Unit``).
        edges_epsilon: the part of epsilon that pays for equal-count buckets; 0 takes public edges.
        n_buckets: most buckets of a feature; a discrete feature has at most as many as values.
        description: name of the file in each passive party's input folder that says what is public about its features.
        alignment: id of the alignment job that found the common rows; None takes all rows, which must be the same at
            all parties.
        deadline_s: longest time that an exchange may wait for the slowest site; 0 derives it from the data's size.
    """

    data_set: str
    active: str
    label: str
    features: list[str] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    num_rounds: int = 20
    epsilon: float = 4.0
    unit: str = Unit.VALUE.value
    edges_epsilon: float = 0.0
    n_buckets: int = 16
    description: str = "bucket_features.json"
    alignment: str | None = None
    profile: str = PROFILE
    tracking: bool = False
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("data_set", "active", "label", "description"):
            expect(f"{name} must be a non-empty text", is_text(getattr(self, name)))
        expect("alignment must be the id of a job, or be left out", self.alignment is None or is_text(self.alignment))
        features = self.features
        expect("features must be a list of column names", features is None or is_list(features, is_text))
        expect("params must be a dictionary of XGBoost parameters", isinstance(self.params, dict))
        expect(f"profile must be {PROFILE}: values are noised one by one, at their own party", self.profile == PROFILE)
        expect("metrics would tell about rows beside what is paid for: tracking must be off", self.tracking is False)
        expect("unit must be value or row", self.unit in [unit.value for unit in Unit])
        expect("num_rounds must be a whole number of at least 1", is_whole(self.num_rounds, 1))
        expect(f"n_buckets must be 2 to {MAX_BUCKETS}", is_whole(self.n_buckets, 2) and self.n_buckets <= MAX_BUCKETS)
        expect("epsilon must be a number above 0", is_number(self.epsilon) and self.epsilon > 0)
        expect(
            "edges_epsilon must be a number from 0 to less than epsilon",
            is_number(self.edges_epsilon) and 0 <= self.edges_epsilon < self.epsilon,
        )
        seconds("deadline_s", self.deadline_s)

    @property
    def protected(self) -> Unit:
        """What a passive party's epsilon is for."""
        return Unit(self.unit)

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> BucketJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown or missing fields, or a value that is not allowed.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**check_fields(document, known, ("data_set", "active", "label")))
