"""What must hold after every run, whatever befell it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from dp_components.ledger import Ledger
from nvflare_plugins.cli.verify import verify
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.flare.attempt import COMPLETED, FAILED
from nvflare_plugins.flare.timeouts import ABORT_GRACE_S, SILENCE_LIMIT_S, START_SILENCE_S, STOP_GRACE_S
from nvflare_plugins.flare.transport import TOPIC_FRAME
from tests.simulation.faults import Plan
from tests.simulation.world import SERVER, Outcome
from tests.support.flare_job import JOB_ID

Trees = dict[str, bytes]
"""By site, the part of its result that two runs without noise have in common."""

EXACT = {
    "horizontal": "model.json",
    "bagging": "model.json",
    "vertical": "vertical_model.json",
}
"""Kinds whose results hold no noise, and the file in which they are."""


ENDED_S = ABORT_GRACE_S + STOP_GRACE_S + 30.0
"""Virtual time from a reason to end a job to its end everywhere; the last term is for messages that are lost."""


_WITHOUT_END = "the log was closed before the attempt had ended"


def broken(kind: str, plan: Plan, outcome: Outcome, reference: Trees) -> list[str]:
    """Return what does not hold, in words."""
    return [
        *_ends(plan, outcome),
        *_agreement(plan, outcome),
        *_reasons(plan, outcome),
        *_evidence(plan, outcome),
        *_nothing_twice(outcome),
        *_nothing_in_clear(outcome),
        *_paid(outcome),
        *_noticed(plan, outcome),
        *_result(kind, plan, outcome, reference),
    ]


def completed(outcome: Outcome) -> list[str]:
    """Return the sites that ended with a result."""
    return [site for site, report in sorted(outcome.reports.items()) if report["status"] == COMPLETED]


def _ends(plan: Plan, outcome: Outcome) -> Iterator[str]:
    if not outcome.is_over:
        yield "the run is not over"
    if plan.is_harmless and (outcome.reason is not None or len(completed(outcome)) < len(outcome.parties.sites)):
        yield f"the job did not survive: {outcome.reason}; {_errors(outcome)}"
    if plan.aborted_s is not None and _errors(outcome) and outcome.seconds > plan.aborted_s + ENDED_S:
        yield f"{outcome.seconds - plan.aborted_s:.0f} s passed between an operator's abort and the end"
    for owner, moment in outcome.dead.items():
        has_begun = owner == SERVER or (owner, SERVER) in outcome.heard
        noticed_s = SILENCE_LIMIT_S if has_begun else START_SILENCE_S
        if _errors(outcome) and outcome.seconds > moment + noticed_s + ENDED_S:
            yield f"{outcome.seconds - moment:.0f} s passed between the death of {owner} and the end"


def _errors(outcome: Outcome) -> dict[str, str]:
    return {site: report["error"] for site, report in outcome.reports.items() if report["status"] == FAILED}


def _agreement(plan: Plan, outcome: Outcome) -> Iterator[str]:
    hmacs = {outcome.reports[site]["model_hmac"] for site in completed(outcome)}
    if len(hmacs) > 1 or "" in hmacs:
        yield "sites ended with different results"
    is_success = SERVER not in outcome.dead and outcome.is_over and outcome.reason is None
    if is_success and len(completed(outcome)) != len(outcome.parties.sites):
        yield "the server says that all went well, and a site does not"


def _reasons(plan: Plan, outcome: Outcome) -> Iterator[str]:
    errors = _errors(outcome)
    for site, error in errors.items():
        if not error or not error.isprintable():
            yield f"{site} does not say why it failed: {error!r}"
        if "see the log of that site" in error or "defect" in error:
            yield f"{site} failed on something that nobody expected: {error}"
    if outcome.reason is not None and ("defect" in outcome.reason or not outcome.reason.isprintable()):
        yield f"the server failed on something that nobody expected: {outcome.reason}"
    if plan.killed is not None and plan.killed in outcome.dead and errors:
        told = " ".join([outcome.reason or "", *errors.values()])
        if plan.killed not in told:
            yield f"nobody names {plan.killed}, which died: {told}"


def _evidence(plan: Plan, outcome: Outcome) -> Iterator[str]:
    is_full = any("full" in word for word in plan.words)
    for site in outcome.parties.sites:
        path = outcome.folder(site) / "evidence" / export_name(site)
        if site in outcome.dead or not path.exists():
            continue
        log = read_log(path)
        if log.unfinished and not is_full:
            yield f"the evidence of {site} has no end"
        if site in _errors(outcome) and not is_full and (log.end or {}).get("reason", "") in ("", _WITHOUT_END):
            yield f"the evidence of {site} does not say why the attempt ended"
        if site in completed(outcome) and not log.completed:
            yield f"the evidence of {site} does not say that it completed"
    if SERVER not in outcome.dead and outcome.reason is None and outcome.is_over:
        found = verify([outcome.evidence])
        if not found.sound:
            yield f"the evidence of a job that went well does not verify: {found.failures}"


def _nothing_twice(outcome: Outcome) -> Iterator[str]:
    """A frame number of a site stands for one content: two under the same keys would give away their difference."""
    known: dict[tuple[object, ...], bytes | None] = {}
    for sent in outcome.messages:
        if sent.topic == TOPIC_FRAME:
            place = (sent.origin, *sent.label)
            if known.setdefault(place, sent.payload) != sent.payload:
                yield f"{sent.origin} sent two contents as one frame"


def _nothing_in_clear(outcome: Outcome) -> Iterator[str]:
    for site in outcome.parties.sites:
        said = b"".join(sent.payload or b"" for sent in outcome.messages if sent.origin == site)
        for word in _private_words(outcome.parties.workspace(site)):
            if word in said:
                yield f"{site} said a value of a row in clear"
                break


def _private_words(workspace: Path) -> Iterator[bytes]:
    """Yield what stands in a site's rows and nowhere else: ids as text, and numbers that use all of their digits."""
    for path in workspace.glob("*.parquet"):
        frame = pd.read_parquet(path)
        for name in frame:
            column = frame[name]
            if not pd.api.types.is_numeric_dtype(column):
                yield from (str(text).encode() for text in column if len(str(text)) > 4)
                continue
            values = column.to_numpy(np.float64)
            yield from (struct.pack("<d", v) for v in values if np.isfinite(v) and float(v) != float(np.float32(v)))


