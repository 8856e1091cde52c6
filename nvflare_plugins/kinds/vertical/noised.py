"""The preset noised: what is added to a passive party's sums, what it costs, and where it comes from."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import compose, gaussian_limit
from dp_components.events import ComposedEvent, DiscreteGaussianEvent, NeighbouringRelation, Release, RepeatedEvent
from dp_components.split_candidates.candidates import Columns
from dp_components.split_candidates.dp_quantiles import descent_event, quantile_cuts
from dp_components.vertical_bins import bin_scales, draw_bin_noise, tree_event, tree_sensitivity
from he_processors.elgamal.encryption import NOISED_FRACTION_BITS
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.fixed_point import PairFormat
from he_processors.histogram.planner import BinCodes, BinLayout
from he_processors.histogram.sums import BinNoise
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.attempt.payment import JobLedger
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.errors import DataRefusal, JobAborted, PolicyRefusal
from nvflare_plugins.kinds.vertical.guards import Guard, Step
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.party_data import CutPoints, PartySet
from nvflare_plugins.pages.run_record import ReportSection
from nvflare_plugins.site.memory.budgets import PersonsOfBudgets
from nvflare_plugins.site.memory.released import Released
from nvflare_plugins.xgb.parameters import ALIASES, TrainingParameters

# The guard of a passive party in the preset noised: it counts and caps split bits, which no noise covers.
#
# Sums are paid for from the budget, so that neither floors on nodes nor caps on sums decide: the guarantee holds for a
# node of one row as for one of many. A row that has shown as many split bits as the policy allows keeps the sums of its
# nodes at home, as in guarded jobs, so that it is not divided any more.


class NoisedGuard(Guard):
    """Charges split bits durably; sums are the ledger's. Bins stay as the cut points are: those are paid for."""

    def check_bins(self, max_bin: int) -> None:
        """Allow any: the noise is on each."""

    def merge_rare_bins(self, cuts: CutPoints, columns: Columns) -> CutPoints:
        """Merge none: which bins are rare would be told without noise."""
        return cuts

    def codes(self, cuts: CutPoints, columns: Columns) -> BinCodes:
        """Return the bins of the training rows, a missing value in none. Shapes: as ``Guard.codes``."""
        return cuts.codes(columns)

    def _admit(self, released: Released, step: Step) -> bool:
        most = self._rules.max_split_bits_per_row
        if any(rows.size and released.split_bits[rows].max() >= most for rows in step.sets):
            self._n_withheld += len(step.sets)
            return False
        self._n_sums += step.n_sums * len(step.sets)
        self._n_released += len(step.sets)
        return True


# How much noise the preset noised adds, and what that costs: from the job alone, so that all parties know it.
#
# Epsilon and delta pay for the cut points, with a twentieth of the squared budget, and for the trees that may use
# passive columns, each alike. Rounds that the active party has to itself (own_rounds) cost nothing: what a tree costs
# falls with their number, so few trees with passive columns after many without are the better use of a budget.


FRACTION_BITS = 20
"""Of noised gradients under big-number schemes: far below the noise."""
NOISED_FINEST = 2.0**-10
"""Step beside a leaf's denominator, where weights differ: noised leaves are rounded, and light rows count still."""
MAX_DEPTH = 8
CUTS_SHARE = 0.05
"""Part of the squared budget that pays for cut points."""
_TAIL = 12.0  # standard deviations: an honest value lies beyond with a chance below 1e-30
_MORE = 1 + 1e-6  # noise over what the limit asks for: discrete noise costs a little more than continuous
_LARGEST_TAIL = 1 << 36  # encoded integers: what a search for logarithms and a word of a sum still hold


