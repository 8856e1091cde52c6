"""One site's part in a selection: one session and one cut search, then one set of columns after the other.

A set of columns is trained on for each fold, on all other rows, as a trial of a tuning is; what folds show, and what
the caps are for, stands in kinds/tuning/folds.py. All sites know every model, and with it which columns go next.

Information values are counted as in a profile (kinds/profile/site.py), but by fold: a class in a fold is counted like
a class of its own. So a bin holds enough pooled rows of every class in every fold, and no smaller count is opened.

Permutations. Each site deals the values of a column out anew among its own rows, by a secret of its own; no seed is
shared. Sums over such columns tell less of the rows than those over true ones: which values the site has, which the cut
search told, and how gradients fall in groups drawn by chance. A column keeps what the site alone tells: where sites
differ, both in the column and in the label, its copy goes on telling that.

Source: Guyon et al., Gene selection for cancer classification (recursive elimination); Breiman, Random forests
    (permutation); Kursa and Rudnicki, Feature selection with the Boruta package (shadow columns).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.table import Table, column_names
from nvflare_plugins.evidence.audit import grown_fact
from nvflare_plugins.growth.arithmetic import grown_document
from nvflare_plugins.growth.bins import BinLayout, BinnedTable
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.training import GrowthPlan, LoopSettings
from nvflare_plugins.kinds.profile.site import Counted, count, information_values, values_by_chance
from nvflare_plugins.kinds.selection.job import Importance, SelectionJob
from nvflare_plugins.kinds.selection.result import (
    InformationValue,
    OverFolds,
    Selection,
    SelectionResult,
    Step,
    line_of,
)
from nvflare_plugins.kinds.tuning.folds import EVALUATED, FoldRows
from nvflare_plugins.kinds.tuning.job import check_consent
from nvflare_plugins.kinds.tuning.site import Fold, FoldedAttempt, InFolds, check_trial, notes_of
from nvflare_plugins.pages.run_record import DataFacts
from nvflare_plugins.pages.search_pages import SELECTION_PAGE
from nvflare_plugins.pooled import preparation
from nvflare_plugins.pooled.attempt import Agreement
from nvflare_plugins.pooled.growing import GrownTraining, is_grown
from nvflare_plugins.pooled.row_floors import RowNumbers
from nvflare_plugins.wire.envelope import Kind, is_larger_better
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters, with_floor
from nvflare_plugins.xgb.rounds import TrainingResult

TITLE = "Selection of columns"
PURPOSE = "selection"
_NOT_RELEASED = ("deadline_s", "rule")
_NO_CLASSES = (
    "information values are of classes, and some labels are no class (0 and 1, or a list of label_classes). For a "
    "label that is a number set information_value to false"
)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SelectionPrepared:
    """What a site knows before it talks to anyone. ``parameters``: with all columns."""

    rows: InFolds
    parameters: TrainingParameters


def prepare(job: SelectionJob, context: SiteContext) -> SelectionPrepared:
    """Check the job against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job or data are not usable; the message says which.
    """
    policy = context.policy
    data_set = policy.data_set(job.data_set)
    data_set.check_holds_bins("a selection holds those of all folds")
    names = column_names(data_set, job.label, None, job.features, job.group)
    check_consent(policy, job.data_set, job.n_trials(len(names)), job.folds, job.num_rounds)
    if job.information_value:
        policy.check_consent(
            "feature_profile",
            "does not count its rows by features and label for other sites",
            "set information_value to false",
        )
    training = job.training(names)
    parameters = check_trial(preparation.check_public(training, policy, names))
    is_grown(training, parameters)  # refuses what the sites do not grow
    allowed = preparation.allow(training, context, job.group, with_ids=job.group is None, by_xgboost=False)
    rows = InFolds.of(allowed, job.folds, [parameters])
    if job.information_value and not np.isin(rows.base.table.label, np.arange(n_classes_of(job))).all():
        raise DataRefusal(_NO_CLASSES)
    return SelectionPrepared(rows, parameters)


def n_classes_of(job: SelectionJob) -> int:
    """Return the number of classes of which information values are."""
    return len(job.label_classes or (0, 1))


class SelectionAttempt(FoldedAttempt):
    """The steps of one attempt once its session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: SelectionPrepared) -> None:
        self._job: SelectionJob = attempt.job
        self._names = prepared.rows.base.table.feature_names
        super().__init__(attempt, prepared.rows, self._job.training(self._names), is_grown=True)
        self._given = prepared.parameters
        self._n_trained = 0

    def run(self) -> JobResult:
        """Agree, search cut points, count, take columns away, compare, write results."""
        job, agreement = self._job, self.begin()
        self._all_rows = FoldRows(self._rows.table, self._in_folds.folds, agreement.cuts, self._arithmetic)
        self._check_spread(agreement)
        information = self._information(agreement) if job.information_value else {}
        self._orders = RowNumbers(self._registry.secret(PURPOSE), self._rows.table, PURPOSE)
        steps = tuple(self._steps(agreement))
        hits = self._shadows(agreement) if job.shadows else {}
        metric = self._given.metrics[-1]
        result = SelectionResult(metric, steps, information, hits, job.shadows * job.folds)
        return self._finish(agreement.cuts, result)

    # -- what a kind says of itself -----------------------------------------------------------------------------------

    def _documents(self) -> dict[str, object]:
        return grown_document(self._given)

    def _take_terms(self, n_done: int) -> None:
        self._parameters = with_floor(self._given, self._floors.rows_per_node)

    def _release(self) -> dict[str, object]:
        """Return all steps as one release."""
        fields = {name: value for name, value in self._job.to_dict().items() if name not in _NOT_RELEASED}
        return {"kind": "selection", "job": fields, "rows_per_node": self._floors.rows_per_node}

    # -- columns by themselves ----------------------------------------------------------------------------------------

    def _check_spread(self, agreement: Agreement) -> None:
        """Refuse columns all of whose rows are in one bin.

        Privacy: of categories, and of numbers with at most one cut point, all sites learn in which bins there are rows.
            The first tree shows the sums of these.

        Raises:
            ConfigurationError: at all sites alike.
        """
        table, cuts = self._rows.table, agreement.cuts.of_feature
        n_bins = [len(table.categories.get(name, ())) or cuts[at].size + 1 for at, name in enumerate(self._names)]
        asked = [
            place
            for place, name in enumerate(self._names)
            if (name in table.categories or n_bins[place] <= 2) and agreement.rows[1 + place] == agreement.rows[0]
        ]
        if not asked:
            return
        here = [self._all_rows.occupied(place, n_bins[place]) for place in asked]
        anywhere = agreement.sums.any_site(Kind.CELL_FLAGS, np.concatenate(here))
        ends = np.cumsum([len(one) for one in here])[:-1]
        of_each = zip(asked, np.split(anywhere, ends), strict=True)
        same = [self._names[place] for place, bins in of_each if np.count_nonzero(bins) < 2]
        if same:
            raise ConfigurationError(
                f"columns without spread, all of whose rows lie in one bin: {', '.join(map(repr, same))}. "
                "Remedy: leave them out of features"
            )

    def _information(self, agreement: Agreement) -> dict[str, InformationValue]:
        """Count information values by fold. Raises: ConfigurationError: some fold has too few rows of a class."""
        job, table, n = self._job, self._rows.table, n_classes_of(self._job)
        labels = self._in_folds.folds * n + table.label.astype(np.int64)
        counted = count(agreement, table, labels, n, job.min_rows_per_cut, self._world, job.folds)
        if not counted.cells:
            raise ConfigurationError(
                f"some fold has too few rows of a class: no site has {counted.least} of it by itself, and not every "
                f"site its part of {counted.least}. Remedy: fewer folds, or information_value set to false"
            )
        return {name: _information_of(counted, place, n) for place, name in enumerate(self._names)}

    # -- trainings ----------------------------------------------------------------------------------------------------

    def _steps(self, agreement: Agreement) -> Iterator[Step]:
        """Train on ever fewer columns."""
        job, places = self._job, list(range(len(self._names)))
        sizes = job.sizes(len(places))
        for number, size in enumerate(sizes, start=1):
            step = self._step(agreement, places)
            by = step.permutation or step.gain
            n_gone = size - sizes[number] if number < len(sizes) else 0
            gone = sorted(range(size), key=lambda place: (by[place].mean, -place))[:n_gone]
            step = replace(step, dropped=tuple(step.features[place] for place in gone))
            self._attempt.progress.say(line_of(number, len(sizes), self._given.metrics[-1], step))
            yield step
            places = [one for place, one in enumerate(places) if place not in gone]

    def _step(self, agreement: Agreement, places: Sequence[int]) -> Step:
        """Train on some columns, on all folds but one, for each fold."""
        names = tuple(self._names[place] for place in places)
        rows, scores, gains, losses = self._all_rows.with_columns(places), [], [], []
        for number, fold in enumerate(self._of_folds):
            training, result = self._train(agreement, rows, places, names, number)
            scores.append(_score_of(result, number))
            gains.append(gain_shares(result.model, len(names)))
            if self._job.importance == Importance.PERMUTATION.value:
                held = _HeldOut(training.plan, rows.bins_of_fold(number), fold, result.model, names)
                losses.append(self._permuted(training, held, gains[-1], scores[-1]))
        return Step(names, OverFolds(tuple(scores)), _by_column(gains), _by_column(losses))

    def _train(
        self, agreement: Agreement, rows: FoldRows, places: Sequence[int], names: Sequence[str], number: int
    ) -> tuple[GrownTraining, TrainingResult]:
        """Train on all rows but those of a fold. Args: places: of the columns, a shadow's that of its column."""
        fold, table = self._of_folds[number], self._rows.table
        kept = _with_columns(fold.kept, places, names, table)
        given = check_parameters(self._job.params_of(names), list(names), label=self._job.label)
        parameters = with_floor(given, self._floors.rows_per_node)
        self._agree_scales(agreement.sums, parameters, [kept, fold.held_out])
        cuts = Cuts(tuple(agreement.cuts.of_feature[place] for place in places))
        grown = self._grown(parameters, cuts, int(agreement.rows[0]), kept, (EVALUATED,))
        settings = LoopSettings(self._job.num_rounds, moments_before=self._n_trained * self._job.num_rounds)
        draws = self._draws(parameters, fold)
        training = GrownTraining(grown, agreement.sums, self._attempt.channel, settings, draws)
        result = rows.train(number, training)
        self._trained(self._n_trained)
        self._n_trained += 1
        return training, result

    def _permuted(self, training: GrownTraining, held: _HeldOut, gain: Floats, score: float) -> Floats:
        """Return by how much a fold's score gets worse without what each column says of a row.

        A column in no tree changes nothing, and no score of it is asked for.
        """
        used: list[int] = np.flatnonzero(gain).tolist()
        parts = [(held.metric.name, held.parts(place, self._order_in(held, place))) for place in used]
        worse = np.zeros(gain.size)
        if used:
            scores = np.array([held.metric.value(pooled) for pooled in training.sums.metrics(parts)])
            worse[used] = score - scores if is_larger_better(held.metric.name) else scores - score
        return worse

    def _order_in(self, held: _HeldOut, place: int) -> Ints:
        """Return a private order of a fold's rows, the same for a column in every step."""
        numbers = self._orders.of("permutation", held.names[place])[~held.fold.chosen]
        return np.argsort(numbers, kind="stable")

    def _shadows(self, agreement: Agreement) -> dict[str, int]:
        """Return in how many trainings each column's gain is above that of the permuted copies of all columns."""
        n, hits = len(self._names), np.zeros(len(self._names), dtype=np.int64)
        names, places = [*self._names, *shadow_names(self._names)], [*range(n), *range(n)]
        for trial in range(self._job.shadows):
            orders = [np.argsort(self._orders.of("shadow", trial, name), kind="stable") for name in self._names]
            rows = self._all_rows.with_columns(range(n), orders)
            for number in range(len(self._of_folds)):
                _, result = self._train(agreement, rows, places, names, number)
                gain = gain_shares(result.model, 2 * n)
                hits += gain[:n] > gain[n:].max()
        return dict(zip(self._names, hits.tolist(), strict=True))

    # -- after training -----------------------------------------------------------------------------------------------

    def _finish(self, cuts: Cuts, result: SelectionResult) -> JobResult:
        attempt, job = self._attempt, self._job
        selection = Selection(result, job, attempt.context.job_id, self._world)
        hmac = attempt.conclude(result.agreed(), "selections")
        selection.write(attempt.folder.path)
        attempt.all_have_written()
        self._reservations.complete(self._n_trained * job.num_rounds)
        script = "train_chosen.py writes the job that trains the chosen columns"
        notes = notes_of("Each set of columns was trained on", self._arithmetic, script)
        attempt.write_record(
            TITLE,
            self._parameters.agreed,
            None,
            (selection.section(), notes),
            **self._record_of(cuts),
            data=(DataFacts.of(self._rows.table, job.data_set),),
        )
        chosen = selection.features
        page = attempt.folder.path / SELECTION_PAGE
        message = f"{len(chosen)} of {len(self._names)} columns are chosen; the page is {page}"
        return JobResult(hmac.hex(), message, {"chosen": len(chosen), "features": len(self._names)})


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """The rows of a fold, and the model that has not seen them."""

    plan: GrowthPlan
    bins: BinnedTable
    fold: Fold
    model: bytes
    names: tuple[str, ...]

    @property
    def metric(self) -> Metric:
        """The metric that decides."""
        return self.plan.metrics[-1]

    def parts(self, place: int, order: Ints) -> Floats:
        """Return this site's parts of the metric where one column is in another order of the rows.

        Shapes: order: int64[n_rows of the fold].
        """
        values = values_in_bins(self.plan.layout, self.bins)
        values[:, place] = values[order, place]
        booster = xgb.Booster({"nthread": 1}, model_file=bytearray(self.model))
        types = ["c" if is_c else "float" for is_c in self.plan.layout.is_categorical]
        n_outputs, label = self.plan.objective.n_outputs, self.fold.held_out.label
        margins = np.empty((0, n_outputs), dtype=np.float32)
        if len(label):
            rows = xgb.DMatrix(
                values, feature_names=list(self.names), feature_types=types, enable_categorical=True, nthread=1
            )
            margins = booster.predict(rows, output_margin=True).reshape(-1, n_outputs)
        return self.metric.parts(margins, label, None)


