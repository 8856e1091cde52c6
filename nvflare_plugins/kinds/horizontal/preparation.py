"""What a site checks and loads by itself, before it talks to anyone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import LOST_SITE_FIELDS, Earlier, SiteContext
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import usable_ids
from nvflare_plugins.data.table import Table, column_names, load_table, log_what_labels_lack
from nvflare_plugins.kinds.horizontal.going_on import Course, check_can_go_on, check_left, course_of
from nvflare_plugins.kinds.horizontal.growing import check_words, is_grown
from nvflare_plugins.kinds.horizontal.job import WORD_BITS, HorizontalJob
from nvflare_plugins.kinds.horizontal.matrices import remove_left_behind
from nvflare_plugins.kinds.horizontal.processors import ChosenProfile, choose_profile
from nvflare_plugins.kinds.horizontal.row_floors import check_sampling
from nvflare_plugins.kinds.horizontal.score_histogram import OBJECTIVES as SCORED
from nvflare_plugins.kinds.horizontal.shard_rows import why_in_one_process
from nvflare_plugins.pages.run_record import FILE_NAME as RECORD
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import JobTerms
from nvflare_plugins.workers.shards import check_one_cluster, reads_in_passes, shards_of
from nvflare_plugins.xgb.continuation import check_initial_model
from nvflare_plugins.xgb.cuts import LARGEST_VALUE, CutMode, spaced_cuts
from nvflare_plugins.xgb.model_json import check_lists, without_lists
from nvflare_plugins.xgb.objectives import Task
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters, with_floor
from nvflare_plugins.xgb.versions import installed_release

_log = logging.getLogger(__name__)
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
class Prepared:
    """What a site knows before it talks to anyone.

    Attributes:
        continues: the jobs whose model training continues (``continue_from``), the last first.
        course: of a job that may go on without a site.
        lost: sites without which this attempt goes on.
    """

    data_set: DataSet
    table: Table
    eval_set: DataSet | None
    eval_table: Table | None
    parameters: TrainingParameters
    initial_model: bytes | None
    earlier: Earlier
    chosen: ChosenProfile
    continues: tuple[str, ...] = ()
    course: Course | None = None
    lost: tuple[str, ...] = ()

    def tables(self) -> list[tuple[Table, DataSet]]:
        """Return the training set and, if there is one that is another set, the evaluation set."""
        tables = [(self.table, self.data_set)]
        if self.eval_set is not None and self.eval_table is not None and self.eval_set.name != self.data_set.name:
            tables.append((self.eval_table, self.eval_set))
        return tables

    def release(self, job: HorizontalJob, rows_per_node: int) -> bytes:
        """Return what decides what the run releases about the rows, for the registry.

        Args:
            rows_per_node: the floor that the sites have agreed on, which decides min_child_weight.
        """
        # Registries of before know jobs by XGBoost without the two fields.
        without = _NOT_RELEASED if is_grown(job, self.parameters) else (*_NOT_RELEASED, "engine", "arithmetic")
        without = without if job.word_bits != WORD_BITS else (*without, "word_bits")  # of before, too
        fields = {name: value for name, value in job.to_dict().items() if name not in without}
        document = {"job": fields, "parameters": self.parameters.document(), "rows_per_node": rows_per_node}
        return json.dumps(document, sort_keys=True).encode()


def prepare(
    job: HorizontalJob,
    context: SiteContext,
    group: str | None = None,
    with_ids: bool = False,
    on_cluster: bool = False,
    by_xgboost: bool | None = None,
) -> Prepared:
    """Check the job against the policy and the data, at this site alone.

    Args:
        group: column that says which rows belong together, for jobs that divide them.
        with_ids: load what names the rows, where the policy knows it.
        on_cluster: a cluster that the policy names is used; else all is done in this process.
        by_xgboost: stock XGBoost trains, and needs its communicator; None where the job's engine decides.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        CannotGoOn: it forbids to go on without the sites that are lost.
        ConfigurationError: job, parameters, data or the installed XGBoost are not usable; the message says which.
    """
    policy = context.policy
    exact = job.cuts == CutMode.EXACT.value
    course = course_of(job, context)
    lost = () if course is None else course.without(context.sites)
    terms = JobTerms(job.profile, job.data_set, exact, job.min_rows_per_cut, tracking=job.tracking)
    if course is not None and lost:
        check_left(policy, context.sites, lost, course)
    data_set = policy.check_job(terms, context.sites)
    if course is not None and context.number == 1:
        check_left(policy, context.sites, lost, course)
    eval_set = policy.data_set_for(job.eval_data_set, job.profile) if job.eval_data_set is not None else None
    columns: dict[str, Any] = {
        "label": job.label,
        "weight": job.weight,
        "features": job.features,
        "categories": job.categories,
        "label_classes": job.label_classes,
        "unknown_is_missing": job.unknown_category_is_missing,
        "may_lack_rows": True,
        "group": group,
        "with_ids": with_ids and data_set.id is not None,
    }
    # Everything public first: what comes after the rows were looked at tells of them.
    chosen = choose_profile(policy, job.profile)
    names = column_names(data_set, job.label, job.weight, job.features, group)
    parameters = check_public(job, policy, names)
    grown = is_grown(job, parameters) if by_xgboost is None else False
    if by_xgboost or (by_xgboost is None and not grown):
        installed_release()
    on_cluster = on_cluster and not why_in_one_process(parameters)
    n_shards = shards_of(policy, job.data_set) if on_cluster else 1
    if on_cluster:
        check_one_cluster(policy, job.data_set, job.eval_data_set)
    takes_passes = not on_cluster or reads_in_passes(policy, job.data_set, filter(None, (data_set, eval_set)))
    if course is not None:
        check_can_go_on(policy, parameters, policy.min_rows_per_node)
    if CutMode(job.cuts) in (CutMode.UNIFORM, CutMode.LOGARITHMIC):
        numeric = [name for name in names if name not in (job.categories or {})]
        spaced_cuts(numeric, job.cut_bounds, parameters.max_bin, CutMode(job.cuts))  # complains of missing bounds
    if job.pooled_metrics:
        _check_pooled(policy, parameters, [data_set, eval_set])
    if job.early_stopping_rounds is not None and not parameters.metrics:
        raise ConfigurationError("early_stopping_rounds needs an eval_metric to watch")
    start = _start(job, context)
    if start is not None:
        check_initial_model(start.model, start.name, parameters, names)
        check_lists(start.model, start.name, job.categories, job.label_classes)
    initial = None if start is None else without_lists(start.model)
    earlier = Earlier.of(context, job.resume_from)
    if not grown:  # whose sums are the same for any number of shards
        _check_shards(earlier, n_shards)
    remove_left_behind(context.runs)
    columns["features"] = names
    table = _load(data_set, policy, columns, takes_passes)
    eval_table = None if eval_set is None else _load(eval_set, policy, columns, takes_passes)
    _check_rows(job, parameters, table, eval_table)
    continues = () if start is None else start.jobs
    return Prepared(
        data_set, table, eval_set, eval_table, parameters, initial, earlier, chosen, continues, course, lost
    )


def _check_rows(job: HorizontalJob, parameters: TrainingParameters, table: Table, eval_table: Table | None) -> None:
    """Look at the values of both tables, and log what is the matter with them. Raises: DataRefusal."""
    for one in (table, eval_table):
        if one is table or (one is not None and one.passes is not None):  # which is scored by bins
            _check_magnitudes(one)
    is_classification = parameters.objective.task is not Task.REGRESSION
    for checked, name in ((table, job.data_set), (eval_table, str(job.eval_data_set))):
        if checked is None:
            continue
        parameters.objective.check_labels(checked.label)
        if job.pooled_metrics and checked is eval_table and not np.isin(checked.label, (0.0, 1.0)).all():
            raise DataRefusal("pooled_metrics counts rows of two classes, and the evaluation labels lie between them")
        log_what_labels_lack(checked, name, is_classification)
        for note in checked.notes:
            _log.info("%s", note)


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


def check_public(job: HorizontalJob, policy: SitePolicy, features: Sequence[str]) -> TrainingParameters:
    """Check the parameters, and what the policy says about them. Raises: PolicyRefusal, ConfigurationError."""
    parameters = check_parameters(job.params, features)
    check_sampling(parameters)
    check_words(job, parameters)
    if parameters.objective.adaptive_leaf:
        policy.check_consent(
            "exact_leaves",
            f"does not accept {parameters.objective.name}: a leaf where it alone has rows is the label of one of them",
            "use reg:pseudohubererror, or another objective whose leaves are sums",
        )
    depth, leaves, parallel = (
        int(parameters.effective.get(name, default))
        for name, default in (("max_depth", 6), ("max_leaves", 0), ("num_parallel_tree", 1))
    )
    policy.check_size(parameters.max_bin, depth, leaves, job.num_rounds * parallel)
    if job.weight is None:
        with_floor(parameters, policy.min_rows_per_node)
    return parameters


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


def _load(spec: DataSet, policy: SitePolicy, columns: Mapping[str, Any], takes_passes: bool) -> Table:
    """Load a table, if no randomised buckets of its rows were sent."""
    sent = SentRows(policy)
    asks = sent.asks_for_ids(spec)
    may_lack_ids = not asks and not columns.get("with_ids")
    # The registry tells rows apart by them.
    table = load_table(spec, **{**columns, "with_ids": True}, may_lack_ids=may_lack_ids, takes_passes=takes_passes)
    if asks and sent.sent(usable_ids(table.ids, spec)).any():
        raise DataRefusal(f"randomised buckets of rows of data set {spec.name!r}, or of rows without an id, were sent")
    return table


def _check_magnitudes(table: Table) -> None:
    """Refuse values beyond the outermost cut points, which all sites take from this program and not from data."""
    for name, column in zip(table.feature_names, table.columns(), strict=True):
        if np.nanmax(np.abs(column), initial=0.0) >= LARGEST_VALUE:
            raise DataRefusal(f"column {name!r} holds values of 1e38 or more: scale it, or mark them as missing")
