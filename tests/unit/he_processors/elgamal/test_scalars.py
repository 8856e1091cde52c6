from __future__ import annotations

from he_processors.bignum.interface import ints_from_rows
from he_processors.curve.interface import GROUP_ORDER, rows_of


def test_integers_become_scalars_modulo_the_order() -> None:
    values = [0, 1, -1, GROUP_ORDER, GROUP_ORDER - 1, 2**256]
    assert ints_from_rows(rows_of(values)) == [value % GROUP_ORDER for value in values]
    assert rows_of([]).shape == (0, 32)
