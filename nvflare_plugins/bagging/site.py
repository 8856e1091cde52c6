"""One site's part in a bagging job, from its policy to its model.

The site's trees are grown by stock XGBoost on its own rows, with no communicator. They leave it sealed for the other
sites, once its policy has allowed it, all sites are authenticated, terms are equal and every registry remembers it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import xgboost as xgb

from nvflare_plugins.attempt.agreement import Terms, agree, versions
from nvflare_plugins.attempt.job_context import JobResult, Progress, SiteContext
from nvflare_plugins.attempt.reservations import Reservations, Wanted, reserve_together
from nvflare_plugins.attempt.site_attempt import SiteAttempt, take_part
from nvflare_plugins.bagging.job import BaggingJob
from nvflare_plugins.bagging.model import BaggedModel, grow, own_matrix
from nvflare_plugins.bagging.trees import SharedTree
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.row_ids import usable_ids
from nvflare_plugins.data_sets.schema import Schema
from nvflare_plugins.data_sets.table import Table, column_names, load_table
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.report.run_record import RoundRow
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.memory.sent_rows import SentRows
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.wire.catalogue import Kind, Phase, TrainingStep
from nvflare_plugins.wire.channel import Transport
from nvflare_plugins.xgb.model_json import check_names_survive, with_lists
from nvflare_plugins.xgb.parameters import TrainingParameters, local_threads
from nvflare_plugins.xgb.versions import installed_release

TITLE = "Bagging of the sites' own trees"
MODEL = "model.json"
_DEFAULT_CHILD_WEIGHT = 1.0  # XGBoost's
_PROTECTION = {"trees": "sealed between the sites", "hessian_sums": "not shared"}


@dataclass(frozen=True, slots=True, repr=False)
class Prepared:
    """What a site knows before it talks to anyone."""

    data_set: DataSet
    table: Table
    parameters: TrainingParameters


def run_bagging_site(
    job: BaggingJob, context: SiteContext, transport: Transport, timeout_s: float, progress: Progress | None = None
) -> JobResult:
    """Take part in one attempt of a job (see ``take_part``).

    Privacy: the other sites get this site's trees; the server sees messages of one size.
    """
    return take_part(
        job,
        context,
        transport,
        timeout_s,
        progress,
        data_sets=(job.data_set,),
        prepare=prepare,
        train=lambda attempt, prepared: _Run(attempt, prepared).run(),
        protection=lambda job, prepared: _PROTECTION,
    )


def prepare(job: BaggingJob, context: SiteContext) -> Prepared:
    """Check the job against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job, parameters, data or the installed XGBoost are not usable; the message says which.
    """
    installed_release()
    policy = context.policy
    policy.check_consent(
        "share_own_trees",
        "does not give other sites trees that were grown on its rows alone",
        "train with HorizontalXGBRecipe, where the sites see pooled sums",
    )
    policy.check_sites(context.sites)
    data_set = policy.data_set_for(job.data_set, job.profile)
    names = column_names(data_set, job.label, None, job.features)
    parameters = job.parameters(names)
    depth, leaves = (int(parameters.effective[name]) for name in ("max_depth", "max_leaves"))
    policy.check_size(parameters.max_bin, depth, leaves, job.num_rounds * len(context.sites))
    check_names_survive(names, {})
    table = _load(job, data_set, policy, names)
    parameters.objective.check_labels(table.label)
    return Prepared(data_set, table, parameters)


def _load(job: BaggingJob, data_set: DataSet, policy: SitePolicy, names: tuple[str, ...]) -> Table:
    """Load the rows: enough of them, as every tree is grown on these alone, and none whose buckets were sent."""
    sent = SentRows(policy)
    with_ids = sent.asks_for_ids(data_set)
    table = load_table(data_set, label=job.label, features=names, label_classes=job.label_classes, with_ids=with_ids)
    if with_ids and sent.sent(usable_ids(table.ids, data_set)).any():
        raise DataRefusal(
            f"randomised buckets of rows of data set {data_set.name!r}, or of rows without an id, were sent"
        )
    if table.n_rows < policy.min_effective_rows:
        raise DataRefusal(
            f"data set {data_set.name!r} has fewer rows than a tree of this site must be grown on. Policy key: "
            "min_effective_rows."
        )
    return table


class _Run:
    """The steps of one attempt after the session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: Prepared) -> None:
        self._attempt, self._prepared = attempt, prepared
        self._job: BaggingJob = attempt.job
        self._depth = int(prepared.parameters.effective["max_depth"])
        self._params = self._own_params()
        names = prepared.table.feature_names
        self._model = BaggedModel(self._params, names, len(attempt.context.sites))

    def run(self) -> JobResult:
        """Agree, reserve, train, compare models, write results."""
        attempt, job = self._attempt, self._job
        agree(attempt.channel, attempt.session, self._terms())
        reservations = self._reserve()
        table = self._prepared.table
        matrix = own_matrix(table.features, table.label, table.feature_names, int(str(self._params["nthread"])))
        self._model.begin(matrix)
        for number in range(job.num_rounds):
            self._round(number, matrix)
            reservations.trees_complete(number + 1)
        return self._finish(reservations)

    def _own_params(self) -> dict[str, object]:
        """Return the parameters of this site's trees: no leaf holds fewer rows than its own policy asks for."""
        parameters, context = self._prepared.parameters, self._attempt.context
        agreed = parameters.agreed
        given = float(str(agreed.get("min_child_weight", _DEFAULT_CHILD_WEIGHT)))
        floor = context.policy.min_rows_per_node * float(parameters.objective.hessian_bound or 0.0)
        return {
            **parameters.for_booster(),
            "learning_rate": float(parameters.effective["learning_rate"]) / len(context.sites),
            "min_child_weight": max(given, floor),
            "nthread": local_threads(parameters.requested_threads),
        }

    def _terms(self) -> Terms:
        document = self._prepared.parameters.document()
        return Terms(versions(), self._job.to_dict(), document, Schema.of(self._prepared.table), {}, {})

    def _reserve(self) -> Reservations:
        """Have all sites' registries allow this run and remember it, before the first tree leaves."""
        attempt, prepared = self._attempt, self._prepared
        job = {name: value for name, value in self._job.to_dict().items() if name not in ("num_rounds", "deadline_s")}
        document = {"kind": "bagging", "job": job, "parameters": prepared.parameters.document()}
        release = json.dumps(document, sort_keys=True).encode()
        registry = Registry.open(attempt.context.policy)
        return reserve_together(attempt, registry, [Wanted(prepared.table, prepared.data_set)], release, None)

    def _round(self, number: int, matrix: xgb.DMatrix) -> None:
        attempt, started = self._attempt, time.perf_counter()
        attempt.channel.moment = TrainingStep(Phase.UPDATE, number)
        own = grow(self._params, matrix, number)
        grown = time.perf_counter()
        shared = attempt.gather_sealed(f"trees of round {number}", own.to_bytes(self._depth), Kind.OWN_TREES)
        n_features = len(self._prepared.table.feature_names)
        self._model.add([SharedTree.from_bytes(data, self._depth, n_features) for data in shared])
        self._model.advance(matrix)
        now = time.perf_counter()
        row = RoundRow(number, now - started, {}, {"xgboost": grown - started, "network": now - grown})
        attempt.round_done(row)
        attempt.progress(row, self._job.num_rounds)

    def _finish(self, reservations: Reservations) -> JobResult:
        attempt, job = self._attempt, self._job
        names = self._prepared.table.feature_names
        model = with_lists(self._model.to_bytes(), names, {}, job.label_classes)
        hmac = attempt.conclude(model, MODEL)
        path = attempt.folder.write_model(model)
        attempt.all_have_written()
        reservations.complete(job.num_rounds)
        attempt.write_record(TITLE, self._prepared.parameters.agreed, path.name, registry=reservations.message)
        return JobResult(hmac.hex(), f"the model is {path}", {"n_rounds": job.num_rounds})
