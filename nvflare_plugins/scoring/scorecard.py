"""A scorecard: points for each bin of each column, from a model whose trees have one split each (``max_depth`` 1).

Such a model is a sum of functions of single columns, so that the card is the model, and not an approximation: a row's
points add up to

    offset - factor * margin,    factor = pdo / ln 2,    offset = score - factor * ln odds

where the margin is the model's log-odds of the second class. A row whose odds of the first class to the second are
``odds`` has ``score`` points, and ``pdo`` points more double these odds. The base margin and the offset are spread
evenly over the columns of the card, as optbinning spreads intercept and offset.

Bins are the model's, divided further at the edges of a profile's where one is given: each then has that bin's weight of
evidence, ln(share of the first class / share of the second), with the sign that optbinning has and a profile has not.

Privacy: a card says what the model's thresholds and leaves say, and what the profile says of its bins.

Reference: Siddiqi, Credit Risk Scorecards, chapter 6; optbinning 1.0, Scorecard with scaling_method "pdo_odds".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.files import inert_csv
from nvflare_plugins.base.formatting import bounds, printable
from nvflare_plugins.scoring.export import base_margins
from nvflare_plugins.scoring.model import Feature, FinishedModel, ScoringError
from nvflare_plugins.xgb.model_json import category_sets, tree_weights, trees_model

FORMAT, _PROFILE = "veilboost-scorecard-1", "veilboost-profile-1"
_OBJECTIVES = ("binary:logistic", "binary:logitraw")
_OUTERMOST = 1e38  # no value is beyond: such a threshold divides missing values from all others
_COLUMNS = ("feature", "bin", "low", "high", "profile_bin", "woe", "leaf", "points")


@dataclass(frozen=True, slots=True)
class Scaling:
    """How log-odds become points.

    Attributes:
        pdo: points that double the odds.
        score: points at ``odds``.
        odds: of the first class to the second; with ``is_reversed`` of the second to the first.
        is_reversed: more points for more of the second class.
        is_whole: each bin's points are rounded to whole numbers.
    """

    pdo: float = 20.0
    score: float = 600.0
    odds: float = 50.0
    is_reversed: bool = False
    is_whole: bool = False

    def __post_init__(self) -> None:
        for name in ("pdo", "odds"):
            value = getattr(self, name)
            expect(f"{name} must be a number above 0", math.isfinite(value) and value > 0)
        expect("score must be a number", math.isfinite(self.score))

    @property
    def factor(self) -> float:
        """Points for one unit of the margin, with its sign."""
        return (1 if self.is_reversed else -1) * self.pdo / math.log(2)

    @property
    def offset(self) -> float:
        """Points at a margin of 0."""
        return self.score - self.pdo / math.log(2) * math.log(self.odds)


@dataclass(frozen=True, slots=True)
class ScoredBin:
    """A line of the card.

    Attributes:
        bin: which values, for people.
        low, high: low <= value < high, of numbers; None is no bound.
        profile_bin, woe: the bin of the profile in which it lies, and that one's weight of evidence.
        leaf: what the model adds to the margin of such a row.
    """

    feature: str
    bin: str
    low: float | None
    high: float | None
    profile_bin: str
    woe: float | None
    leaf: float
    points: float


class Scorecard:
    """The points of a model.

    Attributes:
        bins: feature by feature, in the model's order, the missing values last.
        base: the margin before any column.

    Raises:
        ScoringError: the model is no sum of functions of single columns, or has no two classes.
        ConfigurationError: the profile is none, or not of these columns and classes.
    """

    def __init__(self, model: FinishedModel, scaling: Scaling | None = None, profile: Path | None = None) -> None:
        self.scaling = scaling or Scaling()
        stumps, self.base = _stumps_of(model)
        told = {} if profile is None else _profile_of(profile, model)
        used = [feature for feature in model.features if feature.name in stumps]
        found = [each for one in used for each in _bins_of(one, stumps[one.name], told.get(one.name))]
        share = (self.scaling.offset + self.scaling.factor * self.base) / len(used)
        self.bins = tuple(self._line(*one, share) for one in found)

    def _line(
        self, segment: _Segment, text: str, cell: Mapping[str, Any] | None, leaf: float, share: float
    ) -> ScoredBin:
        points = share + self.scaling.factor * leaf
        woe = None if cell is None else -float(cell["weights_of_evidence"][1])
        return ScoredBin(
            segment.feature,
            text,
            segment.low,
            segment.high,
            "" if cell is None else _text_of(cell),
            woe,
            leaf,
            float(round(points)) if self.scaling.is_whole else points,
        )

    def table(self) -> bytes:
        """Return the card as CSV."""
        rows = [["" if value is None else value for value in self._values(one)] for one in self.bins]
        return inert_csv([_COLUMNS, *rows])

    def document(self) -> dict[str, Any]:
        """Return the card as JSON values."""
        scaling = self.scaling
        told = {"pdo": scaling.pdo, "score": scaling.score, "odds": scaling.odds, "reversed": scaling.is_reversed}
        told |= {"factor": scaling.factor, "offset": scaling.offset, "base_margin": self.base}
        bins = [dict(zip(_COLUMNS, self._values(one), strict=True)) for one in self.bins]
        return {"format": FORMAT, **told, "bins": bins}

    @staticmethod
    def _values(one: ScoredBin) -> list[Any]:
        return [getattr(one, name) for name in _COLUMNS]


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stump:
    """One split. ``right``: categories that go right; None for a threshold."""

    threshold: np.float32
    right: frozenset[int] | None
    is_missing_left: bool
    leaves: tuple[float, float]

    def leaf(self, value: float) -> float:
        """Return what it adds for a value; NaN is missing."""
        if math.isnan(value):
            goes_left = self.is_missing_left
        elif self.right is None:
            goes_left = bool(np.float32(value) < self.threshold)
        else:
            goes_left = int(value) not in self.right
        return self.leaves[0 if goes_left else 1]


def _stumps_of(model: FinishedModel) -> tuple[dict[str, list[_Stump]], float]:
    """Return the splits of each column, and the margin without them."""
    if model.objective not in _OBJECTIVES or model.clipped_at is not None:
        raise ScoringError(f"{model.name} is no model of the log-odds of two classes, of which scorecards are made.")
    learner = model.document()["learner"]
    trees = trees_model(learner)["trees"]
    weights = tree_weights(learner) or [1.0] * len(trees)
    base, found = base_margins(learner, 1)[0], dict[str, list[_Stump]]()
    for tree, weight in zip(trees, weights, strict=True):
        left, right = tree["left_children"][0], tree["right_children"][0]
        values = [weight * float(np.float32(one)) for one in tree["split_conditions"]]
        if left == -1:
            base += values[0]
            continue
        if any(tree["left_children"][child] != -1 for child in (left, right)):
            raise ScoringError(
                f"{model.name} has trees of more than one split, whose points are of several columns together: train "
                "with max_depth 1."
            )
        sets = category_sets(tree)
        stump = _Stump(
            np.float32(tree["split_conditions"][0]),
            frozenset(sets[0]) if 0 in sets else None,
            bool(tree["default_left"][0]),
            (values[left], values[right]),
        )
        found.setdefault(model.features[tree["split_indices"][0]].name, []).append(stump)
    if not found:
        raise ScoringError(f"{model.name} splits on no column: there is nothing to give points for.")
    return found, base


@dataclass(frozen=True, slots=True)
class _Segment:
    """Values that are told apart from others at most as a whole. ``example``: one of them."""

    feature: str
    example: float
    low: float | None = None
    high: float | None = None
    category: str | None = None


def _segments_of(feature: Feature, stumps: Sequence[_Stump], cells: Sequence[Mapping[str, Any]]) -> list[_Segment]:
    name = feature.name
    if feature.categories is not None:
        found = [_Segment(name, float(code), category=text) for code, text in enumerate(feature.categories)]
        return [*found, _Segment(name, math.nan)]
    edges = {float(one.threshold) for one in stumps if abs(float(one.threshold)) < _OUTERMOST}
    edges |= {float(np.float32(cell[side])) for cell in cells for side in ("low", "high") if cell.get(side) is not None}
    ordered = sorted(edges)
    if not ordered:
        return [_Segment(name, 0.0), _Segment(name, math.nan)]
    below = float(np.nextafter(np.float32(ordered[0]), np.float32(-np.inf)))
    others = [_Segment(name, low, low, high) for low, high in zip(ordered, [*ordered[1:], None], strict=True)]
    return [_Segment(name, below, None, ordered[0]), *others, _Segment(name, math.nan)]


_Line = tuple[_Segment, str, Mapping[str, Any] | None, float]


def _bins_of(feature: Feature, stumps: Sequence[_Stump], told: Sequence[Mapping[str, Any]] | None) -> Iterator[_Line]:
    """Yield the bins of a column: neighbours, or categories, with one leaf and one bin of the profile, together."""
    cells = told or ()
    groups: dict[tuple[float, int | None, int], list[_Segment]] = {}
    n_runs, last = 0, None
    for one in _segments_of(feature, stumps, cells):
        leaf = math.fsum(stump.leaf(one.example) for stump in stumps)
        place = next((at for at, cell in enumerate(cells) if _holds(cell, one)), None)
        is_listed = one.category is not None
        n_runs += not is_listed and ((leaf, place) != last or math.isnan(one.example))
        last = leaf, place
        groups.setdefault((leaf, place, -1 if is_listed else n_runs), []).append(one)
    ends = sorted({end for group in groups.values() for one in group for end in (one.low, one.high) if end is not None})
    text = dict(zip(ends, bounds(ends), strict=True))
    for (leaf, place, _), group in groups.items():
        whole = _Segment(feature.name, group[0].example, group[0].low, group[-1].high)
        yield whole, _text(group, text), None if place is None else cells[place], leaf


def _holds(cell: Mapping[str, Any], one: _Segment) -> bool:
    """Tell whether a bin of the profile holds a segment."""
    if math.isnan(one.example):
        return bool(cell["missing"])
    if one.category is not None:
        return one.category in cell["categories"]
    low, high = (None if cell[side] is None else float(np.float32(cell[side])) for side in ("low", "high"))
    above = low is None or (one.low is not None and one.low >= low)
    return bool(cell["values"]) and above and (high is None or (one.high is not None and one.high <= high))


def _text(group: Sequence[_Segment], text: Mapping[float, str]) -> str:
    """Return which values a group has, for people."""
    if math.isnan(group[0].example):
        return "missing"
    if group[0].category is not None:
        return ", ".join(str(one.category) for one in group)
    return _range(*(None if end is None else text[end] for end in (group[0].low, group[-1].high)))


def _range(low: str | None, high: str | None) -> str:
    """Return an interval as optbinning writes it."""
    return f"{'(-inf' if low is None else '[' + low}, {'inf' if high is None else high})"


# -- the profile ------------------------------------------------------------------------------------------------------


def _text_of(cell: Mapping[str, Any]) -> str:
    """Return which values a bin of a profile holds."""
    if "categories" in cell:
        parts = [", ".join(map(str, cell["categories"]))] if cell["categories"] else []
    else:
        ends = [None if cell[side] is None else f"{cell[side]:.9g}" for side in ("low", "high")]
        parts = [_range(*ends)] if cell["values"] else []
    return ", or ".join([*parts, *(["missing"] if cell["missing"] else [])])


def _profile_of(path: Path, model: FinishedModel) -> dict[str, list[Mapping[str, Any]]]:
    """Return the bins of each column in a ``profile.json``."""
    shown = printable(str(path))
    try:
        document = json.loads(path.read_bytes())
        is_profile = document["format"] == _PROFILE
        classes = [str(one["class"]) for one in document["classes"]]
        found = {str(one["name"]): list(one["bins"]) for one in document["features"]}
        lists = {name: [str(c) for one in bins for c in one.get("categories", ())] for name, bins in found.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ConfigurationError(f"{shown} is no profile: give the profile.json of a run of kind profile") from None
    expect(f"{shown} is no profile that this version reads", is_profile)
    own = [str(one) for one in model.classes or ()]
    expect(f"{shown} is of the classes {', '.join(classes)}, and the model of {', '.join(own)}", classes == own)
    lacking = [one.name for one in model.features if one.name not in found]
    expect(f"{shown} lacks columns of the model: {', '.join(map(repr, lacking))}. Profile them too", not lacking)
    other = [one.name for one in model.features if sorted(lists[one.name]) != sorted(one.categories or ())]
    expect(f"{shown} has other categories than the model: {', '.join(map(repr, other))}", not other)
    return found
