"""What evidence and report say of a plugin's profile: who wrote it, and what it says of itself.

Nobody checks what a plugin claims. Evidence carries the claims of all sites, which must be equal, so that they are read
without loading the plugin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nvflare_plugins.evidence.reader import Log
from nvflare_plugins.evidence.threat_model import PLUGIN_CODECS, TAGGED, THREAT_MODELS, Statement, ThreatModel
from nvflare_plugins.formatting import printable
from nvflare_plugins.wire.profiles import plugin_of

_CLAIM = "claims "
RELEASE_FACTS = ("plugin", "distribution", "version")
_TEXTS = ("summary", "server_alone", "one_site", "server_and_one_site", "all_but_one")
_UNSAID = "(the evidence does not say)"
_MOST_CHARS = 2000
_LONGEST_CHARS = 20_000  # of all notes together


def plugin_facts(name: str, distribution: str, version: str, statement: Statement) -> dict[str, str]:
    """Return what a site's evidence records under ``protection``."""
    claims = {_CLAIM + text: getattr(statement, text) for text in _TEXTS}
    notes = "\n".join(note.replace("\n", " ") for note in statement.notes)
    return {"plugin": name, "distribution": distribution, "version": version, **claims, f"{_CLAIM}notes": notes}


def is_claim(fact: str) -> bool:
    """Tell whether a fact of the evidence is a plugin's own statement."""
    return fact.startswith(_CLAIM)


def names_plugin(profile: str, protection: Mapping[str, object]) -> bool:
    """Tell whether a site's facts say which release the plugin of its profile was."""
    facts = [protection.get(fact) for fact in ("distribution", "version")]
    return protection.get("plugin") == plugin_of(profile) and all(isinstance(fact, str) and fact for fact in facts)


def release_of(protection: Mapping[str, object]) -> str:
    """Return name, distribution and version of a plugin for people."""
    return " ".join(printable(str(protection.get(fact, "?")), 100) for fact in RELEASE_FACTS)


def plugin_protection(logs: Iterable[Log]) -> Mapping[str, object] | None:
    """Return the facts of the plugin that an attempt ran under, as its sites recorded them alike; None without one."""
    for log in logs:
        if log.session is not None and plugin_of(log.profile) is not None:
            facts: Mapping[str, object] = log.session["protection"]
            return facts
    return None


def threat_model(profile: str, protection: Mapping[str, object] | None = None) -> ThreatModel | None:
    """Return what is visible under a profile; of a plugin's, what it claims. None for an unknown profile.

    Args:
        protection: the facts that a site's evidence records, of which a plugin's claims are read.
    """
    if plugin_of(profile) is None:
        return THREAT_MODELS.get(profile)
    stated = {name: (protection or {}).get(_CLAIM + name) for name in (*_TEXTS, "notes")}
    notes = stated.pop("notes")
    texts = {
        name: printable(text, _MOST_CHARS) if isinstance(text, str) and text else _UNSAID
        for name, text in stated.items()
    }
    lines = notes[:_LONGEST_CHARS].splitlines() if isinstance(notes, str) else []
    printed = tuple(printable(line, _MOST_CHARS) for line in lines if line)
    return ThreatModel(profile=profile, codecs=PLUGIN_CODECS, changed=TAGGED, notes=printed, **texts)
