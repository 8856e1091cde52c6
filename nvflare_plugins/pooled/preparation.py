"""What a site checks and loads by itself, before it talks to anyone, for a job over pooled rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import OnLostSite, SiteContext
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import usable_ids
from nvflare_plugins.data.table import Table, column_names, load_table, log_what_labels_lack
from nvflare_plugins.growth.ranking import Queries
from nvflare_plugins.pages.run_record import FILE_NAME as RECORD
from nvflare_plugins.pooled.growing import check_words, is_grown
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.processors import ChosenProfile, choose_profile
from nvflare_plugins.pooled.queries import queries_of
from nvflare_plugins.pooled.row_floors import check_sampling
from nvflare_plugins.pooled.shards import why_in_one_process
from nvflare_plugins.site.memory.forgetting import ASKED, Forgetting, Queue, Standing, ToForget
from nvflare_plugins.site.memory.registry import Registry, Used
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import JobTerms
from nvflare_plugins.workers.shards import check_one_cluster, reads_in_passes, shards_of
from nvflare_plugins.xgb.continuation import state_of
from nvflare_plugins.xgb.cuts import LARGEST_VALUE, CutMode, spaced_cuts
from nvflare_plugins.xgb.matrices import remove_left_behind
from nvflare_plugins.xgb.objectives import Task, check_relevance
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters, with_floor
from nvflare_plugins.xgb.versions import installed_release

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a site knows before it talks to anyone.

    Attributes:
        to_forget, eval_to_forget: whom a job that forgets leaves out of either set.
    """

    data_set: DataSet
    table: Table
    eval_set: DataSet | None
    eval_table: Table | None
    parameters: TrainingParameters
    chosen: ChosenProfile
    queries: tuple[Queries | None, Queries | None] = (None, None)
    to_forget: ToForget | None = None
    eval_to_forget: ToForget | None = None

    def tables(self) -> list[tuple[Table, DataSet]]:
        """Return the training set and, if there is one that is another set, the evaluation set."""
        tables = [(self.table, self.data_set)]
        if self.eval_set is not None and self.eval_table is not None and self.eval_set.name != self.data_set.name:
            tables.append((self.eval_table, self.eval_set))
        return tables


@dataclass(frozen=True, slots=True)
class Allowed:
    """A job that the policy allows and whose public facts were checked; no row was looked at.

    Attributes:
        columns: how its rows are read (``load_table``).
        is_grown: the sites grow the trees themselves.
        n_shards: into which the rows are cut.
        takes_passes: rows may be read in passes.
    """

    job: HorizontalJob
    context: SiteContext
    data_set: DataSet
    eval_set: DataSet | None
    columns: Mapping[str, Any]
    parameters: TrainingParameters
    chosen: ChosenProfile
    is_grown: bool
    n_shards: int
    takes_passes: bool

    def load(self) -> Prepared:
        """Read the rows and look at their values. Raises: DataRefusal, ConfigurationError."""
        remove_left_behind(self.context.runs)
        table, whom = self._load(self.data_set)
        eval_table, of_eval = (None, None) if self.eval_set is None else self._load(self.eval_set)
        _check_rows(self.job, self.parameters, table, eval_table)
        sets = ((table, self.data_set), (eval_table, self.eval_set))
        own, evaluated = (
            None if one is None or spec is None else queries_of(self.parameters, one, spec) for one, spec in sets
        )
        facts = self.parameters, self.chosen, (own, evaluated)
        return Prepared(self.data_set, table, self.eval_set, eval_table, *facts, whom, of_eval)

    def _load(self, spec: DataSet) -> tuple[Table, ToForget | None]:
        """Load a table, if no randomised buckets of its rows were sent, without persons who asked to be forgotten."""
        sent = SentRows(self.context.policy)
        asks, forgets = sent.asks_for_ids(spec), Forgetting(self.context.policy).asks_for_ids(spec)
        may_lack_ids = not asks and not forgets and not self.columns["with_ids"]
        columns = {**self.columns, "with_ids": True}  # the registry tells rows apart by them
        table = load_table(spec, **columns, may_lack_ids=may_lack_ids, takes_passes=self.takes_passes)
        if asks and sent.sent(usable_ids(table.ids, spec)).any():
            raise DataRefusal(
                f"randomised buckets of rows of data set {spec.name!r}, or of rows without an id, were sent"
            )
        counts = spec.name == self.data_set.name  # rows of the training set alone
        return leave_out(table, spec, self.context, self.job.forgets, with_consent=not counts)


