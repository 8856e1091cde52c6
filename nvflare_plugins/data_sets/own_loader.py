"""Runs a site's own loader, and makes Arrow columns of the frame that it returns."""

from __future__ import annotations

import importlib

import pandas as pd
import pyarrow as pa

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.failures import DataRefusal

_NO_ARRAY = (pa.ArrowException, UnicodeError, OverflowError, TypeError)


def table_of_loader(spec: DataSet, repair: bool) -> pa.Table:
    """Run the site's own loader; its exceptions may quote data, so only their type is told."""
    module, _, function = str(spec.loader).partition(":")
    try:
        frame = getattr(importlib.import_module(module), function)(spec)
    except Exception as error:  # foreign code: anything may come, and its text must not travel
        what = f"its loader {spec.loader} failed ({type(error).__name__})"
        raise DataRefusal(f"data set {spec.name!r}: {what}.") from None
    if not isinstance(frame, pd.DataFrame):
        raise ConfigurationError(f"data set {spec.name!r}: its loader {spec.loader} must return a pandas DataFrame.")
    names = [str(name) for name in frame.columns]
    try:
        columns = [_array_of(frame.iloc[:, position], repair) for position in range(len(names))]
    except _NO_ARRAY:
        raise DataRefusal(f"data set {spec.name!r}: its loader returns a column of mixed types.") from None
    return pa.Table.from_arrays(columns, names=names)


def _array_of(column: pd.Series, repair: bool) -> pa.Array | pa.ChunkedArray:
    if repair:  # Arrow would guess one type from all values
        return column_of_frame(column)
    # Of some mixtures, such as numpy's dates and half floats, Arrow dies instead of refusing them.
    if column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) == "mixed":
        raise TypeError("mixed")
    return pa.array(column, from_pandas=True)


def column_of_frame(column: pd.Series) -> pa.ChunkedArray:
    """Return a frame's column whatever it holds: one of mixed types as text, each value by itself."""
    if column.dtype == object:
        absent = column.isna()
        # Half of a pair of surrogates, which Arrow does not take, would end the reading of all rows.
        texts = [
            None if gone else str(value).encode(errors="backslashreplace").decode()
            for value, gone in zip(column, absent, strict=True)
        ]
        return pa.chunked_array([pa.array(texts, pa.string())])
    try:
        array = pa.array(column, from_pandas=True)
    except _NO_ARRAY:  # categories of mixed types
        return column_of_frame(column.astype(object))
    if isinstance(array.type, pa.BaseExtensionType):  # periods, intervals
        return column_of_frame(column.astype(object))
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
