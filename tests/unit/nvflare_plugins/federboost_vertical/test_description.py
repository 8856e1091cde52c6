"""A party's own description of its features: what is none is refused by name."""

from __future__ import annotations

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.federboost_vertical.job import Description

GOOD = '{"a": {"low": 0, "high": 1}}'


def test_a_description_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(GOOD)
    assert Description.read(path).names == ("a",)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, GOOD.replace("1", "1" + "0" * 400), GOOD.replace("1", '"1"')]
)
def test_anything_else_is_refused_in_words(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError):
        Description.read(path)
