"""Alignment of rows under FLARE."""

from __future__ import annotations

from nvflare_plugins.alignment.job import AlignmentJob
from nvflare_plugins.alignment.site import align_site
from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.wire.channel import Transport


class AlignmentController(JobController):
    """The server's part."""

    job_type = AlignmentJob


class AlignmentExecutor(JobExecutor):
    """A site's part."""

    job_type = AlignmentJob

    def take_part(
        self, job: AlignmentJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress
    ) -> JobResult:
        """Align this site's rows with those of the other sites."""
        return align_site(job, context, transport, timeout_s, progress)
