"""Jobs of Cox regression: what is refused by name, what leaves a site, and that trainings go on to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.growth.survival import WORDS
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.pooled.job import HorizontalJob, check_horizontal_early
from nvflare_plugins.pooled.plan import final_messages, message_bytes, round_messages, setup_messages, workload_of_job
from nvflare_plugins.wire.envelope import FrameType, Kind, Operation, Phase, unpack
from tests.support import survival, vertical_jobs
from tests.support.examples import slow
from tests.support.federation import Federation, SiteDied, dies_at, succeed
from tests.support.shards import in_shards

ROUNDS = 3
BOUNDS = {f"x{number}": [-4.0, 4.0] for number in range(8)}  # a search for cuts would take half of a job
LABEL = survival.FORMS["events"]
PARAMS = {"objective": "survival:cox", "max_depth": 3, "max_bin": 16, "learning_rate": 0.5}


def job(params: dict | None = None, **fields: Any) -> HorizontalJob:
    fields = {"num_rounds": ROUNDS, "cuts": "uniform", "cut_bounds": BOUNDS, **fields}
    return HorizontalJob("train", LABEL, {**PARAMS, **(params or {})}, **fields)


def sites(folder: Path, frame: pd.DataFrame | None = None, **policy: Any) -> Federation:
    federation = Federation(folder)
    federation.give_data("train", survival.times("events") if frame is None else frame)
    federation.give_data("eval", survival.times("events", 600, seed=1))
    federation.set_registry_keys()
    federation.set_policies(**policy)
    return federation


# -- refused by name --------------------------------------------------------------------------------------------------


def horizontal(params: dict | None = None, **fields: Any) -> None:
    check_horizontal_early(job(params, **fields), None, 3)


def vertical(**fields: Any) -> None:
    VerticalJob("site-1", "train", LABEL, PARAMS, num_rounds=3, **fields)


NAMED = {
    "continue": (lambda: horizontal(on_lost_site="continue"), "on_lost_site='continue' is refused with survival:cox"),
    "a model to continue": (lambda: horizontal(initial_model="old.json"), "initial_model is refused with survival:cox"),
    "a job to continue": (lambda: horizontal(continue_from="earlier"), "continue_from is refused with survival:cox"),
    "stock XGBoost": (lambda: horizontal(engine="xgboost"), "survival:cox is for trees that the sites grow"),
    "dart": (lambda: horizontal({"booster": "dart"}), "survival:cox takes booster=gbtree"),
    "positive weights": (lambda: horizontal({"scale_pos_weight": 2.0}), "scale_pos_weight is read only by"),
    "short words": (
        lambda: workload_of_job(job(word_bits=32), 1_500, 8, 3, missing=False),
        "word_bits=32 is refused for survival:cox",
    ),
    "a label of one column": (
        lambda: check_horizontal_early(HorizontalJob("train", "days", PARAMS), None, 3),
        "survival:cox needs times in place of a label",
    ),
    "another objective's metric": (lambda: horizontal({"eval_metric": "aft-nloglik"}), "is of survival:aft"),
    "one bin": (lambda: job(time_bins=1), "time_bins"),
    "tuning": (
        lambda: TuningJob("train", LABEL, PARAMS, trials=[{"max_depth": 2}, {"max_depth": 3}]),
        "objective survival:cox is refused in a tuning",
    ),
    "bagging": (lambda: BaggingJob("train", "days", PARAMS).parameters(["a"]), "survival:cox"),
    # Private trees and DPBoost have no field that names an objective.
    "FederBoost": (
        lambda: check_bucket_parameters(PARAMS, 16),
        "survival:cox needs times in place of a label",
    ),
    "noised sums": (
        lambda: vertical(preset="noised", epsilon=1.0, delta=1e-5),
        "preset noised is refused with survival:cox",
    ),
    "a vertical model to continue": (lambda: vertical(initial_model="m"), "initial_model is refused with survival:cox"),
}


@pytest.mark.parametrize("name", NAMED)
def test_it_is_refused_by_name(name: str) -> None:
    make, words = NAMED[name]
    with pytest.raises(ConfigurationError, match=words):
        make()


# -- refused for rows -------------------------------------------------------------------------------------------------

BAD = {
    "a time of 0": (lambda frame: frame.assign(days=frame.days.where(frame.index != 700, 0.0)), "times above 0"),
    "a time below 0": (lambda frame: frame.assign(days=frame.days.where(frame.index != 700, -1.0)), "are below 0"),
    "no event at one site": (
        lambda frame: frame.assign(death=frame.death.where(~frame.index.isin(range(500, 1000)), 0)),
        "no row of the training set has an event",
    ),
    "an event without a time": (
        lambda frame: frame.assign(
            days=frame.days.where(frame.index != 700), death=frame.death.where(frame.index != 700, 1)
        ),
        "an event in 'death' and no time",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_are_none_of_it_are_refused_where_they_are(tmp_path: Path, name: str) -> None:
    federation = sites(tmp_path, BAD[name][0](survival.times("events")))
    outcomes = federation.run(job())
    assert isinstance(outcomes["site-2"], ConfigurationError) and BAD[name][1] in str(outcomes["site-2"])
    assert all(isinstance(one, VeilBoostError) for one in outcomes.values())


def test_other_censoring_is_refused(tmp_path: Path) -> None:
    federation = sites(tmp_path, survival.times("bounds"))
    one = HorizontalJob("train", survival.FORMS["bounds"], PARAMS, ROUNDS)
    outcomes = federation.run(one).values()
    assert all(isinstance(outcome, ConfigurationError) and "no other censoring" in str(outcome) for outcome in outcomes)


def test_too_few_events_for_two_bins_end_the_job_at_all_sites_with_one_text(tmp_path: Path) -> None:
    frame = survival.times("events")
    few = frame.assign(death=np.where(np.arange(len(frame)) % 100 == 7, frame.death, 0))
    for place in (3, 503, 1003):
        few.loc[place, "death"] = 1
    outcomes = sites(tmp_path, few).run(job(), "few")
    assert len({str(one) for one in outcomes.values()}) == 1
    assert all(isinstance(one, PolicyRefusal) and "too coarse" in str(one) for one in outcomes.values())


# -- what leaves a site -----------------------------------------------------------------------------------------------


def opened(federation: Federation, one: HorizontalJob, **hooks: Any) -> list:
    """Return the frames of a site and their replies."""
    frames: list = []
    replies: list = []

    def kept(frame: bytes) -> bytes:
        replies.append(unpack(frame))
        return frame

    succeed(federation.run(one, frames=frames, tamper_reply={"site-2": kept}, **hooks))
    return [unpack(data) for site, data in frames if site == "site-2"], replies


def integers(frame: Any) -> np.ndarray:
    return np.frombuffer(frame.payload[: 8 * frame.n_values], dtype="<i8")


@pytest.mark.parametrize(("weight", "bins"), [*slow((None, 256)), (None, 6), ("w", 256)])
def test_no_sum_of_a_bin_is_opened_that_holds_too_few_events(tmp_path: Path, weight: str | None, bins: int) -> None:
    frame = survival.times("events").assign(w=np.random.default_rng(0).uniform(0.4, 1, 1_500).astype(np.float32))
    features = [name for name in frame if name.startswith("x")]
    federation = sites(tmp_path, frame, min_rows_per_node=12)
    one = job(profile="plain", time_bins=bins, weight=weight, features=features)
    _, replies = opened(federation, one)
    counts = [integers(f) for f in replies if f.kind is Kind.CLASS_COUNTS]
    assert len(counts) == 1 and counts[0].min() >= 12  # the floor of the policies, which is above the job's 10
    sums = [f for f in replies if f.kind is Kind.RISK_SUMS]
    events, first, *_ = map(integers, sums)
    assert events.size <= bins and first.size == WORDS * events.size and len(sums) == 1 + ROUNDS
    assert [f.moment.phase for f in sums[1:]] == [Phase.UPDATE] * ROUNDS
    assert events.min() >= 11.999 * _unit(events, frame, weight)


def _unit(events: np.ndarray, frame: pd.DataFrame, weight: str | None) -> float:
    """Return in how many steps of the sums the largest weight lies."""
    of_events = frame.death if weight is None else frame.death * frame[weight]
    return events.sum() / of_events.sum() * (1.0 if weight is None else float(frame[weight].max()))


def test_what_is_sent_is_at_most_what_the_plan_says(tmp_path: Path) -> None:
    one = job({"eval_metric": "cox-nloglik"}, eval_data_set="eval", evaluate_training=True, early_stopping_rounds=9)
    sent, _ = opened(sites(tmp_path), one)
    workload = workload_of_job(one, 1_500, 8, 3, missing=True)
    planned = [*setup_messages(workload), *final_messages(workload)]
    for number in range(ROUNDS):
        planned += round_messages(workload, is_first=number == 0)
    for kind in (Kind.CELL_FLAGS, Kind.CLASS_COUNTS, Kind.RISK_SUMS, Kind.METRIC):
        own = [f for f in sent if f.kind is kind and f.operation is Operation.SUM and f.type is FrameType.CONTRIBUTION]
        due = [m for m in planned if m.kind is kind]
        assert len(own) == sum(m.messages for m in due) > 0
        assert max(len(f.payload) for f in own) <= max(message_bytes(m, "masks") for m in due)


def test_a_grid_is_searched_once_and_another_one_needs_consent(tmp_path: Path) -> None:
    federation = sites(tmp_path)
    consents = federation.policy_of("site-1")["consents"]
    federation.set_policies(consents={**consents, "second_quantile_search": False})
    first, _ = opened(federation, job())
    again, _ = opened(federation, job(), job_id="again")
    assert [sum(f.kind is Kind.CELL_FLAGS for f in frames) for frames in (first, again)] == [2, 0]
    assert federation.model("again") == federation.model()
    outcomes = federation.run(job(time_bins=9), "other")
    assert all("second_quantile_search" in str(one) for one in outcomes.values())


# -- the same bytes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    federation = sites(tmp_path_factory.mktemp("whole"))
    succeed(federation.run(job()))
    return federation.model()


@pytest.mark.parametrize(
    ("nth", "how"),
    [(1, "wait"), (3, "resume"), *slow((1, "resume"), (3, "wait"), (4, "wait"), (4, "resume"))],
)
def test_a_training_goes_on_to_the_same_model(tmp_path: Path, undisturbed: bytes, how: str, nth: int) -> None:
    one = job(checkpoint_every=1, **({"on_lost_site": "wait"} if how == "wait" else {}))
    federation = sites(tmp_path)
    first = "job" if how == "wait" else "lost"
    outcomes = federation.run(one, first, tamper={"site-2": dies_at(Kind.RISK_SUMS, nth)})
    assert isinstance(outcomes["site-2"], SiteDied)
    going_on = one if how == "wait" else job(checkpoint_every=1, resume_from="lost" if nth > 1 else None)
    succeed(federation.run(going_on, number=2 if how == "wait" else 1))
    assert federation.model() == undisturbed


def test_shards_of_a_site_train_the_same_model(
    tmp_path: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_shards(monkeypatch, {"site-1": 3, "site-3": 2})
    federation = sites(tmp_path)
    succeed(federation.run(job()))
    assert federation.model() == undisturbed


@pytest.mark.parametrize("memory", ["passes", *slow("external")])
def test_rows_that_are_not_held_train_the_same_model(tmp_path: Path, undisturbed: bytes, memory: str) -> None:
    federation = sites(tmp_path)
    federation.set_policies(data_sets={"train": {"path": "train.parquet", "memory": memory}})
    succeed(federation.run(job()))
    assert federation.model() == undisturbed


def test_rounds_that_draw_rows_count_all_rows_at_risk(tmp_path: Path, undisturbed: bytes) -> None:
    federation = sites(tmp_path)
    succeed(federation.run(job({"subsample": 0.5})))
    assert federation.model() != undisturbed


@pytest.mark.parametrize(
    "rough",
    [
        {"learning_rate": 3.0, "lambda": 0.0, "min_child_weight": 0.0, "max_depth": 8},
        {"base_score": 1e-30},
        {"base_score": 1e38},
    ],
)
def test_hazard_ratios_that_lose_digits_end_the_job_at_all_sites_alike(tmp_path: Path, rough: dict) -> None:
    outcomes = sites(tmp_path).run(job(rough, num_rounds=60))
    assert all(isinstance(one, ConfigurationError) and "hazard ratios" in str(one) for one in outcomes.values())
    assert len({str(one) for one in outcomes.values()}) == 1


def test_a_leaf_with_too_few_rows_ends_the_job(tmp_path: Path) -> None:
    outcomes = sites(tmp_path, min_rows_per_node=4).run(job({"min_child_weight": 0.1, "max_depth": 8}))
    assert all(isinstance(one, PolicyRefusal) and "a leaf holds fewer than 4" in str(one) for one in outcomes.values())
    federation = sites(tmp_path / "kept", min_rows_per_node=4)
    succeed(federation.run(job({"max_depth": 8})))
    assert any("min_child_weight is 12" in note for note in federation.record("site-1").notes)


# -- vertical ---------------------------------------------------------------------------------------------------------


def test_the_party_with_the_times_trains_with_the_others(tmp_path: Path) -> None:
    frame, parties = survival.times("events", 400, 6), vertical_jobs.federation(tmp_path, n_rows=400)
    columns = [f"c{number}" for number in range(6)]
    joined = frame.set_axis([*columns, "days", "death"], axis=1)
    for site, own in zip(parties.sites, (["c0", "c1", "days", "death"], columns[2:5], columns[5:]), strict=True):
        parties.give(site, "data", joined[own])
    one = vertical_jobs.job(label=LABEL, params={**PARAMS, "base_score": 1.0, "min_child_weight": 5.0})
    succeed(vertical_jobs.run(parties, one))
    labels = np.where(frame.death == 1, frame.days, -frame.days)
    matrix = xgb.DMatrix(joined[columns], labels)
    reference = xgb.train({**one.params, "tree_method": "hist", "nthread": 1}, matrix, one.num_rounds)
    model = xgb.Booster(model_file=bytearray(vertical_jobs.merged(parties)))
    found = model.predict(xgb.DMatrix(joined[columns].to_numpy(), feature_names=model.feature_names))
    assert found == pytest.approx(reference.predict(matrix), rel=1e-4)