@dataclass(frozen=True, slots=True)
class PartyNoise:
    """What one passive party adds.

    Attributes:
        features_per_tree: most features of the party in a tree.
        scales: noise on one sum of g and on one of h. Units: encoded integers.
        cuts_multiplier: noise over sensitivity of the counts that cut points are found by.
        of_cuts, of_tree: what these cost.
    """

    features_per_tree: int
    scales: tuple[float, float]
    cuts_multiplier: float
    of_cuts: DiscreteGaussianEvent
    of_tree: DiscreteGaussianEvent
    n_trees: int

    @property
    def whole(self) -> ComposedEvent:
        """Return what the whole job costs this party."""
        return self.of_trees(self.n_trees)

    def of_trees(self, n_trees: int) -> ComposedEvent:
        """Return what cut points and so many trees cost."""
        trees = (RepeatedEvent(self.of_tree, n_trees),) if n_trees else ()
        return ComposedEvent((self.of_cuts, *trees))


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """The plan of one job.

    Attributes:
        n_trees: trees with passive columns that may be paid for, those that are paid for a second time included.
        n_repeats: trees that may be paid for again after a loss.
        depth: levels of a tree that are split: nodes on a path whose sums leave.
        n_features: most features of a passive party in a tree.
        n_bins: most bins of a passive feature.
    """

    epsilon: float
    delta: float
    n_trees: int
    depth: int
    n_features: int
    n_bins: int
    fraction_bits: int
    n_repeats: int = 0

    def of_party(self, n_features: int) -> PartyNoise:
        """Return what a party with so many features adds and pays.

        Raises:
            ConfigurationError: noise beyond what sums can hold.
        """
        return _party_noise(self, n_features)

    @property
    def tails(self) -> tuple[int, int]:
        """Return the largest noise on a sum that is taken for honest, of the party with most features."""
        g, h = self.of_party(self.n_features).scales
        return math.ceil(_TAIL * g), math.ceil(_TAIL * h)

    def pair_format(self, n_rows: int) -> PairFormat:
        """Return the number format of a scheme that adds no digits."""
        return PairFormat(self.fraction_bits, max(n_rows, 1), g_bound=1.0, h_low=0.0, h_high=1.0, tails=self.tails)

    def rows_of_noise(self, n_features: int) -> float:
        """Return the noise on one bin's sum of gradients, in rows with the largest gradient: what people can read."""
        return self.of_party(n_features).scales[0] / (1 << self.fraction_bits)


@cache
def _party_noise(plan: NoisePlan, n_features: int) -> PartyNoise:
    mu_squared = gaussian_limit(plan.epsilon, plan.delta).mu_squared
    of_tree = math.sqrt(plan.n_trees / (mu_squared * (1 - CUTS_SHARE))) * _MORE
    of_cuts = math.sqrt(1 / (mu_squared * CUTS_SHARE)) * _MORE
    most = min(n_features, plan.n_features)
    sensitivity = tree_sensitivity(most, plan.depth, 1 << plan.fraction_bits)
    n_sums = ((1 << plan.depth) - 1) * most * (plan.n_bins + 1)
    event = tree_event(n_sums, sensitivity, of_tree)
    cuts = descent_event(n_features, plan.n_bins, of_cuts)
    scales = bin_scales(sensitivity, of_tree)
    if _TAIL * max(scales) > _LARGEST_TAIL:
        raise ConfigurationError(
            "preset noised: so small an epsilon needs more noise than sums can hold. Remedy: raise epsilon, or "
            "lower num_rounds, max_depth or noised_features."
        )
    noise = PartyNoise(most, scales, of_cuts, cuts, event, plan.n_trees)
    if compose(noise.whole).epsilon(plan.delta) > plan.epsilon:
        raise ConfigurationError("preset noised: the planned noise costs more than epsilon, a defect: report it")
    return noise


