"""The trusted server's part: it turns exact sums into noised choices, and keeps them for later attempts; the plan."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import PrivacyCost, compose
from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan
from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, leaf_sensitivity
from dp_components.dpboost.gradient_based_data_filtering import gradient_sensitivity
from dp_components.dpboost.single_tree import MAX_ROWS, SplitTable, choose_splits, release_clipped_leaves, release_start
from dp_components.events import ComposedEvent, Event, Release
from dp_components.sensitivity import GRID_BITS
from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.attempt.payment import REPLAYED, event_text
from nvflare_plugins.attempt.plan import (
    NOT_TWO_CLASSES,
    ExpectedLoss,
    Noise,
    Plan,
    PlanRequest,
    advise,
    shown_lines,
    warnings,
)
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.files import write_private
from nvflare_plugins.base.formatting import human_bytes, human_number
from nvflare_plugins.kinds.dpboost.job import KEPT_FILE, DpBoostJob
from nvflare_plugins.wire.envelope import Codec, Frame, Kind, Phase, TrainingStep

# The trusted server's part: it turns exact sums into noised choices of splits and noised leaves.
#
# The gain is not linear in the sums, so that its noise cannot be divided among the sites: this algorithm needs someone
# who sees exact sums. The server sees those over all sites, never a single site's.
#
# A job that waits for a lost site has several attempts, and one server. It keeps each answer with a hash of the exact
# sum that it was made of. An exchange that a later attempt repeats gets the same answer, from the same sum, or none:
# fresh noise on it would be a further release, which nobody has paid for and which averages out the first one's. All of
# that lives in the memory of the job's process, without which the job ends.


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
        self._answered: list[tuple[bytes, bytes]] = []  # of each exchange, a hash of its sum, and what was released
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
                self._answered.append((digest, released.value.astype("<i8").tobytes()))
            elif self._answered[number][0] != digest:
                raise ProtocolError(
                    f"{frame.kind.name} at {frame.moment}: an earlier attempt sent another sum, as after a change of "
                    "rows, and got an answer. A second one would be a release that nobody has paid for: submit the job "
                    "anew, to be charged anew"
                )
            self._next = number + 1
            if step.kind is not Kind.HISTOGRAM:
                self._note(number, spend)
            return self._answered[number][1]

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
            for step in self._steps[number : number + 1]:
                n_values = math.prod(step.shape(self._table.n_bins))
                if asked == (step.kind, step.moment, Codec.MASKED, n_values):
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
        of_step = sums[0], sums[1]
        if step.kind is Kind.HISTOGRAM:
            return choose_splits(self._table, settings, of_step, self._randomness)
        return release_clipped_leaves(settings, of_step, self._randomness)

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


# What an attempt of a job that waits for lost sites leaves to the next: a key, and the server's answers.
#
# The key decides which tree a row belongs to. Under another one a row would be in several trees of an ensemble, which
# the accounting takes for disjoint; so the first attempt's is kept, and a site that lacks it gets it from the others.
#
# The answers are what the server has released so far, the same at all sites. A site keeps each one before it sends
# anything that depends on it. So no site lacks more than the last, unless its disk has lost more; and what any site
# holds is asked of the server no more: the sites give it to each other. Only the exchange in which a site was lost is
# repeated (``DpBoostServer``). Whether what a site was given is what it has paid for,
# its own ledger says, whose queries hash key and answers. Of a tree for which no site says that it has paid there is no
# answer: a site that lies can invent the tree at which the job stands, and no model.
#
# The file is ``dpboost_kept`` in the run's folder, mode 0600, written whole and durably, and removed when all sites
# have the model, or the site's part in the job is over for another reason: a hash of the rest, the key, then the
# answers in order, 8 bytes each.


KEY_BYTES = HASH_BYTES = 32
_log = logging.getLogger(__name__)


class KeptAnswers:
    """One site's key and answers, of all attempts of a job.

    Privacy: the answers are noised, and all sites have got them; the key is the sites' alone, and never leaves them but
        sealed from the server.

    Attributes:
        key: that assigns rows to trees; known once the sites have agreed on it.
    """

    def __init__(self, folder: Path, *, is_kept: bool) -> None:
        """Read what earlier attempts have left; a damaged file counts as lost.

        Args:
            is_kept: the job waits for lost sites; otherwise nothing is read or written.
        """
        self._path, self._is_kept = folder / KEPT_FILE, is_kept
        self.key, self._answers, self._n_taken = b"", b"", 0
        if is_kept and self._path.is_file():
            content = self._path.read_bytes()
            digest, kept = content[:HASH_BYTES], content[HASH_BYTES:]
            if hashlib.sha256(kept).digest() == digest and len(kept) >= KEY_BYTES:
                self.key, self._answers = kept[:KEY_BYTES], kept[KEY_BYTES:]
            else:
                _log.warning("what earlier attempts of the job have left here is damaged: the other sites are asked")

    def offer(self) -> bytes:
        """Return what tells the other sites who holds most: key, size and hash of the answers; or nothing."""
        if not self.key:
            return b""
        return b"".join([self.key, len(self._answers).to_bytes(8, "little"), hashlib.sha256(self._answers).digest()])

    def agree(self, attempt: SiteAttempt, offers: Sequence[bytes], fresh_key: bytes) -> None:
        """Take the key that any site holds, or else the fresh one, and the answers of the site that has most of them.

        Args:
            offers: ``offer`` of every site, in rank order.

        Raises:
            ProtocolError: the sites hold different keys or answers.
        """
        if any(len(offer) not in (0, KEY_BYTES + 8 + HASH_BYTES) for offer in offers):
            raise ProtocolError("a site's account of the answers that it holds has another size than it should")
        keys = {offer[:KEY_BYTES] for offer in offers if offer} or {fresh_key}
        if len(keys) > 1:
            raise ProtocolError("the sites hold different keys of earlier attempts: submit the job anew")
        (self.key,) = keys
        sizes = [int.from_bytes(offer[KEY_BYTES : KEY_BYTES + 8], "little") for offer in offers]
        if len({offer[KEY_BYTES:] for offer in offers}) > 1 and max(sizes) > 0:
            holder = sizes.index(max(sizes))
            given = attempt.gather_sealed("kept answers", self._answers if holder == attempt.channel.rank else b"")
            if len(given[holder]) != sizes[holder] or not given[holder].startswith(self._answers):
                raise ProtocolError(
                    "the sites got different answers from the server in an earlier attempt: submit the job anew, to be "
                    "charged anew"
                )
            self._answers = given[holder]
        self._write()

    def take(self, n_values: int) -> NDArray[np.int64] | None:
        """Return the next answer if the sites hold it. Shapes: int64[n_values].

        Raises:
            ProtocolError: what they hold ends in the midst of an answer.
        """
        begin, end = self._n_taken, self._n_taken + 8 * n_values
        if begin == len(self._answers):
            return None
        if end > len(self._answers):
            raise ProtocolError("the answers of earlier attempts end in the midst of one: submit the job anew")
        self._n_taken = end
        return np.frombuffer(self._answers[begin:end], dtype="<i8").astype(np.int64)

    def add(self, answer: NDArray[np.int64]) -> None:
        """Keep an answer of the server, durably: call it before anything that depends on the answer leaves."""
        if self._is_kept:
            self._answers += answer.astype("<i8").tobytes()
            self._n_taken = len(self._answers)
            self._write()

    def drop(self) -> None:
        """Remove the file: all sites have the model."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._is_kept:
            kept = self.key + self._answers
            write_private(self._path, hashlib.sha256(kept).digest() + kept)


