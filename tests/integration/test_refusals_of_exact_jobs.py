"""Jobs without differential privacy: why rows stopped one stays at the site, and so many a month do at most.

A weight column of zeros, a missing label, one outside the list, 1e39, an id that stands there twice: each was a
question about one row, and the text of the error its answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import CapacityExceeded, ConfigurationError
from nvflare_plugins.base.errors import (
    REGISTRY_TEXT,
    ROWS_TEXT,
    DataRefusal,
    Decider,
    JobAborted,
    PolicyRefusal,
    TooFewRows,
    reason_of,
)
from nvflare_plugins.flare.executor import error_text
from nvflare_plugins.pooled import preparation
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.pooled.row_floors import TOO_FEW
from nvflare_plugins.site import data_refusals
from nvflare_plugins.site.data_refusals import Question, RefusalCount, reading_rows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind, unpack
from nvflare_plugins.wire.sums import ProtectedSums
from tests.support.exact_jobs import FEW_ROWS, SITES, federation_of, job, place_of, table, texts, with_value
from tests.support.examples import slow
from tests.support.federation import Federation, succeed

POISSON = {"objective": "count:poisson", "max_depth": 2}
QUERIES: dict[str, tuple[Callable, dict, str]] = {
    "a negative weight": (with_value("w", -1.0), {"weight": "w"}, "negative"),
    "a missing label": (with_value("y", np.nan), {}, "lacks values"),
    "a label outside the list": (with_value("y", 2.0), {"label_classes": [0, 1]}, "public list of 2"),
    "a label that does not fit": (with_value("y", 2.0), {}, "between 0 and 1"),
    "a negative label": (with_value("y", -1.0), {"params": POISSON}, "0 or greater"),
    "a value beyond float32": (with_value("a", 1e39), {}, "beyond float32"),
    "a value beyond the cuts": (with_value("a", 1e38), {}, "1e38 or more"),
    "an unknown category": (
        with_value("c", "z"),
        {"features": ["a", "c"], "categories": {"c": ["x", "y"]}},
        "list of 2",
    ),
}


@pytest.mark.parametrize("query", QUERIES)
def test_others_read_one_text_whatever_a_sites_rows_are(
    tmp_path: Path, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, fields, reason = QUERIES[query]
    federation = federation_of(tmp_path, change)
    frames: list = []
    with caplog.at_level(logging.INFO):
        outcomes = federation.run(job(**fields), frames=frames)
    assert texts(outcomes)["site-1"] == ROWS_TEXT and type(outcomes["site-1"]) is DataRefusal
    assert {texts(outcomes)[site] for site in SITES[1:]} == {f"site-1: {ROWS_TEXT}"}
    assert all(site != "site-1" for site, _ in frames)
    assert error_text(outcomes["site-1"]) == ROWS_TEXT
    assert reason in caplog.text and all(record.levelno < logging.ERROR for record in caplog.records)
    for path in tmp_path.rglob("*"):
        if path.is_file() and "evidence" in str(path):
            assert reason not in path.read_text()
    assert RefusalCount(SitePolicy.load(federation.workspace("site-1"), "site-1")).counts() == {"train": 1}
    assert RefusalCount(SitePolicy.load(federation.workspace("site-2"), "site-2")).counts() == {}


def test_a_policy_may_share_reasons(tmp_path: Path) -> None:
    change, fields, reason = QUERIES["a missing label"]
    outcomes = federation_of(tmp_path, change, share_data_errors=True).run(job(**fields))
    assert all(reason in str(outcome) for outcome in outcomes.values())


def test_after_so_many_refusals_the_rows_are_not_looked_at(tmp_path: Path) -> None:
    """Then neighbouring data sets answer alike, until somebody at the site starts the count anew."""
    change, fields, _ = QUERIES["a missing label"]
    federation = federation_of(tmp_path, change, data_refusals_per_month=2, consents={"recompute_with_changes": True})
    path, workspace = federation.workspace("site-1") / "train.parquet", federation.workspace("site-1")
    for number in range(2):
        assert texts(federation.run(job(**fields), f"job-{number}"))["site-1"] == ROWS_TEXT
    answers = set()
    for number, rows in enumerate((None, table(30), table(30).iloc[:29])):
        path.unlink(missing_ok=True)
        if rows is not None:
            rows.to_parquet(path, index=False)
        outcome = federation.run(job(**fields), f"late-{number}")["site-1"]
        assert type(outcome) is PolicyRefusal
        answers.add(str(outcome))
    (text,) = answers
    assert "data_refusals_per_month" in text and "--reset-refusals train" in text and ROWS_TEXT not in text
    # Another data set has a count of its own; evaluation counts for the set that is evaluated, too.
    RefusalCount(SitePolicy.load(workspace, "site-1")).check(["other"])
    from nvflare_plugins.cli.main import main

    assert main(["registry", str(workspace), "--site", "site-1", "--reset-refusals", "train"]) == 0
    succeed(federation.run(job(**fields), "after"))


def test_the_count_forgets_after_a_month_and_survives_crashes(tmp_path: Path) -> None:
    policy = SitePolicy.from_dict({"data_refusals_per_month": 3}, workspace=tmp_path, site="a")
    now = [1e9]
    count = RefusalCount(policy, lambda: now[0])
    for _ in range(5):
        count.note(["one", "two"])
        now[0] += 1
    count.note(["two"])
    assert count.counts() == {"one": 3, "two": 3}
    with pytest.raises(PolicyRefusal, match="data_refusals_per_month"):
        RefusalCount(policy, lambda: now[0] - 1e8).check(["one"])  # a clock that went back helps nobody
    now[0] += data_refusals.MONTH_S - 2
    assert count.counts() == {"one": 1, "two": 2}
    count.check(["one", "two"])
    count.reset("two")
    assert count.counts() == {"one": 1}


def test_a_number_that_outgrows_its_format_and_a_defect_are_counted_and_tell_nothing(tmp_path: Path) -> None:
    policy = SitePolicy.from_dict({"data_sets": {"d": {"path": "d.csv"}}}, workspace=tmp_path, site="a")
    error = CapacityExceeded("HISTOGRAM: a value is larger than 2^90")
    with pytest.raises(DataRefusal) as refusal, reading_rows(policy, "masks", ("d", None, "unknown")):
        raise error
    assert str(refusal.value) == error_text(error) == reason_of(error) == ROWS_TEXT
    with pytest.raises(ZeroDivisionError), reading_rows(policy, "masks", ("d",)):
        raise ZeroDivisionError
    with pytest.raises(DataRefusal) as refusal, reading_rows(policy, "dp_trusted", ("d",)):
        raise ZeroDivisionError
    assert str(refusal.value) == error_text(refusal.value) == ROWS_TEXT
    with pytest.raises(JobAborted), reading_rows(policy, "masks", ("d",)):
        raise JobAborted("another site failed")
    assert RefusalCount(policy).counts() == {"d": 3}


def test_the_registry_says_no_more_than_that_it_refuses(tmp_path: Path) -> None:
    """Whether data count as changed depends on every row, as the job reads it: another list of categories asks."""
    federation = federation_of(tmp_path, with_value("c", "z"))
    lists = {"features": ["a", "c"], "unknown_category_is_missing": True}
    succeed(federation.run(job(**lists, categories={"c": ["x", "y"]}), "first"))
    outcomes = federation.run(job(**lists, categories={"c": ["x", "y", "z"]}), "second")
    refused = {site: text for site, text in texts(outcomes).items() if isinstance(outcomes[site], DataRefusal)}
    assert refused["site-1"] == REGISTRY_TEXT
    log = federation.workspace("site-1") / "runs" / "second" / "evidence"
    ends = [json.loads(line) for path in log.iterdir() for line in path.read_text().splitlines() if '"end"' in line]
    assert [end["reason"] for end in ends if end["type"] == "end"] == [REGISTRY_TEXT[: len(ends[0]["reason"])]]


# ------------------------------------------------------------------------------------------


def counts_at(federation: Federation, site: str, question: Question = Question.ROWS) -> dict[str, int]:
    return RefusalCount(SitePolicy.load(federation.workspace(site), site)).counts(question)


def floored(folder: Path, **policy: object) -> Federation:
    consents = {"recompute_with_changes": True}
    policy = {
        "min_effective_rows": 10,
        "min_rows_per_node": 0,
        "data_refusals_per_month": 2,
        "consents": consents,
        **policy,
    }
    return Federation.of(folder, policy=policy, train=table())


def kinds_of(frames: list, site: str) -> set[str]:
    return {unpack(data).kind.name for sender, data in frames if sender == site}


@pytest.mark.parametrize("peers_floor", [91, *slow(10**6), 2**53])
def test_a_peers_floor_does_not_use_up_a_sites_refusals(tmp_path: Path, peers_floor: int) -> None:
    """Site-3 asks for more rows than there are, until no job of anybody could look at the rows of site-1."""
    federation = floored(tmp_path)
    federation.set_policy("site-3", min_effective_rows=peers_floor, data_refusals_per_month=1000)
    for number in range(2):
        outcomes = federation.run(job(), f"attack-{number}")
        assert all(type(outcome) is TooFewRows and str(outcome) == TOO_FEW for outcome in outcomes.values())
    assert counts_at(federation, "site-1") == {} and counts_at(federation, "site-1", Question.DEMAND) == {"train": 2}
    assert counts_at(federation, "site-3") == {"train": 2}, "there it is the site's own policy"
    frames: list = []
    outcomes = federation.run(job(), "one-too-many", frames=frames)
    assert type(outcomes["site-1"]) in (PolicyRefusal, JobAborted) and "than its own policy does" in str(
        outcomes["site-1"]
    )
    assert "EFFECTIVE_ROWS" not in kinds_of(frames, "site-1"), "no further count may leave the site"
    federation.set_policy("site-3", min_effective_rows=10)
    succeed(federation.run(job(), "honest"))


def test_a_jobs_sample_does_not_use_up_a_sites_refusals(tmp_path: Path) -> None:
    federation = floored(tmp_path)
    for number in range(2):
        params = {"objective": "binary:logistic", "max_depth": 2, "subsample": 10.0 ** -(3 + number)}
        assert isinstance(federation.run(job(params=params), f"attack-{number}")["site-1"], TooFewRows)
    assert counts_at(federation, "site-1") == {} and counts_at(federation, "site-1", Question.DEMAND) == {"train": 2}
    outcome = federation.run(job(params=params), "one-too-many")["site-1"]
    assert type(outcome) in (PolicyRefusal, JobAborted) and "bring subsample nearer" in str(outcome)
    succeed(federation.run(job(), "honest"))
    RefusalCount(SitePolicy.load(federation.workspace("site-1"), "site-1")).reset("train")
    assert counts_at(federation, "site-1", Question.DEMAND) == {}


def test_what_a_sites_own_rows_decide_is_counted_as_before(tmp_path: Path) -> None:
    """A weight column of few ones, under this site's own floor; one of zeros at the other sites says nothing."""
    federation = floored(tmp_path)
    few = table().assign(w=0.0)
    few.loc[::30, "w"] = 1.0
    federation.give_data("train", few)
    outcomes = federation.run(job(weight="w"), "few")
    assert {outcome.decided_by for outcome in outcomes.values()} == {Decider.OWN_ROWS}
    assert all(counts_at(federation, site) == {"train": 1} for site in SITES)
    elsewhere = table().assign(w=0.0)
    elsewhere.loc[:29, "w"] = 1.0
    federation.give_data("train", elsewhere)
    outcomes = federation.run(job(weight="w"), "elsewhere")
    deciders = {site: outcome.decided_by for site, outcome in outcomes.items()}
    assert deciders == {"site-1": Decider.OTHERS, "site-2": Decider.OWN_ROWS, "site-3": Decider.OWN_ROWS}
    assert counts_at(federation, "site-1") == {"train": 1} and counts_at(federation, "site-2") == {"train": 2}


