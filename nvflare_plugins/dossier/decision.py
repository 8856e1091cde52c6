"""The decision of a site that a model may leave it, or may not: its file, and what checks it.

It names the rules with their limits and whether each is kept, and binds by SHA-256: the model's file and the copy that
``veilboost export`` makes of it as JSON, the rules, the measured values, the site's evidence of the job. What was
measured counts rows of the site and stays there, in a file with a salt of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len
from pydantic import Field

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.declared import PRINTABLE, STRICT, Document, Flag, OneOf, Words, document
from nvflare_plugins.dossier.archive import check_signature
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.evidence.format import canonical, is_name, read_time
from nvflare_plugins.site.policy_values import ReleaseRules

FORMAT = "veilboost-release-1"
_DOMAIN = "veilboost release v1"
_MAX_BYTES = 1 << 20

Sha256 = Annotated[str, STRICT, Field(pattern="^[0-9a-f]{64}$"), Words("64 hexadecimal digits")]
Line = Annotated[str, STRICT, Field(min_length=1, max_length=256), PRINTABLE, Words("a non-empty line of text")]


@document
class Judged(Document):
    """One rule of a decision."""

    WHAT = "a judged rule"

    rule: Line
    """Its key."""
    limit: Line
    """What it asks for, in words."""
    holds: Flag
    """Whether the model keeps it."""


@document
class Decision(Document):
    """A decision as its file holds it, in canonical JSON (evidence/format.py)."""

    WHAT = "the decision"
    IS_JSON = False  # it holds documents; what is read is JSON

    format: Annotated[str, OneOf(FORMAT)]
    site: Line
    job_id: Line
    attempt: Line
    profile: Line
    by: Line
    """Who decided, as this person was named."""
    time: Line
    """When, by the site's clock."""
    released: Flag
    """Whether every rule is kept."""
    judged: Annotated[list[Judged], Len(1, 100)]
    model: Sha256
    """Of the file of the model."""
    copy: Sha256 | None
    """Of the copy that `veilboost export` makes as JSON; null where the model cannot be copied so."""
    rules: Sha256
    """Of the rules' values."""
    facts: Sha256
    """Of the file of measured values, which holds a salt and stays at the site."""
    evidence: Sha256 | None
    """Of the site's log of the job; null where the run has none."""
    certificate: Annotated[str, STRICT] | None
    signature: Annotated[str, STRICT] | None

    def __post_init__(self) -> None:
        if not all(map(is_name, (self.site, self.job_id, self.attempt, self.profile))):
            raise ConfigurationError("the decision names a site, job, attempt or profile that can be none")
        if self.released != all(one.holds for one in self.judged):
            raise ConfigurationError("the decision says otherwise than its rules")

    @property
    def moment(self) -> datetime:
        """When it was made. Raises: ProtocolError."""
        return read_time(self.time)

    @property
    def bound(self) -> dict[str, str]:
        """What it binds: SHA-256 -> what that is of."""
        named = {"the model": self.model, "its exported copy": self.copy, "the measured values": self.facts}
        named |= {"the rules": self.rules, "the site's evidence": self.evidence}
        return {value: name for name, value in named.items() if value is not None}

    def statement(self) -> bytes:
        """Return what is signed."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("certificate", "signature")}
        return canonical({"domain": _DOMAIN, "decision": hashlib.sha256(canonical(fields)).hexdigest()})


def open_decision(content: bytes, authority: FlareAuthority) -> tuple[Decision, bool]:
    """Read and check a decision; tell also whether it is signed.

    Raises:
        ProtocolError: it is none, or was changed in a way that shows.
        AuthenticationError: the signature is not the site's.
    """
    try:
        value = json.loads(content) if len(content) <= _MAX_BYTES else None
        if not isinstance(value, dict) or canonical(value) != content:
            raise ValueError
        judged = [Judged(**one) for one in value.pop("judged")]
        decision = Decision(judged=judged, **value)
    except ConfigurationError as error:
        raise ProtocolError(f"this is no decision as VeilBoost writes it: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ProtocolError("this is no decision as VeilBoost writes it, in canonical JSON") from None
    found = {"certificate": decision.certificate, "signature": decision.signature}
    return decision, check_signature(found, decision.site, decision.statement(), decision.moment, authority)


def check_bound(decision: Decision, path: Path) -> str:
    """Return what a file is of all that a decision binds. Raises: ProtocolError: it is none of it."""
    what = decision.bound.get(file_sha256(path))
    if what is None:
        try:
            what = decision.bound.get(read_rules(path).fingerprint())
        except ConfigurationError:
            what = None
    if what is None:
        raise ProtocolError(
            f"the decision does not bind {path.name}: it is another model or other rules, or has changed since"
        )
    return what


def is_decision(path: Path) -> bool:
    """Tell whether a path is that of a file which says that it is a decision."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'"format":"{FORMAT}"'.encode() in file.read(_MAX_BYTES)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_rules(path: Path) -> ReleaseRules:
    """Read a file of rules; keys that it leaves out have their defaults. Raises: ConfigurationError."""
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no file {path}: `veilboost release --write-rules FILE` writes one"
        ) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} is no JSON object of rules, with each key once")
    return ReleaseRules(**value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError
    return dict(pairs)


def broken(judged: Sequence[Judged]) -> str:
    """Return the rules that are not kept, with their limits."""
    return "; ".join(f"{one.rule} ({one.limit})" for one in judged if not one.holds)
