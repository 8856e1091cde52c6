"""What every attempt at a site begins and ends with: run folder, evidence, session, reservations, run record."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from dp_components.errors import PrivacyError
from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.attempt.job_context import Job, JobResult, Progress, Silent, SiteContext, waiting_s
from nvflare_plugins.attempt.payment import spending_of
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.session import Session, open_session, tell_all, versions
from nvflare_plugins.base.errors import PolicyRefusal, reason_of, time_mends
from nvflare_plugins.evidence.audit import protocol_facts
from nvflare_plugins.evidence.format import SERVER, Content, Protection, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import earlier_log, put_aside
from nvflare_plugins.pages.report import keep_report
from nvflare_plugins.pages.run_record import FILE_NAME as RECORD
from nvflare_plugins.pages.run_record import DataFacts, ReportSection, RoundRow, RunRecord, TrafficRow
from nvflare_plugins.site.data_refusals import reading_rows
from nvflare_plugins.site.memory.registry import Registry, Reservation, ResumePoint, Wanted
from nvflare_plugins.site.policy_values import noting_consents
from nvflare_plugins.site.protocols import Span
from nvflare_plugins.wire.channel import Channel, HeadExchange, Transport
from nvflare_plugins.wire.envelope import Kind, Phase, TrainingStep
from nvflare_plugins.workers.workers import not_used
from nvflare_plugins.xgb.versions import installed_wheel

# What every attempt at a site begins and ends with: run folder, evidence, session; then closing and the run record.


_log = logging.getLogger(__name__)
P = TypeVar("P")
Facts = Mapping[str, str | int]
_SIMULATED = (
    "FLARE's simulator calls every job so. Rename the folder of that run at every site, such as to august, the name by "
    "which its model is then known, or take a POC, whose jobs have ids"
)
_NOT_SHOWN = (
    "params",
    "cut_bounds",
    "categories",
    "trials",
    "search",
)  # by the report among a job's settings: too long, or shown elsewhere


def gone_on(number: int, rounds: Sequence[RoundRow], how: str | None = None) -> str:
    """Return, for the report, that this is not the first attempt of its job, and how it went on."""
    done = how or (f"went on from round {rounds[0].round + 1}" if rounds else "had nothing left to train")
    return (
        f"Sites were lost while this job ran. Attempt {number}, whose rounds are shown, {done}; evidence of the "
        "attempts before it lies beside this one's."
    )


def settings_of(job: Job) -> dict[str, Any]:
    """Return what a report shows of a job."""
    return {name: value for name, value in job.to_dict().items() if name not in _NOT_SHOWN}


def now() -> str:
    """Return the time by this site's clock, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(slots=True)
