"""One site's part in a job with a finished vertical model, from its policy to the result.

The site's role follows from the part that it holds: the active party's model, or a passive party's table. Nothing that
depends on rows leaves a site before all are authenticated, hold parts of the same model, mean the same job and hold the
same rows in the same order. A passive party charges its budget before it answers for any row, and after all have found
theirs sufficient.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.session import versions
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.evidence.format import Content
from nvflare_plugins.kinds.alignment.align import align, confirm, workers_of
from nvflare_plugins.kinds.alignment.job import load_alignment, save_alignments
from nvflare_plugins.kinds.vertical.conversation import ConversationEnd, Requester, Responder
from nvflare_plugins.kinds.vertical.job import ALIGN_FIRST
from nvflare_plugins.kinds.vertical.messages import ConversationLink, RowsProof, VerticalTerms, agree, rows_content
from nvflare_plugins.kinds.vertical.model import (
    ActivePart,
    ModelIdentity,
    Part,
    PassivePart,
    PrivateTable,
    StoredPart,
    feature_importance,
    find_part,
    merge,
    structures,
    table_from_json,
    table_to_json,
    write_importance,
)
from nvflare_plugins.kinds.vertical_inference import inference
from nvflare_plugins.kinds.vertical_inference.explanations import Explainer, RowPositions, check_covers
from nvflare_plugins.kinds.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.kinds.vertical_inference.serving import alignment_in_use, check_cap, load_own, serve, stay
from nvflare_plugins.pages.run_record import SCORING, DataFacts, ReportSection, missing_of
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.workers.workers import in_own_process
from nvflare_plugins.xgb.model_json import LEAST_XGBOOST, LEAST_XGBOOST_ATTRIBUTE, with_attribute

_BLINDED = "Workers of this site's cluster blinded the ids; the rest ran in the site's own process."
_PURPOSE = "prediction"
_SHOWN_FEATURES = 20
_NO_ROWS = inference.Rows(np.empty((0, 0), dtype=np.float32), None)  # merging is about none
_MAX_PART_BYTES = 256 << 20
MERGED_FILE = "merged_model.json"
_TITLES = {
    Action.PREDICT: "Federated prediction",
    Action.EXPLAIN: "Explanation of predictions",
    Action.MERGE: "Merging of a vertical model",
    Action.SERVE: "Standing scoring",
}
_PROTECTION = {
    Action.PREDICT: "the active party learns one ordered bit per row and node on its path; owners learn which rows "
    "reach their nodes",
    Action.EXPLAIN: "the active party learns the positions of rows among the passive parties' thresholds, and which "
    "values are missing; the owners have consented",
    Action.MERGE: "the active party learns the passive parties' thresholds; the owners have consented",
    Action.SERVE: "as a prediction of the rows that are asked for; owners learn besides which rows are asked for, and "
    "when; the owners have consented",
}
_CONSENTS = {
    Action.EXPLAIN: (
        "explain",
        "does not tell where its rows lie among its thresholds",
        "predict alone (action='predict')",
    ),
    Action.MERGE: (
        "merge_model",
        "does not hand out its thresholds",
        "predict with the other parties (action='predict')",
    ),
    Action.SERVE: (
        "scoring",
        "answers for no job that stays",
        "predict (action='predict'), where each row is answered for a number of times",
    ),
}

Write = Callable[[Path], Path]


def _use(attempt: SiteAttempt, prepared: tuple[StoredPart[Part], inference.Rows | inference.UnreadRows]) -> JobResult:
    stored, found = prepared
    run = inference.Run(attempt, stored.identity)
    _agree(run, [])
    if run.job.data_set is not None:
        found = _align(run, found)
        _agree(run, [found])
    rows = found.part(run.job.rows)
    if run.job.data_set is not None:
        _allow(run, stored.part, rows)
    write: Write | None = None
    if isinstance(stored.part, ActivePart):
        write = _ACTIVE[run.action](run, stored.part, rows)
    else:
        _PASSIVE[run.action](run, stored.part, rows)
    keyed = attempt.conclude(json.dumps([run.job.action, stored.identity.model_id]).encode())
    message = _finish(run, stored.part, write, rows)
    return JobResult(keyed.hex(), message, {"action": run.job.action})


def _prepare(job: InferenceJob, context: SiteContext) -> tuple[StoredPart[Part], inference.Rows | inference.UnreadRows]:
    """Check the job against part, policy and data, at this site alone; return the part and this site's rows.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: the site has no part of the model, or its data are not usable.
    """
    stored: StoredPart[Part] = find_part(context.runs, context.policy.inputs, job.model, context.site, Part)  # type: ignore[arg-type]  # either
    _check_parties(stored.identity, context)
    action = Action(job.action)
    if isinstance(stored.part, PassivePart) and action in _CONSENTS:
        context.policy.check_consent(*_CONSENTS[action])
    rows: inference.Rows | inference.UnreadRows = _NO_ROWS
    if job.data_set is not None:
        rows = load_own(job, context, stored.part)
    if job.alignment is not None and rows.ids is None:
        raise ConfigurationError(
            "rows are aligned by ids, and the policy names no id column. Policy key: data_sets.<name>.id."
        )
    return stored, rows


def _check_parties(identity: ModelIdentity, context: SiteContext) -> None:
    absent = sorted(set(identity.sites) - set(context.sites))
    if absent:
        raise ConfigurationError(f"the model cannot be used without {', '.join(absent)}")
    strange = sorted(set(context.sites) - set(identity.sites))
    if strange:
        raise ConfigurationError(f"the job has sites that are no parties of the model: {', '.join(strange)}")


# -- agreement --------------------------------------------------------------------------------------------------------


def _agree(run: inference.Run, sets: Sequence[inference.Rows | inference.UnreadRows]) -> None:
    """Compare job and model with the other parties, then the rows too.

    Raises:
        ConfigurationError: a difference; how many rows a party has is not said.
    """
    rank = run.attempt.channel.rank
    proof = RowsProof(run.attempt.session, [rows_content(rows.ids) for rows in sets])
    terms = VerticalTerms(
        versions(), run.job.stated(), {}, [rows.n_rows for rows in sets], proof.of(rank), run.identity.model_id, {}
    )
    received = run.attempt.gather_sealed(f"terms of {len(sets)} data sets", terms.to_bytes())
    agree(terms, received, run.context.sites, rank, proof)


def _allow(run: inference.Run, part: Part, rows: inference.Rows) -> None:
    """Go on once every owner would answer for the rows; nobody has charged anything before.

    Raises:
        PolicyRefusal: this site's budget is spent or too small for any row, or the rows' randomised buckets were sent
            under local privacy.
    """
    if isinstance(part, PassivePart) and run.action is Action.SERVE:  # which rows is not known yet
        check_cap(run, part)
    elif isinstance(part, PassivePart):
        # True values of rows whose randomised buckets were sent would undo what was paid for, whichever model asks.
        SentRows(run.context.policy).refuse(None if rows.ids is None else rows.names())
        inference.budget_of(run, part).check(rows.names(), rows.features)
    run.attempt.gather_sealed("budgets", b"")


def _align(run: inference.Run, rows: inference.Rows | inference.UnreadRows) -> inference.Rows | inference.UnreadRows:
    """Bring the rows into the order of all parties, as the job asks for."""
    job, context, attempt = run.job, run.context, run.attempt
    alignment = alignment_in_use(run)
    if alignment != ALIGN_FIRST:
        attempt.notes += in_own_process(context.policy, str(job.data_set), "the use of a vertical model")
    if alignment is None:
        return rows
    if alignment != ALIGN_FIRST:
        found = load_alignment(context, alignment, str(job.data_set))
        confirm(attempt.channel, attempt.session, [found])
        return rows.aligned(found)
    ids = {str(job.data_set): rows.ids or ()}
    say, evidence = attempt.progress.say, attempt.evidence
    with workers_of(context.policy, ids) as workers:  # before anything is reserved or leaves
        own = in_own_process(context.policy, str(job.data_set), "the use of a vertical model")
        attempt.notes += (_BLINDED,) if workers else own
        with align(
            attempt.channel, attempt.session, ids, context.policy, say, evidence, standing=True, workers=workers
        ) as aligned:
            save_alignments(attempt.folder.path, context.job_id, context.site, context.sites, list(aligned.values()))
    return rows.aligned(aligned[str(job.data_set)])


# -- the active party -------------------------------------------------------------------------------------------------


def _predict(run: inference.Run, part: ActivePart, rows: inference.Rows) -> Write:
    notes, classes = run.notes(), inference.class_names(part)
    flow = inference.flow_of(run, sum(tree.n_nodes for tree in structures(part.booster)))
    with Requester(ConversationEnd.of(run.attempt, _PURPOSE, flow)) as requester:
        links = {
            party.site: ConversationLink(requester, run.context.sites.index(party.site), party.site, notes)
            for party in part.parties
        }
        predictions = inference.predict(
            part,
            links,
            rows.features,
            run.job.rounds,
            run.job.batch_rows,
            run.attempt.timeout_s,
            lambda done, n: run.attempt.progress.say(f"predicted batch {done} of {n}"),
        )
    return lambda folder: inference.write_predictions(folder, rows, predictions, classes, run.job.file_format)


def _explain(run: inference.Run, part: ActivePart, rows: inference.Rows) -> Write:
    check_covers(part, run.job.rounds)
    told = run.take_from_owners(Content.POSITIONS)
    positions = {site: RowPositions.from_bytes(data, rows.n_rows) for site, data in told.items()}
    explainer = Explainer(part, rows.features, positions, run.job.rounds)
    contributions, classes = explainer.contributions(), inference.class_names(part)
    return lambda folder: inference.write_contributions(
        folder, rows, explainer.names, contributions, classes, run.job.file_format
    )


def _merge(run: inference.Run, part: ActivePart, rows: inference.Rows) -> Write:
    told = run.take_from_owners(Content.THRESHOLDS)
    tables, first = [], len(part.columns)
    for party in part.parties:
        tables.append((first, _table(told[party.site], party.aliases)))
        first += len(party.aliases)
    model = merge(part.booster, len(part.columns), tables)
    model = with_attribute(model, LEAST_XGBOOST_ATTRIBUTE, LEAST_XGBOOST)
    # It holds the thresholds of all parties, who have consented to that.
    return lambda folder: write_atomically(folder / MERGED_FILE, model, mode=0o600)


def _table(data: bytes, aliases: tuple[str, ...]) -> PrivateTable:
    """Read a passive party's table. Raises: ProtocolError."""
    try:
        table, theirs = table_from_json(data.decode())
    except (UnicodeDecodeError, ConfigurationError, RecursionError):
        raise ProtocolError("a party's table is not of the expected form") from None
    if theirs != aliases:
        raise ProtocolError("a party's table names other features than the model")
    return table


