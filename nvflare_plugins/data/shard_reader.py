"""Rows of Parquet files that another process of the same site, a worker of its cluster, reads by itself.

The site's process has looked at every value, so that what it hands out is a run of rows and what tells their files:
size and a hash of the footer, in which Parquet keeps schema, rows and places of all columns. Both then hash the values
as they read them. A worker that reaches another version of a file, or none, is told apart before it trains.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.parquet_parts import ParquetParts
from nvflare_plugins.data.table import ColumnLoader, RowPasses, Table
from nvflare_plugins.data.tabular_files import TabularFile

_READER = ("missing", "decimal", "thousands", "dates", "columns", "rename")


def plain_reading(passes: RowPasses, rows: slice) -> dict[str, Any]:
    """Return what a worker needs to read a run of rows, as plain values.

    Args:
        rows: from one number to another, of those that count; at least one.

    Privacy: paths, names of columns, what the policy says of them, and the lists of categories; which rows of the files
        count.
    """
    spec, own = passes.loader.spec, None if passes.rows is None else passes.rows[rows]
    first, end = (rows.start, rows.stop) if own is None else (int(own.min()), int(own.max()) + 1)
    return {
        "data_set": spec.name,
        "reader": {name: getattr(spec, name) for name in _READER},
        "parts": passes.file.parts_of(first, end),
        "rows": (first, end),
        "names": passes.names,
        "lists": dict(passes.lists),
        "unknown_is_missing": passes.loader.unknown_is_missing,
        "repair": passes.loader.repair,
        "counting": None if own is None else own - first,
    }


def passes_of(plain: dict[str, Any]) -> RowPasses:
    """Return passes over the rows that ``plain_reading`` has told of.

    Raises:
        ConfigurationError: a file is not there, or is another one.
    """
    parts = plain["parts"]
    path = Path(os.fsdecode(parts[0][0]))
    spec = DataSet(plain["data_set"], path, "parquet", memory="passes", **plain["reader"])
    file = TabularFile(spec, plain["repair"], ParquetParts.as_told(spec, parts, plain["rows"]))
    loader = ColumnLoader(file, spec, plain["unknown_is_missing"], plain["repair"], False, [])
    return RowPasses(file, loader, tuple(plain["names"]), plain["lists"], plain["counting"])


def table_read_by(plain: dict[str, Any], label: NDArray[np.float32]) -> Table:
    """Return a table of the features that ``plain_reading`` has told of. Raises: ConfigurationError: as ``passes_of``.

    Args:
        label: of its rows, which the site's process has read.
    """
    passes = passes_of(plain)
    types = tuple("c" if name in passes.lists else "float" for name in passes.names)
    return Table(np.empty((0, len(types)), np.float32), passes.names, types, label, "", passes=passes)


def values_digest(table: Table, go_on: Callable[[int], None] = lambda n_rows: None) -> bytes:
    """Return a hash of all features in the order of rows, as they are read now: a pass.

    Args:
        go_on: called with the rows of each block; what it raises ends the pass.
    """
    digest = hashlib.blake2b(digest_size=16)
    for block in table.blocks():
        go_on(len(block))
        digest.update(np.ascontiguousarray(block).data)
    return digest.digest()


@contextmanager
def reading_as_told() -> Iterator[None]:
    """Have what a worker finds amiss with files be said in words that no row decides: its errors travel.

    Raises:
        ConfigurationError: in the place of a ``DataRefusal``.
    """
    try:
        yield
    except DataRefusal:
        raise ConfigurationError(
            "a file has changed since the site's own process has read it, or cannot be read there. Policy keys: "
            "data_sets.<name>.path, cluster.workers_read. Remedy: write new rows elsewhere and put them there between "
            "jobs."
        ) from None
