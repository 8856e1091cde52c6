"""One party's part in a FederBoost job, and the training over its buckets."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import is_plain_text
from nvflare_plugins.evidence.format import PAID_IN, Content, Protection
from nvflare_plugins.kinds.federboost_vertical import tables
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob, Description
from nvflare_plugins.kinds.federboost_vertical.payment import BucketPayment, KeptBuckets, KeptEdges, plan_of
from nvflare_plugins.kinds.vertical.job import check_vertical_parameters
from nvflare_plugins.kinds.vertical.model import (
    ActivePart,
    Part,
    PartyColumns,
    PassivePart,
    PrivateTable,
    conclude_part,
    mask_columns,
)
from nvflare_plugins.pages.run_record import TRAINING, DataFacts, ReportSection, RoundRow, missing_of
from nvflare_plugins.site.memory.budgets import PersonsOfBudgets
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy_values import JobTerms
from nvflare_plugins.wire.envelope import Phase, TrainingStep
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import LEAST_XGBOOST, LEAST_XGBOOST_ATTRIBUTE
from nvflare_plugins.xgb.parameters import TrainingParameters

# The active party's part: stock XGBoost on its own features and the others' randomised buckets.


_log = logging.getLogger(__name__)
N_FOLDS = 5
_FOLD_SEED = 0  # public: which rows are held out tells nothing
_NOT_FOR_BUCKETS = ("monotone_constraints", "interaction_constraints")


def check_bucket_parameters(params: dict[str, object], n_buckets: int) -> TrainingParameters:
    """Check XGBoost's parameters before anything is sent.

    Raises:
        ConfigurationError: a parameter that vertical jobs do not support, or one that names columns: the columns of
            the others have no names; or a ``max_bin`` below the number of buckets, which would merge some.
    """
    for name in _NOT_FOR_BUCKETS:
        if name in params:
            raise ConfigurationError(f"{name} names columns, and buckets of other parties have no names")
    parameters = check_vertical_parameters(params, ["any"], [])
    if parameters.max_bin < n_buckets:
        raise ConfigurationError(f"max_bin={parameters.max_bin} would merge the {n_buckets} buckets of other parties")
    return parameters


def train_on_buckets(
    own: NDArray[np.float32],
    label: NDArray[np.float32],
    parties: Sequence[tables.BucketBlock],
    parameters: TrainingParameters,
    num_rounds: int,
    cores: int | None = None,
) -> bytes:
    """Train on own features and buckets; rows whose label the objective does not take are left out here alone.

    Shapes:  own: float32[n_own, n_rows]; label: float32[n_rows].
    Privacy: post-processing of the released buckets; nothing is sent meanwhile.

    Args:
        cores: cores that XGBoost may use; None asks the operating system.

    Returns:
        The model in XGBoost's JSON form; columns of other parties split at numbers of buckets.
    """
    columns, label = _usable(own, label, parties, parameters)
    settings = parameters.for_booster(cores)
    matrix = xgb.QuantileDMatrix(
        np.ascontiguousarray(columns.T), label=label, max_bin=parameters.max_bin, nthread=settings["nthread"]
    )
    return bytes(xgb.train(settings, matrix, num_rounds).save_raw("json"))


def cross_validated(
    own: NDArray[np.float32],
    label: NDArray[np.float32],
    parties: Sequence[tables.BucketBlock],
    parameters: TrainingParameters,
    num_rounds: int,
) -> dict[str, tuple[float, float]]:
    """Return the objective's own metric, and AUC, in five-fold cross validation: name -> (mean, sd over folds).

    Empty for fewer rows than folds.

    Shapes, Privacy: as ``train_on_buckets``; what is returned stays at the active party.
    """
    columns, label = _usable(own, label, parties, parameters)
    if label.size < N_FOLDS:
        return {}
    settings, found = parameters.for_booster(), defaultdict(list)
    for name in ("eval_metric", "disable_default_eval_metric"):
        del settings[name]
    if str(settings["objective"]).startswith("binary:"):
        settings["eval_metric"] = ["logloss", "auc"]
    fold = np.random.default_rng(_FOLD_SEED).permutation(label.size) % N_FOLDS
    for held in range(N_FOLDS):
        kept, out = fold != held, fold == held
        how = {"max_bin": parameters.max_bin, "nthread": settings["nthread"]}
        train = xgb.QuantileDMatrix(np.ascontiguousarray(columns[:, kept].T), label=label[kept], **how)
        test = xgb.QuantileDMatrix(np.ascontiguousarray(columns[:, out].T), label=label[out], ref=train, **how)
        of_fold: dict[str, dict[str, list[float]]] = {}
        xgb.train(settings, train, num_rounds, evals=[(test, "test")], evals_result=of_fold, verbose_eval=False)
        for name, values in of_fold.get("test", {}).items():
            found[name].append(float(values[-1]))
    return {name: (float(np.mean(values)), float(np.std(values, ddof=1))) for name, values in found.items()}


def _usable(
    own: NDArray[np.float32],
    label: NDArray[np.float32],
    parties: Sequence[tables.BucketBlock],
    parameters: TrainingParameters,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return columns and label of the rows whose label the objective takes."""
    columns = np.concatenate([own, *(block.ids.astype(np.float32) for block in parties)])
    is_usable = parameters.objective.accepts(label)
    if not is_usable.any():
        raise DataRefusal("no row has a label that the objective takes")
    if not is_usable.all():
        _log.warning("rows left out, whose label the objective does not take: %d", int(np.count_nonzero(~is_usable)))
        columns, label = columns[:, is_usable], label[is_usable]
    return columns, label


