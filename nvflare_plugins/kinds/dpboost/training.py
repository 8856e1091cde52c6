"""One site's part in a DPBoost job, from its policy to an ordinary XGBoost model."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.dpboost.ensemble_of_ensembles import DpBoostModel, SiteData, add_trees, start_scores
from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS
from dp_components.dpboost.gradient_based_data_filtering import gradient_sensitivity
from dp_components.dpboost.single_tree import SplitTable, SquaredLoss, TreeRows, assign_records, start_sums
from dp_components.events import Release
from dp_components.mechanisms import TrustModel
from dp_components.split_methods.tree import LEAF, Tree
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.masks import MessageLabel, PairwiseMasks
from nvflare_plugins.attempt.job_context import JobResult, SiteContext, waiting_s
from nvflare_plugins.attempt.payment import HISTORY_BYTES, AttemptPayment, JobLedger, check_rows_per_person
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart, gone_on
from nvflare_plugins.data.identity import usable_ids
from nvflare_plugins.data.table import load_table, log_what_labels_lack
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import START, KeptAnswers, TreeStep, price, steps
from nvflare_plugins.pages.run_record import TRAINING, DataFacts, PointCurve, ReportSection, RoundRow, missing_of, texts
from nvflare_plugins.site.memory.budgets import PersonsOfBudgets
from nvflare_plugins.site.memory.forgetting import ASKED, Forgetting
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy_values import JobTerms
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.profiles import MaskedSums
from nvflare_plugins.xgb.model_json import (
    check_names_survive,
    empty_tree_document,
    finished,
    model_bytes,
    model_document,
    shortest_decimals,
    with_positive_covers,
)

# Released trees as an ordinary XGBoost model.


def xgboost_model(model: DpBoostModel, feature_names: Sequence[str]) -> bytes:
    """Return a model in XGBoost's JSON form that predicts what ``DpBoostModel.predict`` does, to float32's precision.

    A regression's predictions are not clamped to the label's public bounds by XGBoost.

    Privacy: post-processing of released trees; nothing else of the rows is in it.
    """
    table, candidates = SplitTable.of(model.candidates), model.candidates
    objective, base_score, unit = "binary:logistic", "[5E-1]", 1.0
    if isinstance(model.loss, SquaredLoss):
        low, high = model.loss.label_bounds.low, model.loss.label_bounds.high
        unit = (high - low) / 2
        start = (low + high) / 2 + math.ldexp(model.start, -LEAF_BITS) * unit
        objective, base_score = "reg:squarederror", f"[{start:.9E}]"
    trees = []
    for number, tree in enumerate(model.trees):
        n_leaves = (tree.size + 1) // 2
        weights = np.ldexp(tree[-n_leaves:].astype(np.float64), -LEAF_BITS) * model.learning_rate * unit
        written = empty_tree_document(number, _structure(tree, table), candidates)
        written["split_conditions"][-n_leaves:] = shortest_decimals(weights.astype(np.float32))
        trees.append(written)
    document = model_document(
        trees,
        len(candidates.of_feature),
        batch_size=1,
        objective=objective,
        base_score=base_score,
        feature_names=feature_names,
    )
    return model_bytes(document)


def _structure(tree: np.ndarray, table: SplitTable) -> Tree:
    """Return a complete tree's structure, level by level. Shapes: tree: as ``train_single_tree`` gives it."""
    n_inner = tree.size // 2
    inner = np.arange(tree.size) < n_inner
    splits = np.where(inner, tree, 0)
    children = np.arange(tree.size) * 2 + 1
    arrays = (
        np.where(inner, table.feature[splits], LEAF),
        np.where(inner, table.candidate[splits], 0),
        np.where(inner, children, LEAF),
        np.where(inner, children + 1, LEAF),
    )
    return Tree(*(array.astype(np.int32) for array in arrays))


# One site's part in a DPBoost training, from its policy to its model.
#
# Nothing that depends on rows leaves the site before its policy has allowed the job, all sites are authenticated and
# have equal terms, and the ledger of every site has reserved the whole plan. Each tree is charged before its first sum
# leaves.


TITLE = "DPBoost"
_PAID = np.zeros(1, dtype=np.int64)  # the noise is the server's: a site's ledger is charged and keeps no reply
_log = logging.getLogger(__name__)


