"""DPBoost under FLARE, with a server that is trusted with exact sums."""

from __future__ import annotations

from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.dpboost.job import DpBoostJob
from nvflare_plugins.dpboost.server import DpBoostServer
from nvflare_plugins.dpboost.site import run_dpboost_site
from nvflare_plugins.flare.attempt import ServerSum
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.wire.channel import Transport


class DpBoostController(JobController):
    """The server's part."""

    job_type = DpBoostJob

    def on_sum(self, job: DpBoostJob, n_sites: int) -> ServerSum | None:
        """Return what turns sums into noised splits and leaves."""
        return DpBoostServer(job).answer


class DpBoostExecutor(JobExecutor):
    """A site's part."""

    job_type = DpBoostJob

    def take_part(
        self, job: DpBoostJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress
    ) -> JobResult:
        """Train with the other sites."""
        return run_dpboost_site(job, context, transport, timeout_s, progress)
