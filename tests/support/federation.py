"""Sites in one process: each in a thread with a workspace, a policy and files; the server is an ``Aggregator``."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import xgboost as xgb

from nvflare_plugins.attempt.job_context import Job, JobResult, Progress, Silent, SiteContext
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.data.labels import columns_of
from nvflare_plugins.kinds.horizontal.site import run_site
from nvflare_plugins.pages.run_record import RoundRow, RunRecord
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.aggregation import Aggregator, Transfer
from nvflare_plugins.wire.channel import Transport
from nvflare_plugins.wire.envelope import Frame, Kind, unpack
from nvflare_plugins.xgb.cuts import Cuts, reference_table

TIMEOUT_S = 60.0
HANGS_S = 1800.0  # whoever is not done by then waits for something that does not come


class SiteDied(Exception):
    """Raised by a test's hook: the site's process is gone and tells nobody."""


Tamper = Callable[[bytes], bytes]
RunSite = Callable[..., JobResult]
"""(job, context, transport, timeout_s, progress) -> outcome."""


def dies_at(kind: Kind, nth: int = 1, in_round: int | None = None) -> Tamper:
    """Return a hook at which the site's process ends: at the nth frame of a kind (in a round), sent or answered."""
    seen: list[int] = []

    def tamper(frame: bytes) -> bytes:
        unpacked = unpack(frame)
        if unpacked.kind is kind and in_round in (None, unpacked.moment.round):
            seen.append(1)
            if len(seen) >= nth:
                raise SiteDied
        return frame

    return tamper


class DirectTransport:
    """Hands frames to the aggregator of the same process; hooks may change them on the way."""

    def __init__(
        self,
        aggregator: Aggregator,
        site: str,
        tamper: Tamper | None = None,
        tamper_reply: Tamper | None = None,
        sends_twice: bool = False,
        frames: list[tuple[str, bytes]] | None = None,
    ):
        """Lose with ``sends_twice`` the first answer to each frame, so that all are retried; keep all in ``frames``."""
        self._aggregator = aggregator
        self._site = site
        self._tamper = tamper or (lambda frame: frame)
        self._tamper_reply = tamper_reply or (lambda frame: frame)
        self._sends_twice = sends_twice
        self._frames = frames
        self._reason: str | None = None
        self._answered = threading.Condition()
        self._awaits = False
        self._gives_up = False
        self.died = False
        self.ended = False  # whether its site's part is over

    @property
    def is_idle(self) -> bool:
        """Return whether its site sends nothing before somebody else does, if it ever sends again."""
        return self.died or self.ended or self._awaits

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        try:
            frame = self._tamper(frame)
        except SiteDied:
            self.died = True
            raise
        answers: list[bytes] = []

        def reply(data: bytes) -> None:
            with self._answered:
                answers.append(data)
                self._awaits = False
                self._answered.notify_all()

        if self._frames is not None:
            self._frames.append((self._site, frame))
        if self._sends_twice:
            self._aggregator.submit(self._site, frame, lambda answer: None)
        self._aggregator.submit(self._site, frame, reply)
        with self._answered:
            self._awaits = not answers and not self._reason
            self._answered.wait_for(lambda: answers or self._reason or self._gives_up, timeout_s)
            if not answers and not self._reason:
                self._awaits = False
                raise JobAborted("no answer from the server in time")
        if self._reason:
            raise JobAborted(self._reason)
        try:
            return self._tamper_reply(answers[0])
        except SiteDied:
            self.died = True
            raise

    def give_up(self) -> None:
        """Let its site's patience end now."""
        with self._answered:
            self._gives_up = True
            self._answered.notify_all()

    def abort(self, reason: str) -> None:
        with self._answered:
            self._reason = reason
            self._awaits = False
            self._answered.notify_all()


def expire_for_the_dead(
    aggregator: Aggregator,
    transports: Mapping[str, DirectTransport],
    n_sites: int,
    done: threading.Event,
    patient: bool = True,
) -> None:
    """Let the server's deadline end the attempt of a dead site, but never that of a slow one on a busy machine.

    The server looks at its deadline, which may be short, only where nobody alive goes on by itself; sites that are not
    ``patient`` give up there before it does.
    """
    while not done.wait(0.02):
        all_of_them = list(transports.values())
        if len(all_of_them) == n_sites and any(t.died for t in all_of_them) and all(t.is_idle for t in all_of_them):
            if not patient:
                for transport in all_of_them:
                    transport.give_up()
            aggregator.expire()


