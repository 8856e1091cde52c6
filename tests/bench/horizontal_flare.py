"""Jobs in FLARE's simulator: our profile masks, and NVFlare's own unprotected horizontal recipe.

Each job runs in a process of its own, sites in further ones; timing_hook/ times both from within. A round of NVFlare's
is from the beginning of one ``Booster.update`` to the beginning of the next, less evaluation; ours is from one round's
end to the next one's, evaluation included. Whatever either system does between rounds counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd
import xgboost as xgb
from nvflare.app_opt.xgboost.data_loader import XGBDataLoader

from tests.bench.horizontal_data import EVALUATION, LABEL, TRAINING, arrays

_HOOK = Path(__file__).with_name("timing_hook")
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900
_ATTEMPTS = 2  # FLARE's simulator now and then loses a connection while it starts


class ParquetLoader(XGBDataLoader):
    """NVFlare's data loader for the benchmark's files, with the matrices that its own loaders build."""

    def __init__(self, folder: str):
        self.folder = folder

    def load_data(self) -> tuple[xgb.DMatrix, xgb.DMatrix]:
        """Return training and evaluation rows of this site."""
        sets = (arrays(pd.read_parquet(f"{self.folder}/{self.client_id}-{n}.parquet")) for n in (TRAINING, EVALUATION))
        training, evaluation = (xgb.DMatrix(features, label=label) for features, label in sets)
        return training, evaluation


@dataclass(frozen=True, slots=True)
class Simulation:
    """One job for the simulator; JSON values.

    Attributes:
        is_ours: our recipe, or NVFlare's.
        data: folder with the sites' shares.
        evaluates: score training and evaluation set after every round.
    """

    is_ours: bool
    folder: str
    data: str
    sites: tuple[str, ...]
    params: dict
    num_rounds: int
    evaluates: bool


@dataclass(frozen=True, slots=True)
class FlareFigures:
    """What the timings of one or more equal runs say."""

    s_per_round: float
    evaluation_s: float
    cpu_s_per_round: float


@dataclass(slots=True)
class SiteTimings:
    """Events of one site: (began, ended, CPU seconds of the process at the end)."""

    update: list[tuple[float, float, float]]
    evaluate: list[tuple[float, float, float]]

    def rounds(self) -> list[tuple[float, float, float]]:
        """Return (training, evaluation, CPU) seconds of each round but the last, whose end nothing marks."""
        rounds = []
        for number in range(len(self.update) - 1):
            start, after = self.update[number], self.update[number + 1]
            evaluation = sum(e[1] - e[0] for e in self.evaluate if start[0] <= e[0] < after[0])
            rounds.append((after[0] - start[0] - evaluation, evaluation, after[2] - start[2]))
        return rounds


def run_side_by_side(
    folder: Path, sites: Sequence[str], params: dict, num_rounds: int, repeats: int, say: Callable[[str], None]
) -> tuple[FlareFigures, FlareFigures]:
    """Run our job and NVFlare's in alternation; return the figures of both."""
    runs: dict[bool, list[list[SiteTimings]]] = {True: [], False: []}
    for repeat in range(repeats):
        for is_ours in (True, False):
            name = "ours" if is_ours else "nvflare"
            say(f"{name} through FLARE's simulator, {num_rounds} rounds, run {repeat + 1} of {repeats}")
            run_folder = folder / f"{name}-{repeat}"
            simulation = Simulation(
                is_ours, str(run_folder), str(folder / "data"), tuple(sites), params, num_rounds, True
            )
            runs[is_ours].append(_run(simulation))
            say(f"  {_figures(runs[is_ours][-1:]).s_per_round:.3f} s per round")
    return _figures(runs[True]), _figures(runs[False])


def run_federboost(
    folder: Path, sites: Sequence[str], params: dict, num_rounds: int, say: Callable[[str], None]
) -> float:
    """Return the seconds that all rounds take at the slowest site; the first one counts as the mean of the others."""
    say(f"{num_rounds} small trees through FLARE's simulator")
    simulation = Simulation(True, str(folder / "run"), str(folder / "data"), tuple(sites), params, num_rounds, False)
    timings = _run(simulation)
    return max(site.update[-1][0] - site.update[0][0] for site in timings) * num_rounds / (num_rounds - 1)


