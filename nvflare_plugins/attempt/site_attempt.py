"""What every attempt at a site begins and ends with: run folder, evidence, session; then closing and the run record.

For jobs that exchange sealed messages or few sums; horizontal training, with its cuts and checkpoints, has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dp_components.errors import PrivacyError
from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.attempt.agreement import versions
from nvflare_plugins.attempt.job_context import Job, SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.evidence.contents import Content, Protection
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.failures import reason_of
from nvflare_plugins.report.report import keep_report
from nvflare_plugins.report.run_record import ReportSection, RoundRow, RunRecord, TrafficRow
from nvflare_plugins.wire.catalogue import Kind, Phase, TrainingStep
from nvflare_plugins.wire.channel import Channel, HeadExchange, Transport
from nvflare_plugins.wire.envelope import Codec


@dataclass(slots=True)
class SiteAttempt:
    """One attempt with its session open; use ``open_attempt``."""

    job: Job
    context: SiteContext
    folder: RunFolder
    channel: Channel
    evidence: EvidenceLog
    session: Session
    heads: HeadExchange
    rounds: list[RoundRow] = field(default_factory=list)

    def gather_sealed(self, purpose: str, content: bytes) -> list[bytes]:
        """Give content to all sites, sealed under the group key; return that of all, in rank order."""
        sealed = self.channel.gather(Kind.AGREEMENT, self.session.seal_to_all(content, purpose), Codec.SEALED)
        return [
            content if rank == self.channel.rank else self.session.open_from(rank, sealed[rank], purpose)
            for rank in range(self.channel.world)
        ]

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

    def round_done(self, number: int, row: RoundRow) -> None:
        """Note a finished round in the evidence, whose heads then travel with the next exchange."""
        self.rounds.append(row)
        self.evidence.round(number)
        self.heads.mark()

    def conclude(self, agreed: bytes, n_bytes: int) -> bytes:
        """Show that all sites ended alike, and exchange the heads of the evidence.

        Args:
            agreed: what all sites must have equal, such as a model.
            n_bytes: size of this site's part of the result.

        Write the result after this, then call ``all_have_written``.

        Returns:
            Its HMAC under the group key.

        Raises:
            ConfigurationError: another site ended with something else.
        """
        rank, session = self.channel.rank, self.session
        # It names the site: otherwise a server could answer every site with that site's own proof.
        proofs = self.channel.gather(Kind.MODEL_CHECK, session.hmac(f"result of {rank}", agreed))
        if any(proof != session.hmac(f"result of {r}", agreed) for r, proof in enumerate(proofs)):
            raise ConfigurationError("the sites ended with different results; none was written")
        hmac = session.hmac("result", agreed)
        self.evidence.model("result", n_bytes, hmac)
        self.heads.mark()
        self.channel.moment = TrainingStep(Phase.FINISH, self.channel.moment.round)
        self.channel.gather(Kind.CLOSING, b"")
        return hmac

    def all_have_written(self) -> None:
        """Wait until every site has its result on the disk; only then may go what a lost job is resumed from.

        A site that dies before leaves checkpoints, reservations and ledgers of all sites as they were.
        """
        self.channel.gather(Kind.CLOSING, b"")

    def write_record(
        self,
        title: str,
        params: Mapping[str, Any],
        model: str | None,
        sections: tuple[ReportSection, ...] = (),
        **facts: Any,
    ) -> None:
        """End the evidence, write ``run.json`` and the report; call it after the results are on the disk.

        Args:
            title: what kind of job it was.
            model: file name of an ordinary XGBoost model in the run folder, whose importances the report shows.
            sections: what this kind of job adds to the report.
            facts: further attributes of ``RunRecord``.
        """
        self.evidence.end("completed")
        evidence = self.evidence.close()
        channel = self.channel
        traffic = tuple(
            TrafficRow(kind.name, codec.name, kind.private, t.messages, t.bytes_out, t.bytes_in, t.seconds)
            for (kind, codec), t in channel.traffic.items()
        )
        settings = {name: value for name, value in self.job.to_dict().items() if name != "params"}
        record = RunRecord(
            job_id=channel.job_id,
            attempt=channel.attempt,
            site=channel.site,
            sites=channel.sites,
            profile=self.job.profile,
            signed=self.session.signed,
            params=dict(params),
            settings=settings,
            rounds=tuple(self.rounds),
            traffic=traffic,
            versions=versions(),
            model=model,
            evidence=str(evidence.relative_to(self.folder.path)),
            title=title,
            sections=sections,
            **facts,
        )
        keep_report(record, self.folder.path)


@contextmanager
def open_attempt(
    job: Job,
    context: SiteContext,
    transport: Transport,
    timeout_s: float,
    binding: bytes,
    protection: Mapping[str, str | int],
) -> Iterator[SiteAttempt]:
    """Open evidence and session of one attempt, and close both whatever happens.

    Args:
        timeout_s: longest wait for one exchange.
        binding: hash of everything that must be equal at all sites before anything private is sent.
        protection: facts for the evidence, such as the trust model and epsilon as text.

    Raises:
        VeilBoostError: what ended the attempt; a refusal of the privacy ledger becomes a ``PolicyRefusal``.
    """
    folder = RunFolder(context.runs, context.job_id).create()
    channel = Channel(context.site, context.sites, context.job_id, context.attempt, transport, timeout_s)
    try:
        path = folder.evidence / export_name(context.site)
        evidence = EvidenceLog(path, context.site, context.job_id, channel.attempt, job.profile)
    except FileExistsError:
        raise ConfigurationError(
            f"{context.site} has evidence of job {context.job_id} already, which is never overwritten: submit the job "
            "anew"
        ) from None
    channel.recorder = evidence
    try:
        session = open_session(channel, context.identity, context.policy, binding)
        try:
            channel.heads = _record_session(evidence, session, channel, context, protection)
            yield SiteAttempt(job, context, folder, channel, evidence, session, channel.heads)
        finally:
            session.close()
    except PrivacyError as error:
        evidence.abandon(str(error))
        raise PolicyRefusal(str(error)) from None
    except BaseException as error:  # whatever ends the attempt, the evidence ends with a record of it
        evidence.abandon(reason_of(error))
        raise
    finally:
        evidence.close()


def _record_session(
    evidence: EvidenceLog, session: Session, channel: Channel, context: SiteContext, protection: Mapping[str, str | int]
) -> HeadExchange:
    evidence.session(
        **session.evidence_facts(), versions=versions(), policy_hash=context.policy.fingerprint(), protection=protection
    )

    def take_heads(heads: list[bytes]) -> None:
        named = dict(zip((*channel.sites, SERVER), heads, strict=True))
        if not named[SERVER]:
            del named[SERVER]
        evidence.countersign(named, session.head_verifier())

    return HeadExchange(evidence.signed_head, take_heads)
