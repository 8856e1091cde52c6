"""The active party's walk for a few rows at a time, and what it says to owners of splits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.evidence.format import Content
from nvflare_plugins.kinds.vertical.conversation import Requester
from nvflare_plugins.kinds.vertical.messages import Answer, DecisionAnswer, Request, from_bytes, to_bytes
from nvflare_plugins.kinds.vertical.model import REFUSED, FederatedModel
from nvflare_plugins.kinds.vertical.model_files import ActivePart
from nvflare_plugins.kinds.vertical_inference.inference import class_names, classes_of, parties_of, rounds_of
from nvflare_plugins.kinds.vertical_inference.run import ContentNotes

Score = dict[str, Any]
"""What is told of one row: ``row``, and ``class`` with ``probability``, or ``prediction``."""

# What the active party and the owners of splits say to each other in a job that stays.
#
# Questions: ``open`` names the rows of the next batch, by position in the standing alignment; ``ask`` is a
# ``DecisionRequest`` about that batch; ``next`` says how to go on after this conversation: with another alignment, or
# not at all. Every answer says first whether it is one, or which of the owner's limits forbids it.
#
# Bytes: a question is one byte (1 open, 2 ask, 3 next) and its content: positions as uint32, little-endian, ascending;
# the bytes of the request; the id of a job in ASCII, or nothing. An answer is a byte 0 and the bytes of a
# ``DecisionAnswer``, or nothing; or a byte 1 and one byte, a place in ``LIMITS``.


LIMITS = ("", "predictions_per_job", "scoring_rows_per_day", "scoring_bits_per_row")
"""Keys below ``vertical`` of a policy that refuse rows; the first: the owner's own log says why."""
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Question(IntEnum):
    """The first byte of a question."""

    OPEN = 1
    ASK = 2
    NEXT = 3


def is_job_id(text: str) -> bool:
    """Return whether a text can be a job's id."""
    return _JOB_ID.fullmatch(text) is not None and text not in (".", "..")


def split_question(data: bytes) -> tuple[Question, bytes]:
    """Return what is asked, and the content. Raises: ProtocolError."""
    if not data or data[0] not in tuple(Question):
        raise ProtocolError(REFUSED)
    return Question(data[0]), data[1:]


def open_rows(positions: NDArray[np.int64]) -> bytes:
    """Return the question that begins a batch. Shapes: positions: int64[n], ascending."""
    return bytes([Question.OPEN]) + positions.astype("<u4").tobytes()


def opened_rows(content: bytes, n_rows: int, most: int) -> NDArray[np.int64]:
    """Read the rows of a batch.

    Args:
        n_rows: of the alignment.
        most: rows of a batch.

    Raises:
        ProtocolError: none, too many, not ascending, or others than there are; always with the same text.
    """
    if len(content) % 4 or not 1 <= len(content) // 4 <= most:
        raise ProtocolError(REFUSED)
    positions = np.frombuffer(content, dtype="<u4").astype(np.int64)
    if positions[-1] >= n_rows or (np.diff(positions) <= 0).any():
        raise ProtocolError(REFUSED)
    return positions


def next_step(alignment: str | None) -> bytes:
    """Return the last question of a conversation. Args: alignment: whose rows come next; None ends the job."""
    return bytes([Question.NEXT]) + (alignment or "").encode("ascii")


def read_next_step(content: bytes) -> str | None:
    """Read how to go on, as given to ``next_step``. Raises: ProtocolError."""
    alignment = content.decode("latin-1")
    if alignment and not is_job_id(alignment):
        raise ProtocolError(REFUSED)
    return alignment or None


def answered(content: bytes = b"") -> bytes:
    """Return an answer."""
    return b"\0" + content


def refused(limit: str) -> bytes:
    """Return a refusal. Args: limit: one of ``LIMITS``."""
    return bytes([1, LIMITS.index(limit)])


def read_answer(data: bytes) -> tuple[bytes, str | None]:
    """Return an answer's content and None, or nothing and the limit that forbids one. Raises: ProtocolError."""
    if data[:1] == b"\0":
        return data[1:], None
    if len(data) == 2 and data[0] == 1 and data[1] < len(LIMITS):
        return b"", LIMITS[data[1]]
    raise ProtocolError("an answer that is none")


# The active party's walk for a few rows at a time, over parties that hold their rows ready.


_BATCH = 0  # each batch is opened anew, so that all are the first


class RowsRefused(PolicyRefusal):
    """A party's limit forbids rows of a batch; the job goes on."""


