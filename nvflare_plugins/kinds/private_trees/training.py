"""One site's part in a job of private trees, and what it pays."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.events import NeighbouringRelation
from dp_components.leaf_weights import CLIPPED_AT, TWO_CLASSES
from he_processors.errors import ConfigurationError
from he_processors.masks import PairwiseMasks
from nvflare_plugins.attempt.job_context import JobResult, SiteContext, waiting_s
from nvflare_plugins.attempt.payment import AttemptPayment, JobLedger, check_rows_per_person
from nvflare_plugins.attempt.session import Terms, agree, versions
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart, gone_on
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.identity import usable_ids
from nvflare_plugins.data.schema import Schema
from nvflare_plugins.data.table import Table, column_names, load_table, log_count, log_what_labels_lack
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.kinds.private_trees.forest import clipped, train
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.noisy_sums import NoisySums, noise_at_site
from nvflare_plugins.kinds.private_trees.plan import OwnRows
from nvflare_plugins.kinds.private_trees.planner import epsilon_text, leaf_noise, lines, report_sections, summarise
from nvflare_plugins.kinds.private_trees.shard import train_in_shards
from nvflare_plugins.pages.run_record import DataFacts, RoundRow
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.noise import NoiseOfScores
from nvflare_plugins.site.memory.budgets import PersonsOfBudgets
from nvflare_plugins.site.memory.forgetting import ASKED, Forgetting
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy_values import JobTerms
from nvflare_plugins.wire.profiles import MaskedSums
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import reads_in_passes, workers_of
from nvflare_plugins.workers.workers import Workers, work_section
from nvflare_plugins.xgb.continuation import with_clipping
from nvflare_plugins.xgb.model_json import check_names_survive, finished, with_positive_covers

# A site's ledger in one private training.


class Payment(AttemptPayment):
    """Pays for the releases of one job at one site.

    Under distributed noise a release's reply holds this site's share of the noise, and the same queries get it again,
    in a new attempt or in a job that resumes it. Among other sites, or where a site draws its share afresh because its
    ledger was put back to an earlier state, say, it would stand in a second sum, which nobody has paid for. Under a
    trusted aggregator nothing is replayed: the noise was the server's and is gone, and fresh noise on the same sums is
    a further release. There the job ends with its attempt.
    """

    def __init__(
        self,
        job: PrivateTreesJob,
        context: SiteContext,
        plan: JobPlan,
        rows: bytes,
        evidence: EvidenceLog | None = None,
    ):
        """Reserve the cost of the whole plan, if two accountants agree on it.

        Args:
            rows: hash of the rows; it stays in this site's own ledger.

        Raises:
            PolicyRefusal: the data set has no budget or not so much left, a person has more rows at this site than
                the job protects.
            ConfigurationError: there is no such job to resume; a ``DataRefusal``: rows or sites are not those of it.
        """
        job_id = job.resume_from or context.job_id
        relation = NeighbouringRelation.ADD_OR_REMOVE_ROW
        ledger = JobLedger(context.policy, job.data_set, job_id, relation, evidence, job.at_delta)
        check_rows_per_person(context.policy, job.data_set, job.rows_per_person)
        if job.resume_from is not None and not ledger.is_known:
            raise ConfigurationError(f"the ledger of {context.site} knows no job {job.resume_from} to resume")
        super().__init__(
            context,
            ledger,
            job.data_set,
            plan.releases.events,
            rows,
            may_replay=not plan.training.trust.is_trusted_aggregator,
            is_kept=waiting_s(job) is not None,
            job_id=job_id,
        )


# One site's part in a private training, from its policy to its model.
#
# Nothing that depends on rows leaves the site before its policy has allowed the job, all sites are authenticated and
# have equal terms, and the ledger of every site has reserved the whole plan. Then only noised sums leave, each charged
# first.


TITLE = "Differentially private federated trees"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrivateInput:
    """What a site knows before it talks to anyone.

    Attributes:
        rows: those that the job can use, values clipped to their public bounds.
        n_reports: rows of the file, those left out included: under local noise each of them reports nothing but noise.
        facts: on the rows that the job can use, for this site's own record.
        note_persons: to be called once the price is reserved, before anything is released.
    """

    plan: JobPlan
    schema: Schema
    rows: OwnRows
    n_reports: int
    facts: DataFacts
    note_persons: Callable[[], None]

    def row_hash(self) -> bytes:
        """Return a hash of the rows, for this site's own ledger."""
        rows = self.rows
        parts = [rows.label] if rows.weights is None else [rows.label, rows.weights]
        digest = hashlib.sha256()
        for part in (*rows.columns, *parts):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.digest()


