"""Archives of a dossier: one sequence of bytes for given members, and a refusal of everything else."""

from __future__ import annotations

import contextlib
import io
import json
import stat
import zipfile
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import AuthenticationError, ProtocolError
from nvflare_plugins.dossier.archive import (
    MANIFEST,
    SIGNATURE,
    Dossier,
    is_member_name,
    open_dossier,
    pack,
    seal,
    unpack,
)
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.evidence.format import canonical
from nvflare_plugins.site.certificates import Identity
from tests.support.examples import examples
from tests.support.sessions import Authority

PROJECT = Authority()
TRUST = FlareAuthority(PROJECT.root, {"server1"})
CONTENT = {"index.html": b"<p>cover", "evidence/site-1.evidence.jsonl": b"{}\n" * 40, "run.json": b""}
NAMES = st.from_regex(r"\A[a-z_]{1,8}(/[a-z.]{1,8})?\Z").filter(is_member_name)


def dossier(**changes) -> Dossier:
    facts = {"job_id": "job-1", "attempt": "a1", "site": "site-1", "profile": "masks", "members": CONTENT}
    return Dossier(**{**facts, "created": datetime.now(UTC).replace(microsecond=0), "is_signed": True, **changes})


def signed(**changes) -> bytes:
    return seal(dossier(**changes), PROJECT.identity("site-1", 1))


def refused(archive: bytes, words: str, authority: FlareAuthority = TRUST) -> None:
    with pytest.raises((ProtocolError, AuthenticationError), match=words) as caught:
        open_dossier(archive, authority)
    assert "\n" not in str(caught.value)


@settings(max_examples=examples(200))
@given(st.dictionaries(NAMES, st.binary(max_size=200), min_size=1, max_size=6))
def test_what_is_packed_is_unpacked_in_its_order_and_any_tool_reads_it(members: dict[str, bytes]) -> None:
    archive = pack(members)
    assert archive == pack(members) and list(unpack(archive).items()) == list(members.items())
    with zipfile.ZipFile(io.BytesIO(archive)) as tool:
        assert tool.testzip() is None and {one: tool.read(one) for one in tool.namelist()} == members
        for one in tool.infolist():
            assert one.date_time == (1980, 1, 1, 0, 0, 0) and one.compress_type == zipfile.ZIP_STORED
            assert stat.S_IMODE(one.external_attr >> 16) == 0o600 and stat.S_ISREG(one.external_attr >> 16)


@settings(max_examples=examples(400))
@given(st.data())
def test_no_byte_may_differ(data: st.DataObject) -> None:
    archive = pack(CONTENT)
    at = data.draw(st.integers(0, len(archive) - 1))
    changed = bytearray(archive)
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        found = unpack(bytes(changed))
    except ProtocolError:
        return
    raise AssertionError(f"byte {at} was changed unnoticed: {found}")


@settings(max_examples=examples(400))
@given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda raw: b"PK\x03\x04" + raw))
def test_no_bytes_make_it_crash(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        open_dossier(raw, TRUST)
    archive = pack(CONTENT)
    for hostile in (archive[: len(raw)], archive[: -1 - len(raw)] + raw, raw + archive, archive + raw + b"x"):
        with contextlib.suppress(ProtocolError):
            assert unpack(hostile) == CONTENT and hostile == archive


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../run.json", "a/../b", "a/b/c", "a\\b", "C:x", ".hidden", "a\0b", "ü", "x" * 200, "a/"],
)
def test_names_that_lead_elsewhere_are_none(name: str) -> None:
    assert not is_member_name(name)
    with pytest.raises(ValueError, match="file's name"):
        pack({name: b""})


