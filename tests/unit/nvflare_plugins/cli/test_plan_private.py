"""What the plan of a private job says to somebody who has to choose: of one person, of noise, of a budget."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from dp_components.accounting import compose
from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from nvflare_plugins.attempt.job_context import is_paid
from nvflare_plugins.attempt.plan import PlanRequest, shown_lines, warnings
from nvflare_plugins.cli.main import main
from nvflare_plugins.flare.kinds import read_job
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.noised import NoisePlan
from nvflare_plugins.kinds.vertical.planner import noise_advice, planned_sums
from nvflare_plugins.site.policy import SitePolicy, template

JOBS = Path(__file__).parents[4] / "jobs"
DEFAULT = JOBS / "private_trees_default"
ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW


def figures(capsys: pytest.CaptureFixture[str], job: Path, *options: object) -> dict:
    assert main(["plan", str(job), *map(str, options), "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def text(capsys: pytest.CaptureFixture[str], job: Path, *options: object) -> str:
    assert main(["plan", str(job), *map(str, options)]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def test_one_person_is_promised_what_the_curve_says_and_not_its_one_point(capsys) -> None:
    found = figures(capsys, DEFAULT)
    of_point = (1 + 1e-6 * math.exp(-0.5)) / (1 + math.exp(-0.5))
    assert 0.5 < found["guessed_right_at_most"] < of_point - 0.09
    mu = 2 * norm.ppf(found["guessed_right_at_most"])
    assert norm.cdf(mu / 2 - 0.5 / mu) - math.exp(0.5) * norm.cdf(-mu / 2 - 0.5 / mu) == pytest.approx(1e-6, rel=0.01)
    assert found["found_at_1_percent_false_alarms_at_most"] == pytest.approx(norm.cdf(norm.ppf(0.01) + mu), abs=1e-4)
    assert "naming 1 in a hundred wrongly" in text(capsys, DEFAULT)


@pytest.mark.parametrize("job", ["private_trees_default", "private_trees_dp_ebm", "dpboost"])
def test_every_private_kind_says_all_of_it(job: str, capsys) -> None:
    said = text(capsys, JOBS / job, "--rows", 18_000, "--budget", "5,1e-5,pure_epsilon=4.5")
    for name in ("privacy", "one person", "noise to signal", "expected loss", "budget"):
        assert f"\n{name:<17}" in said
    assert "such training" in said


def test_noise_is_told_beside_a_mean_leaf_of_public_size(capsys) -> None:
    less, more = (figures(capsys, DEFAULT, "--rows", rows) for rows in (16_000, 160_000))
    ratio = less["noise_to_signal"]["largest_sum_of_mean_leaf"]
    assert ratio == pytest.approx(less["leaf_noise"][0] / (16_000 / 16 / 2))
    assert more["noise_to_signal"]["largest_sum_of_mean_leaf"] == pytest.approx(ratio / 10)
    assert figures(capsys, DEFAULT)["noise_to_signal"] == {} and "give --rows" in text(capsys, DEFAULT)
    assert set(figures(capsys, JOBS / "dpboost")["noise_to_signal"]) == {"first_tree", "last_tree"}
    kept = figures(capsys, JOBS / "federboost_vertical", "--features", 5)["noise_to_signal"]["rows_that_count"]
    of_value = math.exp(3.6)  # a tenth of epsilon 4 pays for edges
    stays, goes = of_value / (of_value + 15), 1 / (of_value + 15)
    assert kept == pytest.approx((stays - goes) ** 2), "squared, as a correlation"


def test_a_budget_bears_as_many_trainings_as_its_ledger_will_let_in(tmp_path: Path, capsys) -> None:
    """Counted by the plan, and then really reserved one after the other."""
    from nvflare_plugins.flare.kinds import read_job
    from nvflare_plugins.kinds.private_trees.job import JobPlan

    whole = figures(capsys, DEFAULT, "--budget", "1,1e-5")["trainings"]
    assert whole["whole"] is None
    (tmp_path / "local").mkdir()
    document = json.loads(template({"credit2": "credit.csv"}))
    document["data_sets"]["credit2"]["privacy"] = {"epsilon": 1.0, "delta": 1e-5}
    (tmp_path / "local" / "veilboost.json").write_text(json.dumps(document))
    place = ("--workspace", tmp_path, "--site", "site-1")
    assert figures(capsys, DEFAULT, *place)["trainings"] == {"left": whole["left"], "whole": whole["left"]}
    policy = SitePolicy.load(tmp_path, "site-1")
    identity = LedgerIdentity("site-1", "credit2", ROW)
    ledger = Ledger.open(policy.ledgers, identity, Budget(1.0, 1e-5), policy.ledger_heads)
    events = JobPlan.of(read_job(DEFAULT), 3).releases.events
    n = 0
    while ledger.quote(events).fits:
        ledger.open_job(f"job-{n}", events)
        n += 1
        assert figures(capsys, DEFAULT, *place)["trainings"]["left"] == whole["left"] - n
    assert n == whole["left"] > 3
    assert "0 such trainings are in it" in text(capsys, DEFAULT, *place)
    assert figures(capsys, DEFAULT, "--budget", "1,1e-5,rows_per_person=2")["trainings"]["left"] == whole["left"] // 4


def test_pure_jobs_take_from_the_pure_part_alone(capsys) -> None:
    def left(budget: str) -> int:
        return int(figures(capsys, JOBS / "dpboost", "--budget", budget)["trainings"]["left"])

    assert (left("20,1e-6"), left("20,1e-6,pure_epsilon=4.5"), left("20,1e-6,pure_epsilon=13")) == (0, 1, 3)


def test_the_expected_loss_follows_from_public_numbers(capsys) -> None:
    """By hand: noise over the root of the trees, 16 leaves, rows and base rate; and how often it held is said."""
    found = figures(capsys, DEFAULT, "--rows", 18_000, "--base-rate", 0.2)
    x = found["leaf_noise"][0] / math.sqrt(300) * 16 / (18_000 * 0.4)
    odds = 4.5 * x**0.584
    assert found["expected_loss"] == {"seldom_more_than": pytest.approx(odds / (1 + odds))}
    rates = [("--base-rate", rate) for rate in (0.5, 0.05)]
    even, uneven, more_rows = (
        figures(capsys, DEFAULT, "--rows", rows, *rate)["expected_loss"]["seldom_more_than"]
        for rows, rate in ((18_000, rates[0]), (18_000, rates[1]), (180_000, rates[0]))
    )
    assert more_rows < even < uneven
    assert figures(capsys, DEFAULT, "--rows", 18_000)["expected_loss"]["seldom_more_than"] == even
    published = figures(capsys, JOBS / "private_trees_dp_ebm", "--rows", 18_000)["expected_loss"]
    assert even < published["seldom_more_than"] < 1
    buckets = figures(capsys, JOBS / "federboost_vertical", "--features", 5)
    odds = 0.401 * (1 / buckets["noise_to_signal"]["rows_that_count"] - 1) ** 0.362
    assert buckets["expected_loss"]["seldom_more_than"] == pytest.approx(odds / (1 + odds))
    said = text(capsys, DEFAULT, "--rows", 18_000)
    assert "97 % of trainings on tables to which that was not fitted lost no more" in said
    assert "base-rate must be a share" in refusal(capsys, DEFAULT, "--base-rate", 1)
    for others in ([JOBS / "dpboost"], ["--rows", 1000, "--features", 3]):
        assert "--base-rate belongs to plans of private_trees jobs" in refusal(capsys, *others, "--base-rate", 0.2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"components": {"split_method": "histogram", "interactions": "cyclical"}}, "half lost more than"),
        ({"label_classes": ["a", "b", "c"]}, "two classes alone"),
        ({"label_bounds": [0, 30]}, "two classes alone"),
        ({"epsilon": 0.001}, "so much noise"),
    ],
)
def test_what_cannot_be_said_is_not_estimated(tmp_path: Path, changes: dict, why: str, capsys) -> None:
    folder = shutil.copytree(DEFAULT, tmp_path / "job")
    path = folder / "app" / "config" / "config_fed_server.json"
    config = json.loads(path.read_text())
    config["workflows"][0]["args"]["job"] |= changes
    path.write_text(json.dumps(config))
    assert figures(capsys, folder, "--rows", 900)["expected_loss"] == {"seldom_more_than": None}
    said = text(capsys, folder, "--rows", 900)
    assert "expected loss    not estimated" in said and why in said
    assert "give --rows" in text(capsys, DEFAULT).partition("expected loss")[2]


def noised(**changes: object) -> tuple[VerticalJob, NoisePlan]:
    job = VerticalJob(
        active="site-1", data_set="credit", label="y", num_rounds=20, preset="noised", epsilon=3.0, delta=1e-5
    )
    job = replace(job, **changes)
    plan = planned_sums(job)
    assert plan is not None and is_paid(job)
    return job, plan


def test_noised_sums_say_all_of_it_too() -> None:
    job, plan = noised()
    request = PlanRequest(budget=(Budget(8.0, 1e-4), 1))
    advice = noise_advice(request, job, plan, (4, 12), 20_000)
    said = shown_lines(advice.shown)
    assert said.startswith("one person       whoever sees all of it and guesses between two rows")
    assert "the bits of its splits apart" in said and "expected loss    not estimated" in said
    assert 2 < advice.figures["trainings"]["left"] < 8
    cost = compose(plan.of_party(12).whole)
    assert cost.epsilon(1e-5) <= 3.0 and advice.figures["warnings"] == [] and "WARNING" not in advice.shown
    loud = noise_advice(request, *noised(epsilon=9.0), (12,), 200_000)
    first, second = loud.figures["warnings"]
    assert "epsilon 9 is above 8" in first and "delta 1e-05 is not below" in second


def test_bounds_of_every_kind_are_looked_at(tmp_path: Path, capsys) -> None:
    """A regression's label, and what a passive party of FederBoost keeps in its own folder."""
    folder = shutil.copytree(JOBS / "dpboost", tmp_path / "job")
    path = folder / "app" / "config" / "config_fed_server.json"
    config = json.loads(path.read_text())
    config["workflows"][0]["args"]["job"] |= {"label_bounds": [0, 63_418.7], "label_classes": None}
    path.write_text(json.dumps(config))
    assert "look taken from the data" in text(capsys, folder)
    (tmp_path / "local").mkdir()
    (tmp_path / "inputs").mkdir()
    buckets = JOBS / "federboost_vertical"
    job = read_job(buckets)
    document = json.loads(template({job.data_set: "credit.csv"}))
    document["data_sets"][job.data_set]["privacy"] = {"epsilon": 9.0, "delta": 1e-5, "pure_epsilon": 8.5}
    (tmp_path / "local" / "veilboost.json").write_text(json.dumps(document))
    described = {"age": {"low": 17.99, "high": 80}, "sex": {"values": [1, 2]}}
    (tmp_path / "inputs" / job.description).write_text(json.dumps(described))
    said = text(capsys, buckets, "--features", 2, "--workspace", tmp_path, "--site", "site-2")
    assert "bounds of 'age'" in said and "'sex'" not in said and "17.99" not in said
    assert "look taken" not in text(capsys, buckets, "--features", 2)
    assert "epsilon 0.4 of it pays for buckets of about equal counts" in said


