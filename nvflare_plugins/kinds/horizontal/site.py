"""One site's part in a horizontal job, from its policy to its model.

Nothing that depends on rows leaves the site before the policy has allowed the job, all sites are authenticated and
their terms are equal.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import LOST_SITE_FIELDS, CannotGoOn, Earlier, JobResult, SiteContext, waiting_s
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.attempt.site_attempt import Reservations, SiteAttempt, SitePart, gone_on
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.base.formatting import counted
from nvflare_plugins.data.declaration import EXTERNAL, DataSet
from nvflare_plugins.data.table import Table
from nvflare_plugins.evidence.audit import forgets_fact, grown_fact, word_fact
from nvflare_plugins.evidence.reader import named
from nvflare_plugins.growth.model import n_rounds_of
from nvflare_plugins.growth.training import Draws, LoopSettings
from nvflare_plugins.kinds.horizontal import going_on
from nvflare_plugins.pages.run_record import EVALUATION, DataFacts, ReportSection, RoundRow
from nvflare_plugins.pages.run_record import FILE_NAME as RECORD
from nvflare_plugins.pooled.attempt import Agreement, PooledAttempt
from nvflare_plugins.pooled.growing import POOLED_ROWS, GrownTraining, grown_by, is_grown
from nvflare_plugins.pooled.job import SCORE_BINS, TIME_BINS, WORD_BITS, HorizontalJob
from nvflare_plugins.pooled.mediated.engine import MediatedEngine
from nvflare_plugins.pooled.preparation import Prepared, allow, check_start
from nvflare_plugins.pooled.row_floors import counts_leaves, may_grow, row_fraction
from nvflare_plugins.pooled.shards import RoundWatch, ShardedRows, why_in_one_process
from nvflare_plugins.pooled.spans import on_grid, search_times
from nvflare_plugins.pooled.value_bounds import check_weights, coarsest_pairs
from nvflare_plugins.scoring.columns import auc, average_precision, kolmogorov_smirnov
from nvflare_plugins.site.memory.registry import ResumePoint, Wanted, describe_draw
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind, pack_list
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import workers_of
from nvflare_plugins.workers.workers import Workers, evaluated_elsewhere, in_own_process, shards_line
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.continuation import check_initial_model, keep_thresholds
from nvflare_plugins.xgb.cuts import Cuts, shortest_between
from nvflare_plugins.xgb.matrices import (
    as_weighed,
    bins_below,
    evaluation_matrix,
    page_files,
    training_matrix,
    unlabelled_blocks,
)
from nvflare_plugins.xgb.model_json import PARTS_ATTRIBUTE, check_lists, finished, with_attribute, without_lists
from nvflare_plugins.xgb.objectives import COX
from nvflare_plugins.xgb.parameters import TrainingParameters, with_floor
from nvflare_plugins.xgb.rounds import RoundRecord, TrainingResult

TITLE = "Horizontal federated XGBoost"

_log = logging.getLogger(__name__)


# What a site checks and loads by itself, before it talks to anyone.


# Fields of a job that do not change what a run releases about the rows, or only how much of it.
_NOT_RELEASED = (
    "num_rounds",
    "checkpoint_every",
    "resume_from",
    "tracking",
    "deadline_s",
    "early_stopping_rounds",
    "forgets",
    *LOST_SITE_FIELDS,
)


@dataclass(frozen=True, slots=True)
class PreparedTraining:
    """What a site knows before it talks to anyone.

    Attributes:
        rows: tables, data sets and profile.
        continues: the jobs whose model training continues (``continue_from``), the last first.
        course: of a job that may go on without a site.
        lost: sites without which this attempt goes on.
    """

    rows: Prepared
    initial_model: bytes | None
    earlier: Earlier
    continues: tuple[str, ...] = ()
    course: going_on.Course | None = None
    lost: tuple[str, ...] = ()


def prepare(job: HorizontalJob, context: SiteContext) -> PreparedTraining:
    """Check the job against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        CannotGoOn: it forbids to go on without the sites that are lost.
        ConfigurationError: job, parameters, data or the installed XGBoost are not usable; the message says which.
    """
    policy = context.policy
    course = going_on.course_of(job, context)
    lost = () if course is None else course.without(context.sites)
    if course is not None and lost:
        going_on.check_left(policy, context.sites, lost, course)
    allowed = allow(job, context, on_cluster=True)
    if course is not None:
        if context.number == 1:
            going_on.check_left(policy, context.sites, lost, course)
        going_on.check_can_go_on(policy, allowed.parameters, policy.min_rows_per_node)
    if job.pooled_metrics:
        _check_pooled(policy, allowed.parameters, [allowed.data_set, allowed.eval_set])
    start = _start(job, context)
    if start is not None:
        check_initial_model(start.model, start.name, allowed.parameters, allowed.columns["features"])
        check_lists(start.model, start.name, job.categories, job.label_classes)
        check_start(context, start.model, start.jobs)
    earlier = Earlier.of(context, job.resume_from)
    if not allowed.is_grown:  # whose sums are the same for any number of shards
        _check_shards(earlier, allowed.n_shards)
    rows = allowed.load()
    if job.pooled_metrics and rows.eval_table is not None and not np.isin(rows.eval_table.label, (0.0, 1.0)).all():
        raise DataRefusal("pooled_metrics counts rows of two classes, and the evaluation labels lie between them")
    model, jobs = (None, ()) if start is None else (without_lists(start.model), start.jobs)
    return PreparedTraining(rows, model, earlier, jobs, course, lost)


def _check_shards(earlier: Earlier, n_shards: int) -> None:
    """Refuse to go on with rows in other shards, whose sums may be rounded otherwise. Raises: ConfigurationError."""
    for folder in (earlier.resumed, earlier.own):
        if folder is not None and folder.checkpoints() and folder.read_shards() != n_shards:
            raise ConfigurationError(
                f"the policy gives the data set {n_shards} workers, and job {folder.path.name} had "
                f"{folder.read_shards()}, so that its rounds may not be continued to the last bit. Policy key: "
                "cluster.workers. Remedy: set it as it was, or start a new job."
            )


@dataclass(frozen=True, slots=True, repr=False)
class _Start:
    """A model that training continues: its name for messages, and the jobs that made it."""

    model: bytes
    name: str
    jobs: tuple[str, ...] = ()


def _start(job: HorizontalJob, context: SiteContext) -> _Start | None:
    """Return the model that training continues, if there is one. Raises: PolicyRefusal, ConfigurationError."""
    if job.initial_model is not None:
        return _Start(context.policy.input_file(job.initial_model).read_bytes(), job.initial_model)
    if job.continue_from is None:
        return None
    path = RunFolder(context.runs, job.continue_from).path / MODEL
    if not path.is_file():
        raise ConfigurationError(
            f"{context.site} has no model of job {job.continue_from} (continue_from) among its runs: copy model.json "
            "of another site's run, which is the same at all sites, into the folder of that name (policy key: runs)."
        )
    return _Start(path.read_bytes(), f"{MODEL} of job {job.continue_from}", _chain(context.runs, job.continue_from))


def _chain(runs: Path, job_id: str) -> tuple[str, ...]:
    """Return a job and those before it whose models it continued, as far as this site has their records."""
    found: list[str] = []
    earlier: object = job_id
    while isinstance(earlier, str) and earlier not in found:
        found.append(earlier)
        record = RunFolder(runs, earlier).path / RECORD
        try:
            settings = json.loads(record.read_bytes())["settings"]
            earlier = settings.get("continue_from")
        except FileNotFoundError:
            break
        except (OSError, ValueError, KeyError, AttributeError, RecursionError):
            raise ConfigurationError(f"{RECORD} of job {found[-1]} cannot be read: restore it") from None
    return tuple(found)


def _check_pooled(policy: SitePolicy, parameters: TrainingParameters, sets: Sequence[DataSet | None]) -> None:
    """Check that rows may be counted by the model's scores. Raises: PolicyRefusal, ConfigurationError."""
    if parameters.objective.name not in SCORED_OBJECTIVES:
        raise ConfigurationError(f"pooled_metrics is for objectives {', '.join(SCORED_OBJECTIVES)}: leave it out")
    policy.check_consent(
        "score_histogram",
        "does not count its evaluation rows by the model's scores for other sites",
        "leave pooled_metrics out",
    )
    for one in filter(None, sets):
        policy.check_no_budget(one.name, "counts by scores are", "leave pooled_metrics out")