def run_in_threads(
    aggregator: Aggregator,
    sites: Sequence[str],
    take_part: Callable[[str, DirectTransport], Any],
    *,
    tamper: Mapping[str, Tamper] | None = None,
    tamper_reply: Mapping[str, Tamper] | None = None,
    sends_twice: bool = False,
    frames: list[tuple[str, bytes]] | None = None,
    transports: dict[str, DirectTransport] | None = None,
    notices_death: bool = False,
    patient: bool = True,
    reason: Callable[[Exception], str] = str,
) -> dict[str, Any]:
    """Let every site take part in a thread of its own; return what each returned, or the error that ended it.

    Args:
        take_part: called with a site and its transport.
        tamper, tamper_reply: hooks by site; one that raises ``SiteDied`` is a process that is gone and tells nobody.
        sends_twice, frames: of all sites, see ``DirectTransport``.
        transports: filled with each site's, for aborts.
        notices_death: the server learns at once that a process is gone, as from FLARE; else by its deadline, once
            nobody alive goes on by itself.
        patient: sites wait for an answer as long as they are told; else until nobody alive goes on by itself.
        reason: what others are told of an error.
    """
    outcomes: dict[str, Any] = {}
    transports = {} if transports is None else transports
    done = threading.Event()

    def run(site: str) -> None:
        hooks = (tamper or {}).get(site), (tamper_reply or {}).get(site)
        transport = transports[site] = DirectTransport(aggregator, site, *hooks, sends_twice, frames)
        try:
            outcomes[site] = take_part(site, transport)
        except Exception as error:  # the test decides what it expected
            # XGBoost's thread turns what a hook raises into an error of its own.
            transport.died = transport.died or isinstance(error, SiteDied)
            outcomes[site] = SiteDied() if transport.died else error
            if notices_death or not transport.died:
                aggregator.abort(f"{site}: {reason(error)}")
        finally:
            transport.ended = True

    watch = [aggregator, transports, len(sites), done, patient]
    threading.Thread(target=expire_for_the_dead, args=watch, daemon=True).start()
    threads = [threading.Thread(target=run, args=(site,), daemon=True) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
        if thread.is_alive():
            raise AssertionError("a site hangs")
    done.set()
    return {site: outcomes[site] for site in sites}


class _Told(Silent):
    """Progress that calls a function after each round."""

    def __init__(self, on_round: Callable) -> None:
        self._on_round = on_round

    def __call__(self, record: RoundRow, n_rounds: int) -> None:
        self._on_round(record, n_rounds)


def told(progress: Any) -> Progress:
    """Return progress, also where a test gives a function alone."""
    return progress if hasattr(progress, "say") else _Told(progress)


class Listener(Silent):
    """Progress whose lines are kept."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __call__(self, record: RoundRow, n_rounds: int) -> None:
        metrics = "".join(f", {name} {value:.6f}" for name, value in record.metrics.items())
        self.say(f"round {record.round + 1} of {n_rounds}{metrics}")

    def say(self, text: str) -> None:
        self._lines.append(text)


@dataclass
class Parties:
    """Sites site-1, site-2, ... for any kind of job: each with a workspace, a policy and files of its own."""

    folder: Path
    n_sites: int = 3
    policy: dict[str, Any] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    said: dict[str, list[str]] = field(default_factory=dict)
    first_policy: ClassVar[dict[str, Any]] = {"unsigned_sessions": True, "share_data_errors": True}

    def copied(self, folder: Path) -> Self:
        """Return the same parties in another folder, with all that they keep: as if they had run the jobs there."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        other = copy.copy(self)
        other.folder, other.transfers, other.said = folder, [], {}
        return other

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
        self.set_policy(site, data_sets={name: {"path": f"{name}.parquet", **facts}})

    def give_data(self, name: str, frame: pd.DataFrame, parts: Sequence[np.ndarray] | None = None) -> None:
        """Split a table over the sites in order (or by the given row numbers)."""
        parts = parts if parts is not None else np.array_split(np.arange(len(frame)), self.n_sites)
        for site, rows in zip(self.sites, parts, strict=True):
            self.give(site, name, frame.iloc[rows])

    def give_input(self, site: str, name: str, document: object) -> None:
        """Put a JSON file into a site's input folder."""
        folder = self.workspace(site) / "inputs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document))

    def policy_of(self, site: str) -> dict[str, Any]:
        path = self.workspace(site) / "local" / "veilboost.json"
        return json.loads(path.read_text()) if path.exists() else {**self.first_policy, "data_sets": {}, **self.policy}

    def set_policy(self, site: str, **changes: Any) -> None:
        """Change keys of a site's policy; data sets are added to those that it names, and None leaves none."""
        document = self.policy_of(site)
        added = changes.pop("data_sets", {})
        sets = {} if added is None else {**document.get("data_sets", {}), **added}
        path = self.workspace(site) / "local" / "veilboost.json"
        path.write_text(json.dumps({**document, **changes, "data_sets": sets}))

    def set_policies(self, **changes: Any) -> None:
        """Change keys of every site's policy."""
        for site in self.sites:
            self.set_policy(site, **changes)

    @classmethod
    def with_tables(cls, folder: Path, frames: Sequence[pd.DataFrame], policy: dict[str, Any]) -> Self:
        """Return as many parties as there are tables, each with its own as data set "train"."""
        parties = cls(folder, len(frames), policy)
        for site, frame in zip(parties.sites, frames, strict=True):
            parties.give(site, "train", frame)
        return parties

    def context(
        self, site: str, among: Sequence[str], job_id: str = "job", attempt: bytes = bytes(16), number: int = 1
    ) -> SiteContext:
        """Return what a site knows of an attempt."""
        policy, runs = SitePolicy.load(self.workspace(site), site), self.workspace(site) / "runs"
        return SiteContext(site, tuple(among), job_id, attempt, runs, policy, Identity.unsigned(site), number)

    def run(
        self,
        run_site: RunSite,
        job: Job,
        job_id: str = "job",
        on_sum: Callable[[Frame, bytes], bytes] | None = None,
        carry: Callable[[str, Transport], Transport] | None = None,
        number: int = 1,
        sites: Sequence[str] | None = None,
        **hooks: Any,
    ) -> dict[str, JobResult | Exception]:
        """Run the job at all sites, or some; a site that failed has its error in place of an outcome.

        Args:
            carry: makes of a site's transport the one that it uses.
            number: of the attempt in its job.
            hooks: of ``run_in_threads``.
        """
        attempt, among = os.urandom(16), tuple(self.sites if sites is None else sites)
        aggregator = Aggregator(among, attempt, TIMEOUT_S, self.transfers.append, on_sum=on_sum)

        def take_part(site: str, direct: DirectTransport) -> JobResult:
            transport = direct if carry is None else carry(site, direct)
            context = self.context(site, among, job_id, attempt, number)
            return run_site(job, context, transport, TIMEOUT_S, Listener(self.said.setdefault(site, [])))

        return run_in_threads(aggregator, among, take_part, notices_death=True, **hooks)


class Federation(Parties):
    """Sites with rows of one table, for horizontal jobs."""

    first_policy: ClassVar[dict[str, Any]] = {
        **Parties.first_policy,
        "allowed_profiles": [*BUILT_IN],
        "consents": {
            "plain_profile": True,
            "exact_cuts": True,
            "exact_leaves": True,
            "recompute_with_changes": True,
            "second_quantile_search": True,
        },
        # Tiny tables, and every parameter as XGBoost has it: test_row_floors.py is about the floors.
        "min_effective_rows": 1,
        "min_rows_per_node": 0,
    }

    @classmethod
    def of(
        cls,
        folder: Path,
        n_sites: int = 3,
        policy: dict[str, Any] | None = None,
        parts: Sequence[np.ndarray] | None = None,
        **tables: pd.DataFrame,
    ) -> Self:
        """Return sites that share tables (by the names of their data sets) as ``give_data`` does."""
        federation = cls(folder, n_sites, policy or {})
        for name, frame in tables.items():
            federation.give_data(name, frame, parts)
        return federation

    def set_registry_keys(self) -> None:
        """Give every site the key that it has in every federation that asks for it: it decides which rows are drawn."""
        for site in self.sites:
            folder = self.workspace(site) / "veilboost_registry" / site
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            Memory(folder, site, None).secret("registry", hashlib.sha256(site.encode()).digest())

    def run(
        self,
        job: HorizontalJob,
        job_id: str = "job",
        on_progress: Callable[[str], Callable] | None = None,
        deadline_s: float = 0.0,
        timeout_s: float = TIMEOUT_S,
        make_server: Callable[..., Aggregator] | None = None,
        number: int = 1,
        sites: Sequence[str] | None = None,
        **hooks: Any,
    ) -> dict[str, JobResult | Exception]:
        """Run the job; a site that failed has its error in place of a result.

        Args:
            deadline_s: of the server, once nobody alive goes on by itself.
            make_server: called with sites, attempt and deadline.
            number: of the attempt in its job.
            sites: those that take part, if not all.
            hooks: of ``run_in_threads``.
        """
        attempt, among = os.urandom(16), tuple(self.sites if sites is None else sites)

        def take_part(site: str, transport: DirectTransport) -> JobResult:
            progress = told(on_progress(site)) if on_progress else Silent()
            return run_site(job, self.context(site, among, job_id, attempt, number), transport, timeout_s, progress)

        return run_in_threads((make_server or Aggregator)(among, attempt, deadline_s), among, take_part, **hooks)

    def model(self, job_id: str = "job", sites: Sequence[str] | None = None) -> bytes:
        """Return the model, which must be the same bytes at every site."""
        models = {(self.run_folder(site, job_id) / "model.json").read_bytes() for site in sites or self.sites}
        if len(models) != 1:
            raise AssertionError("the sites' models differ")
        return models.pop()

    def record(self, site: str, job_id: str = "job") -> RunRecord:
        """Return what a site keeps about the run, the rounds with their metrics among it."""
        return RunRecord.from_dict(json.loads((self.run_folder(site, job_id) / "run.json").read_text()))

    def metrics(self, site: str) -> dict[str, float]:
        """Return the metrics of the last round."""
        return self.record(site).rounds[-1].metrics

    def cuts(self, job_id: str = "job") -> Cuts:
        return Cuts.from_lists(json.loads((self.run_folder(self.sites[0], job_id) / "cuts.json").read_text()))


def succeed(outcomes: Mapping[str, JobResult | Exception]) -> dict[str, JobResult]:
    """Raise the first error, if any."""
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return dict(outcomes)


def label_facts(frame: pd.DataFrame, label: str | Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return a label as XGBoost's matrices take it."""
    if isinstance(label, str):
        return {"label": frame[label].to_numpy(np.float32)}
    found = {part: frame[column].to_numpy(np.float32) for part, column in label.items()}
    if "time" in found:
        lower, upper = found["time"], np.where(found["event"] == 1, found["time"], np.inf)
    elif "signed" in found:
        lower, upper = np.abs(found["signed"]), np.where(found["signed"] > 0, found["signed"], np.inf)
    else:
        lower, upper = np.nan_to_num(found["lower"]), np.where(np.isnan(found["upper"]), np.inf, found["upper"])
    return {"label_lower_bound": lower, "label_upper_bound": upper}


def central_model(
    frame: pd.DataFrame,
    label: str | Mapping[str, str],
    params: dict,
    cuts: Cuts,
    num_rounds: int,
    weight: str | None = None,
    initial: bytes | None = None,
    n_categories: Mapping[int, int] | None = None,
    **options: object,
) -> xgb.Booster:
    """Train stock XGBoost on the pooled rows with the agreed cuts.

    Args:
        n_categories: by position of each categorical column, whose values must be codes already.
        options: of ``xgb.train``; ``eval_frame`` is turned into its ``evals``.
    """
    n_categories = n_categories or {}
    features = frame.drop(columns=[*columns_of(label)] + ([weight] if weight else []))
    names = list(features.columns)
    common = {
        "feature_names": names,
        "enable_categorical": True,
        "feature_types": ["c" if i in n_categories else "float" for i in range(len(names))],
    }
    max_bin = params.get("max_bin", 256)
    reference = xgb.QuantileDMatrix(reference_table(cuts, n_categories), max_bin=max_bin, **common)
    matrix = xgb.QuantileDMatrix(
        features.to_numpy(np.float32),
        **label_facts(frame, label),
        weight=frame[weight].to_numpy(np.float32) if weight else None,
        ref=reference,
        max_bin=max_bin,
        **common,
    )
    eval_frame = options.pop("eval_frame", None)
    if eval_frame is not None:
        held_out = xgb.DMatrix(eval_frame[names].to_numpy(np.float32), **label_facts(eval_frame, label), **common)
        options["evals"] = [(held_out, "eval")]
    settings = {"tree_method": "hist", "nthread": 1, **params}
    return xgb.train(settings, matrix, num_rounds, xgb_model=bytearray(initial) if initial else None, **options)


def leaf_difference(ours: bytes, reference: xgb.Booster) -> float:
    """Return the largest difference of leaves, in units of max(1, |leaf|); infinite if anything else differs."""
    booster = xgb.Booster(model_file=bytearray(ours))
    mine, theirs = booster.trees_to_dataframe(), reference.trees_to_dataframe()
    if len(mine) != len(theirs):
        return np.inf
    for column in ("Tree", "Node", "Feature", "Split", "Yes", "No", "Missing"):
        a, b = mine[column], theirs[column]
        if not ((a == b) | (a.isna() & b.isna())).all():
            return np.inf
    leaves = (mine.Feature == "Leaf").to_numpy()
    a, b = mine.Gain.to_numpy()[leaves], theirs.Gain.to_numpy()[leaves]
    return float((np.abs(a - b) / np.maximum(1, np.abs(b))).max())