class SiteAttempt:
    """One attempt with its session open; use a ``SitePart``, or ``open_attempt``.

    Attributes:
        timeout_s: longest wait for one exchange; the server's own deadline comes first.
        consents: names of this site's consents that have decided something so far.
        started: when the attempt began, ISO 8601 in UTC.
        notes: what this site's report says besides what the kind of job adds.
        all_are_done: every site has its result on the disk, and this one has only to write its record.
    """

    job: Any
    context: SiteContext
    transport: Transport
    timeout_s: float
    progress: Progress
    folder: RunFolder
    channel: Channel
    evidence: EvidenceLog
    session: Session
    heads: HeadExchange
    rounds: list[RoundRow] = field(default_factory=list)
    consents: set[str] = field(default_factory=set)
    started: str = field(default_factory=now)
    notes: tuple[str, ...] = ()
    all_are_done: bool = False

    def gather_sealed(self, purpose: str, content: bytes, kind: Kind = Kind.AGREEMENT) -> list[bytes]:
        """Give content to all sites, sealed under the group key; return that of all, in rank order."""
        return tell_all(self.channel, self.session, content, purpose, kind)

    def route_sealed(
        self, purpose: str, parts: Mapping[int, bytes], what: Content, protection: Protection
    ) -> list[bytes]:
        """Give each rank its own content, sealed for it alone; return what the others gave to this one, by rank.

        A rank without content gets, and gives, empty bytes. The evidence says what the content was.

        Raises:
            ProtocolError, AuthenticationError: a part does not open, or is not of this exchange.
        """
        channel, session, sealed = self.channel, self.session, [b""] * self.channel.world
        for rank, content in parts.items():
            self.evidence.content("sent", channel.sites[rank], what, protection, len(content))
            sealed[rank] = session.seal_for(rank, content, purpose)
        opened = [b""] * channel.world
        for rank, data in enumerate(channel.route(Kind.CONVERSATION, sealed)):
            if data:
                opened[rank] = session.open_of(rank, data, purpose)
                self.evidence.content("received", channel.sites[rank], what, protection, len(opened[rank]))
        return opened

    def round_done(self, row: RoundRow) -> None:
        """Note a finished round in the evidence, whose heads then travel with the next exchange."""
        self.rounds.append(row)
        self.evidence.round(row.round)
        self.heads.is_due = True

    def proof(self, rank: int, purpose: str, data: bytes) -> bytes:
        """Return what the site of ``rank`` shows to prove that it holds the same data.

        It names the site: otherwise a server could answer every site with that site's own proof.
        """
        return self.session.hmac(f"{purpose} of {rank}", data)

    def conclude(self, agreed: bytes, name: str = "result") -> bytes:
        """Show that all sites ended alike, and exchange the heads of the evidence.

        Args:
            agreed: what all sites must have equal, such as a model.
            name: what the evidence calls it.

        Write the result after this, then call ``all_have_written``.

        No two sites finalise different results, whatever the server does: a site writes its own only when every other
        one has confirmed, under the key that the two share, that it found all proofs equal to its own. That all sites
        get this far cannot be forced: a site that lacks the last answer is left without a result, and says so.

        Returns:
            Its HMAC under the group key.

        Raises:
            ProtocolError: another site ended with something else.
            VeilBoostError: this site is left without a result.
        """
        channel = self.channel
        proofs = channel.gather(Kind.MODEL_CHECK, self.proof(channel.rank, "result", agreed))
        different = [s for r, s in enumerate(channel.sites) if proofs[r] != self.proof(r, "result", agreed)]
        if different:
            raise ProtocolError(
                f"the sites ended with different results; none was written (unlike this site: {', '.join(different)})"
            )
        hmac = self.session.hmac("result", agreed)
        self.evidence.model(name, len(agreed), hmac)
        self.heads.is_due = True
        self.channel.moment = TrainingStep(Phase.FINISH, self.channel.moment.round)
        with _told(
            "this site is left without its result at the last step; others may have theirs, which are then the same"
        ):
            self.channel.gather(Kind.CLOSING, b"")
        return hmac

    def all_have_written(self) -> None:
        """Wait until every site has its result on the disk; only then may go what a lost job is resumed from.

        A site that dies before leaves checkpoints, reservations and ledgers of all sites as they were.

        Raises:
            VeilBoostError: this site has its result, and does not know whether all have.
        """
        with _told("this site has its result; whether all others have theirs is not known"):
            self.channel.gather(Kind.CLOSING, b"")
        self.evidence.flush_last()  # whoever ends this log finds that all were done
        self.all_are_done = True

    def write_record(
        self,
        title: str,
        params: Mapping[str, Any],
        model: str | None,
        sections: tuple[ReportSection, ...] = (),
        *,
        data: tuple[DataFacts, ...] = (),
        notes: tuple[str, ...] = (),
        **facts: Any,
    ) -> None:
        """End the evidence, write ``run.json`` and the report; call it after the results are on the disk.

        Args:
            title: what kind of job it was.
            model: file name of an ordinary XGBoost model in the run folder, whose importances the report shows.
            sections: what this kind of job adds to the report.
            data: the data sets that the job has used here.
            notes: what else the report says of this run, in sentences.
            facts: further attributes of ``RunRecord``.
        """
        self.evidence.end("completed")
        evidence = self.evidence.close()
        channel = self.channel
        traffic = tuple(
            TrafficRow(kind.name, codec.name, kind.private, t.messages, t.bytes_out, t.bytes_in, t.seconds)
            for (kind, codec), t in channel.traffic.items()
        )
        policy, names = self.context.policy, [one.name for one in data]
        record = RunRecord(
            job_id=channel.job_id,
            attempt=channel.attempt,
            site=channel.site,
            sites=channel.sites,
            profile=self.job.profile,
            signed=self.session.signed,
            params=dict(params),
            settings=settings_of(self.job),
            rounds=tuple(self.rounds),
            traffic=traffic,
            versions=versions(),
            model=model,
            evidence=str(evidence.relative_to(self.folder.path)),
            title=title,
            sections=sections,
            started=self.started,
            finished=now(),
            policy_hash=policy.fingerprint(),
            consents=tuple(sorted(self.consents)),
            data=data,
            notes=(*self.notes, *notes),
            statement=policy.statement(names),
            spending=spending_of(policy, names),
            name=self.context.name,
            **facts,
        )
        keep_report(record, self.folder.path)


