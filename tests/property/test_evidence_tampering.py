"""Whatever is done to a log of finished evidence, ``verify`` notices; and no bytes make it crash."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.cli.verify import render, to_json
from nvflare_plugins.evidence.format import SignedHead, export_name, parse_line
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.evidence.verification import find_evidence, verify_files
from tests.support.evidence_attempts import SITES, ToyAuthority, complete_attempt, rewrite
from tests.support.examples import examples

PARTIES = (*SITES, "server")
relaxed = settings(
    max_examples=examples(120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=[False, True], ids=["unsigned", "signed"])
def evidence(request, tmp_path_factory) -> Path:
    return complete_attempt(tmp_path_factory.mktemp("evidence"), rounds=1, signed=request.param)


def verified(folder: Path) -> bool:
    result = verify_files(find_evidence([folder]), ToyAuthority())
    # Neither may fail or steer a terminal, whatever the files hold.
    assert all(line.isprintable() for line in render(result).split("\n"))
    json.dumps(to_json(result))
    return result.sound


def tampered(folder: Path, name: str, change) -> bool:
    """Tell whether evidence is still believed after ``change`` of one log's bytes; puts the log back."""
    path = folder / export_name(name)
    before = path.read_bytes()
    try:
        after = change(before)
        path.write_bytes(after)
        return verified(folder) and after != before
    finally:
        path.write_bytes(before)


def test_untouched_evidence_is_verified(evidence):
    assert verified(evidence)


@relaxed
@given(name=st.sampled_from(PARTIES), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_flipped_bit_is_found(evidence, name, place, flip):
    def change(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]

    assert not tampered(evidence, name, change)


@relaxed
@given(
    name=st.sampled_from(PARTIES),
    place=st.floats(0, 1, exclude_max=True),
    how=st.sampled_from(["drop", "twice", "swap", "cut"]),
)
def test_any_record_dropped_repeated_or_moved_is_found(evidence, name, place, how):
    def change(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        at = int(place * len(lines))
        if how == "drop":
            del lines[at]
        elif how == "twice":
            lines.insert(at, lines[at])
        elif how == "cut":
            del lines[at:]
        else:
            lines[at - 1], lines[at] = lines[at], lines[at - 1]
        return b"".join(lines)

    assert not tampered(evidence, name, change)


@relaxed
@given(name=st.sampled_from(SITES), data=st.data())
def test_a_record_dropped_or_repeated_is_found_even_if_the_chain_is_computed_anew(evidence, name, data):
    def change(records: list[dict]) -> None:
        at = data.draw(st.integers(0, len(records) - 1))
        if data.draw(st.booleans()):
            del records[at]
        else:
            records.insert(at, dict(records[at]))

    def forge(before: bytes) -> bytes:
        rewrite(evidence / export_name(name), change)
        return (evidence / export_name(name)).read_bytes()

    assert not tampered(evidence, name, forge)


@relaxed
@given(
    name=st.sampled_from(PARTIES),
    field=st.sampled_from(["kind", "phase", "codec", "n_values", "size", "sha256"]),
    data=st.data(),
)
def test_a_changed_message_is_found_even_if_the_chain_is_computed_anew(evidence, name, field, data):
    def change(records: list[dict]) -> None:
        message = data.draw(st.sampled_from([r for r in records if r["type"] == "message"]))
        message[field] = message[field] + 1 if isinstance(message[field], int) else "SEALED"

    def forge(before: bytes) -> bytes:
        rewrite(evidence / export_name(name), change)
        return (evidence / export_name(name)).read_bytes()

    assert not tampered(evidence, name, forge)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.integers(10**18, 10**4200)
    | st.sampled_from(["\x1b[2J", "\u202eVERIFIED", "\nVERIFIED", "\ud800", "x" * 9000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@relaxed
@given(name=st.sampled_from(PARTIES), data=st.data())
def test_any_value_in_any_field_is_refused_without_a_crash(evidence, name, data):
    """Well-formed chains with hostile values: lists for texts, huge numbers, control characters."""

    def change(records: list[dict]) -> None:
        record = data.draw(st.sampled_from(records))
        record[data.draw(st.sampled_from(sorted(set(record) - {"n", "hash"})))] = data.draw(json_values)

    def forge(before: bytes) -> bytes:
        rewrite(evidence / export_name(name), change)
        return (evidence / export_name(name)).read_bytes()

    tampered(evidence, name, forge)


@relaxed
@given(data=st.binary(max_size=300) | json_values.map(lambda value: repr(value).encode()))
def test_any_bytes_are_a_log_or_a_protocol_error(tmp_path, data):
    path = tmp_path / export_name("site-1")
    path.write_bytes(data)
    for read in (lambda: read_log(path), lambda: parse_line(data), lambda: SignedHead.from_bytes(data)):
        with contextlib.suppress(ProtocolError):
            read()


@given(
    n=st.integers(1, 2**63),
    digest=st.binary(min_size=32, max_size=32),
    signature=st.none() | st.binary(min_size=1, max_size=600),
)
def test_heads_survive_the_way(n, digest, signature):
    head = SignedHead("site-1", n, digest, signature)
    assert SignedHead.from_bytes(head.to_bytes()) == head