def allow(
    job: HorizontalJob,
    context: SiteContext,
    group: str | None = None,
    *,
    with_ids: bool = False,
    on_cluster: bool = False,
    by_xgboost: bool | None = None,
) -> Allowed:
    """Check what is public of a job against the policy: what comes after the rows were looked at tells of them.

    Args:
        group: column that says which rows belong together, for jobs that divide them.
        with_ids: load what names the rows, where the policy knows it.
        on_cluster: a cluster that the policy names is used; else all is done in this process.
        by_xgboost: stock XGBoost trains, and needs its communicator; None where the job's engine decides.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job, parameters or the installed XGBoost are not usable; the message says which.
    """
    policy, group = context.policy, job.query or group
    exact = job.cuts == CutMode.EXACT.value
    terms = JobTerms(job.profile, job.data_set, exact, job.min_rows_per_cut, tracking=job.tracking)
    data_set = policy.check_job(terms, context.sites)
    if job.compare_queries:
        policy.check_consent("compare_queries", "does not compare names of queries", "leave compare_queries out")
    eval_set = policy.data_set_for(job.eval_data_set, job.profile) if job.eval_data_set is not None else None
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
    if CutMode(job.cuts) in (CutMode.UNIFORM, CutMode.LOGARITHMIC):
        numeric = [name for name in names if name not in (job.categories or {})]
        spaced_cuts(numeric, job.cut_bounds, parameters.max_bin, CutMode(job.cuts))  # complains of missing bounds
    if job.early_stopping_rounds is not None and not parameters.metrics:
        raise ConfigurationError("early_stopping_rounds needs an eval_metric to watch")
    columns: dict[str, Any] = {
        "label": job.label,
        "weight": job.weight,
        "features": names,
        "categories": job.categories,
        "label_classes": job.label_classes,
        "unknown_is_missing": job.unknown_category_is_missing,
        "may_lack_rows": True,
        "group": group,
        "with_ids": with_ids and data_set.id is not None,
    }
    return Allowed(job, context, data_set, eval_set, columns, parameters, chosen, grown, n_shards, takes_passes)


def check_public(job: HorizontalJob, policy: SitePolicy, features: Sequence[str]) -> TrainingParameters:
    """Check the parameters, and what the policy says about them. Raises: PolicyRefusal, ConfigurationError."""
    parameters = check_parameters(job.params, features, label=job.label)
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


def _check_rows(job: HorizontalJob, parameters: TrainingParameters, table: Table, eval_table: Table | None) -> None:
    """Look at the values of both tables, and log what is the matter with them. Raises: DataRefusal."""
    _check_magnitudes(table)
    if eval_table is not None and eval_table.passes is not None:  # which is scored by bins
        _check_magnitudes(eval_table)
    is_classification = parameters.objective.task in (Task.BINARY, Task.MULTICLASS)
    for checked, name in ((table, job.data_set), (eval_table, str(job.eval_data_set))):
        if checked is None:
            continue
        parameters.objective.check_labels(checked.label)
        if checked is table:
            parameters.objective.check_events(table.label)
        check_relevance(parameters.metrics, checked.label)
        log_what_labels_lack(checked, name, is_classification=is_classification)
        for note in checked.notes:
            _log.info("%s", note)


def _check_magnitudes(table: Table) -> None:
    """Refuse values beyond the outermost cut points, which all sites take from this program and not from data."""
    for name, column in zip(table.feature_names, table.columns(), strict=True):
        if np.nanmax(np.abs(column), initial=0.0) >= LARGEST_VALUE:
            raise DataRefusal(f"column {name!r} holds values of 1e38 or more: scale it, or mark them as missing")


# Which rows a job over pooled rows leaves out, because persons asked to be forgotten: at this site alone.
#
# What is left out, by which rule and why: ``site/memory/forgetting.py``. Whether a job may leave out a batch, all sites
# find out together (``row_floors.are_enough``).


_WHY = f"{ASKED}, or that the job to be replaced did not have"


