"""One party's part in a vertical job, from its policy to its part of the model.

Nothing that depends on rows leaves the site before the policy has allowed the job, all sites are authenticated, their
terms are equal and their registries have agreed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import LOST_SITE_FIELDS, Earlier, JobResult, SiteContext, waiting_s
from nvflare_plugins.attempt.session import ARITHMETIC, PLUGIN, versions
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart, gone_on, reserve_together
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.data.table import Table
from nvflare_plugins.evidence.audit import grown_fact
from nvflare_plugins.growth.arithmetic import arithmetic_here, grown_document
from nvflare_plugins.growth.model import check_predictor
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.kinds.alignment.align import align, confirm
from nvflare_plugins.kinds.alignment.job import FILE as ALIGNMENT_FILE
from nvflare_plugins.kinds.alignment.job import Alignment, load_alignment, save_alignments
from nvflare_plugins.kinds.vertical import model
from nvflare_plugins.kinds.vertical.active_party import ActiveSite
from nvflare_plugins.kinds.vertical.context import Checkpoint, TrainedPart, VerticalContext, read_checkpoints
from nvflare_plugins.kinds.vertical.histogram_maker import require_curve
from nvflare_plugins.kinds.vertical.job import (
    ALIGN_FIRST,
    Preset,
    VerticalJob,
    VerticalProfile,
    check_vertical_parameters,
)
from nvflare_plugins.kinds.vertical.key_owner import FINEST, VerticalScheme, check_weights, choose_scheme, pair_format
from nvflare_plugins.kinds.vertical.messages import ContentRecorder, RowsProof, VerticalTerms, agree, rows_content
from nvflare_plugins.kinds.vertical.noised import NOISED_FINEST, NoisePayment, NoisePlan, plan_of, trees_due
from nvflare_plugins.kinds.vertical.party_data import PartyData, load_party
from nvflare_plugins.kinds.vertical.passive_party import PassiveSite, open_guard
from nvflare_plugins.kinds.vertical.sealed import SealedPlan, sealed_plan
from nvflare_plugins.pages.run_record import EVALUATION, TRAINING, DataFacts
from nvflare_plugins.pooled.queries import queries_of
from nvflare_plugins.site.memory.registry import Registry, Wanted
from nvflare_plugins.site.policy_values import JobTerms
from nvflare_plugins.workers.dask_workers import open_workers
from nvflare_plugins.workers.workers import Workers, evaluated_elsewhere, shards_line, work_section
from nvflare_plugins.xgb.model_json import marked_as_part
from nvflare_plugins.xgb.objectives import check_relevance
from nvflare_plugins.xgb.parameters import ALIASES, TrainingParameters

MASKED_MODEL = "masked_model.json"

_log = logging.getLogger(__name__)
_NAMES_COLUMNS = ("monotone_constraints", "interaction_constraints")
# Fields of a job that do not change what a run releases about the rows, or only how much of it.
_NOT_RELEASED = (
    "num_rounds",
    "fraction_bits",
    "checkpoint_every",
    "resume_from",
    "tracking",
    "deadline_s",
    "early_stopping_rounds",
    "alignment",
    *LOST_SITE_FIELDS,
)
_NO_IDS = "No party names an id column: that all files hold the same rows in the same order is taken on trust."


@dataclass(slots=True, repr=False)
class Prepared:
    """What a site knows before it talks to anyone."""

    data: PartyData | None
    parameters: TrainingParameters
    initial: model.StoredPart[Any] | None
    earlier: Earlier
    checkpoints: dict[int, Checkpoint]
    scheme: VerticalScheme

    def take_data(self) -> PartyData:
        """Return all rows, once: no second copy is held beside the aligned ones. Raises: ValueError, the next time."""
        data, self.data = self.data, None
        if data is None:
            raise ValueError("the rows were taken before")
        return data


class VerticalRun:
    """The steps of one attempt after the session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: Prepared):
        self._job, self._context = attempt.job, attempt.context
        self._prepared, self._attempt = prepared, attempt
        self._registry = Registry.open(attempt.context.policy)
        self._is_active = attempt.context.site == attempt.job.active

    def run(self) -> JobResult:
        """Align, agree, train, commit to the parts, write."""
        with ExitStack() as until_it_ends:
            with (
                connected(self._job, self._context) as workers,  # before anything is reserved or released
                watched(workers, self._attempt.progress) as self._attempt.progress,
            ):
                data, n_done, arithmetic = self.agreed(workers)
                payment = self._payment(data, n_done)
                if payment is not None:
                    until_it_ends.enter_context(payment)
                start = replace(self._reserve_together(data, n_done, arithmetic, payment), workers=workers)
                try:
                    if workers is not None:
                        self._attempt.progress.say(shards_line(data.train.table.n_rows, len(workers)))
                    finish = (ActiveSite(start) if self._is_active else PassiveSite(start)).run()
                except (VeilBoostError, OSError):
                    if not start.notes.has_told:
                        start.reservations.cancel()
                    raise
                sections = () if workers is None else (work_section(workers.work),)
            return self._finish(replace(finish, sections=(*finish.sections, *sections)), start)

    def _payment(self, data: PartyData, n_done: int) -> NoisePayment | None:
        """Reserve the cost of noised sums, at a passive party."""
        job, parameters = self._job, self._prepared.parameters
        plan = plan_of(job, parameters)
        if plan is None or self._is_active:
            return None
        n_due = trees_due(job, parameters, n_done)
        return NoisePayment(plan, self._attempt, data.train, n_due, may_wait=waiting_s(job) is not None)

    # -- before training ----------------------------------------------------------------------------------------------

    def agreed(self, workers: Workers | None = None) -> tuple[PartyData, int, str]:
        """Align and agree; return the rows that all parties share, the rounds that are done already, the arithmetic."""
        data = self._aligned(workers)
        return data, *self._agree(data)

    def _aligned(self, workers: Workers | None) -> PartyData:
        job, attempt, data = self._job, self._attempt, self._prepared.take_data()
        if job.alignment is None:
            return data
        channel, session, context = attempt.channel, attempt.session, self._context
        aligns = job.alignment == ALIGN_FIRST and job.resume_from is None
        if aligns and not self._all_have_aligned():
            ids = {one.data_set.name: one.ids or () for one in data.sets}
            on = {} if workers is None else dict.fromkeys(ids, workers)
            say = self._attempt.progress.say
            with align(channel, session, ids, context.policy, say, attempt.evidence, workers=on) as found:
                self._keep_alignments(found)
        else:
            earlier = str(job.resume_from or context.job_id) if job.alignment == ALIGN_FIRST else job.alignment
            found = {
                name: load_alignment(context, earlier, name)
                for name in sorted({one.data_set.name for one in data.sets})
            }
            confirm(channel, session, list(found.values()))
            if job.alignment == ALIGN_FIRST:  # so that this job can be resumed in its turn
                self._keep_alignments(found)
        return data.aligned(found)

    def _keep_alignments(self, found: Mapping[str, Alignment]) -> None:
        context = self._context
        save_alignments(self._attempt.folder.path, context.job_id, context.site, context.sites, list(found.values()))

    def _all_have_aligned(self) -> bool:
        """Return whether all parties keep the rows that an earlier attempt of this job has found."""
        own = self._prepared.earlier.own
        if own is None:
            return False
        has_them = b"1" if (own.path / ALIGNMENT_FILE).is_file() else b""
        return all(self._attempt.gather_sealed("kept alignment", has_them))

    def _agree(self, data: PartyData) -> tuple[int, str]:
        """Compare terms with all parties; return the rounds that are done already, and the arithmetic of the trees."""
        prepared, session, channel = self._prepared, self._attempt.session, self._attempt.channel
        proof = RowsProof(session, [rows_content(one.ids) for one in data.sets])
        terms = VerticalTerms(
            versions={**versions(), ARITHMETIC: arithmetic_here(), PLUGIN: prepared.scheme.release},
            job=self._job.stated(),
            parameters=grown_document(prepared.parameters),
            n_rows=[one.table.n_rows for one in data.sets],
            rows=proof.of(channel.rank),
            model="" if prepared.initial is None else prepared.initial.identity.model_id,
            checkpoints={str(n): checkpoint.tag for n, checkpoint in prepared.checkpoints.items()},
        )
        received = self._attempt.gather_sealed("terms of vertical training", terms.to_bytes())
        n_done, arithmetic = agree(terms, received, channel.sites, channel.rank, proof)
        self._attempt.progress.say(
            f"agreed on job, parameters and rows with all parties; trees are those of XGBoost {arithmetic}"
        )
        if not all(proof.contents):
            self._attempt.progress.say(_NO_IDS)
        resume = prepared.earlier.point(n_done)
        if resume is not None:
            if n_done > self._job.num_rounds:
                raise ConfigurationError(f"{resume.job_id} has more rounds than this job: raise num_rounds")
            self._attempt.progress.say(f"resuming {resume.job_id} after {n_done} rounds")
        return n_done, arithmetic

    def _reserve_together(
        self, data: PartyData, n_done: int, arithmetic: str, payment: NoisePayment | None
    ) -> VerticalContext:
        """Go on once every site's registry and budgets allow the run; else nothing is released, charged, remembered."""
        job, prepared, guard = self._job, self._prepared, None
        fields = {name: value for name, value in job.to_dict().items() if name not in _NOT_RELEASED}
        release = {"job": fields, "parameters": prepared.parameters.document()}
        sets = {one.data_set.name: one for one in reversed(data.sets)}  # a set in both places counts once
        if not self._is_active:
            guard = open_guard(job, self._context.policy, data, prepared.parameters)
        reservations = reserve_together(
            self._attempt,
            self._registry,
            [Wanted(one.table, one.data_set, one.ids) for one in reversed(sets.values())],
            json.dumps(release, sort_keys=True).encode(),
            prepared.earlier.point(n_done),
        )
        return VerticalContext(
            self._attempt,
            data,
            prepared.parameters,
            reservations,
            ContentRecorder(self._attempt.evidence, prepared.scheme.protection),
            arithmetic,
            prepared.scheme,
            n_done,
            prepared.checkpoints.get(n_done),
            prepared.initial,
            guard,
            payment=payment,
        )

    # -- after training -----------------------------------------------------------------------------------------------

    def _finish(self, finish: TrainedPart, start: VerticalContext) -> JobResult:
        """Commit to the parts, compare the commitments, write."""
        job, attempt = self._job, self._attempt
        hmac, path = model.conclude_part(attempt, job.active, finish.part, finish.n_rounds)
        attempt.all_have_written()
        attempt.folder.drop_checkpoints()
        start.reservations.complete(finish.n_rounds)
        ordinary = None
        if isinstance(finish.part, model.ActivePart):
            # Not model.json: it loads as an ordinary model, whose predictions are wrong without the thresholds.
            masked = marked_as_part(finish.part.booster)
            ordinary = write_atomically(attempt.folder.path / MASKED_MODEL, masked, 0o600).name
            model.write_importance(attempt.folder.path, model.feature_importance(finish.part))
        notes = [] if start.data.train.ids is not None else [_NO_IDS]
        if job.is_encrypted and job.strength < 128:
            notes.append(f"Keys of {job.key_length} bits: {job.strength}-bit security.")
        if self._context.number > 1:
            notes.append(gone_on(self._context.number, attempt.rounds))
        if job.is_noised:
            notes.append(
                f"Sums of passive parties were noised, for epsilon {job.epsilon:g} and delta {job.delta:g} at each: "
                "this is not the model of centralized training."
            )
        elif job.is_sealed:
            notes.append(
                "Splits were compared under seal, by scores of ten bits of sums with 14 fraction bits: this is not the "
                "model of centralized training. It names a passive party's first column in each of its splits."
            )
        elif not job.is_exact:
            notes.append(
                f"Gradients had {job.fraction_bits} fraction bits: this is not the model of centralized training."
            )
        attempt.write_record(
            f"Vertical federated XGBoost, {'active' if self._is_active else 'passive'} party",
            finish.params,
            ordinary,
            finish.sections,
            registry=start.reservations.message,
            best_round=finish.best_round,
            notes=tuple(notes),
            data=tuple(
                DataFacts.of(one.table, one.data_set.name, use)
                for one, use in zip(start.data.sets, (TRAINING, EVALUATION), strict=False)
            ),
        )
        return JobResult(hmac.hex(), f"this party's part of the model is {path}", {"n_rounds": finish.n_rounds})