class OwnerLink:
    """The active party's line to one owner of splits (a ``PassiveLink``)."""

    def __init__(self, requester: Requester, rank: int, name: str, notes: ContentNotes) -> None:
        self._requester, self._rank, self._name, self._notes = requester, rank, name, notes
        self._asked: list[Future[Any]] = []

    def open(self, positions: NDArray[np.int64]) -> Future[Any]:
        """Name the rows of the next batch."""
        return self._send(open_rows(positions), _nothing)

    def go_on(self, alignment: str | None) -> Future[Any]:
        """Say how to go on after this conversation."""
        return self._send(next_step(alignment), _nothing)

    def ask(self, request: Request) -> Future[Answer | None]:
        """Queue a question about the open batch."""
        return self._send(bytes([Question.ASK]) + to_bytes(request), _decisions)

    def flush(self) -> None:
        """Let questions go that wait for further ones."""
        self._requester.flush()

    def settle(self, deadline_s: float) -> None:
        """Wait for the answers of a batch that was refused elsewhere. Raises: VeilBoostError, but for refusals."""
        for asked in self._asked:
            try:
                asked.result(deadline_s)
            except RowsRefused:
                continue
        self._asked.clear()

    def begin(self) -> None:
        """Forget the batch before."""
        self._asked.clear()

    def _send(self, question: bytes, read: Any) -> Future[Any]:
        self._notes.note("sent", self._name, Content.DECISION_REQUEST, len(question))
        asked = self._requester.ask(self._rank, question, lambda data: self._read(data, read))
        self._asked.append(asked)
        return asked

    def _read(self, data: bytes, read: Any) -> Any:
        self._notes.note("received", self._name, Content.DECISIONS, len(data))
        content, limit = read_answer(data)
        if limit is not None:
            key = f"Policy key there: vertical.{limit}." if limit else "The log there says why."
            raise RowsRefused(f"{self._name} does not answer for these rows. {key}")
        return read(content)


def _nothing(content: bytes) -> None:
    if content:
        raise ProtocolError("an answer where none is due")


def _decisions(content: bytes) -> DecisionAnswer:
    answer = from_bytes(content)
    if not isinstance(answer, DecisionAnswer):
        raise ProtocolError("an answer of another kind than was asked for")
    return answer


class Scorer:
    """Scores rows of one alignment; one conversation long."""

    def __init__(
        self,
        part: ActivePart,
        own: NDArray[np.float32],
        links: Mapping[str, OwnerLink],
        rounds: str | list[int],
        deadline_s: float,
    ) -> None:
        """Read the model once. Shapes: own: float32[n_rows, n_own_columns], in the order of the alignment."""
        self._part, self._own, self._links, self._deadline_s = part, own, links, deadline_s
        self._rounds = rounds_of(part, rounds)
        self._model = FederatedModel(part.booster, parties_of(part, links, own.shape[0]), len(part.columns), deadline_s)
        self._is_careful = True
        self._names = [str(one) for one in class_names(part)]
        self._objective = json.loads(part.booster)["learner"]["objective"]["name"]

    def score(self, positions: NDArray[np.int64]) -> list[Score]:
        """Return what is told of each row.

        A batch is named and asked about at once. After a refusal, and at first, owners are asked about it once all of
        them have allowed it, so that one party's limits do not use up those of another.

        Shapes: positions: int64[n], ascending.

        Raises:
            RowsRefused: a party does not answer for these rows; nothing else is wrong.
            VeilBoostError: what ends the job.
        """
        for link in self._links.values():
            link.begin()
        try:
            opened = [link.open(positions) for link in self._links.values()]
            if self._is_careful:
                self._wait_for(opened)
            first, end = self._rounds
            margin = self._model.margin(self._own[positions], _BATCH, end, first)
            self._wait_for(opened)
        except RowsRefused:
            self._is_careful = True
            for link in self._links.values():
                link.settle(self._deadline_s)
            raise
        self._is_careful = False
        return self._told(positions, margin)

    def _wait_for(self, opened: Sequence[Future[Any]]) -> None:
        """Wait until all owners allow the batch. Raises: RowsRefused, of all that do not."""
        refusals = []
        for asked in opened:
            try:
                asked.result(self._deadline_s)
            except RowsRefused as error:
                refusals.append(str(error))
        if refusals:
            raise RowsRefused(" ".join(refusals))

    def _told(self, positions: NDArray[np.int64], margin: NDArray[np.float32]) -> list[Score]:
        value = self._model.output(margin)
        classes = classes_of(self._part, value)
        if classes is None:
            return [{"row": int(row), "prediction": _shortest(one)} for row, one in zip(positions, value, strict=True)]
        chances = self._probabilities(value, margin)
        scores: list[Score] = []
        for i, row in enumerate(positions.tolist()):
            score: Score = {"row": row, "class": self._names[classes[i]]}
            if chances is not None:
                score["probability"] = dict(zip(self._names, map(_shortest, chances[i]), strict=True))
            scores.append(score)
        return scores

    def _probabilities(self, value: NDArray[np.float32], margin: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return one of each class, or None where the objective has none."""
        if self._objective == "multi:softmax":
            risen = np.exp(margin - margin.max(axis=1, keepdims=True))
            return np.asarray(risen / risen.sum(axis=1, keepdims=True), dtype=np.float32)
        if value.ndim == 2:
            return value
        return None if self._objective == "binary:hinge" else np.stack([np.float32(1) - value, value], axis=1)


def _shortest(value: np.float32) -> float:
    """Return the number that is written with the fewest digits and read back as the same float32."""
    return float(str(np.float32(value)))
