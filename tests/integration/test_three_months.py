"""Three months of a hospital and of a privacy engineer: train, use, look at new rows, train again, go back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.cli.main import main
from tests.integration.test_next_month import POLICY, give, grown, thirds
from tests.support.federation import Federation, succeed
from tests.support.horizontal_jobs import job, table
from tests.support.private_federation import BUDGET, DATA, PrivateFederation, frame_of, job_of

pytestmark = pytest.mark.slow
SITE = "site-1"


def veilboost(federation: Federation, *words: str | Path) -> int:
    options = ["--workspace", str(federation.workspace(SITE)), "--site", SITE]
    return main([*map(str, words), *options])


def keep_runs(federation: Federation) -> None:
    """Let the policies name the folder in which these federations keep runs."""
    federation.set_policies(runs="runs")


def scores(federation: Federation, name: str, rows: Path) -> np.ndarray:
    out = rows.with_name("scores.csv")
    assert veilboost(federation, "predict", name, rows, "--out", out, "--ignore", "y") == 0
    return pd.read_csv(out).iloc[:, -1].to_numpy()


def test_three_months_of_a_hospital(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    august, september, october = (table(n, seed=seed) for seed, n in enumerate((600, 1200, 300)))
    federation = Federation.of(tmp_path, policy=POLICY, train=august)
    keep_runs(federation)
    succeed(federation.run(job(), "august"))
    assert veilboost(federation, "models", "add", "outcome", "august") == 0

    # September: the new rows are like the old ones, and many; all rows are trained on again, without a consent.
    new = tmp_path / "september.parquet"
    september.to_parquet(new, index=False)
    assert veilboost(federation, "drift", "outcome", new, "--out", tmp_path / "drift.html") == 0
    give(federation, grown(august, thirds(september)))
    succeed(federation.run(job(), "september"))
    assert veilboost(federation, "models", "add", "outcome", "september") == 0
    second = scores(federation, "outcome", new)

    # October: few rows, so that the model gets more trees from them alone. They are of another kind: go back.
    moved = october.assign(f0=october.f0 + 3)
    federation.give_data("october", moved)
    few = replace(job(num_rounds=2), data_set="october", continue_from="september")
    succeed(federation.run(few, "october"))
    assert veilboost(federation, "models", "add", "outcome", "october") == 0
    assert not np.array_equal(scores(federation, "outcome", new), second)
    latest = tmp_path / "october.parquet"
    moved.to_parquet(latest, index=False)
    assert veilboost(federation, "drift", "outcome@2", latest) == 3
    assert veilboost(federation, "models", "rollback", "outcome", "2") == 0
    assert np.array_equal(scores(federation, "outcome", new), second)
    capsys.readouterr()
    assert veilboost(federation, "models") == 0
    listed = capsys.readouterr().out
    assert "outcome@1 " in listed and "outcome@2*" in listed and "outcome@3 " in listed


def test_three_months_of_a_privacy_engineer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = frame_of().assign(person=np.arange(900))
    federation = PrivateFederation(tmp_path, frame)
    later = "patients_09"
    federation.give_data(later, frame.assign(person=np.arange(900) + np.where(np.arange(900) % 3 == 0, 0, 10_000)))
    for site in federation.sites:
        sets = {name: {"path": f"{name}.parquet", "id": "person", "privacy": BUDGET} for name in (DATA, later)}
        federation.set_policy(site, data_sets=sets, runs="runs")
    features = ["x0", "x1", "x2", "x3", "colour"]
    federation.run_private(job_of(features=features), "august").succeed()
    assert veilboost(federation, "models", "add", "readmission", "august") == 0
    spent = federation.ledger(SITE).spent().epsilon(BUDGET["delta"])

    # September: new persons have a budget of their own; that of August stays as it was.
    federation.run_private(job_of(features=features, data_set=later), "september").succeed()
    assert federation.ledger(SITE).spent().epsilon(BUDGET["delta"]) == spent
    record = federation.record(SITE, "september")
    assert record.data[0].rows == 200, "a third of the persons are August's"
    assert veilboost(federation, "models", "add", "readmission", "september") == 0

    # October: what is left of the budget does not suffice for a large job, which is refused before anything leaves.
    run = federation.run_private(job_of(features=features, epsilon=6.0), "october")
    assert isinstance(run.error(SITE), PolicyRefusal)
    assert federation.ledger(SITE).spent().epsilon(BUDGET["delta"]) == spent
    assert veilboost(federation, "models", "rollback", "readmission", "1") == 0
    capsys.readouterr()
    assert veilboost(federation, "models") == 0
    assert "readmission@1*" in capsys.readouterr().out
