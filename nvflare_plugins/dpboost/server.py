"""The trusted server's part: it turns exact sums into noised choices of splits and noised leaves.

The gain is not linear in the sums, so that its noise cannot be divided among the sites: this algorithm needs someone
who sees exact sums. The server sees those over all sites, never a single site's.

A job that waits for a lost site has several attempts, and one server. It keeps each answer with a hash of the exact sum
that it was made of. An exchange that a later attempt repeats gets the same answer, from the same sum, or none: fresh
noise on it would be a further release, which nobody has paid for and which averages out the first one's. All of that
lives in the memory of the job's process, without which the job ends.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import compose
from dp_components.dpboost.paid_start import release_start
from dp_components.dpboost.plan import DpBoostPlan
from dp_components.dpboost.single_tree import TreeAggregator
from dp_components.dpboost.split_selection import MAX_ROWS, SplitTable
from dp_components.events import ComposedEvent, Event, Release
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.sensitivity import GRID_BITS
from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.payment import REPLAYED, event_text
from nvflare_plugins.dpboost.job import DpBoostJob
from nvflare_plugins.wire.catalogue import Kind, Phase, TrainingStep
from nvflare_plugins.wire.envelope import Codec, Frame

Spend = Callable[[str, str, float, float], None]
"""``EvidenceLog.spend``: (query, event, epsilon so far, delta)."""


@dataclass(frozen=True, slots=True)
class TreeStep:
    """One exchange of a training.

    Attributes:
        kind: STUMP_SUM before the first tree, HISTOGRAM for a level's splits, NODE_STATS for a tree's leaves.
        number: of the tree in the model.
        ensemble, tree: number of the ensemble, and of the tree in it.
        n_nodes: of the level or of the leaves; as many numbers are the answer.
    """

    kind: Kind
    number: int
    ensemble: int
    tree: int
    n_nodes: int

    @property
    def moment(self) -> TrainingStep:
        """Where the training stands."""
        return TrainingStep(Phase.UPDATE, self.number)

    def shape(self, n_bins: int) -> tuple[int, ...]:
        """Return the shape of a site's sums: of gradients, then of rows, per node (and bin)."""
        return (2, self.n_nodes, n_bins) if self.kind is Kind.HISTOGRAM else (2, self.n_nodes)


START = TreeStep(Kind.STUMP_SUM, 0, 0, 0, 1)


def steps(job: DpBoostJob) -> Iterator[TreeStep]:
    """Yield all exchanges of a job in order; the same at the server and at all sites."""
    plan, number = job.plan(), 0
    if plan.start_share:
        yield START
    for ensemble in range(plan.n_ensembles):
        for tree in range(plan.ensemble_size(ensemble)):
            for level in range(plan.depth):
                yield TreeStep(Kind.HISTOGRAM, number, ensemble, tree, 1 << level)
            yield TreeStep(Kind.NODE_STATS, number, ensemble, tree, 1 << plan.depth)
            number += 1


@dataclass(frozen=True, slots=True)
class _Answered:
    """An exchange that is done: a hash of its exact sum, and what was released."""

    digest: bytes
    answer: bytes