def _paid(outcome: Outcome) -> Iterator[str]:
    """What a site says it has released is in its ledger, also on the disk of a machine that died."""
    for site in outcome.parties.sites:
        root = outcome.left.get(site, outcome.parties.workspace(site))
        releases = [one for one in _records(root, site) if one.get("type") == "spend"]
        if not releases:
            continue
        delta, epsilon = float(releases[-1]["delta"]), float(releases[-1]["epsilon"])
        known = [Ledger(path).spent().epsilon(delta or 1e-9) for path in root.rglob("*.ledger")]
        if max(known, default=0.0) <= 0 or max(known) < 0.999 * epsilon:
            yield f"{site} released what costs {epsilon}, and its ledger knows of {known}"


def _records(root: Path, site: str) -> list[dict[str, object]]:
    path = root / "veilboost_runs" / JOB_ID / "evidence" / export_name(site)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def _noticed(plan: Plan, outcome: Outcome) -> Iterator[str]:
    """A server that changed a sum is found out by every site, and no result comes of it."""
    if plan.lie is not None and plan.lie.told:
        if completed(outcome):
            yield f"the server changed a sum ({plan.lie.how}), and sites completed the job"
        told = " ".join([outcome.reason or "", *_errors(outcome).values()])
        if "the server or a site has changed it" not in told:
            yield f"the server changed a sum ({plan.lie.how}), and nobody says so: {told}"


def _result(kind: str, plan: Plan, outcome: Outcome, reference: Trees) -> Iterator[str]:
    if plan.is_tampered and kind not in EXACT:
        return
    for site, result in results(kind, outcome).items():
        if site in completed(outcome) and reference and result != reference[site]:
            yield f"the result of {site} is not that of an undisturbed run"


def results(kind: str, outcome: Outcome) -> Trees:
    """Return what the sites' results have in common with those of every other run."""
    found = {}
    for site in outcome.parties.sites:
        path = outcome.folder(site) / EXACT.get(kind, "none")
        if path.is_file():
            document = json.loads(path.read_bytes())
            trees = document["learner"]["gradient_booster"] if "learner" in document else document.get("part")
            found[site] = json.dumps(trees, sort_keys=True).encode()
    return found
