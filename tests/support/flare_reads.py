"""One start of FLARE's process of a site or server, or of a job's there, up to where it would talk to anybody.

FLARE's own main functions run, in a process of their own. What they open, look for and import below the workspace is
reported: ``opened`` and ``asked`` hold paths below it, ``searched`` the names that FLARE's search was asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.communicator import load_comm_drivers
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.private.fed.app.client import client_train, worker_process
from nvflare.private.fed.app.deployer.server_deployer import ServerDeployer
from nvflare.private.fed.app.server import runner_process, server_train
from nvflare.private.fed.client.fed_client import FederatedClient
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator


class Stop(Exception):
    """Here FLARE would begin to talk."""


def site_parent(workspace: str, job: str) -> None:
    """A site's process."""
    args = Namespace(
        workspace=workspace, fed_client="fed_client.json", set=_options("org=org", "uid=site-1"), local_rank=0
    )
    client_train.main(args)


def site_job(workspace: str, job: str) -> None:
    """A job's process at a site."""
    worker_process.main(
        Namespace(
            workspace=workspace,
            startup=f"{workspace}/startup",
            token="t",  # noqa: S106
            token_signature="s",  # noqa: S106
            ssid="s",
            job_id=job,
            client_name="site-1",
            sp_target="localhost:1",
            sp_scheme="grpc",
            parent_url="tcp://localhost:1",
            parent_conn_sec="",
            fed_client="fed_client.json",
            set=_options("org=org", "uid=site-1", "print_conf=True"),
            local_rank=0,
        )
    )


def server_parent(workspace: str, job: str) -> None:
    """The server's process."""
    server_train.main(Namespace(workspace=workspace, fed_server="fed_server.json", set=_options("org=org")))


def server_job(workspace: str, job: str) -> None:
    """A job's process at the server."""

    def configure(*_: object, **__: object) -> None:
        app = f"{workspace}/{job}/app_server"
        ServerJsonConfigurator(
            Workspace(workspace, "server"), f"{app}/config/config_fed_server.json", args, app, args.set
        )
        _stop()

    args = Namespace(
        workspace=workspace,
        fed_server="fed_server.json",
        app_root=f"{workspace}/{job}/app_server",
        job_id=job,
        token_signature="s",  # noqa: S106
        root_url="tcp://localhost:1",
        host="localhost",
        port="1",
        ssid="s",
        parent_url="tcp://localhost:1",
        parent_conn_sec="",
        set=_options("org=org", "restore_snapshot=False", "print_conf=True"),
    )
    FederatedServer.create_job_cell = configure
    runner_process.main(args)


PROCESSES = {"site": site_parent, "site's job": site_job, "server": server_parent, "server's job": server_job}


def _options(*more: str) -> list[str]:
    return ["secure_train=true", "config_folder=config", *more]


def _stop(*_: object, **__: object) -> None:
    load_comm_drivers()
    raise Stop


def main(process: str, workspace: str, job: str) -> dict[str, Any]:
    """Run one of the processes; return what it read."""
    opened: set[str] = set()
    asked: set[str] = set()
    searched: set[str] = set()
    root, watching = os.path.realpath(workspace), [True]

    def note(found: set[str], path: object) -> None:
        if watching[0] and isinstance(path, (str, bytes, os.PathLike)):
            whole = os.path.realpath(os.fsdecode(path))
            if whole.startswith(f"{root}/"):
                found.add(os.path.relpath(whole, root))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            note(opened, args[0])

    stat, finders = (
        os.stat,
        ((ConfigFactory, "load_config"), (ConfigFactory, "has_config"), (ConfigService, "find_file")),
    )

    def noted_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        note(asked, path)
        return stat(path, *args, **kwargs)

    def noted(find: Callable[..., Any]) -> Callable[..., Any]:
        def look(name: str, *args: Any, **kwargs: Any) -> Any:
            searched.add(os.path.basename(name))
            return find(name, *args, **kwargs)

        return look

    for owner, name in finders:
        setattr(owner, name, staticmethod(noted(getattr(owner, name))))
    FederatedClient.connect_to_server = _stop
    ServerDeployer.deploy = _stop
    sys.addaudithook(hook)
    os.stat = noted_stat
    os.chdir(workspace)
    ended = "it ended by itself"
    try:
        PROCESSES[process](workspace, job)
    except BaseException as error:  # where FLARE stops for another reason, the test says so
        ended = (
            "" if isinstance(error, Stop) or isinstance(error.__cause__, Stop) else f"{type(error).__name__}: {error}"
        )
    finally:
        watching[0], os.stat = False, stat
    return {"opened": sorted(opened), "asked": sorted(asked), "searched": sorted(searched), "ended": ended}


def report(process: str, workspace: str, job: str, results: Connection) -> None:
    """Send what one of the processes read; FLARE looks for modules where it is started, as Python does."""
    sys.path.insert(0, workspace)
    with contextlib.redirect_stdout(sys.stderr):
        found = main(process, workspace, job)
    results.send(found)
    os._exit(0)  # FLARE's own threads would go on
