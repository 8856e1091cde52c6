"""``veilboost plan``: what a job takes, shows and spends, before it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Job
from nvflare_plugins.cli.options import Options
from nvflare_plugins.cli.plan import horizontal, kinds, private, vertical
from nvflare_plugins.flare.components import kind_of_controller
from nvflare_plugins.flare.kinds import JobKind
from nvflare_plugins.kinds.vertical.job import VerticalJob

SERVER_CONFIGURATION = "config_fed_server.json"

Planner = Callable[[Options, Any], str]

PLANS: dict[str, Planner] = {
    "bagging": kinds.plan_bagging,
    "dpboost": private.plan_dpboost,
    "federboost_vertical": private.plan_buckets,
    "horizontal": horizontal.plan,
    "private_trees": private.plan_private_trees,
    "profile": kinds.plan_profile,
    "tuning": kinds.plan_tuning,
    "vertical": vertical.plan,
    "vertical_tuning": kinds.plan_vertical_tuning,
}
"""What plans a job of each kind: (command line, job) -> text, or JSON if the command line asks for it."""

BUDGETED = ("dpboost", "federboost_vertical", "private_trees")

UNPLANNED = {
    "alignment": "it takes about 14 CPU seconds of each party for 100,000 ids, and releases who is common",
    "vertical_inference": "it takes seconds; what it may ask is in the passive parties' policies (predictions_per_row)",
}
"""Kinds without a plan, and why."""


def run(arguments: Options) -> int:
    """Print the plan."""
    print(_plan(arguments))
    return 0


def _plan(arguments: Options) -> str:
    for name in ("rows", "features", "sites"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ConfigurationError(f"{name} must be at least 1")
    if arguments.job is None:
        name = "horizontal" if arguments.foreign_features is None else "vertical"
        _check_options(arguments, name, is_paid=False)
        return PLANS[name](arguments, None)
    kind, job = find_job(arguments.job)
    _check_options(arguments, kind.name, is_paid=has_budget(kind, job))
    if kind.name not in PLANS:
        why = UNPLANNED.get(kind.name, "none has been written")
        raise ConfigurationError(f"{arguments.job}: {kind.name} jobs have no plan: {why}")
    return PLANS[kind.name](arguments, job)


def _check_options(arguments: Options, kind: str, *, is_paid: bool) -> None:
    """Refuse options that the plan of this kind of job does not use. Args: is_paid: from a privacy budget."""
    if not is_paid and (arguments.budget or arguments.workspace or arguments.site):
        raise ConfigurationError("--budget, --workspace and --site belong to differentially private jobs")
    if arguments.workers is not None and kind not in ("vertical", "vertical_tuning"):
        raise ConfigurationError("--workers belongs to vertical training: workers of other kinds are not planned")
    if arguments.base_rate is not None and not 0 < arguments.base_rate < 1:
        raise ConfigurationError("base-rate must be a share between 0 and 1")
    if arguments.base_rate is not None and kind != "private_trees":
        raise ConfigurationError("--base-rate belongs to private trees: plans of other trainings do not use it")


def has_budget(kind: JobKind, job: Job) -> bool:
    """Tell whether a job takes from a privacy budget."""
    return kind.name in BUDGETED or (isinstance(job, VerticalJob) and job.is_noised)


def read_job(folder: Path) -> Job:
    """Return the job in a FLARE job folder. Raises: as ``find_job``."""
    return find_job(folder)[1]


def find_job(folder: Path) -> tuple[JobKind, Job]:
    """Read the job in a FLARE job folder, and of which kind it is.

    Raises:
        ConfigurationError: no server configuration with a job of ours in it, or one that no site would accept.
    """
    for path in sorted(folder.glob(f"*/config/{SERVER_CONFIGURATION}")):
        try:
            found = _find_job(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError):
            raise ConfigurationError(f"{path} is not valid JSON") from None
        if found is not None:
            return found
    raise ConfigurationError(f"{folder} is not the folder of a VeilBoost job: no {SERVER_CONFIGURATION} holds one")


def _find_job(value: Any) -> tuple[JobKind, Job] | None:
    if isinstance(value, dict):
        arguments = value.get("args")
        if isinstance(arguments, dict) and isinstance(arguments.get("job"), dict):
            kind = kind_of_controller(value.get("path"), arguments)
            if kind is not None:
                return kind, kind.job.from_dict(arguments["job"])
        value = list(value.values())
    if isinstance(value, list):
        return next((found for item in value if (found := _find_job(item)) is not None), None)
    return None