# One site's part in FederBoost's vertical training: the active party's, or a passive one's.
#
# Nothing that depends on rows leaves a passive party before its policy has allowed the job, all parties are
# authenticated and hold the same rows, and its ledger has paid. What remains are the parts of a vertical model, as
# exact vertical training leaves them: rows are predicted by the inference job, which refuses those whose buckets were
# sent.


TITLE = "Vertical XGBoost on randomised buckets (FederBoost)"
_MAX_FEATURES = 1 << 16


@dataclass(frozen=True, slots=True)
class PartyInput:
    """What a site knows before it talks to anyone.

    Attributes:
        aliases: what the others call this party's features; those of the active party have their own names.
        description: what is public about the features, at a passive party that sends buckets.
        buckets, edges: what the active, or a passive party has kept of the job whose buckets this one takes.
    """

    rows: tables.PartyRows
    aliases: tuple[str, ...]
    description: Description | None = None
    buckets: KeptBuckets | None = None
    edges: KeptEdges | None = None


def _train(attempt: SiteAttempt, prepared: PartyInput) -> JobResult:
    if attempt.context.site == attempt.job.active:
        return ActiveParty(attempt, prepared).run()
    return (BucketSender if prepared.edges is None else SplitReceiver)(attempt, prepared).run()


def _protection(job: BucketJob, prepared: PartyInput) -> dict[str, str | int]:
    told: dict[str, str | int] = {"trust": "local", "unit": job.unit}
    if job.buckets_from is not None:
        return {**told, "epsilon": "0", "edges_epsilon": "0", PAID_IN: job.buckets_from}
    return {**told, "epsilon": f"{job.epsilon:g}", "edges_epsilon": f"{job.most_for_edges:g}"}


def prepare(job: BucketJob, context: SiteContext) -> PartyInput:
    """Check the job against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job, parameters or data are not usable; the message says which.
    """
    if job.active not in context.sites:
        raise ConfigurationError(f"the job's active party {job.active} is not among its sites")
    fewest = 2 if job.buckets_from is None else 1
    spec = context.policy.check_vertical(JobTerms(job.profile, job.data_set), context.sites, fewest)
    if context.site == job.active:
        if spec.privacy is not None:
            context.policy.check_exact_use(job.data_set, "nothing protects the active party's labels and columns")
        check_bucket_parameters(dict(job.params), job.n_buckets)
        names = job.features if job.features is not None else tables.column_names(spec, job.label)
        rows = tables.load_rows(spec, names, job.label, context, job.alignment)
        return PartyInput(rows, rows.names, buckets=None if job.buckets_from is None else _kept(job, context, rows))
    if job.buckets_from is not None:
        edges = KeptEdges.read(job, context)
        return PartyInput(tables.load_rows(spec, edges.names, None, context, job.alignment), edges.aliases, edges=edges)
    description = Description.read(context.policy.input_file(job.description))
    plan_of(job, description.features)  # refuses what would not be worth its price
    rows = tables.load_rows(spec, description.names, None, context, job.alignment)
    return PartyInput(rows, _aliases(spec, description.names), description)


