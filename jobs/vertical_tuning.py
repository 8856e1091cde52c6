"""Tuning of a vertical job: run it in the simulator, or write the job folder anew.

    python jobs/vertical_tuning.py --run --workspace DIR     three trials; three sites hold columns of the same rows
    python jobs/vertical_tuning.py --write                   writes jobs/vertical_tuning/

Then DIR/vertical_tuning/site-1/veilboost_runs/simulate_job holds tuning.html, tuning.csv, tuning.json, train_best.py.
Elsewhere each policy must name the data set ``loan_columns`` with an id column, allow the profile ``elgamal``, consent
to ``exact_bins`` and allow 3 trials x 3 folds x 5 rounds = 45 (``tuning``).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nvflare_plugins.recipes.examples import LOAN_COLUMNS, SITES, write_loan_columns
from nvflare_plugins.recipes.recipe import VerticalTuningRecipe, write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
NAME, DATA_SET = "vertical_tuning", LOAN_COLUMNS
SIZE = 45


def recipe() -> VerticalTuningRecipe:
    """Return the job: three parameter sets on three folds, by log loss."""
    return VerticalTuningRecipe(
        NAME,
        active=SITES[0],
        data_set=DATA_SET,
        label="label",
        alignment="first",
        params={"objective": "binary:logistic", "eval_metric": "logloss", "max_bin": 32},
        trials=[{"eta": 0.3, "max_depth": 2}, {"eta": 0.3, "max_depth": 3}, {"eta": 0.6, "max_depth": 2}],
        folds=3,
        num_rounds=5,
        profile="elgamal",
    )


def write_data(folder: Path) -> SetupOptions:
    """Deal columns out to three sites; return what their policies must say."""
    write_loan_columns([folder / site for site in SITES])
    paths = {DATA_SET: str(folder.absolute() / "{site}" / f"{DATA_SET}.parquet")}
    return SetupOptions(
        paths, ids={DATA_SET: "loan"}, added_profiles=("elgamal",), consents=("exact_bins", f"tuning={SIZE}")
    )


def write(folder: Path) -> Path:
    """Write the job folder below a folder, replacing what was there under its name."""
    return write_folder(recipe(), folder)


def start(args: Namespace) -> tuple[VerticalTuningRecipe, int]:
    """Make the sites' data and policies in the simulator's workspace; return the job."""
    job = recipe()
    set_up(args.workspace / job.name, write_data(args.workspace / "data"))
    return job, len(SITES)


if __name__ == "__main__":
    run_script(__doc__, lambda args: [write(FOLDER)], start)
