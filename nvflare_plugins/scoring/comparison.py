"""A site's own model beside a federated one, on the site's own evaluation rows: what joining is worth, as numbers.

Privacy: nothing leaves the site; the result is about its rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    brier_score_loss,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    roc_auc_score,
)
from sklearn.model_selection import StratifiedKFold

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.labels import signed
from nvflare_plugins.data.table import Table
from nvflare_plugins.evidence.threat_model import is_horizontal
from nvflare_plugins.pages.profile_page import Compared, Comparison
from nvflare_plugins.pages.run_record import EVALUATION, TRAINING, DataFacts, RunRecord
from nvflare_plugins.scoring.explanation import concordance, negative_log_likelihood, row_figures
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from nvflare_plugins.scoring.rows import load_again
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import with_lists
from nvflare_plugins.xgb.objectives import COX, is_ranking
from nvflare_plugins.xgb.rounds import parse_metrics
from nvflare_plugins.xgb.row_blocks import RowBlocks

_RESAMPLINGS = 200
_FOLDS = 5
_LEAST_ROWS = 10 * _FOLDS
_MOST_RESAMPLED = 20_000_000  # rows in all resamplings of one metric together
_POINTS = 25
_POINTS_AT_ONCE = 5  # whose scores are held, 8 bytes a row each
_FEW_VALUES = 1_000_000
_DIGITS = 12  # sums of floats differ beyond
_CV_METRIC = {"binary": "logloss", "multi": "mlogloss", COX: "cox-nloglik", "survival": "aft-nloglik"}

Scores = NDArray[np.float64]
Measure = Callable[[Scores, Scores, Scores], float]
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric by name. Attributes: measure: (labels, scores, weights) -> value, as scikit-learn computes it."""

    name: str
    is_higher_better: bool
    measure: Measure


def metrics_of(model: FinishedModel) -> tuple[Metric, ...]:
    """Return the metrics for a model, the one that counts first. Concordance counts rows once, whatever they weigh."""
    if later := model.direction_of_times:
        return _metrics_of_times(model, later)
    if model.classes is None:
        return _metric("RMSE", _rmse), _metric("MAE", mean_absolute_error)
    if not model.has_probabilities:
        return (_metric("accuracy", accuracy_score, is_higher_better=True),)
    loss = _metric("log loss", log_loss, labels=list(range(len(model.classes))))
    if len(model.classes) > 2:
        return loss, _metric("accuracy", _accuracy_of_the_likeliest, is_higher_better=True)
    return (
        _metric("AUC", roc_auc_score, is_higher_better=True),
        _metric("average precision", average_precision_score, is_higher_better=True),
        loss,
        _metric("Brier score", brier_score_loss),
    )


def _metric(name: str, score: Callable[..., float], *, is_higher_better: bool = False, **more: Any) -> Metric:
    """Return a metric that scikit-learn computes. Args: more: further arguments of ``score``."""
    return Metric(
        name,
        is_higher_better=is_higher_better,
        measure=lambda labels, scores, weights: float(score(labels, scores, sample_weight=weights, **more)),
    )


def _rmse(labels: Scores, scores: Scores, sample_weight: Scores) -> float:
    return float(np.sqrt(mean_squared_error(labels, scores, sample_weight=sample_weight)))


def _accuracy_of_the_likeliest(labels: Scores, scores: Scores, sample_weight: Scores) -> float:
    return float(accuracy_score(labels, scores.argmax(axis=1), sample_weight=sample_weight))


def _metrics_of_times(model: FinishedModel, later: int) -> tuple[Metric, ...]:
    index = Metric(
        "concordance", is_higher_better=True, measure=lambda y, s, w: concordance(y[w > 0], later * s[w > 0])
    )
    if (loss := model.loss_of_times) is None:
        return (index,)
    return (
        index,
        Metric("aft-nloglik", is_higher_better=False, measure=lambda y, s, w: negative_log_likelihood(loss, y, s, w)),
    )


