"""The attacks on one job's model, run by a site on its own rows: membership, a missing value, and their statistics."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from dp_components.accounting import TradeOff
from dp_components.ledger import LedgerHistory
from nvflare_plugins.data.table import Table
from nvflare_plugins.dossier.parts import OWN_PARTS
from nvflare_plugins.evidence.reader import Log
from nvflare_plugins.evidence.threat_model import is_horizontal
from nvflare_plugins.pages.charts import page
from nvflare_plugins.pages.run_record import EVALUATION, TRAINING, RunRecord
from nvflare_plugins.scoring.comparison import scores_of
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.rows import load_again
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.profiles import Family, profiles_of
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.objectives import is_ranking

# How well scores tell two groups apart, with intervals: area under the ROC curve, and hits at few false alarms.


Scores = NDArray[np.float64]

FALSE_POSITIVE_RATE = 0.01
_RESAMPLINGS = 200
_Z = 1.959964  # of 95 %


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def to_list(self) -> list[float]:
        """Return value, low and high to three decimals: more would tell of single rows and nothing of the attack."""
        return [round(number, 3) for number in (self.value, self.low, self.high)]


def area_under_curve(members: Scores, others: Scores) -> Estimate:
    """Return the AUC with DeLong's interval.

    Shapes: members: float64[m]; others: float64[n]; higher means "member".

    Reference: DeLong, DeLong and Clarke-Pearson (1988); by ranks after Sun and Xu (2014).
    """
    m, n = members.size, others.size
    of_all = rankdata(np.concatenate([members, others]))
    above = (of_all[:m] - rankdata(members)) / n  # of each member: the share of others below it
    below = 1 - (of_all[m:] - rankdata(others)) / m
    area = float(above.mean())
    spread = math.sqrt(float(above.var(ddof=1)) / m + float(below.var(ddof=1)) / n)
    return Estimate(area, max(0.0, area - _Z * spread), min(1.0, area + _Z * spread))


def hits(members: Scores, others: Scores, rate: float = FALSE_POSITIVE_RATE) -> float:
    """Return the share of members above the score that a share ``rate`` of the others exceeds; ties by a coin."""
    place = others.size - 1 - min(int(rate * others.size), others.size - 1)
    limit = np.partition(others, place)[place]
    false, tied = float((others > limit).mean()), float((others == limit).mean())
    return float((members > limit).mean() + (rate - false) / tied * (members == limit).mean())


def hits_with_interval(members: Scores, others: Scores, rate: float = FALSE_POSITIVE_RATE) -> Estimate:
    """Return ``hits`` with the interval of 95 % of resamplings of both groups."""
    random = np.random.default_rng(0)  # the same dossier twice says the same
    drawn = [
        hits(random.choice(members, members.size), random.choice(others, others.size), rate)
        for _ in range(_RESAMPLINGS)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(hits(members, others, rate), float(low), float(high))


def share(n_hits: int, n: int) -> Estimate:
    """Return a share with Wilson's interval."""
    found, z = n_hits / n, _Z**2 / n
    middle, half = (found + z / 2) / (1 + z), _Z * math.sqrt(found * (1 - found) / n + z / (4 * n)) / (1 + z)
    return Estimate(found, max(0.0, middle - half), min(1.0, middle + half))


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Return one share minus another with Newcombe's interval."""
    change = one.value - other.value
    low = change - math.hypot(one.value - one.low, other.high - other.value)
    high = change + math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(change, max(-1.0, low), min(1.0, high))


# Membership inference: can somebody who has the model tell rows that it was trained on from others?
#
# Two attacks by somebody who knows the rows, labels included, and has the model:
#
# * ``loss``: what the model fits well was trained on. Yeom et al., Privacy Risk in Machine Learning (2018), section
# 3.2. * ``reference``: the offline likelihood-ratio attack. Carlini et al., Membership Inference Attacks From First
# Principles (2022), section VI C: reference models are trained on random halves of all rows at hand; a row is a member
# if the model is surer of its label than those that had not seen it, in units of their spread. A single spread serves
# all rows, which the paper recommends for few reference models.
#
# Privacy: what leaves this module are figures over all rows; no score, row or position of one.


N_REFERENCES = 16
_LEAST_PROBABILITY = 1e-6
_FEW_VALUES = 1_000_000