class DpBoostServer:
    """Answers the sites' sums of one job, over all its attempts.

    Privacy: one release per exchange, no more of them than the plan has; the aggregator keeps answers for retries
        within an attempt. In a further attempt an exchange that was answered before gets the same answer, if the sites
        send the same sum again. No exchange comes before its turn.
    Security: the noise comes from the server's operating system.
    """

    def __init__(self, job: DpBoostJob, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._job, self._plan, self._randomness = job, job.plan(), randomness
        self._table = SplitTable.of(job.candidates())
        self._steps = tuple(steps(job))
        self._answered: list[_Answered] = []
        self._attempts: list[bytes] = []
        self._next: int | None = 0  # in this attempt; None where it may go on from any exchange that is done
        self._noted: dict[int, Event] = {}  # by the exchange that ends what an event pays for
        self._lock = threading.Lock()  # the one before may still be at work when an attempt begins

    def answer(self, frame: Frame, total: bytes, spend: Spend) -> bytes:
        """Return the score to start from, the chosen splits of a level, or the leaf weights of a tree.

        Raises:
            ProtocolError: a sum that is not due now, or that no rows can have, or that differs from that of an earlier
                attempt.
        """
        with self._lock:
            self._note_attempt(frame)
            number = self._number_of(frame)
            step, digest = self._steps[number], hashlib.sha256(total).digest()
            if number == len(self._answered):
                sums = np.frombuffer(total, dtype="<i8").astype(np.int64).reshape(step.shape(self._table.n_bins))
                self._check_sums(step, *sums)
                released = self._release(step, sums)
                self._answered.append(_Answered(digest, released.value.astype("<i8").tobytes()))
            elif self._answered[number].digest != digest:
                raise ProtocolError(
                    f"{frame.kind.name} at {frame.moment}: an earlier attempt sent another sum, as after a change of "
                    "rows, and got an answer. A second one would be a release that nobody has paid for: submit the job "
                    "anew, to be charged anew"
                )
            self._next = number + 1
            if step.kind is not Kind.HISTOGRAM:
                self._note(number, spend)
            return self._answered[number].answer

    def _note_attempt(self, frame: Frame) -> None:
        if frame.attempt in self._attempts[:-1]:
            raise ProtocolError(f"{frame.kind.name} at {frame.moment}: its attempt has ended")
        if frame.attempt not in self._attempts:
            self._next = None if self._attempts else 0
            self._attempts.append(frame.attempt)

    def _number_of(self, frame: Frame) -> int:
        """Return which exchange a sum is of. Raises: ProtocolError, if it is not due."""
        asked = (frame.kind, frame.moment, frame.codec, frame.n_values)
        due = range(len(self._answered) + 1) if self._next is None else range(self._next, self._next + 1)
        for number in due:
            step = self._steps[number] if number < len(self._steps) else None
            if step is not None and asked == (
                step.kind,
                step.moment,
                Codec.MASKED,
                math.prod(step.shape(self._table.n_bins)),
            ):
                return number
        raise ProtocolError(f"{frame.kind.name} at {frame.moment}: the job's plan pays for no such sum now")

    def _check_sums(self, step: TreeStep, grad_sums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Refuse what no rows with gradients of at most g* = 1 add up to, before it can overflow anywhere."""
        is_start = step.kind is Kind.STUMP_SUM
        largest = counts if is_start else counts << GRID_BITS  # the start counts rows in units of gradients
        in_range = counts.min() >= 0 and counts.max() <= (MAX_ROWS << GRID_BITS if is_start else MAX_ROWS)
        if in_range and step.kind is Kind.HISTOGRAM:
            in_range = int(self._table.totals(counts).sum()) <= MAX_ROWS
        if not in_range or (grad_sums > largest).any() or (grad_sums < -largest).any():
            raise ProtocolError(f"{step.kind.name}: these are no sums over rows: a site's masks or numbers are wrong")

    def _release(self, step: TreeStep, sums: NDArray[np.int64]) -> Release:
        if step.kind is Kind.STUMP_SUM:
            return release_start(sums.ravel(), self._plan.start_epsilon, self._randomness)
        settings = self._plan.tree_settings(step.ensemble, step.tree)
        aggregator = TreeAggregator(self._table, settings, self._randomness)
        return aggregator.choose(*sums) if step.kind is Kind.HISTOGRAM else aggregator.leaves(*sums)

    def _note(self, number: int, spend: Spend) -> None:
        """Say in the evidence what the start, or a whole tree, has cost; once."""
        step = self._steps[number]
        words = REPLAYED if number in self._noted else event_text([price(self._plan, step)])
        events = {**self._noted, number: price(self._plan, step)}
        epsilon = compose(ComposedEvent(tuple(events.values()))).for_person(self._job.rows_per_person).pure_epsilon
        spend("start" if step.kind is Kind.STUMP_SUM else f"tree {step.number}", words, epsilon, 0.0)
        self._noted = events


def price(plan: DpBoostPlan, step: TreeStep) -> Event:
    """Return what the start costs, or the whole tree that a step belongs to."""
    return plan.start_event() if step.kind is Kind.STUMP_SUM else plan.tree_event(step.ensemble, step.tree)
