"""FederBoost's vertical training under FLARE."""

from __future__ import annotations

from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.federboost_vertical.job import BucketJob
from nvflare_plugins.federboost_vertical.site import run_site
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.wire.channel import Transport


class BucketController(JobController):
    """The server's part."""

    job_type = BucketJob


class BucketExecutor(JobExecutor):
    """A site's part."""

    job_type = BucketJob

    def take_part(
        self, job: BucketJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress
    ) -> JobResult:
        """Send buckets or train on them, as the active or as a passive party."""
        return run_site(job, context, transport, timeout_s, progress)