def plan_of(job: VerticalJob, parameters: TrainingParameters) -> NoisePlan | None:
    """Return the plan of a job; None for another preset.

    Raises:
        ConfigurationError: trees whose noise could not be planned.
    """
    if not job.is_noised or job.epsilon is None or job.delta is None:
        return None
    effective = parameters.effective
    if any(ALIASES.get(name, name) == "monotone_constraints" for name in job.params):
        raise ConfigurationError("monotone_constraints are refused in preset noised: choose preset guarded for them")
    depth = int(effective["max_depth"])
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigurationError(f"preset noised needs max_depth from 1 to {MAX_DEPTH}: each level costs noise")
    if effective.get("grow_policy", "depthwise") != "depthwise" or int(effective["max_leaves"]) > 0:
        raise ConfigurationError("preset noised grows trees level by level: leave grow_policy and max_leaves out")
    per_round, n_rounds = trees_per_round(parameters), job.num_rounds - job.own_rounds + job.noised_repeats
    is_elgamal = job.profile == VerticalProfile.ELGAMAL.value
    return NoisePlan(
        job.epsilon,
        job.delta,
        n_rounds * per_round,
        depth,
        job.noised_features,
        job.noised_bins,
        NOISED_FRACTION_BITS if is_elgamal else FRACTION_BITS,
        job.noised_repeats * per_round,
    )


def trees_per_round(parameters: TrainingParameters) -> int:
    """Return the trees of one boosting round."""
    return parameters.objective.n_outputs * int(parameters.effective.get("num_parallel_tree", 1))


def trees_due(job: VerticalJob, parameters: TrainingParameters, n_done: int) -> int:
    """Return the trees with passive columns that are still to be grown. Args: n_done: rounds of the job."""
    return max(job.num_rounds - max(n_done, job.own_rounds), 0) * trees_per_round(parameters)


# What a passive party pays for noised sums: all of a job is reserved first, each tree charged before its first sum.


_CUTS = "cut points"
_log = logging.getLogger(__name__)


class NoisePayment:
    """A passive party's ledger in one job of the preset noised. A context manager, which ends the attempt in it.

    A tree is paid for each time that it is begun, and drawn fresh noise for, whoever says that its sums were lost: the
    party never sees the sums that it noises, and cannot tell whether they are of the same gradients as before. To add
    the same noise to others would show their difference without any. So nothing of a tree is replayed. An attempt goes
    on with the cut points that an earlier one of its job has paid for: they stand in the ledger. A job that resumes
    another is one of its own here, and pays for what is left.
    """

    def __init__(self, plan: NoisePlan, attempt: SiteAttempt, train: PartySet, n_due: int, *, may_wait: bool) -> None:
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
        self.quote = self._ledger.reserve(self.noise.of_trees(planned), can_resume=may_wait)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close(is_complete=kind is None)  # what was not used is free again

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

    def close(self, *, is_complete: bool) -> None:
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


# Where a passive party's noise comes from: paid for tree by tree, drawn for each sum by itself.


class NoiseSource:
    """Draws the noise of one party in one job.

    Privacy: a tree's event is charged (``pay_tree``) before any of its noise is drawn, and none is drawn for a tree
        that was not. Every sum of every node has noise of its own, those of empty bins and of missing values too.
    """

    def __init__(self, noise: PartyNoise, pay_tree: Callable[[int], None], randomness: RandomSource = OS_RANDOMNESS):
        self._noise, self._pay_tree, self._randomness = noise, pay_tree, randomness
        self._paid_tree: int | None = None

    def check_tree(self, n_features: int) -> None:
        """Refuse a tree of more features than are paid for. Raises: ProtocolError."""
        if n_features > self._noise.features_per_tree:
            raise ProtocolError("a tree uses more features of this party than the preset noised pays for")

    def pay(self, tree: int) -> None:
        """Pay for a tree, once, before the first of its sums. Raises: as ``NoisePayment.pay_tree``."""
        self._pay_tree(tree)
        self._paid_tree = tree

    def draw(self, tree: int, n_nodes: int, layout: BinLayout) -> BinNoise:
        """Draw the noise of a block of sums. Raises: ProtocolError: the tree is not paid for."""
        if tree != self._paid_tree:
            raise ProtocolError("sums of a tree that was not paid for")
        return BinNoise(*draw_bin_noise(n_nodes * layout.n_slots, self._noise.scales, self._randomness))
