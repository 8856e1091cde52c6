"""The rows that a job with a vertical model is about, and what a passive party charges for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import canonical_ids, load_ids
from nvflare_plugins.data.table import RowPasses, load_table
from nvflare_plugins.data.tabular_files import TabularFile
from nvflare_plugins.kinds.alignment.result import Alignment
from nvflare_plugins.kinds.vertical.model_files import PassivePart
from nvflare_plugins.kinds.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.site.memory.budgets import PredictionBudget, ScoringBudget
from nvflare_plugins.site.policy import SitePolicy

# The rows that a job with a vertical model is about: one party's columns of them, in the order of all parties.
#
# Privacy: everything here stays at the site. Errors travel: they hold no value, id or count.


@dataclass(frozen=True, slots=True, repr=False)
class Rows:
    """Rows in their order.

    Shapes: features: float32[n_rows, n_columns], NaN is missing.

    Attributes:
        ids: canonical ids; None if the policy names no id column for the data set.
        first: position of the first row in the whole set.
    """

    features: NDArray[np.float32]
    ids: tuple[bytes, ...] | None
    first: int = 0

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return int(self.features.shape[0])

    def aligned(self, alignment: Alignment) -> Rows:
        """Return the common rows in the common order."""
        ids = None if self.ids is None else tuple(self.ids[place] for place in alignment.positions)
        return Rows(alignment.take(self.features), ids)

    def part(self, rows: list[int] | None) -> Rows:
        """Return the rows from a position on and before another.

        Raises:
            ConfigurationError: there are no such rows; how many there are is not said.
        """
        if rows is None:
            return self
        first, end = _range(rows, self.n_rows)
        return Rows(self.features[first:end], None if self.ids is None else self.ids[first:end], first)

    def names(self) -> list[str]:
        """Return what names the rows at this site from job to job: ids, or positions where there are none."""
        if self.ids is None:
            return [str(self.first + row) for row in range(self.n_rows)]
        return [one.decode() for one in self.ids]


@dataclass(frozen=True, slots=True, repr=False)
class UnreadRows:
    """Rows of a data set that is read in passes: those that a job names are held once they are known, and no others.

    Attributes:
        ids: as of ``Rows``.
    """

    passes: RowPasses
    ids: tuple[bytes, ...] | None

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return self.passes.n_rows

    def aligned(self, alignment: Alignment) -> UnreadRows:
        """Return the common rows in the common order."""
        alignment.check_length(self.n_rows)
        ids = None if self.ids is None else tuple(self.ids[place] for place in alignment.positions)
        return UnreadRows(self.passes.taken(alignment.positions), ids)

    def part(self, rows: list[int] | None) -> Rows:
        """Read the rows from a position on and before another.

        Raises:
            DataRefusal: there are no such rows, or a file has changed.
        """
        first, end = _range(rows, self.n_rows)
        features = self.passes.taken(np.arange(first, end)).held()
        return Rows(features, None if self.ids is None else self.ids[first:end], first)


def _range(rows: list[int] | None, n_rows: int) -> tuple[int, int]:
    """Return the first row that a job names and the end. Raises: DataRefusal: there are no such rows."""
    first, end = (0, n_rows) if rows is None else rows
    if end > n_rows:  # how many there are is not said
        raise DataRefusal("the job asks for rows that the data set does not have")
    return first, end


def load_rows(
    data_set: DataSet,
    columns: tuple[str, ...],
    categories: Mapping[str, tuple[str, ...]] | None = None,
    unknown_is_missing: bool = False,
    held_by: str | None = None,
) -> Rows | UnreadRows:
    """Load the columns that a model was trained on; where the policy wants no data set held, nothing but the ids.

    Args:
        categories: public list of each categorical column. A category of the list that training never saw is none of
            any split's; one outside the list is refused.
        unknown_is_missing: categories outside the list count as missing instead.
        held_by: what needs all rows at once, if something does.

    Raises:
        ConfigurationError: the file cannot be read, lacks a column or an id, or holds what is no number.
    """
    if columns:
        table = load_table(
            data_set,
            label=None,
            features=columns,
            categories=categories,
            unknown_is_missing=unknown_is_missing,
            with_ids=True,
            takes_passes=held_by is None,
            held_by=held_by or "",
        )
        ids = None if table.ids is None else tuple(canonical_ids(table.ids, data_set.name, data_set.missing))
        return Rows(table.features, ids) if table.passes is None else UnreadRows(table.passes, ids)
    ids = None if data_set.id is None else tuple(load_ids(data_set))
    n_rows = len(ids) if ids is not None else _count_rows(data_set)
    return Rows(np.empty((n_rows, 0), dtype=np.float32), ids)


def _count_rows(data_set: DataSet) -> int:
    file = TabularFile(data_set)
    if not file.column_names:
        raise ConfigurationError(f"data set {data_set.name!r} has no columns")
    name = file.column_names[0]
    return len(file.read([], [name])[name])


# What a passive party charges for the rows that it answers for: times, or with the consent ``scoring`` bits.


@dataclass(frozen=True, slots=True)
class RowBudget:
    """The budget of one job's data set."""

    _budget: PredictionBudget | ScoringBudget

    @classmethod
    def of(cls, policy: SitePolicy, job: InferenceJob, model_id: str, part: PassivePart) -> RowBudget:
        """Return the budget that the site's policy asks for."""
        data_set = str(job.data_set)
        if not policy.consents.gives("scoring"):
            return cls(PredictionBudget(policy, data_set))
        explains = job.action == Action.EXPLAIN.value
        what = f"{model_id}, {'explained' if explains else 'predicted'}"
        return cls(ScoringBudget(policy, data_set, what, bits_of(part, explains)))

    def check(self, rows: Rows) -> None:
        """Refuse what ``charge`` would refuse. Raises: PolicyRefusal."""
        if isinstance(self._budget, ScoringBudget):
            self._budget.check(rows.names(), rows.features)
        else:
            self._budget.check(rows.names())

    def charge(self, rows: Rows) -> None:
        """Charge rows, durably; nothing is charged if one of them must not be answered for. Raises: PolicyRefusal."""
        if isinstance(self._budget, ScoringBudget):
            self._budget.charge(rows.names(), rows.features)
        else:
            self._budget.charge(rows.names())


def bits_of(part: PassivePart, explains: bool) -> int:
    """Return how many distinct bits a row can show: one for each distinct split, and where missing values would go.

    Args:
        explains: positions among all thresholds, and which values are missing, are told.
    """
    splits = {(s.feature, float(s.threshold), s.default_left, s.categories) for s in part.table.values()}
    return len(splits) + (len(part.columns) if explains else 0)
