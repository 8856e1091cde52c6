"""The alignment job of this folder: run it in the simulator, or write the job folder anew.

    python jobs/alignment.py --write                       writes jobs/alignment/
    python jobs/alignment.py --run --workspace DIR         makes data for three parties in DIR/data and aligns them

The job folder is what ``nvflare simulator`` and ``nvflare job submit`` take as it stands. Every site's policy must name
the data sets ``breast_columns`` and ``breast_columns_test`` with their id column, as ``veilboost site-setup DIR
--example`` writes it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nvflare_plugins.kinds.alignment.demo_data import DATA_SETS, ID, LABEL, breast_cancer, deal_columns
from nvflare_plugins.recipes.recipe import AlignmentRecipe, write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
SITES = ("site-1", "site-2", "site-3")


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


def start(args: Namespace) -> tuple[AlignmentRecipe, int]:
    """Make the sites' data and policies in the simulator's workspace; return the job."""
    job = recipe()
    set_up(args.workspace / job.name, write_data(args.workspace / "data"))
    return job, len(SITES)


if __name__ == "__main__":
    run_script(__doc__, lambda args: [write(FOLDER)], start)
