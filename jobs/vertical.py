"""The vertical jobs of this folder: run one in the simulator, or write the job folders anew.

    python jobs/vertical.py --write                          writes jobs/vertical_<name>/
    python jobs/vertical.py --run paillier --workspace DIR   makes data for three parties in DIR/data and trains
    python jobs/vertical.py --run guarded --workspace DIR --table credit.parquet --label default --parties 2

``paillier`` trains in the preset ``exact``, which equals centralized training and which every passive party's policy
must consent to (exact_bins). ``guarded`` keeps to what a policy allows by default; it wants tables of thousands of
rows. ``plain`` is ``paillier`` without encryption.

The parties' tables overlap in most rows, in different orders; the job finds the common ones by private set intersection
(extra ``psi``) before it trains. The job folders are what ``nvflare simulator`` and ``nvflare job submit`` take as they
stand; every party's policy must name the data sets and their id column, as ``veilboost site-setup DIR --data-set
breast=... --data-set breast_test=... --id breast=id --id breast_test=id`` writes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from nvflare.recipe import SimEnv

from nvflare_plugins.alignment.demo_data import ID, LABEL, breast_cancer, deal_columns
from nvflare_plugins.recipes.folder import write_folder
from nvflare_plugins.recipes.vertical import VerticalXGBRecipe
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
VARIANTS = {"paillier": ("paillier", "exact"), "guarded": ("paillier", "guarded"), "plain": ("plain", "exact")}
"""Name of the job -> its profile and preset."""
CONSENTS = {"paillier": ("exact_bins",), "guarded": (), "plain": ("exact_bins", "plain_profile")}
DATA_SETS = ("breast", "breast_test")


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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the job folders anew")
    parser.add_argument("--run", choices=sorted(VARIANTS), help="run this job in the simulator")
    parser.add_argument("--workspace", type=Path, help="root of the simulator's workspaces")
    parser.add_argument("--table", type=Path, help="Parquet file of numbers to train on; default: breast cancer")
    parser.add_argument("--label", default=LABEL, help="label column of the table")
    parser.add_argument("--parties", type=int, default=3, help="parties to deal the columns to; default 3")
    args = parser.parse_args()
    if args.write:
        for path in write(FOLDER):
            print(f"wrote {path}")
    if args.run:
        if args.workspace is None:
            parser.error("--run needs --workspace")
        if args.table is not None and not args.table.is_file():
            parser.error(f"there is no file {args.table}")
        job = recipe(args.run, args.label)
        table = breast_cancer() if args.table is None else pd.read_parquet(args.table)
        if args.label not in table:
            parser.error(f"the table has no column {args.label!r}: name its label with --label")
        options = write_data(args.workspace / "data", table, args.label, args.parties, args.run)
        set_up(args.workspace / job.name, options)
        job.execute(SimEnv(num_clients=args.parties, workspace_root=str(args.workspace)))
    if not args.write and not args.run:
        parser.error("give --write or --run")


if __name__ == "__main__":
    main()
