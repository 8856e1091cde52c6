"""The parts of a dossier, and its cover: what somebody who supervises reads first.

Each part is some files, or the reason why it is missing, which the cover then says. Privacy: the cover counts rows of
this site, like ``run.json``: whoever gets the dossier learns what SECURITY.md says.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dp_components.errors import PrivacyError
from dp_components.events import event_document
from dp_components.ledger import Ledger, LedgerHistory, ledger_files
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.attempt.run_folder import MODEL, POLICY
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.files import write_private
from nvflare_plugins.evidence.audit import plugin_protection, threat_model
from nvflare_plugins.evidence.reader import Log
from nvflare_plugins.evidence.threat_model import notes_for
from nvflare_plugins.pages.charts import page
from nvflare_plugins.pages.report import consent_words
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pages.runs_page import protected
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import SALT_BYTES, commitment

# The software bill of materials: what VeilBoost stands on in this installation, as CycloneDX JSON.
#
# From the metadata of installed distributions alone: VeilBoost and everything that is installed because of it. Nothing
# is fetched, and no path of this machine is told.
#
# Reference: CycloneDX 1.6 (ECMA-424), bom-1.6.schema.json; package URLs: purl-spec, type pypi.

NAME = "veilboost"
_LONGEST_LICENCE = 120
_EXPRESSION = re.compile(r"[A-Za-z0-9.+() -]{1,120}")


def bill(created: str) -> bytes:
    """Return the bill. Args: created: ISO 8601 in UTC. Raises: metadata.PackageNotFoundError: no VeilBoost here."""
    found, edges = _closure(NAME)
    references = {name: f"pkg:pypi/{name}@{quote(one.version, safe='.-_~')}" for name, one in found.items()}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": _component(NAME, found[NAME], references[NAME], "application"),
            "properties": [
                {"name": "python", "value": f"{platform.python_implementation()} {platform.python_version()}"},
                {"name": "system", "value": f"{platform.system()} {platform.machine()}"},
            ],
        },
        "components": [
            _component(name, found[name], references[name], "library") for name in sorted(found) if name != NAME
        ],
        "dependencies": [
            {"ref": references[name], "dependsOn": sorted(references[one] for one in edges[name])}
            for name in sorted(found)
        ],
    }
    return json.dumps(document, indent=1, sort_keys=True).encode()


def _closure(name: str) -> tuple[dict[str, metadata.Distribution], dict[str, set[str]]]:
    """Return what is installed because of a distribution, by canonical name, and which asks for which."""
    found = {name: metadata.distribution(name)}
    edges: dict[str, set[str]] = {name: set()}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen = set(waiting)
    while waiting:
        owner, extras = waiting.pop()
        for requirement in _requirements(found[owner], extras):
            needed = canonicalize_name(requirement.name)
            if needed not in found:
                try:
                    found[needed] = metadata.distribution(needed)
                except metadata.PackageNotFoundError:  # what is not here is not part of it
                    continue
                edges[needed] = set()
            if needed != owner:
                edges[owner].add(needed)
            following = (str(needed), frozenset(requirement.extras))
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return found, edges


def _requirements(distribution: metadata.Distribution, extras: frozenset[str]) -> list[Requirement]:
    found = []
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in extras or {""}):
            found.append(requirement)
    return found


def _component(name: str, distribution: metadata.Distribution, reference: str, kind: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": kind,
        "bom-ref": reference,
        "name": name,
        "version": distribution.version,
        "purl": reference,
    }
    licence = _licence(distribution)
    return component | ({"licenses": [licence]} if licence else {})


def _licence(distribution: metadata.Distribution) -> dict[str, Any] | None:
    """Return what a distribution says of its licence: an SPDX expression, or its own words as a name."""
    said = distribution.metadata
    expression, own = (said[name] or "" if name in said else "" for name in ("License-Expression", "License"))
    if _EXPRESSION.fullmatch(expression):
        return {"expression": expression}
    lines = [line.rpartition(" :: ")[2] for line in said.get_all("Classifier") or () if line.startswith("License ::")]
    named = "; ".join(line for line in lines if line != "OSI Approved")
    text = named or own.strip().partition("\n")[0]
    return {"license": {"name": text[:_LONGEST_LICENCE]}} if text else None


_WHOLE = (MODEL, "masked_model.json", "profile.json")  # every site has the same
OWN_PARTS = ("vertical_model.json", "private_table.json")
_SALT = "dossier.salt"
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
class Part:
    """One part of a dossier.

    Attributes:
        title: what it is, for the cover page.
        members: files by name; empty if it is missing.
        missing: why, with the remedy; "" if it is there.
        remark: what to know of it.
        is_due: whether a dossier of such a job should have it.
    """

    title: str
    members: Mapping[str, bytes] = field(default_factory=dict)
    missing: str = ""
    remark: str = ""
    is_due: bool = True


def as_json(value: Any) -> bytes:
    """Return values as a file of JSON, the same for the same values."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"


# -- policy -----------------------------------------------------------------------------------------------------------


