"""The DPBoost job: run it in the simulator, or write the job folder anew.

    python jobs/dpboost.py --run --workspace DIR     makes data for three sites in DIR/data and runs it over them
    python jobs/dpboost.py --write                   writes jobs/dpboost/
    python jobs/dpboost.py --data DIR                only the sites' files (breast cancer), and the policy

Elsewhere a site's policy must name the data set ``patients`` with its id column, state a pure privacy budget for it,
and allow the profile dp_trusted; ``policy`` in this file shows it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.recipe import SimEnv
from sklearn.datasets import load_breast_cancer

from nvflare_plugins.files import write_atomically, write_private_table
from nvflare_plugins.recipes.dpboost import DpBoostRecipe
from nvflare_plugins.recipes.folder import write_folder
from nvflare_plugins.site.policy.policy import POLICY_FILE
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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="write the sites' files below this folder")
    parser.add_argument("--write", action="store_true", help="write the job folder anew")
    parser.add_argument("--run", action="store_true", help="run the job in the simulator")
    parser.add_argument("--workspace", type=Path, help="root of the simulator's workspaces")
    args = parser.parse_args()
    if args.data is not None:
        write_data(args.data)
        needed = json.dumps(policy(args.data.absolute()), indent=1)
        print(f"the sites' files are in {args.data}; each policy needs\n{needed}")
    if args.write:
        print(f"wrote {write(FOLDER)}")
    if args.run:
        if args.workspace is None:
            parser.error("--run needs --workspace")
        prepare(args.workspace)
        recipe().execute(SimEnv(num_clients=3, workspace_root=str(args.workspace)))
    if args.data is None and not args.write and not args.run:
        parser.error("give --data, --write or --run")


if __name__ == "__main__":
    main()
