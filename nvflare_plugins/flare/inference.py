"""Jobs with a finished vertical model under FLARE: prediction, explanation, merging."""

from __future__ import annotations

from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.vertical_inference.job import InferenceJob
from nvflare_plugins.vertical_inference.site import run_inference
from nvflare_plugins.wire.channel import Transport


class InferenceController(JobController):
    """The server's part."""

    job_type = InferenceJob


class InferenceExecutor(JobExecutor):
    """A site's part."""

    job_type = InferenceJob

    def take_part(
        self, job: InferenceJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress
    ) -> JobResult:
        """Predict, explain or merge with the other sites."""
        return run_inference(job, context, transport, timeout_s, progress)
