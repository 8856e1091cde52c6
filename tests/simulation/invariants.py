"""What must hold after every run, whatever befell it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from dp_components.errors import LedgerDamaged, PrivacyError
from dp_components.ledger import Ledger
from he_processors.errors import ProtocolError
from nvflare_plugins.evidence import verification as verifier
from nvflare_plugins.evidence.format import EXPORT_SUFFIX, export_name
from nvflare_plugins.evidence.reader import SITES_FACT, Log, read_log
from nvflare_plugins.flare.attempt import COMPLETED, FAILED
from nvflare_plugins.flare.kept_jobs import is_noted
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.flare.timeouts import (
    ABORT_GRACE_S,
    LOCAL_WORK_S,
    SILENCE_LIMIT_S,
    SITE_MARGIN_S,
    START_SILENCE_S,
    STOP_GRACE_S,
    transfer_s,
)
from nvflare_plugins.flare.transport import TOPIC_FRAME
from nvflare_plugins.kinds.vertical.context import ANSWER_S
from nvflare_plugins.site.memory.forgetting import Queue, Standing
from nvflare_plugins.site.memory.store import NAME as MEMORY
from nvflare_plugins.wire.envelope import MAX_FRAME_BYTES, Kind, unpack
from tests.conformance.kind_cases import DATA
from tests.simulation.cases import DEADLINE_S, JOBS, N_ASKED, STOP
from tests.simulation.faults import Plan
from tests.simulation.in_clear import nothing_in_clear
from tests.simulation.watch import Watch
from tests.simulation.world import ABANDONED, SERVER, Outcome
from tests.support.flare_job import JOB_ID
from tests.support.opened_sums import Opened

Trees = dict[str, bytes]
"""By site, the part of its result that two runs without noise have in common."""

EXACT = {
    "horizontal": "model.json",
    "bagging": "model.json",
    "vertical": "vertical_model.json",
    "profile": "profile.json",
}
"""Kinds whose results hold no noise, and the file in which they are."""


_ACTIVE_PARTYS = ("vertical_inference", "vertical_tuning")
"""Kinds whose results are the active party's alone."""


ENDED_S = ABORT_GRACE_S + STOP_GRACE_S + 30.0
"""Virtual time from a reason to end a job to its end everywhere; the last term is for messages that are lost."""


HUNG_S = LOCAL_WORK_S + transfer_s(2 * MAX_FRAME_BYTES) + SITE_MARGIN_S
"""Virtual time after which nobody waits for a server whose work stands still, although it gives signs of life."""


_WITHOUT_END = "the log was closed before the attempt had ended"


_logs: dict[bytes, Log] = {}


def _log_of(path: Path) -> Log:
    """Read a log; of several with the same bytes, as a site and the server have them, the first alone."""
    content = path.read_bytes()
    if content not in _logs:
        if len(_logs) > 100:
            _logs.clear()
        _logs[content] = read_log(path)
    return replace(_logs[content], path=path)


def _verified(*places: Path) -> verifier.Verification:
    with patch.object(verifier, "read_log", _log_of):
        return verifier.verify(list(places))


def broken(kind: str, plan: Plan, outcome: Outcome, reference: Trees) -> list[str]:
    """Return what does not hold, in words."""
    return [
        *_ends(kind, plan, outcome),
        *_survival(kind, plan, outcome),
        *_agreement(plan, outcome),
        *_one_leader(outcome),
        *_reasons(plan, outcome),
        *_evidence(plan, outcome),
        *_forgeries(plan, outcome),
        *_nothing_twice(outcome),
        *nothing_in_clear(JOBS[kind].kind, plan, outcome),
        *_noticed(plan, outcome),
        *_whole_files(kind, outcome),
        *_result(kind, plan, outcome, reference),
    ]


def completed(outcome: Outcome) -> list[str]:
    """Return the sites that ended with a result."""
    return [site for site, report in sorted(outcome.reports.items()) if report["status"] == COMPLETED]


def left_out(outcome: Outcome) -> set[str]:
    """Return the sites without which the job was completed: the server says so, and each that is back was told."""
    if outcome.reason is not None or not outcome.is_over or SERVER in outcome.dead:
        return set()
    return set(outcome.summary.get("without", ()))


