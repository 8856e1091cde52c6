"""The alignment job of this folder: run it in the simulator, or write the job folder anew.

    python jobs/alignment.py --write                       writes jobs/alignment/
    python jobs/alignment.py --run --workspace DIR         makes data for three parties in DIR/data and aligns them

The job folder is what ``nvflare simulator`` and ``nvflare job submit`` take as it stands. Every site's policy must name
the data sets and their id column, as ``veilboost site-setup DIR --data-set breast=... --id breast=id`` writes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nvflare.recipe import SimEnv

from nvflare_plugins.alignment.demo_data import ID, LABEL, breast_cancer, deal_columns
from nvflare_plugins.recipes.alignment import AlignmentRecipe
from nvflare_plugins.recipes.folder import write_folder
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
SITES = ("site-1", "site-2", "site-3")
DATA_SETS = ("breast", "breast_test")


def recipe() -> AlignmentRecipe:
    """Return the job: training and test set of breast cancer, at parties with other columns of overlapping rows."""
    return AlignmentRecipe("alignment", data_sets=DATA_SETS)


def write_data(folder: Path) -> SetupOptions:
    """Write the parties' files below a folder; return what their policies must say."""
    deal_columns(breast_cancer(), LABEL, [folder / site for site in SITES], DATA_SETS)
    paths = {name: str(folder.absolute() / "{site}" / f"{name}.csv") for name in DATA_SETS}
    return SetupOptions(paths, ids=dict.fromkeys(DATA_SETS, ID))


def write(folder: Path) -> Path:
    """Write the job folder below a folder, replacing what was there under its name."""
    return write_folder(recipe(), folder)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the job folder anew")
    parser.add_argument("--run", action="store_true", help="run the job in the simulator")
    parser.add_argument("--workspace", type=Path, help="root of the simulator's workspaces")
    args = parser.parse_args()
    if args.write:
        print(f"wrote {write(FOLDER)}")
    if args.run:
        if args.workspace is None:
            parser.error("--run needs --workspace")
        job = recipe()
        set_up(args.workspace / job.name, write_data(args.workspace / "data"))
        job.execute(SimEnv(num_clients=len(SITES), workspace_root=str(args.workspace)))
    if not args.write and not args.run:
        parser.error("give --write or --run")


if __name__ == "__main__":
    main()
