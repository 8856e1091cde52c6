"""The plan of bagging: what a site sends and receives, and who reads it."""

from __future__ import annotations

from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.base.formatting import human_bytes
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.bagging.model import message_bytes
from nvflare_plugins.site.profiles import THREAT_MODELS


def plan(request: PlanRequest, job: BaggingJob) -> Plan:
    """Return what a site sends and receives, and who reads it. Raises: ConfigurationError."""
    depth = int(job.parameters(job.features or ["any"]).effective["max_depth"])
    sent = message_bytes(depth)
    received = sent * request.sites
    figures = {"rounds": job.num_rounds, "sites": request.sites, "depth": depth, "bytes_sent_per_round": sent}
    text = [
        f"{job.num_rounds} rounds, each one tree of depth {depth} of each of {request.sites} sites: "
        f"{job.num_rounds * request.sites} trees in all",
        f"sent      {human_bytes(sent)} a round and site, whatever its tree; {human_bytes(sent * job.num_rounds)} "
        "in all",
        f"received  {human_bytes(received)} a round and site",
        f"privacy   {THREAT_MODELS[job.profile].summary}",
    ]
    return Plan({**figures, "bytes_received_per_round": received}, "\n".join(text))
