"""One site's part in a horizontal job, from its policy to its model.

Nothing that depends on rows leaves the site before the policy has allowed the job, all sites are authenticated and
their terms are equal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.certificates import Identity
from nvflare_plugins.data import Table, load_table
from nvflare_plugins.horizontal.agreement import Terms, agree, check_xgboost, versions
from nvflare_plugins.horizontal.continuation import check_initial_model
from nvflare_plugins.horizontal.cuts import (
    LARGEST_VALUE, CutMode, Cuts, reference_table, search_quantiles, spaced_cuts,
)  # fmt: skip
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.horizontal.parameters import TrainingParameters, check_parameters
from nvflare_plugins.horizontal.run_folder import RunFolder
from nvflare_plugins.horizontal.training import (
    LoopSettings, RoundRecord, TrainingHandler, TrainingResult, train, training_shape, value_bounds,
)  # fmt: skip
from nvflare_plugins.registry import Registry, Reservation, ResumePoint
from nvflare_plugins.report import write_report
from nvflare_plugins.run_record import RoundRow, RunRecord, TrafficRow
from nvflare_plugins.schema import Schema
from nvflare_plugins.session import Session, open_session
from nvflare_plugins.site_policy import DataSet, JobTerms, SitePolicy
from nvflare_plugins.wire.catalogue import Kind, Moment, Phase
from nvflare_plugins.wire.channel import Channel, HeadExchange, Transport
from nvflare_plugins.wire.envelope import Codec, pack_list
from nvflare_plugins.wire.evidence import EvidenceLog
from nvflare_plugins.wire.evidence_format import SERVER, export_name
from nvflare_plugins.wire.profiles import BfvSums, CkksSums, MaskedSums, PlainSums, Profile, SumProcessor
from nvflare_plugins.wire.sums import ProtectedSums

_log = logging.getLogger(__name__)
# Fields of a job that do not change what a run releases about the rows, or only how much of it.
_NOT_RELEASED = ("num_rounds", "checkpoint_every", "resume_from", "tracking", "deadline_s", "early_stopping_rounds")


@dataclass(frozen=True, slots=True)
class Place:
    """Where and with whom a site takes part.

    Attributes:
        runs: folder in which the site keeps its runs.
        attempt: 16 random bytes that the server drew for this attempt.
    """

    site: str
    sites: tuple[str, ...]
    job_id: str
    attempt: bytes
    runs: Path
    policy: SitePolicy
    identity: Identity


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
    place: Place,
    transport: Transport,
    timeout_s: float,
    on_progress: Progress | None = None,
) -> SiteResult:
    """Take part in one attempt of a job.

    Args:
        timeout_s: longest wait for one exchange; the server's own deadline should come first.

    Raises:
        VeilBoostError: what ended the attempt at this site. Model and checkpoints of a failed attempt stay as they
            were; the evidence says that it was aborted and why.
    """
    prepared = _prepare(job, place)
    folder = RunFolder(place.runs, place.job_id).create()
    channel = Channel(place.site, place.sites, place.job_id, place.attempt, transport, timeout_s)
    path = folder.evidence / export_name(place.site)
    evidence = EvidenceLog(path, place.site, place.job_id, channel.attempt, job.profile)
    channel.recorder = evidence
    try:
        session = open_session(channel, place.identity, place.policy, prepared.binding(job, place))
        try:
            return _Attempt(job, place, prepared, folder, channel, evidence, session, on_progress).run()
        finally:
            session.close()
    except VeilBoostError as error:
        evidence.end("aborted", str(error))
        raise
    finally:
        evidence.close()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a site knows before it talks to anyone."""

    data_set: DataSet
    table: Table
    eval_set: DataSet | None
    eval_table: Table | None
    parameters: TrainingParameters
    initial_model: bytes | None
    resumed: RunFolder | None

    def tables(self) -> list[tuple[Table, DataSet]]:
        """Return the training set and, if there is one that is another set, the evaluation set."""
        tables = [(self.table, self.data_set)]
        if self.eval_table is not None and self.eval_set.name != self.data_set.name:
            tables.append((self.eval_table, self.eval_set))
        return tables

    def binding(self, job: HorizontalJob, place: Place) -> bytes:
        """Return the hash that the handshake's transcript covers: the job with its parameters and profile.

        What each site makes of it (columns, effective parameters, versions) is compared afterwards, sealed and by name.
        """
        document = {"job": job.to_dict(), "sites": place.sites}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()


