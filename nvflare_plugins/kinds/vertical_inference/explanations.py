"""Exact SHAP values of a vertical model, from positions of rows among thresholds in the place of values.

A tree looks at a value only to compare it with thresholds. So each passive party hands over, for each of its features
that the model uses, the position of every row's value among the sorted thresholds (how many are not above it), and for
each of its splits the rank of the threshold. The active party puts ranks in the place of thresholds and positions in
the place of values: ``value < threshold`` and ``position < rank`` are the same for every row and split. Missing values
stay missing. Stock XGBoost then computes contributions, interactions or leaves, equal to centralized ones in every bit.

A column of categories is told in groups that no split tells apart: of each row its group, of each split the groups that
go right.

Privacy: this tells the active party far more than a prediction does: the order of a party's rows by each used feature,
    as fine as the model's thresholds; which values are missing; and which splits have the same or a larger threshold.
    Neither thresholds nor values are told. Every owner must have consented (policy key ``consents.explain``).

Reference: Lundberg et al., Consistent individualized feature attribution for tree ensembles (2018), algorithm 2.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical.model import NO_THRESHOLD, ActivePart, PassivePart, PrivateSplit, has_sealed_splits
from nvflare_plugins.kinds.vertical_inference.inference import rounds_of
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import bare_model, set_categories

_HEADER = struct.Struct("<4sBIIII")
_MAGIC, _VERSION = b"VLBP", 2
_MISSING = np.uint32(0xFFFFFFFF)
_SPLIT_FIELDS, _GROUP_FIELDS = 4, 2
_MOST_GROUPS = 1 << 16
_NO_VALUE = _MOST_GROUPS - 1
MAX_RANK = 1 << 24  # float32 holds whole numbers up to here


@dataclass(frozen=True, slots=True, repr=False)
class RowPositions:
    """What a passive party tells for explanations.

    Of a categorical feature, categories that no split tells apart make one group: a split is told as the groups that go
    right, a row as the group of its category.

    Shapes:
        features: uint32[n_used], ascending: which of the party's features the model uses.
        splits: uint32[n_splits, 4]: tree, node, place in ``features``, rank of the threshold, from 1 on; of a split by
            categories 0.
        positions: uint32[n_rows, n_used]: thresholds not above the value, or its group; 2^32 - 1 is missing.
        groups: uint32[n, 2]: place in ``splits`` of a split by categories, and a group that goes right there, 65535
            standing for the rows without a value.
    """

    features: NDArray[np.uint32]
    splits: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    groups: NDArray[np.uint32]

    @classmethod
    def of(cls, part: PassivePart, features: NDArray[np.float32]) -> Self:
        """Find the positions of a party's rows.

        Shapes: features: float32[n_rows, n_features] in the order of ``part.columns``; NaN is missing.
        """
        used = sorted({split.feature for split in part.table.values()})
        place = {feature: i for i, feature in enumerate(used)}
        table = sorted(part.table.items())
        scales = [_scale([s for _, s in table if s.feature == feature], part, feature) for feature in used]
        splits = [(*where, place[s.feature], scales[place[s.feature]].rank(s)) for where, s in table]
        groups = [(i, group) for i, (_, s) in enumerate(table) for group in scales[place[s.feature]].groups(s)]
        positions = np.empty((features.shape[0], len(used)), dtype="<u4")
        for i, feature in enumerate(used):
            values = features[:, feature]
            is_missing = np.isnan(values)
            positions[:, i] = np.where(is_missing, _MISSING, scales[i].positions(np.where(is_missing, 0, values)))
        return cls(
            np.array(used, dtype="<u4"),
            np.array(splits, dtype="<u4").reshape(-1, _SPLIT_FIELDS),
            positions,
            np.array(groups, dtype="<u4").reshape(-1, _GROUP_FIELDS),
        )

    def to_bytes(self) -> bytes:
        """Return the bytes that are sealed for the active party."""
        n_rows, n_used = self.positions.shape
        header = _HEADER.pack(_MAGIC, _VERSION, n_used, len(self.splits), n_rows, len(self.groups))
        parts = (self.features, self.splits, self.positions, self.groups)
        return header + b"".join(part.astype("<u4").tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes, n_rows: int) -> Self:
        """Read positions of so many rows strictly. Raises: ProtocolError."""
        if len(data) < _HEADER.size:
            raise ProtocolError("positions of rows are shorter than their header")
        magic, version, n_used, n_splits, rows_told, n_groups = _HEADER.unpack_from(data)
        sizes = (n_used, n_splits * _SPLIT_FIELDS, n_rows * n_used, n_groups * _GROUP_FIELDS)
        if (
            magic != _MAGIC
            or version != _VERSION
            or rows_told != n_rows
            or (len(data) != _HEADER.size + 4 * sum(sizes))
        ):
            raise ProtocolError("not positions of the rows of this job")
        numbers = np.frombuffer(data, dtype="<u4", offset=_HEADER.size)
        features, splits, positions, groups = np.split(numbers, np.cumsum(sizes)[:-1])
        splits, positions = splits.reshape(-1, _SPLIT_FIELDS), positions.reshape(n_rows, n_used)
        groups = groups.reshape(-1, _GROUP_FIELDS)
        ranks_fit = splits[:, 3].max(initial=1) < MAX_RANK
        present = positions[positions != _MISSING]
        if (np.diff(features.astype(np.int64)) <= 0).any() or (splits[:, 2] >= n_used).any():
            raise ProtocolError("positions of rows name features that they do not list")
        if not ranks_fit or present.max(initial=0) >= MAX_RANK:
            raise ProtocolError("positions of rows are out of range")
        by_category = np.flatnonzero(splits[:, 3] == 0)
        with_groups = [np.unique(some[:, 0]) for some in (groups, groups[groups[:, 1] != _NO_VALUE])]
        is_told = all(np.array_equal(places, by_category) for places in with_groups)  # XGBoost knows no empty set
        if not is_told or groups[:, 1].max(initial=0) >= _MOST_GROUPS:
            raise ProtocolError("positions of rows name groups that no split has")
        return cls(features, splits, positions, groups)

    def sets(self) -> dict[int, tuple[int, ...]]:
        """Return the groups that go right, ascending, by place among the splits."""
        return {
            int(place): tuple(np.unique(self.groups[self.groups[:, 0] == place, 1]).tolist())
            for place in np.unique(self.groups[:, 0])
        }


@dataclass(frozen=True, slots=True)
class _Thresholds:
    """A feature of numbers: its thresholds in the model, ascending. Shapes: values: float32[n]."""

    values: NDArray[np.float32]

    def rank(self, split: PrivateSplit) -> int:
        return int(np.searchsorted(self.values, split.threshold)) + 1

    def groups(self, split: PrivateSplit) -> tuple[int, ...]:
        return ()

    def positions(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        return np.searchsorted(self.values, values, side="right")


@dataclass(frozen=True, slots=True)
class _Groups:
    """A categorical feature: the group of each category. Shapes: of_category: int64[n_categories]."""

    of_category: NDArray[np.int64]

    def rank(self, split: PrivateSplit) -> int:
        return 0

    def groups(self, split: PrivateSplit) -> tuple[int, ...]:
        right = np.unique(self.of_category[list(split.categories or ())]).tolist()
        return (*right, *([] if split.default_left else [_NO_VALUE]))

    def positions(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        result: NDArray[np.int64] = self.of_category[values.astype(np.int64)]
        return result


def _scale(splits: Sequence[PrivateSplit], part: PassivePart, feature: int) -> _Thresholds | _Groups:
    """Return what tells values of a feature apart in the model."""
    words = part.categories.get(part.columns[feature])
    if words is None:
        return _Thresholds(np.unique(np.array([split.threshold for split in splits], dtype=np.float32)))
    sides = np.array([np.isin(np.arange(len(words)), split.categories or ()) for split in splits])
    return _Groups(np.unique(sides.T, axis=0, return_inverse=True)[1].ravel())


def _told_by(site: str, positions: Mapping[str, RowPositions], n_columns: int, n_rows: int) -> RowPositions:
    if site not in positions:
        raise ConfigurationError(f"the model cannot be explained without {site}")
    told = positions[site]
    if told.features.max(initial=0) >= n_columns or told.positions.shape[0] != n_rows:
        raise _mismatch(site)
    return told


def _put_set(tree: dict[str, Any], node: int, groups: Sequence[int]) -> None:
    """Let the groups of a set of categories go right."""
    set_categories(tree, node, tuple(group for group in groups if group != _NO_VALUE))
    tree["default_left"][node] = int(_NO_VALUE not in groups)  # a guard may have changed it
    tree["split_conditions"][node] = float(str(NO_THRESHOLD))


class Explainer:
    """The active party's model with ranks in the place of other parties' thresholds, and rows to match.

    Raises:
        ConfigurationError: a party's positions do not belong to this model.
    """

    def __init__(
        self,
        part: ActivePart,
        own: NDArray[np.float32],
        positions: Mapping[str, RowPositions],
        rounds: str | list[int] = "all",
    ):
        """Put the model and the rows together.

        Shapes: own: float32[n_rows, n_own_columns].

        Args:
            positions: by party.
            rounds: as ``inference.rounds_of``.
        """
        n_own = len(part.columns)
        document = json.loads(part.booster)
        trees = document["learner"]["gradient_booster"]["model"]["trees"]
        n_columns = n_own + sum(len(party.aliases) for party in part.parties)
        table = np.full((own.shape[0], n_columns), np.nan, dtype=np.float32)
        table[:, :n_own] = own
        types = ["c" if name in part.categories else "float" for name in part.columns] + ["float"] * (n_columns - n_own)
        first = n_own
        foreign = {
            (t, node)
            for t, tree in enumerate(trees)
            for node, left in enumerate(tree["left_children"])
            if left >= 0 and tree["split_indices"][node] >= n_own
        }
        for party in part.parties:
            told = _told_by(party.site, positions, len(party.aliases), own.shape[0])
            table[:, first + told.features] = np.where(told.positions == _MISSING, np.nan, told.positions)
            sets, kinds = told.sets(), {int(place): bool(rank == 0) for _, _, place, rank in told.splits.tolist()}
            for place, is_category in kinds.items():
                types[first + int(told.features[place])] = "c" if is_category else "float"
            for number, (t, node, place, rank) in enumerate(told.splits.tolist()):
                if t >= len(trees):
                    continue  # a tree that was not kept
                is_foreign = (t, node) in foreign and trees[t]["split_indices"][node] == first + told.features[place]
                if not is_foreign or kinds[place] != (rank == 0):
                    raise _mismatch(party.site)
                foreign.discard((t, node))
                if rank:
                    trees[t]["split_conditions"][node] = float(rank)
                else:
                    _put_set(trees[t], node, sets[number])
            first += len(party.aliases)
        if foreign:
            raise ConfigurationError("a split of the model is in no party's table")
        self.names = [*part.columns, *(f"{p.site}.{alias}" for p in part.parties for alias in p.aliases)]
        booster = xgb.Booster(model_file=bytearray(bare_model(document)))
        first_round, end_round = rounds_of(part, rounds)
        self._booster = booster[first_round:end_round]
        self._matrix = xgb.DMatrix(table, feature_types=types, enable_categorical=True)

    def contributions(self) -> NDArray[np.float32]:
        """Return SHAP values, the bias last. Shapes: as XGBoost's ``pred_contribs``: [n_rows, (n_outputs,) n + 1]."""
        return self._booster.predict(self._matrix, pred_contribs=True)


