"""Numbers as people read them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from nvflare_plugins.formatting import bounds


def test_bounds_of_large_numbers_are_told_apart_and_written_out() -> None:
    assert bounds([1e9, 1e9 + 64, 1e9 + 128]) == ["1000000000", "1000000064", "1000000128"]
    assert bounds([20_683, 20_684]) == ["20683", "20684"]
    assert bounds([1.58, float(np.float32(1.6))]) == ["1.58", "1.6"]
    assert bounds([0.5, 1e12]) == ["0.5", "1e+12"]
    assert bounds([]) == []


@given(st.lists(st.floats(allow_nan=False), unique=True, max_size=8))
def test_no_two_bounds_look_alike(values: list[float]) -> None:
    texts = bounds(values)
    assert len(set(texts)) == len(values)
    finite = [(float(text), value) for text, value in zip(texts, values, strict=True) if abs(value) < 1e300]
    assert all(abs(shown - value) <= 1e-5 * abs(value) for shown, value in finite)
