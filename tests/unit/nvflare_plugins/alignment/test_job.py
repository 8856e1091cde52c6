"""What an alignment job may say."""

from __future__ import annotations

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.flare.timeouts import LOCAL_WORK_S, exchange_deadline_s
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.recipes.recipe import AlignmentRecipe


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"data_sets": []},
        {"data_sets": "train"},
        {"data_sets": ["a", "a"]},
        {"data_sets": [""]},
        {"data_sets": [1]},
        {"data_sets": ["a"], "deadline_s": -1},
        {"data_sets": ["a"], "deadline_s": float("nan")},
        {"data_sets": ["a"], "deadline_s": True},
        {"data_sets": ["a"], "profile": "plain"},
    ],
)
def test_other_jobs_are_refused(document):
    with pytest.raises(ConfigurationError):
        AlignmentJob.from_dict(document)


def test_the_deadline_leaves_room_for_a_block_and_its_transfer():
    assert exchange_deadline_s(AlignmentJob(["a"])) == LOCAL_WORK_S
    assert exchange_deadline_s(AlignmentJob(["a"], 5.0)) == 5.0


def test_two_sites_are_enough():
    assert AlignmentRecipe("align", data_sets=["a"]).min_clients == 2
    assert AlignmentRecipe("align", data_sets=["a"], sites=["x", "y", "z"]).min_clients == 3
