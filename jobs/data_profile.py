"""The profile of data over several sites: run it in the simulator, or write the job folder anew.

    python jobs/data_profile.py --run --workspace DIR     makes data for three sites in DIR/data and profiles them
    python jobs/data_profile.py --write                   writes jobs/profile/

Elsewhere a site's policy must name the data set ``breast`` and give the consent ``feature_profile``, as
``veilboost site-setup DIR --data-set breast=PATH --consent feature_profile`` writes it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nvflare_plugins.recipes.examples import SITES, deal_breast_cancer
from nvflare_plugins.recipes.recipe import ProfileRecipe, write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
NAME, DATA_SET = "profile", "breast"


def recipe() -> ProfileRecipe:
    """Return the job: what each column of breast cancer tells of the label."""
    return ProfileRecipe(NAME, data_set=DATA_SET, label="target")


def write_data(folder: Path) -> SetupOptions:
    """Deal the rows of breast cancer out to three sites; return what their policies must say."""
    return SetupOptions(deal_breast_cancer(folder, DATA_SET), consents=("feature_profile",))


def write(folder: Path) -> Path:
    """Write the job folder below a folder, replacing what was there under its name."""
    return write_folder(recipe(), folder)


def start(args: Namespace) -> tuple[ProfileRecipe, int]:
    """Make the sites' data and policies in the simulator's workspace; return the job."""
    job = recipe()
    set_up(args.workspace / job.name, write_data(args.workspace / "data"))
    return job, len(SITES)


if __name__ == "__main__":
    run_script(__doc__, lambda args: [write(FOLDER)], start)
