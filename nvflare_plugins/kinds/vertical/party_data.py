"""What one party brings to a vertical job: its columns of the rows that all parties share.

Privacy: everything here stays at the site. Errors travel: they name columns, and hold no value, id or count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from dp_components.split_candidates import Columns
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import canonical_ids
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.kinds.alignment.result import Alignment
from nvflare_plugins.kinds.vertical.job import VerticalJob


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
    is_active = context.site == job.active
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
        if not is_active and job.label in table.feature_names:
            raise ConfigurationError(f"{context.site} has a column of the label's name, {job.label!r}: leave it out")
        features = list(table.feature_names)  # the evaluation set has the training set's columns
        ids = None if table.ids is None else tuple(canonical_ids(table.ids, source, data_set.missing))
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
