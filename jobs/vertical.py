"""The vertical jobs of this folder: run one in the simulator, or write the job folders anew.

    python jobs/vertical.py --write                          writes jobs/vertical_<name>/
    python jobs/vertical.py --run paillier --workspace DIR   makes data for three parties in DIR/data and trains
    python jobs/vertical.py --run guarded --workspace DIR --table credit.parquet --label default --parties 2
    python jobs/vertical.py --run elgamal --workspace DIR --workers 2

``paillier`` trains in the preset ``exact``, which equals centralized training and which every passive party's policy
must consent to (exact_bins). ``guarded`` keeps to what a policy allows by default; it wants tables of thousands of
rows. ``elgamal`` is ``paillier`` under the faster scheme on a curve, which policies must name, and ``plain`` the same
without encryption.

With ``--workers`` site-2 has a Dask cluster of its own, with so many workers on this machine (the extra ``cluster``);
jobs/CLUSTER.md says how to have a real one.

The parties' tables overlap in most rows, in different orders; the job finds the common ones by private set intersection
before it trains. The job folders are what ``nvflare simulator`` and ``nvflare job submit`` take as they
stand; every party's policy must name the data sets ``breast_columns`` and ``breast_columns_test`` with their id column,
as ``veilboost site-setup DIR --example`` writes it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pandas as pd

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.alignment.demo_data import DATA_SETS, ID, LABEL, breast_cancer, deal_columns
from nvflare_plugins.recipes.local_workers import OPTION, put_on_cluster
from nvflare_plugins.recipes.recipe import VerticalXGBRecipe, write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
VARIANTS = {
    "paillier": ("paillier", "exact"),
    "elgamal": ("elgamal", "exact"),
    "guarded": ("paillier", "guarded"),
    "plain": ("plain", "exact"),
}
"""Name of the job -> its profile and preset."""
CONSENTS = {
    "paillier": ("exact_bins",),
    "elgamal": ("exact_bins",),
    "guarded": (),
    "plain": ("exact_bins", "plain_profile"),
}


def recipe(name: str, label: str = LABEL) -> VerticalXGBRecipe:
    """Return one of the jobs: breast cancer, the label at site-1."""
    profile, preset = VARIANTS[name]
    return VerticalXGBRecipe(
        f"vertical_{name}",
        active="site-1",
        data_set=DATA_SETS[0],
        eval_data_set=DATA_SETS[1],
        label=label,
        alignment="first",
        params={
            "objective": "binary:logistic",
            "eval_metric": ["logloss", "auc"],
            "max_depth": 3,
            "eta": 0.3,
            "max_bin": 32,
        },
        num_rounds=5,
        profile=profile,
        preset=preset,
    )


def write_data(folder: Path, table: pd.DataFrame, label: str, n_parties: int, name: str) -> SetupOptions:
    """Deal a table's columns out to parties below a folder; return what their policies must say."""
    sites = [f"site-{number + 1}" for number in range(n_parties)]
    deal_columns(table, label, [folder / site for site in sites], DATA_SETS)
    paths = {one: str(folder.absolute() / "{site}" / f"{one}.csv") for one in DATA_SETS}
    return SetupOptions(paths, profiles=VARIANTS[name][:1], consents=CONSENTS[name], ids=dict.fromkeys(DATA_SETS, ID))


def write(folder: Path) -> list[Path]:
    """Write all job folders below a folder, replacing what was there under their names."""
    return [write_folder(recipe(name), folder) for name in VARIANTS]


def start(args: Namespace) -> tuple[VerticalXGBRecipe, int]:
    """Deal the table out to the parties in the simulator's workspace; return the job."""
    if args.table is not None and not args.table.is_file():
        raise ConfigurationError(f"there is no file {args.table}")
    table = breast_cancer() if args.table is None else pd.read_parquet(args.table)
    if args.label not in table:
        raise ConfigurationError(f"the table has no column {args.label!r}: name its label with --label")
    job = recipe(args.run, args.label)
    workspace = args.workspace / job.name
    set_up(workspace, write_data(args.workspace / "data", table, args.label, args.parties, args.run))
    if args.workers is not None:
        put_on_cluster(workspace, "site-2", args.workers)
    return job, args.parties


OPTIONS: dict[str, dict[str, Any]] = {
    "--table": {"type": Path, "help": "Parquet file of numbers to train on; default: breast cancer"},
    "--label": {"default": LABEL, "help": "label column of the table"},
    "--workers": OPTION,
    "--parties": {"type": int, "default": 3, "help": "parties to deal the columns to; default 3"},
}


if __name__ == "__main__":
    run_script(__doc__, lambda args: write(FOLDER), start, sorted(VARIANTS), OPTIONS)
