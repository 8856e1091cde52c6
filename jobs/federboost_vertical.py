"""FederBoost's vertical job: run it in the simulator, or write the job folder anew.

    python jobs/federboost_vertical.py --run --workspace DIR     makes data for three parties in DIR/data and trains
    python jobs/federboost_vertical.py --write                   writes jobs/federboost_vertical/
    python jobs/federboost_vertical.py --data DIR                only the parties' files (breast cancer), and the policy

Elsewhere a party's policy must name the data sets ``breast_parts`` and ``breast_parts_test`` with their id column,
state a privacy budget for the first, and allow the profile dp_local; its input folder holds ``bucket_features.json``.
``--data`` writes all of it but the policy, which it prints. The second set has rows that were not
trained on, for a job of inference.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from nvflare_plugins.recipes.examples import PARTS, PARTS_TEST, write_parts
from nvflare_plugins.recipes.recipe import FederBoostVerticalRecipe, write_folder
from nvflare_plugins.recipes.script import OwnFiles, run_script

FOLDER = Path(__file__).resolve().parent
NAME = "federboost_vertical"
ACTIVE, PASSIVE = "site-1", ("site-2", "site-3")
DATA_SET, TEST_SET = PARTS, PARTS_TEST


def recipe() -> FederBoostVerticalRecipe:
    """Return the job: site-1 has the diagnosis and some measurements, the others have measurements only."""
    return FederBoostVerticalRecipe(
        NAME,
        data_set=DATA_SET,
        active=ACTIVE,
        label="target",
        epsilon=4.0,
        num_rounds=20,
        params={"objective": "binary:logistic", "max_depth": 3, "eta": 0.3},
    )


def policy(folder: Path) -> dict[str, Any]:
    """Return the changes to each site's policy that the job needs."""
    return {
        "data_sets": {
            DATA_SET: {
                "path": str(folder / "{site}" / f"{DATA_SET}.csv"),
                "id": "patient",
                "privacy": {"epsilon": 5.0, "delta": 1e-6, "pure_epsilon": 4.5},
            },
            TEST_SET: {"path": str(folder / "{site}" / f"{TEST_SET}.csv"), "id": "patient"},
        },
        "allowed_profiles": ["dp_local"],
        # For the active party alone, which simulated sites share their policy with: nothing protects its labels.
        "consents": {"exact_use_of_budgeted_data": True},
        "inputs": str(folder / "{site}"),
    }


FILES = OwnFiles(write_parts, policy)


def write(folder: Path) -> Path:
    """Write the job folder below a folder, replacing what was there under its name."""
    return write_folder(recipe(), folder)


def start(args: Namespace) -> tuple[FederBoostVerticalRecipe, int]:
    """Make data and policies in the simulator's workspace; return the job."""
    FILES.prepare(args.workspace, NAME)
    return recipe(), 3


if __name__ == "__main__":
    run_script(__doc__, lambda args: [write(FOLDER)], start, options=FILES.options, also=FILES.write_if_asked)
