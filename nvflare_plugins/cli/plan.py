"""``veilboost plan``: what a job takes, shows and spends, before it runs. Each kind plans its own jobs."""

from __future__ import annotations

import json

from dp_components.ledger import Budget
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import is_paid
from nvflare_plugins.attempt.plan import Network, Plan, Planner, PlanRequest
from nvflare_plugins.cli.options import Options, own_policy
from nvflare_plugins.flare.kinds import KINDS, find_job

_SHAPE = "rows features sites bins depth rounds outputs max_leaves metrics cuts key_bits missing workers base_rate"


def run(arguments: Options) -> int:
    """Print the plan."""
    plan = _plan(arguments)
    print(json.dumps(plan.figures, indent=2) if arguments.json else plan.text)
    return 0


def _plan(arguments: Options) -> Plan:
    request = _request(arguments)
    if arguments.job is None:  # a shape alone is that of a training
        kind, job, paid = KINDS["vertical" if arguments.foreign_features else "horizontal"], None, False
    else:
        kind, job = find_job(arguments.job)
        paid = is_paid(job)
    if not paid and (arguments.budget or arguments.workspace or arguments.site):
        raise ConfigurationError("--budget, --workspace and --site belong to differentially private jobs")
    planner = kind.planner
    for name in ("workers", "base_rate"):
        uses = [one.name for one in KINDS.values() if isinstance(one.planner, Planner) and name in one.planner.uses]
        if getattr(request, name) is not None and kind.name not in uses:
            raise ConfigurationError(f"--{name.replace('_', '-')} belongs to plans of {', '.join(uses)} jobs")
    if isinstance(planner, str):
        raise ConfigurationError(f"{arguments.job}: {kind.name} jobs have no plan: {planner}")
    return planner.plan(request, job)


def _request(arguments: Options) -> PlanRequest:
    """Return what the command line asks. Raises: ConfigurationError: it makes no sense, or names no site."""
    for name in ("rows", "features", "sites"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ConfigurationError(f"{name} must be at least 1")
    if arguments.base_rate is not None and not 0 < arguments.base_rate < 1:
        raise ConfigurationError("base-rate must be a share between 0 and 1")
    if (arguments.workspace is None) != (arguments.site is None):
        raise ConfigurationError("give both --workspace DIR and --site NAME to have the site's budget looked at")
    foreign = arguments.foreign_features
    return PlanRequest(
        **{name: getattr(arguments, name) for name in _SHAPE.split()},
        foreign_features=None if foreign is None else tuple(foreign),
        profile=None if arguments.profile == "all" else arguments.profile,
        network=Network.of(arguments.latency_ms, arguments.bandwidth_mbit, arguments.server_bandwidth_mbit),
        budget=None if arguments.budget is None else _budget(dict(arguments.budget)),
        policy=None if arguments.workspace is None or arguments.budget else own_policy(arguments),
    )


def _budget(values: dict[str, float]) -> tuple[Budget, int]:
    """Return a budget, and how many rows of a person it counts at most. Raises: ConfigurationError."""
    values.pop("own_persons", None)
    rows = int(values.pop("rows_per_person", 1))
    try:
        return Budget(**values), rows
    except ValueError as error:
        raise ConfigurationError(f"--budget: {error}") from None