def prepare(job: VerticalJob, context: SiteContext, group: str | None = None) -> Prepared:
    """Check the job against policy and data, at this site alone.

    Args:
        group: see ``load_party``.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job, parameters, data or the installed XGBoost are not usable; the message says which.
    """
    check_predictor(arithmetic_here())
    policy, is_active = context.policy, context.site == job.active
    _check_policy(job, context, is_active=is_active)
    scheme = choose_scheme(job, context)
    unconstrained = {n: v for n, v in job.params.items() if ALIASES.get(n, n) not in _NAMES_COLUMNS}
    parameters = check_vertical_parameters(unconstrained, ["any"], label=job.label)
    noised, sealed = plan_of(job, parameters), sealed_plan(job, parameters)
    if job.early_stopping_rounds is not None and not parameters.metrics:
        raise ConfigurationError("early_stopping_rounds needs an eval_metric to watch")
    _check_bins(job, context, parameters.max_bin)
    _check_lists(job, context)
    if job.profile == VerticalProfile.ELGAMAL.value:
        require_curve(policy.arithmetic)
    data = load_party(job, context, group)
    _check_rows(sealed, data)
    for one in data.sets:
        if is_active:
            parameters.objective.check_labels(one.table.label)
            check_relevance(parameters.metrics, one.table.label)
            queries_of(parameters, one.table, one.data_set)  # to refuse what is amiss with it before others are asked
            if one is data.train:
                _check_weights(job, one.table, parameters, noised)
        for note in one.table.notes:
            _log.info("%s", note)
    if job.alignment is not None and any(one.ids is None for one in data.sets):
        raise ConfigurationError(
            "rows are aligned by ids, and the policy names no id column. Policy key: data_sets.<name>.id."
        )
    earlier = Earlier.of(context, job.resume_from)
    return Prepared(data, parameters, _initial_part(job, context, data), earlier, _checkpoints(earlier), scheme)


