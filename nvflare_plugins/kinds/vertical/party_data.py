"""What one party brings to a vertical job: its columns of the rows that all parties share, cut points and bins.

Privacy: everything here stays at the site. Errors travel: they name columns, and hold no value, id or count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Columns
from he_processors.errors import ConfigurationError
from he_processors.histogram.planner import BinCodes, BinLayout
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import canonical_ids
from nvflare_plugins.data.labels import columns_of
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.growth.arithmetic import Arithmetic
from nvflare_plugins.kinds.alignment.job import Alignment
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.site.memory.forgetting import Forgetting
from nvflare_plugins.xgb import stock as xgb


@dataclass(frozen=True, slots=True, repr=False)
class PartySet:
    """One data set at one party.

    Attributes:
        name: "train" or "eval".
        ids: canonical ids of the rows in their order; None if the policy names no id column.
    """

    name: str
    data_set: DataSet
    table: Table
    ids: tuple[bytes, ...] | None

    def aligned(self, alignment: Alignment) -> PartySet:
        """Return the common rows in the common order."""
        alignment.check_length(self.table.n_rows)
        taken = self.table.taken(alignment.positions)
        ids = None if self.ids is None else tuple(self.ids[context] for context in alignment.positions)
        return dataclasses.replace(self, table=taken, ids=ids)

    def row_ids(self) -> list[str]:
        """Return what names the rows at this site from job to job: ids, or positions where there are none."""
        if self.ids is None:
            return [str(row) for row in range(self.table.n_rows)]
        return [one.decode() for one in self.ids]


@dataclass(frozen=True, slots=True, repr=False)
class PartyData:
    """The training set, and the evaluation set if the job has one."""

    sets: tuple[PartySet, ...]

    @property
    def train(self) -> PartySet:
        """Return the training set."""
        return self.sets[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return this party's columns in order."""
        return self.train.table.feature_names

    @property
    def categories(self) -> tuple[tuple[str, ...], ...]:
        """Return each column's public list; nothing for one of numbers."""
        lists = self.train.table.categories
        return tuple(tuple(lists.get(column, ())) for column in self.columns)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return what other parties call the columns."""
        return aliases_of(self.train.data_set.aliases, self.columns)

    def features(self) -> list[Columns]:
        """Return the columns of all sets. Shapes: float32[n_features, n_rows] each."""
        return [one.table.by_feature for one in self.sets]

    def aligned(self, alignments: Mapping[str, Alignment]) -> PartyData:
        """Return the common rows of all sets. Args: alignments: by the name of the data set."""
        return PartyData(tuple(one.aligned(alignments[one.data_set.name]) for one in self.sets))


def load_party(job: VerticalJob, context: SiteContext, group: str | None = None) -> PartyData:
    """Load this party's columns of the job's data sets.

    Args:
        group: column of the active party that says which rows belong together, for jobs that divide them.

    Raises:
        ConfigurationError: a data set cannot be read, lacks a column, or holds what cannot be trained on.
        PolicyRefusal: this site has no data set of that name.
    """
    is_active, group = context.site == job.active, job.query or group
    for name, by_site in (("features", job.features), ("categories", job.categories)):
        unknown = sorted(set(by_site) - set(context.sites))
        if unknown:
            raise ConfigurationError(f"{name} names {unknown[0]!r}, which is not a site of this job")
    features = job.features.get(context.site)
    sets = []
    for name, source in (("train", job.data_set), ("eval", job.eval_data_set)):
        if source is None:
            continue
        # Noised sums are paid for from the training set's budget.
        is_paid = job.is_noised and not is_active and name == "train"
        data_set = context.policy.data_set_for(source, job.profile, is_paid=is_paid)
        data_set.check_holds_bins("a vertical training holds them")
        table = load_table(
            data_set,
            label=job.label if is_active else None,
            weight=job.weight if is_active else None,
            group=group if is_active else None,
            features=features,
            categories=job.categories.get(context.site),
            label_classes=job.label_classes,
            unknown_is_missing=job.unknown_category_is_missing,
            may_lack_features=is_active,
            with_ids=True,
            takes_passes=True,
        )
        if table.weight is not None and not table.weight.any():
            raise DataRefusal(f"weight column {job.weight!r} holds zeros only.")
        for name in () if is_active else set(columns_of(job.label)) & set(table.feature_names):
            raise ConfigurationError(f"{context.site} has a column of the label's name, {name!r}: leave it out")
        features = list(table.feature_names)  # the evaluation set has the training set's columns
        ids = None if table.ids is None else tuple(canonical_ids(table.ids, source, data_set.missing, data_set.id_form))
        Forgetting(context.policy).refuse(ids, data_set)
        sets.append(PartySet(name, data_set, dataclasses.replace(table, ids=None), ids))
    return PartyData(tuple(sets))


def aliases_of(chosen: Mapping[str, str], columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the alias of every column: the one that the policy chose, else f0, f1, ... by position.

    Raises:
        ConfigurationError: two columns would have the same alias.
    """
    aliases = tuple(chosen.get(column, f"f{position}") for position, column in enumerate(columns))
    if len(set(aliases)) != len(aliases):
        raise ConfigurationError(
            "two columns have the same alias: give both one of their own. Policy key: data_sets.<name>.aliases."
        )
    return aliases