def check_covers(part: ActivePart, rounds: str | list[int]) -> None:
    """Refuse SHAP values that would be no numbers, before the owners tell anything for them.

    XGBoost weighs the two ways from a node by the share of its cover (``sum_hessian``) that goes there, and divides by
    zero where a node has none: rows whose predictions are certain have hessians that are zero in float32.

    Args:
        rounds: as ``inference.rounds_of``.

    Raises:
        ConfigurationError: a node that is divided has no cover, or the model hides whose column divides it.
    """
    document = json.loads(part.booster)
    if has_sealed_splits(document):
        raise ConfigurationError(
            "a model of preset sealed cannot be explained: it does not say which column of a passive party splits. "
            "Remedy: predict without explaining (action), or explain a merged model (merge)"
        )
    model = document["learner"]["gradient_booster"]["model"]
    first, end = (model["iteration_indptr"][one] for one in rounds_of(part, rounds))
    for tree in model["trees"][first:end]:
        is_divided = np.asarray(tree["left_children"]) >= 0
        if not (np.asarray(tree["sum_hessian"], dtype=np.float64)[is_divided] > 0).all():
            raise ConfigurationError(
                "the model cannot be explained: a node that it divides has rows whose weight (sum_hessian) is zero, by "
                "which SHAP values would be divided. Remedy: explain fewer rounds (rounds), predict without "
                "explaining (action), or train with a larger min_child_weight"
            )


def _mismatch(site: str) -> ConfigurationError:
    return ConfigurationError(f"the private table of {site} does not belong to this model")