def _check_rows(sealed: SealedPlan | None, data: PartyData) -> None:
    """Refuse more rows than circuits can add up. Raises: ConfigurationError."""
    if sealed is not None:
        sealed.pair_format(data.train.table.n_rows)


def _check_bins(job: VerticalJob, context: SiteContext, max_bin: int) -> None:
    most = context.policy.vertical.max_bins
    if job.preset == Preset.GUARDED.value and context.site != job.active and max_bin > most:
        raise PolicyRefusal(
            f"the job asks for {max_bin} bins; {context.site} allows {most} in guarded vertical jobs. Policy key: "
            "vertical.max_bins. Remedy: lower max_bin of the job."
        )


def _check_weights(job: VerticalJob, table: Table, parameters: TrainingParameters, noised: NoisePlan | None) -> None:
    if table.weight is not None:
        is_elgamal = job.profile == VerticalProfile.ELGAMAL.value
        bits = job.fraction_bits if is_elgamal else pair_format(table.n_rows, weighted=True).fraction_bits
        step = (bits, FINEST) if noised is None else (noised.fraction_bits, NOISED_FINEST)
        bounds = Objective.of_job(parameters, arithmetic_here()).row_bounds(parameters.objective)
        check_weights(table.weight, bounds, parameters.effective, *step)