class TrainingAttempt(PooledAttempt):
    """The steps of one attempt once its session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: PreparedTraining, workers: Workers | None):
        self._job: HorizontalJob = attempt.job
        grown = is_grown(self._job, prepared.rows.parameters)
        super().__init__(attempt, prepared.rows, self._job, is_grown=grown, workers=workers)
        self._prepared, self._course = prepared, prepared.course
        self._going_on: going_on.GoingOn | None = None
        self._n_done = 0  # finished rounds of the last common checkpoint
        self._n_rows = 0  # pooled training rows, or more, once they are counted
        self._n_times = 0  # most bins of times of any set, of survival:cox

    def run(self) -> JobResult:
        """Agree, train, compare models, write results."""
        agreement = self.begin()
        self._n_rows = int(agreement.rows[0])
        with self._page_files() as pages:
            result = self._train(agreement, pages)
        return self._finish(result, agreement.cuts, self._sections(agreement.sums, result.model))

    # -- before training ----------------------------------------------------------------------------------------------

    def _starts(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        start, checkpoints, earlier, hmac = {}, {}, self._prepared.earlier, self._attempt.session.hmac
        if self._prepared.initial_model is not None:
            start["initial_model"] = hmac("initial model", self._prepared.initial_model).hex()
        cuts = {folder: _cuts_of(folder) for folder in (earlier.resumed, earlier.own) if folder is not None}
        for number, path in earlier.checkpoints().items():
            folder = earlier.folder_of(number)
            kept = pack_list([path.read_bytes(), b"" if folder is None else cuts[folder]])
            checkpoints[str(number)] = hmac("checkpoint", kept).hex()
        return start, checkpoints

    def _take_terms(self, n_done: int) -> None:
        """Find out from where this attempt goes on, and without whom. Raises: CannotGoOn."""
        self._n_done = n_done
        if self._course is not None:
            going_on.check_can_go_on(self._policy, self._parameters, self._floors.rows_per_node)
            if self._context.number > 1:
                checkpoint, n_sets = self._prepared.earlier.checkpoints().get(n_done), len(self._tables())
                self._going_on = going_on.agree_to_go_on(
                    self._attempt, self._course, n_done, checkpoint, self._floors, self._parameters, n_sets
                )
            if self._going_on is not None:
                self._floors = self._going_on.floors
            self._course.join(self._context.sites)
        if self._job.weight is None:  # with weights it takes a private message to know
            self._parameters = with_floor(self._parameters, self._floors.rows_per_node)

    def _wanted(self) -> list[Wanted]:
        # Rounds draw from the training rows alone. Metrics of the evaluation set are sums over its rows, and can be
        # subtracted like any other.
        fractions = [row_fraction(self._parameters), 1.0]
        draws = [describe_draw(fraction, self._job.weight, self._job.query) for fraction in fractions]
        sets = zip(self._rows.tables(), draws, strict=False)
        wanted = [Wanted(*one_set, draw=draw, is_settled=True) for one_set, draw in sets]
        # The training set alone: other rows can be evaluated under another name.
        grows = may_grow(self._rows.table, draws[0], self._parameters)
        wanted[0] = dataclasses.replace(wanted[0], may_grow=grows, continues=self._prepared.continues)
        whom = (self._rows.to_forget, self._rows.eval_to_forget)
        return [dataclasses.replace(one, forgets=forgets) for one, forgets in zip(wanted, whom, strict=False)]

    def _release(self) -> dict[str, object]:
        job, parameters = self._job, self._rows.parameters
        # Registries of before know jobs by XGBoost without the two fields.
        without = _NOT_RELEASED if self._is_grown else (*_NOT_RELEASED, "engine", "arithmetic")
        # Of before, too: they know jobs without these fields.
        without = without if job.word_bits != WORD_BITS else (*without, "word_bits")
        without = without if job.time_bins != TIME_BINS else (*without, "time_bins")
        without = (*without, "compare_queries") if job.query is not None else (*without, "compare_queries", "query")
        fields = {name: value for name, value in job.to_dict().items() if name not in without}
        return {"job": fields, "parameters": parameters.document(), "rows_per_node": self._floors.rows_per_node}

    def _resume(self, n_done: int) -> ResumePoint | None:
        resume = self._prepared.earlier.point(n_done)
        if resume is None:
            return None
        _log.info("going on with job %s after %d rounds", resume.job_id, n_done)
        return resume if self._going_on is None else dataclasses.replace(resume, lost=self._going_on.lost)

    def _reserve(self, n_done: int) -> Reservations:
        reservations = super()._reserve(n_done)
        if self._course is not None:
            self._course.note_earlier_jobs(reservations.entries, self._policy.consents)
        return reservations

    def _check_floors(self, sums: ProtectedSums) -> None:
        """Check them once: an attempt without a site asks for no sum that does not depend on the model."""
        if self._going_on is None:
            super()._check_floors(sums)
        else:
            self._take_largest_weights(self._going_on.set_up.largest)

    def _take_largest_weights(self, largest: Sequence[float]) -> None:
        """Keep nodes large, whatever rows weigh.

        Raises:
            DataRefusal: the job's own number is too small. The one that it needs follows from the largest weight, and
                any column may be named as the weight: others are not told, and each such job counts.
        """
        if self._job.weight is None:
            return
        try:
            self._parameters = with_floor(self._parameters, self._floors.rows_per_node, largest[0])
        except PolicyRefusal as error:
            raise DataRefusal(str(error)) from None

    def _kept_cuts(self, n_done: int) -> Cuts | None:
        folder = self._prepared.earlier.folder_of(n_done)
        return None if folder is None else folder.read_cuts()

    def _with_own_thresholds(self, cuts: Cuts) -> Cuts:
        model = self._prepared.initial_model
        return cuts if model is None else keep_thresholds(cuts, model, self._rows.parameters.max_bin)

    def _agree_on_cuts(self, sums: ProtectedSums, n_done: int) -> Agreement:
        if self._going_on is None:
            agreement = super()._agree_on_cuts(sums, n_done)
            self._round_times(sums)
            return agreement
        kept = self._kept_cuts(n_done)
        if kept is None:
            raise CannotGoOn("the cut points of the attempt before are gone")
        return Agreement(sums, kept, self._going_on.set_up.root_feature, np.zeros(1, dtype=np.int64))

    def _round_times(self, sums: ProtectedSums) -> None:
        """Round times to grids that the sites agree on, one for each set of rows, of survival:cox."""
        rows = self._rows
        if rows.parameters.objective.name != COX:
            return
        grids = [self._grid_of_times(sums, number, table) for number, (table, _) in enumerate(rows.tables())]
        self._n_times = 1 + max(edges.size for edges in grids)
        evaluated = None if rows.eval_table is None else on_grid(rows.eval_table, grids[-1])
        self._rows = dataclasses.replace(rows, table=on_grid(rows.table, grids[0]), eval_table=evaluated)

    def _grid_of_times(self, sums: ProtectedSums, number: int, table: Table) -> NDArray[np.float32]:
        """Search the grid of a set's times, or take that of an earlier job of the same sites."""
        job, entry = self._job, self._reservations.entries[number]
        name = f"{table.label_name} (upper)"  # the column of data/identity.py that holds the times of events
        least, most, (largest, _) = max(self._floors.rows_per_node, job.min_rows_per_cut), job.time_bins, self._found
        settings = json.dumps({"time_bins": most, "min_rows": least, "weight": job.weight}).encode()
        to_search, known = self._planned_search(entry, [name], settings)
        if known is not None:
            return known[name]
        found = search_times(sums, table, least, most, largest[number], self._world)
        self._remember_cuts(entry, to_search, {name: found})
        _log.info("agreed on %d bins of times of at least %d events", found.size + 1, least)
        return found

    # -- training -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _page_files(self) -> Iterator[Path | None]:
        """Keep bins in files for as long as the site's policy wants it."""
        sets = [spec for _, spec in self._rows.tables()]
        if all(one.memory != EXTERNAL for one in sets):
            yield None
            return
        with page_files(self._attempt.folder.path) as folder:
            yield folder

    def _train(self, agreement: Agreement, pages: Path | None) -> TrainingResult:
        job, initial, n_done = self._job, self._initial(), self._n_done
        self._take_scales(agreement.sums)
        self._begin_course(agreement.sums, agreement.root_feature, initial)
        # A site must note that it enters a state (going_on.py) before it sends the first sum there.
        rides = bool(self._arithmetic) and agreement.sums.takes_metrics and self._course is None
        settings = LoopSettings(job.num_rounds - n_done, job.early_stopping_rounds, n_done, metrics_ride=rides)
        by = self._by_sites if self._arithmetic else self._by_xgboost
        return by(agreement, settings, initial, pages, RoundWatch(self._is_kept, self._after_round))

    def _by_sites(
        self, agreement: Agreement, settings: LoopSettings, initial: bytes | None, pages: Path | None, watch: RoundWatch
    ) -> TrainingResult:
        """Train with trees that the sites grow themselves."""
        evaluated, draws, table = self._evaluated(), self._draws(), self._rows.table
        names, sets = tuple(name for _, name in evaluated), [one for one, _ in evaluated]
        grown = self._grown(self._parameters, agreement.cuts, self._n_rows, table, names)
        grown = dataclasses.replace(grown, n_times=self._n_times)
        training = GrownTraining(grown, agreement.sums, self._attempt.channel, settings, draws, initial)
        if self._workers is not None:
            return training.at_workers(self._workers, ShardedRows(table, sets, draws), watch)
        kept = [("train", True), *((name, one is not None) for one, name in evaluated)]
        folders = [self._bins_below(pages, name) if is_own else None for name, is_own in kept]
        files = [None if folder is None else folder / "bins.page" for folder in folders]
        return training.here(training.rows(sets, files), watch)

    def _by_xgboost(
        self, agreement: Agreement, settings: LoopSettings, initial: bytes | None, pages: Path | None, watch: RoundWatch
    ) -> TrainingResult:
        """Train with stock XGBoost beside a mediator."""
        evaluated, draws, table = self._evaluated(), self._draws(), self._trained_rows()
        names, sets = tuple(name for _, name in evaluated), [one for one, _ in evaluated]
        max_bin, least = self._parameters.max_bin, self._counted_leaves(self._parameters)
        engine = MediatedEngine.of(self._attempt, agreement, table, max_bin)
        training = engine.training(self._parameters, table, settings, draws, least, names, initial)
        if self._workers is not None:
            _log.info("%s", shards_line(table.n_rows, len(self._workers)))
            return training.at_workers(self._workers, ShardedRows(table, sets, draws), watch)
        matrix = training_matrix(table, agreement.cuts, max_bin, self._bins_below(pages, "train"))

        def scored(one: Table) -> xgb.DMatrix:
            return evaluation_matrix(as_weighed(one), matrix, max_bin, self._bins_below(pages, "eval"))

        return training.here(matrix, [matrix if one is None else scored(one) for one in sets], watch)

    def _bins_below(self, pages: Path | None, name: str) -> Path | None:
        """Return where the bins of a set are kept, if the site's policy does not want them held."""
        spec = self._rows.data_set if name == "train" else self._rows.eval_set
        return None if spec is None else bins_below(pages, name, spec)

    def _take_scales(self, sums: ProtectedSums) -> None:
        """Agree on the scales of sums, or take those of the attempt before."""
        parameters, weighted = self._parameters, self._rows.table.weight is not None
        if self._going_on is not None:
            scales = dict(self._going_on.set_up.scales)
            self._n_rows = (1 << scales.pop(POOLED_ROWS, 0)) - 1
            sums.take_scales(scales, coarsest_pairs(parameters, weighted=weighted))
        else:
            self._agree_scales(sums, parameters, self._tables())
        check_weights(sums, parameters, weighted=weighted, n_rows=self._n_rows if self._arithmetic else None)

    def _begin_course(self, sums: ProtectedSums, root_feature: int | None, initial: bytes | None) -> None:
        """Keep what an attempt without one of the sites must not ask for again, before sums of a state are sent."""
        course, sites, n_done = self._course, self._context.sites, self._n_done
        if course is None:
            return
        course.has_moved = going_on.GradientMoves(self._trained_rows(), self._parameters, self._draws()).have_moved
        if self._going_on is None:
            scales = sums.scales() | ({POOLED_ROWS: self._n_rows.bit_length()} if self._arithmetic else {})
            course.begin(going_on.SetUp(sites, root_feature, *self._found, self._floors, scales), n_done)
        if initial is not None and n_done < self._job.num_rounds:
            course.enter(initial, sites, n_done)
        if self._going_on is not None:
            self._attempt.folder.drop_checkpoints_after(n_done)
            course.go_on(sites, n_done, self._going_on.step)

    def _evaluated(self) -> tuple[tuple[Table | None, str], ...]:
        """Return rows and name of each evaluation set; no rows stand for the training rows."""
        if self._going_on is not None:  # how many rows were evaluated would tell of the lost site's
            return ()
        table = self._rows.eval_table
        sets: tuple[tuple[Table | None, str], ...] = ((None, "train"),) if self._job.evaluate_training else ()
        return sets if table is None else (*sets, (table, "eval"))

    def _initial(self) -> bytes | None:
        """Return the model that training continues, if there is one."""
        if self._going_on is not None:
            return self._going_on.model
        checkpoint = self._prepared.earlier.checkpoints().get(self._n_done)
        return self._prepared.initial_model if checkpoint is None else checkpoint.read_bytes()

    def _draws(self) -> Draws | None:
        sites = self._context.sites if self._going_on is None else self._going_on.set_up.sites
        return self._draws_of(self._parameters, self._trained_rows(), sites)

    def _trained_rows(self) -> Table:
        return self._rows.table if self._arithmetic else as_weighed(self._rows.table)

    def _is_kept(self, n_done: int) -> bool:
        """Tell whether the model after so many rounds is kept as a checkpoint."""
        job = self._job
        every = job.checkpoint_every if waiting_s(job) is None else 1  # else a lost site would cost more than a round
        return bool(every) and n_done % every == 0

    def _after_round(self, record: RoundRecord, model: bytes | None) -> None:
        """Take note of a round. Args: model: so far, where it is kept."""
        job, attempt, n_done = self._job, self._attempt, record.round + 1
        stages = {"xgboost": record.xgboost_s, "protect": record.protect_s, "network": record.network_s}
        row = RoundRow(record.round, record.seconds, record.metrics, stages)
        attempt.round_done(row)
        if model is not None:
            # The registry first: it lets a lost job resume from no later tree than it knows of.
            self._reservations.trees_complete(n_done)
            attempt.folder.write_checkpoint(n_done, model)
            if self._course is not None and n_done < job.num_rounds:
                self._course.enter(model, self._context.sites, n_done)
        attempt.progress(row, job.num_rounds)

    # -- after training -----------------------------------------------------------------------------------------------

    def _sections(self, sums: ProtectedSums, model: bytes) -> tuple[ReportSection, ...]:
        """Return the metrics on the evaluation rows of all sites, if the job asks for them, and what workers did."""
        table, of_workers = self._rows.eval_table, self._work_sections()
        if not self._job.pooled_metrics or table is None:
            return of_workers
        return pooled_section(self._attempt, sums, xgb.Booster(model_file=bytearray(model)), table), *of_workers

    def _finish(self, result: TrainingResult, cuts: Cuts, sections: tuple[ReportSection, ...]) -> JobResult:
        job, attempt = self._job, self._attempt
        n_rounds = n_rounds_of(json.loads(result.model))
        names = self._rows.table.feature_names
        model = finished(self._marked(result.model), names, job.categories, job.label_classes)
        hmac = attempt.conclude(model, MODEL)
        path = attempt.folder.write_model(model)
        attempt.all_have_written()
        attempt.folder.drop_checkpoints()
        self._reservations.complete(n_rounds)
        attempt.write_record(
            TITLE,
            self._parameters.agreed,
            path.name,
            sections,
            **self._record_of(cuts),
            best_round=result.best_round,
            notes=self._notes(),
            data=self._data(),
        )
        return JobResult(hmac.hex(), f"the model is {path}", {"n_rounds": n_rounds})

    def _marked(self, model: bytes) -> bytes:
        """Return a model that says who trained which of its rounds, if these were not always all sites."""
        if self._going_on is None or self._course is None:
            return model
        said = {"job": self._context.job_id, "parts": [dataclasses.asdict(p) for p in self._course.parts]}
        return with_attribute(model, PARTS_ATTRIBUTE, json.dumps(said, sort_keys=True))

    def _data(self) -> tuple[DataFacts, ...]:
        used = [DataFacts.of(self._rows.table, self._job.data_set)]
        if self._rows.eval_table is not None:
            used.append(DataFacts.of(self._rows.eval_table, str(self._job.eval_data_set), EVALUATION))
        return tuple(used)

    def _notes(self) -> tuple[str, ...]:
        """Return what the sites' policies and their sampling have made of the job, for the report."""
        k, notes = self._floors.rows_per_node, [grown_by(self._arithmetic)]
        if self._parameters is not self._rows.parameters:
            weight = f"min_child_weight is {self._parameters.agreed['min_child_weight']:g}"
            notes.append(f"{weight}: the sites' policies ask for at least {k} rows in every node.")
        if self._n_times:
            least = max(k, self._job.min_rows_per_cut)
            notes.append(
                f"Times were rounded to at most {self._n_times} bins a set, each of at least {least} pooled events; "
                "events of one bin are tied (Breslow)."
            )
        if counts_leaves(self._parameters, k):
            notes.append(
                f"The rows of every leaf were counted over all sites after each tree: none has fewer than {k}."
            )
        if self._context.number > 1:
            notes.append(gone_on(self._context.number, self._attempt.rounds))
        if self._going_on is not None and self._course is not None:
            notes.append(f"The job went on without {', '.join(self._going_on.lost)}; its rounds were not evaluated.")
            notes += going_on.told(self._course.parts, self._job.num_rounds)
        if self._job.forgets is not None:
            notes.append(self._forgotten())
        if row_fraction(self._parameters) < 1:
            notes.append("Each site drew the rows of each round from a secret of its own, not from the job's seed.")
        return tuple(notes)

    def _forgotten(self) -> str:
        """Return whose rows this site has left out, in numbers, for its own report."""
        sets = zip(self._rows.tables(), (self._rows.to_forget, self._rows.eval_to_forget), strict=False)
        whom = [(spec.name, forgets.persons.size) for (_, spec), forgets in sets if forgets is not None]
        counts = "; ".join(f"of data set {name}, {counted(n, 'person')}" for name, n in whom)
        return f"Trained again without persons, in the place of job {self._job.forgets}. Left out here {counts}."