def values_in_bins(layout: BinLayout, table: BinnedTable) -> NDArray[np.float32]:
    """Return a value of each row's bin, which every tree over these bins takes for the row's own.

    Shapes: result: float32[n_rows, n_features], NaN is missing.
    """
    found = np.empty(table.codes.shape, dtype=np.float32)
    for feature in range(layout.n_features):
        upper = layout.upper[layout.starts[feature] : layout.starts[feature + 1]]
        inside = upper if layout.is_categorical[feature] else np.nextafter(upper, np.float32(-np.inf))
        codes = table.codes[:, feature].astype(np.int64)
        is_missing = codes == table.missing[feature]
        found[:, feature] = np.where(is_missing, np.nan, inside[np.where(is_missing, 0, codes)])
    return found


def gain_shares(model: bytes, n_features: int) -> Floats:
    """Return each column's share of the loss change of all splits; zeros of a model without any.

    Shapes: result: float64[n_features].
    """
    gains = np.zeros(n_features)
    for tree in json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]:
        inner = np.array(tree["left_children"]) >= 0
        places = np.array(tree["split_indices"])[inner]
        gains += np.bincount(places, np.array(tree["loss_changes"], dtype=np.float64)[inner], n_features)
    total = gains.sum()
    return gains / total if total > 0 else gains