def policy_part(run: RunRecord, folder: Path, policy: SitePolicy | None) -> Part:
    """Return what the site's policy allowed in the run: the file is the one whose SHA-256 the evidence holds."""
    title = "The site's policy at the time of the job"
    kept = folder / POLICY
    candidates = [kept.read_bytes()] if kept.is_file() else []
    candidates += [policy.allowed()] if policy is not None else []
    for content in candidates:
        if hashlib.sha256(content).hexdigest() == run.policy_hash:
            return Part(
                title, {POLICY: content}, remark=f"its SHA-256 is the policy hash of the evidence: {run.policy_hash}"
            )
    why = (
        "the copy in the run's folder is not the one whose hash was recorded"
        if kept.is_file()
        else "the run's folder holds no copy, and the policy has changed since"
    )
    return Part(title, missing=f"{why}; the hash is {run.policy_hash}")


# -- ledger -----------------------------------------------------------------------------------------------------------


def histories(run: RunRecord, policy: SitePolicy | None) -> tuple[list[LedgerHistory], list[str]]:
    """Return the ledgers of the data sets that the job has used here, and which could not be read."""
    found, problems = [], []
    files = {} if policy is None else {path.stem: path for path in ledger_files(policy.ledgers)}
    for name in dict.fromkeys(one.name for one in run.data):
        if name not in files or policy is None:
            continue
        try:
            found.append(Ledger(files[name], policy.ledger_heads).history())
        except (PrivacyError, OSError) as error:
            text = str(error) if isinstance(error, PrivacyError) else reason_of(error)
            problems.append(f"the ledger of data set {name} cannot be read: {text}")
    return found, problems


def ledger_part(run: RunRecord, found: list[LedgerHistory], problems: list[str], *, is_private: bool) -> Part:
    """Return the ledgers of the job's data sets. Other jobs are numbered: their ids are not this dossier's matter."""
    title = "Privacy ledger of the job's data sets"
    if found:
        content = as_json([_history(one, run.job_id) for one in found])
        return Part(title, {"ledger.json": content}, remark="; ".join(problems))
    if problems:
        return Part(title, missing="; ".join(problems))
    if is_private:
        return Part(
            title,
            missing="no data set of this job has a ledger here: this site has released nothing that had to be charged "
            "(as the active party of buckets), or its workspace was not named, or its ledgers lie elsewhere (policy "
            "key `ledgers`)",
        )
    return Part(
        title, missing="nothing was spent: the job is not differentially private, and no bound is claimed", is_due=False
    )


def _history(one: LedgerHistory, job_id: str) -> dict[str, Any]:
    delta = one.budget.delta
    return {
        "data_set": one.identity.data_set,
        "site": one.identity.site,
        "neighbouring": one.identity.relation.value,
        "rows_per_person": one.identity.rows_per_person,
        "budget": {"epsilon": one.budget.epsilon, "delta": delta, "pure_epsilon": one.budget.pure_epsilon},
        "spent_epsilon": _finite(one.spent.epsilon(delta)),
        "jobs": [
            {
                "number": number,
                "is_this_job": job.job_id == job_id,
                "opened": job.opened,
                "closed": job.closed or None,
                "state": job.state,
                "releases": job.n_releases,
                "spent_epsilon": _finite(job.spent.epsilon(delta)),
                **(
                    {"events": [{"times": n, **event_document(event)} for event, n in job.events]}
                    if job.job_id == job_id
                    else {}
                ),
            }
            for number, job in enumerate(one.jobs, 1)
        ],
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


# -- threats, model ---------------------------------------------------------------------------------------------------


def threats_part(run: RunRecord, log: Log | None) -> Part:
    """Return who could learn what under the job's profile."""
    facts = plugin_protection([log] if log is not None else [])
    model = threat_model(run.profile, facts)
    title = "Who could learn what"
    if model is None:
        return Part(title, missing=f"profile {run.profile} is unknown to this version")
    content = {
        "profile": run.profile,
        "claimed_by_plugin": bool(facts),
        "summary": model.summary,
        "who_learns_what": [{"who": who, "learns": what} for who, what in model.rows()],
        "notes": [*(model.notes if facts else ()), *notes_for(run.profile)],
        "parties": len(run.sites),
    }
    return Part(title, {"threats.json": as_json(content)})


def models_part(folder: Path, randomness: RandomSource = OS_RANDOMNESS) -> Part:
    """Return the hashes of what the job has left here; no model is in a dossier.

    Privacy: every site has a whole model. A party's own part holds thresholds that nobody else has, so it is committed
        to with a salt that stays at the site: a bare hash could be tested against guesses.
    """
    title = "Hash of the model"
    stated = []
    for name in (*_WHOLE, *OWN_PARTS):
        path = folder / name
        if not path.is_file():
            continue
        content = path.read_bytes()
        one: dict[str, Any] = {"file": name, "size": len(content)}
        if name in _WHOLE:
            one["sha256"] = hashlib.sha256(content).hexdigest()
        else:
            one["commitment"] = commitment(content, _salt(folder, randomness))
            one["how"] = (
                f"SHA-256 over a salt and the file; the salt is {_SALT} in the run's folder, of this site alone"
            )
        stated.append(one)
    if not stated:
        return Part(title, missing="the job has left no model at this site: its kind makes none, or the file is gone")
    return Part(title, {"models.json": as_json(stated)})


def _salt(folder: Path, randomness: RandomSource) -> bytes:
    path = folder / _SALT
    if not path.is_file():
        write_private(path, randomness.bytes(SALT_BYTES))
    return path.read_bytes()


# -- cover -------------------------------------------------------------------------------------------------------------


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
