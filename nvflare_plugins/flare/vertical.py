"""Vertical training under FLARE."""

from __future__ import annotations

from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.vertical.job import VerticalJob
from nvflare_plugins.vertical.site import run_vertical_site
from nvflare_plugins.wire.channel import Transport


class VerticalController(JobController):
    """The server's part."""

    job_type = VerticalJob


class VerticalExecutor(JobExecutor):
    """A party's part."""

    job_type = VerticalJob

    def metrics_site(self, job: VerticalJob, sites: tuple[str, ...]) -> str:
        """Return the active party: it alone knows the metrics."""
        return job.active

    def take_part(
        self, job: VerticalJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress
    ) -> JobResult:
        """Train with the other parties."""
        return run_vertical_site(job, context, transport, timeout_s, progress)
