"""Signed evidence of whole jobs, with the server's log beside the sites'."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from nvflare_plugins.attempt.job_context import Silent
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.noisy_sums import TrustedServer
from nvflare_plugins.kinds.private_trees.training import run_private_trees_site
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.aggregation import Aggregator
from tests.golden.jobs import BUDGET, bounds_of, breast, columns_over_sites, rows_over_sites
from tests.support.federation import TIMEOUT_S, DirectTransport, Parties, run_in_threads, succeed
from tests.support.sessions import Authority

SERVERS = {"servers": [{"name": "project", "identity": "server1"}]}


def write_evidence(folder: Path) -> None:
    """Write evidence of a horizontal, a vertical and a private job, and the startup kit that it is checked with."""
    frame = breast()
    params = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 16, "min_child_weight": 4}
    shallow = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 16}
    private = {
        "data_set": "rows",
        "label": "y",
        "epsilon": 4.0,
        "delta": 1e-5,
        "feature_bounds": bounds_of(frame),
        "trust": "trusted_aggregator",
        "components": {"n_trees": 2},
    }
    jobs = {
        "horizontal": (rows_over_sites, {}, run_horizontal_site, HorizontalJob("rows", "y", params, 2)),
        "vertical": (
            columns_over_sites,
            {},
            run_vertical_site,
            VerticalJob("site-1", "rows", "y", shallow, 1, key_bits=3072),
        ),
        "private": (rows_over_sites, {"privacy": BUDGET}, run_private_trees_site, PrivateTreesJob.from_dict(private)),
    }
    for name, (give, facts, run_site, job) in jobs.items():
        with tempfile.TemporaryDirectory() as sites:
            parties = give(Path(sites), frame[:300] if name == "vertical" else frame, **facts)
            run_signed(parties, run_site, job, f"golden-{name}", folder / name)
    kit = folder / "startup"
    kit.mkdir()
    (kit / "rootCA.pem").write_bytes(Authority().root.public_bytes(Encoding.PEM))
    (kit / "fed_client.json").write_text(json.dumps(SERVERS) + "\n")


def run_signed(parties: Parties, run_site: Callable[..., Any], job: Any, job_id: str, exports: Path) -> None:
    """Run a job of sites with certificates and collect the evidence of all, as a download of the job holds it."""
    attempt = secrets.token_bytes(16)
    identities = {site: Authority().identity(site, number) for number, site in enumerate(parties.sites)}
    exports.mkdir(parents=True)
    log = EvidenceLog(exports / export_name(SERVER), SERVER, job_id, attempt.hex(), job.profile, role="server")

    on_sum = None
    if getattr(job, "trust", "") == "trusted_aggregator":
        server = TrustedServer(JobPlan.of(job, len(parties.sites)))
        on_sum = lambda frame, total: server.answer(frame, total, log.spend)  # noqa: E731
    aggregator = Aggregator(parties.sites, attempt, TIMEOUT_S, log.transfer, log.signed_head, on_sum=on_sum)

    def take_part(site: str, transport: DirectTransport) -> Any:
        context = parties.context(site, parties.sites, job_id, attempt)
        context = dataclasses.replace(context, identity=identities[site])
        return run_site(job, context, transport, TIMEOUT_S, Silent())

    outcomes = run_in_threads(aggregator, parties.sites, take_part)
    log.end("aborted" if any(isinstance(one, Exception) for one in outcomes.values()) else "completed")
    log.close()
    succeed(outcomes)
    for site in parties.sites:
        shutil.copy(parties.run_folder(site, job_id) / "evidence" / export_name(site), exports)
