"""One site's part in a tuning: one session and one cut search, then every trial on all folds but one, for each fold.

What the differences of these models show, and what the caps are for, stands in folds.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.data.table import Table, column_names
from nvflare_plugins.evidence.audit import grown_fact
from nvflare_plugins.growth.arithmetic import grown_document
from nvflare_plugins.growth.training import Draws, LoopSettings
from nvflare_plugins.kinds.tuning.folds import (
    EVALUATED,
    FoldRows,
    FoldsHere,
    FoldsOnWorkers,
    check_folds,
    chosen_draws,
    fold_of_rows,
    rows_needed,
)
from nvflare_plugins.kinds.tuning.job import Trial, TuningJob, check_consent, in_trial
from nvflare_plugins.kinds.tuning.result import (
    FoldScore,
    TrialResult,
    TuningResult,
    facts_of,
    line_of,
    section_of,
    show_so_far,
    without_page_if_lost,
    write_results,
)
from nvflare_plugins.pages.run_record import DataFacts, ReportSection
from nvflare_plugins.pages.search_pages import TUNING_PAGE, TuningFacts
from nvflare_plugins.pooled import preparation
from nvflare_plugins.pooled.attempt import Agreement, PooledAttempt
from nvflare_plugins.pooled.growing import GrownTraining, grown_by, is_grown
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.mediated.engine import MediatedEngine
from nvflare_plugins.pooled.row_floors import check_sampling, row_fraction, row_weights
from nvflare_plugins.site.memory.registry import Registry, Wanted, describe_draw
from nvflare_plugins.site.policy_values import Floors
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import workers_of
from nvflare_plugins.workers.workers import Workers, shards_line
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.parameters import TrainingParameters, with_floor
from nvflare_plugins.xgb.rounds import TrainingResult

TITLE = "Tuning and cross validation"
_NOT_RELEASED = ("deadline_s",)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFolds:
    """A site's rows and the fold of each, before it talks to anyone.

    Attributes:
        base: table, data set and profile, as of a training.
        folds: of each row. Shapes: int64[n_rows].
        fractions: shares of the rows that rounds draw, all different.
    """

    base: preparation.Prepared
    folds: NDArray[np.int64]
    n_folds: int
    fractions: tuple[float, ...]

    @classmethod
    def of(cls, allowed: preparation.Allowed, n_folds: int, parameters: Sequence[TrainingParameters]) -> InFolds:
        """Read the rows and draw their folds. Raises: DataRefusal, ConfigurationError."""
        base = allowed.load()
        secret = Registry.open(allowed.context.policy).secret("folds", str(n_folds))
        fractions = sorted({row_fraction(one) for one in parameters}, reverse=True)
        return cls(base, fold_of_rows(base.table, base.data_set, secret, n_folds), n_folds, tuple(fractions))


@dataclass(frozen=True, slots=True)
class TuningPrepared:
    """What a site knows before it talks to anyone.

    Attributes:
        parameters: checked, of each trial.
        is_grown: the sites grow the trees of all trials themselves.
    """

    rows: InFolds
    trials: tuple[Trial, ...]
    parameters: tuple[TrainingParameters, ...]
    is_grown: bool


def prepare(job: TuningJob, context: SiteContext) -> TuningPrepared:
    """Check the job, with every trial's parameters, against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job or data are not usable; the message says which, and which trial.
    """
    policy, trials = context.policy, job.all_trials()
    check_consent(policy, job.data_set, job.n_of_trials, job.folds, job.num_rounds)
    data_set = policy.data_set(job.data_set)
    data_set.check_holds_bins("a tuning holds those of all folds")
    names = column_names(data_set, job.label, None, job.features, job.group)
    trainings = [job.training_of(trial, list(names)) for trial in trials]
    parameters, grown = [], []
    for number, training in enumerate(trainings, start=1):
        with in_trial(number, len(trials)):
            parameters.append(check_trial(preparation.check_public(training, policy, names)))
            grown.append(is_grown(training, parameters[-1]))
    if len({row_fraction(one) for one in parameters}) > 1:
        policy.check_consent(
            "recompute_with_changes",
            "trains on one sample of its rows: the difference of two shows rows that only one has",
            "give subsample once, in params",
        )
    allowed = preparation.allow(
        trainings[0], context, job.group, with_ids=job.group is None, on_cluster=True, by_xgboost=not all(grown)
    )
    return TuningPrepared(InFolds.of(allowed, job.folds, parameters), trials, tuple(parameters), all(grown))


def check_trial(parameters: TrainingParameters) -> TrainingParameters:
    """Refuse what cannot be scored, or not on folds. Raises: ConfigurationError."""
    check_sampling(parameters)
    if not parameters.metrics:
        raise ConfigurationError("eval_metric: a tuning needs a metric to compare trials by")
    if parameters.objective.adaptive_leaf:
        raise ConfigurationError(
            f"{parameters.objective.name} cannot be tuned: its leaves are means of the sites' own quantiles, for which "
            "every site needs rows in every fold. Use reg:pseudohubererror"
        )
    return parameters


class FoldedAttempt(PooledAttempt):
    """An attempt with many trainings on all rows but those of one fold, once its session is open.

    Added rows are changed rows here: they are too few for each fold when they are just enough for all.
    """

    COUNTS_ADDED = False

    def __init__(
        self,
        attempt: SiteAttempt,
        rows: InFolds,
        training: HorizontalJob,
        *,
        is_grown: bool,
        workers: Workers | None = None,
    ) -> None:
        super().__init__(attempt, rows.base, training, is_grown=is_grown, workers=workers)
        self._in_folds = rows

    def _wanted(self) -> list[Wanted]:
        return [
            Wanted(self._rows.table, self._rows.data_set, draw=describe_draw(fraction), is_settled=True)
            for fraction in self._in_folds.fractions
        ]

    def _most_rows_needed(self, floors: Floors) -> int:
        return rows_needed(floors, self._in_folds.fractions)

    def _check_parts(self, sums: ProtectedSums) -> None:
        """Hold every fold to the floors."""
        floors, own, rows = self._floors, self._policy.floors(self._world), self._in_folds
        factor = self._parameters.number("scale_pos_weight", 1.0)
        weights = row_weights(self._rows.table, factor) / max(1.0, factor)
        check_folds(sums, floors, own, weights, rows.folds, rows.n_folds, self._most_rows_needed(floors))

    @cached_property
    def _of_folds(self) -> list[Fold]:
        return [Fold.of(self._rows.table, self._in_folds.folds == number) for number in range(self._in_folds.n_folds)]

    def _trained(self, number: int) -> None:
        """Note that a training of the attempt is over. Args: number: from 0."""
        self._attempt.evidence.round(number)
        self._attempt.heads.is_due = True

    def _draws(self, parameters: TrainingParameters, fold: Fold) -> Draws | None:
        draws = self._draws_of(parameters, self._rows.table, self._context.sites)
        return None if draws is None else chosen_draws(draws, fold.chosen)


class TuningAttempt(FoldedAttempt):
    """The steps of one attempt once its session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: TuningPrepared, workers: Workers | None) -> None:
        self._job: TuningJob = attempt.job
        training = self._job.training_of(prepared.trials[0], list(prepared.rows.base.table.feature_names))
        super().__init__(attempt, prepared.rows, training, is_grown=prepared.is_grown, workers=workers)
        self._prepared, self._trials = prepared, prepared.parameters

    def run(self) -> JobResult:
        """Agree, search cut points, train all trials, compare scores, write results."""
        agreement = self.begin()
        train = self._by_sites(agreement) if self._arithmetic else self._by_xgboost(agreement)
        with without_page_if_lost(self._attempt.folder.path):
            return self._finish(agreement.cuts, self._train_all(train))

    def _documents(self) -> dict[str, object]:
        return {
            f"trial {number}": grown_document(one) if self._is_grown else one.document()
            for number, one in enumerate(self._trials, start=1)
        }

    def _take_terms(self, n_done: int) -> None:
        self._trials = tuple(with_floor(one, self._floors.rows_per_node) for one in self._trials)
        self._parameters = self._trials[0]

    def _release(self) -> dict[str, object]:
        """Return all trials as one release."""
        without = _NOT_RELEASED if self._arithmetic else (*_NOT_RELEASED, "engine", "arithmetic")
        fields = {name: value for name, value in self._job.to_dict().items() if name not in without}
        return {"kind": "tuning", "job": fields, "rows_per_node": self._floors.rows_per_node}

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_all(self, train: _TrainFold) -> TuningResult:
        job, trials, done = self._job, self._prepared.trials, []
        metric = self._parameters.metrics[-1]
        for t, trial in enumerate(trials):
            started, scores = time.perf_counter(), []
            for f in range(job.folds):
                with in_trial(t + 1, len(trials), f + 1, job.folds):
                    scores.append(score_of(train(t, f)))
                    self._trained(t * job.folds + f)
            done.append(TrialResult(t + 1, trial, tuple(scores), time.perf_counter() - started))
            so_far = TuningResult(metric, tuple(done))
            self._attempt.progress.say(line_of(done[-1], len(trials), metric, so_far.best))
            show_so_far(self._attempt.folder.path, self._facts(so_far))
        return TuningResult(metric, tuple(done))

    def _by_xgboost(self, agreement: Agreement) -> _TrainFold:
        """Bin the rows of all folds by the agreed cuts, once for all trials: here, or at workers."""
        table, cuts, max_bin = self._rows.table, agreement.cuts, self._parameters.max_bin
        engine = MediatedEngine.of(self._attempt, agreement, table, max_bin)
        bins = self._on_workers(cuts) or FoldsHere(table, self._in_folds.folds, self._job.folds, cuts, max_bin)

        def train(t: int, f: int) -> TrainingResult:
            parameters, fold = self._trials[t], self._of_folds[f]
            self._agree_scales(agreement.sums, parameters, [fold.kept, fold.held_out])
            draws, least = self._draws(parameters, fold), self._counted_leaves(parameters)
            settings, names = self._settings(t, f), (EVALUATED,)
            return bins.train(f, engine.training(parameters, fold.kept, settings, draws, least, names))

        return train

    def _by_sites(self, agreement: Agreement) -> _TrainFold:
        """Bin all rows once."""
        sums, cuts, n_rows = agreement.sums, agreement.cuts, int(agreement.rows[0])
        rows = self._on_workers(cuts) or FoldRows(self._rows.table, self._in_folds.folds, cuts, self._arithmetic)

        def train(t: int, f: int) -> TrainingResult:
            parameters, fold = self._trials[t], self._of_folds[f]
            self._agree_scales(sums, parameters, [fold.kept, fold.held_out])
            grown = self._grown(parameters, cuts, n_rows, fold.kept, (EVALUATED,))
            settings, draws = self._settings(t, f), self._draws(parameters, fold)
            return rows.train(f, GrownTraining(grown, sums, self._attempt.channel, settings, draws))

        return train

    def _on_workers(self, cuts: Cuts) -> FoldsOnWorkers | None:
        if self._workers is None:
            return None
        table = self._rows.table
        _log.info("%s", shards_line(table.n_rows, len(self._workers)))
        max_bin, folds = self._parameters.max_bin, self._in_folds.folds
        return FoldsOnWorkers(self._workers, table, folds, self._job.folds, cuts, max_bin, self._arithmetic)

    def _settings(self, t: int, f: int) -> LoopSettings:
        job = self._job
        return LoopSettings(job.num_rounds, job.early_stopping_rounds, 0, (t * job.folds + f) * job.num_rounds)

    def _facts(self, result: TuningResult) -> TuningFacts:
        names, n_trials = self._rows.table.feature_names, len(self._prepared.trials)
        return facts_of(result, self._job, self._context.job_id, self._world, names, n_trials)

    # -- after training -----------------------------------------------------------------------------------------------

    def _finish(self, cuts: Cuts, result: TuningResult) -> JobResult:
        attempt, job, table = self._attempt, self._job, self._rows.table
        hmac = attempt.conclude(result.agreed(), "scores")
        folder, facts = attempt.folder.path, self._facts(result)
        write_results(folder, result, job, facts)
        attempt.all_have_written()
        self._reservations.complete(sum(f.trained for one in result.trials for f in one.folds))
        best = result.best
        script = "train_best.py writes the job that trains the best parameters"
        notes = notes_of("Each trial was trained", self._arithmetic, script)
        attempt.write_record(
            TITLE,
            self._trials[best.number - 1].agreed,
            None,
            (section_of(facts), notes, *self._work_sections()),
            **self._record_of(cuts),
            data=(DataFacts.of(table, job.data_set),),
        )
        message = f"trial {best.number} is best ({result.metric} {best.mean:.6g}); the table is {folder / TUNING_PAGE}"
        return JobResult(hmac.hex(), message, {"trials": len(result.trials), "folds": job.folds})


