"""One party's part in a vertical tuning: one session and one alignment, then every trial for every fold.

A training on all rows but those of a fold is one over all rows in which the fold's weigh nothing: their gradient
pairs are zero, and zeros are encrypted like other pairs. So a passive party answers for the same rows in every
training, and neither it nor the server learns which rows are in a fold, or any score. What it does learn is what it
learns in so many trainings: which rows are in the nodes that it is asked about. The active party learns sums per bin
over all rows but a fold's, of many trees; in the preset ``exact`` it knows from one tree in which bin each row lies,
to which more trees add nothing. The fold is scored on the same rows, of which then its own alone weigh. Under `plain`
gradients are open, as the consent to it says, and with them the folds.

The cap of the consent ``tuning`` bounds the trees that a party answers for in one job, its work; not what bins tell.

Every training has a key of its own. Cut points of passive columns are those of all rows; the active party's are those
of the rows that weigh, as in every weighted vertical training.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import JobResult, Silent, SiteContext
from nvflare_plugins.attempt.site_attempt import Reservations, SiteAttempt, SitePart, reserve_together
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS, fold_of_names, names_of
from nvflare_plugins.kinds.tuning.job import Trial, check_consent, in_trial
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
from nvflare_plugins.kinds.vertical import site as vertical_site
from nvflare_plugins.kinds.vertical.active_party import ActiveSite
from nvflare_plugins.kinds.vertical.context import TrainedPart, VerticalContext
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_vertical_parameters
from nvflare_plugins.kinds.vertical.messages import ContentRecorder
from nvflare_plugins.kinds.vertical.party_data import PartyData, PartySet
from nvflare_plugins.kinds.vertical.passive_party import PassiveSite, open_guard
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob
from nvflare_plugins.pages.run_record import DataFacts, ReportSection, RoundRow
from nvflare_plugins.pages.search_pages import TUNING_PAGE, TuningFacts
from nvflare_plugins.site.memory.registry import Registry, Wanted
from nvflare_plugins.workers.workers import Workers, work_section
from nvflare_plugins.xgb.parameters import ALIASES, TrainingParameters

TITLE = "Vertical tuning and cross validation"
_NAMES_COLUMNS = ("monotone_constraints", "interaction_constraints")
_NOT_RELEASED = ("deadline_s", "alignment")
_TOO_FEW = (
    f"some fold has fewer than {LEAST_ROWS} of the common rows. Remedy: fewer folds, more rows, or a group column of "
    "smaller groups."
)


@dataclass(frozen=True, slots=True, repr=False)
class TuningPrepared:
    """What a party knows before it talks to anyone. ``parameters``: of each trial, without constraints."""

    base: vertical_site.Prepared
    trials: tuple[Trial, ...]
    parameters: tuple[TrainingParameters, ...]


def prepare(job: VerticalTuningJob, context: SiteContext) -> TuningPrepared:
    """Check the job, with every trial's parameters, against the policy and the data, at this party alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job or data are not usable; the message says which, and which trial.
    """
    check_consent(context.policy, job.data_set, job.n_of_trials, job.folds, job.num_rounds)
    trials, parameters = job.all_trials(), []
    for number, trial in enumerate(trials, start=1):
        given = {**job.params, **trial}
        free = {name: value for name, value in given.items() if ALIASES.get(name, name) not in _NAMES_COLUMNS}
        with in_trial(number, len(trials)):
            parameters.append(check_vertical_parameters(free, ["any"], label=job.label))
            if not parameters[-1].metrics:
                raise ConfigurationError("eval_metric: a tuning needs a metric to compare trials by")
    base = vertical_site.prepare(job.training_of(trials[0], is_scored=False), context, job.group)
    return TuningPrepared(base, trials, tuple(parameters))


class _Run:
    """The steps of one attempt after the session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: TuningPrepared) -> None:
        self._attempt, self._prepared = attempt, prepared
        self._job: VerticalTuningJob = attempt.job
        self._policy = attempt.context.policy
        self._registry = Registry.open(self._policy)
        self._is_active = attempt.context.site == self._job.active
        self._notes = ContentRecorder(attempt.evidence, prepared.base.scheme.protection)
        self._workers: Workers | None = None

    def run(self) -> JobResult:
        """Align, agree, train all trials, conclude; the active party writes the scores."""
        first = self._job.training_of(self._prepared.trials[0], is_scored=False)
        with (
            vertical_site.connected(first, self._attempt.context) as self._workers,
            watched(self._workers, self._attempt.progress) as self._attempt.progress,
            without_page_if_lost(self._attempt.folder.path),
        ):
            return self._on_workers(first)

    def _on_workers(self, first: VerticalJob) -> JobResult:
        agreeing = dataclasses.replace(self._attempt, job=first)
        run = vertical_site.VerticalRun(agreeing, self._prepared.base)
        data, _, self._arithmetic = run.agreed(self._workers)
        n_rows = data.train.table.n_rows
        if n_rows < LEAST_ROWS * self._job.folds:  # all parties know the number of common rows
            raise PolicyRefusal(_TOO_FEW)
        chosen = self._chosen(data.train)
        reservations = self._reserve(data)
        try:
            result, rounds = self._train_all(data, chosen, reservations)
        except (VeilBoostError, OSError):
            if not self._notes.has_told:
                reservations.cancel()
            raise
        return self._finish(data, reservations, result, rounds)

    def _chosen(self, rows: PartySet) -> list[NDArray[np.float32]]:
        """Return, at the active party, the weights of all rows for each fold's trainings; no numbers elsewhere.

        Shapes: float32[n_rows] each.
        """
        if not self._is_active:
            return [np.empty(0, np.float32)] * self._job.folds
        what, names = "id", [] if rows.ids is None else [one.decode() for one in rows.ids]
        if rows.table.groups is not None:
            what, names = "group", list(names_of(rows.table.groups, rows.data_set, "group"))  # type: ignore[arg-type]
        secret = self._registry.secret("folds", str(self._job.folds))
        folds = fold_of_names(names, what, rows.table, secret, self._job.folds)
        if np.bincount(folds, minlength=self._job.folds).min() < LEAST_ROWS:
            raise PolicyRefusal(_TOO_FEW)
        return [(folds != number).astype(np.float32) for number in range(self._job.folds)]

    def _reserve(self, data: PartyData) -> Reservations:
        """Have all parties' registries allow all trials as one release and remember it."""
        fields = {name: value for name, value in self._job.to_dict().items() if name not in _NOT_RELEASED}
        release = json.dumps({"kind": "vertical_tuning", "job": fields}, sort_keys=True).encode()
        if not self._is_active:
            self._guard(data, 0)  # refuses before anything is remembered
        rows = data.train
        return reserve_together(
            self._attempt, self._registry, [Wanted(rows.table, rows.data_set, rows.ids)], release, None
        )

    def _guard(self, data: PartyData, trial: int) -> Guard:
        training = self._job.training_of(self._prepared.trials[trial])
        return open_guard(training, self._policy, data, self._prepared.parameters[trial])

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_all(
        self, data: PartyData, chosen: list[NDArray[np.float32]], reservations: Reservations
    ) -> tuple[TuningResult, list[int]]:
        """Return the scores, which are none at a passive party, and each training's rounds."""
        job, trials, done, rounds = self._job, self._prepared.trials, [], []
        metric = self._prepared.parameters[0].metrics[-1]
        for t, trial in enumerate(trials):
            started, scores = time.perf_counter(), []
            for f, weights in enumerate(chosen):
                with in_trial(t + 1, len(trials), f + 1, job.folds):
                    part, rows = self._train(data, t, weights, reservations)
                rounds.append(part.n_rounds)
                scores.append(
                    _score_of(part, rows) if self._is_active else FoldScore(0.0, part.n_rounds, part.n_rounds)
                )
            done.append(TrialResult(t + 1, trial, tuple(scores), time.perf_counter() - started))
            self._say(TuningResult(metric, tuple(done)), data)
        return TuningResult(metric, tuple(done)), rounds

    def _say(self, so_far: TuningResult, data: PartyData) -> None:
        last, n_trials, say = so_far.trials[-1], len(self._prepared.trials), self._attempt.progress.say
        if self._is_active:
            say(line_of(last, n_trials, so_far.metric, so_far.best))
            show_so_far(self._attempt.folder.path, self._facts(so_far, data))
        else:
            say(f"trial {last.number} of {n_trials}: answered for {self._job.folds} folds, {last.seconds:.1f} s")

    def _facts(self, result: TuningResult, data: PartyData) -> TuningFacts:
        attempt, names = self._attempt, data.train.table.feature_names
        n_trials = len(self._prepared.trials)
        return facts_of(result, self._job, attempt.context.job_id, attempt.channel.world, names, n_trials)

    def _train(
        self, data: PartyData, trial: int, weights: NDArray[np.float32], reservations: Reservations
    ) -> tuple[TrainedPart, list[RoundRow]]:
        attempt, rows = self._attempt, data.train
        sets = [rows, dataclasses.replace(rows, name="eval")]
        if self._is_active:
            sets = [_weighed(one, weight) for one, weight in zip(sets, (weights, 1 - weights), strict=True)]
        training = self._job.training_of(self._prepared.trials[trial])
        whole = PartyData(tuple(sets))
        start = VerticalContext(
            dataclasses.replace(attempt, job=training, progress=Silent(), rounds=[]),
            whole,
            self._prepared.parameters[trial],
            reservations,
            self._notes,
            self._arithmetic,
            self._prepared.base.scheme,
            guard=None if self._is_active else self._guard(whole, trial),
            workers=self._workers,
        )
        part = (ActiveSite(start) if self._is_active else PassiveSite(start)).run()
        return part, start.attempt.rounds

    # -- after training -----------------------------------------------------------------------------------------------

    def _finish(
        self, data: PartyData, reservations: Reservations, result: TuningResult, rounds: list[int]
    ) -> JobResult:
        attempt, job, table = self._attempt, self._job, data.train.table
        hmac = attempt.conclude(json.dumps(rounds).encode(), "rounds of all trainings")
        of_workers = () if self._workers is None else (work_section(self._workers.work),)
        sections: tuple[ReportSection, ...] = (_notes(job.active), *of_workers)
        message = "the scores are at the active party"
        if self._is_active:
            folder, facts = attempt.folder.path, self._facts(result, data)
            write_results(folder, result, job, facts)
            sections = (section_of(facts), *sections)
            best = result.best
            message = (
                f"trial {best.number} is best ({result.metric} {best.mean:.6g}); the table is {folder / TUNING_PAGE}"
            )
        attempt.all_have_written()
        reservations.complete(sum(rounds))
        shown = self._prepared.parameters[result.best.number - 1 if self._is_active else 0].agreed
        attempt.write_record(
            TITLE,
            shown,
            None,
            sections,
            registry=reservations.message,
            data=(DataFacts.of(table, job.data_set),),
        )
        return JobResult(hmac.hex(), message, {"trials": len(result.trials), "folds": job.folds})