def train_alone(params: Mapping[str, Any], table: Table, n_rounds: int) -> xgb.Booster:
    """Train stock XGBoost on a site's own rows with a job's parameters. Raises: ScoringError."""
    try:
        return xgb.train(_own(params, table), _matrix(params, table), n_rounds, verbose_eval=False)
    except xgb.core.XGBoostError:
        raise ScoringError("XGBoost cannot train on this site's rows alone with the job's parameters") from None


def best_rounds(params: Mapping[str, Any], table: Table, n_rounds: int) -> int | None:
    """Return how many rounds five-fold cross-validation on the site's own rows chooses; None for too few rows."""
    objective = str(params.get("objective", ""))
    metric = _CV_METRIC.get(objective if objective == COX else objective.partition(":")[0])
    is_classes = objective.startswith(("binary", "multi"))
    if table.n_rows < _LEAST_ROWS or objective in ("binary:hinge", "multi:softmax"):
        return None
    if is_classes and np.unique(table.label, return_counts=True)[1].min() < _FOLDS:
        return None
    chosen = {**_own(params, table), **({} if metric is None else {"eval_metric": metric})}
    try:
        folds = [
            _fold_scores(chosen, table, is_test, n_rounds) for is_test in _folds(table.label, is_classes=is_classes)
        ]
    except xgb.core.XGBoostError:
        return None
    return int(np.argmin(np.mean(folds, axis=0))) + 1


def _folds(label: NDArray[np.float32], *, is_classes: bool) -> Iterator[NDArray[np.bool_]]:
    """Yield which rows each fold tests on, as ``xgb.cv`` divides them. Shapes: bool[n_rows]."""
    if is_classes:
        parts = [test for _, test in StratifiedKFold(_FOLDS, shuffle=True, random_state=0).split(label, label)]
    else:
        parts = np.array_split(np.random.RandomState(0).permutation(len(label)), _FOLDS)
    for part in parts:
        is_test = np.zeros(len(label), dtype=bool)
        is_test[part] = True
        yield is_test


def _fold_scores(params: Mapping[str, Any], table: Table, is_test: NDArray[np.bool_], n_rounds: int) -> list[float]:
    """Train without a fold; return the metric on it after each round."""
    training = _matrix(params, table, ~is_test)
    test = _matrix(params, table, is_test, training)
    booster, found = xgb.Booster(dict(params), [training, test]), []
    for number in range(n_rounds):
        booster.update(training, number)
        found.append(list(parse_metrics(booster.eval_set([(test, "test")], number)).values())[-1])
    return found


def scores_after(model: FinishedModel, table: Table, rounds: Sequence[str | int] = ("all",)) -> list[Scores]:
    """Return ``scores_of`` all rows for each choice of rounds; they are read once."""
    found: list[list[Scores]] = [[] for _ in rounds]
    for block in table.blocks():
        for parts, one in zip(found, rounds, strict=True):
            parts.append(scores_of(model, block, one))
    return [np.concatenate(parts) for parts in found]


def scores_of(model: FinishedModel, features: NDArray[np.float32], rounds: str | int = "all") -> Scores:
    """Return what the metrics take: probabilities (of the second of two classes), classes or numbers."""
    if model.classes is None or not model.has_probabilities:
        return model.predict(features, rounds).astype(np.float64)
    found: Scores = model.probabilities(features, rounds).astype(np.float64)
    found /= found.sum(axis=1, keepdims=True)
    return found[:, 1] if found.shape[1] == 2 else found