def tool_made(write) -> bytes:
    """Return what Python's own writer makes, as somebody who packs a dossier anew would."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        write(archive)
    return content.getvalue()


def entry(name: str, mode: int = 0o100600) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr, info.create_system = mode << 16, 3
    return info


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_tricks_of_archives_have_one_clear_refusal_each() -> None:
    def of(*entries: zipfile.ZipInfo, compress: int = zipfile.ZIP_STORED, content: bytes = b"x") -> bytes:
        return tool_made(lambda archive: [archive.writestr(one, content, compress) for one in entries])

    refused(of(entry("../../run.json")), "a path or no plain name")
    refused(of(entry("/run.json")), "a path or no plain name")
    refused(of(entry("a"), entry("a")), "two members are called a")
    refused(of(entry("link", 0o120777)), "link is a symbolic link")
    refused(of(entry("bomb"), compress=zipfile.ZIP_DEFLATED, content=bytes(1 << 20)), "bomb is compressed")
    refused(of(entry("bomb"), compress=zipfile.ZIP_BZIP2, content=bytes(1 << 20)), "bomb is compressed")
    encrypted = bytearray(pack({"a": b"x"}))
    encrypted[6] = 1
    refused(bytes(encrypted), "encrypted")
    hidden = pack({"a": b"x"})
    at = hidden.index(b"PK\x01\x02")
    refused(hidden[:at] + pack({"b": b"y"})[: len(hidden[:at])] + hidden[at:], "lists other members")
    refused(hidden[:at] + b"between" + hidden[at:], "bytes that belong to none")
    refused(b"#!/bin/sh\n" + hidden, "does not begin with a member")
    refused(hidden + b"after", "packed anew or changed")
    refused(hidden[:20], "cut off")
    refused(hidden[:at], "bytes that belong to none")
    refused(tool_made(lambda archive: archive.writestr("a", "x")), "packed anew or changed")
    refused(tool_made(lambda archive: None), "does not begin with a member")


def test_a_signed_dossier_is_accepted_and_signed_by_the_site_alone() -> None:
    found = open_dossier(signed(), TRUST)
    assert found.is_signed and dict(found.members) == CONTENT and list(found.members) == list(CONTENT)
    assert (found.job_id, found.site, found.profile) == ("job-1", "site-1", "masks")
    unsigned = open_dossier(seal(dossier(is_signed=False), Identity.unsigned("site-1")), TRUST)
    assert not unsigned.is_signed


def test_members_that_were_changed_added_removed_or_moved_are_named() -> None:
    members = unpack(signed())
    changed = pack({**members, "run.json": b"{}"})
    refused(changed, "member run.json was changed")
    refused(pack({**members, "more.html": b""}), "member more.html was added")
    refused(pack({name: one for name, one in members.items() if name != "run.json"}), "member run.json is missing")
    first, second, *others = members.items()
    refused(pack(dict([first, second, *others[::-1]])), "another order")
    refused(pack(dict([second, first, *others])), f"begins with {MANIFEST}")
    for replaced in (b"{}", b"[]", b"{", b'{"a": 1}', b"null"):
        refused(pack({**members, MANIFEST: replaced}), MANIFEST)
        refused(pack({**members, SIGNATURE: replaced}), SIGNATURE)


def test_who_lists_other_members_needs_the_key() -> None:
    members = unpack(signed())
    stated = json.loads(members[MANIFEST])
    forged = canonical({**stated, "site": "site-2"})
    refused(pack({**members, MANIFEST: forged}), "cannot be believed")
    forged = canonical({**stated, "job_id": "job-2"})
    refused(pack({**members, MANIFEST: forged}), "does not verify")
    refused(pack({**members, MANIFEST: canonical({**stated, "more": 1})}), "format")
    lists = [{"name": "../x", "size": 1, "sha256": ""}], [{"name": "x"}], "x", [1]
    for wrong in lists:
        refused(pack({**members, MANIFEST: canonical({**stated, "members": wrong})}), "list of members")
    half = {**json.loads(members[SIGNATURE]), "certificate": None}
    refused(pack({**members, SIGNATURE: canonical(half)}), SIGNATURE)
    half = {**json.loads(members[SIGNATURE]), "signature": "zz"}
    refused(pack({**members, SIGNATURE: canonical(half)}), SIGNATURE)


def test_foreign_and_unfit_certificates_are_refused() -> None:
    refused(seal(dossier(), Authority(101, "project").identity("site-1", 1)), "does not lead to this project's root")
    refused(seal(dossier(site="site-2"), PROJECT.identity("site-1", 1)), "names another party")
    refused(seal(dossier(site="server1"), PROJECT.identity("server1", 3)), "name of a server")
    old = PROJECT.issue("site-1", 1, days=(-3, -2))
    refused(seal(dossier(), PROJECT.identity("site-1", 1, old)), "was not valid")
    then = dossier(created=datetime.now(UTC).replace(microsecond=0) - timedelta(days=400))
    refused(seal(then, PROJECT.identity("site-1", 1)), "was not valid")


def test_a_signature_over_evidence_is_none_over_a_dossier() -> None:
    """The statements begin with domains of their own."""
    members, identity = unpack(signed()), PROJECT.identity("site-1", 1)
    other = {**json.loads(members[SIGNATURE]), "signature": identity.sign(members[MANIFEST]).hex()}
    refused(pack({**members, SIGNATURE: canonical(other)}), "does not verify")