def _ends(kind: str, plan: Plan, outcome: Outcome) -> Iterator[str]:
    if not outcome.is_over:
        yield "the run is not over"
    if JOBS[kind].on_loss != STOP:  # how long it waits is no matter of the last death alone
        return
    is_complete = outcome.reason is None and len(completed(outcome)) == len(outcome.parties.sites)
    if plan.is_harmless and plan.has_twin is None and not is_complete:
        yield f"the job did not survive: {outcome.reason}; {_errors(outcome)}"
    ended = outcome.started + outcome.seconds
    # Where messages are lost a site may not hear of the end, and learns it from the server's silence.
    ended_s = ENDED_S + (SILENCE_LIMIT_S if plan.lost else 0.0)
    if plan.aborted_s is not None and _errors(outcome) and ended > max(plan.aborted_s, outcome.started) + ended_s:
        yield f"{ended - plan.aborted_s:.0f} s passed between an operator's abort and the end"
    hung_s = HUNG_S if plan.hung is not None and plan.hung[0] == SERVER else LOCAL_WORK_S + SITE_MARGIN_S
    hung_s = max(hung_s, ANSWER_S + SITE_MARGIN_S) if plan.hangs_alone else hung_s
    if plan.hung is not None and ended > max(plan.hung[1], outcome.started) + hung_s + ended_s:
        yield f"{ended - plan.hung[1]:.0f} s passed between the work of {plan.hung[0]} standing still and the end"
    for owner, moment in outcome.dead.items():
        has_begun = owner == SERVER or (owner, SERVER) in outcome.heard
        noticed_s = SILENCE_LIMIT_S if has_begun else START_SILENCE_S
        if _errors(outcome) and ended > max(moment, outcome.started) + noticed_s + ended_s:
            yield f"{ended - moment:.0f} s passed between the death of {owner} and the end"


NOT_SURVIVED = (
    "not back within lost_site_deadline_s",
    "other sites had finished by then",
    "the last that a job has",
    "has the result of job",  # the server died when all sites had ended well
    "it draws none again",  # noise that a trusted server drew
    "and this site has answered attempt",  # the server came back as it was before
    ABANDONED,
)
"""What a job that waits may end with where nobody cheats and no disk forgets what it must not."""


NAMED_BY_A_LIAR = ("there is no state to go on from", "an attempt has sites that the attempts before it had not")
"""What it may end with as well where the server names the sites of its attempts as it likes."""


def _survival(kind: str, plan: Plan, outcome: Outcome) -> Iterator[str]:
    """A job that waits goes on when the lost sites are back; else it ends at its deadline, and names them."""
    for site in outcome.hasty:
        yield f"an attempt began with {site}, whose disk was full, as it had said"
    if not (plan.losses or plan.filled) or outcome.reason is None or SERVER in outcome.dead:
        return
    words = (*NOT_SURVIVED, *(() if plan.naming is None else NAMED_BY_A_LIAR))
    if not any(one in outcome.reason for one in words):
        yield f"the job ended with other words than that it waited in vain: {outcome.reason}; {_errors(outcome)}"
    longest_s = 20 * (DEADLINE_S + SILENCE_LIMIT_S + START_SILENCE_S)
    if outcome.seconds > longest_s:
        yield f"the job waited {outcome.seconds:.0f} s in all"


def _one_leader(outcome: Outcome) -> Iterator[str]:
    """A site that has answered an attempt answers none before it, and an attempt of one number has one leader."""
    left = {site: outcome.left.get(site, outcome.parties.workspace(site)) for site in outcome.parties.sites}
    numbers, led = {}, {}
    for root in left.values():
        for path in (root / "veilboost_runs" / outcome.job_id).rglob(f"*{EXPORT_SUFFIX}*"):
            with suppress(ProtocolError, IndexError, ValueError):
                log = _log_of(path)
                numbers[log.attempt] = log.number or 1
                if log.session is not None and led.setdefault(numbers[log.attempt], log.attempt) != log.attempt:
                    yield f"attempt {log.number} has two leaders"
    answered: dict[str, str] = {}
    for sent in outcome.messages:
        if sent.topic == TOPIC_FRAME:
            attempt, before = str(sent.label[0]), answered.get(sent.origin)
            if before not in (None, attempt) and numbers.get(attempt, 0) <= numbers.get(before, 0):
                yield f"{sent.origin} answered attempt {numbers.get(attempt)} after {numbers.get(before)}"
            answered[sent.origin] = attempt