def _prepare(job: HorizontalJob, place: Place) -> _Prepared:
    """Check the job against the policy and the data, at this site alone."""
    check_xgboost()
    policy = place.policy
    exact = job.cuts == CutMode.EXACT.value
    terms = JobTerms(job.profile, job.data_set, exact, job.min_rows_per_cut, tracking=job.tracking)
    data_set = policy.check_job(terms, place.sites)
    columns = {
        "label": job.label, "weight": job.weight, "features": job.features, "categories": job.categories,
        "label_classes": job.label_classes, "unknown_is_missing": job.unknown_category_is_missing,
    }  # fmt: skip
    table = load_table(data_set, **columns)
    eval_set = policy.data_set(job.eval_data_set) if job.eval_data_set is not None else None
    eval_table = None if eval_set is None else load_table(eval_set, **{**columns, "features": table.feature_names})
    parameters = check_parameters(job.params, table.feature_names)
    _check_magnitudes(table)
    for checked in filter(None, (table, eval_table)):
        parameters.objective.check_labels(checked.label)
        for note in checked.notes:
            _log.info("%s", note)
    if job.early_stopping_rounds is not None and not parameters.metrics:
        raise ConfigurationError("early_stopping_rounds needs an eval_metric to watch")
    initial = None
    if job.initial_model is not None:
        initial = policy.input_file(job.initial_model).read_bytes()
        check_initial_model(initial, job.initial_model, parameters, table.feature_names)
    resumed = RunFolder(place.runs, job.resume_from) if job.resume_from is not None else None
    return _Prepared(data_set, table, eval_set, eval_table, parameters, initial, resumed)


def _check_magnitudes(table: Table) -> None:
    """Refuse values beyond the outermost cut points, which all sites take from this program and not from data."""
    for position, name in enumerate(table.feature_names):
        if np.nanmax(np.abs(table.features[:, position]), initial=0.0) >= LARGEST_VALUE:
            raise ConfigurationError(f"column {name!r} holds values of 1e38 or more: scale it, or mark them as missing")


