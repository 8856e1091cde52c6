"""A passive party while predictions are made: what it answers, and the one error for everything else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical import model
from nvflare_plugins.kinds.vertical.messages import (
    Bits,
    DecisionRequest,
    HistogramRequest,
    PathQuery,
    TrainingSetup,
    from_bytes,
    to_bytes,
)
from nvflare_plugins.kinds.vertical_inference.inference import PathOwner, batches, parties_of, rounds_of
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from tests.support.examples import examples

FEATURES = np.array([[0.0], [1.0], [2.0], [np.nan], [4.0]], dtype=np.float32)
TABLE = {(0, 3): model.PrivateSplit(0, np.float32(2.0), True), (4, 0): model.PrivateSplit(0, np.float32(1.0), False)}
PART = model.PassivePart(TABLE, ("income",), ("f0",))


def rows(*chosen: int, n: int = 3) -> Bits:
    mask = np.zeros(n, dtype=bool)
    mask[list(chosen)] = True
    return Bits.of(mask)


def owner() -> PathOwner:
    return PathOwner(PART, FEATURES, batch_rows=3)


def ask(party: PathOwner, batch: int, *queries: PathQuery) -> list[list[bool]]:
    answer = from_bytes(party.answer_bytes(to_bytes(DecisionRequest(batch, queries))))
    return [bits.unpack().tolist() for bits in answer.goes_left]


def test_rows_of_batches_go_where_their_values_say():
    party = owner()
    assert ask(party, 0, PathQuery(0, 3, rows(0, 2)), PathQuery(4, 0, rows(0, 1, 2))) == [
        [True, False],
        [True, False, False],
    ]
    assert ask(party, 1, PathQuery(0, 3, rows(0, 1, n=2))) == [[True, False]]
    assert ask(party, 1, PathQuery(4, 0, rows(0, n=2))) == [[False]]


def test_batches_cover_every_row_once():
    assert batches(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert batches(3, 3) == [slice(0, 3)] and batches(0, 3) == []


# Tree 7: an own split at node 1 with own splits 4 and 6 to its left and right; node 2 is in another branch.
PATHS = {
    (7, 1): model.PrivateSplit(0, np.float32(1.5), False, model.NOTHING_ABOVE),
    (7, 2): model.PrivateSplit(0, np.float32(9.0), False, model.NOTHING_ABOVE),
    (7, 4): model.PrivateSplit(0, np.float32(0.5), False, (1, True)),
    (7, 6): model.PrivateSplit(0, np.float32(9.0), False, (1, False)),
}


def path_owner() -> PathOwner:
    return PathOwner(model.PassivePart(PATHS, ("income",), ("f0",)), FEATURES, batch_rows=3)


def test_rows_are_answered_for_along_their_paths():
    party = path_owner()
    assert ask(party, 0, PathQuery(7, 1, rows(0, 2)), PathQuery(7, 2, rows(1))) == [[True, False], [True]]
    assert ask(party, 0, PathQuery(7, 4, rows(0)), PathQuery(7, 6, rows(2))) == [[True], [True]]
    assert ask(party, 1, PathQuery(7, 2, rows(0, 1, n=2))) == [[False, True]]  # another batch starts anew


OFF_PATH = {
    "other_branch": [[PathQuery(7, 1, rows(0, 1))], [PathQuery(7, 2, rows(1, 2))]],
    "other_side": [[PathQuery(7, 1, rows(0, 2))], [PathQuery(7, 4, rows(0, 2))]],
    "other_side_again": [[PathQuery(7, 1, rows(0, 2))], [PathQuery(7, 6, rows(0))]],
    "not_from_above": [[], [PathQuery(7, 4, rows(0))]],
    "branch_of_another_row": [[PathQuery(7, 1, rows(0))], [PathQuery(7, 4, rows(1))]],
    "both_at_once": [[], [PathQuery(7, 1, rows(0)), PathQuery(7, 2, rows(0))]],
    "above_after_below": [[PathQuery(7, 2, rows(0))], [PathQuery(7, 1, rows(0))]],
}


@pytest.mark.parametrize("name", OFF_PATH)
def test_nothing_off_a_rows_path_is_answered(name):
    party = path_owner()
    before, hostile = OFF_PATH[name]
    ask(party, 0, *before)
    with pytest.raises(ProtocolError) as caught:
        ask(party, 0, *hostile)
    assert str(caught.value) == model.REFUSED


HUGE = PathQuery(0, 3, Bits.of(np.ones(100_000, dtype=bool)))
HOSTILE = {
    "row_out_of_range": [DecisionRequest(0, (PathQuery(0, 3, rows(3, n=4)),))],
    "fewer_rows": [DecisionRequest(0, (PathQuery(0, 3, rows(0, n=2)),))],
    "no_rows": [DecisionRequest(0, (PathQuery(0, 3, Bits(0, b"")),))],
    "huge": [DecisionRequest(0, (HUGE,))],
    "unknown_node": [DecisionRequest(0, (PathQuery(0, 4, rows(0)),))],
    "unknown_tree": [DecisionRequest(0, (PathQuery(1, 3, rows(0)),))],
    "unknown_batch": [DecisionRequest(2, (PathQuery(0, 3, rows(0)),))],
    "huge_batch": [DecisionRequest(1 << 24, ())],
    "earlier_batch": [DecisionRequest(1, ()), DecisionRequest(0, ())],
    "node_twice": [DecisionRequest(0, (PathQuery(0, 3, rows(0)),) * 2)],
    "node_again": [DecisionRequest(0, (PathQuery(0, 3, rows(0)),)), DecisionRequest(0, (PathQuery(0, 3, rows(1)),))],
    "more_than_it_has": [DecisionRequest(0, (PathQuery(0, 3, rows(0)),) * 3)],
    "another_request": [HistogramRequest(0, ())],
    "setup": [TrainingSetup(0, 40, 5, b"")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_everything_else_gives_one_fixed_error(name):
    party = owner()
    *before, hostile = HOSTILE[name]
    for request in before:
        party.answer_bytes(to_bytes(request))
    with pytest.raises(ProtocolError) as caught:
        party.answer_bytes(to_bytes(hostile))
    assert str(caught.value) == model.REFUSED


@settings(max_examples=examples(300))
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b"VLBV\x02\x08" + tail))
def test_any_bytes_give_an_answer_or_the_fixed_error(data):
    try:
        owner().answer_bytes(data)
    except ProtocolError as error:
        assert str(error) == model.REFUSED


def active(n_rounds: int = 4, best_round: int | None = None) -> model.ActivePart:
    booster = {"learner": {"gradient_booster": {"model": {"trees": [], "iteration_indptr": list(range(n_rounds + 1))}}}}
    return model.ActivePart(
        json.dumps(booster).encode(), ("age",), (model.PartyColumns("site-2", ("f0",)),), best_round
    )


def test_rounds():
    assert rounds_of(active(), "all") == (0, 4)
    assert rounds_of(active(best_round=1), "best") == (0, 2)
    assert rounds_of(active(), [1, 4]) == (1, 4)
    for rounds in ("best", [0, 5], [2, 2], [3, 1], [-1, 2]):
        with pytest.raises(ConfigurationError):
            rounds_of(active(), rounds)


def test_an_absent_party_is_named():
    with pytest.raises(ConfigurationError, match="site-2"):
        parties_of(active(), {"site-3": None}, 5)


# -- what a job may say ------------------------------------------------------------------------------------------------


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