def _errors(outcome: Outcome) -> dict[str, str]:
    return {site: report["error"] for site, report in outcome.reports.items() if report["status"] == FAILED}


def _agreement(plan: Plan, outcome: Outcome) -> Iterator[str]:
    hmacs = {outcome.reports[site]["model_hmac"] for site in completed(outcome)}
    if len(hmacs) > 1 or "" in hmacs:
        yield "sites ended with different results"
    is_success = SERVER not in outcome.dead and outcome.is_over and outcome.reason is None
    if is_success and set(completed(outcome)) != set(outcome.parties.sites) - left_out(outcome):
        yield f"the server says that all went well, and a site does not: {_errors(outcome)}"


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
    is_full = plan.is_full
    for site in outcome.parties.sites:
        path = outcome.folder(site) / "evidence" / export_name(site)
        if site in outcome.dead or not path.exists():
            continue
        log = _log_of(path)
        if log.unfinished and not is_full and not plan.losses:
            yield f"the evidence of {site} has no end"
        # Its result and its evidence were whole: others ended the job while the disk was slow to take the report.
        was_done = log.completed and "work did not stop within" in _errors(outcome).get(site, "")
        has_reason = (log.end or {}).get("reason", "") not in ("", _WITHOUT_END)
        if site in _errors(outcome) and not is_full and not has_reason and not was_done:
            yield f"the evidence of {site} does not say why the attempt ended"
        if site in completed(outcome) and not log.completed:
            yield f"the evidence of {site} does not say that it completed"
    # Where somebody cheats in what does no harm, such as a frame's salt or a proof meant for a third, evidence says so.
    is_honest = not plan.is_tampered
    if SERVER not in outcome.dead and outcome.reason is None and outcome.is_over and is_honest:
        found = _verified(outcome.evidence.parent if plan.losses or plan.filled else outcome.evidence)
        known = {(attempt, f"the log of {SERVER} is missing") for attempt in outcome.forgotten}
        said = [(one.attempt, text) for one in found.attempts for text in one.failures]
        failures = [*found.failures, *(text for attempt, text in said if (attempt, text) not in known)]
        if any(not (plan.is_clock_wrong and any(word in text for word in _OF_CLOCKS)) for text in failures):
            yield f"the evidence of a job that went well does not verify: {failures}"


def _forgeries(plan: Plan, outcome: Outcome) -> Iterator[str]:
    """Evidence of a job of several attempts does not verify where a site lies in it, or where a log is missing."""
    if SERVER in outcome.dead or outcome.reason is not None or not outcome.is_over:
        return
    if (
        plan.claim is not None
        and plan.claim.told
        and _lies_in_the_end(outcome)
        and _verified(outcome.evidence.parent).sound
    ):
        yield f"{plan.claim.liar} lied of who was lost, and the evidence verifies"
    if plan.liar is None:  # a log that somebody has changed is not read at all
        yield from _attempts_left_out(outcome)
    if plan.hidden is None:
        return
    copy = Path(shutil.copytree(outcome.evidence.parent, outcome.parties.folder / f"hidden-{outcome.job_id}"))
    for path in [*copy.rglob(f"{export_name(plan.hidden)}*")]:
        path.unlink()
    is_excused = plan.hidden in left_out(outcome)
    if _verified(copy).sound is not is_excused:
        yield f"without the evidence of {plan.hidden} the rest verifies: {not is_excused}; it was lost: {is_excused}"


def _lies_in_the_end(outcome: Outcome) -> bool:
    """Whether sites name others in the attempt that completed the job; whom another one names excuses nobody."""
    logs = map(_log_of, (path for path in outcome.evidence.iterdir() if path.name != export_name(SERVER)))
    return len({log.session["protection"].get(SITES_FACT) for log in logs if log.session is not None}) > 1