def compare(
    metrics: tuple[Metric, ...], table: Table, alone: Scores, tuned: Scores | None, federated: Scores
) -> tuple[Compared, ...]:
    """Measure the models on the evaluation rows, with an interval for the difference by resampling these rows.

    Args:
        table: the evaluation rows.
        alone, tuned, federated: scores of the models for them.
    """
    label, weight = table.label.astype(np.float64), _weights(table)
    n_draws = min(_RESAMPLINGS, max(40, _MOST_RESAMPLED // max(len(label), 1)))
    found = []
    for metric in metrics:
        values = [round(metric.measure(label, one, weight), _DIGITS) for one in (alone, federated)]
        of_tuned = None if tuned is None else round(metric.measure(label, tuned, weight), _DIGITS)
        sign = 1 if metric.is_higher_better else -1
        own = tuned if tuned is not None and of_tuned is not None and sign * of_tuned > sign * values[0] else alone
        changes = [
            metric.measure(label[rows], federated[rows], weight[rows])
            - metric.measure(label[rows], own[rows], weight[rows])
            for rows in _draws(label, n_draws)
        ]
        told = np.round(changes, _DIGITS)[np.isfinite(changes)]  # few events: some draws order no pair of rows
        low, high = np.quantile(told, (0.025, 0.975)) if told.size else (-np.inf, np.inf)
        found.append(
            Compared(metric.name, metric.is_higher_better, values[0], of_tuned, values[1], float(low), float(high))
        )
    return tuple(found)


def curve(metric: Metric, table: Table, model: FinishedModel, n_rounds: int) -> Curve:
    """Return a model's metric after rounds, at 25 of them at most."""
    rounds = sorted({*np.linspace(1, n_rounds, min(n_rounds, _POINTS)).astype(int).tolist(), n_rounds})
    label, weight = table.label.astype(np.float64), _weights(table)
    points: list[tuple[float, float]] = []
    for first in range(0, len(rounds), _POINTS_AT_ONCE):
        some = rounds[first : first + _POINTS_AT_ONCE]
        scores = scores_after(model, table, some)
        points += [(float(n), metric.measure(label, one, weight)) for n, one in zip(some, scores, strict=True)]
    return tuple(points)


def check_rows(training: Table, evaluation: Table, n_classes: int | None) -> None:
    """Refuse rows on which nothing can be compared.

    Args:
        n_classes: of the model; None for a regression.

    Raises:
        ScoringError: why.
    """
    for table, use in ((training, "training"), (evaluation, "evaluation")):
        label = table.label[_weights(table) > 0]
        if len(label) < 2:
            raise ScoringError(f"this site has {len(label)} {use} rows that count: there is nothing to compare on them")
        if n_classes is not None and not np.isin(label, range(n_classes)).all():
            raise ScoringError(f"some labels of the {use} rows are none of the model's {n_classes} classes")
        if n_classes is not None and np.unique(label).size < 2:
            raise ScoringError(f"the {use} rows of this site are all of one class: nothing can be compared on its own")


def _draws(label: Scores, n: int) -> Iterator[NDArray[np.int64]]:
    """Yield resampled rows, those left out that have not all classes: no metric is defined there."""
    random = np.random.default_rng(0)  # the page should be the same when it is made again
    distinct = np.unique(label).size
    for _ in range(n):
        rows = random.integers(0, len(label), len(label))
        if distinct > 20 or np.unique(label[rows]).size == distinct:
            yield rows


def _weights(table: Table) -> Scores:
    return np.ones(table.n_rows) if table.weight is None else table.weight.astype(np.float64)


def _own(params: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Return the parameters for this machine: on few values threads wait for each other longer than they work."""
    n_values = table.n_rows * len(table.feature_names)
    return {**params, "nthread": 1 if n_values < _FEW_VALUES else 0, "verbosity": 0}


def _matrix(
    params: Mapping[str, Any],
    table: Table,
    chosen: NDArray[np.bool_] | None = None,
    reference: xgb.DMatrix | None = None,
) -> xgb.QuantileDMatrix:
    """Bin rows of a table that need not be held; trees on it are those on the values.

    Shapes: chosen: bool[n_rows], which rows; None takes all.

    Args:
        reference: whose cut points to take; None finds them in these rows.
    """

    def blocks() -> Iterator[NDArray[np.float32]]:
        first = 0
        for block in table.blocks():
            rows = slice(first, first := first + len(block))
            yield block if chosen is None else block[chosen[rows]]

    def part(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values if chosen is None else values[chosen]

    layout = {"feature_names": list(table.feature_names), "feature_types": list(table.feature_types)}
    label = signed(table.label) if params.get("objective") == COX else table.label
    rows = RowBlocks(blocks, part(label), None if table.weight is None else part(table.weight), layout)
    return xgb.QuantileDMatrix(rows, max_bin=int(params.get("max_bin", 256)), ref=reference, enable_categorical=True)


# A run's own comparison: which rows it is about, and what it finds.


def compare_run(folder: Path, policy: SitePolicy, data_set: str | None = None) -> Comparison:
    """Train on a site's own rows as a run's job did, and compare with its model on other rows of this site.

    Args:
        folder: of the run, at its site.
        data_set: rows to compare on, a data set of the policy; None takes the job's own evaluation rows.

    Raises:
        ConfigurationError: it was no horizontal training, there are no such rows, or they have changed beyond use.
    """
    record = RunRecord.read(folder)
    facts = _trained_on(record, folder)
    name = data_set or next((one.name for one in record.data if one.use == EVALUATION), None)
    if name is None:
        raise ConfigurationError(
            "the job had no eval_data_set: name rows of this site that the model was not trained on, as a data set of "
            "its policy: --data-set NAME"
        )
    if name == facts.name:
        raise ConfigurationError(f"the model was trained on data set {facts.name!r}: name another one")
    training = load_again(policy.data_set(facts.name), facts, record, takes_passes=True)
    evaluation = load_again(policy.data_set(name), facts, record, takes_passes=True)
    notes = _changes(record, {facts.name: training, name: evaluation})
    return _compared(record, folder, facts, training, evaluation, notes)


def _trained_on(record: RunRecord, folder: Path) -> DataFacts:
    """Return the training set of a horizontal run. Raises: ConfigurationError, for other runs."""
    facts = next((one for one in record.data if one.use == TRAINING), None)
    if not is_horizontal(record.profile) or record.model is None or facts is None:
        raise ConfigurationError(
            f"{folder} is of no horizontal training: a site of another kind of job cannot train such a model by itself"
        )
    if is_ranking(record.params):
        raise ConfigurationError(
            f"{folder} is of a ranking: scores of single rows say nothing there. Its metrics on the evaluation rows of "
            "all sites are in the run's report"
        )
    return facts


def _changes(record: RunRecord, tables: Mapping[str, Table]) -> tuple[str, ...]:
    """Say which files are no longer those of the run."""
    return tuple(
        f"Data set {one.name} had {one.rows:,} rows in the run and has {tables[one.name].n_rows:,} now."
        for one in record.data
        if one.name in tables and tables[one.name].n_rows != one.rows
    )


def _compared(
    record: RunRecord, folder: Path, facts: DataFacts, training: Table, evaluation: Table, notes: tuple[str, ...]
) -> Comparison:
    federated = FinishedModel.read(folder / str(record.model))
    check_rows(training, evaluation, None if federated.classes is None else len(federated.classes))
    n_rounds, metrics = federated.n_rounds, metrics_of(federated)
    tuned_rounds = best_rounds(record.params, training, n_rounds)

    def own(rounds: int) -> FinishedModel:
        booster = train_alone(record.params, training, rounds)
        lists = {name: list(entries) for name, entries in facts.categories.items()}
        content = with_lists(bytes(booster.save_raw("json")), facts.columns, lists, facts.label_classes or None)
        return FinishedModel(content, "the model of this site's own rows")

    alone = own(n_rounds)
    (of_alone,), (of_federated,) = scores_after(alone, evaluation), scores_after(federated, evaluation)
    of_tuned = None if tuned_rounds is None else scores_after(own(tuned_rounds), evaluation)[0]
    measured = compare(metrics, evaluation, of_alone, of_tuned, of_federated)
    first = metrics[0]
    curves = tuple(
        (name, curve(first, evaluation, model, n_rounds))
        for name, model in (("this site alone", alone), ("federated", federated))
    )
    return Comparison(
        record.called,
        record.site,
        facts.name,
        training.n_rows,
        evaluation.n_rows,
        n_rounds,
        tuned_rounds,
        measured,
        first.name,
        curves,
        notes,
        row_figures(federated, evaluation, of_federated),
    )
