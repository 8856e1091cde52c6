"""What ``veilboost verify`` says of sealed contents and of privacy that was spent."""

from __future__ import annotations

import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.cli.verify import render, to_json
from nvflare_plugins.evidence.format import Content, Protection, export_name
from tests.support.evidence_attempts import SITES, Attempt, check, only_failures, rewrite


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