def shadow_names(names: Sequence[str]) -> list[str]:
    """Return names for permuted copies that no column has."""
    prefix = "shadow of "
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return [prefix + name for name in names]


def _with_columns(rows: Table, places: Sequence[int], names: Sequence[str], table: Table) -> Table:
    """Return what a training has to know of its rows, with some columns, of which it says no value."""
    listed = {
        name: table.categories[table.feature_names[place]]
        for name, place in zip(names, places, strict=True)
        if table.feature_names[place] in table.categories
    }
    types = tuple(table.feature_types[place] for place in places)
    return replace(rows, feature_names=tuple(names), feature_types=types, categories=listed)


def _score_of(result: TrainingResult, number: int) -> float:
    """Return the last metric after the last round. Raises: ConfigurationError: it is no number, which all sites see."""
    name, score = list(result.rounds[-1].metrics.items())[-1]
    if not math.isfinite(score):
        raise ConfigurationError(
            f"{name} is no number on fold {number + 1}, whose rows are of one class at every site, or lie beyond the "
            "metric's range. Remedy: fewer folds, or another eval_metric"
        )
    return score


def _by_column(of_folds: Sequence[Floats]) -> tuple[OverFolds, ...]:
    return tuple(OverFolds(tuple(one)) for one in np.transpose(of_folds).tolist()) if len(of_folds) else ()