@dataclass(frozen=True, slots=True)
class Fold:
    """What bounds of one fold's trainings follow from: labels of the rows that are trained on, and of those held out.

    Attributes:
        chosen: which rows of the site are trained on. Shapes: bool[n_rows].
    """

    chosen: NDArray[np.bool_]
    kept: Table
    held_out: Table

    @classmethod
    def of(cls, table: Table, held_out: NDArray[np.bool_]) -> Fold:
        """Take the labels. Shapes: held_out: bool[n_rows]."""
        bare = replace(table, features=table.features[:0], passes=None, ids=None, groups=None)
        kept, others = (replace(bare, label=table.label[rows]) for rows in (~held_out, held_out))
        return cls(~held_out, kept, others)


_TrainFold = Callable[[int, int], TrainingResult]
"""Trains a trial, by its number, on all rows but those of a fold, by its number."""


def score_of(result: TrainingResult) -> FoldScore:
    """Return a training's score: at its best round where it stops early, else after its last."""
    trained = len(result.rounds)
    if result.best_round is not None and result.best_score is not None:
        return FoldScore(result.best_score, result.best_round + 1, trained)
    return FoldScore(list(result.rounds[-1].metrics.values())[-1], trained, trained)


def notes_of(trained: str, arithmetic: str, script: str) -> ReportSection:
    """Say in the report what was trained. Args: trained: whose trainings these were; script: what writes which job."""
    return ReportSection(
        "What was trained",
        (
            f"{trained} once for each fold on all other rows, and scored on the fold's by XGBoost's own "
            "metric over all sites. Folds were drawn by each site from a secret of its own.",
            grown_by(arithmetic),
            f"No model was kept. The file {script} on all rows.",
        ),
    )


def _take_part(attempt: SiteAttempt, prepared: TuningPrepared) -> JobResult:
    with (
        workers_of(attempt.context.policy, attempt.job.data_set) as workers,
        watched(workers, attempt.progress) as attempt.progress,
    ):
        return TuningAttempt(attempt, prepared, workers).run()


run_tuning_site = SitePart(
    prepare,
    _take_part,
    protection=lambda job, prepared: {**prepared.rows.base.chosen.facts, **grown_fact(by_sites=prepared.is_grown)},
    uses_cluster=True,
)
"""Takes part in one attempt of a job.

A tuning that is broken off leaves no result; its log says which trials were done, and with which scores.

Privacy: the server has seen messages whose number and size follow from the job, from how early trainings stopped and
    from the trees' shapes.
"""
