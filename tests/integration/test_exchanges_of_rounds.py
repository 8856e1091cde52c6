"""How many exchanges a round takes where the sites grow the trees, and that metrics which ride are the same."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.attempt.plan import Network
from nvflare_plugins.pooled import attempt as pooled_attempt
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.plan import ProtectionRate, TreeRate, Workload, estimate, final_messages, round_messages
from nvflare_plugins.wire.envelope import FrameType, Kind, Operation, Phase, TrainingStep, unpack
from nvflare_plugins.wire.sums import Family, ProtectedSums, metric_quantity
from tests.support.examples import quick, slow
from tests.support.federation import Federation, SiteDied, dies_at, succeed
from tests.support.horizontal_jobs import spaced, table
from tests.support.shards import in_shards

ROUNDS = 4
METRICS = ["auc", "logloss", "error@0.3"]
RIDES, ROOT, ALONE = Kind.HISTOGRAM_METRIC, Kind.HISTOGRAM, Kind.METRIC


def training(params: dict | None = None, **fields) -> HorizontalJob:
    fields = {"evaluate_training": True, "engine": "own", **fields}
    return spaced({"max_bin": 8, "eval_metric": METRICS, **(params or {})}, fields.pop("num_rounds", ROUNDS), **fields)


def sites(folder: Path, frame: pd.DataFrame | None = None) -> Federation:
    federation = Federation(folder)
    federation.give_data("train", table(300) if frame is None else frame)
    federation.give_data("held_out", table(120, seed=1) if frame is None else frame)
    federation.set_registry_keys()
    return federation


def run(folder: Path, one: HorizontalJob, frame: pd.DataFrame | None = None) -> tuple[Federation, list]:
    federation, frames = sites(folder, frame), []
    succeed(federation.run(one, frames=frames))
    return federation, [unpack(data) for site, data in frames if site == "site-2"]


def of_rounds(frames: list) -> list[Counter]:
    """Count the sums of each round by kind."""
    sums = [f for f in frames if f.operation is Operation.SUM and f.moment.phase in (Phase.UPDATE, Phase.EVALUATE)]
    return [Counter(f.kind for f in sums if f.moment.round == number) for number in range(ROUNDS)]


def metrics_of(federation: Federation, job_id: str = "job") -> dict[int, dict[str, float]]:
    return {row.round: row.metrics for row in federation.record("site-1", job_id).rounds}


LOSSGUIDE = {"grow_policy": "lossguide", "max_leaves": 6, "max_depth": 0}


@pytest.mark.parametrize(
    ("params", "profile", "n_exchanges"),
    [
        ({"max_depth": 2}, "masks", 2),
        ({"max_depth": 4}, "plain", 4),
        ({"max_depth": 1}, "masks", 1),
        (LOSSGUIDE, "masks", 5),
    ],
)
def test_a_round_takes_one_exchange_a_level_or_a_split_and_the_last_one_more(tmp_path, params, profile, n_exchanges):
    _, frames = run(tmp_path, training(params, profile=profile, eval_data_set="held_out"))
    first, *others, last = of_rounds(frames)
    rest = {ROOT: n_exchanges - 1} if n_exchanges > 1 else {}
    assert first == {ROOT: n_exchanges}
    assert others == [{RIDES: 1, **rest}] * (ROUNDS - 2)
    assert last == {RIDES: 1, ALONE: 1, **rest}


@pytest.mark.parametrize(
    "fields",
    [
        {"early_stopping_rounds": 4, "eval_data_set": "held_out"},
        {"on_lost_site": "continue"},
        pytest.param({"profile": "bfv"}, marks=pytest.mark.slow),
    ],
)
def test_metrics_have_an_exchange_of_their_own_where_something_waits_for_them(tmp_path, fields):
    """Early stopping does; so does the note of a state before its first sum; and other schemes protect otherwise."""
    federation = sites(tmp_path)
    federation.set_policies(
        min_sites=2, max_colluders=0, consents={"continue_without_site": True, "fewer_than_three_sites": True}
    )
    frames: list = []
    succeed(federation.run(training({"max_depth": 2}, **fields), frames=frames))
    assert of_rounds([unpack(data) for site, data in frames if site == "site-2"]) == [{ROOT: 2, ALONE: 1}] * ROUNDS


def test_nothing_follows_the_round_after_which_training_stops(tmp_path):
    frame = table(300).assign(y=np.random.default_rng(3).integers(0, 2, 300).astype(np.float32))
    one = training({"max_depth": 2, "eval_metric": ["logloss"]}, eval_data_set="held_out", num_rounds=40)
    one = HorizontalJob.from_dict({**one.to_dict(), "early_stopping_rounds": 1, "evaluate_training": False})
    federation, frames = run(tmp_path, one, frame.assign(y=frame.y))
    n_rounds = len(metrics_of(federation))
    kinds = [f.kind for f in frames if f.kind in (ROOT, RIDES, ALONE)]
    assert n_rounds <= 40 and kinds[-1] is ALONE and kinds.count(ALONE) == n_rounds and RIDES not in kinds


OBJECTIVES = {
    "logistic": {},
    "classes": {"objective": "multi:softprob", "num_class": 3, "eval_metric": ["mlogloss", "auc"]},
    # The rows with label 0 make it infinite: flags ride along.
    "infinite": {"objective": "reg:squarederror", "eval_metric": ["mape", "rmse"]},
    "parallel": {"num_parallel_tree": 2},
    "adaptive": {"objective": "reg:absoluteerror", "eval_metric": ["mae"]},
}


@pytest.mark.parametrize(
    ("name", "profile"),
    quick(
        itertools.product(OBJECTIVES, ["plain", "masks"]),
        *(
            ("classes", "plain"),
            ("infinite", "masks"),
            ("parallel", "plain"),
            ("adaptive", "masks"),
        ),
    ),
)
def test_metrics_that_ride_are_those_that_come_alone(tmp_path, monkeypatch, name, profile):
    one = training({"max_depth": 2, **OBJECTIVES[name]}, profile=profile, eval_data_set="held_out")
    riding, frames = run(tmp_path / "riding", one)
    monkeypatch.setattr(ProtectedSums, "takes_metrics", False)
    alone, others = run(tmp_path / "alone", one)
    assert len(frames) == len(others) - (ROUNDS - 1)
    assert metrics_of(riding) == metrics_of(alone) and len(metrics_of(riding)) == ROUNDS
    assert riding.model() == alone.model()


def test_metrics_of_rows_in_shards_ride_too(tmp_path, monkeypatch):
    one = training({"max_depth": 2, "subsample": 0.7}, eval_data_set="held_out", checkpoint_every=2)
    whole, frames = run(tmp_path / "whole", one)
    in_shards(monkeypatch, {"site-2": 3})
    sharded, of_shards = run(tmp_path / "sharded", one)
    assert of_rounds(of_shards) == of_rounds(frames) and of_rounds(frames)[1][RIDES] == 1
    assert sharded.model() == whole.model()
    for row, other in zip(sharded.record("site-2").rounds, whole.record("site-2").rounds, strict=True):
        assert row.metrics == pytest.approx(other.metrics, rel=1e-12)
        assert row.round == other.round and row.seconds > 0 and min(row.stages.values()) >= 0


BOUND = {
    "metric": ("value_bounds", {metric_quantity("logloss"): 1e-3}),
    "hessians": ("row_bounds", {Family.HESSIANS: 0.01}),  # of the first round, not of the second
}


@pytest.mark.parametrize("what", BOUND)
def test_metrics_go_alone_once_where_a_root_with_them_does_not_fit(tmp_path, monkeypatch, what):
    """Whether a row or a metric was too large, each frame has a counter of its own, and so masks of its own."""
    one = training({"max_depth": 2, "base_score": 0.99, "learning_rate": 0.1, "eval_metric": ["logloss"]})
    name, changed = BOUND[what]
    bounds = getattr(pooled_attempt, name)
    monkeypatch.setattr(pooled_attempt, name, lambda *arguments: bounds(*arguments) | changed)
    riding, frames = run(tmp_path / "riding", one)
    of_second = [(f.kind, f.type is FrameType.RESCALE) for f in frames if f.moment == TrainingStep(Phase.UPDATE, 1)]
    again = [(ROOT, True), (Kind.SCALE, False), (ROOT, False)] if what == "hessians" else [(ROOT, False)]
    went_alone = [(ALONE, True), (Kind.SCALE, False), (ALONE, False)] if what == "metric" else [(ALONE, False)]
    assert of_second == [(RIDES, True), *went_alone, *again, (ROOT, False)]
    assert len({f.counter for f in frames}) == len(frames)
    assert of_rounds(frames)[2] == {RIDES: 1, ROOT: 1}, "afterwards they ride again"
    monkeypatch.setattr(ProtectedSums, "takes_metrics", False)
    alone, _ = run(tmp_path / "alone", one)
    assert metrics_of(riding) == metrics_of(alone) and riding.model() == alone.model()


class Told:
    """What one site said of each round, whichever attempt it was in."""

    def __init__(self) -> None:
        self.metrics: dict[int, list[dict[str, float]]] = {}

    def __call__(self, name: str):
        def progress(record, total):
            if name == "site-1":
                self.metrics.setdefault(record.round, []).append(record.metrics)

        return progress


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return run(tmp_path_factory.mktemp("whole"), training({"max_depth": 2}))[0]


@pytest.mark.parametrize(
    ("how", "nth", "hook"),
    [
        *(("wait", 1, "tamper_reply"), ("resume", 3, "tamper")),
        *slow(("wait", 1, "tamper"), ("wait", 2, "tamper"), ("wait", 3, "tamper"), ("wait", 3, "tamper_reply")),
        *slow(("wait", 2, "tamper_reply")),
        *slow(("resume", 2, "tamper"), ("resume", 2, "tamper_reply"), ("resume", 3, "tamper_reply")),
    ],
)
def test_a_site_lost_between_a_round_and_its_metrics_loses_none(tmp_path, undisturbed, nth, hook, how):
    one = training({"max_depth": 2}, checkpoint_every=1, **({"on_lost_site": "wait"} if how == "wait" else {}))
    federation, told = sites(tmp_path), Told()
    first = "job" if how == "wait" else "lost"
    outcomes = federation.run(one, first, on_progress=told, **{hook: {"site-2": dies_at(RIDES, nth)}})
    assert isinstance(outcomes["site-2"], SiteDied)
    if how == "wait":
        succeed(federation.run(one, number=2, on_progress=told))
    else:
        resumed = HorizontalJob.from_dict({**one.to_dict(), "resume_from": "lost"})
        succeed(federation.run(resumed, on_progress=told))
    assert federation.model() == undisturbed.model()
    assert {number: found[-1] for number, found in told.metrics.items()} == metrics_of(undisturbed)
    assert all(found == found[:1] * len(found) for found in told.metrics.values()), "nothing else was said before"


def test_the_plan_counts_them_so():
    workload = Workload(1000, 4, bins=16, depth=3, metrics=2, rounds=4, grown=True, metrics_wait=False)
    first, later = (list(round_messages(workload, "masks", is_first=is_first)) for is_first in (True, False))
    assert sum(m.messages for m in first) == sum(m.messages for m in later) == 3
    assert [(m.kind, m.n_values, m.residues) for m in later if m.residues] == [(Kind.HISTOGRAM_METRIC, 130, 4 + 4)]
    assert [m.kind for m in final_messages(workload)] == [Kind.METRIC]
    rates = Network(), TreeRate(1.0, 0.0), ProtectionRate(1e-8, 1e-9), 0
    alone = replace(workload, metrics_wait=True)
    riding, waiting = (estimate(one, "masks", *rates) for one in (workload, alone))
    # A metric's words are residues instead; what the exchange of its own takes besides are two tags.
    assert waiting.total_bytes - riding.total_bytes == 3 * 2 * 8
    assert waiting.network_s - riding.network_s > 0.9 * Network().latency_s
    for profile in ("bfv", "ckks"):
        assert Kind.METRIC in {m.kind for m in round_messages(workload, profile)}
