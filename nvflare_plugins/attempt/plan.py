"""What a plan of a job is asked and what it answers, whatever the kind: shape, network, seconds, memory, epsilon."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dp_components.accounting import PrivacyCost, TradeOff
from dp_components.errors import PrivacyError
from dp_components.ledger import Budget, Ledger, ledger_files
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import counted, human_number, printable
from nvflare_plugins.site.policy import SitePolicy

_BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True)
class Network:
    """Units: seconds per rendezvous of empty messages; bytes per second of a site's and of the server's link."""

    latency_s: float = 0.010
    site_bytes_per_s: float = 12.5e6
    server_bytes_per_s: float = 12.5e6

    def exchange_s(self, size: int, n_sites: int) -> float:
        """Return the time of one exchange: every site sends ``size`` bytes, then every site receives as many."""
        one_way = max(size / self.site_bytes_per_s, n_sites * size / self.server_bytes_per_s)
        return self.latency_s + 2 * one_way

    @classmethod
    def of(cls, latency_ms: float, bandwidth_mbit: float, server_bandwidth_mbit: float | None = None) -> Network:
        """Return a network in the units of the command line. Raises: ConfigurationError."""
        server = server_bandwidth_mbit or bandwidth_mbit
        if not all(0 < value < math.inf for value in (latency_ms, bandwidth_mbit, server)):
            raise ConfigurationError("latency and bandwidth must be numbers above 0")
        return cls(latency_ms / 1000, bandwidth_mbit * _BYTES_PER_MBIT, server * _BYTES_PER_MBIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked beside its job. What is None was not given.

    Attributes:
        rows: of all sites together.
        features: columns; in vertical training the active party's, in a FederBoost job a passive party's.
        foreign_features: columns of each passive party, in order of their names.
        bins, depth, rounds, outputs, max_leaves, metrics, cuts, key_bits, profile: in place of what the job says.
        missing: every feature has missing values somewhere.
        workers: also with so many workers at each party.
        base_rate: share of one of the two classes.
        budget: a whole budget, of which so many rows belong to a person at most.
        policy: of a site whose budget is to be looked at.
    """

    rows: int | None = None
    features: int | None = None
    foreign_features: tuple[int, ...] | None = None
    sites: int = 3
    bins: int | None = None
    depth: int | None = None
    rounds: int | None = None
    outputs: int | None = None
    max_leaves: int | None = None
    metrics: int | None = None
    cuts: str | None = None
    key_bits: int | None = None
    profile: str | None = None
    missing: bool = False
    workers: int | None = None
    base_rate: float | None = None
    network: Network = Network()
    budget: tuple[Budget, int] | None = None
    policy: SitePolicy | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of some fields that were given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def shape(self) -> tuple[int, int]:
        """Return rows and features. Raises: ConfigurationError: one of them was not given."""
        if self.rows is None or self.features is None:
            raise ConfigurationError("give --rows and --features: they are not in a job")
        return self.rows, self.features


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job takes, shows and spends. Attributes: figures: as JSON values; text: for people."""

    figures: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class Planner:
    """How a kind plans its jobs.

    Attributes:
        plan: makes the plan of a job. Raises: ConfigurationError: what it needs was not given.
        uses: fields of the request that plans of most kinds do not use.
    """

    plan: Callable[[PlanRequest, Any], Plan]
    uses: tuple[str, ...] = ()


def process_memory_bytes() -> int:
    """Return the memory of this process so far: Python with XGBoost and, where used, the lattice library."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(action: Callable[[], Any], repeats: int = 1) -> tuple[Any, float]:
    """Return what an action gives and the CPU seconds of all threads that it takes, the median of repeats."""
    seconds, result = [], None
    for _ in range(repeats):
        started = time.process_time()
        result = action()
        seconds.append(time.process_time() - started)
    return result, statistics.median(seconds)


# Help for whoever chooses epsilon: what it means for one person, how loud the noise is, how long a budget lasts.
#
# Everything here follows from the job and from numbers that are public, or that the site itself asks about its own
# ledger; no row is touched and nothing is charged.

NOT_TWO_CLASSES = "not estimated: trainings of two classes alone were measured, and their AUC"
# How much of a model's score the noise is expected to take, from public numbers alone, and how far off that is.
#
# Of the way from guessing (AUC 1/2) to XGBoost's AUC without privacy a private model of two classes loses the share
#
# o / (1 + o),    o = a x^p,
#
# with x the noise over the signal, and a and p as the development tables of ``tests/bench/bench_plan_loss.py`` give
# them: a is that below which nine of ten development trainings lay.
#
# Trees on noised sums: G of a mean leaf sums n / 2^d gradients, whose standard deviation before the first tree is
# sqrt(b (1 - b)), with b the share of one class; what a leaf can add to a score is in proportion to it. Its noise has
# standard deviation s. Scores add up T trees, whose noises are independent and each grow with sqrt(T) as the budget is
# divided, so that s / sqrt(T) is what is left of the number of trees. x = (s / sqrt(T)) 2^d / (n sqrt(b (1 - b))).
#
# Randomised buckets: counts over them tell as much as the share k of the rows would in clear; x = 1 / k - 1.
#
# A table's own difficulty is in no public number, and it moves the loss more than anything that is. So nothing is said
# of what a training typically loses: at epsilon 1 such a number was off by more than a factor of two on most tables to
# which it was not fitted. Where the bound failed too often, what the tables lost is said instead.


@dataclass(frozen=True, slots=True)
class Fit:
    """One kind of training.

    Attributes:
        seldom, power: a and p.
        fitted: least and largest x of the trainings.
        within: share of trainings on held-out tables that lost no more than that.
    """

    seldom: float
    power: float
    fitted: tuple[float, float]
    within: float


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """What is expected. Attributes: seldom: the share; None where nothing is estimated; text: in words."""

    text: str
    seldom: float | None = None


