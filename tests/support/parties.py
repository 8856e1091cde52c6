"""Sites in one process for any kind of job: each with a workspace, a policy and files of its own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from nvflare_plugins.attempt.job_context import Job, JobResult, Silent, SiteContext
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Transport
from nvflare_plugins.wire.envelope import Frame, Transfer
from tests.support.federation import TIMEOUT_S, DirectTransport, SiteDied, Tamper

RunSite = Callable[..., JobResult]
"""(job, place, transport, timeout_s, progress) -> outcome."""


@dataclass
class Parties:
    """Sites site-1, site-2, ... under one folder."""

    folder: Path
    n_sites: int = 3
    policy: dict[str, Any] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    said: dict[str, list[str]] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[str, ...]:
        width = len(str(self.n_sites))  # sites are named in the order of the alphabet
        return tuple(f"site-{i + 1:0{width}d}" for i in range(self.n_sites))

    def workspace(self, site: str) -> Path:
        return self.folder / site

    def run_folder(self, site: str, job_id: str = "job") -> Path:
        return self.workspace(site) / "runs" / job_id

    def give(self, site: str, name: str, frame: pd.DataFrame, **facts: object) -> None:
        """Give a site a data set; ``facts`` are further keys of it in the policy."""
        (self.workspace(site) / "local").mkdir(parents=True, exist_ok=True)
        frame.to_parquet(self.workspace(site) / f"{name}.parquet", index=False)
        document = self.policy_of(site)
        document["data_sets"][name] = {"path": f"{name}.parquet", **facts}
        self.set_policy(site, **document)

    def give_input(self, site: str, name: str, document: object) -> None:
        """Put a JSON file into a site's input folder."""
        folder = self.workspace(site) / "inputs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document))

    def policy_of(self, site: str) -> dict[str, Any]:
        path = self.workspace(site) / "local" / "veilboost.json"
        start = {"unsigned_sessions": True, "share_data_errors": True, "data_sets": {}, **self.policy}
        return json.loads(path.read_text()) if path.exists() else start

    def set_policy(self, site: str, **changes: object) -> None:
        path = self.workspace(site) / "local" / "veilboost.json"
        path.write_text(json.dumps({**self.policy_of(site), **changes}))

    def run(
        self,
        run_site: RunSite,
        job: Job,
        job_id: str = "job",
        on_sum: Callable[[Frame, bytes], bytes] | None = None,
        tamper: Mapping[str, Tamper] | None = None,
        carry: Callable[[str, Transport], Transport] | None = None,
        tamper_reply: Mapping[str, Tamper] | None = None,
        number: int = 1,
        sites: Sequence[str] | None = None,
    ) -> dict[str, JobResult | Exception]:
        """Run the job at all sites, or some; a site that failed has its error in place of an outcome.

        Args:
            carry: makes of a site's transport the one that it uses.
            number: of the attempt in its job.
        """
        attempt, among = os.urandom(16), tuple(self.sites if sites is None else sites)
        aggregator = Aggregator(among, attempt, TIMEOUT_S, self.transfers.append, on_sum=on_sum)
        outcomes: dict[str, JobResult | Exception] = {}

        def take_part(site: str) -> None:
            direct = DirectTransport(aggregator, site, (tamper or {}).get(site), (tamper_reply or {}).get(site))
            transport: Transport = direct if carry is None else carry(site, direct)
            try:
                policy, runs = SitePolicy.load(self.workspace(site), site), self.workspace(site) / "runs"
                context = SiteContext(site, among, job_id, attempt, runs, policy, Identity.unsigned(site), number)
                outcomes[site] = run_site(job, context, transport, TIMEOUT_S, Listener(self.said.setdefault(site, [])))
            except Exception as error:  # the test decides what it expected
                outcomes[site] = SiteDied() if direct.died else error
                aggregator.abort(f"{site}: {error}")

        threads = [threading.Thread(target=take_part, args=(site,)) for site in among]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


class Listener(Silent):
    """Progress whose lines are kept."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def say(self, text: str) -> None:
        self._lines.append(text)


def succeed(outcomes: Mapping[str, JobResult | Exception]) -> dict[str, JobResult]:
    """Raise the first error, if any."""
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return dict(outcomes)