def test_more_sites_than_there_are_cannot_be_asked_for_at_the_cost_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site-3 lies in its terms: its own policy would refuse the job."""
    federation, real = floored(tmp_path), SitePolicy.floors
    lie = lambda policy, n: replace(real(policy, n), sites=9 if policy.site == "site-3" else 3)  # noqa: E731
    monkeypatch.setattr(SitePolicy, "floors", lie)
    frames: list = []
    outcomes = federation.run(job(), frames=frames)
    assert type(outcomes["site-1"]) in (PolicyRefusal, JobAborted) and TOO_FEW in str(outcomes["site-1"])
    assert "EFFECTIVE_ROWS" not in kinds_of(frames, "site-1")
    assert counts_at(federation, "site-1") == counts_at(federation, "site-1", Question.DEMAND) == {}


def test_a_false_count_of_a_peer_does_not_use_up_the_refusals_of_a_site_with_rows_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ProtectedSums.sum_counts

    def lying(sums: ProtectedSums, kind: Kind, counts: np.ndarray) -> np.ndarray:
        if kind is Kind.EFFECTIVE_ROWS and sums._channel.site == "site-3":
            counts[:2] = 1, -(10**6)
        return real(sums, kind, counts)

    monkeypatch.setattr(ProtectedSums, "sum_counts", lying)
    federation = floored(tmp_path)
    outcomes = federation.run(job())
    assert outcomes["site-1"].decided_by is Decider.OTHERS and str(outcomes["site-1"]) == TOO_FEW
    assert counts_at(federation, "site-1") == counts_at(federation, "site-1", Question.DEMAND) == {}


# -- leaves that are labels -------------------------------------------------------------------------------------------


ADAPTIVE = ({"objective": "reg:absoluteerror"}, {"objective": "reg:quantileerror", "quantile_alpha": 0.3})


def lone_label() -> pd.DataFrame:
    """Rows of which one, the last of site-3, stands alone on one side of every cut that matters."""
    frame = table().assign(y=0.0)[["a", "b", "y"]]
    frame.loc[len(frame) - 1, ["a", "y"]] = [50.0, 37.25]
    return frame


@pytest.mark.parametrize("objective", ADAPTIVE)
def test_a_leaf_that_is_one_rows_label_needs_every_sites_consent(tmp_path: Path, objective: dict) -> None:
    params = {**objective, "max_depth": 1, "eta": 1.0, "base_score": 0.0, "min_child_weight": 0.0, "max_bin": 8}
    attack = job(params=params, cuts="uniform", cut_bounds={"a": [-4.0, 60.0], "b": [-4.0, 4.0]})
    consents = {"second_quantile_search": True}
    open_sites = Federation(tmp_path / "open", policy={**FEW_ROWS, "consents": {**consents, "exact_leaves": True}})
    open_sites.give_data("train", lone_label())
    succeed(open_sites.run(attack))
    model = json.loads(open_sites.model())
    (tree,) = model["learner"]["gradient_booster"]["model"]["trees"]
    assert 37.25 in tree["base_weights"] or 37.25 in tree["split_conditions"], "the attack shows nothing"

    federation = Federation.of(tmp_path / "default", policy={**FEW_ROWS, "consents": consents}, train=lone_label())
    federation.set_policy("site-1", consents={**consents, "exact_leaves": True})
    frames: list = []
    outcomes = federation.run(attack, frames=frames)
    for site in SITES[1:]:
        text = str(outcomes[site])
        assert isinstance(outcomes[site], (PolicyRefusal, JobAborted))
        assert "consents.exact_leaves" in text and "Remedy: use reg:pseudohubererror" in text
    assert not [site for site, _ in frames if site != "site-1"], "a site without the consent sends nothing"


@pytest.mark.parametrize("profile", BUILT_IN)
@pytest.mark.parametrize("objective", ADAPTIVE)
def test_the_consent_is_asked_before_any_row_is_read(
    tmp_path: Path, profile: str, objective: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise ConfigurationError("rows are read")

    monkeypatch.setattr(preparation, "load_table", read)
    table().to_csv(tmp_path / "d.csv", index=False)
    sets = {"train": {"path": "d.csv"}}
    with pytest.raises(PolicyRefusal, match=r"consents\.exact_leaves"):
        preparation.allow(job(profile=profile, params=objective), place_of(tmp_path, data_sets=sets))
    consenting = place_of(tmp_path, data_sets=sets, consents={"exact_leaves": True})
    with pytest.raises(ConfigurationError, match="rows are read"):
        preparation.allow(job(profile=profile, params=objective), consenting).load()
