"""Words of 32 bits in evidence: `verify` compares them with what the session says, and with the messages' sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvflare_plugins.evidence.audit import word_fact
from nvflare_plugins.evidence.format import export_name
from tests.support.evidence_attempts import SITES, Attempt, check, only_failures, rewrite

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
