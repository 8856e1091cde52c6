"""``veilboost report --summary``: one page about a run for a data-protection officer.

Made from ``run.json`` and the evidence in the run's folder, and from what ``veilboost verify`` said if it was asked. It
repeats the site's own words (policy key ``data_protection``) and what the software knows, and judges nothing.

Privacy: it holds counts of this site's rows, like ``run.json``: a page for the site's own people.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nvflare_plugins.declared import description_of
from nvflare_plugins.evidence.contents import Content, Protection
from nvflare_plugins.evidence.format import CLEAR_CODECS
from nvflare_plugins.evidence.plugin_claims import plugin_protection, release_of, threat_model
from nvflare_plugins.evidence.reader import Log
from nvflare_plugins.evidence.threat_model import protection_text
from nvflare_plugins.formatting import counted, human_bytes, markup
from nvflare_plugins.report.report import own_evidence, prose, when
from nvflare_plugins.report.run_record import RunRecord
from nvflare_plugins.report.style import PRINTED, page
from nvflare_plugins.site.policy.values import Consents, is_private

_STATED = {
    "controller": "Controller",
    "contact": "Contact",
    "purpose": "Purpose",
    "legal_basis": "Legal basis",
    "retention": "Retention",
}
_SHOWN_COLUMNS = 30


def build_summary(run: RunRecord, folder: Path, verification: Sequence[str] = ()) -> str:
    """Return the page as HTML.

    Args:
        folder: of the run, with the evidence that the record names.
        verification: what ``veilboost verify`` said of the exported evidence of all parties, sentence by sentence;
            empty if it was not asked.
    """
    evidence = own_evidence(run, folder)
    log = evidence if isinstance(evidence, Log) else None
    parts = [
        f"<header><p class=eyebrow>Summary for data protection</p><h1>{markup(run.title)}</h1>"
        f"<p>Job {markup(run.job_id)} at {markup(run.site)}, {markup(run.status)}{markup(when(run))}.</p></header>",
        _table("The processing, in this site's own words", _stated(run)),
        _table("What was done", _done(run)),
        _table("What left this site, and how it was protected", _left(run, log)),
        *_who_learnt(run, log),
        _table("Agreed to beyond the defaults, and spent", _agreed(run, log)),
        _table("Verification", _verified(evidence, log, verification)),
    ]
    footer = (
        f"Written by VeilBoost {markup(run.versions.get('veilboost', ''))} at this site, from its own record of the "
        f"run. Hash of the site's policy at the time: <span class=hash>{markup(run.policy_hash) or 'not recorded'}"
        "</span>. The page states what the software did; whether that is lawful is for people to say."
    )
    return page(f"Data protection: {run.job_id}, {run.site}", "\n".join(parts), footer, PRINTED)


Pairs = Iterator[tuple[str, str]]


def _table(title: str, rows: Pairs) -> str:
    cells = "".join(f"<tr><th>{markup(name)}<td>{html}</tr>" for name, html in rows)
    return f"<section><h2>{markup(title)}</h2><table class=threat>{cells}</table></section>"


def _stated(run: RunRecord) -> Pairs:
    for key, name in _STATED.items():
        missing = f"<span class=muted>not stated (policy key <code>data_protection.{key}</code>)</span>"
        yield name, markup(run.statement.get(key, "")) or missing


def _done(run: RunRecord) -> Pairs:
    others = [site for site in run.sites if site != run.site]
    yield "Parties", f"{markup(run.site)} (this site), with {markup(', '.join(others)) or 'no other'}"
    for one in run.data:
        more = len(one.columns) - _SHOWN_COLUMNS
        known = one.columns == run.data[0].columns and one is not run.data[0]
        columns = (
            "as above"
            if known
            else ", ".join(one.columns[:_SHOWN_COLUMNS]) + (f" and {more:,} more" if more > 0 else "")
        )
        label = f"; label {markup(one.label)}" if one.label else ""
        classes = f" ({markup(', '.join(one.label_classes))})" if one.label_classes else ""
        yield (
            f"Data set {one.name}, for {one.use}",
            f"{counted(one.rows, 'row')} of this site; columns {markup(columns) or 'none'}{label}{classes}",
        )
    if not run.data:
        yield "Data", "no rows of this site"


def _left(run: RunRecord, log: Log | None) -> Pairs:
    """What was sent, by its protection. Rows never are: no kind of message holds any."""
    sizes: dict[str, int] = {}
    for row in run.traffic:
        text = protection_text(run.profile, row.kind, row.codec, row.private)
        sizes[text] = sizes.get(text, 0) + row.bytes_out
    for text, size in sorted(sizes.items(), key=lambda item: -item[1]):
        yield human_bytes(size), markup(text[0].upper() + text[1:])
    sent = [part for part in log.parts if part.direction == "sent"] if log is not None else []
    peers: dict[tuple[str, str], set[str]] = {}
    for part in sent:
        peers.setdefault((_meaning(part.what), _reader_sees(part.protection)), set()).add(part.peer)
    for (what, protection), readers in peers.items():
        yield f"Sealed, for {', '.join(sorted(readers))}", markup(f"{what}; {protection}")
    bare = any(row.private and row.codec in CLEAR_CODECS for row in run.traffic)
    how = "<span class='chip bad'>readable</span> Some private messages were readable by the server." if bare else ""
    yield "Profile", f"<code>{markup(run.profile)}</code> {how}"


def _meaning(what: str) -> str:
    known = Content.__members__.get(what)
    return known.meaning if known is not None else "unknown"


def _reader_sees(protection: str) -> str:
    known = Protection.__members__.get(protection)
    return known.value if known is not None else "unknown"


def _who_learnt(run: RunRecord, log: Log | None) -> Iterator[str]:
    facts = plugin_protection([log] if log is not None else [])
    model = threat_model(run.profile, facts)
    if model is None:
        return
    claim = f"<p>As plugin {markup(release_of(facts))} claims of itself.</p>" if facts else ""
    rows = "".join(f"<tr><th>{markup(who)}<td>{prose(what)}</tr>" for who, what in model.rows())
    yield (
        f"<section><h2>Who could learn what of another site's rows</h2><p>{prose(model.summary)}</p>{claim}"
        f"<table class=threat>{rows}</table><p class=fine>W is the number of parties, here {len(run.sites)}. This is "
        "beyond the trained model itself, whose thresholds and leaves are statistics of rows. What else remains "
        "visible is listed in the run's report (<code>report.html</code>) under the same heading.</p></section>"
    )


def _agreed(run: RunRecord, log: Log | None) -> Pairs:
    known = Consents.__dataclass_fields__
    for name in run.consents:
        yield f"Consent {name}", prose(description_of(Consents, name) if name in known else "unknown to this version")
    if not run.consents:
        yield "Consents", "none was needed"
    for one in run.spending:
        spent = "the ledger could not be read" if one.spent is None else f"epsilon {one.spent:.4g} spent over all jobs"
        budget = f"of epsilon {one.epsilon:g} at delta {one.delta:g}"
        yield f"Privacy budget of {one.data_set}", f"{spent}, {budget}, towards adding or removing one person"
    if log is not None and log.spends:
        last = log.spends[-1]
        yield "Spent by this job", f"epsilon {markup(str(last.epsilon))} at delta {markup(str(last.delta))}"
    if not run.spending:
        bound = "no noise was added, and no bound on what is learnt of a person is claimed"
        yield (
            "Privacy budget",
            f"none: {'nothing of this site had to be charged' if is_private(run.profile) else bound}",
        )


def _verified(evidence: object, log: Log | None, verification: Sequence[str]) -> Pairs:
    if log is not None:
        signed = "signed with the site's certificate" if log.session and log.session["signed"] else "not signed"
        state = "complete and unbroken" if log.completed and not log.unfinished else "not completed"
        yield "This site's own log", f"{state}, {counted(len(log.digests), 'record')}, {signed}"
    else:
        what = "missing" if evidence is None else f"broken: {markup(str(evidence))}"
        yield "This site's own log", f"<span class='chip bad'>{what}</span>"
    if verification:
        yield "Logs of all parties", "<br>".join(markup(text) for text in verification)
    else:
        yield (
            "Logs of all parties",
            "not compared here. <code>veilboost verify</code> does; <code>--evidence</code> and <code>--root-ca</code> "
            "of this command put its verdict on this page",
        )
