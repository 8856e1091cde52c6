"""``veilboost report --summary``: one page about a run for a data-protection officer.

Made from ``run.json`` and the evidence in the run's folder, and from what ``veilboost verify`` said if it was asked. It
repeats the site's own words (policy key ``data_protection``) and what the software knows, and judges nothing.

Privacy: it holds counts of this site's rows, like ``run.json``: a page for the site's own people.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvflare_plugins.base.declared import description_of
from nvflare_plugins.evidence.audit import plugin_protection, release_of, threat_model
from nvflare_plugins.evidence.reader import Log
from nvflare_plugins.evidence.threat_model import protection_text
from nvflare_plugins.pages.render import page
from nvflare_plugins.pages.report import is_readable, own_evidence, sealed_words
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.policy_values import Consents, is_private


def build_summary(run: RunRecord, folder: Path, verification: Sequence[str] = ()) -> str:
    """Return the page as HTML.

    Args:
        folder: of the run, with the evidence that the record names.
        verification: what ``veilboost verify`` said of the exported evidence of all parties, sentence by sentence;
            empty if it was not asked.
    """
    evidence = own_evidence(run, folder)
    log = evidence if isinstance(evidence, Log) else None
    claims = plugin_protection([log] if log is not None else [])
    sizes: dict[str, int] = {}
    for row in run.traffic:  # rows never are sent: no kind of message holds any
        text = protection_text(run.profile, row.kind, row.codec, row.private)
        sizes[text] = sizes.get(text, 0) + row.bytes_out
    readers: dict[tuple[str, str], set[str]] = {}
    for part in log.parts if log is not None else ():
        if part.direction == "sent":
            readers.setdefault(sealed_words(part.what, part.protection), set()).add(part.peer)
    return page(
        "summary.html",
        run=run,
        log=log,
        broken="" if log is not None or evidence is None else str(evidence),
        sent=[(size, text) for text, size in sorted(sizes.items(), key=lambda item: -item[1])],
        sealed=list(readers.items()),
        is_readable=any(map(is_readable, run.traffic)),
        model=threat_model(run.profile, claims),
        plugin=release_of(claims) if claims else "",
        consents=[(name, consent_words(name)) for name in run.consents],
        is_private=is_private(run.profile),
        verification=verification,
    )


def consent_words(name: str) -> str:
    """Return what a site agrees to by a consent."""
    known = name in Consents.__dataclass_fields__
    return description_of(Consents, name) if known else "unknown to this version"
