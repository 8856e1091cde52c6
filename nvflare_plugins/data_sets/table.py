"""From a site's data set to the table that XGBoost trains on.

What is refused here would otherwise stop XGBoost at one site in the middle of the job, or train on something else
than the user believes. What rows decide is a ``DataRefusal``: others read a fixed text, because a job that asks for the
wrong labels or categories on purpose would otherwise question rows of one site. Counts go into this site's own log.

Differentially private jobs load with ``repair``: where one row would decide that the job ends, that row is repaired, or
left out, by itself (``Table.kept``). No row changes what happens to another one, so that sensitivities stay what they
are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Columns
from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.column_values import ColumnLoader
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.passes import BLOCK_VALUES, RowPasses
from nvflare_plugins.data_sets.tabular_files import TabularFile
from nvflare_plugins.formatting import near_name

_log = logging.getLogger(__name__)
MAX_NAME = 256
NOT_IN_NAMES = frozenset("[]<")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of one site, ready for XGBoost.

    Shapes:  features: float32[n_rows, n_features], C-contiguous, NaN is missing, categorical columns hold the
             position in their public list; label: float32[n_rows], or float32[0] with an empty ``label_name`` at a
             party of a vertical job that has none; weight: float32[n_rows] or None.

    Attributes:
        feature_types: "float" or "c" (categorical) per column, as XGBoost names them. Whether numbers happen to be
            whole at this site is not a type: it would differ between sites.
        n_missing: missing values per column.
        categories: public list of every categorical column.
        label_classes: public list of label classes, if the job gives one.
        notes: what a person at this site should know, in sentences; counts only.
        ids: the column of ids as it stands, of the same reading of the file; None unless asked for.
        groups: the column that says which rows belong together, likewise.
        passes: reads the features of a data set that is not held; ``features`` has no rows then.
    """

    features: NDArray[np.float32]
    feature_names: tuple[str, ...]
    feature_types: tuple[str, ...]
    label: NDArray[np.float32]
    label_name: str
    weight: NDArray[np.float32] | None = None
    weight_name: str | None = None
    n_missing: tuple[int, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    ids: pa.ChunkedArray | None = None
    groups: pa.ChunkedArray | None = None
    passes: RowPasses | None = None

    @property
    def n_rows(self) -> int:
        return int(self.features.shape[0]) if self.passes is None else self.passes.n_rows

    @property
    def by_feature(self) -> Columns:
        """Return the features, each float32[n_rows]: those that are held, or what reads them when it is asked."""
        return self.features.T if self.passes is None else self.passes

    def held_features(self) -> NDArray[np.float32]:
        """Return all features in one array, read now if they are not held. Shapes: float32[n_rows, n_features]."""
        return self.features if self.passes is None else self.passes.held()

    def columns(self) -> Iterator[NDArray[np.float32]]:
        """Yield the features one by one. Shapes: float32[n_rows]."""
        return iter(self.by_feature)

    def blocks(self, most_values: int = BLOCK_VALUES) -> Iterator[NDArray[np.float32]]:
        """Yield the rows in their order. Shapes: float32[some rows, n_features]. Args: most_values: of a block.

        Raises:
            ValueError: they are read in passes, and are not in the order of the files.
        """
        first = 0
        for places, block in self.placed_blocks(most_values):
            if places.size and (places[0] != first or places[-1] != first + places.size - 1):
                raise ValueError("rows that are read in passes have another order than in their files")
            first += places.size
            yield block

    def placed_blocks(self, most_values: int = BLOCK_VALUES) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield all rows in whatever order, some at a time, with their places here.

        Shapes: int64[some rows]; float32[some rows, n_features].
        """
        if self.passes is not None:
            yield from self.passes.blocks(most_values)
            return
        step = max(1, most_values // max(1, len(self.feature_names)))
        for first in range(0, self.n_rows, step):
            block = self.features[first : first + step]
            yield np.arange(first, first + len(block)), block

    def kept(self, is_usable: NDArray[np.bool_], why: str) -> Table:
        """Return the rows that a job can use; how many are left out stands in this site's own log.

        Shapes:  is_usable: bool[n_rows]; each row's must depend on that row alone.
        Args:    why: completes "rows left out, ...".
        """
        n_left_out = self.n_rows - int(np.count_nonzero(is_usable))
        if n_left_out == 0:
            return self
        _log.warning("rows left out, %s: %d of %d", why, n_left_out, self.n_rows)
        return self.part(is_usable)

    def taken(self, places: NDArray[np.int64]) -> Table:
        """Return rows in another order, ``n_missing`` stays that of all. Shapes: places: int64[any], all different."""
        return replace(
            self,
            features=self.features[places] if self.passes is None else self.features,
            passes=None if self.passes is None else self.passes.taken(places),
            label=self.label[places] if self.label_name else self.label,
            weight=None if self.weight is None else self.weight[places],
            ids=None if self.ids is None else self.ids.take(pa.array(places)),
            groups=None if self.groups is None else self.groups.take(pa.array(places)),
        )

    def part(self, chosen: NDArray[np.bool_]) -> Table:
        """Return some of the rows, in their order. Shapes: chosen: bool[n_rows]."""
        features = self.features[chosen] if self.passes is None else self.features
        passes = None if self.passes is None else self.passes.part(chosen)
        columns: Columns = features.T if passes is None else passes
        return replace(
            self,
            features=features,
            passes=passes,
            label=self.label[chosen] if self.label_name else self.label,
            weight=None if self.weight is None else self.weight[chosen],
            n_missing=tuple(int(np.count_nonzero(np.isnan(column))) for column in columns),
            ids=None if self.ids is None else self.ids.filter(pa.array(chosen)),
            groups=None if self.groups is None else self.groups.filter(pa.array(chosen)),
        )


def load_table(
    spec: DataSet,
    *,
    label: str | None,
    weight: str | None = None,
    group: str | None = None,
    features: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[object]] | None = None,
    label_classes: Sequence[object] | None = None,
    unknown_is_missing: bool = False,
    may_lack_features: bool = False,
    with_ids: bool = False,
    may_lack_ids: bool = False,
    may_lack_rows: bool = False,
    repair: bool = False,
    takes_passes: bool = False,
    held_by: str = "this kind of job holds all rows at once",
) -> Table:
    """Load a site's data set.

    Args:
        spec: from the site's policy.
        label: name of the label column; None for a party of a vertical job without it.
        weight: name of the column of row weights.
        group: name of the column that says which rows belong together; it is no feature.
        features: columns to train on, in this order; None takes all others in the order of the file, but for the
            column of ids.
        categories: column -> its public list of categories.
        label_classes: the label's public list of classes; the label becomes the position in it.
        unknown_is_missing: categories outside the list count as missing instead of being refused.
        may_lack_features: a table with nothing but the label will do (the party with the label of a vertical job).
        with_ids: read the policy's column of ids too, at once with the others: a file replaced between two readings
            would give rows the ids of others.
        may_lack_ids: a file without that column will do.
        may_lack_rows: there may be no rows at all, and rows without a label are left out where the policy says so; for
            jobs in which a row's place means nothing.
        repair: refuse nothing because of a row: values beyond float32 become its largest number, text where a number
            should be and categories outside the list are missing, and so are labels and weights that cannot be read, or
            are negative. The caller leaves such rows out (``Table.kept``). There may be no rows at all.
        takes_passes: the caller does without ``Table.features`` where the policy wants no data set held.
        held_by: why it does not.

    Privacy: everything stays at the site.

    Raises:
        ConfigurationError: the data set lacks a column; a ``DataRefusal``: it cannot be read, or holds what cannot be
            trained on.
    """
    lists = {name: _public_list(name, values) for name, values in (categories or {}).items()}
    classes = None if label_classes is None or label is None else _public_list(label, label_classes)
    file = TabularFile(spec, repair)
    special = [name for name in (label, weight) if name is not None]
    groups = [] if group is None else [group]
    names = _feature_names(file, [*special, *groups], features, spec)
    if not names and not may_lack_features:
        raise ConfigurationError(f"data set {spec.name!r} has no feature columns.")
    for name in lists:
        if name not in names:
            raise ConfigurationError(f"a category list is given for {name!r}, which is not among the features.")
    _refuse_lists_of_dates([*lists, *([label] if label is not None and classes is not None else [])], spec)
    text = [name for name in (*names, *special) if name in lists or (name == label and classes is not None)]
    numeric = [name for name in (*names, *special) if name not in text]
    ids = _id_column(file, spec, special, may_lack_ids) if with_ids else []
    in_passes = spec.in_passes and bool(names)
    if names and not takes_passes:
        spec.check_may_be_held(held_by)
    held = special if in_passes else [*names, *special]
    asked = [name for name in text if name in held]
    columns = file.read(
        [name for name in numeric if name in held], list(dict.fromkeys([*asked, *ids, *groups])), may_lack_rows
    )
    drops_unlabelled = may_lack_rows and spec.drop_unlabelled
    loader = ColumnLoader(file, spec, unknown_is_missing or repair, repair, drops_unlabelled, [])
    passes = RowPasses(file, loader, tuple(names), lists) if in_passes else None
    if passes is None:
        matrix = np.empty((len(next(iter(columns.values()))), len(names)), dtype=np.float32)
        for position, name in enumerate(names):
            matrix[:, position] = loader.checked(name, columns[name], lists.get(name))
        n_missing = tuple(map(_missing_in, matrix.T))
    else:
        matrix = np.empty((0, len(names)), dtype=np.float32)
        n_missing = tuple(map(_missing_in, passes.first_look(may_lack_rows)))
    table = Table(
        features=matrix,
        feature_names=tuple(names),
        feature_types=tuple("c" if name in lists else "float" for name in names),
        label=loader.label(label, columns[label], classes) if label is not None else np.empty(0, np.float32),
        label_name=label or "",
        weight=loader.weight(weight, columns[weight]) if weight else None,
        weight_name=weight,
        n_missing=n_missing,
        categories=lists,
        label_classes=classes,
        notes=tuple(loader.notes),
        ids=columns[ids[0]] if ids else None,
        groups=columns[groups[0]] if groups else None,
        passes=passes,
    )
    return table.kept(~np.isnan(table.label), "without a label") if drops_unlabelled and table.label_name else table


def _missing_in(values: NDArray[np.float32]) -> int:
    return int(np.count_nonzero(np.isnan(values)))


def log_what_labels_lack(table: Table, data_set: str, is_classification: bool) -> None:
    """Tell this site's own log, and nobody else, that its rows alone teach nothing; the job goes on."""
    if not table.n_rows:
        _log.warning("data set %r has no row that this job can use: this site takes part without rows", data_set)
    elif is_classification and table.label.min() == table.label.max():
        _log.warning("the labels of all rows of data set %r that this job can use are of one class", data_set)


def column_names(
    spec: DataSet,
    label: str | None,
    weight: str | None = None,
    features: Sequence[str] | None = None,
    group: str | None = None,
) -> tuple[str, ...]:
    """Return the features that ``load_table`` would load; reads the header alone, so that a job can be checked first.

    Raises:
        ConfigurationError: as ``load_table``, for columns that the data set lacks.
    """
    special = [name for name in (label, weight, group) if name is not None]
    return tuple(_feature_names(TabularFile(spec), special, features, spec))


def _id_column(file: TabularFile, spec: DataSet, special: Sequence[str], may_lack: bool) -> list[str]:
    """Return the column of ids, none if the policy names none."""
    if spec.id is None or (may_lack and (spec.id in special or spec.id not in file.column_names)):
        return []
    if spec.id not in file.column_names:
        raise ConfigurationError(f"data set {spec.name!r} lacks its id column. Policy key: data_sets.{spec.name}.id.")
    if spec.id in special:
        raise ConfigurationError("label or weight name the column of ids.")
    return [spec.id]


def is_plain_text(text: str) -> bool:
    """Tell whether a name can stand in a schema document, a model and a log: 1 to 256 printable characters."""
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def _public_list(name: str, values: Sequence[object]) -> tuple[str, ...]:
    """Return a category or class list as texts, without repeats."""
    if isinstance(values, str) or not values or not all(isinstance(v, (str, int)) for v in values):
        raise ConfigurationError(f"the list for column {name!r} must hold texts or whole numbers, at least one.")
    texts = tuple(str(value) for value in values)
    if len(set(texts)) != len(texts) or not all(is_plain_text(text) for text in texts):
        raise ConfigurationError(
            f"the list for column {name!r} holds an entry twice, or one that is not 1 to {MAX_NAME} printable "
            "characters."
        )
    return texts


def _refuse_lists_of_dates(listed: Sequence[str], spec: DataSet) -> None:
    for name in listed:
        for key, held, what in (("dates", spec.dates, "a date"), ("columns", spec.read_otherwise, "a number")):
            if name in held:
                raise ConfigurationError(
                    f"a list is given for {name!r}, which data set {spec.name!r} holds as {what}: leave the list out. "
                    f"Policy key: data_sets.{spec.name}.{key}."
                )


def _feature_names(file: TabularFile, special: list[str], features: Sequence[str] | None, spec: DataSet) -> list[str]:
    if len(set(special)) != len(special):
        raise ConfigurationError("label, weight and group must be different columns.")
    present = file.column_names
    no_features = [*special, spec.id]
    ids = spec.no_features - set(special)
    names = [name for name in present if name not in {*special, *ids}] if features is None else list(features)
    for name in (*special, *names):
        if name not in present:
            # A party without the label has aliases for its columns: a job must not find out their names by guessing.
            hint = near_name(name, present) if special else ""
            if (mark := file.other_separator()) is not None:
                hint = f", and only one: is {mark!r} its separator? Policy key: data_sets.{spec.name}.separator"
            raise ConfigurationError(f"data set {spec.name!r} has no column {name!r}{hint}")
    if len(set(names)) != len(names) or set(names) & set(no_features):
        raise ConfigurationError("features name a column twice, or name the label, weight, group or id column.")
    if answered := sorted(ids & set(names)):
        raise ConfigurationError(
            f"features name {answered[0]!r}, which the policy answers is an id: leave it out. "
            f"Policy key: data_sets.{spec.name}.columns."
        )
    for name in (*special, *names):
        if not is_plain_text(name) or set(name) & NOT_IN_NAMES:
            raise ConfigurationError(
                f"column name {name[:40]!r}: names have 1 to {MAX_NAME} printable characters, without [ ] and <. "
                f"Policy key: data_sets.{spec.name}.rename, or leave it out of features."
            )
    return names