def _protection(job: DpBoostJob, data: SiteData) -> dict[str, str | int]:
    return {
        "trust": TrustModel.TRUSTED_AGGREGATOR.value,
        "epsilon": f"{job.epsilon:g}",
        "variant": job.variant,
        "rows_per_person": str(job.rows_per_person),
    }


def prepare(job: DpBoostJob, context: SiteContext) -> SiteData:
    """Check the job against the policy, and load the rows that it can use, at this site alone.

    Privacy: a row without a usable label or id, whose randomised buckets were sent, or of a person for whom the budget
        of another data set pays, is left out, whatever the other rows are; values are clipped, or missing. An id may
        stand there twice: a row's tree follows from its own id, and ``rows_per_person`` counts rows. So one row changes
        neither what happens to the others nor whether the job goes on, and a site may have no row at all.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: the job does not fit the columns; a ``DataRefusal``: the file cannot be read.
    """
    spec = context.policy.check_job(JobTerms(job.profile, job.data_set), context.sites)
    check_rows_per_person(context.policy, job.data_set, job.rows_per_person)
    if spec.id is None:
        raise ConfigurationError(
            f"rows choose their trees by id, and the policy of {context.site} names no id column. Policy key: "
            f"data_sets.{job.data_set}.id."
        )
    if spec.id in (*job.names, job.label):
        raise ConfigurationError(f"the id column of data set {spec.name!r} can be neither feature nor label")
    spec.check_holds_bins("a private training holds them")
    check_names_survive(job.names, job.categories)
    sent, persons = SentRows(context.policy), PersonsOfBudgets(context.policy, spec)
    forgetting = Forgetting(context.policy)
    asks, forgets = sent.asks_for_ids(spec), forgetting.asks_for_ids(spec)
    table = load_table(
        spec,
        label=job.label,
        features=job.names,
        categories=job.categories,
        label_classes=job.label_classes,
        with_ids=True,
        repair=True,
        takes_passes=True,
    )
    for note in table.notes:
        _log.info("%s", note)
    is_usable = np.isfinite(table.label) if job.label_bounds is not None else np.isin(table.label, (0.0, 1.0))
    table = table.kept(is_usable, f"whose label {job.label!r} the job cannot use")
    ids = usable_ids(table.ids, spec)
    table = table.kept(np.array([name is not None for name in ids], dtype=np.bool_), "without a usable id")
    if asks:
        is_free = ~sent.sent(usable_ids(table.ids, spec))
        table = table.kept(is_free, "whose randomised buckets were sent")
    if forgets:
        table = table.kept(forgetting.are_free(usable_ids(table.ids, spec), spec.name), ASKED)
    table = table.kept(persons.are_new(usable_ids(table.ids, spec)), "of persons whom another budget pays for")
    log_what_labels_lack(table, job.data_set, is_classification=False)
    names = [str(name) for name in usable_ids(table.ids, spec)]
    columns = np.ascontiguousarray(table.features.T) if table.passes is None else table.passes
    return SiteData(context.site, columns, table.label.astype(np.float64), names)


def _row_hash(data: SiteData) -> bytes:
    """Return a hash of the rows and of what decides which tree each is in, for this site's own ledger."""
    digest = hashlib.sha256()
    for part in (*data.columns, data.label):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(json.dumps(list(data.record_ids)).encode())
    return digest.digest()