def _attempts_left_out(outcome: Outcome) -> Iterator[str]:
    """Evidence without an attempt does not name it by the log of each site that has a later one."""
    logs = [_log_of(path) for path in sorted(outcome.evidence.parent.rglob(f"*{EXPORT_SUFFIX}"))]
    for attempt in sorted({log.attempt for log in logs}) if len({log.attempt for log in logs}) > 1 else ():
        failures = " ".join(_verified(*(log.path for log in logs if log.attempt != attempt)).failures)
        for gone in (log for log in logs if log.attempt == attempt):
            has_later = any(log.site == gone.site and (log.number or 0) > (gone.number or 0) for log in logs)
            if has_later and f"the log of {gone.site} of attempt {attempt} is not here" not in failures:
                yield f"without attempt {attempt} the rest of the evidence does not name the log of {gone.site}"


_OF_CLOCKS = ("the clocks of the sites differ", "its times run backwards", "a time that lies in the future")


def _nothing_twice(outcome: Outcome) -> Iterator[str]:
    """A frame number of a site stands for one content: two under the same keys would give away their difference."""
    known: dict[tuple[object, ...], bytes | None] = {}
    for sent in outcome.messages:
        if sent.topic == TOPIC_FRAME:
            place = (sent.origin, *sent.label)
            if known.setdefault(place, sent.payload) != sent.payload:
                yield f"{sent.origin} sent two contents as one frame"


def _whole_files(kind: str, outcome: Outcome) -> Iterator[str]:
    """Whatever is there can be read, also on the disk of a machine that died; and where one site ends well, all can."""
    without = left_out(outcome)
    for site in outcome.parties.sites:
        root = outcome.left.get(site, outcome.parties.workspace(site)) / "veilboost_runs" / outcome.job_id
        for path in sorted(root.glob("*.json")):
            try:
                json.loads(path.read_bytes())
            except ValueError:
                yield f"{path.name} of {site} is not whole"
        if (
            JOBS[kind].kind not in _ACTIVE_PARTYS
            and completed(outcome)
            and site not in without
            and not any((root / name).is_file() for name in JOBS[kind].case.results)
        ):
            yield f"{', '.join(completed(outcome))} completed the job, and {site} has no result on its disk"
        left = [name for name in KINDS[JOBS[kind].kind].kept if (root / name).exists()]
        waits = is_noted(outcome.parties.workspace(site) / outcome.job_id)  # its process is to be started again
        if left and outcome.is_over and site not in outcome.dead and not waits:
            yield f"the job is over, and {site} has {', '.join(left)} still"
        log = root / "evidence" / export_name(site)
        has_result = any((root / name).is_file() for name in JOBS[kind].case.results)
        # Lost when all had agreed on the result, and not all had written it, it may have it: the same trees.
        if site in without and has_result and _in_common(kind, root) not in _of_completed(kind, outcome):
            yield f"the job was completed without {site}, which has another result"
        if site in outcome.dead and log.exists() and read_log(log).unfinished:
            yield f"the evidence of {site}, which died, was finished and has no end"


def _of_completed(kind: str, outcome: Outcome) -> list[bytes | None]:
    return [_in_common(kind, outcome.folder(site)) for site in completed(outcome)]


# -- over all jobs of a world -----------------------------------------------------------------------------------------


def over_all(kind: str, plan: Plan, outcomes: Sequence[Outcome], watch: Watch) -> Iterator[str]:
    """Return what does not hold of what sites remember, over all jobs, also on the disks of machines that died."""
    for site in outcomes[0].parties.sites:
        root = outcomes[-1].left.get(site, outcomes[0].parties.workspace(site))
        yield from _paid(site, root, outcomes, watch)
        yield from _registry(JOBS[kind].kind, site, root, outcomes)
        yield from _rounds(site, root, outcomes, watch)
        if plan.filled is not None:
            yield from _no_refusals(site, root)
    if "forgets" in JOBS[kind].case.fields:
        yield from _forgotten(outcomes)


def _no_refusals(site: str, root: Path) -> Iterator[str]:
    """A full disk is no refusal, and neither is what is tried again."""
    for path in root.rglob(MEMORY):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            (count,) = db.execute("SELECT COUNT(*) FROM refusals").fetchone()
            runs = db.execute("SELECT COUNT(*) FROM runs GROUP BY job_id, terms, trees HAVING COUNT(*) > 2").fetchall()
        if count or runs:
            yield f"{site} has counted {count} refusals, and reserved {runs} times what it had reserved"


