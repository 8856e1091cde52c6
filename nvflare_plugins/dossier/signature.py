"""The manifest of a dossier, and the site's signature over it.

The first member lists all others in order, with size and SHA-256; the second holds the site's certificate chain and its
signature over a statement with a domain of its own, so that neither can be taken for a head of evidence. Both are in
canonical JSON (evidence/format.py), as evidence is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from he_processors.errors import AuthenticationError, ProtocolError
from nvflare_plugins.dossier.archive import is_member_name, pack, unpack
from nvflare_plugins.evidence.audit import CertificateAuthority
from nvflare_plugins.evidence.format import canonical, is_name, read_time, time_text
from nvflare_plugins.site.certificates import Identity

FORMAT = "veilboost-dossier-1"
MANIFEST, SIGNATURE = "manifest.json", "signature.json"

_DOMAIN = "veilboost dossier v1"
_MAX_MANIFEST_BYTES = 1 << 20
_FIELDS = {"format", "job_id", "attempt", "site", "profile", "created", "members"}


@dataclass(frozen=True, slots=True)
class Dossier:
    """A dossier whose members are those of its manifest.

    Attributes:
        created: when the site says that it wrote the dossier, with time zone.
        members: by name, in order, without manifest and signature.
        is_signed: whether it carries a signature, which was checked.
    """

    job_id: str
    attempt: str
    site: str
    profile: str
    created: datetime
    members: Mapping[str, bytes]
    is_signed: bool


def seal(dossier: Dossier, identity: Identity) -> bytes:
    """Return the archive of a dossier, signed if the site has a certificate.

    Raises:
        ValueError: it is too large, or a member has no plain name.
    """
    manifest = canonical(
        {
            "format": FORMAT,
            "job_id": dossier.job_id,
            "attempt": dossier.attempt,
            "site": dossier.site,
            "profile": dossier.profile,
            "created": time_text(dossier.created),
            "members": [
                {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in dossier.members.items()
            ],
        }
    )
    signature: dict[str, Any] = {"certificate": None, "signature": None}
    if identity.is_signed:
        signed = identity.sign(_statement(manifest)).hex()
        signature = {"certificate": identity.chain_pem.decode("ascii"), "signature": signed}
    return pack({MANIFEST: manifest, SIGNATURE: canonical(signature), **dossier.members})


def open_dossier(archive: bytes, authority: CertificateAuthority) -> Dossier:
    """Check an archive: its form, its manifest, every member, and the signature if it has one.

    Raises:
        ProtocolError: it is not a dossier, or a member was changed, added, removed or moved.
        AuthenticationError: the signature is not the site's, or its certificate is not believed.
    """
    members = unpack(archive)
    if list(members)[:2] != [MANIFEST, SIGNATURE]:
        raise ProtocolError(f"a dossier begins with {MANIFEST} and {SIGNATURE}")
    manifest, signature = members.pop(MANIFEST), members.pop(SIGNATURE)
    stated = _parsed(manifest, MANIFEST)
    names = [stated[key] for key in ("job_id", "attempt", "site", "profile")] if set(stated) == _FIELDS else []
    if not names or stated["format"] != FORMAT or not all(map(is_name, names)) or type(stated["created"]) is not str:
        raise ProtocolError(f"its {MANIFEST} is not of format {FORMAT}")
    job_id, attempt, site, profile = names
    _check_members(stated["members"], members)
    created = read_time(stated["created"])
    is_signed = _check_signature(_parsed(signature, SIGNATURE), site, manifest, created, authority)
    return Dossier(job_id, attempt, site, profile, created, members, is_signed)


def _check_members(listed: Any, members: Mapping[str, bytes]) -> None:
    """Compare the members with the manifest's list. Raises: ProtocolError."""
    if not isinstance(listed, list) or not all(
        isinstance(one, dict)
        and set(one) == {"name", "size", "sha256"}
        and isinstance(one["name"], str)
        and is_member_name(one["name"])
        for one in listed
    ):
        raise ProtocolError(f"the list of members in its {MANIFEST} is none")
    names = [one["name"] for one in listed]
    for name in names:
        if name not in members:
            raise ProtocolError(f"member {name} is missing, which its {MANIFEST} lists")
    for name in members:
        if name not in names:
            raise ProtocolError(f"member {name} was added: its {MANIFEST} does not list it")
    if names != list(members):
        raise ProtocolError(f"its members are in another order than its {MANIFEST} lists them")
    for one in listed:
        content = members[one["name"]]
        if (one["size"], one["sha256"]) != (len(content), hashlib.sha256(content).hexdigest()):
            raise ProtocolError(f"member {one['name']} was changed: it is not what its {MANIFEST} lists")


def _check_signature(
    stated: Mapping[str, Any], site: str, manifest: bytes, created: datetime, authority: CertificateAuthority
) -> bool:
    if set(stated) != {"certificate", "signature"}:
        raise ProtocolError(f"its {SIGNATURE} is none")
    certificate, signature = stated["certificate"], stated["signature"]
    if certificate is None and signature is None:
        return False
    if not isinstance(certificate, str) or not isinstance(signature, str):
        raise ProtocolError(f"its {SIGNATURE} is none")
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        raise ProtocolError(f"its {SIGNATURE} is none") from None
    try:
        authority.certified(site, certificate, [created])
    except AuthenticationError as error:
        raise AuthenticationError(f"the certificate of {site} cannot be believed: {error}") from None
    authority.check(certificate, _statement(manifest), raw)
    return True


def _statement(manifest: bytes) -> bytes:
    return canonical({"domain": _DOMAIN, "manifest": hashlib.sha256(manifest).hexdigest()})


def _parsed(content: bytes, name: str) -> dict[str, Any]:
    """Return a member in canonical JSON. Raises: ProtocolError."""
    try:
        value = json.loads(content) if len(content) <= _MAX_MANIFEST_BYTES else None
        if isinstance(value, dict) and canonical(value) == content:
            return value
    except (ValueError, RecursionError):
        pass
    raise ProtocolError(f"its {name} is not in canonical JSON")