def _information_of(counted: Counted, place: int, n_classes: int) -> InformationValue:
    """Return what the counts by fold and class say of a column: of the class of which it tells most."""
    by_fold = np.split(counted.rows[place], counted.rows[place].shape[1] // n_classes, axis=1)
    bounds = counted.at_least[place].reshape(-1, n_classes)
    values = np.array([information_values(of_fold) for of_fold in by_fold])
    most = np.maximum(values, bounds)
    best = n_classes - 1 if n_classes == 2 else int(np.argmax(most.mean(axis=0)))
    chance = float(np.mean([values_by_chance(of_fold)[best] for of_fold in by_fold]))
    is_bound = bool((bounds > values)[:, best].any())
    return InformationValue(OverFolds(tuple(most[:, best].tolist())), chance, len(counted.rows[place]), is_bound)


run_selection_site = SitePart(
    prepare,
    lambda attempt, prepared: SelectionAttempt(attempt, prepared).run(),
    protection=lambda job, prepared: {**prepared.rows.base.chosen.facts, **grown_fact(by_sites=True)},
)
"""Takes part in one attempt of a job.

A selection that is broken off leaves no result; its log says which steps were done, and with which scores.

Privacy: the server has seen messages whose number and size follow from the job, the number of cut points, which columns
    are in trees, and the trees' shapes.
"""