def test_a_budget_without_a_pure_part_bears_no_pure_job(tmp_path: Path, capsys) -> None:
    folder = shutil.copytree(DEFAULT, tmp_path / "job")
    path = folder / "app" / "config" / "config_fed_server.json"
    config = json.loads(path.read_text())
    config["workflows"][0]["args"]["job"] |= {"method": "pure", "delta": None, "epsilon": 1.0}
    path.write_text(json.dumps(config))
    assert "keeps nothing for pure mechanisms. State pure_epsilon" in text(capsys, folder, "--budget", "2,1e-6")
    assert "2 such trainings are in it" in text(capsys, folder, "--budget", "2,0,pure_epsilon=2")


def test_equal_widths_are_warned_of(tmp_path: Path, capsys) -> None:
    folder = shutil.copytree(JOBS / "federboost_vertical", tmp_path / "job")
    path = folder / "app" / "config" / "config_fed_server.json"
    config = json.loads(path.read_text())
    assert "WARNING" not in text(capsys, folder, "--features", 2)
    config["workflows"][0]["args"]["job"]["edges_epsilon"] = 0.0
    path.write_text(json.dumps(config))
    said = text(capsys, folder, "--features", 2)
    assert "WARNING" in said and "equal widths put nearly all rows of a column with a long tail into one bucket" in said


