"""The private jobs of this folder: run one in the simulator, or write the job folders anew.

    python jobs/private_trees.py --prepare --workspace DIR          deals rows out to three sites with budgets
    python jobs/private_trees.py --run default --workspace DIR      runs one over three simulated sites
    python jobs/private_trees.py --write                            writes jobs/private_trees_<name>/

The rows are invented within the bounds, or come from ``--prepare FILE``: a Parquet or CSV file of the UCI set "default
of credit card clients" with the columns named in ``BOUNDS`` and a column ``label`` of 0 and 1. A prepared DIR is what
``nvflare simulator jobs/private_trees_default -w DIR -n 3 -t 3`` takes too.

The bounds below are round numbers after the set's public description and the literature on it, and stand for what a
site's experts would know without the rows. Values outside are clipped.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import copy_folder, make_folder, write_private_table
from nvflare_plugins.recipes.examples import CREDIT, CREDIT_BOUNDS, SITES, invented_credit
from nvflare_plugins.recipes.recipe import PrivateTreesRecipe, write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
DATA_SET = CREDIT
BUDGET = {"epsilon": 2.0, "delta": 1e-5}
METHODS = {"default": ("default", "distributed"), "dp_ebm": ("dp_ebm_newton", "trusted_aggregator")}
"""Name of the job -> its method and trust model."""

BOUNDS = CREDIT_BOUNDS


def recipe(name: str) -> PrivateTreesRecipe:
    """Return one of the jobs."""
    method, trust = METHODS[name]
    return PrivateTreesRecipe(
        f"private_trees_{name}",
        data_set=DATA_SET,
        label="label",
        epsilon=0.5,
        delta=1e-6,
        feature_bounds=BOUNDS,
        method=method,
        trust=trust,
    )


def write(folder: Path) -> list[Path]:
    """Write all job folders below a folder, replacing what was there under their names."""
    return [write_folder(recipe(name), folder) for name in METHODS]


def prepare(frame: pd.DataFrame, workspace: Path) -> None:
    """Deal rows out to the sites of a simulator workspace, whose policy gets a budget and allows the jobs."""
    data = workspace / "local" / "data"  # FLARE empties the rest of a simulator workspace
    make_folder(data)
    shuffled = frame.sample(frac=1, random_state=0)
    for site, rows in zip(SITES, np.array_split(np.arange(len(frame)), len(SITES)), strict=True):
        write_private_table(data / f"{site}.parquet", shuffled.iloc[rows])
    paths = {DATA_SET: str((data / "{site}.parquet").absolute())}
    set_up(workspace, SetupOptions(paths, profiles=("dp_distributed", "dp_trusted"), budgets={DATA_SET: BUDGET}))


def start(args: Namespace) -> tuple[PrivateTreesRecipe, int]:
    """Copy what was prepared to where FLARE looks for it, which is <root>/<job name>; return the job."""
    job, root = recipe(args.run), args.workspace.absolute()
    if not (root / "local").is_dir():
        raise ConfigurationError(f"{root} was not prepared: run --prepare --workspace {root} first")
    if not (root / job.name).exists():
        copy_folder(root / "local", root / job.name / "local")
    return job, len(SITES)


def prepare_workspace(args: Namespace) -> bool:
    """Make a simulator workspace, if asked to, of a file or of invented rows."""
    file = args.prepare
    if file is None:
        return False
    if args.workspace is None:
        raise ConfigurationError("--prepare needs --workspace")
    if file and not Path(file).is_file():
        raise ConfigurationError(f"there is no file {file}")
    read = pd.read_parquet if file.endswith(".parquet") else pd.read_csv
    frame = read(file) if file else invented_credit()
    lacking = [name for name in (*BOUNDS, "label") if name not in frame]
    if lacking:
        raise ConfigurationError(f"{file} lacks the columns {', '.join(lacking)}")
    prepare(frame, args.workspace)
    print(
        f"prepared {args.workspace}: rows dealt to {', '.join(SITES)}, each with a budget of epsilon "
        f"{BUDGET['epsilon']:g} at delta {BUDGET['delta']:g}"
    )
    return True


PREPARE = {"nargs": "?", "const": "", "metavar": "FILE", "help": "make a simulator workspace, of this data if given"}


if __name__ == "__main__":
    run_script(__doc__, lambda args: write(FOLDER), start, METHODS, {"--prepare": PREPARE}, prepare_workspace)