def leave_out(
    table: Table, spec: DataSet, context: SiteContext, replaces: str | None, *, with_consent: bool = False
) -> tuple[Table, ToForget | None]:
    """Return the rows that a job may use, and whom it leaves out as a batch, where it is to forget persons.

    Args:
        table: with the ids, where somebody is in the queue.
        replaces: the job whose model is trained again; None of other jobs.
        with_consent: persons leave this data set under the consent ``recompute_with_changes`` alone.

    Raises:
        ConfigurationError: this site knows of no such job on the data set that has ended well.
    """
    forgetting = Forgetting(context.policy)
    queue = forgetting.queue(spec.name)
    if not queue.keys.size and replaces is None:
        return table, None
    place = _places(forgetting, queue, table, spec)
    is_forgotten = (place >= 0) & (queue.standing[place] == Standing.FORGOTTEN) if queue.keys.size else place >= 0
    table, place = table.kept(~is_forgotten, ASKED), place[~is_forgotten]
    if replaces is None and not (place >= 0).any():
        return table, None
    used = Registry.open(context.policy).used(table, spec, replaces)
    out = (place >= 0) & ~used.by_any
    if replaces is None:
        return table.kept(~out, ASKED), None
    if used.by_base is None:
        raise ConfigurationError(
            f"{context.site} remembers no job {replaces} on data set {spec.name!r} that has ended well, whose model "
            "could be trained again without persons. Remedy: name such a job (forgets); `veilboost registry` lists them"
        )
    consents = context.policy.consents.recompute_with_changes
    chosen = _chosen(queue, place, used, consents=consents, with_consent=with_consent)
    out |= ~used.by_base | np.isin(place, chosen)
    _log.info("forgetting, %s: %d persons leave the job", spec.name, chosen.size)
    whom = ToForget(replaces, queue.keys[chosen], may_lack_sites=_agreed_to_lose_sites(context, replaces))
    return table.kept(~out, _WHY), whom


def _places(forgetting: Forgetting, queue: Queue, table: Table, spec: DataSet) -> NDArray[np.int64]:
    """Return where the person of each row stands in the queue, -1 for all others. Shapes: int64[n_rows]."""
    if not queue.keys.size or table.ids is None:
        return np.full(table.n_rows, -1)
    return queue.places(forgetting.keys(usable_ids(table.ids, spec)))


def _chosen(
    queue: Queue, place: NDArray[np.int64], used: Used, *, consents: bool, with_consent: bool
) -> NDArray[np.int64]:
    """Return the places of those who leave: the batch that was begun, or all who wait and whose rows are all alike.

    Who has rows of another class waits, unless this site consents. Who has none leaves nothing behind.
    """
    if with_consent and not consents:
        return np.empty(0, dtype=np.int64)
    standing = queue.standing
    if (standing == Standing.LEAVING).any():
        return np.flatnonzero(standing == Standing.LEAVING)
    waiting = np.flatnonzero(standing == Standing.WAITING)
    unlike = place[(place >= 0) & used.by_any & ~used.by_all]
    return waiting if consents else waiting[~np.isin(waiting, unlike)]


def _agreed_to_lose_sites(context: SiteContext, job_id: str) -> bool:
    """Return whether the sites of an earlier job have consented that the others go on without any of them."""
    try:
        record = json.loads((RunFolder(context.runs, job_id).path / RECORD).read_bytes())
        return bool(record["settings"].get("on_lost_site") == OnLostSite.CONTINUE.value)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def check_start(context: SiteContext, model: bytes, jobs: tuple[str, ...]) -> None:
    """Refuse to go on from a model that saw rows of persons who are forgotten.

    Args:
        jobs: that made the model, as far as that is known.

    Raises:
        ConfigurationError: it is one of those that were replaced.
    """
    for job, by in Forgetting(context.policy).replaced().items():
        if job in jobs or _is_state_of(RunFolder(context.runs, job).path / MODEL, model):
            raise ConfigurationError(
                f"{context.site} does not go on from the model of job {job}, which has seen rows of persons who are "
                f"forgotten. Remedy: go on from job {by}, which replaces it"
            )


def _is_state_of(path: Path, model: bytes) -> bool:
    try:
        return state_of(path.read_bytes()) == state_of(model)
    except (OSError, ValueError, LookupError, TypeError):  # a run whose model is gone
        return False
