"""In FLARE's process of a site or server: what a job brings is looked at before FLARE unpacks, reads or starts it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import SiteType
from nvflare.apis.workspace import Workspace
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.training_cmds import DeployProcessor
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.flare_boundary import check_app, check_folder, check_job, lets_others_in

_flares_deploy, _flares_validate_app = AppDeployer.deploy, AppAuthzService.validate_app
_flares_process, _flares_validate_job = DeployProcessor.process, JobMetaValidator.validate
_flares_start, _flares_start_on_server = ClientEngine.start_app, ServerEngine.start_app_on_server


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
            refusal = gate.refusal(check_app, req.body)
            return error_reply(refusal) if refusal else _flares_process(processor, req, app_ctx)

        def deploy(deployer: AppDeployer, workspace: Workspace, job_id: str, *args: Any, **kwargs: Any) -> str | None:
            return gate.deploy(deployer, workspace, job_id, *args, **kwargs)

        def validate_app(app_path: str) -> tuple[str, dict[str, Any]]:
            refusal = gate.refusal(check_folder, Path(app_path))
            return (refusal, {}) if refusal else _flares_validate_app(app_path)

        def validate_job(validator: JobMetaValidator, job_name: str, job_data: Any) -> tuple[bool, str, dict[str, Any]]:
            refusal = gate.refusal(check_job, job_data)
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
            check(what, is_foreign=lets_others_in(self._workspace))
        except (ConfigurationError, OSError) as error:
            return f"{error} (VeilBoost)" if isinstance(error, ConfigurationError) else type(error).__name__
        return ""

    def check_deployed(self, site: str, job_id: str) -> None:
        """Check again what was deployed, maybe by an earlier version, before its process starts. Raises: ValueError."""
        app = Path(Workspace(str(self._workspace), site).get_app_dir(job_id))
        refusal = self.refusal(check_folder, app) if os.path.lexists(app) else ""
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
            problem = self.refusal(check_app, app_data) or _flares_deploy(
                deployer, workspace, job_id, job_meta, app_name, app_data, fl_ctx
            )
        finally:
            if problem:
                shutil.rmtree(run, ignore_errors=True)
        return problem
