"""What a job with a vertical model may say, and the recipe's job folder."""

from __future__ import annotations

import json

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob

GOOD = [
    {"model": "abc", "data_set": "new"},
    {"model": "abc", "action": "merge"},
    {"model": "abc", "action": "explain", "data_set": "new", "rows": [0, 1], "rounds": [1, 3], "alignment": "first"},
    {"model": "abc", "data_set": "new", "rounds": "best", "file_format": "csv", "batch_rows": 1, "deadline_s": 5},
]


@pytest.mark.parametrize("document", GOOD)
def test_jobs_survive_their_form_in_the_job_folder(document):
    job = InferenceJob.from_dict(document)
    assert InferenceJob.from_dict(json.loads(json.dumps(job.to_dict()))) == job


BAD = {
    "no_model": {"data_set": "new"},
    "empty_model": {"model": "", "data_set": "new"},
    "no_data_set": {"model": "abc"},
    "unknown_field": {"model": "abc", "data_set": "new", "ids": ["ann"]},
    "unknown_action": {"model": "abc", "data_set": "new", "action": "publish"},
    "merge_with_rows": {"model": "abc", "action": "merge", "rows": [0, 5]},
    "merge_with_data": {"model": "abc", "action": "merge", "data_set": "new"},
    "merge_of_some_rounds": {"model": "abc", "action": "merge", "rounds": "best"},
    "row_list": {"model": "abc", "data_set": "new", "rows": [1, 2, 3]},
    "rows_backwards": {"model": "abc", "data_set": "new", "rows": [3, 3]},
    "rows_negative": {"model": "abc", "data_set": "new", "rows": [-1, 3]},
    "rows_not_whole": {"model": "abc", "data_set": "new", "rows": [0, True]},
    "rounds": {"model": "abc", "data_set": "new", "rounds": "some"},
    "rounds_backwards": {"model": "abc", "data_set": "new", "rounds": [2, 1]},
    "format": {"model": "abc", "data_set": "new", "file_format": "xlsx"},
    "batch_rows": {"model": "abc", "data_set": "new", "batch_rows": 0},
    "huge_batches": {"model": "abc", "data_set": "new", "batch_rows": 1 << 40},
    "deadline": {"model": "abc", "data_set": "new", "deadline_s": float("nan")},
}


@pytest.mark.parametrize("name", BAD)
def test_other_jobs_are_refused(name):
    with pytest.raises(ConfigurationError):
        InferenceJob.from_dict(BAD[name])
