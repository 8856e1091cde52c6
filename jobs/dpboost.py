"""The DPBoost job: run it in the simulator, or write the job folder anew.

    python jobs/dpboost.py --run --workspace DIR     makes data for three sites in DIR/data and runs it over them
    python jobs/dpboost.py --write                   writes jobs/dpboost/
    python jobs/dpboost.py --data DIR                only the sites' files (breast cancer), and the policy

Elsewhere a site's policy must name the data set ``patients`` with its id column, state a pure privacy budget for it,
and allow the profile dp_trusted; ``policy`` in this file shows it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from nvflare_plugins.recipes.examples import PATIENT_BOUNDS, PATIENTS, write_patients
from nvflare_plugins.recipes.recipe import DpBoostRecipe, write_folder
from nvflare_plugins.recipes.script import OwnFiles, run_script

FOLDER = Path(__file__).resolve().parent
NAME, DATA_SET = "dpboost", PATIENTS


def recipe() -> DpBoostRecipe:
    """Return the job: few features with round public bounds, few and flat trees, as few rows ask for."""
    return DpBoostRecipe(
        NAME,
        data_set=DATA_SET,
        label="target",
        epsilon=4.0,
        feature_bounds=PATIENT_BOUNDS,
        n_trees=10,
        depth=3,
        trees_per_ensemble=5,
        learning_rate=0.3,
        n_candidates=16,
    )


def policy(folder: Path) -> dict[str, Any]:
    """Return the changes to each site's policy that the job needs."""
    data_set = {
        "path": str(folder / "{site}" / f"{DATA_SET}.csv"),
        "id": "patient",
        "privacy": {"epsilon": 5.0, "delta": 1e-6, "pure_epsilon": 4.5},
    }
    return {"data_sets": {DATA_SET: data_set}, "allowed_profiles": ["dp_trusted"]}


FILES = OwnFiles(write_patients, policy)


def write(folder: Path) -> Path:
    """Write the job folder below a folder, replacing what was there under its name."""
    return write_folder(recipe(), folder)


def start(args: Namespace) -> tuple[DpBoostRecipe, int]:
    """Make data and policies in the simulator's workspace; return the job."""
    FILES.prepare(args.workspace, NAME)
    return recipe(), 3


if __name__ == "__main__":
    run_script(__doc__, lambda args: [write(FOLDER)], start, options=FILES.options, also=FILES.write_if_asked)
