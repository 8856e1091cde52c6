"""Jobs that go on without a lost site where rounds hardly move a gradient: what is told by subtraction is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from nvflare_plugins.attempt.job_context import CannotGoOn
from nvflare_plugins.kinds.horizontal.going_on import GradientMoves
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb import continuation as recalibration
from tests.integration.test_going_on import (
    LEFT,
    ROWS,
    Opened,
    course,
    federation_of,
    go_on,
    going,
    lose,
    parts_of,
    refused,
)
from tests.integration.test_going_on import opened as opened
from tests.support.examples import quick
from tests.support.federation import dies_at, succeed

STILL = [
    {"gamma": 1e6},
    {"eta": 1e-30},
    {"lambda": 1e30},
    {"alpha": 1e6},
    {"eta": 1e-4},
    {"min_child_weight": 1e6},
    {"gamma": 1e6, "num_parallel_tree": 2},
    {"gamma": 1e6, "objective": "multi:softprob", "num_class": 2},
    {"gamma": 1e6, "subsample": 0.7},
]


def test_the_attack_works_where_nobody_looks_at_the_gradients(tmp_path: Path, opened: Opened, monkeypatch) -> None:
    """The control: with a learning rate of 1e-30 the lost site's whole histogram comes out by subtraction."""
    monkeypatch.setattr(GradientMoves, "have_moved", lambda self, model, number, earlier: True)
    monkeypatch.setattr(recalibration, "LEAST_MOVE", 0.0)
    federation, training = federation_of(tmp_path), going({"eta": 1e-30})
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    succeed(go_on(federation, training))
    assert ("HISTOGRAM", "site-2") in set(opened.found_by_subtraction())


@pytest.mark.parametrize("params", quick(STILL, STILL[0], STILL[4], STILL[7]), ids=str)
def test_where_rounds_move_no_gradient_the_job_waits(tmp_path: Path, opened: Opened, params: dict) -> None:
    """The attack: every state is new by its trees, and the sums before and after differ by the lost site's own."""
    federation, training = federation_of(tmp_path), going(params)
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 4 * params.get("num_class", 1))})
    n_opened, outcomes = len(opened.sums), go_on(federation, training)
    refused(outcomes)
    assert any(isinstance(one, CannotGoOn) for one in outcomes.values()) and len(opened.sums) == n_opened
    assert not set(opened.found_by_subtraction())
    succeed(federation.run(training, "job", number=3))  # the site is back


def test_rounds_of_an_ordinary_job_that_move_nothing_any_more(tmp_path: Path, opened: Opened) -> None:
    """Breast cancer with gamma 1: from some round on every tree is one leaf next to 0; before that it goes on."""
    frame = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "y"}).iloc[:, -9:]
    for still, nth in ((True, 26), (False, 7)):
        federation = federation_of(tmp_path / str(still), frame)
        params = {"gamma": 1.0, "eta": 1.0, "max_depth": 2, "max_bin": 16}
        training = going(params, 40 if still else 8, cuts="quantile")
        opened.sums.clear()
        lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, nth)})
        outcomes = go_on(federation, training)
        if still:
            assert "the last round" in refused(outcomes)
        else:
            succeed(outcomes)
        assert not set(opened.found_by_subtraction())


def test_a_site_refuses_by_itself_and_tells_no_more_than_that(tmp_path: Path, monkeypatch) -> None:
    """What is public says nothing: one site's rows hardly move, and the others are told that alone."""
    real = GradientMoves.have_moved

    def have_moved(self: GradientMoves, *given: Any) -> bool:
        return real(self, *given) and not np.array_equal(self.table.label, ROWS.y[200:300])  # site-3's

    federation, training = federation_of(tmp_path), going()
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    monkeypatch.setattr(GradientMoves, "have_moved", have_moved)
    outcomes = go_on(federation, training)
    assert "gradients at this state would be next to those" in refused(outcomes)
    assert [site for site, one in outcomes.items() if isinstance(one, CannotGoOn)] == ["site-3"]
    assert course(federation, "site-3").states[-1][1] == ()  # refused for good, whoever asks again
    monkeypatch.setattr(GradientMoves, "have_moved", real)
    succeed(go_on(federation, training, 3))  # from the next state beside
    assert parts_of(federation.model(sites=LEFT))[-1][1] == 2


def test_a_round_that_comes_back_to_an_earlier_state_is_refused_too(tmp_path: Path, monkeypatch) -> None:
    """The check is made at every round after a loss; the job goes on from the next state beside."""
    real, lock, asked = GradientMoves.have_moved, threading.Lock(), []

    def have_moved(self: GradientMoves, model: bytes, n_done: int, earlier: Any) -> bool:
        with lock:
            is_first = n_done == 4 and n_done not in asked
            asked.append(n_done)
        return real(self, model, n_done, earlier) and not is_first

    monkeypatch.setattr(GradientMoves, "have_moved", have_moved)
    federation, training = federation_of(tmp_path), going(n_rounds=6)
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    assert not asked  # nobody was lost: nothing is asked
    assert "next to those" in refused(go_on(federation, training))
    succeed(go_on(federation, training, 3))
    assert [step for _, step, _ in parts_of(federation.model(sites=LEFT))] == [0, 1, 1]