class _Training:
    """The steps of one attempt after the session is open."""

    def __init__(self, attempt: SiteAttempt, data: SiteData) -> None:
        self._attempt, self._data, self._progress = attempt, data, attempt.progress
        self._job: DpBoostJob = attempt.job
        job = self._job
        self._plan, self._candidates, self._loss = job.plan(), job.candidates(), job.loss()
        self._table = SplitTable.of(self._candidates)
        self._bins = self._candidates.bin_rows(data.columns)
        self._target = self._loss.target(data.label)
        session = attempt.session
        # The server, which is trusted with it, may read the sum, but no site's part.
        secrets = session.rank, session.pair_secrets, session.group_secret
        self._masks = MaskedSums(PairwiseMasks(session.session_id, *secrets, blinder=None))
        self._kept = KeptAnswers(attempt.folder.path, is_kept=waiting_s(job) is not None)
        self._spent: list[float] = []
        self._n_asked = 0
        self._state = hashlib.sha256()  # of all that the next answer depends on but the rows

    def run(self) -> JobResult:
        """Reserve, train, compare models, write results."""
        attempt, job = self._attempt, self._job
        with self._reserve() as payment:
            self._begin(payment)
            start = self._start(payment)
            trees = list(self._train(payment, start))
            model = DpBoostModel(self._candidates, self._loss, self._plan.learning_rate, np.stack(trees), start)
            written = with_positive_covers(xgboost_model(model, job.names))
            content = finished(written, job.names, job.categories, job.label_classes)
            hmac = attempt.conclude(content)
            path = attempt.folder.write_model(content)
            attempt.all_have_written()
            payment.complete()
            self._kept.drop()
        number = attempt.context.number
        notes = (gone_on(number, attempt.rounds),) if number > 1 else ()
        sections = self._sections()
        attempt.write_record(TITLE, self._parameters(), path.name, sections, data=(self._facts(),), notes=notes)
        self._progress.say(f"this job has spent epsilon {self._spent[-1]:.4g}, pure")
        summary = {"n_rounds": len(trees), "epsilon": job.epsilon}
        return JobResult(hmac.hex(), f"the model is {path}", summary)

    def _reserve(self) -> AttemptPayment:
        """Reserve the cost of the whole plan."""
        attempt, job = self._attempt, self._job
        context, relation, waits = attempt.context, gradient_sensitivity().relation, waiting_s(job) is not None
        ledger = JobLedger(context.policy, job.data_set, context.job_id, relation, attempt.evidence)
        plan, rows = self._plan.events_by_tree(), _row_hash(self._data)
        return AttemptPayment(context, ledger, job.data_set, plan, rows, may_replay=waits, is_kept=waits)

    def _begin(self, payment: AttemptPayment) -> None:
        """Note the persons, and agree on what earlier attempts have left."""
        attempt, job, policy = self._attempt, self._job, self._attempt.context.policy
        PersonsOfBudgets(policy, policy.data_set(job.data_set)).note(self._data.record_ids)
        said = attempt.gather_sealed("reserved", payment.history() + self._kept.offer())
        payment.begin([one[:HISTORY_BYTES] for one in said])
        fresh = attempt.session.hmac("assignment of rows to trees", b"")
        self._kept.agree(attempt, [one[HISTORY_BYTES:] for one in said], fresh)
        self._state = hashlib.sha256(self._kept.key + json.dumps(job.stated(), sort_keys=True).encode())

    def _facts(self) -> DataFacts:
        job, columns = self._job, self._data.columns
        return DataFacts(
            job.data_set,
            TRAINING,
            self._data.label.size,
            tuple(job.names),
            missing_of(job.names, columns),
            {name: texts(entries) for name, entries in job.categories.items()},
            job.label,
            texts(job.label_classes),
        )

    def _start(self, payment: AttemptPayment) -> int:
        """Return the score to start from, paid for. Units: 2^-LEAF_BITS."""
        if not self._plan.start_share:
            return 0
        self._pay(payment, START)
        grad = self._loss.gradient(np.zeros(self._target.size), self._target)
        start = self._answer(payment, START, lambda: start_sums(grad))
        self._check(np.abs(start) <= 1 << LEAF_BITS)
        return int(start[0])

    def _train(self, payment: AttemptPayment, start: int) -> Iterator[NDArray[np.int64]]:
        """Yield the released trees. Shapes: int64[2^depth - 1 + 2^depth] each."""
        scores, chosen_trees, ensemble = start_scores(start, self._target.size), np.empty(0, dtype=np.int64), -1
        of_trees = (step for step in steps(self._job) if step is not START)
        for number, of_tree in groupby(of_trees, key=lambda step: step.number):
            started, exchanges = time.perf_counter(), list(of_tree)
            first = exchanges[0]
            if first.ensemble != ensemble:
                ensemble, data = first.ensemble, self._data
                shares = self._plan.row_shares(ensemble)
                chosen_trees = assign_records(self._kept.key, data.site, data.record_ids, ensemble, shares)
            self._pay(payment, first)
            n_asked = self._n_asked
            tree = self._grow(payment, exchanges, chosen_trees == first.tree, scores)
            scores = add_trees(scores, tree[np.newaxis], self._bins, self._table, self._plan.learning_rate)
            self._spent.append(payment.spent())
            if self._n_asked > n_asked:  # not a tree of an earlier attempt
                row = RoundRow(number, time.perf_counter() - started)
                self._attempt.round_done(row)
                self._progress(row, self._plan.n_trees)
            yield tree

    def _pay(self, payment: AttemptPayment, step: TreeStep) -> None:
        """Charge the start or a whole tree, once over all attempts: what the answers depend on is part of the query."""
        what = "start" if step is START else f"tree {step.number}"
        query = f"{what}; after {self._state.hexdigest()[:32]}"
        payment.pay(query, lambda: Release(_PAID, price(self._plan, step)))

    def _grow(
        self,
        payment: AttemptPayment,
        exchanges: list[TreeStep],
        is_assigned: NDArray[np.bool_],
        scores: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        grad = self._loss.gradient(scores[is_assigned], self._target[is_assigned])
        rows = TreeRows(self._bins[:, is_assigned], grad, self._table)
        parts = []
        for step in exchanges:
            is_level = step.kind is Kind.HISTOGRAM
            sums = partial(rows.bin_sums if is_level else rows.leaf_sums, step.n_nodes)
            parts.append(self._answer(payment, step, sums))
            if is_level:
                self._check((parts[-1] >= 0) & (parts[-1] < self._table.feature.size))
                rows.move_down(parts[-1])
            else:
                self._check(np.abs(parts[-1]) <= self._plan.tree_settings(step.ensemble, step.tree).leaf_bound)
        return np.concatenate(parts)

    def _answer(self, payment: AttemptPayment, step: TreeStep, sums: Callable[[], ArrayLike]) -> NDArray[np.int64]:
        """Return the server's choice, leaves or start: of an earlier attempt, or asked and then kept.

        Raises:
            ProtocolError: as ``_ask``, or a site has given an answer that the server cannot have given.
        """
        answer = self._kept.take(step.n_nodes)
        if answer is not None and not payment.was_begun:
            raise ProtocolError(
                "a site has given answers of an earlier attempt to what no site had paid for then: submit the job anew"
            )
        if answer is None:
            answer = self._ask(step, np.asarray(sums()))
            self._kept.add(answer)
        self._state.update(answer.astype("<i8").tobytes())
        return answer

    def _ask(self, step: TreeStep, sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send this site's masked sums; return what the server makes of them."""
        self._n_asked += 1
        channel = self._attempt.channel
        channel.moment = step.moment
        label = MessageLabel(channel.counter, step.kind.name, str(step.moment), sums.size)
        payload = self._masks.protect(sums.ravel(), label)
        reply = channel.sum(step.kind, self._masks.codec, payload, sums.size)
        if len(reply) != 8 * step.n_nodes:
            raise ProtocolError(f"{step.kind.name}: the server's answer has another size than it should")
        return np.frombuffer(reply, dtype="<i8").astype(np.int64)

    @staticmethod
    def _check(is_possible: NDArray[np.bool_]) -> None:
        if not is_possible.all():
            raise ProtocolError("the server chose a split, or released a number, that cannot be")

    def _parameters(self) -> dict[str, object]:
        plan = self._plan
        return {
            "variant": self._job.variant,
            "n_trees": plan.n_trees,
            "trees_per_ensemble": plan.trees_per_ensemble,
            "depth": plan.depth,
            "learning_rate": plan.learning_rate,
            "lambda": plan.ridge,
            "epsilon of the start": plan.start_epsilon,
            "epsilon of a level's splits": plan.split_epsilon,
            "epsilon of a tree's leaves": plan.leaf_epsilon,
        }

    def _sections(self) -> tuple[ReportSection, ...]:
        job = self._job
        paragraphs = (
            TrustModel.TRUSTED_AGGREGATOR.description,
            f"All rows of one person, up to {job.rows_per_person}, added or removed change the chance of any model by "
            f"a factor of e^{job.epsilon:g} at most. Trees of one ensemble use other rows each, so that they cost as "
            "much as one.",
        )
        points = tuple((float(number + 1), epsilon) for number, epsilon in enumerate(self._spent))
        curve = ReportSection(
            "Privacy spent over trees", curves=(PointCurve("epsilon", points),), x_label="tree", y_label="epsilon"
        )
        return ReportSection("Privacy", paragraphs), curve


run_dpboost_site = SitePart(
    prepare,
    lambda attempt, data: _Training(attempt, data).run(),
    protection=_protection,
)
"""Takes part in one attempt of a job. A refusal comes before anything is released."""
