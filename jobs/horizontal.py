"""The horizontal jobs of this folder, one per profile: run one in the simulator, or write the job folders anew.

    python jobs/horizontal.py --write                            writes jobs/horizontal_<profile>/
    python jobs/horizontal.py --run masks --workspace DIR        runs one over three simulated sites
    python jobs/horizontal.py --run masks --workspace DIR --workers 2

DIR must have been prepared by ``veilboost site-setup DIR/horizontal_masks --data-set breast=... --data-set
breast_test=...``. The job folders are what ``nvflare simulator`` and ``nvflare job submit`` take as they stand.

With ``--workers`` site-2 has a Dask cluster of its own, with so many workers on this machine (the extra ``cluster``);
jobs/CLUSTER.md says how to have a real one.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nvflare_plugins.recipes.local_workers import OPTION, put_on_cluster
from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe, write_folder
from nvflare_plugins.recipes.script import run_script

FOLDER = Path(__file__).resolve().parent
PROFILES = ("masks", "bfv", "ckks", "plain")


def recipe(profile: str) -> HorizontalXGBRecipe:
    """Return the job of one profile: breast cancer, by sites that call their data sets breast and breast_test."""
    return HorizontalXGBRecipe(
        f"horizontal_{profile}",
        data_set="breast",
        eval_data_set="breast_test",
        label="target",
        params={"objective": "binary:logistic", "eval_metric": ["auc", "logloss"], "max_depth": 3, "eta": 0.3},
        num_rounds=10,
        profile=profile,
    )


def write(folder: Path) -> list[Path]:
    """Write all job folders below a folder, replacing what was there under their names."""
    return [write_folder(recipe(profile), folder) for profile in PROFILES]


def start(args: Namespace) -> tuple[HorizontalXGBRecipe, int]:
    """Return the job for three sites; give one of them workers, if the command asks for them."""
    job = recipe(args.run)
    if args.workers is not None:
        put_on_cluster(args.workspace / job.name, "site-2", args.workers)
    return job, 3


if __name__ == "__main__":
    run_script(__doc__, lambda args: write(FOLDER), start, PROFILES, {"--workers": OPTION})
