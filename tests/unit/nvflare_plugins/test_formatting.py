"""Numbers as people read them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nvflare_plugins.base.formatting import bounds, cells, fitted, human_number, human_seconds, near_name, table_lines


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.00012, "0.12 ms"),
        (0.00123, "0.00123 s"),
        (59.94, "59.9 s"),
        (119.9, "120 s"),
        (3990.0, "66.5 min"),
        (86_400.0, "24 h"),
        (1e7, "116 days"),
        (1e11, "1,157,407 days"),
    ],
)
def test_times_come_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_large_numbers_are_written_out_and_small_ones_keep_their_digits() -> None:
    shown = [human_number(value) for value in (0.012345, 12.345, 999.9, 12_345.6, -54_321)]
    assert shown == ["0.0123", "12.3", "1,000", "12,346", "-54,321"]
    assert human_number(1e20) == "1e+20" and human_number(3_125_000, 4) == "3,125,000"


@given(st.floats(0, 1e14))
def test_no_time_has_an_exponent(seconds: float) -> None:
    assert "e" not in human_seconds(seconds)


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("Übung", 5),
        ("U\u0308bung", 5),
        ("血圧", 4),
        ("ﾃｽﾄ", 3),
        ("\N{SYRINGE}!", 3),
        ("한글", 4),
        ("\u1112\u1161\u11ab", 2),
    ],
)
def test_columns_of_a_terminal_are_counted_and_not_characters(text: str, width: int) -> None:
    assert cells(text) == width


def test_what_is_too_wide_is_cut_before_its_column_ends() -> None:
    assert (
        fitted("血圧計", 5) == "血圧\u2026" and fitted("血圧計", 6) == "血圧計" and fitted("血圧計", 4) == "血\u2026 "
    )
    assert fitted("abcdef", 4) == "abc\u2026" and fitted("ab", 4) == "ab  " and fitted("a\x1bb", 4) == "a?b "
    assert fitted("U\u0308bungen", 4) == "U\u0308bu\u2026"


@given(st.text(), st.integers(1, 40))
def test_every_text_takes_just_its_column(text: str, width: int) -> None:
    assert cells(fitted(text, width)) == width


def test_columns_of_a_table_stand_below_one_another() -> None:
    rows = [("name", "n", ""), ("a", "12", "end"), ("longer", "3", "")]
    assert table_lines(rows, (1,)) == ["name     n", "a       12  end", "longer   3"]
    assert table_lines(rows[:2], is_ruled=True) == ["name  n", "----  --  ---", "a     12  end"]


@pytest.mark.parametrize(("present", "meant"), [(["stage", "Age"], "Age"), (["STAGES", "AGE"], "AGE"), (["zz"], "")])
def test_a_name_in_other_letters_is_nearer_than_one_with_more(present: list[str], meant: str) -> None:
    assert near_name("age", present) == (f"; did you mean {meant!r}?" if meant else "")
