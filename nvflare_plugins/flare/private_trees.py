"""Differentially private trees under FLARE."""

from __future__ import annotations

from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.flare.attempt import ServerSum
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.job_plan import JobPlan
from nvflare_plugins.private_trees.server import TrustedServer
from nvflare_plugins.private_trees.site import run_private_trees_site
from nvflare_plugins.wire.channel import Transport


class PrivateTreesController(JobController):
    """The server's part."""

    job_type = PrivateTreesJob

    def on_sum(self, job: PrivateTreesJob, n_sites: int) -> ServerSum | None:
        """Return what adds the noise, if the server is trusted with exact sums; else it sees none."""
        plan = JobPlan.of(job, n_sites)
        return TrustedServer(plan).answer if plan.training.trust.is_trusted_aggregator else None


class PrivateTreesExecutor(JobExecutor):
    """A site's part."""

    job_type = PrivateTreesJob

    def take_part(
        self, job: PrivateTreesJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress
    ) -> JobResult:
        """Train with the other sites. The server learns the number of rounds and the job's own epsilon."""
        return run_private_trees_site(job, context, transport, timeout_s, progress)
