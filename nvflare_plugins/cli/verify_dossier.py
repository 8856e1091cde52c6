"""``veilboost verify`` on a dossier: the archive, its signature, and the evidence in it anew."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509

from he_processors.errors import ProtocolError
from nvflare_plugins.cli.verify import Verdict, Verification, unchecked, verify
from nvflare_plugins.dossier.archive import MAX_BYTES
from nvflare_plugins.dossier.signature import Dossier, open_dossier
from nvflare_plugins.evidence.authority import FlareAuthority
from nvflare_plugins.evidence.format import EXPORT_SUFFIX

_SIGNATURE_OF_ZIP = b"PK\x03\x04"
_VERIFICATION = "verification.json"
_EVIDENCE = "evidence/"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What can be said of a dossier.

    Attributes:
        evidence: of the logs of all parties in it; None if it holds none to compare.
        unchecked: what stands between a signed dossier and VERIFIED.
    """

    dossier: Dossier
    evidence: Verification | None
    unchecked: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Who wrote the archive; the evidence in it has a verdict of its own."""
        if not self.dossier.is_signed:
            return Verdict.UNSIGNED
        return Verdict.SIGNED if self.unchecked else Verdict.VERIFIED


def is_dossier(path: Path) -> bool:
    """Tell whether a path is that of an archive."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix.lower() == ".zip" or file.read(len(_SIGNATURE_OF_ZIP)) == _SIGNATURE_OF_ZIP


def verify_dossier(
    path: Path, root: x509.Certificate | None, servers: Collection[str], job: str | None, at: datetime | None
) -> Outcome:
    """Check an archive, and the evidence in it as ``verify`` does.

    Raises:
        ProtocolError: it is no dossier, was changed, is of another job, or its evidence is not what it says.
        AuthenticationError: its signature is not the site's.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ProtocolError(f"{path.name} has more than {MAX_BYTES} bytes: no dossier has")
    dossier = open_dossier(path.read_bytes(), FlareAuthority(root, servers))
    if root is not None and not dossier.is_signed:
        raise ProtocolError(f"{path.name} is not signed by {dossier.site}, and with a root certificate it must be")
    if job not in (None, dossier.job_id):
        raise ProtocolError(f"{path.name} is of job {dossier.job_id}, not of {job}")
    evidence = _evidence(dossier, root, servers, at)
    return Outcome(dossier, evidence, tuple(unchecked(root, servers)))


def _evidence(
    dossier: Dossier, root: x509.Certificate | None, servers: Collection[str], at: datetime | None
) -> Verification | None:
    """Check the logs in a dossier, and that they show what it says they do."""
    stated = dossier.members.get(_VERIFICATION)
    if stated is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, content) in enumerate(dossier.members.items()):
            if name.startswith(_EVIDENCE):
                Path(folder, f"{number}{EXPORT_SUFFIX}").write_bytes(content)
        found = verify([Path(folder)], root, servers, dossier.job_id, at)
    try:
        was_sound = bool(json.loads(stated)["sound"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ProtocolError(f"its {_VERIFICATION} cannot be read") from None
    if was_sound and not found.sound:
        why = next(iter([*found.failures, *(text for one in found.attempts for text in one.failures)]), "")
        raise ProtocolError(f"it says that its evidence holds, and that does not: {why or 'the job was not completed'}")
    return found


def render(outcome: Outcome) -> str:
    """Return the outcome as text; the last line is the verdict."""
    dossier, lines = outcome.dossier, []
    lines.append(f"Dossier of job {dossier.job_id} at {dossier.site}, profile {dossier.profile}")
    lines.append(f"  written   {dossier.created:%Y-%m-%d %H:%M:%S} UTC, as the site says")
    lines.append(
        f"  holds     {len(dossier.members)} files, each as its manifest lists it: {', '.join(dossier.members)}"
    )
    if outcome.evidence is None:
        lines.append("  evidence  not of all parties: it says nothing of what the others recorded")
    return "\n".join(lines)


def verdict_text(outcome: Outcome) -> str:
    """Return the verdict on the archive in one line."""
    dossier = outcome.dossier
    what = f"dossier of job {dossier.job_id} by {dossier.site}"
    if outcome.verdict is Verdict.UNSIGNED:
        return f"UNSIGNED: the {what} is whole, but anyone could have written it"
    if outcome.verdict is Verdict.SIGNED:
        return f"SIGNED, NOT VERIFIED: the {what} is whole, but {'; '.join(outcome.unchecked)}"
    return f"VERIFIED: {what}"


def to_json(outcome: Outcome) -> dict[str, object]:
    """Return what is said of the archive as JSON values."""
    dossier = outcome.dossier
    return {
        "verdict": outcome.verdict.name,
        "exit_code": outcome.verdict.value,
        **{name: getattr(dossier, name) for name in ("job_id", "attempt", "site", "profile")},
        "created": dossier.created.isoformat(),
        "members": list(dossier.members),
        "unchecked": list(outcome.unchecked),
    }
