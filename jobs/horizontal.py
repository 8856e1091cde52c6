"""The horizontal jobs of this folder, one per profile: run one in the simulator, or write the job folders anew.

    python jobs/horizontal.py --write                            writes jobs/horizontal_<profile>/
    python jobs/horizontal.py --run masks --workspace DIR        runs one over three simulated sites

DIR must have been prepared by ``veilboost site-setup DIR/horizontal_masks --data-set breast=... --data-set
breast_test=...``. The job folders are what ``nvflare simulator`` and ``nvflare job submit`` take as they stand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nvflare.recipe import SimEnv

from nvflare_plugins.recipes.folder import write_folder
from nvflare_plugins.recipes.horizontal import HorizontalXGBRecipe

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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the job folders anew")
    parser.add_argument("--run", choices=PROFILES, help="run the job of this profile in the simulator")
    parser.add_argument("--workspace", type=Path, help="root of the simulator's workspaces")
    args = parser.parse_args()
    if args.write:
        for path in write(FOLDER):
            print(f"wrote {path}")
    if args.run:
        if args.workspace is None:
            parser.error("--run needs --workspace")
        recipe(args.run).execute(SimEnv(num_clients=3, workspace_root=str(args.workspace)))
    if not args.write and not args.run:
        parser.error("give --write or --run")


if __name__ == "__main__":
    main()