def _kept(job: BucketJob, context: SiteContext, rows: tables.PartyRows) -> KeptBuckets:
    kept = KeptBuckets.read(job, context, rows.id_bytes())
    if set(context.sites) not in ({job.active}, {job.active, *kept.sites}):
        raise ConfigurationError(
            f"the buckets of job {job.buckets_from} are of {', '.join(kept.sites)}: let all of them take part, "
            f"who then get their splits, or {job.active} alone"
        )
    return kept


Thing = TypeVar("Thing")


def _required(value: Thing | None) -> Thing:
    """Return what a party of this kind has: the active one a label, the others a description."""
    if value is None:
        raise ValueError("a party of the other kind")
    return value


class _Party:
    """The steps that both kinds of parties share; every exchange is one of all sites."""

    def __init__(self, attempt: SiteAttempt, prepared: PartyInput) -> None:
        self._attempt, self._prepared, self._progress = attempt, prepared, attempt.progress
        self._job: BucketJob = attempt.job
        self._channel = attempt.channel
        self._rows = prepared.rows
        self._active = self._channel.sites.index(self._job.active)
        self._passive = [rank for rank in range(self._channel.world) if rank != self._active]

    def _check_rows(self) -> None:
        """Refuse parties whose rows differ, before anything about them is sent."""
        proof = self._attempt.session.hmac("rows to train on", self._rows.id_bytes())
        proofs = self._attempt.gather_sealed("rows to train on", proof)
        different = [site for site, other in zip(self._channel.sites, proofs, strict=True) if other != proof]
        if different:
            raise ConfigurationError(
                f"{', '.join(different)} and {self._channel.site} hold other rows to train on: run an alignment job "
                "and name it in this one"
            )

    def _go_on(self) -> list[tuple[str, ...]]:
        """Wait until every party has allowed what follows; return the aliases that each announces, by rank."""
        answers = self._attempt.gather_sealed("go on", json.dumps(self._prepared.aliases).encode())
        return [_read_aliases(answer) for answer in answers]

    def _blocks(self, aliases: list[tuple[str, ...]]) -> list[list[slice]]:
        """Return, for each rank, which features travel in which exchange; all ranks have as many exchanges."""
        sizes = [0 if rank == self._active else len(names) for rank, names in enumerate(aliases)]
        blocks = [tables.blocks_of(self._rows.n_rows, n) for n in sizes]
        most = max(map(len, blocks))
        return [of_rank + [slice(0, 0)] * (most - len(of_rank)) for of_rank in blocks]

    def _conclude(self, part: Part, n_rounds: int, sections: tuple[ReportSection, ...]) -> JobResult:
        """Commit to this party's part together with the others, and write it."""
        attempt, job = self._attempt, self._job
        hmac, path = conclude_part(attempt, job.active, part, n_rounds)
        attempt.all_have_written()
        attempt.write_record(TITLE, job.params, None, sections, data=(self._facts(),))
        return JobResult(hmac.hex(), f"this party's part of the model is {path}", {"n_rounds": n_rounds})

    def _facts(self) -> DataFacts:
        rows, label = self._rows, self._job.label if self._rows.label is not None else ""
        missing = missing_of(rows.names, rows.columns)
        return DataFacts(self._job.data_set, TRAINING, rows.n_rows, rows.names, missing, label=label)