# A party's own cut points and bins, found by its own XGBoost exactly as in centralized training.
#
# XGBoost sketches every column for itself, so the cuts of a column do not depend on the columns of other parties.
#
# Reference: XGBoost 3.2, src/common/quantile.cc (MakeCuts), src/common/hist_util.h (SearchBin).

_MARGIN = 1e-5


@dataclass(frozen=True)
class CutPoints:
    """Cut points of one party's columns. They stay with the party.

    Attributes:
        upper: upper bounds of each feature's bins, ascending; of a categorical feature its places in the public list up
            to the last one that a training row has. Shapes: float32[n_bins] each.
        lowest: a value below all of a feature's. Shapes: float32[n_features].
        bin_of_category: of each categorical feature, the bin of every place. Shapes: int64[n_places] each.
    """

    upper: tuple[NDArray[np.float32], ...]
    lowest: NDArray[np.float32]
    bin_of_category: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    @cached_property
    def layout(self) -> BinLayout:
        """Return how many bins each feature has."""
        return BinLayout(tuple(self._n_bins(feature) for feature in range(len(self.upper))))

    def _n_bins(self, feature: int) -> int:
        if feature in self.bin_of_category:
            return int(self.bin_of_category[feature].max()) + 1
        return self.upper[feature].size

    def categories_in(self, feature: int, bins: Sequence[int]) -> tuple[int, ...]:
        """Return the places in the public list that lie in some bins, ascending."""
        return tuple(np.flatnonzero(np.isin(self.bin_of_category[feature], bins)).tolist())

    def threshold(self, feature: int, last_left_bin: int) -> np.float32:
        """Return the split value of "bins up to this one go left"; bin -1 sends no value left."""
        result: np.float32 = self.lowest[feature] if last_left_bin < 0 else self.upper[feature][last_left_bin]
        return result

    def codes(self, columns: Columns) -> BinCodes:
        """Return the bin of every value; a missing one has the code after the last bin.

        Shapes: columns: float32[n_features, n_rows]; result: uint8 or uint16[n_features, n_rows].
        """
        n_bins = self.layout.n_bins
        codes = np.empty(columns.shape, dtype=np.uint8 if max(n_bins) < 256 else np.uint16)
        for feature, (cuts, values) in enumerate(zip(self.upper, columns, strict=True)):
            if feature in self.bin_of_category:
                places = np.where(np.isnan(values), 0, values).astype(np.int64)
                bins = self.bin_of_category[feature][places]
            else:
                bins = np.minimum(np.searchsorted(cuts, values, side="right"), cuts.size - 1)
            codes[feature] = np.where(np.isnan(values), n_bins[feature], bins)
        return codes

    def thresholds(self, feature: int) -> NDArray[np.float32]:
        """Return all that a split of a feature of numbers may compare with, ascending. Shapes: float32[any]."""
        return np.unique(np.append(self.upper[feature], self.lowest[feature]))


def find_cut_points(
    columns: Columns,
    max_bin: int,
    categorical: Collection[int] = (),
    weight: NDArray[np.float32] | None = None,
    arithmetic: Arithmetic | None = None,
) -> CutPoints:
    """Find a party's cut points, one column after the other: what XGBoost would find in all together.

    Shapes: columns: float32[n_features, n_rows]; NaN is missing, categorical columns hold places in public lists;
        weight: float32[n_rows], which the sketch counts; None for 1 each.

    Args:
        categorical: which features are categorical. A category has a bin of its own, whatever ``max_bin`` says.
        arithmetic: of the job's trees; None is this site's XGBoost's.

    Raises:
        ConfigurationError: XGBoost refuses the values (an infinity, for example).
    """
    parts = [
        _cuts_of(column, max_bin, is_categorical=feature in categorical, weight=weight)
        for feature, column in enumerate(columns)
    ]
    # XGBoost lists a value below all others before the bounds of each feature of numbers.
    upper = tuple(part if feature in categorical else part[1:] for feature, part in enumerate(parts))
    lowest = [
        part[0] if arithmetic is None else _lowest(column, arithmetic)
        for part, column in zip(parts, columns, strict=True)
    ]
    return CutPoints(
        upper, np.array(lowest, dtype=np.float32), {feature: np.arange(upper[feature].size) for feature in categorical}
    )


def _lowest(column: NDArray[np.float32], arithmetic: Arithmetic) -> np.float32:
    """Return the threshold of a split that sends no value left, whichever XGBoost this site has."""
    if arithmetic.lowest_is_infinite:
        return np.float32(-np.inf)
    smallest = float(np.nanmin(column, initial=np.inf))
    return np.float32(smallest - (abs(smallest) + _MARGIN) if smallest < np.inf else _MARGIN)


def _cuts_of(
    column: NDArray[np.float32], max_bin: int, *, is_categorical: bool, weight: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    types = ["c" if is_categorical else "float"]
    rows = np.ascontiguousarray(column)[:, None]
    try:
        matrix = xgb.QuantileDMatrix(
            rows, weight=weight, max_bin=max_bin, nthread=1, feature_types=types, enable_categorical=True
        )
        return matrix.get_quantile_cut()[1].astype(np.float32)
    except (xgb.core.XGBoostError, ValueError):
        # The reason could quote values.
        raise ConfigurationError("XGBoost refuses the feature table: check it for infinite values") from None