# -- a passive party --------------------------------------------------------------------------------------------------


def _answer(run: inference.Run, part: PassivePart, rows: inference.Rows) -> None:
    owner = inference.PathOwner(part, rows.features, run.job.batch_rows)
    budget = [inference.budget_of(run, part)]  # until it is charged

    def answer(question: bytes) -> bytes:
        while budget:
            budget.pop().charge(rows.names(), rows.features)
        return owner.answer_bytes(question)

    flow, noted = inference.flow_of(run, len(part.table)), run.notes().of_decisions(run.identity.active, answer)
    Responder(ConversationEnd.of(run.attempt, _PURPOSE, flow), run.active_rank, noted).run()


def _tell_positions(run: inference.Run, part: PassivePart, rows: inference.Rows) -> None:
    told = RowPositions.of(part, rows.features).to_bytes()
    if len(told) > _MAX_PART_BYTES:
        raise ConfigurationError("the job explains too many rows at once: name fewer (rows)")
    inference.budget_of(run, part).charge(rows.names(), rows.features)
    run.give_active(told, Content.POSITIONS)


def _tell_thresholds(run: inference.Run, part: PassivePart, rows: inference.Rows) -> None:
    run.give_active(table_to_json(part.table, part.aliases).encode(), Content.THRESHOLDS)


