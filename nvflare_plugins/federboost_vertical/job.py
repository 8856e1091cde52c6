"""What a job of FederBoost's vertical training says."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import Field

from dp_components.bucket_ldp.edges import MAX_BUCKETS
from dp_components.neighbouring import NeighbouringRelation
from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.checks import expect
from nvflare_plugins.declared import (
    AS_GIVEN,
    STRICT,
    JobId,
    Name,
    Names,
    OneOf,
    Parameters,
    Positive,
    Rounds,
    Seconds,
    Whole,
    Words,
    document,
)

PROFILE = "dp_local"
_LOCAL = Words(f"{PROFILE}: values are noised one by one, at their own party")


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


@document
class BucketJob(JobDocument):
    """One training."""

    data_set: Name
    """Name of the training set in every party's policy; its files share their rows by the id column."""
    active: Name
    """The site with the label."""
    label: Name
    """Label column there."""
    features: Names | None = None
    """The active party's own features; None means all columns of its file but label and id."""
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters."""
    num_rounds: Rounds = 20
    """Boosting rounds."""
    epsilon: Positive = 4.0
    """What each passive party spends, for one ``unit``, edges included."""
    unit: Annotated[str, OneOf(Unit)] = Unit.VALUE.value
    """``value`` (the paper's: one value of one row) or ``row`` (all its features together), see ``Unit``."""
    edges_epsilon: Annotated[float, STRICT, Ge(0), Field(allow_inf_nan=False), AS_GIVEN] = 0.0
    """The part of epsilon that pays for equal-count buckets; 0 takes public edges."""
    n_buckets: Annotated[Whole, Ge(2), Le(MAX_BUCKETS)] = 16
    """Most buckets of a feature; a discrete feature has at most as many as values."""
    description: Name = "bucket_features.json"
    """Name of the file in each passive party's input folder that says what is public about its features."""
    alignment: JobId | None = None
    """Id of the alignment job that found the common rows; None takes all rows, which must be the same at all parties.
    """
    buckets_from: JobId | None = None
    """Id of an earlier job, whose buckets the active party has kept: it trains on them again, on the same rows, and
    nothing is sent by passive parties or charged to them. Either all parties of that job take part, who then get their
    splits, or the active one alone, whose model no other party can answer for.
    """
    profile: Annotated[str, OneOf(PROFILE), _LOCAL] = PROFILE
    tracking: Annotated[bool, OneOf(False), Words("off: metrics would tell about rows beside what is paid for")] = False
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it from the data's size."""

    def __post_init__(self) -> None:
        expect("edges_epsilon must be a number from 0 to less than epsilon", self.edges_epsilon < self.epsilon)

    @property
    def protected(self) -> Unit:
        """What a passive party's epsilon is for."""
        return Unit(self.unit)