def _weighed(rows: PartySet, weight: NDArray[np.float32]) -> PartySet:
    return dataclasses.replace(rows, table=dataclasses.replace(rows.table, weight=weight))


def _score_of(part: TrainedPart, rows: list[RoundRow]) -> FoldScore:
    """Return a training's score: at its best round where it stops early, else after its last."""
    best = len(rows) - 1 if part.best_round is None else part.best_round
    return FoldScore(list(rows[best].metrics.values())[-1], best + 1, part.n_rounds)


def _notes(active: str) -> ReportSection:
    return ReportSection(
        "What was trained",
        (
            f"Each trial was trained once for each fold on all other rows, and scored on the fold's at {active}, which "
            "drew the folds from a secret of its own. Other parties learn neither folds nor scores.",
            "No model was kept. There the file train_best.py writes the job that trains the best parameters on all "
            "rows.",
        ),
    )


run_vertical_tuning_site = SitePart(
    prepare,
    lambda attempt, prepared: _Run(attempt, prepared).run(),
    protection=lambda job, prepared: vertical_site.protection(job.training_of(prepared.trials[0]), prepared.base),
    uses_cluster=True,
)
"""Takes part in one attempt of a job, as the active or as a passive party.

A tuning that is broken off leaves no result; the active party's log says which trials were done, with their scores.
"""
