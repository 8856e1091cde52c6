"""A party's rows in the order that all parties share: that of an alignment job, or ascending by identifier.

Identifiers stay at the site: all that the others see is a keyed hash over all of them, which is equal or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.alignment.result import load_alignment
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.row_ids import canonical_ids
from nvflare_plugins.data_sets.tabular_files import TabularFile

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PartyRows:
    """Rows in the common order.

    Shapes: columns: float32[n_features, n_rows], NaN is missing; label: float32[n_rows], NaN is missing, or None at
        passive parties.
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    columns: NDArray[np.float32]
    label: NDArray[np.float32] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.ids)

    def id_bytes(self) -> bytes:
        """Return the identifiers in order, in a form in which no two lists are alike."""
        encoded = [identifier.encode() for identifier in self.ids]
        return b"".join(len(item).to_bytes(4, "little") + item for item in encoded)


def column_names(spec: DataSet, label: str) -> list[str]:
    """Return the columns of a file that may be features: all but the label and the identifiers."""
    return [name for name in TabularFile(spec).column_names if name not in {label, *spec.no_features}]


def load_rows(
    spec: DataSet, features: Sequence[str], label: str | None, context: SiteContext, alignment: str | None
) -> PartyRows:
    """Load a party's columns and put the rows in the common order.

    Args:
        spec: from the site's policy; it must name the id column.
        features: columns to load; none is allowed.
        label: the label column, at the active party.
        alignment: id of the job that aligned the data set; None takes all rows, which must be the same everywhere.

    Privacy: everything stays at the site. Values that are no numbers are missing, those beyond float32 become its
        largest number; which rows there are is known to all parties, and none is left out.

    Raises:
        ConfigurationError: the data set lacks a column, or has no alignment; a ``DataRefusal``: it cannot be read, or
            some identifier is not usable.
    """
    if spec.id is None:
        raise ConfigurationError(f"data set {spec.name!r} has no id column. Policy key: data_sets.{spec.name}.id.")
    spec.check_may_be_held("this mechanism holds all rows at once")
    file = TabularFile(spec, repair=True)
    wanted = [*features, *([label] if label is not None else [])]
    for name in (*wanted, spec.id):
        if name not in file.column_names:
            raise ConfigurationError(f"data set {spec.name!r} has no column {name!r}")
    if len(set(wanted)) != len(wanted) or spec.id in wanted:
        raise ConfigurationError("features name a column twice, or name the label or the id column")
    columns = file.read(wanted, [spec.id])  # at once: a file replaced between two readings gives rows the ids of others
    ids = [name.decode() for name in canonical_ids(columns[spec.id], spec.name, spec.missing)]
    if alignment is not None:
        order = load_alignment(context, alignment, spec.name).positions
    else:
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__))
    matrix = np.empty((len(features), order.size), dtype=np.float32)
    for position, name in enumerate(features):
        matrix[position] = _floats(file.numbers(name, columns[name]))[order]
    labels = None if label is None else _floats(file.numbers(label, columns[label]))[order]
    return PartyRows(tuple(ids[i] for i in order), tuple(features), matrix, labels)


def _floats(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)