class ActiveParty(_Party):
    """Holds the label, gets the buckets, trains."""

    def run(self) -> JobResult:
        """Receive, or take what was kept; train; tell the others which splits are theirs."""
        attempt, job, rows = self._attempt, self._job, self._rows
        self._check_rows()
        announced = self._go_on()
        self._channel.moment = TrainingStep(Phase.UPDATE, 0)
        started = time.perf_counter()
        kept = self._buckets(announced)
        blocks, n_features = list(kept.blocks), [len(block.n_buckets) for block in kept.blocks]
        self._progress.say(f"training on {len(rows.names)} own features and {sum(n_features)} that came as buckets")
        parameters = check_bucket_parameters(dict(job.params), job.n_buckets)
        trained = train_on_buckets(rows.columns, _required(rows.label), blocks, parameters, job.num_rounds)
        if not self._passive:
            return self._alone(trained, kept, parameters, started)
        model, splits = tables.divide_model(trained, len(rows.names), n_features)
        parts = {rank: item.to_bytes() for rank, item in zip(self._passive, splits, strict=True)}
        attempt.route_sealed("splits", parts, Content.SPLITS, Protection.CLEAR)
        attempt.round_done(RoundRow(0, time.perf_counter() - started))
        parties = tuple(PartyColumns(self._channel.sites[rank], announced[rank]) for rank in self._passive)
        foreign = [f"{party.site}.{alias}" for party in parties for alias in party.aliases]
        masked = mask_columns(model, len(rows.names), [*rows.names, *foreign])
        sections = () if job.buckets_from is None else (_section_of_paid(job),)
        return self._conclude(ActivePart(masked, rows.names, parties), job.num_rounds, sections)

    def _buckets(self, announced: list[tuple[str, ...]]) -> KeptBuckets:
        """Return all parties' buckets in the order of ranks; those that come now are kept, for they were paid for."""
        sites = tuple(self._channel.sites[rank] for rank in self._passive)
        aliases = tuple(announced[rank] for rank in self._passive)
        kept = self._prepared.buckets
        if kept is None:
            kept = KeptBuckets(sites, aliases, tuple(self._receive(announced)))
            kept.write(self._attempt.folder.path, self._job, self._rows.id_bytes())
            return kept
        if not sites:
            return kept
        of_site = {site: i for i, site in enumerate(kept.sites)}
        order = [of_site[site] for site in sites]
        if aliases != tuple(kept.aliases[i] for i in order):
            raise ProtocolError("a party names other features than it sent buckets of: run that job anew")
        return KeptBuckets(sites, aliases, tuple(kept.blocks[i] for i in order))

    def _alone(self, trained: bytes, kept: KeptBuckets, parameters: TrainingParameters, started: float) -> JobResult:
        """Write a model for this party's own eyes: others' columns are numbers of buckets, as it has them."""
        attempt, job, rows = self._attempt, self._job, self._rows
        parties = zip(kept.sites, kept.aliases, strict=True)
        foreign = [f"{site}.{alias}.bucket" for site, aliases in parties for alias in aliases]
        booster = xgb.Booster(model_file=bytearray(trained))
        booster.feature_names = [*rows.names, *foreign]
        booster.set_attr(**{LEAST_XGBOOST_ATTRIBUTE: LEAST_XGBOOST})
        model = bytes(booster.save_raw("json"))
        found = cross_validated(rows.columns, _required(rows.label), kept.blocks, parameters, job.num_rounds)
        attempt.round_done(RoundRow(0, time.perf_counter() - started))
        hmac = attempt.conclude(model)
        path = attempt.folder.write_model(model)
        attempt.all_have_written()
        shown = tuple((name, f"{mean:.5g}", f"{sd:.2g}") for name, (mean, sd) in found.items())
        columns = ("metric", f"mean of {N_FOLDS} folds", "standard deviation")
        sections = (_section_of_paid(job), ReportSection("Cross validation on the same rows", (), columns, shown))
        attempt.write_record(TITLE, job.params, path.name, sections, data=(self._facts(),))
        return JobResult(hmac.hex(), f"the model on buckets is {path}", {"n_rounds": job.num_rounds})

    def _receive(self, announced: list[tuple[str, ...]]) -> list[tables.BucketBlock]:
        received: dict[int, list[tables.BucketBlock]] = {rank: [] for rank in self._passive}
        for features in zip(*self._blocks(announced), strict=True):
            parts = self._attempt.route_sealed("buckets", {}, Content.BUCKETS, Protection.LOCAL_DP)
            for rank in self._passive:
                wanted = features[rank].stop - features[rank].start
                if wanted:
                    received[rank].append(tables.BucketBlock.from_bytes(parts[rank], self._rows.n_rows, wanted))
        return [tables.joined(received[rank]) for rank in self._passive]


