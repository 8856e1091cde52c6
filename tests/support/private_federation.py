"""Private jobs over whole sites in one process: the site's own code in threads, the server an ``Aggregator``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from dp_components.ledger import Ledger
from dp_components.mechanisms import add_noise
from nvflare_plugins.attempt.job_context import JobResult
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.noisy_sums import Mechanism, TrustedServer, server_of
from nvflare_plugins.kinds.private_trees.training import run_private_trees_site
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.envelope import unpack
from tests.support.federation import TIMEOUT_S, DirectTransport, Federation, Tamper, run_in_threads

BUDGET = {"epsilon": 3.0, "delta": 1e-4}
DATA = "patients"


def frame_of(n_rows: int = 900, missing: bool = False) -> pd.DataFrame:
    """Return rows of four numeric features, one categorical one, and a label of two classes."""
    rng = np.random.default_rng(3)
    columns = rng.normal(size=(4, n_rows)).round(3)
    colour = rng.integers(0, 3, n_rows)
    label = (columns[0] + columns[1] * columns[2] + 0.5 * colour + rng.normal(size=n_rows) > 0.5).astype(int)
    if missing:
        columns[rng.random(columns.shape) < 0.1] = np.nan
    frame = pd.DataFrame({f"x{i}": column for i, column in enumerate(columns)})
    return frame.assign(colour=np.array(["red", "green", "blue"])[colour], label=label)


PUBLIC = {
    "data_set": DATA,
    "label": "label",
    "epsilon": 1.0,
    "delta": 1e-5,
    "feature_bounds": {f"x{i}": [-3.0, 3.0] for i in range(4)},
    "categories": {"colour": ["red", "green", "blue"]},
}


def job_of(**changes: object) -> PrivateTreesJob:
    """Return a short job over the columns of ``frame_of``."""
    document = {**PUBLIC, "components": {"n_trees": 8}, **changes}
    if str(document.get("method")).startswith("pure") and "delta" not in changes:
        del document["delta"]
    return PrivateTreesJob.from_dict(document)


@dataclass
class Run:
    """What happened: an outcome or error per site, what sites sent, what the server wrote as spent."""

    outcomes: dict[str, JobResult | Exception]
    frames: list[tuple[str, bytes]] = field(default_factory=list)
    server_spends: list[tuple[str, str, float, float]] = field(default_factory=list)

    @property
    def kinds(self) -> set[str]:
        """Kinds of all frames that left a site."""
        return {unpack(data).kind.name for _, data in self.frames}

    def succeed(self) -> Run:
        for outcome in self.outcomes.values():
            if isinstance(outcome, Exception):
                raise outcome
        return self

    def error(self, site: str) -> Exception:
        outcome = self.outcomes[site]
        assert isinstance(outcome, Exception), outcome
        return outcome


class PrivateFederation(Federation):
    """Sites with budgets."""

    def __init__(self, folder: Path, frame: pd.DataFrame | None = None, n_sites: int = 3, **policy: object) -> None:
        allowed = {"allowed_profiles": ["dp_distributed", "dp_trusted", "dp_local"], "consents": {}}
        super().__init__(folder, n_sites, {**allowed, **policy})
        self.give_data(DATA, frame_of() if frame is None else frame)
        for site in self.sites:
            self.set_budget(site, BUDGET)

    def set_budget(self, site: str, budget: dict | None) -> None:
        entry: dict = {"path": f"{DATA}.parquet"}
        if budget is not None:
            entry["privacy"] = budget
        self.set_policy(site, data_sets={DATA: entry})

    def ledger(self, site: str) -> Ledger:
        return Ledger(self.workspace(site) / "veilboost_ledgers" / site / f"{DATA}.ledger")

    def ledger_exists(self, site: str) -> bool:
        return (self.workspace(site) / "veilboost_ledgers" / site / f"{DATA}.ledger").exists()

    def run_private(
        self,
        job: PrivateTreesJob,
        job_id: str = "job",
        tamper: Mapping[str, Tamper] | None = None,
        server_noise: Mechanism = add_noise,
        sites: tuple[str, ...] | None = None,
        make_server: Callable[..., Aggregator] = Aggregator,
        number: int = 1,
        server_at: Path | None = None,
    ) -> Run:
        """Run the job at all sites (or at some). Args: server_at: the server's workspace, where its policy matters."""
        attempt, result = os.urandom(16), Run({})
        sites = sites or self.sites
        on_sum = None
        if job.trust == "trusted_aggregator":
            made = None if server_at is None else server_of(job, len(sites), server_at)
            server = made or TrustedServer(JobPlan.of(job, len(sites)), server_noise)
            on_sum = lambda frame, total: server.answer(  # noqa: E731
                frame, total, lambda *spend: result.server_spends.append(spend)
            )
        aggregator = make_server(sites, attempt, TIMEOUT_S, on_sum=on_sum)

        def take_part(site: str, transport: DirectTransport) -> JobResult:
            context = self.context(site, sites, job_id, attempt, number)
            return run_private_trees_site(job, context, transport, TIMEOUT_S)

        hooks = {"tamper": tamper, "frames": result.frames, "notices_death": True}
        result.outcomes = run_in_threads(aggregator, sites, take_part, **hooks)
        return result
