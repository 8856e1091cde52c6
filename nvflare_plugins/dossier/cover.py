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

from nvflare_plugins.dossier.parts import Part
from nvflare_plugins.report.ledger_page import protected
from nvflare_plugins.report.pages import page
from nvflare_plugins.report.run_record import RunRecord
from nvflare_plugins.report.summary import consent_words

COVER = "index.html"
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
    models, threats, ledgers, bill, allowed = (
        json.loads(members.get(name, b"null"))
        for name in ("models.json", "threats.json", "ledger.json", "bom.cdx.json", "policy.json")
    )
    return page(
        "dossier.html",
        run=run,
        parts=parts,
        facts=facts,
        version=version("veilboost"),
        versions=[f"{name} {number}" for name, number in sorted(run.versions.items())],
        models=models or [],
        n_installed=None if bill is None else len(bill["components"]),
        threats=threats,
        learners=[(one["who"], one["learns"]) for one in threats["who_learns_what"]] if threats else [],
        ledgers=[(one, protected(one["neighbouring"], one["rows_per_person"])) for one in ledgers or ()],
        has_policy=allowed is not None,
        allowed=[(name, _shown(allowed[key])) for key, name in _SHOWN_KEYS.items() if key in (allowed or ())],
        consents=list(_consents(allowed or {})),
    )


def _consents(allowed: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what the policy consents to: (name, limit, meaning)."""
    for name, given in sorted(allowed.get("consents", {}).items()):
        if given:
            yield name, "" if given is True else _shown(given), consent_words(name)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