def test_what_a_person_should_look_at_again_is_said(tmp_path: Path, capsys) -> None:
    assert "WARNING" not in text(capsys, DEFAULT, "--rows", 18_000)
    assert "delta 1e-06 is not below 1/1,000,000 rows" in text(capsys, DEFAULT, "--rows", 1_000_000)
    assert "epsilon 20 is above 8" in text(capsys, JOBS / "federboost_vertical", "--features", 5)
    assert warnings(8, 1e-6, 999_999, {"age": (18, 100), "sum": (-100_000, 1_000_000)}) == []
    assert warnings(0.1, 0.0, 10**9) == []
    for pair in ((0.2, 5), (18, 99_999), (0, 1e-3), (1900, 2026), (-1, 36.6), (0, 2**10), (0, 0.25)):
        assert warnings(1, 0, None, {"a": pair}) == [], pair
    for pair in ((17.99, 80), (0, 63_418), (-0.143682, 1), (0, 1_234_567)):
        [said] = warnings(1, 0, None, {"age": pair, "dose": (0, 1)})
        assert "'age'" in said and "'dose'" not in said and str(pair[0]) not in said
    [said] = warnings(1, 0, None, {f"c{n}": (0, 1.23456) for n in range(9)})
    assert "and 4 more" in said


def test_mistakes_are_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(template({"credit2": "credit.csv"}))
    assert "no privacy budget" in refusal(capsys, DEFAULT, "--workspace", tmp_path, "--site", "site-1")
    assert "both --workspace DIR and --site" in refusal(capsys, DEFAULT, "--site", "site-1")
    assert "differentially private jobs" in refusal(capsys, JOBS / "horizontal_masks", "--budget", "1,1e-6")
    assert "--budget:" in refusal(capsys, DEFAULT, "--budget", "700,1e-6")
    with pytest.raises(SystemExit):
        main(["plan", str(DEFAULT), "--budget", "1"])
    assert "for example 2,1e-6" in capsys.readouterr().err


