"""The messages of training on their way through a conversation, each noted in the evidence by what it holds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from he_processors.errors import ProtocolError
from nvflare_plugins.evidence.contents import Content, Protection
from nvflare_plugins.vertical.job import VerticalProfile
from nvflare_plugins.vertical.protocol.messages import (
    Answer,
    DecisionAnswer,
    DecisionRequest,
    HistogramAnswer,
    HistogramRequest,
    Message,
    MoreGradients,
    MoreSums,
    PartySchema,
    Request,
    SplitAnswer,
    SplitRequest,
    TrainingSetup,
    TreeGradients,
    from_bytes,
    to_bytes,
)
from nvflare_plugins.vertical.protocol.requester import Requester

_CONTENT: dict[type[Message], Content] = {
    PartySchema: Content.SCHEMA,
    TrainingSetup: Content.SETUP,
    TreeGradients: Content.GRADIENTS,
    MoreGradients: Content.GRADIENTS,
    HistogramRequest: Content.HISTOGRAM_REQUEST,
    MoreSums: Content.HISTOGRAM_REQUEST,
    HistogramAnswer: Content.HISTOGRAMS,
    SplitRequest: Content.SPLITS,
    SplitAnswer: Content.PARTITIONS,
    DecisionRequest: Content.DECISION_REQUEST,
    DecisionAnswer: Content.DECISIONS,
}
_CIPHERTEXTS = {
    VerticalProfile.PAILLIER.value: Protection.PAILLIER,
    VerticalProfile.ELGAMAL.value: Protection.ELGAMAL,
    VerticalProfile.PLAIN.value: Protection.CLEAR,
}


class ContentLog(Protocol):
    """What the link needs of an evidence log."""

    def content(self, direction: str, peer: str, what: Content, protection: Protection, size_bytes: int) -> None: ...


class MessageNotes(Protocol):
    """Takes note of the messages of a conversation."""

    def sent(self, peer: str, message: Message, size: int) -> None:
        """Note a message that is about to leave."""

    def received(self, peer: str, message: Message, size: int) -> None:
        """Note a message that came."""


class ContentRecorder:
    """Notes in the evidence what passes between this site and the others.

    Attributes:
        has_told: whether this site has told more than its public key.
    """

    def __init__(self, evidence: ContentLog, profile: str):
        self._evidence = evidence
        self._ciphertexts = _CIPHERTEXTS[profile]
        self.has_told = False

    def sent(self, peer: str, message: Message, size: int) -> None:
        """Note a message that is about to leave. Raises: ProtocolError, if its content must not."""
        self.has_told = self.has_told or not isinstance(message, TrainingSetup)
        self._note("sent", peer, message, size)

    def received(self, peer: str, message: Message, size: int) -> None:
        """Note a message that came."""
        self._note("received", peer, message, size)

    def _note(self, direction: str, peer: str, message: Message, size: int) -> None:
        what = _CONTENT[type(message)]
        protection = self._ciphertexts if what.encrypted else Protection.CLEAR
        self._evidence.content(direction, peer, what, protection, size)


class ConversationLink:
    """The active party's link to one passive party (a ``PassiveLink``)."""

    def __init__(self, asking: Requester, rank: int, name: str, notes: MessageNotes):
        self._asking, self._rank, self._name, self._notes = asking, rank, name, notes

    def ask(self, request: Request) -> Future[Answer | None]:
        """Queue a request."""
        data = to_bytes(request)
        self._notes.sent(self._name, request, len(data))
        return self._asking.ask(self._rank, data, self._read)

    def flush(self) -> None:
        """Let requests go that wait for further ones."""
        self._asking.flush()

    def _read(self, data: bytes) -> Answer | None:
        if not data:
            return None
        answer = from_bytes(data)
        if not isinstance(answer, Answer):
            raise ProtocolError(f"{self._name} answered with a request")
        self._notes.received(self._name, answer, len(data))
        return answer


def answer_bytes(data: bytes, peer: str, answer: Callable[[Request], Answer | None], notes: MessageNotes) -> bytes:
    """Answer a request in its byte form, at a passive party.

    Raises:
        ProtocolError: not a request, or one that has no place here.
    """
    request = from_bytes(data)
    if not isinstance(request, Request):
        raise ProtocolError("the active party sent an answer where a request is due")
    notes.received(peer, request, len(data))
    reply = answer(request)
    if reply is None:
        return b""
    encoded = to_bytes(reply)
    notes.sent(peer, reply, len(encoded))
    return encoded
