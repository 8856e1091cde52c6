"""Canonical row ids: the same id must be the same bytes at every party, however its file writes it.

* Type: whole numbers become their decimal digits, so that a Parquet file's 7 is a CSV file's "7". "007" is another id.
* Unicode: NFC. Characters that cannot be seen (controls, zero-width marks, byte order marks), or that this version of
  Unicode does not know, are refused: two parties would wonder for long why nothing matches.
* White space: none at either end, and one space for any run inside.

Missing ids and ids that stand there twice are refused, at this site alone. Why, and which rows they are, goes into this
site's own log, by row number; others read a fixed text (``DataRefusal``).
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Sequence

import pyarrow as pa

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.tabular_files import TabularFile
from nvflare_plugins.failures import DataRefusal

_log = logging.getLogger(__name__)
MAX_ID_BYTES = 1024
_SHOWN_ROWS = 10
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn"))  # control, format, surrogate, private use, unassigned


def load_ids(spec: DataSet) -> list[bytes]:
    """Read the canonical ids of a data set, in the order of its rows.

    Privacy: everything stays at the site.

    Raises:
        ConfigurationError: the policy names no id column for it, the file cannot be read, or an id is missing, stands
            there twice or is of a kind that cannot be compared.
    """
    if spec.id is None:
        raise ConfigurationError(
            f"data set {spec.name!r} has no id column to align rows by. Policy key: data_sets.{spec.name}.id."
        )
    file = TabularFile(spec)
    if spec.id not in file.column_names:
        raise ConfigurationError(f"data set {spec.name!r} lacks its id column. Policy key: data_sets.{spec.name}.id.")
    return canonical_ids(file.read([], [spec.id])[spec.id], spec.name, spec.missing)


def canonical_ids(column: pa.ChunkedArray | pa.Array, data_set: str, missing: Iterable[str] = ()) -> list[bytes]:
    """Return the ids of a column in canonical form, all present and all different.

    Args:
        data_set: its name, for messages.
        missing: texts that mean "missing", besides an empty one.

    Raises:
        ConfigurationError: see the module.
    """
    texts = _texts(column, data_set)
    absent = {"", *missing}
    ids = [canonical(text) if text is not None else "" for text in texts]
    _refuse([row for row, text in enumerate(ids) if text in absent], "lacks ids in some rows", data_set)
    unclear = [row for row, text in enumerate(ids) if text is None]
    _refuse(unclear, f"holds ids with invisible or unknown characters, or longer than {MAX_ID_BYTES} bytes", data_set)
    encoded = [text.encode() for text in ids if text is not None]
    _refuse(_repeated(encoded), "holds some id more than once (after white space and Unicode are made equal)", data_set)
    return encoded


def usable_ids(column: pa.ChunkedArray | pa.Array, spec: DataSet) -> list[str | None]:
    """Return each row's id in canonical form, by itself; None where it has none. Ids may stand there twice.

    Raises:
        ConfigurationError: the column's declared type is none for ids.
    """
    if pa.types.is_floating(column.type):  # whole numbers with gaps, in many tools; the gaps must not change the others
        texts = [None if v is None or v != v else f"{v:.0f}" if v.is_integer() else repr(v) for v in column.to_pylist()]
    else:
        texts = _texts(column, spec.name)
    ids = [None if text is None else canonical(text) for text in texts]
    return [None if one in ("", *spec.missing) else one for one in ids]


def _texts(column: pa.ChunkedArray | pa.Array, data_set: str) -> list[str | None]:
    """Return a column of whole numbers or text as text."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_integer(kind):
        column = column.cast(pa.string())
    elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise ConfigurationError(
            f"data set {data_set!r}: its id column holds {kind}; ids are text or whole numbers. (A column of whole "
            "numbers with gaps becomes one of floating point in many tools.)"
        )
    result: list[str | None] = column.to_pylist()
    return result


def canonical(text: str) -> str | None:
    """Return the canonical form of an id (see the module), or None if the text has none."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    text = " ".join(text.split())
    if text.isascii() and text.isprintable():  # nearly all ids
        return text if len(text) <= MAX_ID_BYTES else None
    if any(unicodedata.category(character) in _INVISIBLE for character in text):
        return None
    return text if len(text.encode()) <= MAX_ID_BYTES else None


def _repeated(ids: Sequence[bytes]) -> list[int]:
    """Return the rows whose id another row before them has, and that first row."""
    first: dict[bytes, int] = {}
    rows: list[int] = []
    for row, name in enumerate(ids):
        earlier = first.setdefault(name, row)
        if earlier != row:
            rows += [earlier, row]
    return sorted(set(rows))


def _refuse(rows: Sequence[int], what: str, data_set: str) -> None:
    if not rows:
        return
    shown = ", ".join(str(row + 1) for row in rows[:_SHOWN_ROWS])
    more = " and others" if len(rows) > _SHOWN_ROWS else ""
    # Not as an error: FLARE sends lines of that level to the server.
    _log.info("data set %r %s: rows %s%s (counted from 1, without a header)", data_set, what, shown, more)
    raise DataRefusal(f"data set {data_set!r} {what}; the line before says which rows.")