def _check_policy(job: VerticalJob, context: SiteContext, *, is_active: bool) -> None:
    policy = context.policy
    if job.active not in context.sites:
        raise ConfigurationError(f"the active party {job.active!r} is not among the job's sites")
    terms = JobTerms(
        job.profile,
        job.data_set,
        key_bits=job.key_length,
        tracking=job.tracking and is_active,
        is_paid=job.is_noised and not is_active,
    )
    policy.check_vertical(terms, context.sites)
    if job.is_sealed and len(context.sites) != 2:
        raise ConfigurationError(
            f"preset sealed is for exactly two parties, and the job has {len(context.sites)}. Remedy: choose preset "
            "guarded."
        )
    if job.is_sealed and policy.cluster_for(job.data_set) is not None:
        raise ConfigurationError(
            f"preset sealed runs in one process of a party, and {context.site} has a cluster. Policy key: cluster. "
            "Remedy: leave it out for this job, or choose preset guarded."
        )
    if job.eval_data_set is not None:
        policy.data_set_for(job.eval_data_set, job.profile)
    if job.preset == Preset.EXACT.value and not is_active:
        policy.check_consent(
            "exact_bins",
            "does not hand out all sums per bin, which show in which bin each row lies",
            "choose preset='guarded'",
        )
    if job.is_sealed and not is_active:
        policy.check_consent(
            "sealed_splits",
            "does not let the party with the label compare its splits under a circuit",
            "choose preset='guarded'",
        )


