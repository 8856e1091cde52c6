"""Declared search spaces: every site draws the same sets, in their ranges, no two alike; what is none is refused."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.tuning.job import TuningJob, drawn, listed

SEARCH = {
    "eta": {"low": 0.01, "high": 0.5, "log": True},
    "max_depth": {"low": 2, "high": 8, "whole": True},
    "max_leaves": {"low": 2, "high": 512, "whole": True, "log": True},
    "lambda": {"low": 0.0, "high": 5.0},
    "grow_policy": ["depthwise", "lossguide"],
}

KNOWN = (
    {"eta": 0.1705, "grow_policy": "lossguide", "lambda": 3.03044, "max_depth": 5, "max_leaves": 3},
    {"eta": 0.358838, "grow_policy": "depthwise", "lambda": 1.68493, "max_depth": 7, "max_leaves": 2},
    {"eta": 0.248571, "grow_policy": "depthwise", "lambda": 3.36392, "max_depth": 4, "max_leaves": 16},
)


def job(**changes: object) -> TuningJob:
    document = {"data_set": "d", "label": "y", "trials": [{"eta": 0.1}], **changes}
    return TuningJob.from_dict({name: value for name, value in document.items() if value is not None})


def test_a_draw_is_the_declared_one() -> None:
    digest = hashlib.sha256(b"veilboost/tuning/7/0/max_depth").digest()
    u = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
    (first, *_) = drawn({"max_depth": [3, 4, 5, 6]}, 2, 7)
    assert first == {"max_depth": [3, 4, 5, 6][int(4 * u)]}
    # Known answers: another machine, another release, and every site draw these.
    assert drawn(SEARCH, 3, 1) == KNOWN


@given(seed=st.integers(0, 2**62), n=st.integers(1, 20))
def test_draws_keep_their_ranges_and_differ(seed: int, n: int) -> None:
    trials = drawn(SEARCH, n, seed)
    assert trials == drawn(dict(reversed(SEARCH.items())), n, seed) and len(trials) == n
    assert len({repr(sorted(one.items())) for one in trials}) == n
    for one in trials:
        assert 0.01 <= one["eta"] <= 0.5 and 2 <= one["max_depth"] <= 8 and 2 <= one["max_leaves"] <= 512
        assert isinstance(one["max_depth"], int) and isinstance(one["max_leaves"], int)
        assert 0 <= one["lambda"] <= 5 and float(f"{one['lambda']:.6g}") == one["lambda"]
        assert one["grow_policy"] in SEARCH["grow_policy"]


def test_all_sets_of_a_small_space_are_found_and_no_more() -> None:
    small = {"max_depth": [2, 3], "eta": [0.1, 0.2]}
    assert len(drawn(small, 4, 0)) == 4
    with pytest.raises(ConfigurationError, match=r"fewer than n_trials=5 different parameter sets \(found 4\)"):
        drawn(small, 5, 0)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([{"eta": 0.1}, {"max_depth": 3}, {"learning_rate": 0.1}], "entries 1 and 3 are the same"),
        ([{"max_depth": 3}, {"max_depth": 3.0}], "entries 1 and 2 are the same"),
        ([{}], "entry 1 must be an object"),
        ([{"max_bin": 64}], "'max_bin' cannot be tuned: all trials share one cut search"),
        ([{"objective": "reg:squarederror"}], "'objective' cannot be tuned"),
        ([{"seed": 1}], "the luckiest"),
        ([{"max_dept": 3}], "trials may differ in learning_rate"),
    ],
)
def test_lists_that_are_none_are_refused(trials: list, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        listed(trials)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trials": None}, "either trials or search"),
        ({"search": {"eta": [0.1]}, "n_trials": 1}, "either trials or search"),
        ({"n_trials": 3}, "n_trials is for search"),
        ({"trials": None, "search": {"eta": [0.1]}}, "needs n_trials"),
        (
            {"trials": None, "search": {"eta": [0.1]}, "n_trials": 10**9},
            "n_trials must be a whole number from 1 to 1000",
        ),
        ({"trials": [{"eta": i / 2000} for i in range(1, 1002)]}, "a list of 1 to 1000 parameter sets"),
        ({"trials": [{"eta": float("nan")}]}, "must be a finite number"),
        ({"trials": None, "search": {"eta": {"low": 0.3, "high": 0.1}}, "n_trials": 2}, "low below high"),
        ({"trials": None, "search": {"eta": {"low": 0, "high": 1, "log": True}}, "n_trials": 2}, "above 0 on a log"),
        ({"trials": None, "search": {"max_depth": {"low": 1.5, "high": 3, "whole": True}}, "n_trials": 2}, "whole num"),
        ({"trials": None, "search": {"eta": []}, "n_trials": 2}, "at least one value"),
        ({"trials": None, "search": {"eta": {"low": 1}}, "n_trials": 2}, "must be a list of values, or an object"),
        ({"params": {"learning_rate": 0.3}}, "'eta' is in params and in a trial"),
        ({"params": {"max_bin": 2}}, "max_bin=2"),
        ({"folds": 11}, "folds must be a whole number from 2 to 10"),
        ({"folds": 1}, "folds must be a whole number from 2 to 10"),
        ({"group": "y"}, "group must not be the label"),
        ({"profile": "ckks"}, "profile=ckks lets the server"),
        ({"profile": "plain"}, "profile=plain would show the server"),
        ({"profile": "paillier"}, "profile=paillier is of vertical jobs: .* the kind vertical_tuning"),
        ({"profile": "elgamal"}, "the kind vertical_tuning"),
        ({"profile": "dp_distributed"}, "every trial would be paid for"),
        ({"profile": "plugin.acme"}, "a plugin says nothing of many sums"),
        ({"profile": "xyz"}, "choose one of masks, bfv"),
        ({"preset": "guarded"}, "preset is refused in a tuning: vertical jobs have a kind of their own"),
        ({"epsilon": 1.0}, "pay for every trial"),
        ({"weight": "w"}, "weight is refused in a tuning"),
        ({"on_lost_site": "wait"}, "on_lost_site is refused"),
        ({"resume_from": "x"}, "without the trials that the log shows as done"),
    ],
)
def test_jobs_that_are_none_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        job(**changes)
