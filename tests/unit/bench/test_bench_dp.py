"""The benchmark on a stranger's file, from the command line to its last line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.kinds.private_trees.methods import dp_rf, dp_tr_newton
from tests.bench import bench_dp
from tests.bench.dp_published import authors_best, published_methods

ASKED_FOR = {
    "auc",
    "log_loss",
    "calibration_error",
    "reliability",
    "best_published",
    "wins",
    "ties",
    "losses",
    "seconds_per_model",
    "rounds",
    "epsilon_spent",
    "ablation",
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few trees, and two published methods; all else as in the benchmark."""
    arms = {
        name: (replace(method, n_trees=10, batch_size=min(5, method.batch_size)), trust)
        for name, (method, trust) in bench_dp.ARMS.items()
    }
    monkeypatch.setattr(bench_dp, "ARMS", arms)
    monkeypatch.setattr(bench_dp, "DEFAULT_2026_12", arms["trusted"][0])
    monkeypatch.setattr(bench_dp, "EPSILONS", (1.0,))
    monkeypatch.setattr(bench_dp, "published_methods", lambda n_features: iter([dp_rf(4), dp_tr_newton(4)]))
    monkeypatch.setattr(bench_dp, "speed", lambda: {"ratio": 1.0})


def test_the_last_line_holds_what_was_asked_for(small: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(400, 3)), columns=["a", "b", "c"])
    table["bought"] = np.where(table.a + rng.normal(size=400) > 0, "yes", "no")
    table["town"] = np.where(table.b > 0, "Köln", "Bonn")
    table.loc[:19, "c"] = np.nan
    table.to_csv(tmp_path / "shop.csv", index=False)
    arguments = f"--sets {tmp_path / 'shop.csv'} --label bought --splits 2 --repeats 1 --jobs 1".split()
    bench_dp.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "shop: 20 of 400 rows have gaps and are dropped (5.0 %); columns town are replaced by ranks of values"
    )
    assert "delta = 1/n" in lines[1] and "bounds are taken from the training rows" in lines[1]
    result = json.loads(lines[-1])
    assert result["prepared"] == lines[:1]
    assert result.keys() >= ASKED_FOR
    for measured in ("auc", "log_loss", "calibration_error"):
        assert result[measured]["distributed"]["shop 1"].keys() == {"mean", "sd"}
        assert 0 < result[measured]["distributed"]["shop 1"]["mean"] < 1
    expected, observed = np.transpose(result["reliability"]["distributed"]["shop 1"])
    assert expected.size == 10 and (np.diff(expected) >= 0).all() and 0 <= observed.min() < observed.max() <= 1
    assert result["rounds"] == {"trusted": 11, "distributed": 11, "distributed_2026_11": 11, "few_rounds": 3}
    assert result["best_published"]["shop 1"]["method"] in ("DP-RF", "DP-TR Newton")
    assert result["best_published"]["shop 1"]["authors_code"] is None
    for arm in ("trusted", "distributed", "few_rounds"):
        assert sum(result[outcome][arm] for outcome in bench_dp.OUTCOMES) == 1
        assert 0.99 < result["epsilon_spent"][arm]["shop 1"] <= 1.0


def test_a_wrong_label_ends_with_one_clear_line(tmp_path: Path) -> None:
    pd.DataFrame({"x": [1.0], "y": [0]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(SystemExit, match=r"bench-dp: .*no column 'label'"):
        bench_dp.main(["--sets", str(tmp_path / "a.parquet")])


def test_every_best_cell_of_the_authors_is_among_the_methods_that_are_trained_anew() -> None:
    names = {method.name for method in published_methods(23)}
    for epsilon in bench_dp.EPSILONS:
        for data_set in ("credit2", "adult", "bank"):
            assert authors_best(data_set, epsilon)[0] in names
    assert authors_best("shop", 0.1) is None
