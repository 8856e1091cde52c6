"""The DPBoost job: run it in the simulator, or write the job folder anew.

    python jobs/dpboost.py --run --workspace DIR     makes data for three sites in DIR/data and runs it over them
    python jobs/dpboost.py --write                   writes jobs/dpboost/
    python jobs/dpboost.py --data DIR                only the sites' files (breast cancer), and the policy

Elsewhere a site's policy must name the data set ``patients`` with its id column, state a pure privacy budget for it,
and allow the profile dp_trusted; ``policy`` in this file shows it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer

from nvflare_plugins.files import write_atomically, write_private_table
from nvflare_plugins.recipes.dpboost import DpBoostRecipe
from nvflare_plugins.recipes.folder import write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.policy.values import POLICY_FILE
from nvflare_plugins.site.setup import set_up

FOLDER = Path(__file__).resolve().parent
NAME, DATA_SET = "dpboost", "patients"
SITES = ("site-1", "site-2", "site-3")
BOUNDS = {
    "mean_radius": (5, 30),
    "mean_texture": (5, 40),
    "mean_area": (100, 2600),
    "mean_smoothness": (0, 0.2),
    "mean_compactness": (0, 0.4),
    "mean_concavity": (0, 0.5),
    "worst_radius": (5, 40),
    "worst_area": (100, 4500),
}


def recipe() -> DpBoostRecipe:
    """Return the job: few features with round public bounds, few and flat trees, as few rows ask for."""
    return DpBoostRecipe(
        NAME,
        data_set=DATA_SET,
        label="target",
        epsilon=4.0,
        feature_bounds=BOUNDS,
        n_trees=10,
        depth=3,
        trees_per_ensemble=5,
        learning_rate=0.3,
        n_candidates=16,
    )


def write_data(folder: Path) -> None:
    """Deal the rows of breast cancer out to three sites."""
    frame = load_breast_cancer(as_frame=True).frame
    frame.columns = [name.replace(" ", "_") for name in frame.columns]
    frame = frame[[*BOUNDS, "target"]].assign(patient=[f"P{i:04d}" for i in range(len(frame))])
    for site, rows in zip(SITES, np.array_split(np.random.default_rng(0).permutation(len(frame)), 3), strict=True):
        (folder / site).mkdir(parents=True, exist_ok=True)
        write_private_table(folder / site / f"{DATA_SET}.csv", frame.iloc[rows])


def policy(folder: Path) -> dict[str, Any]:
    """Return the changes to each site's policy that the job needs."""
    data_set = {
        "path": str(folder / "{site}" / f"{DATA_SET}.csv"),
        "id": "patient",
        "privacy": {"epsilon": 5.0, "delta": 1e-6, "pure_epsilon": 4.5},
    }
    return {"data_sets": {DATA_SET: data_set}, "allowed_profiles": ["dp_trusted"]}


def prepare(root: Path) -> None:
    """Make data for three simulated sites below a folder, and a workspace whose policy lets them run the job."""
    write_data(root / "data")
    set_up(root / NAME)
    path = root / NAME / POLICY_FILE
    document = json.loads(path.read_text()) | policy(root.absolute() / "data")
    write_atomically(path, json.dumps(document, indent=2).encode() + b"\n")


def write(folder: Path) -> Path:
    """Write the job folder below a folder, replacing what was there under its name."""
    return write_folder(recipe(), folder)


def start(args: Namespace) -> tuple[DpBoostRecipe, int]:
    """Make data and policies in the simulator's workspace; return the job."""
    prepare(args.workspace)
    return recipe(), 3


def write_files(args: Namespace) -> bool:
    """Write the sites' files, if asked to, and say what their policies must have."""
    if args.data is not None:
        write_data(args.data)
        needed = json.dumps(policy(args.data.absolute()), indent=1)
        print(f"the sites' files are in {args.data}; each policy needs\n{needed}")
    return args.data is not None


DATA = {"type": Path, "metavar": "DIR", "help": "write the sites' files below this folder"}


if __name__ == "__main__":
    run_script(__doc__, lambda args: [write(FOLDER)], start, options={"--data": DATA}, also=write_files)
