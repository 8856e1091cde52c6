"""What a passive party pays for noised sums: all of a job is reserved first, each tree charged before its first sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.events import DiscreteGaussianEvent, Release
from dp_components.neighbouring import NeighbouringRelation
from dp_components.split_candidates.float_quantiles import quantile_cuts
from he_processors.errors import JobAborted, PolicyRefusal
from nvflare_plugins.attempt.payment import JobLedger
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.report.run_record import ReportSection
from nvflare_plugins.site.memory.persons_of_budgets import PersonsOfBudgets
from nvflare_plugins.vertical.noised.plan import NoisePlan, PartyNoise
from nvflare_plugins.vertical.party_data import PartySet
from nvflare_plugins.vertical.passive.cut_points import CutPoints


class NoisePayment:
    """A passive party's ledger in one job of the preset noised.

    Nothing is replayed: sums are of fresh gradients each time, so that a job that was interrupted pays anew.
    """

    def __init__(self, plan: NoisePlan, attempt: SiteAttempt, train: PartySet) -> None:
        """Reserve all that the job may cost.

        Raises:
            PolicyRefusal: the data set has no budget or not so much left, or its ledger counts in another unit.
            DataRefusal: another budget pays for persons among the rows.
        """
        context, name = attempt.context, train.data_set.name
        budget = context.policy.data_set(name).privacy
        if budget is not None and budget.rows_per_person > 1:
            raise PolicyRefusal(
                f"at {context.site} one person has up to {budget.rows_per_person} rows, and preset noised protects one "
                f"row: such a person would be protected less than epsilon says. Policy key: data_sets.{name}.privacy."
                "rows_per_person. Remedy: take a data set with one row for each person, or choose another preset."
            )
        ids: Sequence[str | None] = [None] * train.table.n_rows if train.ids is None else train.row_ids()
        persons = PersonsOfBudgets(context.policy, train.data_set)
        if not persons.are_new(ids).all():
            raise DataRefusal(
                "another budget pays for persons among the rows of this job: take rows of persons who were in no "
                "private job on another data set"
            )
        self.plan = plan
        self.noise: PartyNoise = plan.of_party(train.table.features.shape[1])
        relation = NeighbouringRelation.REPLACE_ROW
        self._ledger = JobLedger(context.policy, name, context.job_id, relation, attempt.evidence, plan.delta)
        self.quote = self._ledger.reserve(self.noise.whole)
        self._note: Callable[[], None] | None = lambda: persons.note(ids)

    def cut_points(self, train: PartySet) -> CutPoints:
        """Pay for cut points, and find them. They stay at the party; how many there are, others learn."""
        self._pay("cut points", self.noise.of_cuts)
        columns = np.ascontiguousarray(train.table.features.T)
        return as_cut_points(quantile_cuts(columns, self.plan.n_bins, self.noise.cuts_multiplier))

    def pay_tree(self, tree: int) -> None:
        """Pay for all sums of one tree; they may leave once this has returned.

        Raises:
            PolicyRefusal: the plan is spent.
            JobAborted: the tree was paid for before, or the ledger cannot be written.
        """
        self._pay(f"sums per bin of tree {tree}", self.noise.of_tree)

    def spent(self) -> float:
        """Return epsilon, at the job's delta, of what has been paid."""
        return self._ledger.spent()

    def close(self) -> None:
        """End the job in the ledger: what it has not used becomes free again."""
        self._ledger.close()

    def section(self) -> ReportSection:
        """Describe the noise for the party's report. Privacy: numbers of the job and the ledger alone."""
        plan, noise = self.plan, self.noise
        text = (
            f"Every sum per bin that left this party has discrete Gaussian noise: {plan.epsilon:g} is the most that "
            f"all of them together, and the cut points, may tell of one row's features here, at delta {plan.delta:g}, "
            "to an active party that keeps to the protocol, given the bits of this party's splits. Those bits are not "
            "covered: they are exact, counted and capped."
        )
        rows = (
            ("epsilon, planned", f"{plan.epsilon:g}"),
            ("epsilon, spent", f"{self.spent():.4g}"),
            ("trees with this party's columns, at most", str(plan.n_trees)),
            ("features of this party in a tree, at most", str(noise.features_per_tree)),
            ("noise on a bin's sum of gradients, in rows", f"{noise.scales[0] / (1 << plan.fraction_bits):.4g}"),
            ("noise on a bin's sum of hessians, in rows", f"{noise.scales[1] / (1 << plan.fraction_bits):.4g}"),
        )
        return ReportSection("Noised sums", (text,), ("", ""), rows)

    def _pay(self, query: str, event: DiscreteGaussianEvent) -> None:
        if self._note is not None:  # of whom this budget speaks, before the first release
            self._note()
            self._note = None
        made: list[None] = []

        def make() -> Release:
            made.append(None)
            return Release(np.zeros(1, dtype=np.int64), event)  # the sums themselves are noised under encryption

        self._ledger.pay(query, make)
        if not made:
            raise JobAborted(
                "noised sums are asked for that were paid for before: nothing was sent. Submit the job anew"
            )


def as_cut_points(cuts: Sequence[NDArray[np.float32]]) -> CutPoints:
    """Return bins between cuts, the first from the least number on and the last up to the largest.

    Shapes: cuts: float32[n_cuts] for each feature.
    """
    most = np.finfo(np.float32).max
    upper = tuple(np.append(of_feature, most).astype(np.float32) for of_feature in cuts)
    return CutPoints(upper, np.full(len(upper), np.finfo(np.float32).min, dtype=np.float32))