def _cuts_of(folder: RunFolder) -> bytes:
    """Return the cut points that a run has kept, as bytes; none if it has none."""
    cuts = folder.read_cuts()
    return b"" if cuts is None else json.dumps(cuts.to_lists()).encode()


def _take_part(attempt: SiteAttempt, prepared: PreparedTraining) -> JobResult:
    policy, data_set = attempt.context.policy, attempt.job.data_set
    reason = why_in_one_process(prepared.rows.parameters)
    attempt.notes += in_own_process(policy, data_set, reason)
    attempt.notes += evaluated_elsewhere(policy, data_set, attempt.job.eval_data_set)
    with (
        nullcontext() if reason else workers_of(policy, data_set) as workers,
        watched(workers, attempt.progress) as attempt.progress,
    ):
        attempt.folder.write_shards(1 if workers is None else len(workers))
        return TrainingAttempt(attempt, prepared, workers).run()


run_site = SitePart(
    prepare,
    _take_part,
    lambda job: (job.data_set, job.eval_data_set),
    lambda job, prepared: {
        **prepared.rows.chosen.facts,
        **named(prepared.lost),
        **grown_fact(by_sites=is_grown(job, prepared.rows.parameters)),
        **word_fact(job.word_bits),
        **forgets_fact(job.forgets),
    },
    uses_cluster=True,
)
"""Takes part in one attempt of a job.

After a failure the site's checkpoints stay; its model is there only if the last step failed, when all sites had
agreed on it.

Privacy: the server has seen the rounds pass and may know their number. Metrics, and what follows from them, it gets
    only if they are streamed.
"""


