"""A ZIP archive in the only form that is accepted: what is written for given members is one sequence of bytes.

Members are stored as they are, in a fixed order, under a fixed date, with mode 0600 and nothing else. So there is one
archive for given members, and reading is strict: every byte is what would be written, or the archive is refused. What
makes archives dangerous cannot be expressed: compressed members that grow, links, folders and paths, names twice,
members that only one of the two directories lists, bytes before, between and after. Any tool for ZIP opens it.

Reference: PKWARE, APPNOTE.TXT 6.3.3 (version 2.0 of the format), sections 4.3.7, 4.3.12 and 4.3.16.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from typing import NoReturn

from he_processors.errors import ProtocolError
from nvflare_plugins.formatting import printable

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
