"""A job that stays, from the first conversation to the last: what is said, which rows it answers for, both sides."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.site_attempt import now
from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.base.files import sync_folder, write_durably
from nvflare_plugins.data.declaration import IdForm
from nvflare_plugins.data.identity import canonical
from nvflare_plugins.evidence.format import Content
from nvflare_plugins.kinds.alignment.job import load_alignment
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.conversation import ConversationEnd, FlowControl, Requester, Responder
from nvflare_plugins.kinds.vertical.job import ALIGN_FIRST
from nvflare_plugins.kinds.vertical.messages import Answer, DecisionAnswer, from_bytes, rows_content, to_bytes
from nvflare_plugins.kinds.vertical.model import REFUSED, ActivePart, FederatedModel, Part, PassivePart, structures
from nvflare_plugins.kinds.vertical_inference import inference
from nvflare_plugins.kinds.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.kinds.vertical_inference.score_socket import (
    Command,
    Refused,
    Request,
    RequestQueue,
    Score,
    ScoreSocket,
    is_job_id,
)
from nvflare_plugins.site.memory.budgets import ScoringRefusal
from nvflare_plugins.site.memory.forgetting import Forgetting
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.memory.store import Memory

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


class Question(IntEnum):
    """The first byte of a question."""

    OPEN = 1
    ASK = 2
    NEXT = 3


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

    def __init__(self, requester: Requester, rank: int, name: str, notes: messages.ContentRecorder) -> None:
        self._requester, self._rank, self._name, self._notes = requester, rank, name, notes
        self._asked: list[Future[Any]] = []

    def open(self, positions: NDArray[np.int64]) -> Future[Any]:
        """Name the rows of the next batch."""
        return self._send(open_rows(positions), _nothing)

    def go_on(self, alignment: str | None) -> Future[Any]:
        """Say how to go on after this conversation."""
        return self._send(next_step(alignment), _nothing)

    def ask(self, request: messages.Request) -> Future[Answer | None]:
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
        self._rounds = inference.rounds_of(part, rounds)
        self._model = FederatedModel(
            part.booster, inference.parties_of(part, links, own.shape[0]), len(part.columns), deadline_s
        )
        self._is_careful = True
        self._names = [str(one) for one in inference.class_names(part)]
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
        classes = inference.classes_of(self._part, value)
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


# Which rows a job that stays answers for: those of a standing alignment, which may be refreshed while it stays.


STATE_FILE = "serving.json"
ALIGNMENT_FILE = "alignment.npz"


def load_own(job: InferenceJob, context: SiteContext, part: Part) -> inference.Rows | inference.UnreadRows:
    """Load this site's columns of the job's data set, as the policy says.

    Raises:
        PolicyRefusal: the policy forbids it. DataRefusal: rows are of persons who asked to be forgotten.
        ConfigurationError: as ``load_rows``.
    """
    data_set = context.policy.data_set_for(str(job.data_set), job.profile)
    held_by = "a job that stays answers at once for any row" if job.action == Action.SERVE.value else None
    rows = inference.load_rows(
        data_set, part.columns, part.categories, unknown_is_missing=job.unknown_category_is_missing, held_by=held_by
    )
    Forgetting(context.policy).refuse(rows.ids, data_set)
    return rows


def alignment_in_use(run: inference.Run) -> str | None:
    """Return the alignment that an attempt begins with, the active party's word for all.

    A first attempt takes the job's; a later one what the attempt before it used last, since rows may have been
    refreshed, and ``first`` was done already.
    """
    job, context = run.job, run.context
    if context.number == 1 or job.alignment is None:
        return job.alignment
    told = run.attempt.gather_sealed("alignment in use", noted_alignment(context, job.alignment).encode())
    return told[run.active_rank].decode("ascii", "replace")


def note_alignment(context: SiteContext, alignment: str) -> None:
    """Keep which alignment is in use, for a further attempt of this job."""
    folder = RunFolder(context.runs, context.job_id).path
    write_durably(folder / STATE_FILE, json.dumps({"alignment": alignment}).encode(), mode=0o600)


def noted_alignment(context: SiteContext, declared: str) -> str:
    """Return the alignment that this site has used last in this job. Args: declared: what the job says."""
    folder = RunFolder(context.runs, context.job_id).path
    try:
        return str(json.loads((folder / STATE_FILE).read_bytes())["alignment"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        has_own = declared == ALIGN_FIRST and (folder / ALIGNMENT_FILE).is_file()
        return context.job_id if has_own else declared


def refreshed(run: inference.Run, part: Part, alignment: str, number: int) -> tuple[inference.Rows | None, str]:
    """Take the rows of a newer alignment at all parties, or at none.

    Args:
        number: of the refreshment in this attempt, from 1.

    Returns:
        The rows; or nothing, and why, by names of parties alone: each one's own log says more.
    """
    attempt, context = run.attempt, run.context
    rows, content = None, b""
    try:
        found = load_alignment(context, alignment, str(run.job.data_set))
        rows = load_own(run.job, context, part).aligned(found).part(None)
        content = json.dumps([found.data_set, found.n_common, found.proof.hex()]).encode() + rows_content(rows.ids)
    except (ConfigurationError, PolicyRefusal) as error:
        attempt.progress.say(f"alignment {alignment} is not taken: {getattr(error, 'reason', error)}")
    attempt.evidence.round(number)  # durable from here on; the heads travel with the next exchange
    attempt.heads.is_due = True
    purpose = f"rows of refreshment {number}"
    rank = attempt.channel.rank
    told = attempt.gather_sealed(purpose, attempt.proof(rank, purpose, content) if content else b"")
    unable = [site for site, proof in zip(context.sites, told, strict=True) if not proof]
    if unable:
        return None, f"{', '.join(unable)} cannot take it, as the log there says; the rows before it stay in use"
    if rows is None or any(proof != attempt.proof(r, purpose, content) for r, proof in enumerate(told)):
        return None, "the parties hold results of different alignments under that id; the rows before it stay in use"
    note_alignment(context, alignment)
    attempt.progress.say(f"the rows of alignment {alignment} are in use")
    return rows, ""


# Which rows a job that stays was asked for at this site, over all its attempts: a file in the run's folder.
#
# ``vertical.predictions_per_job`` bounds the different rows of one job. A row is noted durably before anything about it
# is answered, so that a job which is interrupted, and goes on in a further attempt, goes on counting.
#
# Privacy: purely local, mode 0600. Rows are keyed hashes of 8 bytes, one after the other; the key stays in the site's
# memory.


ASKED_FILE = "asked_rows"
_SIZE = 8


class AskedRows:
    """The rows of one job. Not safe for concurrent use."""

    def __init__(self, path: Path, key: bytes, most: int) -> None:
        """Read what earlier attempts have noted; what a crash has torn was never answered for, and goes.

        Args:
            key: names rows; of this site alone.
            most: different rows that one job may ask for.

        Raises:
            OSError: the file cannot be read or made.
        """
        self._path, self._key, self._most = path, key, most
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            self._n_bytes = len(content) // _SIZE * _SIZE
            os.ftruncate(descriptor, self._n_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
        self._rows = set(np.frombuffer(content[: self._n_bytes], dtype="<u8").tolist())

    def __len__(self) -> int:
        return len(self._rows)

    def new(self, names: Sequence[str], alignment: str = "") -> list[int] | None:
        """Return the rows that are new to the job, as ``note`` takes them; None if it would have too many with them.

        Args:
            names: what names the rows at this site.
            alignment: where names are positions, that of which alignment.
        """
        found = {self._hash(alignment, name) for name in names} - self._rows
        return None if len(self._rows) + len(found) > self._most else sorted(found)

    def note(self, rows: Sequence[int]) -> None:
        """Note rows, durably: all, or none if it raises. Raises: OSError."""
        if not rows:
            return
        content = np.array(rows, dtype="<u8").tobytes()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], self._n_bytes + written)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._n_bytes += len(content)
        self._rows.update(rows)

    def _hash(self, alignment: str, name: str) -> int:
        parts = (alignment.encode(), name.encode())
        digest = hashlib.blake2b(digest_size=_SIZE, key=self._key, person=b"asked row")
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return int.from_bytes(digest.digest(), "little")


# Both sides of a job that stays, from the first conversation to the last.

# A passive party while a job stays: it answers for the rows that the active party names, within its own limits.
#
# Privacy: what one batch tells is what a prediction of its rows tells (``inference``), and when each row is asked for
# is known besides. A row is charged, durably, before the first answer about it leaves; a row that a limit forbids ends
# no job: the active party is told which limit, and neither which of the rows nor how many.


class RowOwner:
    """Answers questions about rows of one alignment. Not safe for concurrent use.

    Attributes:
        next_alignment: how the active party goes on after the conversation, once ``is_over``; None ends the job.
    """

    def __init__(
        self,
        part: PassivePart,
        rows: inference.Rows,
        budget: inference.RowBudget,
        refuse: Callable[[list[str] | None], None],
        most_rows: int,
        in_job: AskedRows,
        note: Callable[[str], None] = lambda text: None,
        alignment: str = "",
    ) -> None:
        """Hold rows ready.

        Args:
            refuse: raises for rows about which nothing must be told, whatever the budget; None are rows without ids.
            most_rows: of a batch.
            in_job: the rows that the job has asked for so far, and how many it may (``vertical.predictions_per_job``).
            note: writes into this site's own log.
            alignment: that the rows are of, where they have no ids.
        """
        self._part, self._rows, self._budget, self._refuse = part, rows, budget, refuse
        self._names = rows.names()
        self._most_rows, self._in_job, self._note = most_rows, in_job, note
        self._alignment = "" if rows.ids is not None else alignment
        self._batch: tuple[list[str], NDArray[np.float32], inference.PathOwner] | None = None
        self._is_charged = np.zeros(rows.n_rows, dtype=bool)  # on the record with these values
        self._positions = np.zeros(0, dtype=np.int64)
        self._refusal: str | None = None
        self._is_noted = False
        self.is_over = False
        self.next_alignment: str | None = None

    def answer(self, question: bytes) -> bytes:
        """Answer one question.

        Raises:
            ProtocolError: it has no place here; always with the same text.
        """
        what, content = split_question(question)
        if self.is_over:
            raise ProtocolError(REFUSED)
        try:
            if what is Question.OPEN:
                self._open(content)
                return answered()
            if what is Question.ASK and self._batch is None and self._refusal is not None:
                return refused(self._refusal)  # asked together with the batch
            if what is Question.ASK:
                return answered(self._ask(content))
        except (PolicyRefusal, DataRefusal) as error:
            self._batch, self._refusal = None, self._limit_of(error)
            return refused(self._refusal)
        self.next_alignment = read_next_step(content)
        self.is_over = True
        return answered()

    def _open(self, content: bytes) -> None:
        self._batch, self._refusal = None, None
        positions = opened_rows(content, self._rows.n_rows, self._most_rows)
        names = [self._names[place] for place in positions]
        features = self._rows.features[positions]
        self._refuse(None if self._rows.ids is None else names)
        new = self._in_job.new(names, self._alignment)
        if new is None:
            raise ScoringRefusal("predictions_per_job", "as many rows as one job may ask for have been asked for")
        if not self._is_charged[positions].all():
            self._budget.check(names, features)
        self._in_job.note(new)
        self._positions = positions
        self._batch = names, features, inference.PathOwner(self._part, features, positions.size)

    def _ask(self, content: bytes) -> bytes:
        if self._batch is None:
            raise ProtocolError(REFUSED)
        names, features, owner = self._batch
        if not self._is_charged[self._positions].all():
            self._budget.charge(names, features)
            self._is_charged[self._positions] = True
        return owner.answer_bytes(content)

    def _limit_of(self, error: PolicyRefusal | DataRefusal) -> str:
        if not self._is_noted:  # once in each conversation: a caller could fill the log
            self._note(f"rows were refused: {getattr(error, 'reason', error)}")
            self._is_noted = True
        limit = error.limit if isinstance(error, ScoringRefusal) else ""
        return limit if limit in LIMITS else ""


# Both sides of a job that stays, from the first conversation to the last.
#
# One conversation lasts while the rows stay the same; its last question says how to go on: with the rows of another
# alignment, in the next conversation, or not at all. In between, with nobody asking, the parties meet once a minute, so
# that no exchange outlasts its deadline and a party that is gone is noticed by its silence.


SERVED_FILE = "served.json"
_IDLE_STEP_S = 60.0
_POLL_S = 0.5
_KEPT_TIMES = 10_000
_MIB = 1 << 20
_INTERRUPTED = "the job was interrupted; with on_lost_site='wait' it goes on when all parties are back"
_SLOT = "this job stays: it takes one of the jobs that server and sites may run at a time (FLARE's max_jobs)"


def _flow(run: inference.Run, n_splits: int) -> FlowControl:
    """Return sizes and times of a conversation: empty steps are rare, and a question may name all rows of a batch."""
    usual = inference.flow_of(run, n_splits)
    idle_s = min(_IDLE_STEP_S, run.attempt.timeout_s / 4)
    return dataclasses.replace(usual, patience_s=idle_s, message_bytes=usual.message_bytes + 4 * run.job.batch_rows)


def _end(run: inference.Run, number: int, n_splits: int) -> ConversationEnd:
    return ConversationEnd.of(run.attempt, f"serving {number}", _flow(run, n_splits))


# -- the active party -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Served:
    """What was answered so far, in numbers. Units: seconds."""

    alignment: str
    n_rows: int
    rows: int = 0
    requests: int = 0
    refused: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    began: str = field(default_factory=now)

    def to_dict(self) -> Score:
        """Return what ``status`` and the file at the end say; seconds are those of the last requests."""
        times = np.array(self.times) if self.times else None
        quantiles = [None if times is None else round(float(np.quantile(times, q)), 4) for q in (0.5, 0.95, 0.99)]
        return {
            "since": self.began,
            "alignment": self.alignment,
            "common_rows": self.n_rows,
            "requests": self.requests,
            "rows": self.rows,
            "refused": self.refused,
            "seconds": dict(zip(("p50", "p95", "p99"), quantiles, strict=True)),
        }


class _RowIndex:
    """The rows as the socket sees them."""

    def __init__(self, rows: inference.Rows, served: Served, form: IdForm) -> None:
        self.n_rows = rows.n_rows
        self._served, self._form = served, form
        self._places = {} if rows.ids is None else {one.decode(): place for place, one in enumerate(rows.ids)}

    def places(self, ids: Sequence[str]) -> list[int]:
        if not self._places:
            raise Refused("the data set has no ids here: ask by position (rows). Policy key: data_sets.<name>.id.")
        found = [self._places.get(canonical(one, self._form) or "") for one in ids]
        n_missing = sum(place is None for place in found)
        if n_missing:
            raise Refused(f"{n_missing} of {len(ids)} ids are not among the rows of the alignment in use")
        return [place for place in found if place is not None]

    def status(self) -> Score:
        return self._served.to_dict()


class _ServingLoop:
    """Answers what comes through the socket, at the active party."""

    def __init__(
        self, run: inference.Run, part: ActivePart, rows: inference.Rows, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._part, self._rows, self._clock = run, part, rows, clock
        self._queue = RequestQueue(clock=clock)
        alignment = run.job.alignment
        self._served = Served("" if alignment is None else noted_alignment(run.context, alignment), rows.n_rows)
        self._form = run.context.policy.data_set(str(run.job.data_set)).id_form
        self._index = _RowIndex(rows, self._served, self._form)
        self._began = self._last = clock()
        self._command: Command | None = None
        self._evidence = run.attempt.evidence.path.with_name(run.attempt.evidence.path.name + ".partial")

    def run(self) -> Served:
        """Serve until something ends the job. Raises: VeilBoostError, if a party or the way to it fails."""
        say, number = self._run.attempt.progress.say, 0
        reason = "the job has ended"
        score_socket = ScoreSocket(
            self._run.attempt.folder.path, self._queue, lambda: self._index, self._run.job.batch_rows
        )
        try:
            with score_socket:
                say(f"rows are scored at {score_socket.path}; {_SLOT}")
                while self._converse(number):
                    number += 1
                    self._refresh(number)
                self._queue.close(reason)  # while callers can still be told
        except VeilBoostError as error:
            reason = f"{_INTERRUPTED}: {error}"
            raise
        finally:
            self._queue.close(reason)
            if self._command is not None and not self._command.answer.done():
                self._command.answer.set_exception(Refused(reason))
        return self._served

    def _converse(self, number: int) -> bool:
        """Hold one conversation; return whether it has ended because the rows are to change."""
        run, notes = self._run, self._run.notes()
        n_splits = sum(tree.n_nodes for tree in structures(self._part.booster))
        with Requester(_end(run, number, n_splits)) as requester:
            links = {
                party.site: OwnerLink(requester, run.context.sites.index(party.site), party.site, notes)
                for party in self._part.parties
            }
            scorer = Scorer(self._part, self._rows.features, links, run.job.rounds, run.attempt.timeout_s)
            command = self._command = self._attend(requester, scorer)
            alignment = command.argument if command is not None and command.name == "refresh" else None
            for said in [link.go_on(alignment) for link in links.values()]:
                said.result(run.attempt.timeout_s)
        if command is not None and alignment is None:
            command.answer.set_result({"stopping": True})
        return alignment is not None

    def _attend(self, requester: Requester, scorer: Scorer) -> Command | None:
        """Answer requests until a command comes, or the job is over by its own terms."""
        while True:
            requester.check()
            over = self._is_over()
            if over:
                self._run.attempt.progress.say(f"the job ends: {over}")
                return None
            work = self._queue.take(self._run.job.batch_rows, _POLL_S)
            if isinstance(work, Command):
                return work
            if work:
                try:
                    self._answer(scorer, work)
                except VeilBoostError as error:
                    for left in (one for one in work if not one.answer.done()):
                        left.answer.set_exception(Refused(f"{_INTERRUPTED}: {error}"))
                    raise
                self._last = self._clock()

    def _is_over(self) -> str:
        job, now_s = self._run.job, self._clock()
        if job.serve_s and now_s - self._began >= job.serve_s:
            return f"it has stayed for serve_s ({job.serve_s:g} s)"
        if job.idle_s and now_s - self._last >= job.idle_s:
            return f"nobody has asked for idle_s ({job.idle_s:g} s)"
        if self._evidence.stat().st_size >= job.evidence_mib * _MIB:
            return f"its evidence has reached evidence_mib ({job.evidence_mib} MiB): submit it again"
        return ""

    def _answer(self, scorer: Scorer, requests: list[Request]) -> None:
        """Score requests together; one by one where a party refuses rows of some of them."""
        positions = np.unique(np.concatenate([np.array(one.positions, dtype=np.int64) for one in requests]))
        try:
            scores = {score["row"]: score for score in scorer.score(positions)}
        except RowsRefused as error:
            if len(requests) > 1:
                for one in requests:
                    self._answer(scorer, [one])
                return
            self._served.refused += 1
            requests[0].answer.set_exception(Refused(str(error)))
            return
        for one in requests:
            self._served.requests += 1
            self._served.rows += len(one.positions)
            self._served.times.append(self._clock() - one.since)
            one.answer.set_result([scores[place] for place in one.positions])

    def _refresh(self, number: int) -> None:
        command = self._command
        if command is None:
            return
        rows, why = refreshed(self._run, self._part, command.argument, number)
        if rows is None:
            command.answer.set_exception(Refused(f"alignment {command.argument} is not taken: {why}"))
            return
        self._rows = rows
        self._served.alignment, self._served.n_rows = command.argument, rows.n_rows
        self._index = _RowIndex(rows, self._served, self._form)
        command.answer.set_result({"refreshed": command.argument, "common_rows": rows.n_rows})


def serve(run: inference.Run, part: ActivePart, rows: inference.Rows) -> Callable[[Path], Path]:
    """Stay at the active party; return what writes the counts of what was answered."""
    served = _ServingLoop(run, part, rows).run()
    content = json.dumps(served.to_dict(), indent=2).encode() + b"\n"
    return lambda folder: write_durably(folder / SERVED_FILE, content, mode=0o600)


# -- a passive party --------------------------------------------------------------------------------------------------


def check_cap(run: inference.Run, part: PassivePart) -> None:
    """Say, at a passive party, what a row counts, and refuse a model whose rows would all be refused.

    Raises:
        PolicyRefusal: one row counts more than a row may.
    """
    n_bits, site = inference.bits_of(part, explains=False), run.context.site
    cap = run.context.policy.vertical.scoring_bits_per_row
    run.attempt.progress.say(
        f"a row counts {n_bits} bits with this model, one for each distinct split of this party, of {cap} in its life "
        "(vertical.scoring_bits_per_row)"
    )
    if n_bits > cap:
        raise PolicyRefusal(
            f"{site} shows fewer bits of a row than it has distinct splits in this model. Policy key: "
            f"vertical.scoring_bits_per_row. Remedy: a model of fewer or shallower trees, or ask {site}, whose log "
            "says both numbers."
        )


def stay(run: inference.Run, part: PassivePart, rows: inference.Rows) -> None:
    """Stay at a passive party until the active party ends the job."""
    notes, active, policy = run.notes(), run.identity.active, run.context.policy
    budget = inference.budget_of(run, part)
    run.attempt.progress.say(f"answering for rows that {active} names; {_SLOT}")
    key = Memory.open(policy).secret("rows of a job that stays")
    most = policy.vertical.predictions_per_job
    in_job = AskedRows(run.attempt.folder.path / ASKED_FILE, key, most)
    number, alignment, say = 0, run.job.alignment or "", run.attempt.progress.say
    while True:
        refuse = SentRows(policy).refuse
        owner = RowOwner(part, rows, budget, refuse, run.job.batch_rows, in_job, say, alignment)
        end = _end(run, number, len(part.table))
        Responder(end, run.active_rank, notes.of_decisions(active, owner.answer)).run()
        if not owner.is_over:
            raise ProtocolError(f"{active} ended a conversation without saying how to go on")
        if owner.next_alignment is None:
            return
        number += 1
        taken, _ = refreshed(run, part, owner.next_alignment, number)
        rows, alignment = (rows, alignment) if taken is None else (taken, owner.next_alignment)
