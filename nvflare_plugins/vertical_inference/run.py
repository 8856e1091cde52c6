"""What the steps of one attempt of a job with a finished vertical model share, whatever the job does with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.evidence.contents import Content, Protection
from nvflare_plugins.vertical.model.model_files import ModelIdentity
from nvflare_plugins.vertical.protocol.conversation import FlowControl
from nvflare_plugins.vertical.protocol.messages import Message
from nvflare_plugins.vertical_inference.job import Action, InferenceJob


@dataclass(frozen=True, slots=True)
class Run:
    """What the steps of one attempt share."""

    attempt: SiteAttempt
    identity: ModelIdentity

    @property
    def job(self) -> InferenceJob:
        job: InferenceJob = self.attempt.job
        return job

    @property
    def context(self) -> SiteContext:
        return self.attempt.context

    @property
    def action(self) -> Action:
        return Action(self.job.action)

    @property
    def active_rank(self) -> int:
        return self.context.sites.index(self.identity.active)

    def give_active(self, content: bytes, what: Content) -> None:
        """Give the active party what the owners' consent allows."""
        self.attempt.route_sealed(self.job.action, {self.active_rank: content}, what, Protection.CLEAR)

    def take_from_owners(self, what: Content) -> dict[str, bytes]:
        """Return what each passive party gave, at the active party."""
        parts = self.attempt.route_sealed(self.job.action, {}, what, Protection.CLEAR)
        given = {site: part for site, part in zip(self.context.sites, parts, strict=True) if site != self.context.site}
        missing = [site for site, part in given.items() if not part]
        if missing:
            raise ProtocolError(f"{missing[0]} did not give its part")
        return given


def pace_of(run: Run, n_splits: int) -> FlowControl:
    """Return the pace of the conversation; a question names every split at most once."""
    longest = 1024 + n_splits * (16 + run.job.batch_rows // 8)
    return dataclasses.replace(FlowControl.within(run.attempt.timeout_s), message_bytes=longest)


class ContentNotes:
    """Notes in the evidence what passes between the active party and the owners of splits."""

    def __init__(self, attempt: SiteAttempt):
        self._evidence = attempt.evidence

    def sent(self, peer: str, message: Message, size: int) -> None:
        self.note("sent", peer, Content.DECISION_REQUEST, size)

    def received(self, peer: str, message: Message, size: int) -> None:
        self.note("received", peer, Content.DECISIONS, size)

    def note(self, direction: str, peer: str, what: Content, size: int) -> None:
        self._evidence.content(direction, peer, what, Protection.CLEAR, size)
