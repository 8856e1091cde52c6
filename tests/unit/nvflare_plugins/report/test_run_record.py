"""``run.json``: read back as written, strict, never half-written."""

from __future__ import annotations

import dataclasses
import json

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.pages.run_record import (
    TRAINING,
    BestRound,
    Curve,
    DataFacts,
    LeafNoise,
    ReportSection,
    RoundRow,
    RunRecord,
    Spending,
    TrafficRow,
)


def example() -> RunRecord:
    return RunRecord(
        job_id="job",
        attempt="00ff",
        site="site-1",
        sites=("site-1", "site-2", "site-3"),
        profile="masks",
        params={"max_depth": 5, "monotone_constraints": [0, 1]},
        rounds=(RoundRow(0, 0.5, {"eval-auc": 0.75}, {"xgboost": 0.2, "network": 0.1}),),
        traffic=(TrafficRow("HISTOGRAM", "MASKED", True, 5, 1000, 1000, 0.3),),
        comparison=(Curve("central", "auc", (0.7, 0.8)),),
        notes=("a note",),
        started="2026-11-22T10:00:00+00:00",
        consents=("exact_cuts",),
        data=(DataFacts("rows", TRAINING, 7, ("a", "b"), {"b": 2}, {"b": ("x", "y")}, "y", ("no", "yes"), "w"),),
        statement={"purpose": "care"},
        spending=(Spending("rows", 2.0, 1e-6, 0.5), Spending("other", 2.0, 1e-6, None)),
        sections=(ReportSection("counts", scores=((0.0, 3, 1), (0.5, 1, 3))),),
        name="credit-2",
        leaf_noise=LeafNoise("0" * 64, "newton", "clipped", 3.0, 1.5, 5.0, 2.0, 0.3),
    )


def test_round_trip(tmp_path):
    example().write(tmp_path)
    assert RunRecord.read(tmp_path) == example()
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_the_best_round_is_the_largest_area_and_the_smallest_loss_unless_training_was_stopped_early() -> None:
    values = [(0.7, 0.5), (0.9, 0.4), (0.8, float("nan")), (0.85, 0.45)]
    rounds = tuple(RoundRow(n, 1.0, {"eval-auc": a, "eval-logloss": b}) for n, (a, b) in enumerate(values))
    run = RunRecord("job", "a", "s", ("s",), "masks", rounds=rounds)
    assert run.best() == BestRound(1, "eval-logloss", 0.4) and run.best("eval-auc") == BestRound(1, "eval-auc", 0.9)
    stopped = dataclasses.replace(run, best_round=3)
    assert stopped.best() == BestRound(3, "eval-logloss", 0.45) and stopped.best("eval-auc") == run.best("eval-auc")
    assert dataclasses.replace(run, best_round=2).best() == run.best()  # where it has no value
    assert run.best("other") is None and dataclasses.replace(run, rounds=()).best() is None


def test_metric_that_is_not_a_number_becomes_null(tmp_path):
    RunRecord("job", "a", "s", ("s",), "masks", rounds=(RoundRow(0, 1.0, {"eval-auc": float("nan")}),)).write(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["rounds"][0]["metrics"] == {"eval-auc": None}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"surprise": 1},
        {"rounds": [{"round": 0}]},
        {"rounds": 5},
        {"sites": None},
        {"data": [{"name": "rows"}]},
        {"data": [5]},
        {"data": [{"name": "rows", "use": "training", "rows": "many"}]},
        {"spending": [{"data_set": "rows"}]},
        {"spending": [{"data_set": "rows", "epsilon": "x", "delta": 0.1, "spent": None}]},
        {"statement": ["a"]},
        {"consents": 5},
        {"name": ["a"]},
        {"sections": [{"title": "counts", "scores": [[0.0, 1]]}]},
    ],
)
def test_other_documents_are_refused(change):
    with pytest.raises(ConfigurationError):
        RunRecord.from_dict({**example().to_dict(), **change})


def test_a_record_of_before_0_4_is_refused_by_name():
    document = example().to_dict()
    for name in ("started", "finished", "policy_hash", "consents", "data", "statement", "spending"):
        del document[name]
    with pytest.raises(ConfigurationError, match=r"before 0\.4 wrote it.*with VeilBoost 0\.10"):
        RunRecord.from_dict(document)


def test_missing_or_broken_file(tmp_path):
    with pytest.raises(ConfigurationError, match="not the folder of a run"):
        RunRecord.read(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not valid JSON"):
        RunRecord.read(tmp_path)