# Metrics of the final model on the evaluation rows of all sites, from counts by bins of the predicted probability.
#
# XGBoost averages the sites' areas under curves, which is not the area on the pooled rows. Here the sites count the
# rows of each class in bins that are the same for all, and add the counts as they add histograms. One site makes the
# bins, that which can fill most: each holds at least k of its own rows of either class, and so do the pooled bins. k is
# the largest min_rows_per_cut of the job and any site's policy; an edge is the shortest decimal between two scores.
#
# Privacy: needs the consent ``score_histogram`` of every site. The server sees sealed messages and protected sums. The
# sites learn how many such bins each could fill (64 at most), the edges, and the pooled counts. Rows count as one each.


SCORED_OBJECTIVES = ("binary:logistic", "binary:logitraw")
_MOST_LEAST = 1 << 53  # as of any number in a policy
_WORD = 8  # bytes
_TITLE = "Metrics on the evaluation rows of all sites"
_TOO_FEW = "No site has evaluation rows enough for two bins with {} rows of each class: nothing was counted."
_NOTE = (
    "From counts by bins of the predicted probability, rows counting as one each. Where rows of both classes share a "
    "bin their order is unknown, so that the metrics lie between two numbers."
)

Scores = NDArray[np.float32]


def pooled_section(attempt: SiteAttempt, sums: ProtectedSums, booster: xgb.Booster, table: Table) -> ReportSection:
    """Count with all sites, and return what the report says.

    Args:
        table: this site's evaluation rows.

    Raises:
        ProtocolError: a site's edges are none, or hold fewer rows than it has said.
    """
    scores, is_positive = _probabilities(booster, table), table.label == 1
    own = max(attempt.context.policy.min_rows_per_cut, attempt.job.min_rows_per_cut)
    least = max(_gathered_whole(attempt, "least rows of a bin of scores", own, _MOST_LEAST))
    edges = edges_of(scores, is_positive, least)
    n_bins = _gathered_whole(attempt, "bins of scores", edges.size + 1, SCORE_BINS)
    if max(n_bins) < 2:
        return ReportSection(_TITLE, (_TOO_FEW.format(least),))
    chosen = n_bins.index(max(n_bins))
    # Nothing of the same size from the others: the server does not learn whose edges they are.
    own_edges = edges.tobytes() if chosen == attempt.channel.rank else bytes(4 * (n_bins[chosen] - 1))
    found = attempt.gather_sealed("edges of scores", own_edges)[chosen]
    edges = _read_edges(found, n_bins[chosen])
    counts = np.concatenate([_counts(scores[~is_positive], edges), _counts(scores[is_positive], edges)])
    pooled = sums.sum_counts(Kind.SCORE_COUNTS, counts).reshape(2, -1)
    if pooled.min() < least:
        raise ProtocolError("a bin of scores holds fewer rows than the site that made the bins has said")
    classes = attempt.job.label_classes
    return _section(edges, pooled[0], pooled[1], "class 1" if classes is None else str(classes[1]))


