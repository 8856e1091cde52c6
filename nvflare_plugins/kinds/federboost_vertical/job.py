"""What a FederBoost job says, and how its model describes itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray
from pydantic import Field

from dp_components.bucket_ldp import MAX_BUCKETS, Feature, PublicEdges, PublicValues
from dp_components.events import NeighbouringRelation
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import (
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
from nvflare_plugins.data.labels import OneColumn
from nvflare_plugins.xgb.objectives import refuse_ranking

# What a job of FederBoost's vertical training says.


PROFILE = "dp_local"
EDGES_SHARE = 0.1
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

    KIND: ClassVar[str] = "federboost_vertical"

    data_set: Name
    """Name of the training set in every party's policy; its files share their rows by the id column."""
    active: Name
    """The site with the label."""
    label: OneColumn
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
    edges_epsilon: Annotated[float, STRICT, Ge(0), Field(allow_inf_nan=False), AS_GIVEN] | None = None
    """The part of epsilon that pays for equal-count buckets; 0 takes buckets of equal widths, which hardly divide a
    column with a long tail. None takes a tenth of epsilon where a party describes a feature by bounds, else nothing.
    """
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
        refuse_ranking(self.params, "this kind of job", "its rows are in no groups; use a vertical training")
        expect("edges_epsilon must be a number from 0 to less than epsilon", self.most_for_edges < self.epsilon)

    @property
    def most_for_edges(self) -> float:
        """What a passive party pays for the edges of its buckets, if it has features that need it."""
        return EDGES_SHARE * self.epsilon if self.edges_epsilon is None else self.edges_epsilon

    @property
    def protected(self) -> Unit:
        """What a passive party's epsilon is for."""
        return Unit(self.unit)


# What a passive party says in public about its features: written by the party, kept in its input folder.
#
# {"age": {"low": 18, "high": 100}, "sex": {"values": [1, 2]}, "income": {"edges": [20000, 40000, 80000]}}
#
# Only the features named here are used. "low" and "high" bound a feature, "values" lists all values of a discrete one,
# "edges" gives the ends of the buckets themselves. Nothing of it may be looked up in the rows: it is not paid for.


_REMEDY = "Give each feature low and high, or values, or edges, from public knowledge and never from the rows."


@dataclass(frozen=True, slots=True)
class Description:
    """The features of one passive party, in the order of its file."""

    names: tuple[str, ...]
    features: tuple[Feature, ...]

    @classmethod
    def read(cls, path: Path) -> Description:
        """Read the party's file.

        Raises:
            ConfigurationError: it is not a description; the message names the feature.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raise ConfigurationError(f"{path.name}: the description of the features is no JSON file") from None
        if not isinstance(document, dict) or not document:
            raise ConfigurationError(f"{path.name} describes no feature. {_REMEDY}")
        return cls(tuple(document), tuple(_feature(name, item) for name, item in document.items()))


def _feature(name: str, item: object) -> Feature:
    complaint = ConfigurationError(f"feature {name[:80]!r} has no usable public description. {_REMEDY}")
    if not isinstance(item, Mapping):
        raise complaint
    try:
        match item:
            case {"low": low, "high": high, **rest} if not rest:
                return FeatureBounds(*_numbers([low, high]).tolist())
            case {"values": list(values), **rest} if not rest:
                return PublicValues(tuple(_numbers(values).tolist()))
            case {"edges": list(edges), **rest} if not rest:
                return PublicEdges(tuple(_numbers(edges).tolist()))
    except (ValueError, OverflowError):
        raise complaint from None
    raise complaint


def _numbers(values: Sequence[object]) -> NDArray[np.float64]:
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise ValueError("not numbers")
    return np.array(values, dtype=np.float64)