def _check_lists(job: VerticalJob, context: SiteContext) -> None:
    """Refuse lists of more categories than a guarded party allows bins. Raises: PolicyRefusal."""
    most = context.policy.vertical.max_bins
    if job.preset != Preset.GUARDED.value or context.site == job.active:
        return
    for column, words in job.categories.get(context.site, {}).items():
        if len(words) > most:
            raise PolicyRefusal(
                f"the job gives {column!r} {len(words)} categories, each with a bin of its own; {context.site} allows "
                f"{most} bins in guarded vertical jobs. Policy key: vertical.max_bins. Remedy: put categories together "
                "under fewer names, in the file and in the job's list."
            )


def _initial_part(job: VerticalJob, context: SiteContext, data: PartyData) -> model.StoredPart[Any] | None:
    """Return this party's part of the model to continue. Raises: ConfigurationError, if it is of other columns."""
    if job.initial_model is None:
        return None
    expected = model.ActivePart if context.site == job.active else model.PassivePart
    found = model.find_part(context.runs, context.policy.inputs, job.initial_model, context.site, expected)
    if (
        found.part.columns != data.columns
        or found.part.categories != dict(data.train.table.categories)
        or (isinstance(found.part, model.PassivePart) and found.part.aliases != data.aliases)
    ):
        raise ConfigurationError(
            "the model to continue was trained on other columns or categories, or under other aliases"
        )
    return found


def _checkpoints(earlier: Earlier) -> dict[int, Checkpoint]:
    found: dict[int, Checkpoint] = {}
    for folder in (earlier.resumed, earlier.own):
        found |= {} if folder is None else read_checkpoints(folder)
    return found


def connected(job: VerticalJob, context: SiteContext) -> AbstractContextManager[Workers | None]:
    """Connect to a party's cluster, if its policy names one and there is something to do there."""
    cluster = context.policy.cluster_for(job.data_set)
    if cluster is None or (context.site == job.active and not job.is_encrypted):
        return nullcontext()
    return open_workers(cluster)


def protection(job: VerticalJob, prepared: Prepared) -> dict[str, str | int]:
    """Return the facts on the scheme that the evidence records."""
    facts: dict[str, str | int] = {"preset": job.preset, "own_rounds": job.own_rounds, **grown_fact(by_sites=True)}
    noised = plan_of(job, prepared.parameters)
    if noised is not None:
        facts |= {
            "epsilon": f"{noised.epsilon:g}",
            "delta": f"{noised.delta:g}",
            "noise": f"discrete Gaussian, {noised.rows_of_noise(noised.n_features):.4g} rows a bin",
            "outside": "split bits, counted and capped",
        }
    if job.is_encrypted:
        facts |= {"scheme": job.profile, **prepared.scheme.facts}
        facts |= {} if prepared.scheme.release else {"security_bits": job.strength}
        facts |= {"fraction_bits": job.fraction_bits} if job.key_length is None else {"key_bits": job.key_length}
    if job.is_sealed:
        facts |= {"opened": "who wins each node; split bits, counted and capped"}
    return facts


def _take_part(attempt: SiteAttempt, prepared: Prepared) -> JobResult:
    job = attempt.job
    attempt.notes += evaluated_elsewhere(attempt.context.policy, job.data_set, job.eval_data_set)
    return VerticalRun(attempt, prepared).run()


run_vertical_site = SitePart(
    prepare,
    _take_part,
    lambda job: (job.data_set, job.eval_data_set),
    protection,
    uses_cluster=True,
)
"""Takes part in one attempt of a vertical job, as the active or as a passive party.

After a failure a part of the model is there only if the last step failed, when all parties had agreed on theirs; the
checkpoints are there in any case.
"""
