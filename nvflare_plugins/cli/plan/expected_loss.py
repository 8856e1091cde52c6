"""How much of a model's score the noise is expected to take, from public numbers alone, and how far off that is.

Of the way from guessing (AUC 1/2) to XGBoost's AUC without privacy a private model of two classes loses the share

    o / (1 + o),    o = a x^p,

with x the noise over the signal, and a and p as the development tables of ``tests/bench/bench_plan_loss.py`` give them.

Trees on noised sums: G of a mean leaf sums n / 2^d gradients, whose standard deviation before the first tree is
sqrt(b (1 - b)), with b the share of one class; what a leaf can add to a score is in proportion to it. Its noise has
standard deviation s. Scores add up T trees, whose noises are independent and each grow with sqrt(T) as the budget is
divided, so that s / sqrt(T) is what is left of the number of trees. x = (s / sqrt(T)) 2^d / (n sqrt(b (1 - b))).

Randomised buckets: counts over them tell as much as the share k of the rows would in clear; x = 1 / k - 1.

A table's own difficulty is in no public number, and it moves the loss more than anything that is: that is the error
stated here, measured on tables to which nothing was fitted. ``seldom`` is the a below which nine of ten development
trainings lay. Where the formula was off by more than a fifth on average, no number is given, and what the tables lost
is said instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dp_components.leaf_weights.target import TWO_CLASSES
from nvflare_plugins.private_trees.methods import Method, SplitMethod
from nvflare_plugins.private_trees.training import PrivateTreesPlan

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
