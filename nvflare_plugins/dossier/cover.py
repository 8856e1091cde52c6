"""``index.html`` of a dossier: what somebody who supervises reads first, and what is missing.

Privacy: it counts rows of this site, like ``run.json``: whoever gets the dossier learns what SECURITY.md says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import Any

from nvflare_plugins.declared import description_of
from nvflare_plugins.dossier.parts import Part
from nvflare_plugins.formatting import counted, human_bytes, markup
from nvflare_plugins.report.ledger_page import protected
from nvflare_plugins.report.report import prose, when
from nvflare_plugins.report.run_record import RunRecord
from nvflare_plugins.report.style import PRINTED, page
from nvflare_plugins.site.policy.values import Consents

COVER = "index.html"
_MOST_JOBS = 40
_SHOWN_KEYS = {
    "allowed_profiles": "Profiles that a job may use",
    "min_sites": "Fewest sites with rows",
    "max_colluders": "Other sites that might pool what they see",
    "min_rows_per_cut": "Fewest pooled rows that a cut may single out",
    "min_effective_rows": "Fewest pooled rows of a tree",
    "min_rows_per_node": "Fewest pooled rows in a node",
    "min_key_bits": "Shortest Paillier key, in bits",
    "unsigned_sessions": "Sessions without certificates accepted",
    "unsigned_peers": "Peers without certificates accepted",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the cover page says beside the parts.

    Attributes:
        verdict: of ``veilboost verify`` on the evidence, one line; "" if it was not asked.
        attacks: outcome of the attacks in a sentence.
        is_signed: whether the site signs the dossier.
    """

    verdict: str
    attacks: str
    is_signed: bool
    created: datetime


def build_cover(run: RunRecord, parts: Sequence[Part], facts: Facts) -> str:
    """Return the page as HTML."""
    members = {name: content for part in parts for name, content in part.members.items()}
    body = "\n".join(
        (
            _header(run, facts),
            _section("In short", _pairs(_short(run, members, facts))),
            _section("What is in this archive", _contents(parts)),
            *_threats(members),
            *_ledger(members),
            *_policy(run, members),
            _section("How to check this archive", _checks(facts)),
        )
    )
    footer = (
        f"Written by VeilBoost {markup(version('veilboost'))} at {markup(run.site)} "
        f"on {facts.created:%Y-%m-%d %H:%M} UTC. The archive holds this site's own evidence and counts of its rows, "
        "and no row, id, key or model. It states what the software did; whether that is lawful is for people to say."
    )
    return page(f"Dossier: {run.job_id}, {run.site}", body, footer, PRINTED)


def _header(run: RunRecord, facts: Facts) -> str:
    level = "good" if facts.verdict.startswith("VERIFIED") else "bad" if facts.verdict.startswith("NOT") else "warn"
    verdict = facts.verdict.partition(":")[0] or "not verified here"
    signed = ("good", "dossier signed") if facts.is_signed else ("warn", "dossier UNSIGNED")
    return (
        f"<header><p class=eyebrow>Dossier of one job, for supervision</p><h1>{markup(run.title)}</h1>"
        f"<p><span class='chip {level}'>evidence: {markup(verdict)}</span>"
        f"<span class='chip {signed[0]}'>{signed[1]}</span></p>"
        f"<p>Job {markup(run.job_id)} at {markup(run.site)}, {markup(run.status)}{markup(when(run))}.</p></header>"
    )


def _short(run: RunRecord, members: Mapping[str, bytes], facts: Facts) -> Iterator[tuple[str, str]]:
    others = [site for site in run.sites if site != run.site]
    yield "Parties", f"{markup(run.site)} (this site), with {markup(', '.join(others)) or 'no other'}"
    for one in run.data:
        label = f", label {markup(one.label)}" if one.label else ""
        yield (
            f"Data set {one.name}, for {one.use}",
            f"{counted(one.rows, 'row')} of this site, {counted(len(one.columns), 'column')}{label}",
        )
    yield "Profile", f"<code>{markup(run.profile)}</code>"
    yield "Left this site", f"{human_bytes(sum(row.bytes_out for row in run.traffic))} in all; rows never are sent"
    yield "Evidence", markup(facts.verdict) or "not compared with that of the other parties"
    for budget in run.spending:
        spent = (
            f"epsilon {budget.spent:.4g} spent over all jobs"
            if budget.spent is not None
            else "its ledger was unreadable"
        )
        yield (
            f"Privacy budget of {budget.data_set}",
            f"{spent} when the run ended, of epsilon {budget.epsilon:g} at delta {budget.delta:g}",
        )
    if not run.spending:
        yield "Privacy budget", "no data set of this job had one here"
    yield "Attacks", markup(facts.attacks)
    for one in json.loads(members.get("models.json", b"[]")):
        what = f"SHA-256 {one['sha256']}" if "sha256" in one else f"commitment {one['commitment']}"
        yield f"Model {one['file']}", f"<span class=hash>{markup(what)}</span>"
    if "bom.cdx.json" in members:
        n = len(json.loads(members["bom.cdx.json"])["components"])
        versions = ", ".join(f"{name} {number}" for name, number in sorted(run.versions.items()))
        yield "Software", f"{markup(versions)} in the run; {counted(n, 'component')} installed when this was written"


