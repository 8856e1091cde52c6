"""Horizontal training under FLARE."""

from __future__ import annotations

from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.horizontal.site import run_site
from nvflare_plugins.wire.channel import Transport


class HorizontalController(JobController):
    """The server's part."""

    job_type = HorizontalJob


class HorizontalExecutor(JobExecutor):
    """A site's part."""

    job_type = HorizontalJob

    def take_part(
        self, job: HorizontalJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress
    ) -> JobResult:
        """Train with the other sites.

        Privacy: the server has seen the rounds pass and may know their number. Metrics, and what follows from them,
            it gets only if they are streamed.
        """
        result = run_site(job, context, transport, timeout_s, progress)
        return JobResult(result.model_hmac, f"the model is {result.model_path}", {"n_rounds": result.n_rounds})