def _forgotten(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """No request to be forgotten is lost, and none is done before all sites have a model without the person."""
    sites = outcomes[0].parties.sites
    roots = {site: outcomes[-1].left.get(site, outcomes[0].parties.workspace(site)) for site in sites}
    for site, root in roots.items():
        (path,) = root.rglob(MEMORY)
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            queue = Queue.read(db, DATA)
        n_done = int((queue.standing == Standing.FORGOTTEN).sum())
        if queue.keys.size != N_ASKED or n_done not in (0, N_ASKED):
            yield f"of {N_ASKED} requests {site} knows {queue.keys.size}, and {n_done} are done"
        models = [{job for job in (o.job_id for o in outcomes) if _model_in(of, job)} for of in roots.values()]
        if n_done and not set.intersection(*models):
            yield f"{site} has marked its requests as done, and sites lack the model"
        if not n_done and any(site in completed(outcome) for outcome in outcomes):
            yield f"{site} has completed the job, and its requests still wait"


def _model_in(root: Path, job_id: str) -> bool:
    return (root / "veilboost_runs" / job_id / "model.json").is_file()


def _rounds(site: str, root: Path, outcomes: Sequence[Outcome], watch: Watch) -> Iterator[str]:
    """Evidence holds every round that a site has sent anything after."""
    for outcome in outcomes:
        n_sent = sum(sent.origin == site for other in outcomes for sent in other.messages)
        n_rounds = sum(before < n_sent for before in watch.rounds.get((site, outcome.job_id), []))
        folder, name = root / "veilboost_runs" / outcome.job_id, export_name(site)
        logs = [*folder.rglob(name), *folder.rglob(f"{name}.partial")]  # of earlier attempts too
        noted = b"".join(path.read_bytes() for path in logs).count(b'"type":"round"')
        if noted < n_rounds:
            yield f"{site} ended {n_rounds} rounds of {outcome.job_id}, and its evidence knows {noted}"


def given_away(opened: Opened) -> Iterator[str]:
    """No two sums that were opened at one state of the model differ by what some sites gave."""
    for what, sites in sorted(set(opened.found_by_subtraction())):
        yield f"two sums of {what} differ by the part of {sites}"


def _paid(site: str, root: Path, outcomes: Sequence[Outcome], watch: Watch) -> Iterator[str]:
    """What a site has released, and sent anything after, is in its ledger."""
    for outcome in outcomes:
        n_sent = sum(sent.origin == site for other in outcomes for sent in other.messages)
        releases = [one for one in watch.spent.get((site, outcome.job_id), []) if one[0] < n_sent]
        if not releases:
            continue
        _, epsilon, delta = releases[-1]
        known = []
        for path in root.rglob("*.ledger"):
            for job_id in (outcome.job_id, JOB_ID):  # a job that is resumed goes on under its own name
                with suppress(PrivacyError):
                    known.append(Ledger(path).job_spent(job_id).epsilon(delta or 1e-9))
        if max(known, default=0.0) <= 0 or max(known) < 0.999 * epsilon:
            yield f"{site} released what costs {epsilon} in {outcome.job_id}, and its ledger knows of {known}"
        by_server = watch.spent.get((SERVER, outcome.job_id), [])
        if by_server and max(known, default=0.0) < 0.999 * by_server[-1][1]:
            yield f"the server released what costs {by_server[-1][1]}, and the ledger of {site} knows of {known}"
    for path in root.rglob("*.ledger"):
        try:
            Ledger(path).describe()
        except LedgerDamaged as error:
            if str(error) != "The ledger is empty." or watch.spent:
                yield f"the ledger of {site} cannot be read: {error}"


REGISTERED = ("horizontal", "vertical", "bagging")
"""Kinds whose jobs stand in the registry of each site."""


def _registry(kind: str, site: str, root: Path, outcomes: Sequence[Outcome]) -> Iterator[str]:
    for path in root.rglob(MEMORY):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            if db.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                yield f"the memory of {site} does not fit together"
                continue
            runs = dict(db.execute("SELECT job_id, state FROM runs ORDER BY id").fetchall())
        for outcome in outcomes if kind in REGISTERED else ():
            if site in completed(outcome) and runs.get(outcome.job_id) != "complete":
                yield f"{site} completed {outcome.job_id}, and its registry says {runs.get(outcome.job_id)}"


REFUSED = (
    "no checkpoint of job is held by all sites",
    "has no record of a job job",
    "job job is complete",
    "knows no job job to resume",
    "is closed",
)
"""What a resumption may be refused with: the lost job had not come so far, or had ended."""


def after_return(kind: str, plan: Plan, later: Sequence[Outcome], reference: Trees) -> Iterator[str]:
    """When all machines are there again the job goes on, or is refused in words and then runs anew."""
    calm = Plan(0, is_clock_wrong=plan.is_clock_wrong)
    for outcome in later:
        if outcome.reason is None:
            yield from (f"after its return: {fault}" for fault in broken(kind, calm, outcome, reference))
        elif outcome.job_id == "anew":
            yield f"the job does not run anew: {outcome.reason}"
        elif not any(words in outcome.reason for words in REFUSED):
            yield f"a resumption was refused with other words: {outcome.reason}"


def _noticed(plan: Plan, outcome: Outcome) -> Iterator[str]:
    """A server that changed a sum is found out by every site, and no result comes of it."""
    told = " ".join([outcome.reason or "", *_errors(outcome).values()])
    if plan.lie is not None and plan.lie.told and plan.has_twin is None:
        if completed(outcome) and plan.lie.victim is None:
            yield f"the server cheated ({plan.lie.how}), and sites completed the job"
        if plan.lie.is_sum and "the server or a site has changed it" not in told:
            yield f"the server changed a sum ({plan.lie.how}), and nobody says so: {told}"
    if plan.other_terms is not None:
        if completed(outcome):
            yield "the server told a site other terms, and sites completed the job"
        if _sent_kinds(outcome) - _OF_HANDSHAKES:
            yield "the server told a site other terms, and sites sent more than the handshake"
    if plan.swap is not None and (sites := {site for job_id, site in plan.swap.told if job_id == outcome.job_id}):
        if sites & set(completed(outcome)):
            yield "the server answered with what belongs to another exchange, and sites completed the job"
        if "belongs elsewhere" not in told:
            yield f"the server answered with what belongs to another exchange, and nobody says so: {told}"
    if plan.liar is not None and outcome.reason is None and len(completed(outcome)) == len(outcome.parties.sites):
        if plan.liar[1] != "changed evidence":
            yield f"{plan.liar[0]} reported {plan.liar[1]}, and the server says that all went well"
        elif _verified(outcome.evidence).sound:
            yield f"{plan.liar[0]} handed in changed evidence, and it verifies"


_OF_HANDSHAKES = {Kind.HANDSHAKE, Kind.GROUP_KEY}


def _sent_kinds(outcome: Outcome) -> set[Kind]:
    """Return the kinds of the frames that sites have sent, of those that are one piece."""
    found = set()
    for sent in outcome.messages:
        if sent.topic == TOPIC_FRAME and sent.payload:
            with suppress(ProtocolError):
                found.add(unpack(sent.payload).kind)
    return found


def _result(kind: str, plan: Plan, outcome: Outcome, reference: Trees) -> Iterator[str]:
    if plan.is_tampered and JOBS[kind].kind not in EXACT:
        return
    if left_out(outcome) or plan.replaced:  # another model than that of all sites, or of other files
        return
    for site, result in results(kind, outcome).items():
        if site in completed(outcome) and reference and result != reference[site]:
            yield f"the result of {site} is not that of an undisturbed run"


def results(kind: str, outcome: Outcome) -> Trees:
    """Return what the sites' results have in common with those of every other run."""
    found = {site: _in_common(kind, outcome.folder(site)) for site in outcome.parties.sites}
    return {site: result for site, result in found.items() if result is not None}


def _in_common(kind: str, folder: Path) -> bytes | None:
    """Return the part of a result that all runs have in common; None where there is none."""
    path = folder / EXACT.get(JOBS[kind].kind, "none")
    if not path.is_file():
        return None
    document = json.loads(path.read_bytes())
    if JOBS[kind].kind == "profile":
        del document["job_id"]
    else:
        document = document["learner"]["gradient_booster"] if "learner" in document else document.get("part")
    return json.dumps(document, sort_keys=True).encode()