_SUM_BYTES = 8
DPBOOST = (
    "not estimated: a formula was off by 22 points of a hundred on average on tables to which it was not fitted. With "
    "its own parameters half of 14 tables lost more than 82 % of what XGBoost's AUC has above 0.5 at epsilon 1, 58 % "
    "at 4, 29 % at 10 and 14 % at 40"
)


def plan(request: PlanRequest, job: DpBoostJob) -> Plan:
    """Return the plan of a DPBoost job."""
    training = job.plan()
    n_bins = SplitTable.of(job.candidates()).n_bins
    exchanges = [int(np.prod(step.shape(n_bins))) for step in steps(job)]
    noise = [_leaf_noise(job, tree) for tree in (0, training.ensemble_size(0) - 1)]
    bounds = {**job.feature_bounds, **({} if job.label_bounds is None else {job.label: job.label_bounds})}
    figures = {
        "epsilon": job.epsilon,
        "delta": 0.0,
        "rows_per_person": job.rows_per_person,
        "n_trees": training.n_trees,
        "n_ensembles": training.n_ensembles,
        "epsilon_of_a_level": training.split_epsilon,
        "epsilon_of_leaves": training.leaf_epsilon,
        "noise_on_first_and_last_leaf": noise,
        "n_messages": len(exchanges),
        "n_bytes": sum(exchanges) * _SUM_BYTES,
    }
    advice = advise(
        request,
        job.data_set,
        PrivacyCost(pure_epsilon=job.epsilon),
        PrivacyCost(pure_epsilon=job.epsilon / job.rows_per_person).for_person,
        noise=_of_largest_weight(job),
        expected=ExpectedLoss(DPBOOST if job.label_bounds is None else NOT_TWO_CLASSES),
        warned=warnings(job.epsilon, 0.0, request.rows, bounds),
    )
    text = shown_lines(
        {
            "method": f"{job.variant}: {training.n_trees} trees in {training.n_ensembles} ensemble(s)",
            "privacy": f"pure epsilon {job.epsilon:g}; {training.split_epsilon:.3g} for a level's splits, "
            f"{training.leaf_epsilon:.3g} for a tree's leaves",
            "noise on a leaf": f"Laplace scale {human_number(noise[0])} on weights of the first tree of an ensemble, "
            f"{human_number(noise[1])} on its last, of gradients in [-1, 1]",
            "sums": f"{len(exchanges)} messages, {human_bytes(sum(exchanges) * _SUM_BYTES)} from each site",
            **advice.shown,
        }
    )
    return Plan({**figures, **advice.figures}, text)


def _leaf_noise(job: DpBoostJob, tree: int) -> float:
    settings = job.plan().tree_settings(0, tree)
    bound = leaf_sensitivity(gradient_sensitivity(), settings.ridge, settings.leaf_bound).bound
    return math.ldexp(bound, -LEAF_BITS) / settings.leaf_epsilon


def _of_largest_weight(job: DpBoostJob) -> Noise:
    """Return the noise on leaves of an ensemble's first and last tree over the largest weight that these can have."""
    ratios = []
    for tree in (0, job.plan().ensemble_size(0) - 1):
        largest = math.ldexp(job.plan().tree_settings(0, tree).leaf_bound, -LEAF_BITS)
        ratios.append(math.sqrt(2) * _leaf_noise(job, tree) / largest)
    first, last = (human_number(ratio, 2) for ratio in ratios)
    text = (
        f"the noise on a leaf's weight is {first} times the largest weight there is in the first tree of an ensemble, "
        f"{last} times in its last (standard deviation; before released weights are clipped)"
    )
    return {"first_tree": ratios[0], "last_tree": ratios[1]}, text
