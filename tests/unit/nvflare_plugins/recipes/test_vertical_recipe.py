"""The vertical recipe: sensible settings unless told otherwise, refusals before a job leaves."""

from __future__ import annotations

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.recipes.recipe import VerticalXGBRecipe

FACTS = {"active": "a", "data_set": "d", "label": "y"}


def test_guarded_jobs_ask_for_as_many_bins_as_policies_allow_unless_told():
    assert VerticalXGBRecipe("one", **FACTS).job.params["max_bin"] == 32
    assert VerticalXGBRecipe("two", **FACTS, params={"max_bin": 8}).job.params["max_bin"] == 8
    assert "max_bin" not in VerticalXGBRecipe("three", **FACTS, preset="exact").job.params


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sites": ["b", "c"]}, "active party"),
        ({"profile": "masks"}, "profile"),
        ({"preset": "open"}, "preset"),
        ({"params": {"booster": "dart"}}, "dart"),
        ({"params": {"objective": "rank:ndcg"}}, "rank"),
        ({"key_bits": 1024}, "key_bits"),
        ({"surprise": 1}, "surprise"),
        ({"alignment": "frist"}, "did you mean 'first'"),
    ],
)
def test_what_no_party_would_accept_is_refused_here(wrong, words):
    with pytest.raises(ConfigurationError, match=words):
        VerticalXGBRecipe("job", **{**FACTS, **wrong})