_ACTIVE: Mapping[Action, Callable[[inference.Run, ActivePart, inference.Rows], Write]] = {
    Action.PREDICT: _predict,
    Action.EXPLAIN: _explain,
    Action.MERGE: _merge,
    Action.SERVE: serve,
}
_PASSIVE: Mapping[Action, Callable[[inference.Run, PassivePart, inference.Rows], None]] = {
    Action.PREDICT: _answer,
    Action.EXPLAIN: _tell_positions,
    Action.MERGE: _tell_thresholds,
    Action.SERVE: stay,
}


# -- both -------------------------------------------------------------------------------------------------------------


def _finish(run: inference.Run, part: Part, write: Write | None, rows: inference.Rows) -> str:
    """Write results, record and report; return the line for this site's log."""
    folder = run.attempt.folder.path
    title, data = _TITLES[run.action], _data(run.job, part, rows)
    if not isinstance(part, ActivePart) or write is None:
        run.attempt.write_record(title, {}, None, data=data)
        return f"{run.identity.active} has the result of this job"
    path = write(folder)
    importance = feature_importance(part, *inference.rounds_of(part, run.job.rounds))
    write_importance(folder, importance)
    bars = tuple(
        (f"{row.party}.{row.feature}" if row.party else row.feature, row.total_gain, f"{row.total_gain:.4g}")
        for row in importance[:_SHOWN_FEATURES]
        if row.weight
    )
    section = ReportSection("Total gain of features, under the parties' aliases", bars=bars)
    run.attempt.write_record(title, {}, MERGED_FILE if run.action is Action.MERGE else None, (section,), data=data)
    return f"the result is in {path}"


def _data(job: InferenceJob, part: Part, rows: inference.Rows) -> tuple[DataFacts, ...]:
    if job.data_set is None:
        return ()
    missing = missing_of(part.columns, rows.features.T)
    return (DataFacts(job.data_set, SCORING, rows.n_rows, part.columns, missing, dict(part.categories)),)


def _facts(
    job: InferenceJob, prepared: tuple[StoredPart[Part], inference.Rows | inference.UnreadRows]
) -> dict[str, str | int]:
    return {"model": prepared[0].identity.model_id, "reveals": _PROTECTION[Action(job.action)]}


run_inference = SitePart(_prepare, _use, protection=_facts, uses_cluster=True)
"""Takes part in one attempt of a job with a vertical model.

Privacy: the server learns which model and action the job names, sizes and times. What parties learn of each other, see
    ``inference``, ``explanations`` and ``model.merge``.
"""