def prepare(job: PrivateTreesJob, context: SiteContext) -> PrivateInput:
    """Check the job against the policy, and load the rows that it can use, at this site alone.

    Privacy: a row that the job cannot use, whose buckets were sent, of a person who asked to be forgotten, or
        for whom the budget of another data set pays, is left out, whatever the other rows are; values are clipped to
        public bounds, or missing. So one row changes neither what happens to the others nor whether the job goes on,
        and a site may have no row at all.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: the job does not fit the columns; a ``DataRefusal``: the file cannot be read.
    """
    policy = context.policy
    spec = policy.check_job(JobTerms(job.profile, job.data_set, tracking=job.tracking), context.sites)
    if job.trust == "distributed" and job.colluders < policy.max_colluders:
        raise PolicyRefusal(
            f"the policy of {policy.site} expects up to {policy.max_colluders} colluding sites, and the job's noise "
            f"holds against {job.colluders}. Policy key: max_colluders. Remedy: raise the job's colluders, or ask "
            f"{policy.site} to change it."
        )
    others = noise_at_site(policy, job)
    spec.check_holds_bins("a private training holds them")
    sent, persons = SentRows(policy), PersonsOfBudgets(policy, spec)
    forgetting = Forgetting(policy)
    asks_for_sent, forgets = sent.asks_for_ids(spec), forgetting.asks_for_ids(spec)
    names = column_names(spec, job.label, job.weight, job.features)
    plan = JobPlan.of(job, len(context.sites), names, others)
    check_names_survive(names, job.categories)
    table = load_table(
        spec,
        label=job.label,
        weight=job.weight,
        features=names,
        categories=job.categories,
        label_classes=job.label_classes,
        with_ids=asks_for_sent or forgets or persons.needs_ids,
        repair=True,
        takes_passes=reads_in_passes(policy, job.data_set, [spec]),
    )
    n_reports = table.n_rows
    for note in table.notes:
        _log.info("%s", note)
    if job.at_delta * n_reports >= 1:
        _log.warning(
            "delta %g of this job is not below one over the rows of data set %r: it would allow to publish a row in "
            "full",
            job.at_delta,
            job.data_set,
        )
    table = table.kept(job.accepts(table.label), f"whose label {job.label!r} is missing, or none that the job takes")
    _log_clipped_labels(table, job)
    if table.weight is not None:
        table = table.kept(~np.isnan(table.weight), f"whose weight {job.weight!r} is missing or negative")
    if asks_for_sent:
        table = table.kept(~sent.sent(usable_ids(table.ids, spec)), "whose randomised buckets were sent")
    if forgets:
        table = table.kept(forgetting.are_free(usable_ids(table.ids, spec), spec.name), ASKED)
    ids: list[str | None] = []
    if persons.needs_ids:
        table = table.kept(persons.are_new(usable_ids(table.ids, spec)), "of persons whom another budget pays for")
        ids = usable_ids(table.ids, spec)
    log_what_labels_lack(table, job.data_set, is_classification=job.label_bounds is None)
    _log_bounds_that_no_value_meets(table, plan)
    rows = OwnRows(clipped(table, plan.training.bounds), table.label, _weights(table, job))
    facts = DataFacts.of(table, job.data_set)
    return PrivateInput(plan, Schema.of(table), rows, n_reports, facts, lambda: persons.note(ids))


def _log_clipped_labels(table: Table, job: PrivateTreesJob) -> None:
    """Tell this site's own log, and nobody else, how many labels count as the bound that they lie beyond."""
    if job.label_bounds is not None:
        low, high = job.label_bounds
        is_number = np.isfinite(table.label) & ((table.label > 0) if table.label.ndim == 2 else True)
        is_beyond = is_number & ((table.label < np.float32(low)) | (table.label > np.float32(high)))
        n_beyond = int(np.count_nonzero(is_beyond.reshape(table.n_rows, -1).any(axis=1)))
        log_count(f"labels {job.label!r} beyond label_bounds", n_beyond, table.n_rows)


def _log_bounds_that_no_value_meets(table: Table, plan: JobPlan) -> None:
    """Tell this site's own log, and nobody else, which columns will be the same everywhere here once clipped.

    Files that are read in passes are not read once more for it.
    """
    if table.passes is not None:
        return
    for name, bounds, column in zip(plan.training.feature_names, plan.training.bounds, table.features.T, strict=True):
        if np.isfinite(column).any() and not ((column >= bounds.low) & (column <= bounds.high)).any():
            _log.warning("no value of column %r lies within the job's bounds: each counts as one of them", name)


def _weights(table: Table, job: PrivateTreesJob) -> NDArray[np.float32] | None:
    if table.weight is None or job.max_weight is None:
        return None
    weights: NDArray[np.float32] = np.clip(table.weight / np.float32(job.max_weight), 0.0, 1.0).astype(np.float32)
    return weights


def _protection(job: PrivateTreesJob, prepared: PrivateInput) -> dict[str, str | int]:
    """Return what the evidence says about the protection."""
    plan = prepared.plan
    shares = plan.training.trust.shares
    return {
        "trust": job.trust,
        "epsilon": f"{job.epsilon:g}",
        "delta": f"{job.at_delta:g}",
        "rows_per_person": str(job.rows_per_person),
        "method": plan.training.method.name,
        "colluders": "none" if shares is None else str(shares.n_colluders),
        "noise_multiplier": f"{plan.releases.tree_noise.multiplier:.9g}",
        **_of_others(plan),
    }