def edges_of(scores: Scores, is_positive: NDArray[np.bool_], least: int) -> NDArray[np.float32]:
    """Return edges between bins that each hold at least ``least`` rows of both classes; none if there are too few.

    Shapes: scores: float32[n_rows]; is_positive: bool[n_rows]; result: float32[at most 63], ascending; a row is in the
        bin above an edge where its score is at least the edge.
    """
    n_positive = int(np.count_nonzero(is_positive))
    wanted = max(least, -(-min(n_positive, scores.size - n_positive) // SCORE_BINS))
    order = np.argsort(scores, kind="stable")
    ordered, positive = scores[order], np.cumsum(is_positive[order])
    negative = np.arange(1, scores.size + 1) - positive
    ends = np.flatnonzero(ordered[1:] > ordered[:-1])  # last rows before a greater score
    edges: list[np.float32] = []
    done_positive = done_negative = 0
    for end in ends:
        inside = min(positive[end] - done_positive, negative[end] - done_negative)
        above = min(n_positive - positive[end], negative[-1] - negative[end])
        if inside >= wanted and above >= least and len(edges) < SCORE_BINS - 1:
            above_end = np.nextafter(ordered[end], np.float32(np.inf))
            edges.append(shortest_between(above_end, ordered[end + 1]))
            done_positive, done_negative = positive[end], negative[end]
    return np.array(edges, dtype=np.float32)


def _probabilities(booster: xgb.Booster, table: Table) -> Scores:
    from scipy.special import expit

    if not table.n_rows:
        return np.empty(0, dtype=np.float32)
    margins = [booster.predict(block, output_margin=True) for block in unlabelled_blocks(table)]
    scores: Scores = expit(np.concatenate(margins).astype(np.float64)).astype(np.float32)
    return scores


def _gathered_whole(attempt: SiteAttempt, purpose: str, own: int, most: int) -> list[int]:
    """Return every site's number. Raises: ProtocolError, for what is none from 1 to ``most``."""
    contents = attempt.gather_sealed(purpose, min(own, most).to_bytes(_WORD, "little"))
    found = [int.from_bytes(content, "little") for content in contents if len(content) == _WORD]
    if len(found) != len(contents) or not all(1 <= number <= most for number in found):
        raise ProtocolError("a site's number for the bins of scores is none")
    return found


def _read_edges(content: bytes, n_bins: int) -> NDArray[np.float32]:
    if len(content) != 4 * (n_bins - 1):
        raise ProtocolError("a site's edges of scores are not as many as it has said")
    edges = np.frombuffer(content, dtype="<f4").astype(np.float32)
    if not np.isfinite(edges).all() or (np.diff(edges) <= 0).any() or edges[0] < 0 or edges[-1] > 1:
        raise ProtocolError("a site's edges of scores are not ascending probabilities")
    return edges


def _counts(scores: Scores, edges: NDArray[np.float32]) -> NDArray[np.int64]:
    places = np.searchsorted(edges, scores, side="right")
    return np.bincount(places, minlength=edges.size + 1).astype(np.int64)


def _section(
    edges: NDArray[np.float32], negative: NDArray[np.int64], positive: NDArray[np.int64], name: str
) -> ReportSection:
    """Return metrics, calibration and what a threshold at each edge would do."""
    n_negative, n_positive = int(negative.sum()), int(positive.sum())
    area = auc(negative, positive)
    figures = (
        f"AUC {area} ({(area.low + area.high) / 2:.4g} if rows of a bin tie); average precision (AUCPR) "
        f"{average_precision(negative, positive)}; Kolmogorov-Smirnov {kolmogorov_smirnov(negative, positive)}. "
        f"{n_negative + n_positive:,} rows, {n_positive:,} of them {name}."
    )
    bounds = ["0", *(f"{edge:.6g}" for edge in edges), "1"]
    rows = []
    for place, (low, high) in enumerate(pairwise(bounds)):
        above, false = int(positive[place:].sum()), int(negative[place:].sum())
        inside = int(positive[place] + negative[place])
        rows.append(
            (
                f"{low} to {high}",
                f"{inside:,}",
                f"{positive[place] / inside:.4g}",
                f"{above / n_positive:.4g}",
                f"{above / (above + false):.4g}",
                f"{(above + false) / (n_positive + n_negative):.4g}",
            )
        )
    columns = (
        "probability",
        "rows",
        f"share {name} (calibrated if within)",
        "recall of a threshold at its lower end",
        "its precision",
        "rows above it",
    )
    counts = zip([0.0, *map(float, edges)], map(int, negative), map(int, positive), strict=True)
    return ReportSection(_TITLE, (figures, _NOTE), columns, tuple(rows), scores=tuple(counts))
