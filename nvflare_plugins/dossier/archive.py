"""A ZIP archive in the only form that is accepted, its manifest, and the site's signature over it."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from he_processors.errors import AuthenticationError, ProtocolError
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.evidence.format import canonical, is_name, read_time, time_text
from nvflare_plugins.site.certificates import Identity

# A ZIP archive in the only form that is accepted: what is written for given members is one sequence of bytes.
#
# Members are stored as they are, in a fixed order, under a fixed date, with mode 0600 and nothing else. So there is one
# archive for given members, and reading is strict: every byte is what would be written, or the archive is refused. What
# makes archives dangerous cannot be expressed: compressed members that grow, links, folders and paths, names twice,
# members that only one of the two directories lists, bytes before, between and after. Any tool for ZIP opens it.
#
# Reference: PKWARE, APPNOTE.TXT 6.3.3 (version 2.0 of the format), sections 4.3.7, 4.3.12 and 4.3.16.


MAX_BYTES = 1 << 29
MAX_MEMBERS = 1000

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@ -]{0,160}(/[A-Za-z0-9_][A-Za-z0-9_.@ -]{0,160})?")
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_LOCAL_FIELDS, _CENTRAL_FIELDS = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END_FIELDS = struct.Struct("<4s4H2IH")
_OVERHEAD = _LOCAL_FIELDS.size + _CENTRAL_FIELDS.size
_VERSION = 20
_UNIX = 3 << 8 | _VERSION  # so that the mode counts
_MODE = 0o100600 << 16
_DATE = 1 << 5 | 1  # 1980-01-01, the first that the format knows, at midnight
_LINK = 0o120000
_STORED = 0


def is_member_name(name: str) -> bool:
    """Tell whether a member may be called so: a file's name, in one folder at most; never a path that leads out."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return the archive of these members, in this order.

    Raises:
        ValueError: a name that is none, too many members, or more than ``MAX_BYTES`` in all.
    """
    n_bytes = sum(len(content) + 2 * len(name) for name, content in members.items())
    if len(members) > MAX_MEMBERS or n_bytes + _OVERHEAD * (len(members) + 1) > MAX_BYTES:
        raise ValueError(f"an archive holds at most {MAX_MEMBERS} members and {MAX_BYTES} bytes")
    if not all(map(is_member_name, members)):
        raise ValueError("a member's name is a file's name, in one folder at most")
    local, central = [], []
    offset = 0
    for name, content in members.items():
        one = _local(name.encode(), content)
        central.append(_central(name.encode(), content, offset))
        local.append(one + content)
        offset += len(local[-1])
    directory = b"".join(central)
    return b"".join(local) + directory + _end(len(members), len(directory), offset)


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the members of an archive in their order.

    Raises:
        ProtocolError: it is not, byte for byte, what ``pack`` writes; the text says what is wrong.
    """
    if len(archive) > MAX_BYTES:
        _refuse(f"it has more than {MAX_BYTES} bytes")
    members: dict[str, bytes] = {}
    at = 0
    while archive[at : at + 4] == _LOCAL:
        name, content, at = _read_member(archive, at)
        if name in members:
            _refuse(f"two members are called {name}")
        if len(members) == MAX_MEMBERS:
            _refuse(f"it has more than {MAX_MEMBERS} members")
        members[name] = content
    if not members:
        _refuse("it does not begin with a member")
    if archive != pack(members):
        _refuse(_what_differs(archive[at:], list(members)))
    return members


def _read_member(archive: bytes, at: int) -> tuple[str, bytes, int]:
    """Return name and content of the member at a place, and the place after it."""
    if len(archive) - at < _LOCAL_FIELDS.size:
        _refuse("it is cut off")
    _, _, flags, method, _, _, _, packed, size, n_name, n_extra = _LOCAL_FIELDS.unpack_from(archive, at)
    begin = at + _LOCAL_FIELDS.size
    raw = archive[begin : begin + n_name]
    name = raw.decode("ascii", "replace")
    shown = printable(name)
    if not is_member_name(name):
        _refuse(f"a member is called {shown!r}, which is a path or no plain name")
    if method != _STORED or packed != size:
        _refuse(f"member {shown} is compressed; a dossier's members are stored as they are")
    if flags or n_extra:
        _refuse(f"member {shown} is encrypted or has fields that a dossier's members lack")
    begin += n_name
    if begin + size > len(archive):
        _refuse(f"it is cut off in member {shown}")
    return name, archive[begin : begin + size], begin + size


