"""A tuning in FLARE's simulator beside separate jobs: 8 trials x 5 folds x 50 rounds on the credit set at three sites.

    python -m tests.bench.bench_tuning --rows ../shared/data/credit2.parquet --folder /tmp/tuning_bench

The last line is a JSON object, in seconds of wall time: ``tuning_s`` of the whole job, ``trial_s`` of its trials,
``separate_job_s`` of single jobs and ``separate_jobs_s``, what so many of them would take as the tuning trains models.

Separate jobs are trainings of the first trials on four fifths of the rows, evaluated on the fifth; so many as
``--separate`` says are run, and 40 of them are taken to last as long as 40 times their mean. Each begins with the start
of FLARE's processes, a session and a search of cut points. Their fold is cut by the order of the rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pandas as pd
from nvflare.recipe import SimEnv

from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe, JobRecipe, TuningRecipe
from nvflare_plugins.site.setup import SetupOptions, set_up

SITES = ("site-1", "site-2", "site-3")
PARAMS = {"objective": "binary:logistic", "eval_metric": "logloss", "max_bin": 64}
TRIALS = [{"eta": eta, "max_depth": depth} for depth in (3, 4) for eta in (0.05, 0.1, 0.2, 0.3)]
FOLDS, ROUNDS = 5, 50


def deal(frame: pd.DataFrame, folder: Path, name: str) -> None:
    """Write each site its third of the rows."""
    for site, rows in zip(SITES, np.array_split(np.arange(len(frame)), 3), strict=True):
        (folder / site).mkdir(parents=True, exist_ok=True)
        frame.iloc[rows].to_parquet(folder / site / f"{name}.parquet", index=False)


def timed(recipe: JobRecipe, folder: Path, names: tuple[str, ...]) -> tuple[float, Path]:
    """Run a job in a fresh workspace; return its wall time in seconds and where site-1 keeps its run."""
    workspace = folder / recipe.name
    shutil.rmtree(workspace, ignore_errors=True)
    paths = {name: str(folder.absolute() / "data" / "{site}" / f"{name}.parquet") for name in names}
    set_up(workspace, SetupOptions(paths, consents=("tuning=2000",)))
    started = time.perf_counter()
    recipe.execute(SimEnv(num_clients=3, workspace_root=str(folder)))
    return time.perf_counter() - started, workspace / "site-1" / "veilboost_runs" / "simulate_job"


def main() -> None:
    """Run the tuning and some separate jobs, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="a Parquet file with a column label")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=len(TRIALS), help="trials of the tuning")
    parser.add_argument("--separate", type=int, default=3, help="separate jobs to run")
    args = parser.parse_args()
    frame = pd.read_parquet(args.rows).sample(frac=1, random_state=0)
    held_out = np.arange(len(frame)) % FOLDS == 0
    for name, part in (("all", frame), ("kept", frame[~held_out]), ("held_out", frame[held_out])):
        deal(part, args.folder / "data", name)
    whole = {"data_set": "all", "label": "label", "params": PARAMS, "trials": TRIALS[: args.trials], "folds": FOLDS}
    seconds, run = timed(TuningRecipe("tuning", **whole, num_rounds=ROUNDS), args.folder, ("all",))
    trials = [one["seconds"] for one in json.loads((run / "tuning.json").read_text())["trials"]]
    separate = []
    for number, trial in enumerate(TRIALS[: args.separate]):
        job = HorizontalXGBRecipe(
            f"separate_{number}",
            data_set="kept",
            eval_data_set="held_out",
            label="label",
            params={**PARAMS, **trial},
            num_rounds=ROUNDS,
            tracking=False,
        )
        separate.append(timed(job, args.folder, ("kept", "held_out"))[0])
    result = {
        "trials": args.trials,
        "folds": FOLDS,
        "rounds": ROUNDS,
        "tuning_s": round(seconds, 1),
        "trial_s": [round(one, 1) for one in trials],
        "separate_job_s": [round(one, 1) for one in separate],
        "separate_jobs_s": round(float(np.mean(separate)) * args.trials * FOLDS) if separate else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
