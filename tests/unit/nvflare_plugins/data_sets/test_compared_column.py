"""Values of which nothing is kept but how they compare with some numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nvflare_plugins.data.table import ComparedColumn

_NUMBER = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1e-45, float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(_NUMBER, st.just(np.nan)), max_size=30), st.lists(_NUMBER, max_size=300))
def test_stand_ins_compare_as_the_values_do(values: list[float], numbers: list[float]) -> None:
    column, known = np.array(values, dtype=np.float32), np.unique(np.array(numbers, dtype=np.float32))
    compared = ComparedColumn.compare(column, known)
    found = compared.of(slice(None))
    assert found.dtype == np.float32 and compared.places.itemsize == (1 if known.size < 255 else 2)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(column))
    for number in known:
        np.testing.assert_array_equal(found < number, column < number)
    is_known = np.isin(column, known)
    np.testing.assert_array_equal(found[is_known], column[is_known])
    some = np.arange(len(column)) % 2 == 1
    np.testing.assert_array_equal(compared.of(some), found[some])
