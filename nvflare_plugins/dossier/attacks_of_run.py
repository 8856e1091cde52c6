"""Which model of a run is attacked, with which rows, and what its accounting allows anybody to find out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dp_components.accounting.trade_off import TradeOff
from dp_components.ledger_records import LedgerHistory
from nvflare_plugins.dossier.attacks import AttackReport, run_attacks
from nvflare_plugins.dossier.parts import OWN_PARTS, spending_of_job
from nvflare_plugins.evidence.reader import Log
from nvflare_plugins.evidence.threat_model import BAGGING, VERTICAL, is_horizontal
from nvflare_plugins.report.data_facts import EVALUATION, TRAINING, DataFacts
from nvflare_plugins.report.run_record import RunRecord
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.rows_again import load_again
from nvflare_plugins.site.policy.policy import SitePolicy

_OF_A_PART = (
    "this party has its own part of a vertical model, which cannot score a row by itself. That a row is in the "
    "training is known to every party by the alignment; what sums told of bins stands in report.html"
)


def attack_run(
    folder: Path,
    record: RunRecord,
    policy: SitePolicy | None,
    held_out: str | None,
    allowed: tuple[TradeOff, str] | None,
) -> AttackReport:
    """Attack the model of a run with this site's rows, or say why not.

    Args:
        policy: where the rows lie; None if that is not known.
        held_out: a data set of the policy with rows that the model was not trained on; None is the job's own.
        allowed: what the job's accounting allows, and where that stands.

    Raises:
        VeilBoostError: model or rows cannot be read, or not as in the run.
    """
    facts = next((one for one in record.data if one.use == TRAINING), None)
    if record.profile in VERTICAL or any((folder / name).is_file() for name in OWN_PARTS):
        return AttackReport(_OF_A_PART)
    if record.model is None or not (folder / record.model).is_file():
        return AttackReport("the job has left no model at this site that scores rows")
    if facts is None or not facts.columns:
        return AttackReport("the run has no training rows of this site, or is of a version before 0.4")
    if policy is None:
        return AttackReport("the site's workspace was not named, so that its rows are not known (--workspace DIR)")
    held_out = held_out or next((one.name for one in record.data if one.use == EVALUATION), None)
    if held_out is None:
        return AttackReport(
            "the job had no evaluation set at this site: name rows of the same kind that the model was not trained on, "
            "as a data set of the policy (--held-out NAME)"
        )
    if held_out == facts.name:
        return AttackReport(f"the model was trained on data set {held_out}: name another one (--held-out NAME)")
    training = load_again(policy.data_set(facts.name), facts, record)
    others = load_again(policy.data_set(held_out), facts, record)
    params = record.params if is_horizontal(record.profile) or record.profile in BAGGING else {}
    model = FinishedModel((folder / record.model).read_bytes(), record.model)
    report = run_attacks(model, params, (facts.name, training), (held_out, others), allowed)
    return _with_changes(report, facts, training.n_rows)


def _with_changes(report: AttackReport, facts: DataFacts, n_rows: int) -> AttackReport:
    """Say that the file is no longer that of the run."""
    if n_rows == facts.rows or report.reason:
        return report
    text = (
        f"Data set {facts.name} had {facts.rows:,} rows in the run and has {n_rows:,} now: some of those attacked were "
        "not in the training, which makes the attacks look weaker."
    )
    return dataclasses.replace(report, notes=(text, *report.notes))


def allowed(record: RunRecord, ledgers: list[LedgerHistory], log: Log | None) -> tuple[TradeOff, str] | None:
    """Return what the job's accounting allows anybody to find out, from the ledger or else the evidence."""
    spending = spending_of_job(ledgers, record.job_id)
    if spending is not None and any(spending.spent.parts()):
        return TradeOff.of(spending.spent), "the curve that the site's ledger composes for this job"
    if log is not None and log.spends:
        last = log.spends[-1]
        point = (float(last.epsilon), float(last.delta))
        return TradeOff([point]), f"epsilon {point[0]:g} at delta {point[1]:g}, as the evidence says"
    return None
