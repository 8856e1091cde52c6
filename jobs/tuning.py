"""Tuning and cross validation over several sites: run it in the simulator, or write the job folder anew.

    python jobs/tuning.py --run --workspace DIR               eight trials on invented rows of the credit set
    python jobs/tuning.py --run --workspace DIR --file FILE   on rows of a file (.csv, .parquet) with a column label
    python jobs/tuning.py --run --workspace DIR --workers 2   site-2 on so many Dask workers of this machine
    python jobs/tuning.py --write                             writes jobs/tuning/

Then DIR/tuning/site-1/veilboost_runs/simulate_job holds tuning.html, tuning.csv, tuning.json and train_best.py.
Elsewhere a site's policy must name the data set ``loans`` and allow 8 trials x 5 folds x 50 rounds = 2,000, as
``veilboost site-setup DIR --data-set loans=PATH --consent tuning=2000`` writes it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pandas as pd

from nvflare_plugins.recipes.examples import LOANS, SITES, invented_credit, write_credit
from nvflare_plugins.recipes.local_workers import OPTION, put_on_cluster
from nvflare_plugins.recipes.recipe import TuningRecipe, write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
NAME, DATA_SET = "tuning", LOANS
SIZE = 2000


def recipe() -> TuningRecipe:
    """Return the job: eight parameter sets on five folds, by log loss."""
    return TuningRecipe(
        NAME,
        data_set=DATA_SET,
        label="label",
        params={"objective": "binary:logistic", "eval_metric": "logloss", "max_bin": 64},
        search={
            "eta": {"low": 0.03, "high": 0.3, "log": True},
            "max_depth": [2, 3, 4, 5],
            "lambda": {"low": 0.1, "high": 10.0, "log": True},
            "colsample_bytree": [0.6, 0.8, 1.0],
        },
        n_trials=8,
        folds=5,
        num_rounds=50,
        early_stopping_rounds=10,
    )


def write_data(folder: Path, frame: pd.DataFrame) -> SetupOptions:
    """Deal rows out to three sites; return what their policies must say."""
    write_credit(frame, [folder / site for site in SITES], DATA_SET)
    paths = {DATA_SET: str(folder.absolute() / "{site}" / f"{DATA_SET}.parquet")}
    return SetupOptions(paths, consents=(f"tuning={SIZE}",))


def write(folder: Path) -> Path:
    """Write the job folder below a folder, replacing what was there under its name."""
    return write_folder(recipe(), folder)


def read(args: Namespace) -> pd.DataFrame:
    """Return the rows of the file that the command line names, or invented ones."""
    if args.file is None:
        return invented_credit(6_000)
    return pd.read_parquet(args.file) if args.file.suffix == ".parquet" else pd.read_csv(args.file)


def start(args: Namespace) -> tuple[TuningRecipe, int]:
    """Make the sites' data and policies in the simulator's workspace; return the job."""
    job = recipe()
    set_up(args.workspace / job.name, write_data(args.workspace / "data", read(args)))
    if args.workers is not None:
        put_on_cluster(args.workspace / job.name, "site-2", args.workers)
    return job, len(SITES)


if __name__ == "__main__":
    file = {"type": Path, "metavar": "FILE", "help": "rows for all sites, with a column label"}
    run_script(__doc__, lambda args: [write(FOLDER)], start, options={"--file": file, "--workers": OPTION})
