"""The plans of private jobs: what they spend, how much noise that means, and help for whoever chooses epsilon."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dp_components.accounting import PrivacyCost, TradeOff, compose
from dp_components.bucket_ldp import wrong_bucket_rate
from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, leaf_sensitivity
from dp_components.dpboost.gradient_based_data_filtering import gradient_sensitivity
from dp_components.dpboost.single_tree import SplitTable
from dp_components.errors import PrivacyError
from dp_components.leaf_weights import TWO_CLASSES
from dp_components.ledger import Budget, Ledger, ledger_files
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import counted, human_bytes, human_number, printable
from nvflare_plugins.cli.options import Options, own_policy
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import steps
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob, Description, Unit
from nvflare_plugins.kinds.federboost_vertical.payment import bucket_epsilon
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.methods import Method, SplitMethod
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan
from nvflare_plugins.kinds.private_trees.summary import lines, summarise

# How much of a model's score the noise is expected to take, from public numbers alone, and how far off that is.
#
# Of the way from guessing (AUC 1/2) to XGBoost's AUC without privacy a private model of two classes loses the share
#
# o / (1 + o),    o = a x^p,
#
# with x the noise over the signal, and a and p as the development tables of ``tests/bench/bench_plan_loss.py`` give
# them.
#
# Trees on noised sums: G of a mean leaf sums n / 2^d gradients, whose standard deviation before the first tree is
# sqrt(b (1 - b)), with b the share of one class; what a leaf can add to a score is in proportion to it. Its noise has
# standard deviation s. Scores add up T trees, whose noises are independent and each grow with sqrt(T) as the budget is
# divided, so that s / sqrt(T) is what is left of the number of trees. x = (s / sqrt(T)) 2^d / (n sqrt(b (1 - b))).
#
# Randomised buckets: counts over them tell as much as the share k of the rows would in clear; x = 1 / k - 1.
#
# A table's own difficulty is in no public number, and it moves the loss more than anything that is: that is the error
# stated here, measured on tables to which nothing was fitted. ``seldom`` is the a below which nine of ten development
# trainings lay. Where the formula was off by more than a fifth on average, no number is given, and what the tables lost
# is said instead.


NO_ROWS = "not estimated: it depends on the number of all sites' rows; give --rows where that is public"


@dataclass(frozen=True, slots=True)
class Fit:
    """One kind of training. The errors are those on held-out tables.

    Attributes:
        typical, seldom: a, of the median and of nine tenths of the development tables' trainings.
        power: p.
        fitted: least and largest x of the trainings.
        error: mean distance between expected and measured share, on held-out tables.
        within: share of their trainings that lost no more than ``seldom`` says.
    """

    typical: float
    seldom: float
    power: float
    fitted: tuple[float, float]
    error: float
    within: float


OURS = Fit(0.925, 4.50, 0.584, (0.0009, 1.26), 0.09, 0.97)
"""The defaults and few_rounds: random trees with paid candidates and a ridge in proportion to the noise."""
PUBLISHED = Fit(2.40, 25.4, 0.648, (0.005, 1.74), 0.20, 0.90)
"""Other random trees."""
BUCKETS = Fit(0.062, 0.401, 0.362, (0.01, 106.0), 0.17, 0.86)
"""FederBoost, all columns randomised."""

GREEDY = (
    "not estimated: a formula was off by 26 points of a hundred on average on tables to which it was not fitted. Of 14 "
    "tables half lost more than 63 % of what XGBoost's AUC has above 0.5 at epsilon 0.5 and 1, 43 % at 4"
)
DPBOOST = (
    "not estimated: a formula was off by 22 points of a hundred on average on tables to which it was not fitted. With "
    "its own parameters half of 14 tables lost more than 82 % of what XGBoost's AUC has above 0.5 at epsilon 1, 58 % "
    "at 4, 29 % at 10 and 14 % at 40"
)
NOISED = (
    "not estimated: it depends on what a passive party's columns add, which no public number says. Of that, noised "
    "sums at epsilon 1 to 10 kept 58 to 73 % on two tables of 24,000 and 39,000 rows, and with 1 % positives nothing"
)
NOT_TWO_CLASSES = "not estimated: trainings of two classes alone were measured, and their AUC"


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """What is expected. Attributes: typical, seldom: shares; both None where nothing is estimated; text: in words."""

    text: str
    typical: float | None = None
    seldom: float | None = None


def of_private_trees(plan: PrivateTreesPlan, rows: int | None, base_rate: float | None) -> ExpectedLoss:
    """Return the expected loss of private trees.

    Args:
        rows: of all sites together, if public.
        base_rate: share of one of the two classes, if public.
    """
    method = plan.method
    if plan.target is not TWO_CLASSES:
        return ExpectedLoss(NOT_TWO_CLASSES)
    if method.split_method is not SplitMethod.TOTALLY_RANDOM:
        return ExpectedLoss(GREEDY)
    if rows is None:
        return ExpectedLoss(NO_ROWS)
    return _expected(_fit_of(method), noise_over_signal(plan, rows, base_rate))


def of_buckets(kept: float) -> ExpectedLoss:
    """Return the expected loss of randomised buckets. Args: kept: share of rows that counts over them are worth."""
    more = (
        "as if all columns were buckets; own columns of the active party lose nothing, and columns of which equal "
        "widths put nearly all rows into one bucket lose nearly all"
    )
    expected = _expected(BUCKETS, buckets_over_signal(kept))
    return expected if expected.typical is None else replace(expected, text=f"{expected.text}; {more}")


def noise_over_signal(plan: PrivateTreesPlan, rows: int, base_rate: float | None) -> float:
    """Return x of trees on noised sums; without a base rate the classes count as equally frequent."""
    b = 0.5 if base_rate is None else base_rate
    noise = plan.leaf_noise[0] / math.sqrt(plan.method.n_trees)
    return math.ldexp(noise, plan.method.depth) / (rows * math.sqrt(b * (1 - b)))


def buckets_over_signal(kept: float) -> float:
    """Return x of randomised buckets."""
    return 1 / kept - 1


def lost(a: float, power: float, x: float) -> float:
    """Return the share that is lost."""
    odds: float = a * x**power
    return odds / (1 + odds)


def _fit_of(method: Method) -> Fit:
    return OURS if method.candidates.is_paid and method.noise_ridge > 0 else PUBLISHED


def _expected(fit: Fit, x: float) -> ExpectedLoss:
    least, most = fit.fitted
    if x > most:
        return ExpectedLoss("not estimated: so much noise beside the rows was in none of the trainings measured")
    x = max(x, least)
    typical, seldom = (lost(a, fit.power, x) for a in (fit.typical, fit.seldom))
    return ExpectedLoss(
        f"about {100 * typical:.2g} % of what XGBoost's AUC without privacy has above 0.5 is expected to be lost, and "
        f"seldom more than {100 * seldom:.2g} %. Tables differ more than this tells them apart: on those it was not "
        f"fitted to the first number was off by {100 * fit.error:.0f} points of a hundred on average, and "
        f"{100 * fit.within:.0f} % of trainings lost no more than the second",
        typical,
        seldom,
    )


# Help for whoever chooses epsilon: what it means for one person, how loud the noise is, how long a budget lasts.
#
# Everything here follows from the job and from numbers that are public, or that the site itself asks about its own
# ledger; no row is touched and nothing is charged.


TOOK_PART = "whether this person took part"
BETWEEN_ROWS = "between two rows that this person may have"
_LARGE_EPSILON = 8
_ACCUSED = 0.01
_MOST_DIGITS = {True: 4, False: 3}
"""Significant digits of a bound that looks like public knowledge: of a whole number (a year has four), of another."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Person:
    """What a cost means for one person.

    Attributes:
        right: share of guesses that are right at most, where both answers are equally likely beforehand.
        found: share of those who took part who are named at most, where 1 % of those who did not are named too.
    """

    right: float
    found: float

    @classmethod
    def of(cls, trade_off: TradeOff) -> Person:
        """Return both bounds."""
        return cls(trade_off.guessed_right(), trade_off.true_positive_rate(_ACCUSED))

    def lines(self, guessed: str = TOOK_PART) -> list[str]:
        """Say it, whatever else is known of the rows."""
        right = 100 * self.right
        odds = self.right / (1 - self.right) if self.right < 1 else math.inf
        of_odds = f": odds of {human_number(odds)} to 1, where nothing known is even" if odds < math.inf else ""
        first = f"whoever sees all of it and guesses {guessed} is right in {right:.4g} % of cases at most{of_odds}"
        if guessed != TOOK_PART:
            return [first]
        return [
            first,
            f"naming {100 * _ACCUSED:g} in a hundred wrongly, he names {100 * self.found:.3g} in a hundred rightly at "
            "most",
        ]


