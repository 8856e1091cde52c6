"""What both kinds of parties have at hand: session, checkpoints, times of stages, sizes of messages."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from he_processors.additive_schemes import AdditiveScheme
from he_processors.bignum.interface import byte_width
from he_processors.elgamal.encryption import DigitFormat
from he_processors.errors import ConfigurationError
from he_processors.fixed_point import PackingLayout
from he_processors.paillier import PAILLIER
from nvflare_plugins.attempt.job_context import Progress, SiteContext, waiting_s
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.site_attempt import Reservations, SiteAttempt
from nvflare_plugins.growth.tree import MAX_BATCH
from nvflare_plugins.kinds.vertical.conversation import ConversationEnd, FlowControl
from nvflare_plugins.kinds.vertical.guards import Guard, TreeLimits
from nvflare_plugins.kinds.vertical.histogram_maker import GRADIENT_BLOCK_ROWS
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.key_owner import VerticalScheme, pair_format
from nvflare_plugins.kinds.vertical.messages import ContentRecorder, most_slots
from nvflare_plugins.kinds.vertical.model import Part, StoredPart
from nvflare_plugins.kinds.vertical.noised import NoisePayment, NoisePlan, plan_of, trees_due, trees_per_round
from nvflare_plugins.kinds.vertical.party_data import PartyData
from nvflare_plugins.kinds.vertical.sealed import BYTES_PER_CANDIDATE, CANDIDATES_AT_ONCE, SealedPlan, sealed_plan
from nvflare_plugins.kinds.vertical.sealed import MAX_BINS as SEALED_BINS
from nvflare_plugins.pages.run_record import ReportSection, RoundRow, Span
from nvflare_plugins.wire.envelope import Phase, TrainingStep
from nvflare_plugins.workers.workers import Workers
from nvflare_plugins.xgb.parameters import TrainingParameters

INTRODUCTION_BYTES = 1 << 26
"""Of a party's schema, before it is known how many features it has: some 60,000 with the longest names."""
CEILING_BYTES = 1 << 34
_FIELDS_BYTES = 1 << 20  # headers, a public key, counts
_NODE_BYTES = 32  # numbers of a node, and the length of its bits
_CLEAR_PAIR_BYTES = 16
_CATEGORY_BYTES = 2  # the number of a bin that goes right


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """What decides how long messages get.

    Units: bytes per ciphertext; of the clear profile, per pair; of elgamal, per row of points.

    Attributes:
        set_rows: rows of the training set and of further sets.
        pairs_per_ciphertext: bins of a histogram that share one.
        is_streamed: sums come in blocks of features.
        is_sealed: splits are compared by circuits.
    """

    set_rows: tuple[int, ...]
    ciphertext_bytes: int
    pairs_per_ciphertext: int
    trees_per_round: int
    limits: TreeLimits
    is_streamed: bool = True
    is_sealed: bool = False

    @classmethod
    def of(
        cls,
        job: VerticalJob,
        set_rows: Sequence[int],
        trees_per_round: int,
        limits: TreeLimits,
        planned: NoisePlan | SealedPlan | None = None,
        numbers: AdditiveScheme = PAILLIER,
    ) -> MessageSizes:
        """Derive the sizes of one job.

        Args:
            numbers: its scheme over big numbers.
            planned: the plan of a job in the preset noised or sealed.

        Raises:
            CapacityExceeded: the job's keys are too short for so many rows.
        """
        n_rows, has_weight = set_rows[0], job.weight is not None
        pairs = pair_format(n_rows, weighted=has_weight) if planned is None else planned.pair_format(n_rows)
        if not job.is_encrypted:
            n_words = pairs.n_words
            return cls(tuple(set_rows), _CLEAR_PAIR_BYTES * n_words, 1, trees_per_round, limits, is_streamed=False)
        if job.profile == VerticalProfile.ELGAMAL.value:
            n_points = 1 + DigitFormat.of(job.fraction_bits, n_rows).n_messages
            return cls(tuple(set_rows), n_points * job.point_bytes, 1, trees_per_round, limits)
        largest = numbers.public_key((1 << job.key_bits) - 1)
        packing = PackingLayout.fit(pairs, largest.plaintext_bits)
        sizes = byte_width(largest.modulus), packing.pairs_per_plaintext
        return cls(tuple(set_rows), *sizes, trees_per_round, limits, is_sealed=isinstance(planned, SealedPlan))

    def longest_question(self, n_features: int, n_earlier_splits: int, most_categories: int = 0) -> int:
        """Return the longest that a passive party may be sent.

        Args:
            n_features: of the party.
            n_earlier_splits: of the party, in the trees before the training: a question on a data set may name all.
            most_categories: of the party's feature with most, which a split may name.
        """
        gradients = min(self.set_rows[0], GRADIENT_BLOCK_ROWS) * self.ciphertext_bytes + n_features // 8
        partitions = self._level_nodes() * _NODE_BYTES + self.set_rows[0] // 8  # nodes of a level share the rows
        n_queries = n_earlier_splits + self.trees_per_round * self.limits.most_splits(self.set_rows[0])
        decisions = n_queries * (_NODE_BYTES + max(self.set_rows) // 8)
        splits = self._level_nodes() * (_NODE_BYTES + _CATEGORY_BYTES * most_categories)
        return _bounded(max(gradients, partitions, decisions, splits, self._circuits(n_features * SEALED_BINS)))

    def longest_answer(self, n_bins: Sequence[int], n_earlier_trees: int) -> int:
        """Return the longest that a passive party may send.

        Args:
            n_bins: of each of the party's features.
            n_earlier_trees: before the training.
        """
        n_slots = most_slots(n_bins, self._level_nodes(), is_streamed=self.is_streamed)
        histograms = (n_slots // self.pairs_per_ciphertext + 1) * self.ciphertext_bytes
        n_trees = n_earlier_trees + self.trees_per_round
        # A row is at one node of each tree, so that the bits of a tree are those of all rows at most.
        decisions = n_trees * (max(self.set_rows) // 8)
        n_nodes = self._level_nodes() + n_trees * self.limits.most_splits(self.set_rows[0])
        return _bounded(max(histograms, decisions, self._circuits(sum(n_bins))) + n_nodes * _NODE_BYTES)

    def _circuits(self, n_bins: int) -> int:
        """Return the longest message about splits under seal. Args: n_bins: of all features, at most."""
        return BYTES_PER_CANDIDATE * max(CANDIDATES_AT_ONCE, 2 * n_bins) if self.is_sealed else 0

    def _level_nodes(self) -> int:
        """Return the nodes that one message is about at most: XGBoost splits so many at a time."""
        return max(min(MAX_BATCH, self.limits.most_splits(self.set_rows[0])), 1)


def _bounded(n_bytes: int) -> int:
    return min(n_bytes + _FIELDS_BYTES, CEILING_BYTES)


# What both kinds of parties have at hand: session, checkpoints, times of stages.

# Checkpoints of vertical training: each party keeps its own part, with a tag that names the attempt and the round.
#
# The tag is a keyed hash that only the parties of the attempt can make, the same at all of them. A resumed job goes on
# from the last round whose tag all parties hold, so that parts of different attempts never meet. A round is the least
# that can be kept: the trees of a round follow from the same gradients.


_FORMAT = "veilboost-vertical-checkpoint-1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """One party's part after ``n_rounds`` rounds: the masked model at the active party, else its private table."""

    n_rounds: int
    tag: str
    content: str

    def write(self, folder: RunFolder) -> None:
        """Keep the checkpoint, durably; older ones go, but for the last two. Privacy: for this site's user alone."""
        document = {
            "format": _FORMAT,
            "n_rounds": self.n_rounds,
            "tag": self.tag,
            "digest": _digest(self.content),
            "content": self.content,
        }
        folder.write_checkpoint(self.n_rounds, json.dumps(document).encode(), mode=0o600)


def read_checkpoints(folder: RunFolder) -> dict[int, Checkpoint]:
    """Return the checkpoints of a run by number of finished rounds.

    One that is damaged is left out: an earlier one may do.

    Raises:
        ConfigurationError: all that there are are damaged.
    """
    paths = folder.checkpoints()
    found = {n: one for n, path in paths.items() if (one := _read(path)) is not None and one.n_rounds == n}
    if paths and not found:
        raise ConfigurationError(f"the checkpoints of job {folder.path.name} cannot be read: start a new job")
    if len(found) < len(paths):
        _log.warning("a checkpoint of job %s cannot be read: it is left out", folder.path.name)
    return found


def _read(path: Path) -> Checkpoint | None:
    """Return what ``Checkpoint.write`` wrote; None for anything else."""
    try:
        document = json.loads(path.read_bytes())
        checkpoint = Checkpoint(document["n_rounds"], document["tag"], document["content"])
        is_whole = document["format"] == _FORMAT and document["digest"] == _digest(checkpoint.content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return checkpoint if is_whole and isinstance(checkpoint.tag, str) else None


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


# Where the time of a round goes, stage by stage.


MOST_SPANS = 200
_VISIBLE_S = 1e-4


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where the time between two calls of ``take`` went. Units: seconds.

    Attributes:
        stages: seconds of each stage; those of threads beside one another add up.
        spans: when stages ran, (stage, begin, end) from the first call on; neighbours are joined where there are many.
    """

    seconds: float
    stages: dict[str, float]
    spans: tuple[Span, ...]


class Stages:
    """Seconds per stage since the last ``take``; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._spans: list[Span] = []
        self._since = time.perf_counter()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._seconds[stage] += ended - started
                self._spans.append((stage, started, ended))

    def take(self) -> RoundTimes:
        """Return the times since the last call."""
        now = time.perf_counter()
        with self._lock:
            since, self._since = self._since, now
            stages, self._seconds = dict(self._seconds), defaultdict(float)
            spans, self._spans = self._spans, []
        relative = [
            (stage, max(begin - since, 0.0), end - since) for stage, begin, end in spans if end - begin >= _VISIBLE_S
        ]
        return RoundTimes(now - since, stages, joined(relative))


def joined(spans: Sequence[Span], most: int = MOST_SPANS) -> tuple[Span, ...]:
    """Join spans of a stage with little between them, until there are no more than ``most``; in order of their begin.

    Stages are few: where each is one span, nothing more is joined.
    """
    gap, found = 0.0, sorted(spans, key=lambda span: span[1])
    while len(found) > most:
        gap = 2 * gap or max(end for _, _, end in found) / 1000
        last: dict[str, int] = {}
        kept: list[Span] = []
        for stage, begin, end in found:
            place = last.get(stage)
            if place is not None and begin - kept[place][2] <= gap:
                kept[place] = (stage, kept[place][1], max(end, kept[place][2]))
            else:
                last[stage] = len(kept)
                kept.append((stage, begin, end))
        found = kept
        if len(found) == len(last):
            break
    return tuple(found)


# What both kinds of parties have at hand once a vertical job may send private bytes.


PURPOSE = "vertical training"
EXCHANGE_S = 600.0
ANSWER_S = 3600.0


@dataclass(frozen=True, slots=True, repr=False)
class VerticalContext:
    """Where one attempt starts.

    Attributes:
        data: this party's columns of the rows that all parties share.
        parameters: checked without constraints, which name columns of other parties.
        n_done: rounds of the job that a checkpoint holds already; 0 for a fresh start.
        checkpoint: this party's part after those rounds.
        initial: this party's part of a model to continue.
        guard: of a passive party, opened before any party went on.
        workers: of this party's own cluster; None is this process.
        arithmetic: name of that of the trees, which all parties agreed on.
        scheme: of the job's profile.
        payment: of a passive party in the preset noised, with all that the job may cost reserved.
    """

    attempt: SiteAttempt
    data: PartyData
    parameters: TrainingParameters
    reservations: Reservations
    notes: ContentRecorder
    arithmetic: str
    scheme: VerticalScheme
    n_done: int = 0
    checkpoint: Checkpoint | None = None
    initial: StoredPart[Any] | None = None
    guard: Guard | None = None
    workers: Workers | None = None
    payment: NoisePayment | None = None
    stages: Stages = field(default_factory=Stages)

    @property
    def job(self) -> VerticalJob:
        """Return the job."""
        job: VerticalJob = self.attempt.job
        return job

    @property
    def context(self) -> SiteContext:
        """Return where and with whom this party takes part."""
        return self.attempt.context

    @property
    def progress(self) -> Progress:
        """Return who is told how far the job is."""
        return self.attempt.progress

    @property
    def active_rank(self) -> int:
        """Return the rank of the active party."""
        return self.attempt.channel.sites.index(self.job.active)

    @property
    def trees_per_round(self) -> int:
        """Return the trees of one boosting round."""
        return trees_per_round(self.parameters)

    def end_of_conversation(self, message_bytes: int) -> ConversationEnd:
        """Return this party's end, equal at all parties but for the longest message that may come."""
        flow = FlowControl.within(self.job.deadline_s or EXCHANGE_S)
        flow = replace(flow, message_bytes=message_bytes, idle_s=self.answer_s)
        return ConversationEnd.of(self.attempt, PURPOSE, flow)

    @property
    def sizes(self) -> MessageSizes:
        """Return what decides how long messages get."""
        rows = [one.table.n_rows for one in self.data.sets]
        limits = TreeLimits.from_effective(self.parameters.effective)
        return MessageSizes.of(self.job, rows, self.trees_per_round, limits, self.planned, self.scheme.numbers)

    @property
    def most_trees(self) -> int:
        """Return the trees that passive parties may be asked about in this attempt."""
        if self.noised is not None:
            return trees_due(self.job, self.parameters, self.n_done)
        return (self.job.num_rounds - self.n_done) * self.trees_per_round

    @property
    def noised(self) -> NoisePlan | None:
        """Return the plan of a job in the preset noised."""
        return plan_of(self.job, self.parameters)

    @property
    def sealed(self) -> SealedPlan | None:
        """Return the plan of a job in the preset sealed."""
        return sealed_plan(self.job, self.parameters)

    @property
    def planned(self) -> NoisePlan | SealedPlan | None:
        """Return what the job says of sums that are not exact ones."""
        return self.noised or self.sealed

    @property
    def answer_s(self) -> float:
        """Return how long the active party waits for one answer, and the others for its next question."""
        return self.job.deadline_s or ANSWER_S

    def enter_round(self, number: int) -> None:
        """Let the next exchanges belong to a round of the job; all parties do it at the same step."""
        self.attempt.channel.moment = TrainingStep(Phase.UPDATE, number)

    def round_done(self, row: RoundRow) -> None:
        """Note a finished round at the step at which all parties do."""
        self.notes.has_told = True  # its metrics
        self.attempt.round_done(row)
        self.enter_round(row.round + 1)

    def is_checkpoint(self, n_rounds: int) -> bool:
        """Tell whether a checkpoint is due after so many rounds of the job."""
        every = self.job.checkpoint_every if waiting_s(self.job) is None else 1
        return every > 0 and n_rounds % every == 0

    def keep(self, n_rounds: int, content: str) -> None:
        """Write a checkpoint; the registry first: it lets a lost job resume from no later round than it knows of."""
        self.notes.has_told = True
        self.reservations.trees_complete(n_rounds)
        tag = self.attempt.session.hmac(f"checkpoint after {n_rounds} rounds", b"").hex()
        Checkpoint(n_rounds, tag, content).write(self.attempt.folder)


@dataclass(frozen=True, slots=True, repr=False)
class TrainedPart:
    """How training ended at one party.

    Attributes:
        n_rounds: rounds of the job, those before a resumption included.
        params: XGBoost parameters in effect, for the report.
        best_round: of early stopping, counted as the job's rounds are.
    """

    part: Part
    n_rounds: int
    params: Mapping[str, object]
    sections: tuple[ReportSection, ...] = ()
    best_round: int | None = None