def _contents(parts: Sequence[Part]) -> str:
    rows = []
    for part in parts:
        names = [f"<code>{markup(name)}</code>" for name in part.members]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        chip = "<span class='chip warn'>missing</span>" if part.is_due else "none: "
        what = shown or chip + prose(part.missing)
        remark = f"<br><span class=muted>{prose(part.remark)}</span>" if part.remark else ""
        rows.append((part.title, what + remark))
    return _pairs(iter(rows))


def _threats(members: Mapping[str, bytes]) -> Iterator[str]:
    if "threats.json" not in members:
        return
    stated = json.loads(members["threats.json"])
    claim = "<p>As the plugin claims of itself; nobody checked it.</p>" if stated["claimed_by_plugin"] else ""
    rows = ((one["who"], prose(one["learns"])) for one in stated["who_learns_what"])
    yield _section(
        "Who could learn what of another site's rows",
        f"<p>{prose(stated['summary'])}</p>{claim}{_pairs(rows)}<p class=fine>W is the number of parties, here "
        f"{stated['parties']}. This is beyond the trained model itself, whose thresholds and leaves are statistics of "
        "rows. Further notes: <code>threats.json</code>.</p>",
    )


def _ledger(members: Mapping[str, bytes]) -> Iterator[str]:
    for one in json.loads(members.get("ledger.json", b"[]")):
        budget, jobs = one["budget"], one["jobs"]
        shown = jobs[-_MOST_JOBS:]
        rows = "".join(
            f"<tr><td>{job['number']}{' <b>(this job)</b>' if job['is_this_job'] else ''}<td>{markup(job['opened'])}"
            f"<td>{markup(job['state'])}<td class=n>{job['releases']:,}"
            f"<td class=n>{_epsilon(job['spent_epsilon'])}</tr>"
            for job in shown
        )
        more = (
            f"<p class=fine>The first {len(jobs) - len(shown)} jobs stand in ledger.json.</p>" if shown != jobs else ""
        )
        yield _section(
            f"Privacy ledger of {one['data_set']}",
            f"<p>Epsilon {_epsilon(one['spent_epsilon'])} is spent of {budget['epsilon']:g} at delta "
            f"{budget['delta']:g}, towards {protected(one['neighbouring'], one['rows_per_person'])}, "
            "as of the writing of this dossier. Epsilons of jobs do not add up: the ledger composes what lies "
            "behind them.</p><table class=messages><tr><th>job<th>opened<th>state<th class=n>releases"
            f"<th class=n>epsilon</tr>{rows}</table>{more}",
        )


def _policy(run: RunRecord, members: Mapping[str, bytes]) -> Iterator[str]:
    if "policy.json" not in members:
        return
    allowed: dict[str, Any] = json.loads(members["policy.json"])
    rows = [(name, markup(_shown(allowed[key]))) for key, name in _SHOWN_KEYS.items() if key in allowed]
    known = Consents.__dataclass_fields__
    for name, given in sorted(allowed.get("consents", {}).items()):
        if not given:
            continue
        words = prose(description_of(Consents, name)) if name in known else "unknown to this version"
        needed = " <b>This job needed it.</b>" if name in run.consents else ""
        limit = "" if given is True else f"{markup(_shown(given))}: "
        rows.append((f"Consent {name}", limit + words + needed))
    yield _section("What the site's policy allowed", _pairs(iter(rows)))


def _checks(facts: Facts) -> str:
    signed = (
        "The site has signed the list of all files with the key of its FLARE certificate; a file that was changed, "
        "added, removed or moved is noticed."
        if facts.is_signed
        else "The site has no certificate (a simulator): the archive is not signed, and anyone could have written it."
    )
    return (
        f"<p>{signed} <code>veilboost verify ARCHIVE --root-ca rootCA.pem</code> checks that, with the root "
        "certificate of the project from another source than this archive, and the evidence in it anew. Any tool opens "
        "the archive; packed again it is not accepted.</p><p>It shows that the parties' records agree, message by "
        "message, on what left each site and under which protection. It does not show that inputs were honest, that "
        "randomness was good, or that nothing left by another way. Attacks, ledger and reports are this site's own "
        "statements.</p>"
    )


def _section(title: str, html: str) -> str:
    return f"<section><h2>{markup(title)}</h2>{html}</section>"


def _pairs(rows: Iterator[tuple[str, str]]) -> str:
    return "<table class=threat>" + "".join(f"<tr><th>{markup(a)}<td>{b}</tr>" for a, b in rows) + "</table>"


def _epsilon(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.4g}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