def _figures(runs: list[list[SiteTimings]]) -> FlareFigures:
    """Median over rounds 2..n of all runs; a round takes as long as at its slowest site."""
    training, evaluation, cpu = [], [], []
    for sites in runs:
        for of_sites in list(zip(*(site.rounds() for site in sites), strict=True))[1:]:
            training.append(max(r[0] for r in of_sites))
            evaluation.append(max(r[1] for r in of_sites))
            cpu.append(sum(r[2] for r in of_sites))
    return FlareFigures(median(training), median(evaluation), median(cpu))


def _run(simulation: Simulation) -> list[SiteTimings]:
    """Run one job; return the timings of its sites.

    Raises: RuntimeError, if it fails twice.
    """
    for attempt in range(_ATTEMPTS):
        folder = Path(simulation.folder) / f"attempt-{attempt}"
        timings = folder / "timings"
        timings.mkdir(parents=True)
        document = {name: getattr(simulation, name) for name in Simulation.__slots__} | {"folder": str(folder)}
        path = os.pathsep.join([str(_HOOK), str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path, "VEILBOOST_BENCH_TIMINGS": str(timings)}
        with (folder / "simulator.log").open("w") as log:
            command = [sys.executable, "-m", "tests.bench.horizontal_flare", json.dumps(document)]
            result = subprocess.run(
                command, stdout=log, stderr=log, env=environment, timeout=_TIMEOUT_S, cwd=_ROOT, check=False
            )
        sites = [site for site in map(_read, sorted(timings.glob("*.jsonl"))) if site.update]
        complete = len(sites) == len(simulation.sites) and all(len(s.update) == simulation.num_rounds for s in sites)
        if result.returncode == 0 and complete:
            return sites
    raise RuntimeError(f"the simulator failed; its log is {folder / 'simulator.log'}")


def _read(path: Path) -> SiteTimings:
    events: dict[str, list] = {"update": [], "evaluate": []}
    for line in path.read_text().splitlines():
        event, *times = json.loads(line)
        events[event].append(tuple(times))
    return SiteTimings(**events)


# -- in the job's own process -------------------------------------------------------------------------------------


def _simulate(simulation: Simulation) -> None:
    from nvflare.recipe import SimEnv

    workspaces = Path(simulation.folder) / "workspaces"
    recipe = _our_recipe(simulation, workspaces) if simulation.is_ours else _nvflare_recipe(simulation, workspaces)
    recipe.execute(SimEnv(clients=list(simulation.sites), workspace_root=str(workspaces)))


def _our_recipe(simulation: Simulation, workspaces: Path):
    from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe
    from nvflare_plugins.site.setup import SetupOptions, set_up

    sets = {name: f"{simulation.data}/{{site}}-{name}.parquet" for name in (TRAINING, EVALUATION)}
    set_up(workspaces / "ours", SetupOptions(data_sets=sets, profiles=("masks",)))
    evaluation = {"eval_data_set": EVALUATION, "evaluate_training": True} if simulation.evaluates else {}
    return HorizontalXGBRecipe(
        "ours", data_set=TRAINING, label=LABEL, params=simulation.params, num_rounds=simulation.num_rounds, **evaluation
    )


def _nvflare_recipe(simulation: Simulation, workspaces: Path):
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
    from nvflare.app_opt.xgboost.recipes import XGBHorizontalRecipe
    from nvflare.recipe import set_per_site_config

    resources = workspaces / "nvflare" / "local" / "resources.json"
    resources.parent.mkdir(parents=True)
    allowed = [*DEFAULT_CLASS_ALLOW_LIST, "tests.bench."]
    resources.write_text(json.dumps({"format_version": 2, "class_allow_list": allowed}))
    recipe = XGBHorizontalRecipe(
        "nvflare",
        min_clients=len(simulation.sites),
        num_rounds=simulation.num_rounds,
        early_stopping_rounds=0,
        xgb_params={"tree_method": "hist", **simulation.params},
    )
    recipe._job.set_app_packages(["tests"])  # the loader is importable at the sites; no code travels
    set_per_site_config(recipe, {site: {"data_loader": ParquetLoader(simulation.data)} for site in simulation.sites})
    return recipe


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    # Components are written into the job by the name of their module, which must not be __main__.
    _simulate(Simulation(**{**given, "sites": tuple(given["sites"])}))
