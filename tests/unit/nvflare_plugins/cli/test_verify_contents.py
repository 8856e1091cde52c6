"""What ``veilboost verify`` says of sealed contents and of privacy that was spent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.cli.verify import render, to_json
from nvflare_plugins.evidence.audit import word_fact
from nvflare_plugins.evidence.format import Content, Protection, export_name
from tests.support.evidence_attempts import SITES, Attempt, check, cli, complete_attempt, only_failures, rewrite


def vertical_attempt(
    folder, profile="paillier", bend=lambda site, arguments: arguments, protection=Protection.PAILLIER
):
    """One party sends ciphertexts of gradients, the other their sums; ``bend`` changes what a party records."""
    attempt = Attempt(folder, profile=profile)
    attempt.open_session()
    for sender, receiver, what in (("site-1", "site-2", Content.GRADIENTS), ("site-2", "site-1", Content.HISTOGRAMS)):
        attempt.exchange("CONVERSATION", "SEALED")
        for site, direction, peer in ((sender, "sent", receiver), (receiver, "received", sender)):
            arguments = bend(site, (direction, peer, what, protection, 100))
            if arguments is not None:
                attempt.logs[site].content(*arguments)
    return attempt.finish()


def test_contents_of_sealed_messages_are_shown(tmp_path):
    result = check(vertical_attempt(tmp_path))
    assert result.sound, [a.failures for a in result.attempts]
    text = render(result)
    assert "gradient pairs of the rows: Paillier ciphertexts" in text
    [document] = to_json(result)["attempts"]
    assert [(c["sender"], c["what"], c["size"]) for c in document["contents"]] == [
        ("site-1", "GRADIENTS", 100),
        ("site-2", "HISTOGRAMS", 100),
    ]


def test_contents_on_which_two_parties_differ(tmp_path):
    def hide(site, arguments):
        return None if site == "site-2" and arguments[0] == "sent" else arguments

    assert "different contents of what site-2 sent" in only_failures(vertical_attempt(tmp_path, bend=hide))


def test_contents_under_another_scheme_than_the_profiles_are_a_leak(tmp_path):
    failures = only_failures(vertical_attempt(tmp_path, profile="okamoto_uchiyama"))
    assert "LEAK: GRADIENTS was sent as PAILLIER" in failures


def test_evidence_of_a_scheme_that_was_removed_still_verifies(tmp_path):
    result = check(vertical_attempt(tmp_path, "okamoto_uchiyama", protection=Protection.OKAMOTO_UCHIYAMA))
    assert result.sound, [a.failures for a in result.attempts]
    assert "gradient pairs of the rows: Okamoto-Uchiyama ciphertexts" in render(result)


def test_thresholds_that_left_in_a_training_are_a_leak(tmp_path):
    vertical_attempt(tmp_path)

    def leak(records):
        for record in records:
            if record.get("what") == "HISTOGRAMS":
                record.update(what="THRESHOLDS", protection="CLEAR")

    for name in SITES:
        rewrite(tmp_path / export_name(name), leak)
    assert "LEAK: THRESHOLDS was sent in a job of profile paillier" in only_failures(tmp_path)


@pytest.mark.parametrize(
    ("what", "protection"),
    [
        (Content.GRADIENTS, Protection.CLEAR),
        (Content.BUCKETS, Protection.CLEAR),
        (Content.BLINDED_IDS, Protection.PAILLIER),
        (Content.THRESHOLDS, Protection.CLEAR),
    ],
)
def test_a_log_refuses_content_without_its_protection(tmp_path, what, protection):
    log = Attempt(tmp_path, profile="paillier").logs["site-1"]
    with pytest.raises(ProtocolError, match="refused"):
        log.content("sent", "site-2", what, protection, 1)


def test_privacy_spent_is_shown(tmp_path):
    attempt = Attempt(tmp_path, profile="dp_distributed")
    attempt.open_session()
    attempt.exchange("NODE_STATS", "MASKED")
    for site in SITES:
        attempt.logs[site].spend("leaf sums of round 0", "discrete Gaussian, multiplier 3", 0.25, 1e-6)
        attempt.logs[site].spend("leaf sums of round 1", "discrete Gaussian, multiplier 3", 0.5, 1e-6)
    result = check(attempt.finish())
    assert result.sound, [a.failures for a in result.attempts]
    shown = render(result)
    assert "privacy spent at site-2: epsilon 0.5 at delta 1e-06, 2 releases" in shown
    assert shown.count("    2 releases of discrete Gaussian, multiplier 3\n") == len(SITES)


def test_releases_are_counted_by_what_they_were(tmp_path):
    attempt = Attempt(tmp_path, profile="dp_distributed")
    attempt.open_session()
    attempt.exchange("NODE_STATS", "MASKED")
    log = attempt.logs["site-1"]
    for number in range(5):
        log.spend(f"leaf sums of round {number}", "1 x discrete_gaussian n_shares 3", 0.25, 1e-6)
    log.spend("sums again", "replayed: paid for before, no charge", 0.25, 1e-6)
    for number in range(10):
        log.spend("one of its kind", f"2 x laplace epsilon {number}", 0.25, 1e-6)
    shown = render(check(attempt.finish())).splitlines()
    (first,) = (n for n, line in enumerate(shown) if "privacy spent" in line)
    assert shown[first].endswith(", 16 releases")
    assert shown[first + 1] == "    5 releases of discrete_gaussian n_shares 3"
    assert shown[first + 2] == "    1 release replayed: paid for before, no charge"
    assert shown[first + 3] == "    1 release of 2 x laplace epsilon 0"
    assert shown[first + 9] == "    and 4 releases of other kinds"


# -- words of 32 bits --------------------------------------------------------------------------------------------------


SHORT = {"masks": "MASKED_32", "plain": "PLAIN_32"}


def attempt(
    folder: Path, profile: str = "masks", bits: int | None = 32, codec: str | None = None, **sizes: int
) -> Path:
    """Write an attempt of one histogram of so many values and bytes, and of a metric."""
    made = Attempt(folder, profile)
    facts = {} if bits is None else {"protection": word_fact(bits)}
    made.open_session(**dict.fromkeys(SITES, facts))
    sizes = {"n_values": 6, "size": 24 + (16 if profile == "masks" else 0), **sizes}
    exchange_of(made, "HISTOGRAM", codec or SHORT[profile], **sizes)
    made.exchange("METRIC")
    for site in SITES:
        made.logs[site].round(0)
    made.exchange_heads()
    return made.finish()


def exchange_of(made: Attempt, kind: str, codec: str, n_values: int, size: int) -> None:
    fields = {
        "kind": kind,
        "phase": "update:0",
        "codec": codec,
        "n_values": n_values,
        "private": True,
        "salt": made.salt,
    }
    fields["payload"] = bytes(size)
    for site in SITES:
        made.logs[site].record("sent", counter=made.counter, peers=("server",), **fields)
        made.logs["server"].record("received", counter=made.counter, peers=(site,), **fields)
        made.logs[site].record("received", counter=made.counter, peers=("server",), **fields)
    made.logs["server"].record("sent", counter=made.counter, peers=SITES, **fields)
    made.counter += 1


@pytest.mark.parametrize("profile", ["masks", "plain"])
def test_histograms_of_32_bit_words_are_good_evidence_and_shown(tmp_path, profile):
    result = check(attempt(tmp_path, profile))
    assert result.sound, [one.failures for one in result.attempts]
    assert any("word bits 32" in note for note in result.attempts[0].notes)


@pytest.mark.parametrize("bits", [64, None])
@pytest.mark.parametrize("size", [48, 64, 72])
def test_histograms_of_64_bit_words_are_as_before(tmp_path, bits, size):
    assert check(attempt(tmp_path, "masks", bits, "MASKED", size=size)).sound


def test_a_request_for_another_scale_holds_no_words(tmp_path):
    assert check(attempt(tmp_path, size=0)).sound


@pytest.mark.parametrize(
    ("bits", "codec", "expected"),
    [
        (64, "MASKED_32", "a histogram travelled in words of 32 bits; the session states 64"),
        (None, "MASKED_32", "a histogram travelled in words of 32 bits; the session states 64"),
        (32, "MASKED", "a histogram travelled in words of 64 bits; the session states 32"),
        (16, "MASKED_32", "the session states words of 16 bits, which there are not"),
        (32, "PLAIN_32", "LEAK"),
    ],
)
def test_words_that_the_session_does_not_state_are_noticed(tmp_path, bits, codec, expected):
    if codec == "PLAIN_32":  # no log of a masked job takes it: somebody has written it in
        attempt(tmp_path)
        for party in (*SITES, "server"):
            rewrite(tmp_path / export_name(party), changed(codec=codec))
    else:
        attempt(tmp_path, "masks", bits, codec, size=48 + 16 if codec == "MASKED" else 24 + 16)
    assert expected in only_failures(tmp_path)


@pytest.mark.parametrize("size", [20, 24 + 8 + 4, 24 + 24, 48 + 16, 8])
def test_messages_that_do_not_hold_their_32_bit_words_are_noticed(tmp_path, size):
    failures = only_failures(attempt(tmp_path, size=size))
    assert f"{size} bytes are not the size of 6 words of 32 bits" in failures
    assert failures.count("are not the size") == 4, "the first of each log"


def test_half_the_bytes_of_64_bit_words_are_noticed(tmp_path):
    assert "40 bytes are not the size of 6 words of 64 bits" in only_failures(
        attempt(tmp_path, "masks", 64, "MASKED", size=40)
    )


def test_nothing_but_histograms_is_believed_to_travel_so(tmp_path):
    made = Attempt(tmp_path)
    made.open_session(**{site: {"protection": word_fact(32)} for site in SITES})
    exchange_of(made, "METRIC", "MASKED_32", 2, 8 + 16)
    assert "METRIC travelled in words of 32 bits, which histograms alone do" in only_failures(made.finish())


def test_a_site_that_states_another_width_than_the_others_is_named(tmp_path):
    attempt(tmp_path)

    def change(records: list[dict]) -> None:
        next(one for one in records if one["type"] == "session")["protection"].update(word_fact(64))

    rewrite(tmp_path / export_name("site-2"), change)
    failures = only_failures(tmp_path)
    assert "site-2 and site-1 recorded different protection: word bits is 64 and 32" in failures
    assert "site-2: record" in failures and "the session states 64" in failures


def changed(**fields: object) -> Callable[[list[dict]], None]:
    def change(records: list[dict]) -> None:
        for record in records:
            if record.get("kind") == "HISTOGRAM":
                record.update(fields)

    return change


# -- foreign text steers no terminal, and much is shown in part --------------------------------------------------------


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
