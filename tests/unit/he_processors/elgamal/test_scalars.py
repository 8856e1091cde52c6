from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.bignum.rows import ints_from_rows
from he_processors.curve.interface import GROUP_ORDER
from he_processors.elgamal.scalars import rows_of, scale_and_shift

EDGES = [0, 1, 2**252 - 1, 2**252, GROUP_ORDER - 1, GROUP_ORDER // 2, 2**125]
SCALARS = st.one_of(st.sampled_from(EDGES), st.integers(0, GROUP_ORDER - 1))


@settings(deadline=None)
@given(st.lists(SCALARS, max_size=5), SCALARS, SCALARS, st.integers(-(2**20), 2**20))
def test_products_are_those_of_integers(scalars: list[int], factor: int, other: int, shift: int) -> None:
    found = scale_and_shift(rows_of(scalars), [factor, other], [shift, 0])
    due = [[(s * factor + shift) % GROUP_ORDER for s in scalars], [s * other % GROUP_ORDER for s in scalars]]
    assert [ints_from_rows(rows) for rows in found] == due


def test_all_edges_together() -> None:
    for factor in EDGES:
        (found,) = scale_and_shift(rows_of(EDGES), [factor], [-1])
        assert ints_from_rows(found) == [(s * factor - 1) % GROUP_ORDER for s in EDGES]
