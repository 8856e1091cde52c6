"""One site's part in a horizontal job, from its policy to its model.

Nothing that depends on rows leaves the site before the policy has allowed the job, all sites are authenticated and
their terms are equal.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import LOST_SITE_FIELDS, CannotGoOn, Earlier, JobResult, SiteContext, waiting_s
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.attempt.session import ARITHMETIC, PLUGIN, Terms, agree, versions
from nvflare_plugins.attempt.site_attempt import Reservations, SiteAttempt, SitePart, Wanted, gone_on, reserve_together
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.data.declaration import EXTERNAL, DataSet
from nvflare_plugins.data.schema import Schema
from nvflare_plugins.data.table import Table
from nvflare_plugins.evidence.audit import grown_fact, word_fact
from nvflare_plugins.evidence.reader import named
from nvflare_plugins.growth.arithmetic import grown_document
from nvflare_plugins.growth.training import LoopSettings
from nvflare_plugins.kinds.horizontal.going_on import (
    Course,
    GoingOn,
    GradientMoves,
    SetUp,
    agree_to_go_on,
    check_can_go_on,
    check_left,
    course_of,
    told,
)
from nvflare_plugins.kinds.horizontal.score_histogram import OBJECTIVES as SCORED
from nvflare_plugins.kinds.horizontal.score_histogram import pooled_section
from nvflare_plugins.pages.run_record import EVALUATION, DataFacts, ReportSection, RoundRow
from nvflare_plugins.pages.run_record import FILE_NAME as RECORD
from nvflare_plugins.pooled.cut_agreement import CutAgreement
from nvflare_plugins.pooled.growing import (
    POOLED_ROWS,
    Beginning,
    Grown,
    arithmetic_here,
    grown_by,
    is_grown,
    train_grown,
)
from nvflare_plugins.pooled.job import WORD_BITS, HorizontalJob
from nvflare_plugins.pooled.mediated.engine import Mediated
from nvflare_plugins.pooled.preparation import Prepared, allow
from nvflare_plugins.pooled.processors import open_sums
from nvflare_plugins.pooled.row_floors import (
    N_COUNTS,
    TOO_FEW,
    AddedRows,
    RowDraws,
    are_enough,
    check_effective_rows,
    counts_leaves,
    largest_weight,
    may_grow,
    row_fraction,
    rows_needed,
)
from nvflare_plugins.pooled.shard_rows import why_in_one_process
from nvflare_plugins.pooled.value_bounds import check_weights, coarsest_pairs, row_bounds, value_bounds
from nvflare_plugins.site.data_refusals import Question, RefusalCount
from nvflare_plugins.site.memory.registry import Registry, describe_draw
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import pack_list
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import workers_of
from nvflare_plugins.workers.workers import OnCluster, Workers, evaluated_elsewhere, in_own_process, work_section
from nvflare_plugins.xgb.continuation import check_initial_model, keep_thresholds
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.matrices import as_weighed, bins_below, page_files
from nvflare_plugins.xgb.model_json import PARTS_ATTRIBUTE, check_lists, finished, with_attribute, without_lists
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
    course: Course | None = None
    lost: tuple[str, ...] = ()

    def release(self, job: HorizontalJob, rows_per_node: int) -> bytes:
        """Return what decides what the run releases about the rows, for the registry.

        Args:
            rows_per_node: the floor that the sites have agreed on, which decides min_child_weight.
        """
        # Registries of before know jobs by XGBoost without the two fields.
        without = _NOT_RELEASED if is_grown(job, self.rows.parameters) else (*_NOT_RELEASED, "engine", "arithmetic")
        without = without if job.word_bits != WORD_BITS else (*without, "word_bits")  # of before, too
        fields = {name: value for name, value in job.to_dict().items() if name not in without}
        document = {"job": fields, "parameters": self.rows.parameters.document(), "rows_per_node": rows_per_node}
        return json.dumps(document, sort_keys=True).encode()


def prepare(job: HorizontalJob, context: SiteContext) -> PreparedTraining:
    """Check the job against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        CannotGoOn: it forbids to go on without the sites that are lost.
        ConfigurationError: job, parameters, data or the installed XGBoost are not usable; the message says which.
    """
    policy = context.policy
    course = course_of(job, context)
    lost = () if course is None else course.without(context.sites)
    if course is not None and lost:
        check_left(policy, context.sites, lost, course)
    allowed = allow(job, context, on_cluster=True)
    if course is not None:
        if context.number == 1:
            check_left(policy, context.sites, lost, course)
        check_can_go_on(policy, allowed.parameters, policy.min_rows_per_node)
    if job.pooled_metrics:
        _check_pooled(policy, allowed.parameters, [allowed.data_set, allowed.eval_set])
    start = _start(job, context)
    if start is not None:
        check_initial_model(start.model, start.name, allowed.parameters, allowed.columns["features"])
        check_lists(start.model, start.name, job.categories, job.label_classes)
    earlier = Earlier.of(context, job.resume_from)
    if not allowed.is_grown:  # whose sums are the same for any number of shards
        _check_shards(earlier, allowed.n_shards)
    rows = allowed.load()
    if job.pooled_metrics and rows.eval_table is not None and not np.isin(rows.eval_table.label, (0.0, 1.0)).all():
        raise DataRefusal("pooled_metrics counts rows of two classes, and the evaluation labels lie between them")
    if start is None:
        return PreparedTraining(rows, None, earlier, (), course, lost)
    return PreparedTraining(rows, without_lists(start.model), earlier, start.jobs, course, lost)


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
    if parameters.objective.name not in SCORED:
        raise ConfigurationError(f"pooled_metrics is for objectives {', '.join(SCORED)}: leave it out")
    policy.check_consent(
        "score_histogram",
        "does not count its evaluation rows by the model's scores for other sites",
        "leave pooled_metrics out",
    )
    for one in sets:
        if one is not None and one.privacy is not None:
            raise PolicyRefusal(
                f"data set {one.name!r} of {policy.site} has a privacy budget, and counts by scores are not charged to "
                f"it. Policy key: data_sets.{one.name}.privacy. Remedy: leave pooled_metrics out"
            )


# The steps of one attempt after the session is open.


class _Run:
    """The steps of one attempt after the session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: PreparedTraining, workers: Workers | None):
        self._attempt, self._prepared, self._workers = attempt, prepared, workers
        self._job: HorizontalJob = attempt.job
        self._context, self._channel, self._session = attempt.context, attempt.channel, attempt.session
        self._parameters = prepared.rows.parameters
        self._floors = self._context.policy.floors(len(self._context.sites))  # of all sites, once these have agreed
        self._registry = Registry.open(self._context.policy)
        self._reservations = Reservations(self._registry)
        self._going_on: GoingOn | None = None
        self._found: tuple[tuple[float, ...], tuple[int, ...]] = ((), ())  # largest weights; what was counted
        self._arithmetic = ""  # in which the sites grow the trees, once they have agreed; "" where XGBoost does
        self._n_rows = 0  # pooled training rows, or more, once they are counted

    def run(self) -> JobResult:
        """Agree, train, compare models, write results."""
        n_done, self._floors, self._arithmetic = agree(self._channel, self._session, self._terms())
        self._agree_to_go_on(n_done)
        if self._job.weight is None:  # with weights it takes a private message to know
            self._parameters = with_floor(self._parameters, self._floors.rows_per_node)
        self._reservations = self._reserve(n_done)
        if self._prepared.course is not None:
            self._prepared.course.note_earlier_jobs(self._reservations.entries, self._context.policy.consents)
        with self._reservations.cancelled_by(BaseException):  # keys may travel, nothing of rows
            job, chosen = self._job, self._prepared.rows.chosen
            sums = open_sums(chosen.profile, self._channel, self._session, job.finest_exponent, job.word_bits)
        if self._going_on is None:
            with self._reservations.cancelled_by(PolicyRefusal, DataRefusal):
                self._check_floors(sums)
        elif self._job.weight is not None:
            self._raise_child_weight(self._floors.rows_per_node, self._going_on.set_up.largest[0])
        cuts, root_feature = self._agree_on_cuts(sums, n_done)
        with self._page_files() as pages:
            result = self._train(sums, cuts, root_feature, n_done, pages)
        return self._finish(result, cuts, self._sections(sums, result.booster))

    # -- before training ----------------------------------------------------------------------------------------------

    def _terms(self) -> Terms:
        prepared, start, checkpoints = self._prepared, {}, {}
        if prepared.initial_model is not None:
            start["initial_model"] = self._session.hmac("initial model", prepared.initial_model).hex()
        earlier = prepared.earlier
        cuts = {folder: _cuts_of(folder) for folder in (earlier.resumed, earlier.own) if folder is not None}
        for number, path in earlier.checkpoints().items():
            folder = earlier.folder_of(number)
            kept = pack_list([path.read_bytes(), b"" if folder is None else cuts[folder]])
            checkpoints[str(number)] = self._session.hmac("checkpoint", kept).hex()
        job = self._job.to_dict()
        schema = Schema.of(prepared.rows.table)
        releases = {**versions(), PLUGIN: prepared.rows.chosen.release}
        document = prepared.rows.parameters.document()
        if is_grown(self._job, prepared.rows.parameters):
            releases[ARITHMETIC] = arithmetic_here(self._job)
            document = grown_document(prepared.rows.parameters)
        return Terms(releases, job, document, schema, start, checkpoints, self._floors)

    def _agree_to_go_on(self, n_done: int) -> None:
        """Find out, with the others, whether and from where this attempt goes on without a site. Raises: CannotGoOn."""
        prepared, course = self._prepared, self._prepared.course
        if course is None:
            return
        check_can_go_on(self._context.policy, self._parameters, self._floors.rows_per_node)
        if self._context.number == 1:
            course.join(self._context.sites)
            return
        checkpoint, n_sets = prepared.earlier.checkpoints().get(n_done), 2 - (prepared.rows.eval_table is None)
        self._going_on = agree_to_go_on(
            self._attempt, course, n_done, checkpoint, self._floors, self._parameters, n_sets
        )
        if self._going_on is not None:
            self._floors = self._going_on.floors
        course.join(self._context.sites)

    def _reserve(self, n_done: int) -> Reservations:
        """Have all sites' registries allow this run and remember it, before the first private byte."""
        job, prepared = self._job, self._prepared
        # Rounds draw from the training rows alone. Metrics of the evaluation set are sums over its rows, and can be
        # subtracted like any other.
        fractions = [row_fraction(self._parameters), 1.0]
        draws = [describe_draw(fraction, job.weight) for fraction in fractions]
        sets = zip(prepared.rows.tables(), draws, strict=False)
        wanted = [Wanted(*one_set, draw=draw, is_settled=True) for one_set, draw in sets]
        # The training set alone: other rows can be evaluated under another name.
        wanted[0] = dataclasses.replace(
            wanted[0],
            may_grow=may_grow(prepared.rows.table, draws[0], self._parameters),
            continues=prepared.continues,
        )
        release = prepared.release(job, self._floors.rows_per_node)
        resume = prepared.earlier.point(n_done)
        if resume is not None:
            _log.info("going on with job %s after %d rounds", resume.job_id, n_done)
        if self._going_on is not None and resume is not None:
            resume = dataclasses.replace(resume, lost=self._going_on.lost)
        return reserve_together(self._attempt, self._registry, wanted, release, resume)

    def _check_floors(self, sums: ProtectedSums) -> None:
        """Go on if enough rows and sites carry weight; every site decides alike, and a refused run is not remembered.

        Privacy: a refusal releases counts that are capped at what was needed, and powers of two above the weights. So
            are the counts of rows that were added since earlier jobs; all sites learn how many have added some.
        """
        prepared, floors, policy = self._prepared, self._floors, self._context.policy
        own = policy.floors(self._channel.world)
        if self._parameters.objective.adaptive_leaf:  # see ``RowDraws``: every site must have rows
            floors = dataclasses.replace(floors, sites=self._channel.world)
        tables = list(filter(None, (prepared.rows.table, prepared.rows.eval_table)))
        if floors.sites > self._channel.world:  # no row can change that
            raise PolicyRefusal(TOO_FEW)
        if max(rows_needed(floors, self._parameters, len(tables))) > own.effective_rows:
            RefusalCount(policy).check({data_set.name for _, data_set in prepared.rows.tables()}, Question.DEMAND)
        largest = largest_weight(sums, [table.weight for table in tables])
        if self._job.weight is not None:
            self._raise_child_weight(floors.rows_per_node, largest[0])
        added, world = AddedRows.of(self._reservations, policy.consents), self._channel.world
        counted = check_effective_rows(sums, floors, own, self._parameters, tables, largest, world, added.counts())
        pooled = counted[-N_COUNTS:]
        self._found = tuple(largest), tuple(map(int, counted[:-N_COUNTS]))
        if added.needs_consent(pooled, floors.sites):
            policy.consents.gives("recompute_with_changes")
        self._reservations.grown(are_enough(pooled, floors.sites))

    def _raise_child_weight(self, rows_per_node: int, largest: float) -> None:
        """Keep nodes large, whatever rows weigh.

        Raises:
            DataRefusal: the job's own number is too small. The one that it needs follows from the largest weight, and
                any column may be named as the weight: others are not told, and each such job counts.
        """
        try:
            self._parameters = with_floor(self._parameters, rows_per_node, largest)
        except PolicyRefusal as error:
            raise DataRefusal(str(error)) from None

    def _agree_on_cuts(self, sums: ProtectedSums, n_done: int) -> tuple[Cuts, int | None]:
        """Return the cut points of all features, and a feature without missing values at any site."""
        folder = self._prepared.earlier.folder_of(n_done)
        kept = None if folder is None else folder.read_cuts()
        if self._going_on is not None:
            if kept is None:
                raise CannotGoOn("the cut points of the attempt before are gone")
            return kept, self._going_on.set_up.root_feature
        agreement = CutAgreement(
            self._job,
            self._prepared.rows,
            self._channel,
            self._registry,
            self._reservations.entries[0],
            self._attempt.proof,
            kept,
        )
        cuts, root_feature = agreement.run(sums)
        self._n_rows = int(agreement.rows[0])
        if self._prepared.initial_model is not None:
            cuts = keep_thresholds(cuts, self._prepared.initial_model, self._prepared.rows.parameters.max_bin)
        self._attempt.folder.write_cuts(cuts)
        return cuts, root_feature

    # -- training -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _page_files(self) -> Iterator[Path | None]:
        """Keep bins in files for as long as the site's policy wants it."""
        sets = [spec for _, spec in self._prepared.rows.tables()]
        if all(one.memory != EXTERNAL for one in sets):
            yield None
            return
        with page_files(self._attempt.folder.path) as folder:
            yield folder

    def _train(
        self, sums: ProtectedSums, cuts: Cuts, root_feature: int | None, n_done: int, pages: Path | None
    ) -> TrainingResult:
        if self._arithmetic:
            return self._grow(sums, cuts, root_feature, n_done, pages)
        job = self._job
        evaluated, initial = self._evaluated(), self._initial(n_done)
        self._agree_scales(sums)
        self._begin_course(sums, root_feature, n_done, initial)
        settings = LoopSettings(job.num_rounds - n_done, job.early_stopping_rounds, n_done)
        mediated = Mediated(
            self._attempt,
            self._prepared.rows,
            self._parameters,
            self._workers,
            self._floors.rows_per_node,
            self._draws(),
        )
        return mediated.train(
            sums, cuts, root_feature, evaluated, initial, settings, pages, self._is_kept, self._after_round
        )

    def _grow(
        self, sums: ProtectedSums, cuts: Cuts, root_feature: int | None, n_done: int, pages: Path | None
    ) -> TrainingResult:
        """Train with trees that the sites grow themselves."""
        job, table = self._job, self._prepared.rows.table
        evaluated, initial = self._evaluated(), self._initial(n_done)
        self._agree_scales(sums)
        self._begin_course(sums, root_feature, n_done, initial)
        floor = self._floors.rows_per_node
        grown = Grown(
            self._parameters,
            self._arithmetic,
            cuts,
            self._n_rows,
            table,
            self._job.finest_exponent,
            floor if counts_leaves(self._parameters, floor) else None,
            tuple(name for _, name in evaluated),
        )
        # A site must note that it enters a state (going_on.py) before it sends the first sum there.
        rides = sums.takes_metrics and self._prepared.course is None
        settings = LoopSettings(job.num_rounds - n_done, job.early_stopping_rounds, n_done, metrics_ride=rides)
        going_on = Beginning(initial, is_own=n_done > 0)
        return train_grown(
            grown,
            going_on,
            [one for one, _ in evaluated],
            sums,
            self._channel,
            settings,
            self._draws(),
            self._is_kept,
            self._after_round,
            self._workers,
            [
                self._bins_file(pages, "train"),
                *(None if one is None else self._bins_file(pages, name) for one, name in evaluated),
            ],
        )

    def _bins_file(self, pages: Path | None, name: str) -> Path | None:
        """Return where the bins of a set are kept, if the site's policy does not want them held."""
        spec = self._prepared.rows.data_set if name == "train" else self._prepared.rows.eval_set
        folder = None if spec is None else bins_below(pages, name, spec)
        return None if folder is None else folder / "bins.page"

    def _agree_scales(self, sums: ProtectedSums) -> None:
        prepared, parameters = self._prepared, self._parameters
        weighted = prepared.rows.table.weight is not None
        evaluated = (
            [prepared.rows.table]
            if prepared.rows.eval_table is None
            else [prepared.rows.table, prepared.rows.eval_table]
        )
        coarsest = coarsest_pairs(parameters, weighted)
        if self._going_on is not None:
            scales = dict(self._going_on.set_up.scales)
            self._n_rows = (1 << scales.pop(POOLED_ROWS, 0)) - 1
            sums.take_scales(scales, coarsest)
        else:
            bounds = value_bounds(parameters, evaluated)
            sums.agree_scales(
                bounds | row_bounds(parameters, prepared.rows.table) if self._arithmetic else bounds, coarsest
            )
        check_weights(sums, parameters, weighted, self._n_rows if self._arithmetic else None)

    def _begin_course(self, sums: ProtectedSums, root_feature: int | None, n_done: int, initial: bytes | None) -> None:
        """Keep what an attempt without one of the sites must not ask for again, before sums of a state are sent."""
        course, sites = self._prepared.course, self._context.sites
        if course is None:
            return
        course.has_moved = GradientMoves(self._trained_rows(), self._parameters, self._draws()).have_moved
        if self._going_on is None:
            scales = sums.scales() | ({POOLED_ROWS: self._n_rows.bit_length()} if self._arithmetic else {})
            course.begin(SetUp(sites, root_feature, *self._found, self._floors, scales), n_done)
        if initial is not None and n_done < self._job.num_rounds:
            course.enter(initial, sites, n_done)
        if self._going_on is not None:
            self._attempt.folder.drop_checkpoints_after(n_done)
            course.go_on(sites, n_done, self._going_on.step)

    def _evaluated(self) -> tuple[tuple[Table | None, str], ...]:
        """Return rows and name of each evaluation set; no rows stand for the training rows."""
        if self._going_on is not None:  # how many rows were evaluated would tell of the lost site's
            return ()
        table = self._prepared.rows.eval_table
        sets: tuple[tuple[Table | None, str], ...] = ((None, "train"),) if self._job.evaluate_training else ()
        return sets if table is None else (*sets, (table, "eval"))

    def _initial(self, n_done: int) -> bytes | None:
        """Return the model that training continues, if there is one."""
        prepared = self._prepared
        if self._going_on is not None:
            return self._going_on.model
        checkpoint = prepared.earlier.checkpoints().get(n_done)
        return prepared.initial_model if checkpoint is None else checkpoint.read_bytes()

    def _draws(self) -> RowDraws | None:
        """Return how this site draws the rows of each round; None if it takes them all."""
        fraction = row_fraction(self._parameters)
        if fraction == 1:
            return None
        sites = self._context.sites if self._going_on is None else self._going_on.set_up.sites
        secret = self._registry.secret("row sampling", repr(fraction), *sorted(sites))
        return RowDraws(secret, self._trained_rows(), fraction, self._parameters.objective.adaptive_leaf)

    def _trained_rows(self) -> Table:
        return self._prepared.rows.table if self._arithmetic else as_weighed(self._prepared.rows.table)

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
            if self._prepared.course is not None and n_done < job.num_rounds:
                self._prepared.course.enter(model, self._context.sites, n_done)
        attempt.progress(row, job.num_rounds)

    # -- after training -----------------------------------------------------------------------------------------------

    def _sections(self, sums: ProtectedSums, booster: xgb.Booster) -> tuple[ReportSection, ...]:
        """Return the metrics on the evaluation rows of all sites, if the job asks for them, and what workers did."""
        table, workers = self._prepared.rows.eval_table, self._workers
        of_workers = () if workers is None else (work_section(workers.work),)
        if not self._job.pooled_metrics or table is None:
            return of_workers
        return pooled_section(self._attempt, sums, booster, table), *of_workers

    def _finish(self, result: TrainingResult, cuts: Cuts, sections: tuple[ReportSection, ...]) -> JobResult:
        job, attempt, n_rounds = self._job, self._attempt, result.booster.num_boosted_rounds()
        trained, names = result.model, self._prepared.rows.table.feature_names
        model = finished(self._marked(trained), names, job.categories, job.label_classes)
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
            registry=self._reservations.message,
            cuts={"mode": job.cuts, "points": sum(c.size for c in cuts.of_feature), "min_rows": job.min_rows_per_cut},
            best_round=result.best_round,
            notes=self._notes(),
            data=self._data(),
        )
        return JobResult(hmac.hex(), f"the model is {path}", {"n_rounds": n_rounds})

    def _marked(self, model: bytes) -> bytes:
        """Return a model that says who trained which of its rounds, if these were not always all sites."""
        if self._going_on is None or self._prepared.course is None:
            return model
        said = {"job": self._context.job_id, "parts": [dataclasses.asdict(p) for p in self._prepared.course.parts]}
        return with_attribute(model, PARTS_ATTRIBUTE, json.dumps(said, sort_keys=True))

    def _data(self) -> tuple[DataFacts, ...]:
        prepared, job = self._prepared, self._job
        training = DataFacts.of(prepared.rows.table, job.data_set)
        if prepared.rows.eval_table is None:
            return (training,)
        return training, DataFacts.of(prepared.rows.eval_table, str(job.eval_data_set), EVALUATION)

    def _notes(self) -> tuple[str, ...]:
        """Return what the sites' policies and their sampling have made of the job, for the report."""
        k, notes = self._floors.rows_per_node, [grown_by(self._arithmetic)]
        if self._parameters is not self._prepared.rows.parameters:
            weight = f"min_child_weight is {self._parameters.agreed['min_child_weight']:g}"
            notes.append(f"{weight}: the sites' policies ask for at least {k} rows in every node.")
        if counts_leaves(self._parameters, k):
            notes.append(
                f"The rows of every leaf were counted over all sites after each tree: none has fewer than {k}."
            )
        if self._context.number > 1:
            notes.append(gone_on(self._context.number, self._attempt.rounds))
        if self._going_on is not None and self._prepared.course is not None:
            notes.append(f"The job went on without {', '.join(self._going_on.lost)}; its rounds were not evaluated.")
            notes += told(self._prepared.course.parts, self._job.num_rounds)
        if row_fraction(self._parameters) < 1:
            notes.append("Each site drew the rows of each round from a secret of its own, not from the job's seed.")
        return tuple(notes)


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
        return _Run(attempt, prepared, workers).run()


run_site = SitePart(
    prepare,
    _take_part,
    lambda job: (job.data_set, job.eval_data_set),
    lambda job, prepared: {
        **prepared.rows.chosen.facts,
        **named(prepared.lost),
        **grown_fact(is_grown(job, prepared.rows.parameters)),
        **word_fact(job.word_bits),
    },
    on_cluster=OnCluster.USED,
)
"""Takes part in one attempt of a job.

After a failure the site's checkpoints stay; its model is there only if the last step failed, when all sites had
agreed on it.

Privacy: the server has seen the rounds pass and may know their number. Metrics, and what follows from them, it gets
    only if they are streamed.
"""