def lost(a: float, power: float, x: float) -> float:
    """Return the share that is lost."""
    odds: float = a * x**power
    return odds / (1 + odds)


def expected_loss(fit: Fit, x: float) -> ExpectedLoss:
    """Return what is expected where noise is x times the signal."""
    least, most = fit.fitted
    if x > most:
        return ExpectedLoss("not estimated: so much noise beside the rows was in none of the trainings measured")
    seldom = lost(fit.seldom, fit.power, max(x, least))
    return ExpectedLoss(
        f"seldom more than {100 * seldom:.2g} % of what XGBoost's AUC without privacy has above 0.5: "
        f"{100 * fit.within:.0f} % of trainings on tables to which that was not fitted lost no more. Most lose far "
        "less, and how much less depends on the table more than on any public number",
        seldom,
    )


# What epsilon means for one person, and how long a budget lasts.


TOOK_PART = "whether this person took part"
BETWEEN_ROWS = "between two rows that this person may have"
_LARGE_EPSILON = 8
_ACCUSED = 0.01
_MOST_DIGITS = {True: 4, False: 3}
"""Significant digits of a bound that looks like public knowledge: of a whole number (a year has four), of another."""
_SHOWN = 5


Noise = tuple[Mapping[str, float], str]
"""Noise beside what it covers, from public numbers: ratios by what they are of, and the same in words."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What ``veilboost plan`` says beside the price of a private job.

    Attributes:
        figures: as JSON values.
        shown: texts by their names, for ``shown_lines``.
    """

    figures: dict[str, Any]
    shown: dict[str, str | Sequence[str]]


def advise(
    request: PlanRequest,
    data_set: str,
    cost: PrivacyCost,
    cost_of_rows: Callable[[int], PrivacyCost],
    *,
    noise: Noise,
    expected: ExpectedLoss,
    warned: Sequence[str],
    guessed: str = TOOK_PART,
) -> Advice:
    """Return what a cost means for one person, how loud the noise is, and how often a budget bears it.

    Two bounds on a person: the share of guesses that are right at most, where both answers are equally likely
    beforehand; and of those who took part how many are named at most, where 1 % of those who did not are named too.

    Args:
        cost: of one person.
        cost_of_rows: rows of a person, as the budget counts them -> what one job then costs.
        guessed: what is guessed of a person.

    Raises:
        ConfigurationError: the site's ledger cannot be read, or the data set has no budget.
    """
    trade_off = TradeOff.of(cost)
    right, found = trade_off.guessed_right(), trade_off.true_positive_rate(_ACCUSED)
    odds = right / (1 - right) if right < 1 else math.inf
    of_odds = f": odds of {human_number(odds)} to 1, where nothing known is even" if odds < math.inf else ""
    person = [f"whoever sees all of it and guesses {guessed} is right in {100 * right:.4g} % of cases at most{of_odds}"]
    if guessed == TOOK_PART:
        person.append(
            f"naming {100 * _ACCUSED:g} in a hundred wrongly, he names {100 * found:.3g} in a hundred rightly at most"
        )
    shown: dict[str, str | Sequence[str]] = {
        "one person": person,
        "noise to signal": noise[1],
        "expected loss": expected.text,
    }
    trainings = _trainings(request, data_set, cost_of_rows)
    if trainings is not None:
        left, whole = trainings["left"] or 0, trainings["whole"]
        of = "" if whole is None else f" (a whole budget bears {counted(whole, 'such training')})"
        shown["budget"] = f"{counted(left, 'such training')} {'is' if left == 1 else 'are'} in it{of}"
        if trainings.pop("lacks_pure_part"):
            shown["budget"] = "no such training is in it: it keeps nothing for pure mechanisms. State pure_epsilon"
    if warned:
        shown["WARNING"] = [*warned]
    figures = {
        "guessed_right_at_most": right,
        "found_at_1_percent_false_alarms_at_most": found,
        "noise_to_signal": dict(noise[0]),
        "expected_loss": {"seldom_more_than": expected.seldom},
        "trainings": trainings,
        "warnings": [*warned],
    }
    return Advice(figures, shown)


def _trainings(
    request: PlanRequest, data_set: str, cost_of_rows: Callable[[int], PrivacyCost]
) -> dict[str, int | None] | None:
    """Return how many such jobs a budget bears, beside what is spent or promised, and how many a whole one did.

    None if no budget was named; the second is None where no ledger was looked at.
    """
    if request.budget is not None:
        budget, rows = request.budget
        cost = cost_of_rows(rows)
        left = _times(budget.limit, PrivacyCost(), cost)
        return {"left": left, "whole": None, "lacks_pure_part": _lacks_pure_part(budget.limit, cost)}
    policy = request.policy
    if policy is None:
        return None
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
    left, whole = _times(limit, held, cost), _times(limit, PrivacyCost(), cost)
    return {"left": left, "whole": whole, "lacks_pure_part": _lacks_pure_part(limit, cost)}


def _lacks_pure_part(limit: PrivacyCost, cost: PrivacyCost) -> bool:
    return cost.pure_epsilon > 0 and limit.pure_epsilon == 0


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


_WIDTH = 17


def shown_lines(shown: Mapping[str, str | Sequence[str]]) -> str:
    """Return names with their texts; one of several lines has its name at the first."""
    lines = []
    for name, texts in shown.items():
        for number, text in enumerate([texts] if isinstance(texts, str) else texts):
            lines.append(f"{'' if number else name:<{_WIDTH}}{text}")
    return "\n".join(lines)
