"""The plan of a bagging: what travels. Its time is that of XGBoost at the slowest site."""

from __future__ import annotations

import json

from nvflare_plugins.base.formatting import human_bytes
from nvflare_plugins.cli.options import Options
from nvflare_plugins.evidence.threat_model import THREAT_MODELS
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.bagging.model import message_bytes


def plan(arguments: Options, job: BaggingJob) -> str:
    """Return what a site sends and receives, and who reads it. Raises: ConfigurationError."""
    depth = int(job.parameters(job.features or ["any"]).effective["max_depth"])
    sent = message_bytes(depth)
    received = sent * arguments.sites
    if arguments.json:
        figures = {"rounds": job.num_rounds, "sites": arguments.sites, "depth": depth, "bytes_sent_per_round": sent}
        return json.dumps({**figures, "bytes_received_per_round": received}, indent=2)
    return "\n".join(
        [
            f"{job.num_rounds} rounds, each one tree of depth {depth} of each of {arguments.sites} sites: "
            f"{job.num_rounds * arguments.sites} trees in all",
            f"sent      {human_bytes(sent)} a round and site, whatever its tree; {human_bytes(sent * job.num_rounds)} "
            "in all",
            f"received  {human_bytes(received)} a round and site",
            f"privacy   {THREAT_MODELS[job.profile].summary}",
        ]
    )
