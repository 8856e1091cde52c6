"""One site's part in a bagging job, from its policy to its model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.session import Terms, agree, versions
from nvflare_plugins.attempt.site_attempt import Reservations, SiteAttempt, SitePart, reserve_together
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import usable_ids
from nvflare_plugins.data.schema import Schema
from nvflare_plugins.data.table import Table, column_names, load_table
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.bagging.model import BaggedModel, LeafOutOfRange, SharedTree, grow, own_matrix
from nvflare_plugins.pages.run_record import DataFacts, RoundRow
from nvflare_plugins.site.memory.forgetting import ASKED, Forgetting
from nvflare_plugins.site.memory.registry import Registry, Wanted
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind, Phase, TrainingStep
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import check_names_survive, finished, with_positive_covers
from nvflare_plugins.xgb.parameters import TrainingParameters, child_weight, with_floor
from nvflare_plugins.xgb.row_blocks import RowBlocks

# A site's own rows with the margins that the common model gives them.
#
# Trees of other sites split between the bins of this one, so that margins need the values themselves: those that are
# held, or, of a table that is read in passes, those of a block of rows after the other, once a round. Trees are grown
# on the same bins either way.


class OwnRows:
    """What trees of this site are grown on.

    Attributes:
        matrix: XGBoost's, with the margins.
    """

    def __init__(self, table: Table, max_bin: int, nthread: int) -> None:
        self._table, self._nthread = table, nthread
        self._margins: NDArray[np.float32] | None = None
        if table.passes is None:
            self.matrix = own_matrix(table.features, table.label, table.feature_names, nthread)
            return
        layout = {"feature_names": list(table.feature_names), "feature_types": list(table.feature_types)}
        blocks = RowBlocks(table.blocks, table.label, None, layout)
        self.matrix = xgb.QuantileDMatrix(blocks, max_bin=max_bin, nthread=nthread)

    def add(self, booster: xgb.Booster) -> None:
        """Add a model's trees to the margins, tree by tree; the first time, what it begins with too.

        Raises:
            DataRefusal: a file has changed since the data set was loaded.
        """
        if self._table.passes is None:
            margins = booster.predict(self.matrix, output_margin=True)
        else:
            margins = np.concatenate(list(self._in_blocks(booster)))
        self._margins = margins
        self.matrix.set_base_margin(margins)

    def _in_blocks(self, booster: xgb.Booster) -> Iterator[NDArray[np.float32]]:
        first = 0
        for block in self._table.blocks():
            rows = slice(first, first + len(block))
            first = rows.stop
            matrix = own_matrix(block, self._table.label[rows], self._table.feature_names, self._nthread)
            if self._margins is not None:
                matrix.set_base_margin(self._margins[rows])
            yield booster.predict(matrix, output_margin=True)


# One site's part in a bagging job, from its policy to its model.
#
# The site's trees are grown by stock XGBoost on its own rows, with no communicator. They leave it sealed for the other
# sites, once its policy has allowed it, all sites are authenticated, terms are equal and every registry remembers it.


_log = logging.getLogger(__name__)
TITLE = "Bagging of the sites' own trees"
MODEL = "model.json"
_PROTECTION = {"trees": "sealed between the sites", "hessian_sums": "not shared"}


@dataclass(frozen=True, slots=True, repr=False)
class LoadedRows:
    """What a site knows before it talks to anyone."""

    data_set: DataSet
    table: Table
    parameters: TrainingParameters


def prepare(job: BaggingJob, context: SiteContext) -> LoadedRows:
    """Check the job against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job, parameters, data or the installed XGBoost are not usable; the message says which.
    """
    policy = context.policy
    policy.check_consent(
        "share_own_trees",
        "does not give other sites trees that were grown on its rows alone",
        "train with HorizontalXGBRecipe, where the sites see pooled sums",
    )
    policy.check_sites(context.sites)
    data_set = policy.data_set_for(job.data_set, job.profile)
    data_set.check_holds_bins("bagging holds them")
    names = column_names(data_set, job.label, None, job.features)
    parameters = job.parameters(names)
    depth, leaves = (int(parameters.effective[name]) for name in ("max_depth", "max_leaves"))
    policy.check_size(parameters.max_bin, depth, leaves, job.num_rounds * len(context.sites))
    with_floor(parameters, policy.min_rows_per_node)
    check_names_survive(names, {})
    table = _load(job, data_set, policy, names)
    parameters.objective.check_labels(table.label)
    return LoadedRows(data_set, table, parameters)


def _load(job: BaggingJob, data_set: DataSet, policy: SitePolicy, names: tuple[str, ...]) -> Table:
    """Load the rows: enough of them, as every tree is grown on these alone, and none whose buckets were sent."""
    sent = SentRows(policy)
    forgetting = Forgetting(policy)
    asks, forgets = sent.asks_for_ids(data_set), forgetting.asks_for_ids(data_set)
    table = load_table(
        data_set,
        label=job.label,
        features=names,
        label_classes=job.label_classes,
        with_ids=asks or forgets,
        may_lack_rows=True,
        takes_passes=True,
    )
    if asks and sent.sent(usable_ids(table.ids, data_set)).any():
        raise DataRefusal(
            f"randomised buckets of rows of data set {data_set.name!r}, or of rows without an id, were sent"
        )
    if forgets:
        table = table.kept(forgetting.are_free(usable_ids(table.ids, data_set), data_set.name), ASKED)
    if table.n_rows < max(policy.min_effective_rows, policy.min_rows_per_node):
        raise DataRefusal(
            f"data set {data_set.name!r} has fewer rows than a tree of this site must be grown on. Policy keys: "
            "min_effective_rows, min_rows_per_node."
        )
    return table


class _BaggingTraining:
    """The steps of one attempt after the session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: LoadedRows) -> None:
        self._attempt, self._prepared = attempt, prepared
        self._job: BaggingJob = attempt.job
        self._depth = int(prepared.parameters.effective["max_depth"])
        # Of this site's own trees: no leaf holds fewer rows than its own policy asks for, whatever the others' do.
        self._own = with_floor(prepared.parameters, attempt.context.policy.min_rows_per_node)
        names, n_sites = prepared.table.feature_names, len(attempt.context.sites)
        learning_rate = float(self._own.effective["learning_rate"]) / n_sites
        self._params = {**self._own.for_booster(), "learning_rate": learning_rate}
        self._model = BaggedModel(self._params, names, n_sites)
        self._largest = dict.fromkeys(attempt.context.sites, 0.0)  # magnitude of a leaf of each site so far

    def run(self) -> JobResult:
        """Agree, reserve, train, compare models, write results."""
        attempt, job, prepared = self._attempt, self._job, self._prepared
        document = prepared.parameters.document()
        terms = Terms(versions(), job.stated(), document, Schema.of(prepared.table), {}, {})
        agree(attempt.channel, attempt.session, terms)
        reservations = self._reserve()
        with reservations.cancelled_by(BaseException):  # until the first tree is sent, nothing of rows has left
            nthread = int(str(self._params["nthread"]))
            rows = OwnRows(prepared.table, prepared.parameters.max_bin, nthread)
            rows.add(self._model.last_round())
            own = self._grow(0, rows.matrix)
        for number in range(job.num_rounds):
            if number > 0:
                own = self._grow(number, rows.matrix)
            self._share(number, *own, rows)
            reservations.trees_complete(number + 1)
        return self._finish(reservations)

    def _reserve(self) -> Reservations:
        """Have all sites' registries allow this run and remember it, before the first tree leaves."""
        attempt, prepared = self._attempt, self._prepared
        job = {name: value for name, value in self._job.to_dict().items() if name not in ("num_rounds", "deadline_s")}
        document = {"kind": "bagging", "job": job, "parameters": self._own.document()}
        release = json.dumps(document, sort_keys=True).encode()
        registry = Registry.open(attempt.context.policy)
        return reserve_together(attempt, registry, [Wanted(prepared.table, prepared.data_set)], release, None)

    def _grow(self, number: int, matrix: xgb.DMatrix) -> tuple[bytes, float]:
        """Grow the tree of a round and check it as its readers will; return it as it travels, and the seconds it took.

        Raises:
            DataRefusal: a leaf is out of range.
            ConfigurationError: one is, after larger ones of another site.
        """
        started = time.perf_counter()
        message = grow(self._params, matrix, number).to_bytes(self._depth)
        try:
            self._read(message)
        except LeafOutOfRange:
            self._refuse_leaf(number)
        return message, time.perf_counter() - started

    def _refuse_leaf(self, number: int) -> NoReturn:
        """Say whose doing it is that a leaf of this site's own is out of range.

        A site grows its tree on what the trees before it leave over. Where another site's leaves are the largest of
        them, no row of this site is to blame, nor counted as the reason of a refusal: whoever sends such leaves would
        otherwise use up what this site's policy allows (``data_refusals_per_month``).
        """
        channel = self._attempt.channel
        site = max(channel.sites, key=lambda name: self._largest[name])
        if self._largest[site] <= self._largest[channel.sites[channel.rank]]:
            raise DataRefusal(
                f"a leaf of this site's tree of round {number} is out of range: lower the job's learning_rate, or "
                "scale the label column"
            )
        _log.warning("the largest leaves before round %d, in which this site's own are out of range: %s", number, site)
        raise ConfigurationError(
            "a leaf is out of range after the trees of other sites; the log of the site that says so names the site "
            "with the largest leaves. Remedy: lower the job's learning_rate, or train without that site"
        )

    def _share(self, number: int, own: bytes, seconds: float, rows: OwnRows) -> None:
        """Take the trees of all sites into the model."""
        attempt, started = self._attempt, time.perf_counter()
        attempt.channel.moment = TrainingStep(Phase.UPDATE, number)
        shared = attempt.gather_sealed(f"trees of round {number}", own, Kind.OWN_TREES)
        trees = []
        for site, message in zip(attempt.channel.sites, shared, strict=True):
            try:
                trees.append(self._read(message))
            except ProtocolError as error:
                raise ProtocolError(f"{site}: {error}") from None
            self._largest[site] = max(self._largest[site], trees[-1].largest_leaf)
        self._model.add(trees)
        rows.add(self._model.last_round())
        network = time.perf_counter() - started
        row = RoundRow(number, seconds + network, {}, {"xgboost": seconds, "network": network})
        attempt.round_done(row)
        attempt.progress(row, self._job.num_rounds)

    def _read(self, message: bytes) -> SharedTree:
        return SharedTree.from_bytes(message, self._depth, len(self._prepared.table.feature_names))

    def _finish(self, reservations: Reservations) -> JobResult:
        attempt, job = self._attempt, self._job
        names = self._prepared.table.feature_names
        model = finished(with_positive_covers(self._model.to_bytes()), names, {}, job.label_classes)
        hmac = attempt.conclude(model, MODEL)
        path = attempt.folder.write_model(model)
        attempt.all_have_written()
        reservations.complete(job.num_rounds)
        attempt.write_record(
            TITLE,
            {**self._own.agreed, "min_child_weight": child_weight(self._own)},
            path.name,
            registry=reservations.message,
            notes=self._notes(),
            data=(DataFacts.of(self._prepared.table, job.data_set),),
        )
        return JobResult(hmac.hex(), f"the model is {path}", {"n_rounds": job.num_rounds})

    def _notes(self) -> tuple[str, ...]:
        """Return what is this site's own, and what the model makes of learning_rate, for the report."""
        floor, n_sites = self._attempt.context.policy.min_rows_per_node, len(self._attempt.context.sites)
        asked = f": its policy asks for at least {floor} rows in every node" if floor else ""
        weight = f"min_child_weight is {child_weight(self._own):g} for this site's own trees{asked}"
        return (
            f"{weight}. Other sites may have another one.",
            f"Each tree counts 1/{n_sites} of learning_rate: a round holds one of each of the {n_sites} sites.",
            *(("eval_metric has no effect: nothing is evaluated.",) if self._job.params.get("eval_metric") else ()),
        )


run_bagging_site = SitePart(
    prepare,
    lambda attempt, prepared: _BaggingTraining(attempt, prepared).run(),
    protection=lambda job, prepared: _PROTECTION,
)
"""Takes part in one attempt of a job.

Privacy: the other sites get this site's trees; the server sees messages of one size.
"""
