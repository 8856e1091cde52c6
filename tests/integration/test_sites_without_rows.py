"""Sites without rows, or with rows of one class, take part in horizontal jobs; only their own log says so."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.base.errors import TooFewRows
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.row_floors import TOO_FEW
from nvflare_plugins.wire.envelope import unpack
from tests.support import exact_jobs
from tests.support.examples import quick
from tests.support.federation import Federation, central_model, leaf_difference, succeed

ROWS = 120
SITES = 4
ROUNDS = 2
EQUAL = 2e-7  # jobs/MODEL.md says so
METRICS = ["logloss", "auc", "aucpr", "error"]
LOG_LINES = ("takes part without rows", "are of one class")


def table(seed: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": rng.normal(size=ROWS), "b": rng.normal(size=ROWS), "w": rng.gamma(2, size=ROWS)})
    frame.loc[::11, "b"] = np.nan
    return frame.assign(y=(frame.a + rng.normal(size=ROWS) > 0).astype(float))


def spread(frame: pd.DataFrame, lacking: str) -> list[np.ndarray]:
    """Give three sites all the rows, and the second what it is to have."""
    everything = np.arange(ROWS)
    mine = everything[:0] if lacking == "rows" else np.flatnonzero(frame.y == 1)[:20]
    first, third, fourth = np.array_split(np.setdiff1d(everything, mine), 3)
    return [first, mine, third, fourth]


def federation_of(folder: Path, lacking: str) -> tuple[Federation, pd.DataFrame]:
    frame = table()
    federation = Federation(folder, SITES, policy={"share_data_errors": False})
    federation.give_data("train", frame, spread(frame, lacking))
    evaluated = table(4)
    federation.give_data("eval", evaluated, spread(evaluated, lacking))
    return federation, frame


def job(**changes: object) -> HorizontalJob:
    return exact_jobs.job(
        **{"params": {"objective": "binary:logistic", "max_depth": 3}, "num_rounds": ROUNDS, **changes}
    )


SPACED = {"cuts": "uniform", "cut_bounds": {"a": [-3, 3], "b": [-3, 3]}}


def check_model(federation: Federation, frame: pd.DataFrame, ran: HorizontalJob) -> None:
    columns = ["a", "b", "y", *([ran.weight] if ran.weight else [])]
    central = central_model(frame[columns], "y", ran.params, federation.cuts(), ROUNDS, ran.weight)
    assert leaf_difference(federation.model(), central) <= EQUAL


def sent(frames: list[tuple[str, bytes]], site: str) -> list[tuple]:
    """Return what the server, and through it the others, see of a site's messages: all but their content."""
    unpacked = [unpack(data) for sender, data in frames if sender == site]
    return [(f.kind.name, str(f.moment), f.codec.name, f.n_values, len(f.payload)) for f in unpacked]


@pytest.mark.usefixtures("every_report")
@pytest.mark.parametrize(
    ("profile", "lacking"),
    quick(
        itertools.product(["plain", "masks", "bfv"], ["rows", "a class"]),
        *(("plain", "rows"), ("masks", "a class"), ("bfv", "rows")),
    ),
)
def test_the_model_is_the_pooled_one_and_others_see_no_difference(
    tmp_path: Path, profile: str, lacking: str, caplog: pytest.LogCaptureFixture
) -> None:
    federation, frame = federation_of(tmp_path, lacking)
    params = {"objective": "binary:logistic", "max_depth": 3, "eval_metric": METRICS}
    cuts = SPACED if profile == "bfv" else {}  # under encryption a search is most of the job's time
    ran = job(profile=profile, params=params, eval_data_set="eval", evaluate_training=True, **cuts)
    frames: list[tuple[str, bytes]] = []
    with caplog.at_level(logging.INFO):
        outcomes = succeed(federation.run(ran, frames=frames))
    check_model(federation, frame, ran)
    assert len({str(outcome.summary) for outcome in outcomes.values()}) == 1
    assert len({str(federation.metrics(site)) for site in federation.sites}) == 1
    assert sent(frames, "site-2") == sent(frames, "site-3")
    # Two data sets; each site has a log of its own, and this test all four in one.
    said = [record for record in caplog.records if any(line in record.getMessage() for line in LOG_LINES)]
    assert len(said) == 2 and {record.levelno for record in said} == {logging.WARNING}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".html", ".jsonl"):
            assert not any(line in path.read_text() for line in LOG_LINES)


OBJECTIVES = ["reg:squarederror", "binary:hinge", "count:poisson", "multi:softprob", "reg:pseudohubererror"]


@pytest.mark.parametrize(
    ("objective", "weight"),
    quick(itertools.product(OBJECTIVES, [None, "w"]), *zip(OBJECTIVES, [None, "w", None, "w", None], strict=True)),
)
def test_objectives_and_weights(tmp_path: Path, objective: str, weight: str | None) -> None:
    """XGBoost takes weights of no row for no weights, and would send the count of rows in the place of their weight."""
    federation, frame = federation_of(tmp_path, "rows")
    more = {"num_class": 2} if objective.startswith("multi") else {}
    ran = job(params={"objective": objective, "max_depth": 3, **more}, weight=weight, eval_data_set="eval", **SPACED)
    succeed(federation.run(ran))
    check_model(federation, frame, ran)


@pytest.mark.parametrize(
    "changes",
    [{"params": {"subsample": 0.5}, **SPACED}, {"cuts": "exact"}, {"weight": "w", **SPACED}],
    ids=["drawn", "exact", "weighted"],
)
def test_rounds_that_draw_rows_and_other_ways(tmp_path: Path, changes: dict) -> None:
    federation, _ = federation_of(tmp_path, "rows")
    params = {"objective": "binary:logistic", "max_depth": 3, **changes.get("params", {})}
    changes = {name: value for name, value in changes.items() if name != "params"}
    succeed(federation.run(job(params=params, evaluate_training=True, **changes)))
    assert len(federation.model()) > 0
    # Once it has rows, the difference of two models would be these rows.
    federation.set_policy("site-2", consents={})
    table(9).to_parquet(federation.workspace("site-2") / "train.parquet", index=False)
    assert isinstance(federation.run(job(params=params, **changes), "later")["site-2"], Exception)


def test_a_site_all_of_whose_rows_lack_a_label_takes_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation, frame = federation_of(tmp_path, "a class")
    path = federation.workspace("site-2") / "train.parquet"
    pd.read_parquet(path).assign(y=np.nan).to_parquet(path, index=False)
    entry = {"path": "train.parquet", "drop_unlabelled": True}
    federation.set_policy("site-2", data_sets={"train": entry})
    succeed(federation.run(job()))
    assert "without a label: 20 of 20" in caplog.text and LOG_LINES[0] in caplog.text
    check_model(federation, frame.drop(index=spread(frame, "a class")[1]), job())


def test_floors_count_it_as_no_site_and_do_not_name_it(tmp_path: Path) -> None:
    federation, _ = federation_of(tmp_path, "rows")
    federation.set_policy("site-1", min_sites=SITES)
    outcomes = federation.run(job())
    assert {type(outcome) for outcome in outcomes.values()} == {TooFewRows}
    assert {str(outcome) for outcome in outcomes.values()} == {TOO_FEW}


def test_one_value_of_a_regression_is_no_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation, _ = federation_of(tmp_path, "a class")
    succeed(federation.run(job(params={"objective": "reg:squarederror", "max_depth": 3}, **SPACED)))
    assert not any(line in caplog.text for line in LOG_LINES)