Features = NDArray[np.float32]
Labels = NDArray[np.float32]
Sureness = Callable[[Features, Labels], Scores]
"""(rows, their labels) -> how well a model fits each: higher is better."""


@dataclass(frozen=True, slots=True)
class Attacked:
    """How well one attack told members from others. Attributes: hits: share found at 1 % false alarms."""

    name: str
    area: Estimate
    hits: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows that a model was trained on, and others of the same kind.

    Shapes: members: float32[m, n_features]; of_members: float32[m], their labels; others, of_others: as these, for n.
    """

    members: Features
    of_members: Labels
    others: Features
    of_others: Labels
    feature_types: tuple[str, ...]

    @property
    def rows(self) -> Features:
        """All rows, members first."""
        return np.concatenate([self.members, self.others])

    @property
    def labels(self) -> Labels:
        """Their labels."""
        return np.concatenate([self.of_members, self.of_others])


def sureness_of_classes(probabilities: NDArray[np.floating[Any]], labels: Labels) -> Scores:
    """Return log(p / (1 - p)) of each row's own class, as Carlini et al. scale it.

    Shapes: probabilities: floating[n, n_classes]; labels: float32[n], positions of classes.
    """
    own = probabilities[np.arange(labels.size), labels.astype(np.int64)].astype(np.float64)
    own = np.clip(own, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    return np.log(own) - np.log1p(-own)


def sureness_of_numbers(predictions: NDArray[np.floating[Any]], labels: Labels) -> Scores:
    """Return minus the absolute error of a regression. Shapes: both floating[n]."""
    return -np.abs(predictions.astype(np.float64) - labels)


def attack(groups: Groups, target: Sureness, references: Scores) -> list[Attacked]:
    """Run both attacks.

    Args:
        references: float64[2, n_rows]: mean and spread of the references that had not seen a row, members first.
    """
    seen = target(groups.rows, groups.labels)
    mean, spread = references
    return [_told_apart("loss", seen, groups), _told_apart("reference", (seen - mean) / spread, groups)]


def difference_by_themselves(groups: Groups, references: Scores) -> Attacked:
    """Tell whether the two groups differ without any model that had them: only then is a figure about membership."""
    return _told_apart("none", references[0], groups)


def _told_apart(name: str, scores: Scores, groups: Groups) -> Attacked:
    members, others = np.split(scores, [groups.of_members.size])
    return Attacked(name, area_under_curve(members, others), hits_with_interval(members, others))


def train_references(groups: Groups, params: Mapping[str, Any], n_rounds: int) -> Scores:
    """Train reference models on random halves of the rows; return what ``attack`` needs of them."""
    rows, labels = groups.rows, groups.labels
    random = np.random.default_rng(0)  # of no secret: which halves decides no row's figure that is shown
    seen = np.full((N_REFERENCES, labels.size), np.nan)
    for number in range(0, N_REFERENCES, 2):  # a half and the other half: each row is out of eight references
        half = random.permutation(labels.size) < labels.size // 2
        for inside in (half, ~half):
            sureness = train(rows[inside], labels[inside], groups.feature_types, params, n_rounds)
            seen[number, ~inside] = sureness(rows[~inside], labels[~inside])
            number += 1
    mean = np.nanmean(seen, axis=0)
    spread = float(np.sqrt(np.nanmean((seen - mean) ** 2))) or 1.0
    return np.stack([mean, np.full(labels.size, spread)])


def train(rows: Features, labels: Labels, types: tuple[str, ...], params: Mapping[str, Any], n_rounds: int) -> Sureness:
    """Train stock XGBoost; return how sure it is of rows. Raises: xgboost.core.XGBoostError."""
    settings = {**params, "verbosity": 0, "nthread": 1 if rows.size < _FEW_VALUES else 2}
    booster = xgb.train(settings, _matrix(rows, types, labels), n_rounds, verbose_eval=False)
    objective = str(params["objective"])

    def sureness(asked: Features, of_asked: Labels) -> Scores:
        found = booster.predict(_matrix(asked, types))
        if objective == "multi:softprob":
            return sureness_of_classes(found, of_asked)
        if objective == "binary:logistic":
            return sureness_of_classes(np.column_stack([1 - found, found]), of_asked)
        return sureness_of_numbers(found, of_asked)

    return sureness


def _matrix(rows: Features, types: tuple[str, ...], labels: Labels | None = None) -> xgb.DMatrix:
    return xgb.DMatrix(rows, label=labels, feature_types=list(types), enable_categorical=True)


# Attribute inference: can somebody who has the model, and all of a row but one value, tell that value?
#
# The attack of Fredrikson et al., Privacy in Pharmacogenetics (2014), figure 2: each possible value is put in, and the
# one is guessed under which the row's label is likeliest, weighed by how common the value is among others. What is
# likely of anybody, in the data or not, is no breach: the attack is made on rows of the training and on others, and the
# difference is what the model gave away of its own rows (Yeom et al. 2018, section 4.1).
#
# Privacy: as ``membership``: figures over all rows alone.


MAX_FEATURES = 5
_BINS = 8
_MAX_VALUES = 32
_LEAST_ROWS = 50
_CATEGORICAL = "c"

LogLikelihood = Callable[[Features, Labels], Scores]
"""(rows, their labels) -> log of how likely each label is under the model, up to a constant of all rows."""


@dataclass(frozen=True, slots=True)
class Reconstructed:
    """How well one value was guessed.

    Attributes:
        feature: the column that was hidden.
        n_values: what was guessed among: categories, or bins of equally many rows.
        members, others: share guessed right of rows of the training, and of others.
        common: share of the members that is guessed right without a model, by the commonest value of the others.
        gain: members minus others.
    """

    feature: str
    n_values: int
    members: Estimate
    others: Estimate
    common: float
    gain: Estimate


def reconstruct(groups: Groups, place: int, name: str, log_likelihood: LogLikelihood) -> Reconstructed | None:
    """Hide one column and guess it; None if it has one value only or too few rows have any."""
    hidden = [group[:, place] for group in (groups.members, groups.others)]
    known = [~np.isnan(values) for values in hidden]
    if min(int(one.sum()) for one in known) < _LEAST_ROWS:
        return None
    of_others = hidden[1][known[1]]
    edges, values = _reconstruction_values(of_others, is_categorical=groups.feature_types[place] == _CATEGORICAL)
    if values.size < 2:
        return None
    truth = [np.searchsorted(edges, values_[one], side="right") for values_, one in zip(hidden, known, strict=True)]
    common = np.bincount(truth[1], minlength=values.size) + 0.5
    prior = np.log(common / common.sum())
    found = []
    for rows, labels, one, right in (
        (groups.members, groups.of_members, known[0], truth[0]),
        (groups.others, groups.of_others, known[1], truth[1]),
    ):
        guesses = _guess(rows[one], labels[one], place, values, prior, log_likelihood)
        found.append(share(int((guesses == right).sum()), right.size))
    blind = float((truth[0] == int(prior.argmax())).mean())
    return Reconstructed(name, values.size, found[0], found[1], blind, difference(found[0], found[1]))


def _reconstruction_values(of_others: NDArray[np.float32], *, is_categorical: bool) -> tuple[Features, Features]:
    """Return the edges between what is told apart (float32[k - 1]) and what is put in for each (float32[k])."""
    distinct = np.unique(of_others)
    if is_categorical or distinct.size <= _BINS:
        return distinct[1:_MAX_VALUES].astype(np.float32), distinct[:_MAX_VALUES]
    edges = np.unique(np.quantile(of_others, np.linspace(0, 1, _BINS + 1)[1:-1]).astype(np.float32))
    edges = edges[edges > distinct[0]]
    places = np.searchsorted(edges, of_others, side="right")
    values = np.asarray([np.median(of_others[places == k]) for k in range(edges.size + 1)], np.float32)
    return edges, values


def _guess(
    rows: Features, labels: Labels, place: int, values: Features, prior: Scores, log_likelihood: LogLikelihood
) -> NDArray[np.int64]:
    scores = np.empty((values.size, labels.size))
    tried = rows.copy()
    for k, value in enumerate(values):
        tried[:, place] = value
        scores[k] = prior[k] + log_likelihood(tried, labels)
    result: NDArray[np.int64] = scores.argmax(axis=0)
    return result


# The attacks on one job's model, run by a site on its own rows: which, on what, with which outcome, or why not.
#
# Privacy: figures over all rows; see SECURITY.md for what they tell.


LEAST_ROWS = 100
_MOST_ROWS = 10_000  # of each group
_MOST_GUESSED = 2_000
_MOST_ROUNDS = 100
_PLAIN = {"max_depth": 4, "eta": 0.3}
_UNPROTECTED: dict[str, Any] = {"max_depth": 8, "eta": 0.3}
_UNPROTECTED_ROUNDS = 100
_NOT_OURS = ("objective", "eval_metric", "nthread", "device", "verbosity", "disable_default_eval_metric", "seed")
_ALIKE_SHARE = 0.02
_OF_A_PART = (
    "this party has its own part of a vertical model, which cannot score a row by itself. That a row is in the "
    "training is known to every party by the alignment; what sums told of bins stands in report.html"
)
_NAMES = {
    "loss": ("By loss", "rows that the model fits well (Yeom et al. 2018)"),
    "reference": ("By reference models", "rows that it fits better than 16 models without them (Carlini et al. 2022)"),
    "none": ("No model", "models that had neither group"),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """What the accounted privacy lets anybody find out at most. Attributes: source: where the accounting stands."""

    area: float
    hits: float
    right: float
    source: str


@dataclass(frozen=True, slots=True)
class AttackReport:
    """What was tried and what came of it.

    Attributes:
        reason: why nothing was tried; "" if something was.
        members, others: data sets, with the rows that were used.
        model: the attacks on the job's model.
        unprotected: the same on a model of this site's rows alone without protection: that the attacks work.
        none: what tells the two groups apart without any model that had them.
        bound: for private jobs.
        values: attempts to tell a hidden value.
        value_bounds: with a bound, the most that the share of the members' values guessed right can be, in order.
        notes: what limits the figures.
    """

    reason: str = ""
    members: str = ""
    others: str = ""
    model: tuple[Attacked, ...] = ()
    unprotected: tuple[Attacked, ...] = ()
    none: Attacked | None = None
    bound: Bound | None = None
    values: tuple[Reconstructed, ...] = ()
    value_bounds: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The outcome in a sentence or two, as text."""
        if self.reason:
            return f"not run: {self.reason}"
        best, control = (max(found, key=lambda one: one.area.value).area for found in (self.model, self.unprotected))
        found = (
            f"Telling rows of the training from others works with an AUC of {best} on this model (0.5 is guessing), "
            f"and with {control} on one that was trained on this site's rows alone and unprotected."
        )
        bound = self.bound
        return found + (f" The accounted privacy allows {bound.area:.3f} at most." if bound is not None else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values, to three decimals."""

        def attacked(one: Attacked) -> dict[str, Any]:
            return {"attack": one.name, "auc": one.area.to_list(), "tpr_at_1_percent_fpr": one.hits.to_list()}

        return {
            "format": "veilboost-attacks-1",
            "intervals": "value, low and high of 95 %",
            "not_run": self.reason or None,
            "members": self.members,
            "others": self.others,
            "model": [attacked(one) for one in self.model],
            "control_unprotected_model": [attacked(one) for one in self.unprotected],
            "control_no_model": None if self.none is None else attacked(self.none),
            "bound": None if self.bound is None else dataclasses.asdict(self.bound),
            "values": [
                {
                    "column": one.feature,
                    "told_apart": one.n_values,
                    "members": one.members.to_list(),
                    "others": one.others.to_list(),
                    "by_commonest_value": round(one.common, 3),
                    "gain": one.gain.to_list(),
                }
                for one in self.values
            ],
            "notes": list(self.notes),
        }


def build_page(report: AttackReport, job_id: str, site: str) -> str:
    """Return ``attacks.html``: what was found, beside what attacks find without protection."""
    return page("attacks.html", report=report, job_id=job_id, site=site, names=_NAMES)


def attack_run(
    folder: Path,
    record: RunRecord,
    policy: SitePolicy | None,
    held_out: str | None,
    allowed: tuple[TradeOff, str] | None,
) -> AttackReport:
    """Attack the model of a run with this site's rows, or say why not.

    Args:
        policy: where the rows lie; None if that is not known.
        held_out: a data set of the policy with rows that the model was not trained on; None is the job's own.
        allowed: what the job's accounting allows, and where that stands.

    Raises:
        VeilBoostError: model or rows cannot be read, or not as in the run.
    """
    facts = next((one for one in record.data if one.use == TRAINING), None)
    if record.profile in profiles_of(Family.VERTICAL) or any((folder / name).is_file() for name in OWN_PARTS):
        return AttackReport(_OF_A_PART)
    if record.model is None or not (folder / record.model).is_file():
        return AttackReport("the job has left no model at this site that scores rows")
    ranks = is_ranking(record.params)
    if ranks or facts is None or not facts.columns:
        of_rows = "the model ranks rows: a score says nothing of a row's label by itself"
        return AttackReport(of_rows if ranks else "the run has no training rows of this site")
    if policy is None:
        return AttackReport("the site's workspace was not named, so that its rows are not known (--workspace DIR)")
    held_out = held_out or next((one.name for one in record.data if one.use == EVALUATION), None)
    if held_out is None:
        return AttackReport(
            "the job had no evaluation set at this site: name rows of the same kind that the model was not trained on, "
            "as a data set of the policy (--held-out NAME)"
        )
    if held_out == facts.name:
        return AttackReport(f"the model was trained on data set {held_out}: name another one (--held-out NAME)")
    training = load_again(policy.data_set(facts.name), facts, record)
    others = load_again(policy.data_set(held_out), facts, record)
    params = record.params if is_horizontal(record.profile) or record.profile in profiles_of(Family.BAGGING) else {}
    model = FinishedModel((folder / record.model).read_bytes(), record.model)
    report = run_attacks(model, params, (facts.name, training), (held_out, others), allowed)
    if training.n_rows == facts.rows or report.reason:
        return report
    changed = (
        f"Data set {facts.name} had {facts.rows:,} rows in the run and has {training.n_rows:,} now: some of those "
        "attacked were not in the training, which makes the attacks look weaker."
    )
    return dataclasses.replace(report, notes=(changed, *report.notes))


def allowed(record: RunRecord, ledgers: list[LedgerHistory], log: Log | None) -> tuple[TradeOff, str] | None:
    """Return what the job's accounting allows anybody to find out, from the ledger or else the evidence."""
    spending = next((job for one in ledgers for job in one.jobs if job.job_id == record.job_id), None)
    if spending is not None and any(spending.spent.parts()):
        return TradeOff.of(spending.spent), "the curve that the site's ledger composes for this job"
    if log is not None and log.spends:
        last = log.spends[-1]
        point = (float(last.epsilon), float(last.delta))
        return TradeOff([point]), f"epsilon {point[0]:g} at delta {point[1]:g}, as the evidence says"
    return None


def run_attacks(
    model: FinishedModel,
    params: Mapping[str, Any],
    training: tuple[str, Table],
    held_out: tuple[str, Table],
    trade_off: tuple[TradeOff, str] | None,
) -> AttackReport:
    """Attack a model with this site's rows.

    Args:
        params: the job's parameters, of which the reference models are trained; empty where they are not XGBoost's.
        training, held_out: names and rows of the two groups.
        trade_off: what the job's accounting allows, and where that stands.
    """
    if model.direction_of_times:
        return AttackReport("the attacks here are on models of classes and of numbers, and this one predicts times")
    groups, notes = _groups(model, training[1], held_out[1])
    least = min(groups.of_members.size, groups.of_others.size)
    if least < LEAST_ROWS:
        return AttackReport(
            f"one of the two groups has {least} usable rows, and a rate of 1 % asks for {LEAST_ROWS} at least"
        )
    settings, n_rounds = _settings(model, params)
    try:
        references = train_references(groups, settings, n_rounds)
        own = (groups.members, groups.of_members, groups.feature_types)
        unprotected = train(*own, {**_UNPROTECTED, **_objective(model)}, _UNPROTECTED_ROUNDS)
    except xgb.core.XGBoostError:
        return AttackReport("XGBoost cannot train reference models on this site's rows alone")
    none = difference_by_themselves(groups, references)
    if not none.area.low <= 0.5 <= none.area.high:
        notes.append(
            "The two groups differ by themselves: models that had neither tell them apart. The figures below are in "
            "part about that and not about membership; rows drawn at random from one file would not have it."
        )
    values = _values(model, groups)
    bound: Bound | None = None
    value_bounds: tuple[float, ...] = ()
    if trade_off is not None:
        limit, source = trade_off
        bound = Bound(limit.area(), limit.true_positive_rate(FALSE_POSITIVE_RATE), limit.guessed_right(), source)
        value_bounds = tuple(limit.true_positive_rate(one.others.value) for one in values)
    return AttackReport(
        "",
        f"{groups.of_members.size:,} rows of data set {training[0]}",
        f"{groups.of_others.size:,} rows of data set {held_out[0]}",
        tuple(attack(groups, _sureness(model), references)),
        tuple(attack(groups, unprotected, references)),
        none,
        bound,
        tuple(values),
        value_bounds,
        tuple(notes),
    )


def _groups(model: FinishedModel, training: Table, held_out: Table) -> tuple[Groups, list[str]]:
    """Return the rows to attack with, at most ``_MOST_ROWS`` of each, and what must be said of them."""
    notes = []
    found: list[tuple[Features, Labels]] = []
    for table in (training, held_out):
        usable = np.isfinite(table.label)
        if model.classes is not None:
            usable &= np.isin(table.label, range(len(model.classes)))
        places = np.flatnonzero(usable)
        if places.size > _MOST_ROWS:
            places = np.sort(np.random.default_rng(0).permutation(places)[:_MOST_ROWS])
            notes.append(f"Of the {table.n_rows:,} rows of a group, {_MOST_ROWS:,} drawn at random were used.")
        found.append((table.features[places], table.label[places]))
    (members, of_members), (others, of_others) = found
    known = {row.tobytes() for row in np.column_stack([members, of_members])}
    alike = sum(row.tobytes() in known for row in np.column_stack([others, of_others]))
    if alike > _ALIKE_SHARE * max(1, of_others.size):
        notes.append(
            f"{alike:,} of the other rows equal a row of the training in every value: no attack can tell those apart."
        )
    return Groups(members, of_members, others, of_others, training.feature_types), notes


def _objective(model: FinishedModel) -> dict[str, Any]:
    if model.classes is None:
        return {"objective": "reg:squarederror"}
    if len(model.classes) == 2:
        return {"objective": "binary:logistic"}
    return {"objective": "multi:softprob", "num_class": len(model.classes)}


def _settings(model: FinishedModel, params: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return parameters and rounds of the reference models: the job's, where it was trained by XGBoost's own."""
    if not params:
        return {**_PLAIN, **_objective(model)}, _MOST_ROUNDS // 2
    kept = {name: value for name, value in params.items() if name not in _NOT_OURS}
    return {**kept, **_objective(model)}, min(model.n_rounds, _MOST_ROUNDS)


def _sureness(model: FinishedModel) -> Sureness:
    def sureness(rows: Features, labels: Labels) -> Scores:
        if model.classes is None:
            return sureness_of_numbers(model.predict(rows), labels)
        if model.has_probabilities:
            return sureness_of_classes(model.probabilities(rows), labels)
        right: Scores = (scores_of(model, rows) == labels).astype(np.float64)
        return right

    return sureness


def _values(model: FinishedModel, groups: Groups) -> list[Reconstructed]:
    """Try to tell the values of the columns that the model splits most often."""
    random = np.random.default_rng(0)
    rows = [random.permutation(n)[:_MOST_GUESSED] for n in (groups.of_members.size, groups.of_others.size)]
    members, others = groups.members[rows[0]], groups.others[rows[1]]
    some = Groups(members, groups.of_members[rows[0]], others, groups.of_others[rows[1]], groups.feature_types)
    likelihood = _log_likelihood(model, some)
    counts = Counter(
        feature
        for tree in model.trees
        for feature, left in zip(tree["split_indices"], tree["left_children"], strict=True)
        if left >= 0
    )
    most_used = sorted(counts, key=lambda place: (-counts[place], place))[:MAX_FEATURES]
    found = (reconstruct(some, place, model.features[place].name, likelihood) for place in most_used)
    return [one for one in found if one is not None]


def _log_likelihood(model: FinishedModel, groups: Groups) -> LogLikelihood:
    if model.classes is None:
        errors = model.predict(groups.others).astype(np.float64) - groups.of_others
        variance = float(np.mean(errors**2)) or 1.0
        return lambda rows, labels: -((model.predict(rows).astype(np.float64) - labels) ** 2) / (2 * variance)
    if not model.has_probabilities:
        return lambda rows, labels: np.where(scores_of(model, rows) == labels, -0.1, -2.5)

    def of_classes(rows: Features, labels: Labels) -> Scores:
        own = model.probabilities(rows)[np.arange(labels.size), labels.astype(np.int64)]
        return np.log(np.clip(own.astype(np.float64), _LEAST_PROBABILITY, 1))

    return of_classes