def _what_differs(rest: bytes, names: list[str]) -> str:
    """Say why an archive whose members can be read is not what would be written for them."""
    at, listed = 0, []
    while rest[at : at + 4] == _CENTRAL and len(rest) - at >= _CENTRAL_FIELDS.size:
        fields = _CENTRAL_FIELDS.unpack_from(rest, at)
        n_name, n_extra, n_comment, mode = fields[10], fields[11], fields[12], fields[15] >> 16
        at += _CENTRAL_FIELDS.size
        name = rest[at : at + n_name].decode("ascii", "replace")
        if mode & 0o170000 == _LINK:
            return f"member {printable(name)} is a symbolic link"
        listed.append(name)
        at += n_name + n_extra + n_comment
    if not listed:
        return "between or after its members are bytes that belong to none"
    if listed != names:
        return "its directory lists other members than it holds, or in another order"
    return (
        "a date, a mode, a checksum or bytes at its end are not those that were written: it was packed anew or changed"
    )


def _local(name: bytes, content: bytes) -> bytes:
    check, size = zlib.crc32(content), len(content)
    fields = (_LOCAL, _VERSION, 0, _STORED, 0, _DATE, check, size, size, len(name), 0)
    return _LOCAL_FIELDS.pack(*fields) + name


def _central(name: bytes, content: bytes, offset: int) -> bytes:
    check, size = zlib.crc32(content), len(content)
    fields = (_CENTRAL, _UNIX, _VERSION, 0, _STORED, 0, _DATE, check, size, size, len(name), 0, 0, 0, 0, _MODE, offset)
    return _CENTRAL_FIELDS.pack(*fields) + name


def _end(n_members: int, n_bytes: int, offset: int) -> bytes:
    return _END_FIELDS.pack(_END, 0, 0, n_members, n_members, n_bytes, offset, 0)


def _refuse(why: str) -> NoReturn:
    raise ProtocolError(f"this is no dossier as VeilBoost writes it: {why}")


# The manifest of a dossier, and the site's signature over it.
#
# The first member lists all others in order, with size and SHA-256; the second holds the site's certificate chain and
# its signature over a statement with a domain of its own, so that neither can be taken for a head of evidence. Both are
# in canonical JSON (evidence/format.py), as evidence is.


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
    signature = signed(identity, _statement(manifest))
    return pack({MANIFEST: manifest, SIGNATURE: canonical(signature), **dossier.members})


def signed(identity: Identity, statement: bytes) -> dict[str, str | None]:
    """Return a site's certificate chain and its signature over a statement; nulls where it has no certificate."""
    if not identity.is_signed:
        return {"certificate": None, "signature": None}
    return {"certificate": identity.chain_pem.decode("ascii"), "signature": identity.sign(statement).hex()}


def open_dossier(archive: bytes, authority: FlareAuthority) -> Dossier:
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
    found = _parsed(signature, SIGNATURE)
    try:
        is_signed = check_signature(found, site, _statement(manifest), created, authority)
    except ProtocolError:
        raise ProtocolError(f"its {SIGNATURE} is none") from None
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
    _check_names([one["name"] for one in listed], list(members))
    for one in listed:
        content = members[one["name"]]
        if (one["size"], one["sha256"]) != (len(content), hashlib.sha256(content).hexdigest()):
            raise ProtocolError(f"member {one['name']} was changed: it is not what its {MANIFEST} lists")


def _check_names(listed: list[str], members: list[str]) -> None:
    for name in listed:
        if name not in members:
            raise ProtocolError(f"member {name} is missing, which its {MANIFEST} lists")
    for name in members:
        if name not in listed:
            raise ProtocolError(f"member {name} was added: its {MANIFEST} does not list it")
    if listed != members:
        raise ProtocolError(f"its members are in another order than its {MANIFEST} lists them")


def check_signature(
    found: Mapping[str, Any], site: str, statement: bytes, created: datetime, authority: FlareAuthority
) -> bool:
    """Check what ``signed`` returned; tell whether there is a signature.

    Raises:
        ProtocolError: certificate and signature are not what they should be.
        AuthenticationError: the certificate is not believed, or the signature is not its own.
    """
    if set(found) != {"certificate", "signature"}:
        raise ProtocolError("its signature is none")
    certificate, signature = found["certificate"], found["signature"]
    if certificate is None and signature is None:
        return False
    if not isinstance(certificate, str) or not isinstance(signature, str):
        raise ProtocolError("its signature is none")
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        raise ProtocolError("its signature is none") from None
    try:
        authority.certified(site, certificate, [created])
    except AuthenticationError as error:
        raise AuthenticationError(f"the certificate of {site} cannot be believed: {error}") from None
    authority.check(certificate, statement, raw)
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