class _Attempt:
    """The steps of one attempt after the session is open."""

    def __init__(
        self, job: HorizontalJob, place: Place, prepared: _Prepared, folder: RunFolder, channel: Channel,
        evidence: EvidenceLog, session: Session, on_progress: Progress | None,
    ):  # fmt: skip
        self._job = job
        self._place = place
        self._prepared = prepared
        self._folder = folder
        self._channel = channel
        self._evidence = evidence
        self._session = session
        self._on_progress = on_progress
        self._registry = Registry.open(place.policy)
        self._reservations: list[Reservation] = []  # the training set's first
        self._rows: list[RoundRow] = []

    def run(self) -> SiteResult:
        """Agree, train, compare models, write results."""
        self._open_evidence()
        n_done = agree(self._channel, self._session, self._terms())
        self._reserve_together(n_done)
        sums = self._protected_sums()
        cuts, root_feature = self._agree_cuts(sums)
        self._folder.write_cuts(cuts)
        result = self._train(sums, cuts, root_feature, n_done)
        model = bytes(result.booster.save_raw("json"))
        self._compare_models(model)
        return self._finish(result, model, self._session.hmac("model", model), cuts)

    # -- before training ----------------------------------------------------------------------------------------------

    def _open_evidence(self) -> None:
        session, evidence = self._session, self._evidence
        facts = session.evidence_facts()
        evidence.session(**facts, versions=versions(), policy_hash=self._place.policy.fingerprint())
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
        return Terms(versions(), job, prepared.parameters.document(), schema, start, checkpoints)

    def _reserve(self, n_done: int) -> None:
        """Have the registry allow this run and remember it, before the first private byte."""
        job, prepared = self._job, self._prepared
        if job.resume_from is not None and n_done == 0:
            raise ConfigurationError(f"no checkpoint of {job.resume_from} is held by all sites: start a new job")
        job_document = {k: v for k, v in job.to_dict().items() if k not in _NOT_RELEASED}
        document = {"job": job_document, "parameters": prepared.parameters.document()}
        parameters = json.dumps(document, sort_keys=True).encode()
        resume = ResumePoint(job.resume_from, n_done) if job.resume_from is not None else None
        # Metrics of the evaluation set are sums over its rows, and can be subtracted like any other.
        for table, data_set in prepared.tables():
            reservation = self._registry.reserve(
                table, data_set, job_id=self._place.job_id, sites=self._place.sites, parameters=parameters,
                resume=resume,
            )  # fmt: skip
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
        except VeilBoostError:
            for reservation in self._reservations:
                self._registry.cancel(reservation)
            raise

    def _protected_sums(self) -> ProtectedSums:
        masks = MaskedSums(self._session.masks)
        return ProtectedSums(self._channel, self._processor(masks), masks, self._job.finest_exponent)

    def _processor(self, masks: MaskedSums) -> SumProcessor:
        profile = Profile(self._job.profile)
        if profile is Profile.PLAIN:
            return PlainSums()
        if profile is Profile.MASKS:
            return masks
        # Imported here: the lattice library takes long to load and most jobs do without it.
        if profile is Profile.BFV:
            from he_processors.bfv import BfvProcessor

            return BfvSums(self._share_key(BfvProcessor, Codec.BFV), self._session.masks)
        from he_processors.ckks import CkksProcessor

        return CkksSums(self._share_key(CkksProcessor, Codec.CKKS))

    def _share_key(self, scheme: Any, codec: Codec) -> Any:
        """Rank 0 draws the key for this attempt and seals it to every peer; the server gets public parameters only."""
        secret = scheme.generate(self._channel.world) if self._channel.rank == 0 else None
        processor = scheme.from_secret(self._session.share_secret(secret))
        public = processor.public_parameters()
        published = self._channel.gather(Kind.HE_PUBLIC, public if self._channel.rank == 0 else b"", codec)
        if published[0] != public:
            raise ProtocolError("the public parameters of the homomorphic scheme do not belong to the shared key")
        return processor

    def _agree_cuts(self, sums: ProtectedSums) -> tuple[Cuts, int | None]:
        """Return the cuts and a feature that no site lacks values in, if there is one."""
        job, table = self._job, self._prepared.table
        local = np.array([table.n_rows, *(table.n_rows - np.asarray(table.n_missing))], dtype=np.int64)
        pooled = sums.sum_counts(Kind.CUT_COUNTS, local)
        dense = np.flatnonzero(pooled[1:] == pooled[0])
        root_feature = int(dense[0]) if dense.size else None
        resumed = self._prepared.resumed.read_cuts() if self._prepared.resumed is not None else None
        if resumed is not None:
            return resumed, root_feature
        mode, max_bin = CutMode(job.cuts), self._prepared.parameters.max_bin
        if mode in (CutMode.UNIFORM, CutMode.LOGARITHMIC):
            numeric = [name for name in table.feature_names if name not in table.categories]
            spaced = spaced_cuts(numeric, job.cut_bounds, max_bin, mode)
            return _spread(dict(zip(numeric, spaced.of_feature, strict=True)), table.feature_names), root_feature
        return self._search_cuts(sums, mode), root_feature

    def _search_cuts(self, sums: ProtectedSums, mode: CutMode) -> Cuts:
        """Search the pooled quantiles, or reuse the cuts that an earlier job of the same sites found."""
        job, table = self._job, self._prepared.table
        max_bin = self._prepared.parameters.max_bin
        # A categorical column has one bin per public category, and nothing to search.
        numeric = [position for position, kind in enumerate(table.feature_types) if kind != "c"]
        names = [table.feature_names[position] for position in numeric]
        floor = None if mode is CutMode.EXACT else job.min_rows_per_cut
        settings = json.dumps({"max_bin": max_bin, "min_rows": floor}).encode()
        plan = self._registry.plan_cuts(self._reservations[0], names, settings)
        known = pack_list([name.encode() + plan.known[name].tobytes() for name in names if name in plan.known])
        proofs = self._channel.gather(Kind.CUT_PLAN, self._proof(self._channel.rank, "cut plan", known))
        all_know = all(proof == self._proof(rank, "cut plan", known) for rank, proof in enumerate(proofs))
        if not plan.to_search and all_know:
            _log.info("the cut points of an earlier job of these sites are used again")
            return _spread(dict(plan.known), table.feature_names)
        # Where a site has lost its memory, the same search is simply done again: it releases the same counts.
        started = time.perf_counter()
        cuts = search_quantiles(
            table.features[:, numeric], max_bin, floor, lambda counts: sums.sum_counts(Kind.CUT_COUNTS, counts)
        )
        found = dict(zip(names, cuts.of_feature, strict=True))
        if plan.to_search:
            self._registry.save_cuts(self._reservations[0], {name: found[name] for name in plan.to_search})
        n_cuts, seconds = sum(c.size for c in cuts.of_feature), time.perf_counter() - started
        _log.info("agreed on %d cut points of %d numeric features in %.1f s", n_cuts, len(names), seconds)
        return _spread(found, table.feature_names)

    # -- training -----------------------------------------------------------------------------------------------------

    def _train(self, sums: ProtectedSums, cuts: Cuts, root_feature: int | None, n_done: int) -> TrainingResult:
        job, prepared = self._job, self._prepared
        table, parameters = prepared.table, prepared.parameters
        matrix = self._matrix(table, cuts)
        eval_sets = [(matrix, "train")] if job.evaluate_training else []
        if prepared.eval_table is not None:
            eval_sets.append((self._plain_matrix(prepared.eval_table), "eval"))
        sums.agree_scales(value_bounds(parameters.objective, table.label, table.weight))
        bin_ends = self._bin_ends(matrix)
        n_features = len(table.feature_names)
        initial = prepared.initial_model
        if n_done:
            initial = prepared.resumed.checkpoints()[n_done].read_bytes()
        shape = training_shape(
            parameters, self._channel.world, n_features, int(bin_ends[-1]), table.weight is not None,
            len(eval_sets), initial is not None,
        )  # fmt: skip
        root_bins = None
        if root_feature is not None:
            root_bins = slice(int(bin_ends[root_feature]), int(bin_ends[root_feature + 1]))
        handler = TrainingHandler(sums, shape, root_bins, self._evidence)
        settings = LoopSettings(job.num_rounds - n_done, job.early_stopping_rounds, n_done)
        return train(
            parameters.for_booster(), shape, self._channel, handler, matrix, eval_sets, settings, initial,
            self._after_round,
        )  # fmt: skip

    def _matrix(self, table: Table, cuts: Cuts) -> xgb.QuantileDMatrix:
        n_categories = {
            i: len(table.categories[name]) for i, name in enumerate(table.feature_names) if name in table.categories
        }
        max_bin = self._prepared.parameters.max_bin
        names, types = list(table.feature_names), list(table.feature_types)
        common = {"feature_names": names, "feature_types": types, "enable_categorical": True, "max_bin": max_bin}
        reference = xgb.QuantileDMatrix(reference_table(cuts, n_categories), **common)
        matrix = xgb.QuantileDMatrix(table.features, label=table.label, weight=table.weight, ref=reference, **common)
        return _checked(matrix, cuts, n_categories)

    def _bin_ends(self, matrix: xgb.QuantileDMatrix) -> NDArray[np.int64]:
        """Return where each feature's bins begin in a histogram. Shapes: result: int64[n_features + 1]."""
        listed = np.diff(matrix.get_quantile_cut()[0].astype(np.int64))
        # XGBoost lists one bound more than bins for a feature of numbers: the one below all values.
        is_numeric = np.array([kind != "c" for kind in self._prepared.table.feature_types])
        return np.concatenate([[0], np.cumsum(listed - is_numeric)])

    def _plain_matrix(self, table: Table) -> xgb.DMatrix:
        return xgb.DMatrix(
            table.features, label=table.label, weight=table.weight, feature_names=list(table.feature_names),
            feature_types=list(table.feature_types), enable_categorical=True,
        )  # fmt: skip

    def _after_round(self, record: RoundRecord, booster: xgb.Booster) -> None:
        job = self._job
        stages = {"xgboost": record.xgboost_s, "protect": record.protect_s, "network": record.network_s}
        self._rows.append(RoundRow(record.round, record.seconds, record.metrics, stages))
        self._evidence.round(record.round)
        self._channel.heads.mark()
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
            unlike = ", ".join(different)
            raise ProtocolError(f"the final models differ between the sites; none was written (unlike this site: {unlike})")

    def _proof(self, rank: int, purpose: str, data: bytes) -> bytes:
        """Return what the site of ``rank`` shows to prove that it holds the same data.

        It names the site: otherwise a server could answer every site with that site's own proof.
        """
        return self._session.hmac(f"{purpose} of {rank}", data)

    def _finish(self, result: TrainingResult, model: bytes, hmac: bytes, cuts: Cuts) -> SiteResult:
        self._evidence.model("model.json", len(model), hmac)
        self._channel.heads.mark()
        self._channel.moment = Moment(Phase.FINISH, self._channel.moment.round)
        self._channel.gather(Kind.CLOSING, b"")
        model_path = self._folder.write_model(model)
        for reservation in self._reservations:
            self._registry.complete(reservation, result.booster.num_boosted_rounds())
        self._evidence.end("completed")
        evidence_path = self._evidence.close()
        self._write_record(result, cuts, model_path, evidence_path)
        write_report(self._folder.path)
        last = result.rounds[-1] if result.rounds else None
        return SiteResult(
            self._place.site, str(model_path), hmac.hex(), str(evidence_path), result.booster.num_boosted_rounds(),
            result.best_round, dict(last.metrics) if last else {},
        )  # fmt: skip

    def _write_record(self, result: TrainingResult, cuts: Cuts, model_path: Path, evidence_path: Path) -> None:
        job, channel = self._job, self._channel
        traffic = tuple(
            TrafficRow(kind.name, codec.name, kind.private, t.messages, t.bytes_out, t.bytes_in, t.seconds)
            for (kind, codec), t in channel.traffic.items()
        )
        settings = {k: v for k, v in job.to_dict().items() if k not in ("params", "cut_bounds", "categories")}
        RunRecord(
            job_id=channel.job_id,
            attempt=channel.attempt,
            site=channel.site,
            sites=channel.sites,
            profile=job.profile,
            signed=self._session.signed,
            params=dict(self._prepared.parameters.agreed),
            settings=settings,
            rounds=tuple(self._rows),
            traffic=traffic,
            versions=versions(),
            registry=self._reservations[0].message,
            cuts={"mode": job.cuts, "points": sum(c.size for c in cuts.of_feature), "min_rows": job.min_rows_per_cut},
            model=str(model_path.relative_to(self._folder.path)),
            evidence=str(evidence_path.relative_to(self._folder.path)),
            best_round=result.best_round,
        ).write(self._folder.path)


def _spread(found: Mapping[str, NDArray[np.float32]], names: Sequence[str]) -> Cuts:
    """Return cuts for all columns; those without a search have none."""
    return Cuts(tuple(found.get(name, np.empty(0, dtype=np.float32)) for name in names))


def _checked(matrix: xgb.QuantileDMatrix, cuts: Cuts, n_categories: dict[int, int]) -> xgb.QuantileDMatrix:
    """Refuse a matrix whose bins are not the agreed ones: another site's bins would then mean something else."""
    ends, values = matrix.get_quantile_cut()
    for feature, inner in enumerate(cuts.of_feature):
        if feature in n_categories:
            continue
        found = values[int(ends[feature]) + 1 : int(ends[feature + 1]) - 2]
        if not np.array_equal(found, inner):
            raise ProtocolError("XGBoost did not take over the agreed cut points")
    return matrix
