"""Plans of tunings."""

from __future__ import annotations

import json
from pathlib import Path

from nvflare_plugins.cli.main import main
from nvflare_plugins.recipes.recipe import TuningRecipe, write_folder

REPOSITORY = Path(__file__).parents[4]


def cli(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def test_a_tuning_is_priced_by_its_trainings(capsys):
    folder = REPOSITORY / "jobs" / "tuning"
    assert cli(folder) == 1 and "--rows and --features" in capsys.readouterr().err
    assert cli(folder, "--rows", 4999, "--features", 23) == 1 and "fewer than 1,000" in capsys.readouterr().err
    assert cli(folder, "--rows", 6000, "--features", 23, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tuning"] == 8 * 5 * 50 and figures["seconds"] > 0
    # Each of 2,000 rounds at least the histograms of a root and of one child, 23 features of 64 bins.
    assert figures["bytes_sent"] > 2000 * 2 * 23 * 64 * 16
    assert cli(folder, "--rows", 6000, "--features", 23) == 0
    shown = capsys.readouterr().out
    assert "8 trials x 5 folds x 50 rounds = 2,000" in shown and "each at least 1,000 of all sites" in shown
    assert "its rows are held once\n" in shown


def test_a_tuning_by_xgboost_holds_its_rows_once_for_each_fold(capsys, tmp_path):
    recipe = TuningRecipe(
        "t", data_set="d", label="y", params={"max_bin": 16}, trials=[{"max_depth": 2}], num_rounds=2, engine="xgboost"
    )
    assert cli(write_folder(recipe, tmp_path), "--rows", 6000, "--features", 5) == 0
    assert "at a site: its rows are held once for each fold" in capsys.readouterr().out