@dataclass(frozen=True, slots=True)
class Trainings:
    """How many such jobs a budget bears. Attributes: left: more, beside what is spent or promised; whole: if none was.

    ``whole`` is None where no ledger was looked at.
    """

    left: int
    whole: int | None = None

    def line(self) -> str:
        """Say it."""
        of = "" if self.whole is None else f" (a whole budget bears {counted(self.whole, 'such training')})"
        return f"{counted(self.left, 'such training')} {'is' if self.left == 1 else 'are'} in it{of}"


@dataclass(frozen=True, slots=True)
class NoiseToSignal:
    """Noise beside what it covers, from public numbers. Attributes: ratios: by what they are of; text: in words."""

    ratios: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What ``veilboost plan`` says beside the price of a private job. Attributes: guessed: what is guessed at."""

    person: Person
    noise: NoiseToSignal
    expected: ExpectedLoss
    trainings: Trainings | None
    warnings: Sequence[str]
    guessed: str = TOOK_PART

    def figures(self) -> dict[str, Any]:
        """Return it as JSON values."""
        left = None if self.trainings is None else {"left": self.trainings.left, "whole": self.trainings.whole}
        return {
            "guessed_right_at_most": self.person.right,
            "found_at_1_percent_false_alarms_at_most": self.person.found,
            "noise_to_signal": dict(self.noise.ratios),
            "expected_loss": {"typical": self.expected.typical, "seldom_more_than": self.expected.seldom},
            "trainings": left,
            "warnings": list(self.warnings),
        }

    def shown(self) -> dict[str, str | Sequence[str]]:
        """Return it as names with texts."""
        shown: dict[str, str | Sequence[str]] = {
            "one person": self.person.lines(self.guessed),
            "noise to signal": self.noise.text,
            "expected loss": self.expected.text,
        }
        if self.trainings is not None:
            shown["budget"] = self.trainings.line()
        if self.warnings:
            shown["WARNING"] = [*self.warnings]
        return shown


def trainings(arguments: Options, data_set: str, cost_of_rows: Callable[[int], PrivacyCost]) -> Trainings | None:
    """Return how many such jobs a budget bears; None if none was named.

    Args:
        cost_of_rows: rows of a person, as the budget counts them -> what one job then costs.

    Raises:
        ConfigurationError: the site or its ledger cannot be read, or the data set has no budget.
    """
    if arguments.budget is not None:
        values = dict(arguments.budget)
        values.pop("own_persons", None)
        rows = int(values.pop("rows_per_person", 1))
        try:
            limit = Budget(**values).limit
        except ValueError as error:
            raise ConfigurationError(f"--budget: {error}") from None
        return Trainings(_times(limit, PrivacyCost(), cost_of_rows(rows)))
    if (arguments.workspace is None) != (arguments.site is None):
        raise ConfigurationError("give both --workspace DIR and --site NAME to have the site's budget looked at")
    if arguments.workspace is None:
        return None
    policy = own_policy(arguments)
    stated = policy.data_set(data_set).privacy
    if stated is None:
        raise ConfigurationError(
            f"{policy.site} gives data set {data_set!r} no privacy budget, so that it refuses every private job on it. "
            f"Policy key: data_sets.{data_set}.privacy"
        )
    limit = Budget(stated.epsilon, stated.delta, stated.pure_epsilon or 0.0).limit
    held, rows = PrivacyCost(), stated.rows_per_person
    for path in ledger_files(policy.ledgers):
        if path.stem == data_set:
            try:
                history = Ledger(path, policy.ledger_heads).history()
            except PrivacyError as error:
                raise ConfigurationError(str(error)) from None
            held, rows = history.held, max(rows, history.identity.rows_per_person)
    cost = cost_of_rows(rows)
    return Trainings(_times(limit, held, cost), _times(limit, PrivacyCost(), cost))


def _times(limit: PrivacyCost, held: PrivacyCost, cost: PrivacyCost) -> int:
    """Return how often a cost fits beside what is held, part by part."""
    often = [
        max(0, math.floor((most - spent) / part))
        for most, spent, part in zip(limit.parts(), held.parts(), cost.parts(), strict=True)
        if part > 0
    ]
    return min(often, default=0)


def warnings(
    epsilon: float, delta: float, rows: int | None, bounds: Mapping[str, Sequence[float]] | None = None
) -> list[str]:
    """Return what a person should look at again before such a job is submitted.

    Args:
        epsilon: of what is protected together: a person, or a row of buckets.
        rows: of all sites together, if that number is public.
        bounds: of features, which must come from public knowledge.
    """
    found = []
    if epsilon > _LARGE_EPSILON:
        found.append(
            f"epsilon {epsilon:g} is above {_LARGE_EPSILON}: what is released may move the odds on a person by a "
            f"factor of {human_number(math.exp(epsilon))}, which promises hardly anything"
        )
    if rows is not None and delta > 0 and delta * rows >= 1:
        found.append(
            f"delta {delta:g} is not below 1/{rows:,} rows: publishing one whole row drawn at random would keep it. "
            f"Ask for {0.01 / rows:.1g} or less"
        )
    odd = [name for name, pair in (bounds or {}).items() if any(map(_looks_measured, pair))]
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        names = ", ".join(repr(printable(name)) for name in odd[:_SHOWN])
        found.append(
            f"bounds of {names}{more} have so many digits that they look taken from the data: the least and the "
            "largest value of a column are those of real rows, and no epsilon covers them. Take round numbers from "
            "public knowledge"
        )
    return found


def _looks_measured(value: float) -> bool:
    """Tell whether a bound has more digits than people give to one; 99999 and the like are round numbers but one."""
    is_whole = float(value).is_integer()
    return all(_significant(value + step) > _MOST_DIGITS[is_whole] for step in ((-1, 0, 1) if is_whole else (0,)))


def _significant(value: float) -> int:
    """Return how many digits a number has between its leading and its trailing zeros."""
    digits = f"{abs(value):.17g}" if float(value).is_integer() else repr(abs(float(value)))
    return len(digits.partition("e")[0].replace(".", "").strip("0"))


_SUM_BYTES = 8
_WIDTH = 17


def plan_private_trees(arguments: Options, job: PrivateTreesJob) -> str:
    """Return the plan of private trees. Raises: ConfigurationError: its noise needs other sites than these."""
    plan = JobPlan.of(job, arguments.sites)
    summary, method = summarise(plan), plan.training.method
    of_row = compose(plan.releases.events)
    epsilon = summary.epsilon_after_rounds[-1]
    rows = job.n_rows if arguments.rows is None else arguments.rows
    of_label = {} if job.label_bounds is None else {job.label: job.label_bounds}
    bounds = {**job.feature_bounds, **of_label}
    advice = Advice(
        Person.of(TradeOff.of(of_row.for_person(job.rows_per_person))),
        _of_mean_leaf(rows, method.depth, summary.rows_to_hear),
        of_private_trees(plan.training, rows, arguments.base_rate),
        trainings(arguments, job.data_set, of_row.for_person),
        warnings(epsilon, job.delta, rows, bounds),
    )
    if arguments.json:
        return json.dumps({**dataclasses.asdict(summary), **advice.figures()}, indent=2)
    return "\n".join([*lines(summary), shown_lines(advice.shown())])


def plan_dpboost(arguments: Options, job: DpBoostJob) -> str:
    """Return the plan of a DPBoost job."""
    plan = job.plan()
    n_bins = SplitTable.of(job.candidates()).n_bins
    exchanges = [int(np.prod(step.shape(n_bins))) for step in steps(job)]
    noise = [_leaf_noise(job, tree) for tree in (0, plan.ensemble_size(0) - 1)]
    bounds = {**job.feature_bounds, **({} if job.label_bounds is None else {job.label: job.label_bounds})}
    figures = {
        "epsilon": job.epsilon,
        "delta": 0.0,
        "rows_per_person": job.rows_per_person,
        "n_trees": plan.n_trees,
        "n_ensembles": plan.n_ensembles,
        "epsilon_of_a_level": plan.split_epsilon,
        "epsilon_of_leaves": plan.leaf_epsilon,
        "noise_on_first_and_last_leaf": noise,
        "n_messages": len(exchanges),
        "n_bytes": sum(exchanges) * _SUM_BYTES,
    }
    advice = Advice(
        Person.of(TradeOff.of(PrivacyCost(pure_epsilon=job.epsilon))),
        _of_largest_weight(job),
        ExpectedLoss(DPBOOST if job.label_bounds is None else NOT_TWO_CLASSES),
        trainings(
            arguments,
            job.data_set,
            lambda rows: PrivacyCost(pure_epsilon=job.epsilon / job.rows_per_person).for_person(rows),
        ),
        warnings(job.epsilon, 0.0, arguments.rows, bounds),
    )
    if arguments.json:
        return json.dumps({**figures, **advice.figures()}, indent=2)
    return shown_lines(
        {
            "method": f"{job.variant}: {plan.n_trees} trees in {plan.n_ensembles} ensemble(s)",
            "privacy": f"pure epsilon {job.epsilon:g}; {plan.split_epsilon:.3g} for a level's splits, "
            f"{plan.leaf_epsilon:.3g} for a tree's leaves",
            "noise on a leaf": f"Laplace scale {human_number(noise[0])} on weights of the first tree of an ensemble, "
            f"{human_number(noise[1])} on its last, of gradients in [-1, 1]",
            "sums": f"{len(exchanges)} messages, {human_bytes(sum(exchanges) * _SUM_BYTES)} from each site",
            **advice.shown(),
        }
    )


def _leaf_noise(job: DpBoostJob, tree: int) -> float:
    settings = job.plan().tree_settings(0, tree)
    bound = leaf_sensitivity(gradient_sensitivity(), settings.ridge, settings.leaf_bound).bound
    return math.ldexp(bound, -LEAF_BITS) / settings.leaf_epsilon


def _of_largest_weight(job: DpBoostJob) -> NoiseToSignal:
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
    return NoiseToSignal({"first_tree": ratios[0], "last_tree": ratios[1]}, text)


def _of_mean_leaf(rows: int | None, depth: int, rows_to_hear: float) -> NoiseToSignal:
    """Return the noise on G over the largest G of a mean leaf, in which all of its rows agree."""
    if rows is None:
        return NoiseToSignal({}, "give --rows, where the number of all sites' rows is public, to have it told")
    of_leaf = rows / 2**depth
    ratio = rows_to_hear / of_leaf
    text = (
        f"a mean leaf has {human_number(of_leaf, 4)} of {rows:,} rows: its noise is {human_number(ratio, 2)} times its "
        f"largest possible sum, and {human_number(10 * ratio, 2)} times that of rows of which 55 in a hundred agree; "
        "the trees together average it"
    )
    return NoiseToSignal({"largest_sum_of_mean_leaf": ratio}, text)


def plan_buckets(arguments: Options, job: BucketJob) -> str:
    """Return what one passive party of a FederBoost job spends and sends; --features counts its columns.

    Raises:
        ConfigurationError: no number of features, or too many for epsilon.
    """
    if job.buckets_from is not None:
        paid = f"job {job.buckets_from} has paid for the buckets: this one sends none and is charged nothing"
        nothing = {"epsilon": 0.0, "bytes_sent": 0}
        return json.dumps(nothing, indent=2) if arguments.json else shown_lines({"privacy": paid})
    if arguments.features is None or arguments.features < 1:
        raise ConfigurationError("give --features, the columns of a passive party: its noise depends on their number")
    per_value = bucket_epsilon(job, arguments.features)
    of_row = job.epsilon if job.protected is Unit.ROW else job.epsilon * arguments.features
    wrong = wrong_bucket_rate(job.n_buckets, per_value)
    sent = None if arguments.rows is None else arguments.rows * arguments.features
    kept = (1 - wrong * job.n_buckets / (job.n_buckets - 1)) ** 2 if job.n_buckets > 1 else 1.0
    advice = Advice(
        Person.of(TradeOff.of(PrivacyCost(pure_epsilon=of_row))),
        NoiseToSignal(
            {"rows_that_count": kept},
            f"counts over randomised buckets tell as much as {100 * kept:.3g} % of the rows sent in clear",
        ),
        of_buckets(kept),
        trainings(arguments, job.data_set, lambda rows: PrivacyCost(pure_epsilon=job.epsilon).for_person(rows)),
        warnings(of_row, 0.0, arguments.rows, _described_bounds(arguments, job)),
        BETWEEN_ROWS,
    )
    if arguments.json:
        figures = {
            "epsilon": job.epsilon,
            "unit": job.unit,
            "epsilon_of_a_value": per_value,
            "epsilon_of_a_row": of_row,
        }
        figures |= {"wrong_bucket_rate": wrong}
        return json.dumps({**figures, "bytes_sent": sent, **advice.figures()}, indent=2)
    shown = {
        "privacy": f"epsilon {job.epsilon:g} for a {job.unit}: {per_value:.3g} for each value, {of_row:.3g} for a row "
        f"of {arguments.features} features",
        "noise": f"{100 * wrong:.1f} % of the values are sent in a wrong one of {job.n_buckets} buckets",
    }
    if sent is not None:
        shown["sent once"] = f"{human_bytes(sent)} by a passive party with {arguments.rows:,} rows"
    return shown_lines({**shown, **advice.shown()})


def _described_bounds(arguments: Options, job: BucketJob) -> dict[str, tuple[float, float]]:
    """Return the bounds in a passive party's own description, which is looked at where its workspace is named."""
    if arguments.workspace is None or arguments.site is None:
        return {}
    policy = own_policy(arguments)
    described = Description.read(policy.input_file(job.description))
    pairs = zip(described.names, described.features, strict=True)
    return {name: (of.low, of.high) for name, of in pairs if isinstance(of, FeatureBounds)}


def shown_lines(shown: Mapping[str, str | Sequence[str]]) -> str:
    """Return names with their texts; one of several lines has its name at the first."""
    lines = []
    for name, texts in shown.items():
        for number, text in enumerate([texts] if isinstance(texts, str) else texts):
            lines.append(f"{'' if number else name:<{_WIDTH}}{text}")
    return "\n".join(lines)