class BucketSender(_Party):
    """Sends randomised buckets once, and keeps the thresholds."""

    def run(self) -> JobResult:
        """Pay, send, and turn the splits that are this party's into a private table."""
        rows, description = self._rows, _required(self._prepared.description)
        self._check_rows()
        policy = self._attempt.context.policy
        sent, persons = SentRows(policy), PersonsOfBudgets(policy, policy.data_set(self._job.data_set))
        sent.refuse(rows.ids, self._job.data_set)
        if not persons.are_new(rows.ids).all():
            raise DataRefusal(
                "another budget pays for persons among the rows of this job: take rows of persons who were in no "
                "private job on another data set"
            )
        aliases = self._prepared.aliases
        payment = BucketPayment(self._job, self._attempt, description.features, rows.id_bytes())
        try:
            announced = self._go_on()
            sent.note(self._channel.job_id, rows.ids, self._job.data_set)
            persons.note(rows.ids)
            edges, buckets = payment.release(rows.columns)
        finally:
            payment.close()  # what was not used is free again
        KeptEdges(rows.names, aliases, edges).write(self._attempt.folder.path, self._job)
        self._channel.moment = TrainingStep(Phase.UPDATE, 0)
        n_buckets = tuple(count + 1 for count in edges.counts)
        for features in self._blocks(announced)[self._channel.rank]:
            block = tables.BucketBlock(n_buckets[features], buckets[features])
            parts = {self._active: block.to_bytes()} if block.n_buckets else {}
            self._attempt.route_sealed("buckets", parts, Content.BUCKETS, Protection.LOCAL_DP)
        table = _receive_splits(self._attempt, self._active, edges)
        self._attempt.round_done(RoundRow(0, 0.0))
        section = payment.section(edges, aliases)
        for text in section.paragraphs:
            self._progress.say(text)
        return self._conclude(PassivePart(table, rows.names, aliases), self._job.num_rounds, (section,))


class SplitReceiver(_Party):
    """Has sent its buckets in an earlier job: sends and pays nothing, and gets its splits of another model."""

    def run(self) -> JobResult:
        """Turn the splits that are this party's into a private table, by the ends of the buckets that it has kept."""
        kept = _required(self._prepared.edges)
        self._check_rows()
        self._go_on()
        self._channel.moment = TrainingStep(Phase.UPDATE, 0)
        table = _receive_splits(self._attempt, self._active, kept.edges)
        self._attempt.round_done(RoundRow(0, 0.0))
        part = PassivePart(table, kept.names, kept.aliases)
        return self._conclude(part, self._job.num_rounds, (_section_of_paid(self._job),))


def _receive_splits(attempt: SiteAttempt, active: int, edges: Candidates) -> PrivateTable:
    received = attempt.route_sealed("splits", {}, Content.SPLITS, Protection.CLEAR)[active]
    return tables.OwnedSplits.from_bytes(received).private_table(edges)


def _section_of_paid(job: BucketJob) -> ReportSection:
    paid = (
        f"Trained on the buckets of job {job.buckets_from}: passive parties sent none and were charged nothing. What "
        f"was paid there, epsilon {job.epsilon:g} for a {job.unit}, covers this model too, for it is made of the same "
        "buckets."
    )
    outside = "Not covered are labels, where the model splits, and the answers of later predictions."
    return ReportSection("Privacy", (paid, outside))


def _aliases(spec: DataSet, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the policy's alias of each feature, else its number."""
    aliases = tuple(spec.aliases.get(name, f"f{number}") for number, name in enumerate(names))
    if len(set(aliases)) != len(aliases):
        raise ConfigurationError(f"data set {spec.name!r}: aliases of two features are the same")
    return aliases


def _read_aliases(data: bytes) -> tuple[str, ...]:
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or len(names) > _MAX_FEATURES or len(set(map(str, names))) != len(names):
        raise ProtocolError("a party's list of aliases is not one")
    if not all(isinstance(name, str) and is_plain_text(name) for name in names):
        raise ProtocolError("a party's list of aliases holds something that is no name")
    return tuple(names)


run_site = SitePart(prepare, _train, protection=_protection)
"""Takes part in one attempt of a job, as the active or as a passive party."""