def _of_others(plan: JobPlan) -> dict[str, str]:
    """Return whose noise it is and what a query of it costs, where it is not ours."""
    others = plan.releases.tree_noise.others
    if others is None:
        return {}
    return {"noise": others.event.mechanism, "noise_epsilon": f"{others.event.epsilon:.9g}"}


def _open_sums(plan: JobPlan, attempt: SiteAttempt) -> ProtectedSums:
    """Return the masked sums of a job; only a trusted aggregator may read the sum itself, and change it."""
    session = attempt.session
    if plan.training.trust.is_trusted_aggregator:
        secrets = session.rank, session.pair_secrets, session.group_secret
        readable = PairwiseMasks(session.session_id, *secrets, blinder=None)  # hide the sites' parts, not their sum
        return ProtectedSums(attempt.channel, MaskedSums(readable), None)
    return ProtectedSums(attempt.channel, MaskedSums(session.masks), session.tags)


class _Training:
    """The steps of one attempt after the session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: PrivateInput, workers: Workers | None) -> None:
        self._attempt, self._prepared, self._progress = attempt, prepared, attempt.progress
        self._workers = workers
        self._job: PrivateTreesJob = attempt.job
        self._plan = prepared.plan
        self._last = time.perf_counter()

    def run(self) -> JobResult:
        """Agree, reserve, train, compare models, write results."""
        attempt, context = self._attempt, self._attempt.context
        agree(attempt.channel, attempt.session, self._terms())
        # A process that dies settles nothing: what it has charged stays charged, what it has reserved is free again
        # with the next private job on the data set.
        with Payment(self._job, context, self._plan, self._prepared.row_hash(), attempt.evidence) as payment:
            _log.info("%s", payment.quote.message)
            self._prepared.note_persons()
            payment.begin(attempt.gather_sealed("reserved", payment.history()))
            for line in lines(summarise(self._plan)):
                self._progress.say(line)
            self._last = time.perf_counter()
            trained = self._train(payment)
            names, job = self._plan.training.feature_names, self._job
            model = finished(with_positive_covers(trained), names, job.categories, job.label_classes)
            if self._plan.training.method.query.is_clipped and job.target is TWO_CLASSES:
                model = with_clipping(model, CLIPPED_AT)
            hmac = attempt.conclude(model)
            path = attempt.folder.write_model(model)
            attempt.all_have_written()
            spent = payment.spent()
            payment.complete()
        plan = self._plan
        replayed = "replayed from the ledgers, at no charge, what had been released before"
        notes = (gone_on(context.number, (), replayed),) if context.number > 1 else ()
        noise = leaf_noise(plan.training, model)
        of_scores = None if noise is None else NoiseOfScores(FinishedModel(model, path.name), noise).of_sample
        sections = report_sections(plan, spent, payment.quote.message, of_scores)
        if self._workers is not None:
            sections = (*sections, work_section(self._workers.work))
        method = self._terms().parameters["method"]
        attempt.write_record(
            TITLE, method, path.name, sections, data=(self._prepared.facts,), notes=notes, leaf_noise=noise
        )
        self._progress.say(f"this job has spent {epsilon_text(spent, self._job.at_delta)}")
        summary = {"n_rounds": plan.releases.n_rounds, "epsilon": self._job.epsilon, "delta": self._job.at_delta}
        return JobResult(hmac.hex(), f"the model is {path}", summary)

    def _terms(self) -> Terms:
        training = self._plan.training
        components = dataclasses.asdict(training.method).items()
        method = {name: value.name.lower() if hasattr(value, "name") else value for name, value in components}
        bounds = [[b.low, b.high] for b in training.bounds]
        parameters = {"method": method, "bounds": bounds, "noise": training.releases.multipliers()}
        parameters |= {"noise_of_others": _of_others(self._plan)} if self._job.noise else {}
        return Terms(versions(), self._job.stated(), parameters, self._prepared.schema, {}, {})

    def _train(self, payment: Payment) -> bytes:
        attempt, prepared, training = self._attempt, self._prepared, self._plan.training
        sums = NoisySums(_open_sums(self._plan, attempt), training, payment.pay, n_rows=prepared.n_reports)
        if self._workers is None:
            return train(training, attempt.channel, sums, prepared.rows, self._after_round)
        return train_in_shards(
            self._workers, self._job, self._plan, attempt.channel, sums, prepared.rows, self._after_round
        )

    def _after_round(self, number: int) -> None:
        now = time.perf_counter()
        row = RoundRow(number, now - self._last)
        self._last = now
        self._attempt.round_done(row)
        self._progress(row, self._plan.releases.n_rounds)


def _take_part(attempt: SiteAttempt, prepared: PrivateInput) -> JobResult:
    with (
        workers_of(attempt.context.policy, attempt.job.data_set) as workers,
        watched(workers, attempt.progress) as attempt.progress,
    ):
        return _Training(attempt, prepared, workers).run()


run_private_trees_site = SitePart(prepare, _take_part, protection=_protection, uses_cluster=True)
"""Takes part in one attempt of a job. A refusal comes before anything is released."""
