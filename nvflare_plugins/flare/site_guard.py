"""What ``veilboost site-setup`` starts in FLARE's process of a site or server (not in its job processes).

A site's FLARE process believes the role that the server's message names, grants everything to the role "super", and
asks about rights only where the message says so. A hostile or taken-over server could so read files by shell commands,
send code with a job, or have folders deleted that are no job's. The guard takes these doors out for every role. What a
job brings is held to a list before FLARE unpacks, reads or starts it, and FLARE's search for settings to the site's
own folders (components.py). What a server can do to jobs in other ways, to end, delay or withhold them, it does not
prevent.

It also sees to it that jobs which wait for lost sites are kept (kept_jobs.py).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, SiteType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.authz import AuthorizationService, Authorizer, AuthzContext
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.shell_cmd import SHELL_CMD_VALIDATORS
from nvflare.private.fed.client.training_cmds import DeployProcessor
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.flare.components import close_search
from nvflare_plugins.flare.kept_jobs import keep_jobs, keep_sites, rejoin_jobs, restore_jobs_soon
from nvflare_plugins.site import flare_boundary

_flares_deploy, _flares_validate_app = AppDeployer.deploy, AppAuthzService.validate_app
_flares_process, _flares_validate_job = DeployProcessor.process, JobMetaValidator.validate
_flares_start, _flares_start_on_server = ClientEngine.start_app, ServerEngine.start_app_on_server


class SiteGuard(FLComponent):
    """Acts before FLARE's process of a site or server talks to anybody."""

    def __init__(self) -> None:
        super().__init__()
        close_search()  # FLARE looks for settings as soon as its components are made, before any event
        keep_sites()  # and a server answers heartbeats before any

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Close the process at its start; a process that cannot be closed does not start."""
        if event_type == EventType.SYSTEM_START:
            self._go_on(fl_ctx)
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        try:
            workspace = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            close_process(workspace)
            keep_jobs()
            note = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "pid": os.getpid()}
            write_atomically(workspace / flare_boundary.GUARD_STARTED, json.dumps(note).encode() + b"\n", 0o600)
        except Exception as error:  # the edge of the process: FLARE stops for this kind of error alone
            raise UnsafeComponentError(f"VeilBoost's guard could not start: {type(error).__name__}") from error
        self.log_info(fl_ctx, "VeilBoost's guard is on: no shell commands, no custom code, for any role")

    def _go_on(self, fl_ctx: FLContext) -> None:
        """Start the jobs again that waited when this process ended: a site has registered with the server by now."""
        workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        role = flare_boundary.role_of(Path(workspace.get_root_dir()))
        if role is flare_boundary.Role.SITE:
            rejoin_jobs(fl_ctx.get_engine(), workspace)
        elif role is flare_boundary.Role.SERVER:
            restore_jobs_soon(fl_ctx.get_engine(), workspace)


def close_process(workspace: Path) -> None:
    """Take shell commands, custom code and foreign folders and files from everyone who commands this process."""
    SHELL_CMD_VALIDATORS.clear()  # FLARE runs no command that has none
    if not isinstance(AuthorizationService.the_authorizer, ClosedAuthorizer):
        AuthorizationService.the_authorizer = ClosedAuthorizer(AuthorizationService.the_authorizer)
    Workspace._check_job_id = staticmethod(checked_job_id)
    JobGate(workspace).close()


class ClosedAuthorizer(Authorizer):
    """Asks FLARE's authorizer, but never about what nobody may do, nor for a role that stands above all rights."""

    def __init__(self, inner: Authorizer | None) -> None:
        super().__init__("" if inner is None else inner.site_org)
        self._inner = inner

    def authorize(self, ctx: AuthzContext) -> tuple[bool, str]:
        """Return whether it is granted, and why not."""
        if ctx and (ctx.right in flare_boundary.DENIED_RIGHTS or ctx.user.role == "super"):
            return False, f"{ctx.right} is denied to every role here (VeilBoost)"
        return (True, "") if self._inner is None else self._inner.authorize(ctx)

    def get_policy(self) -> object:
        """Return FLARE's own policy, for its previews."""
        return None if self._inner is None else self._inner.get_policy()