def test_a_release_of_a_ledger_without_an_end_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "local").mkdir()
    document = json.loads(template({"credit2": "credit.csv"}))
    document["data_sets"]["credit2"]["privacy"] = {"epsilon": 2.0, "delta": 1e-5}
    (tmp_path / "local" / "veilboost.json").write_text(json.dumps(document))
    policy, event = SitePolicy.load(tmp_path, "site-1"), GaussianEvent(20.0, ROW)
    ledger = Ledger.open(policy.ledgers, LedgerIdentity("site-1", "credit2", ROW), Budget(2, 1e-5), policy.ledger_heads)
    ledger.open_job("job", event)
    ledger.release("job", "sums", lambda: Release(np.array([1]), event))
    [path] = policy.ledgers.glob("*.ledger")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert "its end is missing" in refusal(capsys, DEFAULT, "--workspace", tmp_path, "--site", "site-1")


@pytest.mark.parametrize("option", ["--rows", "--features", "--sites"])
@pytest.mark.parametrize("job", sorted({DEFAULT, JOBS / "dpboost", JOBS / "federboost_vertical", JOBS / "tuning"}))
def test_numbers_of_nothing_are_refused(job: Path, option: str, capsys) -> None:
    for number in (0, -5):
        assert f"{option[2:]} must be at least 1" in refusal(capsys, job, option, number)


def test_a_job_on_buckets_that_were_paid_for_spends_nothing(tmp_path: Path, capsys) -> None:
    folder = shutil.copytree(JOBS / "federboost_vertical", tmp_path / "again")
    path = folder / "app" / "config" / "config_fed_server.json"
    config = json.loads(path.read_text())
    config["workflows"][0]["args"]["job"]["buckets_from"] = "job-1"
    path.write_text(json.dumps(config))
    assert figures(capsys, folder) == {"epsilon": 0.0, "bytes_sent": 0}
    assert "job job-1 has paid" in text(capsys, folder)