@dataclass(frozen=True)
class SitePart(Generic[P]):
    """A site's part in one kind of job: what the kind does is what its functions do.

    Attributes:
        prepare: checks the job against policy and data, at this site alone, and loads these; (job, context).
        train: does the rest, once the session is open.
        data_sets: names of all that a job looks at here; None among them is no data set.
        protection: facts on the scheme for the evidence, such as the trust model and epsilon as text; (job, prepared).
        uses_cluster: runs on a cluster that the policy names for a data set; else the report says that it did not.
    """

    prepare: Callable[[Any, SiteContext], P]
    train: Callable[[SiteAttempt, P], JobResult]
    data_sets: Callable[[Any], Iterable[str | None]] = lambda job: (job.data_set,)
    protection: Callable[[Any, P], Facts] = lambda job, prepared: {}
    uses_cluster: bool = False

    def __call__(
        self, job: Job, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress | None = None
    ) -> JobResult:
        """Take part in one attempt of a job.

        Args:
            timeout_s: longest wait for one exchange; the server's own deadline should come first.

        Raises:
            VeilBoostError: what ended the attempt at this site; its evidence says that it was aborted and why.
            OSError, MemoryError: the machine lacks something; as above.
        """
        with noting_consents() as consents, reading_rows(context.policy, job.profile, self.data_sets(job)):
            notes = () if self.uses_cluster else not_used(context.policy, self.data_sets(job))
            for note in notes:
                _log.info("%s", note)
            installed_wheel()
            prepared = self.prepare(job, context)
            facts = self.protection(job, prepared)
            with open_attempt(job, context, transport, timeout_s, facts, progress or Silent()) as attempt:
                attempt.consents, attempt.notes = consents, notes
                return self.train(attempt, prepared)


@contextmanager
def _told(what_it_means: str) -> Iterator[None]:
    """Let an error of the last messages say what it means for the result."""
    try:
        yield
    except VeilBoostError as error:
        raise type(error)(f"{error} ({what_it_means})") from None


def _binding(job: Job, context: SiteContext) -> bytes:
    """Return the hash that the handshake's transcript covers: of what must be equal before anything private is sent.

    What each site makes of it (columns, effective parameters, versions) is compared afterwards, sealed and by name.
    """
    return _hash_of({"kind": job.KIND, "job": job.stated(), "sites": context.sites, "number": context.number})


