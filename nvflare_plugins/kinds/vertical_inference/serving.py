"""A job that stays, from the first conversation to the last: which rows it answers for, and both sides of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.site_attempt import now
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.base.files import sync_folder, write_durably
from nvflare_plugins.data.declaration import IdForm
from nvflare_plugins.data.identity import canonical
from nvflare_plugins.kinds.alignment.result import load_alignment
from nvflare_plugins.kinds.vertical.conversation import ConversationEnd, FlowControl, Requester, Responder
from nvflare_plugins.kinds.vertical.job import ALIGN_FIRST
from nvflare_plugins.kinds.vertical.model import REFUSED, structures
from nvflare_plugins.kinds.vertical.model_files import ActivePart, Part, PassivePart
from nvflare_plugins.kinds.vertical.terms import rows_content
from nvflare_plugins.kinds.vertical_inference.inference import PathOwner
from nvflare_plugins.kinds.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.kinds.vertical_inference.run import (
    ContentNotes,
    RowBudget,
    Rows,
    Run,
    UnreadRows,
    bits_of,
    flow_of,
    load_rows,
)
from nvflare_plugins.kinds.vertical_inference.score_socket import Command, Refused, Request, RequestQueue, ScoreSocket
from nvflare_plugins.kinds.vertical_inference.scorer import (
    LIMITS,
    OwnerLink,
    Question,
    RowsRefused,
    Score,
    Scorer,
    answered,
    opened_rows,
    read_next_step,
    refused,
    split_question,
)
from nvflare_plugins.site.memory.budgets import ScoringRefusal
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.memory.store import Memory

# Which rows a job that stays answers for: those of a standing alignment, which may be refreshed while it stays.


STATE_FILE = "serving.json"
ALIGNMENT_FILE = "alignment.npz"


def load_own(job: InferenceJob, context: SiteContext, part: Part) -> Rows | UnreadRows:
    """Load this site's columns of the job's data set, as the policy says. Raises: as ``load_rows``; PolicyRefusal."""
    data_set = context.policy.data_set_for(str(job.data_set), job.profile)
    held_by = "a job that stays answers at once for any row" if job.action == Action.SERVE.value else None
    return load_rows(
        data_set, part.columns, part.categories, unknown_is_missing=job.unknown_category_is_missing, held_by=held_by
    )


def alignment_in_use(run: Run) -> str | None:
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


def refreshed(run: Run, part: Part, alignment: str, number: int) -> tuple[Rows | None, str]:
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
    attempt.heads.mark()
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
        rows: Rows,
        budget: RowBudget,
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
        self._batch: tuple[Rows, PathOwner] | None = None
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
        rows = Rows(self._rows.features[positions], tuple(name.encode() for name in names))
        self._refuse(None if self._rows.ids is None else names)
        new = self._in_job.new(names, self._alignment)
        if new is None:
            raise ScoringRefusal("predictions_per_job", "as many rows as one job may ask for have been asked for")
        if not self._is_charged[positions].all():
            self._budget.check(rows)
        self._in_job.note(new)
        self._positions = positions
        self._batch = rows, PathOwner(self._part, rows.features, rows.n_rows)

    def _ask(self, content: bytes) -> bytes:
        if self._batch is None:
            raise ProtocolError(REFUSED)
        rows, owner = self._batch
        if not self._is_charged[self._positions].all():
            self._budget.charge(rows)
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


def _flow(run: Run, n_splits: int) -> FlowControl:
    """Return sizes and times of a conversation: empty steps are rare, and a question may name all rows of a batch."""
    usual = flow_of(run, n_splits)
    idle_s = min(_IDLE_STEP_S, run.attempt.timeout_s / 4)
    return dataclasses.replace(usual, patience_s=idle_s, message_bytes=usual.message_bytes + 4 * run.job.batch_rows)


def _end(run: Run, number: int, n_splits: int) -> ConversationEnd:
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

    def __init__(self, rows: Rows, served: Served, form: IdForm) -> None:
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

    def __init__(self, run: Run, part: ActivePart, rows: Rows, clock: Callable[[], float] = time.monotonic) -> None:
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
        run, notes = self._run, ContentNotes(self._run.attempt)
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


def serve(run: Run, part: ActivePart, rows: Rows) -> Callable[[Path], Path]:
    """Stay at the active party; return what writes the counts of what was answered."""
    served = _ServingLoop(run, part, rows).run()
    content = json.dumps(served.to_dict(), indent=2).encode() + b"\n"
    return lambda folder: write_durably(folder / SERVED_FILE, content, mode=0o600)


# -- a passive party --------------------------------------------------------------------------------------------------


def check_cap(run: Run, part: PassivePart) -> None:
    """Say, at a passive party, what a row counts, and refuse a model whose rows would all be refused.

    Raises:
        PolicyRefusal: one row counts more than a row may.
    """
    cap, n_bits, site = (
        run.context.policy.vertical.scoring_bits_per_row,
        bits_of(part, explains=False),
        run.context.site,
    )
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


def stay(run: Run, part: PassivePart, rows: Rows) -> None:
    """Stay at a passive party until the active party ends the job."""
    notes, active, policy = ContentNotes(run.attempt), run.identity.active, run.context.policy
    budget = RowBudget.of(policy, run.job, run.identity.model_id, part)
    run.attempt.progress.say(f"answering for rows that {active} names; {_SLOT}")
    key = Memory.open(policy).secret("rows of a job that stays")
    most = policy.vertical.predictions_per_job
    in_job = AskedRows(run.attempt.folder.path / ASKED_FILE, key, most)
    number, alignment, say = 0, run.job.alignment or "", run.attempt.progress.say
    while True:
        refuse = SentRows(policy).refuse
        owner = RowOwner(part, rows, budget, refuse, run.job.batch_rows, in_job, say, alignment)
        end = _end(run, number, len(part.table))
        Responder(end, run.active_rank, notes.around(active, owner.answer)).run()
        if not owner.is_over:
            raise ProtocolError(f"{active} ended a conversation without saying how to go on")
        if owner.next_alignment is None:
            return
        number += 1
        taken, _ = refreshed(run, part, owner.next_alignment, number)
        rows, alignment = (rows, alignment) if taken is None else (taken, owner.next_alignment)
