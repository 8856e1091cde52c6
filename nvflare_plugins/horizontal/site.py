"""One site's part in a horizontal job, from its policy to its model.

Nothing that depends on rows leaves the site before the policy has allowed the job, all sites are authenticated and
their terms are equal.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xgboost as xgb

from he_processors.errors import ConfigurationError, PolicyRefusal, ProtocolError
from nvflare_plugins.attempt.agreement import PLUGIN, Terms, agree, versions
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.data_sets.schema import Schema
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.failures import DataRefusal, reason_of
from nvflare_plugins.horizontal.cut_agreement import CutAgreement
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.horizontal.matrices import bin_starts, evaluation_matrix, training_matrix
from nvflare_plugins.horizontal.preparation import Prepared, prepare
from nvflare_plugins.horizontal.processors import open_sums
from nvflare_plugins.horizontal.row_floors import (
    TOO_FEW,
    check_effective_rows,
    check_leaves,
    counts_leaves,
    largest_weight,
    rows_needed,
    with_floor,
)
from nvflare_plugins.horizontal.row_sampling import RowDraws, SampledWeights, row_fraction
from nvflare_plugins.horizontal.training import LoopSettings, TrainingHandler, TrainingResult, train, training_shape
from nvflare_plugins.horizontal.value_bounds import check_weights, coarsest_pairs, label_sum, value_bounds
from nvflare_plugins.report.report import keep_report
from nvflare_plugins.report.run_record import RoundRow, RunRecord, TrafficRow
from nvflare_plugins.site.data_refusals import Question, RefusalCount, reading_rows
from nvflare_plugins.site.memory.registry import Registry, Reservation, ResumePoint, describe_draw
from nvflare_plugins.wire.catalogue import BaseScoreSource, Kind, Phase, TrainingStep
from nvflare_plugins.wire.channel import Channel, HeadExchange, Transport
from nvflare_plugins.wire.envelope import Codec
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.continuation import keep_thresholds
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.model_json import with_lists
from nvflare_plugins.xgb.rounds import RoundRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiteResult:
    """What a site reports at the end. Holds no data: names, sizes, hashes, pooled metrics."""

    site: str
    model_path: str
    model_hmac: str
    evidence_path: str
    n_rounds: int
    best_round: int | None
    metrics: dict[str, float] = field(default_factory=dict)


Progress = Callable[[RoundRecord, int], None]
"""Gets each finished round and the number of rounds in all."""


def run_site(
    job: HorizontalJob,
    context: SiteContext,
    transport: Transport,
    timeout_s: float,
    on_progress: Progress | None = None,
) -> SiteResult:
    """Take part in one attempt of a job.

    Args:
        timeout_s: longest wait for one exchange; the server's own deadline should come first.

    Raises:
        VeilBoostError: what ended the attempt at this site. Its checkpoints stay; its model is there only if the last
            step failed, when all sites had agreed on it. The evidence says that it was aborted and why.
        OSError, MemoryError: the machine lacks something; as above.
    """
    with reading_rows(context.policy, job.profile, (job.data_set, job.eval_data_set)):
        return _run_site(job, context, transport, timeout_s, on_progress)


def _run_site(
    job: HorizontalJob, context: SiteContext, transport: Transport, timeout_s: float, on_progress: Progress | None
) -> SiteResult:
    prepared = prepare(job, context)
    folder = RunFolder(context.runs, context.job_id).create()
    channel = Channel(context.site, context.sites, context.job_id, context.attempt, transport, timeout_s)
    path = folder.evidence / export_name(context.site)
    try:
        evidence = EvidenceLog(path, context.site, context.job_id, channel.attempt, job.profile)
    except FileExistsError:
        raise ConfigurationError(
            f"{context.site} has evidence of job {context.job_id} already, which is never overwritten: submit the job "
            "anew"
        ) from None
    channel.recorder = evidence
    try:
        session = open_session(channel, context.identity, context.policy, prepared.binding(job, context))
        try:
            return _Attempt(job, context, prepared, folder, channel, evidence, session, on_progress).run()
        finally:
            session.close()
    except BaseException as error:  # whatever ends the attempt, the evidence ends with a record of it
        evidence.abandon(reason_of(error))
        raise
    finally:
        evidence.close()


class _Attempt:
    """The steps of one attempt after the session is open."""

    def __init__(
        self,
        job: HorizontalJob,
        context: SiteContext,
        prepared: Prepared,
        folder: RunFolder,
        channel: Channel,
        evidence: EvidenceLog,
        session: Session,
        on_progress: Progress | None,
    ):
        self._job = job
        self._context = context
        self._prepared = prepared
        self._folder = folder
        self._channel = channel
        self._evidence = evidence
        self._session = session
        self._on_progress = on_progress
        self._parameters = prepared.parameters
        self._floors = context.policy.floors(len(context.sites))  # of all sites, once these have agreed
        self._registry = Registry.open(context.policy)
        self._reservations: list[Reservation] = []  # the training set's first
        self._rows: list[RoundRow] = []

    def run(self) -> SiteResult:
        """Agree, train, compare models, write results."""
        self._open_evidence()
        n_done, self._floors = agree(self._channel, self._session, self._terms())
        if self._job.weight is None:  # with weights it takes a private message to know
            self._parameters = with_floor(self._parameters, self._floors.rows_per_node)
        self._reserve_together(n_done)
        sums = open_sums(self._prepared.chosen.profile, self._channel, self._session, self._job.finest_exponent)
        self._check_floors(sums)
        agreement = CutAgreement(
            self._job, self._prepared, self._channel, self._registry, self._reservations[0], self._proof
        )
        cuts, root_feature = agreement.run(sums)
        if self._prepared.initial_model is not None:
            cuts = keep_thresholds(cuts, self._prepared.initial_model, self._prepared.parameters.max_bin)
        self._folder.write_cuts(cuts)
        result = self._train(sums, cuts, root_feature, n_done)
        trained = bytes(result.booster.save_raw("json"))
        job, names = self._job, self._prepared.table.feature_names
        model = with_lists(trained, names, job.categories, job.label_classes)
        self._compare_models(model)
        return self._finish(result, model, self._session.hmac("model", model), cuts)

    # -- before training ----------------------------------------------------------------------------------------------

    def _open_evidence(self) -> None:
        session, evidence = self._session, self._evidence
        facts = session.evidence_facts()
        policy_hash, protection = self._context.policy.fingerprint(), self._prepared.chosen.facts
        evidence.session(**facts, versions=versions(), policy_hash=policy_hash, protection=protection)
        self._channel.heads = HeadExchange(evidence.signed_head, self._take_heads)

    def _take_heads(self, heads: list[bytes]) -> None:
        named = dict(zip((*self._channel.sites, SERVER), heads, strict=True))
        if not named[SERVER]:
            del named[SERVER]
        self._evidence.countersign(named, self._session.head_verifier())

    def _terms(self) -> Terms:
        prepared, start, checkpoints = self._prepared, {}, {}
        if prepared.initial_model is not None:
            start["initial_model"] = self._session.hmac("initial model", prepared.initial_model).hex()
        if prepared.resumed is not None:
            cuts = prepared.resumed.read_cuts()
            if cuts is not None:
                start["cuts"] = self._session.hmac("cuts", json.dumps(cuts.to_lists()).encode()).hex()
            for number, path in prepared.resumed.checkpoints().items():
                checkpoints[str(number)] = self._session.hmac("checkpoint", path.read_bytes()).hex()
        job = self._job.to_dict()
        schema = Schema.of(prepared.table)
        releases = {**versions(), PLUGIN: prepared.chosen.release}
        return Terms(releases, job, prepared.parameters.document(), schema, start, checkpoints, self._floors)

    def _reserve(self, n_done: int) -> None:
        """Have the registry allow this run and remember it, before the first private byte."""
        job, prepared = self._job, self._prepared
        if job.resume_from is not None and n_done == 0:
            raise ConfigurationError(f"no checkpoint of {job.resume_from} is held by all sites: start a new job")
        resume = ResumePoint(job.resume_from, n_done) if job.resume_from is not None else None
        # Metrics of the evaluation set are sums over its rows, and can be subtracted like any other.
        for table, data_set in prepared.tables():
            # Rounds draw from the training rows alone.
            fraction = row_fraction(self._parameters) if table is prepared.table else 1.0
            reservation = self._registry.reserve(
                table,
                data_set,
                job_id=self._context.job_id,
                sites=self._context.sites,
                parameters=prepared.release(job, self._floors.rows_per_node),
                resume=resume,
                beside=self._reservations,
                draw=describe_draw(fraction, job.weight),
            )
            self._reservations.append(reservation)
            _log.info("registry, %s: %s", data_set.name, reservation.message)

    def _reserve_together(self, n_done: int) -> None:
        """Go on once every site's registry has allowed the run; else it has released nothing and is not remembered."""
        channel, session = self._channel, self._session
        try:
            self._reserve(n_done)
            sealed = channel.gather(Kind.AGREEMENT, session.seal_to_all(b"", "registry"), Codec.SEALED)
            for rank in range(channel.world):
                if rank != channel.rank:
                    session.open_from(rank, sealed[rank], "registry")
        except BaseException:
            for reservation in self._reservations:
                self._registry.cancel(reservation)
            raise

    def _check_floors(self, sums: ProtectedSums) -> None:
        """Go on if enough rows and sites carry weight; every site decides alike, and a refused run is not remembered.

        Privacy: a refusal releases counts that are capped at what was needed, and powers of two above the weights.
        """
        prepared, floors, policy = self._prepared, self._floors, self._context.policy
        own = policy.floors(self._channel.world)
        if self._parameters.objective.adaptive_leaf:  # see ``RowDraws``: every site must have rows
            floors = dataclasses.replace(floors, sites=self._channel.world)
        tables = list(filter(None, (prepared.table, prepared.eval_table)))
        try:
            if floors.sites > self._channel.world:  # no row can change that
                raise PolicyRefusal(TOO_FEW)
            if max(rows_needed(floors, self._parameters, len(tables))) > own.effective_rows:
                RefusalCount(policy).check({data_set.name for _, data_set in prepared.tables()}, Question.DEMAND)
            largest = largest_weight(sums, [table.weight for table in tables])
            if self._job.weight is not None:
                self._parameters = with_floor(self._parameters, floors.rows_per_node, largest[0])
            check_effective_rows(sums, floors, own, self._parameters, tables, largest, self._channel.world)
        except (PolicyRefusal, DataRefusal):
            for reservation in self._reservations:
                self._registry.cancel(reservation)
            raise

    # -- training -----------------------------------------------------------------------------------------------------

    def _train(self, sums: ProtectedSums, cuts: Cuts, root_feature: int | None, n_done: int) -> TrainingResult:
        job, prepared = self._job, self._prepared
        table, parameters = prepared.table, self._parameters
        matrix = training_matrix(table, cuts, parameters.max_bin)
        eval_sets: list[tuple[xgb.DMatrix, str]] = [(matrix, "train")] if job.evaluate_training else []
        if prepared.eval_table is not None:
            eval_sets.append((evaluation_matrix(prepared.eval_table), "eval"))
        weighted = table.weight is not None
        evaluated = [table] if prepared.eval_table is None else [table, prepared.eval_table]
        sums.agree_scales(value_bounds(parameters, evaluated), coarsest_pairs(parameters, weighted))
        check_weights(sums, parameters, weighted)
        starts = bin_starts(matrix, table)
        n_features = len(table.feature_names)
        initial = prepared.initial_model
        if prepared.resumed is not None and n_done:
            initial = prepared.resumed.checkpoints()[n_done].read_bytes()
        shape = training_shape(
            parameters,
            self._channel.world,
            n_features,
            int(starts[-1]),
            weighted,
            len(eval_sets),
            initial is not None,
        )
        root_bins = None
        if root_feature is not None:
            root_bins = slice(int(starts[root_feature]), int(starts[root_feature + 1]))
        # Of the objectives that start from the mean, the logistic ones alone have bounded gradients.
        is_mean = shape.base_score is BaseScoreSource.MEAN
        is_logistic = parameters.objective.gradient_bound is not None and is_mean
        estimates = shape.base_score not in (BaseScoreSource.GIVEN, BaseScoreSource.CONTINUED)
        rows = SampledWeights(matrix, table.weight, self._draws(), estimates)
        handler = TrainingHandler(
            sums,
            shape,
            root_bins,
            self._evidence,
            is_logistic,
            rows.base_score_known,
            label_sum(table) if is_mean else None,
        )
        settings = LoopSettings(job.num_rounds - n_done, job.early_stopping_rounds, n_done)

        def count_leaves(booster: xgb.Booster, number: int) -> None:
            check_leaves(sums, booster, matrix, rows.taking_part(number), self._floors.rows_per_node)

        is_counted = counts_leaves(parameters, self._floors.rows_per_node)
        return train(
            {**parameters.for_booster(), "subsample": 1.0},
            shape,
            self._channel,
            handler,
            matrix,
            eval_sets,
            settings,
            initial,
            self._after_round,
            rows,
            count_leaves if is_counted else None,
        )

    def _draws(self) -> RowDraws | None:
        """Return how this site draws the rows of each round; None if it takes them all."""
        fraction = row_fraction(self._parameters)
        if fraction == 1:
            return None
        secret = self._registry.secret("row sampling", repr(fraction), *sorted(self._context.sites))
        return RowDraws(secret, self._prepared.table, fraction, self._parameters.objective.adaptive_leaf)

    def _after_round(self, record: RoundRecord, booster: xgb.Booster) -> None:
        job = self._job
        stages = {"xgboost": record.xgboost_s, "protect": record.protect_s, "network": record.network_s}
        self._rows.append(RoundRow(record.round, record.seconds, record.metrics, stages))
        self._evidence.round(record.round)
        self._channel.mark_head()
        if job.checkpoint_every and (record.round + 1) % job.checkpoint_every == 0:
            # The registry first: it lets a lost job resume from no later tree than it knows of.
            for reservation in self._reservations:
                self._registry.trees_complete(reservation, record.round + 1)
            self._folder.write_checkpoint(record.round + 1, bytes(booster.save_raw("json")))
        if self._on_progress is not None:
            self._on_progress(record, job.num_rounds)

    # -- after training -----------------------------------------------------------------------------------------------

    def _compare_models(self, model: bytes) -> None:
        proofs = self._channel.gather(Kind.MODEL_CHECK, self._proof(self._channel.rank, "model check", model))
        sites = self._channel.sites
        different = [s for r, s in enumerate(sites) if proofs[r] != self._proof(r, "model check", model)]
        if different:
            raise ProtocolError(
                "the final models differ between the sites; none was written "
                f"(unlike this site: {', '.join(different)})"
            )

    def _proof(self, rank: int, purpose: str, data: bytes) -> bytes:
        """Return what the site of ``rank`` shows to prove that it holds the same data.

        It names the site: otherwise a server could answer every site with that site's own proof.
        """
        return self._session.hmac(f"{purpose} of {rank}", data)

    def _finish(self, result: TrainingResult, model: bytes, hmac: bytes, cuts: Cuts) -> SiteResult:
        self._evidence.model("model.json", len(model), hmac)
        self._channel.mark_head()
        self._channel.moment = TrainingStep(Phase.FINISH, self._channel.moment.round)
        self._channel.gather(Kind.CLOSING, b"")
        model_path = self._folder.write_model(model)
        # Only when every site has its model may go what a lost job is resumed from.
        self._channel.gather(Kind.CLOSING, b"")
        self._folder.drop_checkpoints()
        for reservation in self._reservations:
            self._registry.complete(reservation, result.booster.num_boosted_rounds())
        self._evidence.end("completed")
        evidence_path = self._evidence.close()
        self._write_record(result, cuts, model_path, evidence_path)
        last = result.rounds[-1] if result.rounds else None
        return SiteResult(
            self._context.site,
            str(model_path),
            hmac.hex(),
            str(evidence_path),
            result.booster.num_boosted_rounds(),
            result.best_round,
            dict(last.metrics) if last else {},
        )

    def _write_record(self, result: TrainingResult, cuts: Cuts, model_path: Path, evidence_path: Path) -> None:
        job, channel = self._job, self._channel
        traffic = tuple(
            TrafficRow(kind.name, codec.name, kind.private, t.messages, t.bytes_out, t.bytes_in, t.seconds)
            for (kind, codec), t in channel.traffic.items()
        )
        settings = {k: v for k, v in job.to_dict().items() if k not in ("params", "cut_bounds", "categories")}
        record = RunRecord(
            job_id=channel.job_id,
            attempt=channel.attempt,
            site=channel.site,
            sites=channel.sites,
            profile=job.profile,
            signed=self._session.signed,
            params=dict(self._parameters.agreed),
            settings=settings,
            rounds=tuple(self._rows),
            traffic=traffic,
            versions=versions(),
            registry=self._reservations[0].message,
            cuts={"mode": job.cuts, "points": sum(c.size for c in cuts.of_feature), "min_rows": job.min_rows_per_cut},
            model=str(model_path.relative_to(self._folder.path)),
            evidence=str(evidence_path.relative_to(self._folder.path)),
            best_round=result.best_round,
            notes=self._notes(),
        )
        keep_report(record, self._folder.path)

    def _notes(self) -> tuple[str, ...]:
        """Return what the sites' policies and their sampling have made of the job, for the report."""
        notes, k = [], self._floors.rows_per_node
        if self._parameters is not self._prepared.parameters:
            weight = self._parameters.agreed["min_child_weight"]
            notes.append(
                f"min_child_weight is {weight:g}: the sites' policies ask for at least {k} rows in every node."
            )
        if counts_leaves(self._parameters, k):
            notes.append(
                f"The rows of every leaf were counted over all sites after each tree: none has fewer than {k}."
            )
        if row_fraction(self._parameters) < 1:
            notes.append("Each site drew the rows of each round from a secret of its own, not from the job's seed.")
        return tuple(notes)