def _hash_of(document: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()


def check_server(speaks: Span | None, protocol: int, kind: str) -> None:
    """Refuse a server that does not know the protocol on which the sites have agreed, in which it has no part.

    Raises:
        ConfigurationError: it does not; the message says who is to be updated.
    """
    if speaks is not None and not speaks.least <= protocol <= speaks.most:
        who = "the server" if protocol > speaks.most else "the sites"
        raise ConfigurationError(
            f"the server speaks protocol {speaks} of {kind} jobs, and the sites have agreed on {protocol}: update "
            f"VeilBoost at {who}"
        )


@contextmanager
def open_attempt(
    job: Job,
    context: SiteContext,
    transport: Transport,
    timeout_s: float,
    protection: Facts,
    progress: Progress,
) -> Iterator[SiteAttempt]:
    """Open evidence and session of one attempt, and close both whatever happens.

    Raises:
        VeilBoostError: what ended the attempt; a refusal of the privacy ledger becomes a ``PolicyRefusal``.
    """
    folder = RunFolder(context.runs, context.job_id).create()
    channel = Channel(context.site, context.sites, context.job_id, context.attempt, transport, timeout_s)
    try:
        if context.number > 1:
            _check_goes_on(folder, context)
        if waiting_s(job) is not None:
            folder.enter(context.number, channel.attempt, _hash_of({"kind": job.KIND, "job": job.stated()}).hex())
        if context.number > 1:
            put_aside(folder.evidence, context.number, context.identity.sign if context.identity.is_signed else None)
        evidence = _open_log(folder, context, channel.attempt, job.profile, progress)
    except FileExistsError:
        raise ConfigurationError(
            f"{context.site} has evidence of job {context.job_id} already, which is never overwritten: "
            + (_SIMULATED if context.job_id == "simulate_job" else "submit the job anew")
        ) from None
    channel.recorder = evidence
    attempt: SiteAttempt | None = None
    try:
        session = open_session(channel, context.identity, context.policy, job.KIND, _binding(job, context))
        channel.macs = session.macs
        try:
            check_server(context.server_speaks, session.protocol, job.KIND)
            channel.heads = _record_session(evidence, session, channel, context, protection)
            folder.write_policy(context.policy.allowed())
            attempt = SiteAttempt(
                job, context, transport, timeout_s, progress, folder, channel, evidence, session, channel.heads
            )
            yield attempt
        finally:
            session.close()
    except PrivacyError as error:
        evidence.abandon(str(error))
        raise PolicyRefusal(str(error)) from None
    except BaseException as error:  # whatever ends the attempt, the evidence ends with a record of it
        if attempt is not None and attempt.all_are_done and waiting_s(job) is not None and time_mends(error):
            evidence.let_go()  # late_end.py ends it
        else:
            evidence.abandon(reason_of(error))
        raise
    finally:
        evidence.close()


def _open_log(folder: RunFolder, context: SiteContext, attempt: str, profile: str, progress: Progress) -> EvidenceLog:
    """Open the log of an attempt, which begins with this site's log of the one before.

    Raises:
        FileExistsError: this attempt has a log already.
    """
    earlier = earlier_log(folder.path, context.site) if context.number > 1 else None
    if context.number > 1 and earlier is None:
        progress.say("no evidence of an earlier attempt of this job is here, and the log of this one says so")
    path = folder.evidence / export_name(context.site)
    return EvidenceLog(path, context.site, context.job_id, attempt, profile, number=context.number, earlier=earlier)


def _check_goes_on(folder: RunFolder, context: SiteContext) -> None:
    """Refuse a further attempt of a job that has ended well here: a server could replace a result that is in use."""
    if (folder.path / RECORD).exists():
        raise ConfigurationError(
            f"{context.site} has the result of job {context.job_id} already, which no further attempt replaces: use it "
            "or submit the job anew"
        )


def _record_session(
    evidence: EvidenceLog, session: Session, channel: Channel, context: SiteContext, protection: Facts
) -> HeadExchange:
    facts = {**protection, **protocol_facts(session.protocol, session.protocols)}
    evidence.session(
        **session.evidence_facts(), versions=versions(), policy_hash=context.policy.fingerprint(), protection=facts
    )

    def take_heads(heads: list[bytes]) -> None:
        named = dict(zip((*channel.sites, SERVER), heads, strict=True))
        if not named[SERVER]:
            del named[SERVER]
        evidence.countersign(named, session.head_verifier())

    return HeadExchange(evidence.signed_head, take_heads)


# A run's entries in the site's registry, one for each data set: they stand at all sites, or at none.


class Reservations:
    """The entries of one run; use ``reserve_together``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.entries: list[Reservation] = []  # the training set's first

    @property
    def message(self) -> str:
        """What the registry says of the training set, in one sentence."""
        return self.entries[0].message

    def trees_complete(self, n_trees: int) -> None:
        """Note, durably, how far the run has come: a lost job is resumed from no later tree."""
        for entry in self.entries:
            self._registry.trees_complete(entry, n_trees)

    def complete(self, n_trees: int) -> None:
        """Note that the run has ended well."""
        for entry in self.entries:
            self._registry.complete(entry, n_trees)

    def cancel(self) -> None:
        """Forget a run that ended before anything about rows had left this site."""
        for entry in self.entries:
            self._registry.cancel(entry)

    def grown(self, *, is_enough: bool) -> None:
        """Settle added rows, see ``Registry.grown``. Raises: DataRefusal, PolicyRefusal."""
        for entry in self.entries:
            self._registry.grown(entry, is_enough=is_enough)

    @contextmanager
    def cancelled_by(self, *errors: type[BaseException]) -> Iterator[None]:
        """Forget the run if one of these errors ends what is done here."""
        try:
            yield
        except errors:
            self.cancel()
            raise


def reserve_together(
    attempt: SiteAttempt, registry: Registry, wanted: Iterable[Wanted], parameters: bytes, resume: ResumePoint | None
) -> Reservations:
    """Go on once every site's registry has allowed the run; else it has released nothing and is remembered nowhere.

    Args:
        parameters: what decides what the run releases about the rows (``Registry.reserve``).

    Raises:
        DataRefusal: this site's registry refuses.
        ConfigurationError: there is nothing to resume, or the registry is damaged.
        VeilBoostError: another site has ended the attempt.
    """
    reservations, context = Reservations(registry), attempt.context
    with reservations.cancelled_by(BaseException):
        for one in wanted:
            entry = registry.reserve(
                one,
                job_id=context.job_id,
                sites=context.sites,
                parameters=parameters,
                resume=resume,
                beside=reservations.entries,
            )
            reservations.entries.append(entry)
            _log.info("registry, %s: %s", one.data_set.name, entry.message)
        attempt.gather_sealed("registry", b"")
    return reservations