_flares_check = Workspace._check_job_id


def checked_job_id(job_id: object) -> str:
    """Check a job's id: FLARE deletes the folder of that name in the workspace, be it a site's policy or its data.

    Raises:
        ValueError: it is none.
    """
    checked = _flares_check(job_id)
    if not flare_boundary.JOB_ID.fullmatch(checked):
        raise ValueError("not the id of a job")
    return str(checked)


class JobGate:
    """Stands before every way on which a job comes into a workspace.

    Args:
        workspace: of the site or server whose process this is.
    """

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace

    def close(self) -> None:
        """Put the gate before FLARE's own steps in this process."""
        gate = self

        def process(processor: DeployProcessor, req: Message, app_ctx: Any) -> Message:
            refusal = gate.refusal(flare_boundary.check_app, req.body)
            return error_reply(refusal) if refusal else _flares_process(processor, req, app_ctx)

        def deploy(deployer: AppDeployer, workspace: Workspace, job_id: str, *args: Any, **kwargs: Any) -> str | None:
            return gate.deploy(deployer, workspace, job_id, *args, **kwargs)

        def validate_app(app_path: str) -> tuple[str, dict[str, Any]]:
            refusal = gate.refusal(flare_boundary.check_folder, Path(app_path))
            return (refusal, {}) if refusal else _flares_validate_app(app_path)

        def validate_job(validator: JobMetaValidator, job_name: str, job_data: Any) -> tuple[bool, str, dict[str, Any]]:
            refusal = gate.refusal(flare_boundary.check_job, job_data)
            return (False, refusal, {}) if refusal else _flares_validate_job(validator, job_name, job_data)

        def start(engine: ClientEngine, job_id: str, *args: Any, **kwargs: Any) -> str:
            gate.check_deployed(engine.client.client_name, job_id)
            return str(_flares_start(engine, job_id, *args, **kwargs))

        def start_on_server(engine: ServerEngine, fl_ctx: Any, job: Any = None, *args: Any, **kwargs: Any) -> str:
            gate.check_deployed(SiteType.SERVER, job.job_id)
            return str(_flares_start_on_server(engine, fl_ctx, job, *args, **kwargs))

        DeployProcessor.process, AppDeployer.deploy = process, deploy
        ClientEngine.start_app, ServerEngine.start_app_on_server = start, start_on_server
        AppAuthzService.validate_app, JobMetaValidator.validate = staticmethod(validate_app), validate_job

    def refusal(self, check: Callable[..., None], what: object) -> str:
        """Return why something may not come in; empty if it may."""
        try:
            check(what, is_foreign=flare_boundary.lets_others_in(self._workspace))
        except (ConfigurationError, OSError) as error:
            return f"{error} (VeilBoost)" if isinstance(error, ConfigurationError) else type(error).__name__
        return ""

    def check_deployed(self, site: str, job_id: str) -> None:
        """Check again what was deployed, maybe by an earlier version, before its process starts. Raises: ValueError."""
        app = Path(Workspace(str(self._workspace), site).get_app_dir(job_id))
        refusal = self.refusal(flare_boundary.check_folder, app) if os.path.lexists(app) else ""
        if refusal:
            raise ValueError(refusal)

    def deploy(
        self,
        deployer: AppDeployer,
        workspace: Workspace,
        job_id: str,
        job_meta: dict[str, Any],
        app_name: str,
        app_data: bytes,
        fl_ctx: Any,
    ) -> str | None:
        """Deploy an app as FLARE does; whatever it ends with but success, nothing of it stays in the workspace."""
        run = workspace.get_run_dir(job_id)
        problem: str | None = "it did not end"
        try:
            problem = self.refusal(flare_boundary.check_app, app_data) or _flares_deploy(
                deployer, workspace, job_id, job_meta, app_name, app_data, fl_ctx
            )
        finally:
            if problem:
                shutil.rmtree(run, ignore_errors=True)
        return problem
