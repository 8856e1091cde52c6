"""What a passive party pays for noised sums: all of a job is reserved first, each tree charged before its first sum."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.events import Release
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

_CUTS = "cut points"
_log = logging.getLogger(__name__)


class NoisePayment:
    """A passive party's ledger in one job of the preset noised.

    A tree is paid for each time that it is begun, and drawn fresh noise for, whoever says that its sums were lost: the
    party never sees the sums that it noises, and cannot tell whether they are of the same gradients as before. To add
    the same noise to others would show their difference without any. So nothing of a tree is replayed. An attempt goes
    on with the cut points that an earlier one of its job has paid for: they stand in the ledger. A job that resumes
    another is one of its own here, and pays for what is left.
    """

    def __init__(self, plan: NoisePlan, attempt: SiteAttempt, train: PartySet, n_due: int, may_wait: bool) -> None:
        """Reserve all that the job may cost.

        Args:
            n_due: trees that are still to be grown.
            may_wait: the job goes on after a loss, in the next attempt.

        Raises:
            PolicyRefusal: the data set has no budget or not so much left, its ledger counts in another unit, or earlier
                attempts have paid for as many repeated trees as the job says.
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
        self.noise: PartyNoise = plan.of_party(len(train.table.feature_names))
        relation = NeighbouringRelation.REPLACE_ROW
        self._ledger = JobLedger(context.policy, name, context.job_id, relation, attempt.evidence, plan.delta)
        known = self._ledger.planned(self.noise.of_tree)
        planned = n_due + plan.n_repeats if known is None else known
        self.quote = self._ledger.reserve(self.noise.of_trees(planned), may_wait)
        self._paid = Counter(query for query in self._ledger.replies() if query != _CUTS)
        self._may_wait = may_wait
        if planned - self._paid.total() < n_due:
            self.close(is_complete=False)
            raise PolicyRefusal(
                f"at {context.site} this job has lost and paid for more trees than noised_repeats allows for: what is "
                f"left of its epsilon does not pay for the rest. Remedy: submit it with resume_from={context.job_id}, "
                "as a job of its own in the budget, or anew with more noised_repeats."
            )
        self._note: Callable[[], None] | None = lambda: persons.note(ids)

    def cut_points(self, train: PartySet) -> CutPoints:
        """Pay for cut points, and find them, or return those that an earlier attempt has paid for.

        They stay at the party; how many there are, others learn.

        Raises:
            JobAborted: as ``pay_tree``, or the cut points are of other columns than the data set has now.
        """
        columns = train.table.by_feature

        def find() -> Release:
            cuts = quantile_cuts(columns, self.plan.n_bins, self.noise.cuts_multiplier)
            return Release(_cuts_as_integers(cuts), self.noise.of_cuts)

        found = _cuts_of_integers(self._pay(_CUTS, find))
        if len(found) != columns.shape[0]:
            raise JobAborted(
                "the columns of the data set are not those on which this job was begun: nothing was sent. Submit the "
                "job anew"
            )
        return as_cut_points(found)

    def pay_tree(self, tree: int) -> None:
        """Pay for all sums of one tree; they may leave once this has returned.

        Raises:
            PolicyRefusal: the plan is spent.
            JobAborted: the ledger cannot be written.
        """
        name = f"sums per bin of tree {tree}"
        times = sum(count for query, count in self._paid.items() if query.partition(",")[0] == name)
        query = f"{name}, time {times + 1}" if times else name
        self._paid[query] += 1
        # The sums themselves are noised under encryption.
        self._pay(query, lambda: Release(np.zeros(1, dtype=np.int64), self.noise.of_tree))

    def spent(self) -> float:
        """Return epsilon, at the job's delta, of what has been paid."""
        return self._ledger.spent()

    def close(self, is_complete: bool) -> None:
        """End the attempt in the ledger: what it has not used becomes free again.

        Args:
            is_complete: the job is done. One that is not, and waits for a lost site, reserves the rest anew in its next
                attempt.
        """
        if is_complete or not self._may_wait:
            self._ledger.close()
        elif self._ledger.interrupt():
            _log.warning(
                "the noised job was interrupted: what it has paid stays charged, the rest of its budget is free again "
                "until it goes on. If it does not, delete its entry with `veilboost ledger --close`"
            )

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
            ("trees with this party's columns, at most", str(plan.n_trees - plan.n_repeats)),
            ("of these paid for a second time after a loss, at most", str(plan.n_repeats)),
            ("features of this party in a tree, at most", str(noise.features_per_tree)),
            ("noise on a bin's sum of gradients, in rows", f"{noise.scales[0] / (1 << plan.fraction_bits):.4g}"),
            ("noise on a bin's sum of hessians, in rows", f"{noise.scales[1] / (1 << plan.fraction_bits):.4g}"),
        )
        return ReportSection("Noised sums", (text,), ("", ""), rows)

    def _pay(self, query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
        if self._note is not None:  # of whom this budget speaks, before the first release
            self._note()
            self._note = None
        return self._ledger.pay(query, make)


def _cuts_as_integers(cuts: Sequence[NDArray[np.float32]]) -> NDArray[np.int64]:
    """Write cut points as a ledger keeps a reply: how many features, how many cuts each has, their bits."""
    sizes = [len(cuts), *(one.size for one in cuts)]
    bits = np.concatenate([np.empty(0, np.float32), *cuts]).astype("<f4").view("<i4")
    return np.concatenate([np.array(sizes, dtype=np.int64), bits.astype(np.int64)])


def _cuts_of_integers(kept: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    n_features = int(kept[0])
    bits = kept[1 + n_features :].astype("<i4").view("<f4").astype(np.float32)
    return np.split(bits, np.cumsum(kept[1 : 1 + n_features])[:-1])


def as_cut_points(cuts: Sequence[NDArray[np.float32]]) -> CutPoints:
    """Return bins between cuts, the first from the least number on and the last up to the largest.

    Shapes: cuts: float32[n_cuts] for each feature.
    """
    most = np.finfo(np.float32).max
    upper = tuple(np.append(of_feature, most).astype(np.float32) for of_feature in cuts)
    return CutPoints(upper, np.full(len(upper), np.finfo(np.float32).min, dtype=np.float32))
