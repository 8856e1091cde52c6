"""The jobs of this folder that use a finished vertical model: run one in the simulator, or write the job folders anew.

    python jobs/vertical.py --run paillier --workspace DIR               trains the model in DIR/vertical_paillier
    python jobs/vertical_inference.py --run predict --workspace DIR      predicts with it, in DIR/vertical_predict
    python jobs/vertical_inference.py --write [--model JOB_ID]           writes jobs/vertical_<action>/

Actions are predict, explain and merge. The simulator calls every job simulate_job and starts with empty sites, so the
parts of the model are placed in the sites' input folder first. Elsewhere every site still has its part in its run
folder; only the id of the training job must be named: ``--model``.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import make_folder
from nvflare_plugins.kinds.alignment.demo_data import DATA_SETS, ID
from nvflare_plugins.kinds.vertical.model_files import ACTIVE_FILE, PASSIVE_FILE
from nvflare_plugins.recipes.recipe import VerticalInferenceRecipe, write_folder
from nvflare_plugins.recipes.script import run_script
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
ACTIONS = ("predict", "explain", "merge")
SITES = ("site-1", "site-2", "site-3")
DATA_SET = DATA_SETS[1]
SIMULATED = "simulate_job"
_CONSENTS = {"predict": (), "explain": ("explain",), "merge": ("merge_model",)}


def recipe(action: str, model: str = SIMULATED) -> VerticalInferenceRecipe:
    """Return the job of one action with the model of a training job, on the test set of breast cancer."""
    rows: dict[str, Any] = {} if action == "merge" else {"data_set": DATA_SET, "alignment": "first"}
    return VerticalInferenceRecipe(f"vertical_{action}", model=model, action=action, **rows)


def options(action: str, data: Path) -> SetupOptions:
    """Return what the sites' policies must say. Args: data: where ``jobs/vertical.py`` has written the sites' files."""
    path = str(data.absolute() / "{site}" / f"{DATA_SET}.csv")
    return SetupOptions({DATA_SET: path}, consents=_CONSENTS[action], ids={DATA_SET: ID})


def place_parts(training: Path, inputs: Path) -> None:
    """Copy every site's part of a model that was trained in a simulator workspace into an input folder."""
    make_folder(inputs)
    for site in SITES:
        run = training / site / "veilboost_runs" / SIMULATED
        part = run / ACTIVE_FILE if (run / ACTIVE_FILE).exists() else run / PASSIVE_FILE
        shutil.copy(part, inputs / f"{SIMULATED}.{site}.json")


def write(folder: Path, model: str) -> list[Path]:
    """Write all job folders below a folder, replacing what was there under their names."""
    return [write_folder(recipe(action, model), folder) for action in ACTIONS]


def start(args: Namespace) -> tuple[VerticalInferenceRecipe, int]:
    """Set the sites up in the simulator's workspace and place their parts of the model; return the job."""
    if not (args.workspace / args.training).is_dir():
        raise ConfigurationError(
            f"{args.workspace / args.training} holds no trained model. Remedy: run jobs/vertical.py in this workspace "
            "first, or name another training job's folder there as --training"
        )
    job = recipe(args.run)
    workspace = args.workspace / job.name
    set_up(workspace, options(args.run, args.workspace / "data"))
    place_parts(args.workspace / args.training, workspace / "local" / "inputs")
    return job, len(SITES)


OPTIONS = {
    "--model": {"default": SIMULATED, "help": "id of the training job that the job folders name"},
    "--training": {"default": "vertical_paillier", "help": "the training job's folder in the workspace"},
}


if __name__ == "__main__":
    run_script(__doc__, lambda args: write(FOLDER, args.model), start, ACTIONS, OPTIONS)
