"""What ``veilboost verify`` prints: foreign text steers no terminal, and much is shown in part."""

from __future__ import annotations

import json
import re

import pytest

from nvflare_plugins.cli.verify import render
from nvflare_plugins.evidence.format import Content, Protection, export_name
from tests.support.evidence_attempts import SITES, Attempt, check, cli, complete_attempt, only_failures, rewrite


def test_foreign_text_cannot_steer_the_terminal(tmp_path):
    attempt = Attempt(tmp_path)
    attempt.open_session()
    for log in attempt.logs.values():
        log.end("aborted", "\x1b[2J\x1b[32mVERIFIED")
    assert "\x1b" not in render(check(attempt.close()))


STEERING = (
    "\x1b[2J\x1b[32mVERIFIED\n\r\u202e\u2066\u200b\x9b1m\ud800" + "a\u0301\u0302\u0303\u0304\u0305\u0306" + "x" * 5000
)


def is_tame(text: str) -> bool:
    return all(line.isprintable() and len(line) <= 2000 for line in text.split("\n")) and "\nVERIFIED" not in text


@pytest.mark.parametrize(
    ("type_", "field"),
    [
        ("content", "peer"),
        ("content", "what"),
        ("content", "protection"),
        ("message", "kind"),
        ("message", "codec"),
        ("message", "phase"),
        ("message", "sha256"),
        ("local", "kind"),
        ("local", "how"),
        ("spend", "event"),
        ("spend", "epsilon"),
        ("session", "parameters_hash"),
        ("open", "attempt"),
        ("open", "profile"),
        ("open", "time"),
        ("end", "reason"),
        ("model", "hmac"),
    ],
)
def test_no_field_of_a_log_steers_the_terminal(tmp_path, capsys, type_, field):
    """A peer's name once reached the terminal as it stood, and a line break wrote a verdict of its own."""
    attempt = Attempt(tmp_path)
    attempt.open_session()
    attempt.round(0)
    attempt.logs["site-1"].content("sent", "site-2", Content.GRADIENTS, Protection.PAILLIER, 100)
    attempt.logs["site-1"].spend("leaf sums", "discrete Gaussian", 0.25, 1e-6)
    attempt.finish()
    for name in (*SITES, "server"):

        def steer(records):
            for record in records:
                if record["type"] == type_:
                    record[field] = STEERING

        rewrite(tmp_path / export_name(name), steer)
    result = check(tmp_path)
    assert is_tame(render(result))
    assert all(is_tame(text) for attempt in result.attempts for text in (*attempt.failures, *attempt.notes))
    assert cli(tmp_path) in (1, 2)
    assert is_tame(capsys.readouterr().out)
    assert cli("--json", tmp_path) in (1, 2)
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("digits", [20, 4200, 5000])
@pytest.mark.parametrize(("type_", "field"), [("message", "size"), ("message", "n_values"), ("model", "size")])
def test_sizes_of_many_digits_are_refused(tmp_path, digits, type_, field):
    """4,200 digits once ended in an OverflowError, 5,000 in that of Python's limit."""
    complete_attempt(tmp_path)
    path = tmp_path / export_name("site-1")
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if f'"type":"{type_}"'.encode() in line)
    lines[place] = re.sub(f'"{field}":[0-9]+'.encode(), f'"{field}":{"9" * digits}'.encode(), lines[place])
    path.write_bytes(b"".join(lines))
    assert "is not valid JSON" in only_failures(tmp_path)


def test_many_failures_are_shown_in_part(tmp_path):
    complete_attempt(tmp_path, rounds=40)

    def invent(records):
        for number, record in enumerate(r for r in records if r["type"] == "message"):
            record["kind"] = f"KIND_{number}"

    for name in (*SITES, "server"):
        rewrite(tmp_path / export_name(name), invent)
    text = render(check(tmp_path))
    assert "more" in text and len(text.splitlines()) < 1000
