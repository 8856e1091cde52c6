"""The trusted server's part: it turns exact sums into noised choices of splits and noised leaves.

The gain is not linear in the sums, so that its noise cannot be divided among the sites: this algorithm needs someone
who sees exact sums. The server sees those over all sites, never a single site's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import compose
from dp_components.dpboost.single_tree import TreeAggregator
from dp_components.dpboost.split_selection import MAX_ROWS, SplitTable
from dp_components.events import ComposedEvent, Event
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from he_processors.errors import ProtocolError
from nvflare_plugins.dpboost.job import DpBoostJob
from nvflare_plugins.privacy_ledger import event_text
from nvflare_plugins.wire.catalogue import Kind, Moment, Phase
from nvflare_plugins.wire.envelope import Codec, Frame

Spend = Callable[[str, str, float, float], None]
"""``EvidenceLog.spend``: (query, event, epsilon so far, delta)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange of a training. Attributes: number: of the tree in the model; level: None for the leaves."""

    number: int
    ensemble: int
    tree: int
    level: int | None
    n_nodes: int

    @property
    def kind(self) -> Kind:
        """Kind of the sites' message."""
        return Kind.NODE_STATS if self.level is None else Kind.HISTOGRAM

    @property
    def moment(self) -> Moment:
        """Where the training stands."""
        return Moment(Phase.UPDATE, self.number)

    def n_values(self, n_bins: int) -> int:
        """Return how many numbers a site sends: sums of gradients, then of rows, per node (and bin)."""
        return 2 * self.n_nodes * (1 if self.level is None else n_bins)


def steps(job: DpBoostJob) -> Iterator[Step]:
    """Yield all exchanges of a job in order; the same at the server and at all sites."""
    plan, number = job.plan(), 0
    for ensemble in range(plan.n_ensembles):
        for tree in range(plan.ensemble_size(ensemble)):
            for level in range(plan.depth):
                yield Step(number, ensemble, tree, level, 1 << level)
            yield Step(number, ensemble, tree, None, 1 << plan.depth)
            number += 1


class DpBoostServer:
    """Answers the sites' sums of one attempt.

    Privacy: one release per exchange, no more of them than the plan has; the aggregator keeps answers for retries.
    Security: the noise comes from the server's operating system.
    """

    def __init__(self, job: DpBoostJob, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._job, self._plan, self._randomness = job, job.plan(), randomness
        self._table = SplitTable.of(job.candidates())
        self._due = steps(job)
        self._events: list[Event] = []

    def answer(self, frame: Frame, total: bytes, spend: Spend) -> bytes:
        """Return the chosen splits of a level, or the leaf weights of a tree.

        Raises:
            ProtocolError: a sum that is not due now, or that no rows can have.
        """
        step = next(self._due, None)
        is_due = step is not None and (frame.kind, frame.moment, frame.codec, frame.n_values) == (
            step.kind, step.moment, Codec.MASKED, step.n_values(self._table.n_bins),
        )  # fmt: skip
        if step is None or not is_due:
            raise ProtocolError(f"{frame.kind.name} at {frame.moment}: the job's plan pays for no such sum now")
        grad_sums, counts = self._sums(step, total)
        aggregator = TreeAggregator(
            self._table, self._plan.tree_settings(step.ensemble, step.tree), self._randomness
        )
        if step.level is not None:
            return aggregator.choose(grad_sums, counts).value.astype("<i8").tobytes()
        leaves = aggregator.leaves(grad_sums, counts).value
        self._note(step, spend)
        return leaves.astype("<i8").tobytes()

    def _sums(self, step: Step, total: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shape = (2, step.n_nodes) if step.level is None else (2, step.n_nodes, self._table.n_bins)
        grad_sums, counts = np.frombuffer(total, dtype="<i8").astype(np.int64).reshape(shape)
        if counts.min(initial=0) < 0 or counts.max(initial=0) > MAX_ROWS:
            raise ProtocolError(f"{step.kind.name}: these are no sums over rows: a site's masks or numbers are wrong")
        return grad_sums, counts

    def _note(self, step: Step, spend: Spend) -> None:
        event = self._plan.tree_event(step.ensemble, step.tree)
        self._events.append(event)
        epsilon = compose(ComposedEvent(tuple(self._events))).for_person(self._job.rows_per_person).pure_epsilon
        spend(f"tree {step.number}", event_text([event]), epsilon, 0.0)
