"""The classes that job folders name: one controller and one executor, and a pair of aliases for each older kind."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.flare.kinds import KINDS, JobKind, kind_of
from nvflare_plugins.site.flare_boundary import CONTROLLER


def named_after(kind: str) -> tuple[type[JobController], type[JobExecutor]]:
    """Return the pair of a kind under the names by which job folders and allow-lists know it.

    The module that the kind's alias names keeps them: FLARE finds a class by module and name only.
    """
    module, stem = KINDS[kind].alias.split(".")
    body = {"__module__": f"{__package__}.{module}", "kind": kind}
    controller = type(f"{stem}Controller", (JobController,), {"__doc__": "The server's part.", **body})
    return controller, type(f"{stem}Executor", (JobExecutor,), {"__doc__": "A site's part.", **body})


def controller_of(kind: JobKind, job: dict[str, Any], sites: list[str] | None, min_clients: int) -> JobController:
    """Return the server's component of a job, as a job folder names it.

    Args:
        job: the job's fields that the folder states.
    """
    if kind.alias:
        controller: JobController = _aliased(kind, "Controller")(job, sites, min_clients)
        return controller
    return JobController(job, sites, min_clients, kind=kind.name)


def kind_of_controller(path: object, arguments: Mapping[str, Any]) -> JobKind | None:
    """Return the kind of a job from its controller in a job folder; None if it is no controller of ours.

    Raises:
        ConfigurationError: it names a kind that is not there.
    """
    if path == CONTROLLER:
        return kind_of(arguments.get("kind"))
    return next(
        (kind for kind in KINDS.values() if kind.alias and path == f"{__package__}.{kind.alias}Controller"), None
    )


def executor_of(kind: JobKind) -> JobExecutor:
    """Return a site's component of a job, as a job folder names it."""
    return _aliased(kind, "Executor")() if kind.alias else JobExecutor(kind.name)


def _aliased(kind: JobKind, side: str) -> Any:
    module, stem = kind.alias.split(".")
    return getattr(import_module(f"{__package__}.{module}"), f"{stem}{side}")
