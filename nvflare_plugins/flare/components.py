"""The classes that job folders name: one controller, one executor, and for older kinds a pair of aliases that warn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.flare.kinds import KINDS, JobKind, kind_of
from nvflare_plugins.site.flare_boundary import CONTROLLER


def named_after(kind: str) -> tuple[type[JobController], type[JobExecutor]]:
    """Return the pair of a kind under the names by which older job folders and allow-lists know it.

    The module that the kind's alias names keeps them: FLARE finds a class by module and name only.
    """
    module, stem = KINDS[kind].alias.split(".")
    body = {"__module__": f"{__package__}.{module}", "kind": kind}
    controller = type(f"{stem}Controller", (JobController,), {"__doc__": "The server's part.", **body})
    return controller, type(f"{stem}Executor", (JobExecutor,), {"__doc__": "A site's part.", **body})


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
