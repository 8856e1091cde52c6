"""Sites of different releases agree on a protocol, and nobody else decides which."""

from __future__ import annotations

import dataclasses

import pytest

from he_processors.errors import AuthenticationError, ConfigurationError
from nvflare_plugins.attempt.session import Hello
from nvflare_plugins.attempt.site_attempt import check_server
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.protocols import PROTOCOLS, Span, spoken
from tests.support.sessions import Policy, open_all, signed_sites, unsigned_sites
from tests.unit.nvflare_plugins.attempt.test_session import HELLO, fails, replace_hello

RELEASES = {"before": Span(1, 1), "both": Span(1, 2), "after": Span(2, 2)}
"""What releases speak; each stands for one in the place of a kind."""
LOWER = Policy(least_protocol=dict.fromkeys(RELEASES, 1))


@pytest.fixture(autouse=True)
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, span in RELEASES.items():
        monkeypatch.setitem(PROTOCOLS, name, span)


def test_every_kind_has_a_row_and_calls_itself_by_its_name() -> None:
    assert set(PROTOCOLS) - set(RELEASES) == set(KINDS)
    assert {name: kind.job.KIND for name, kind in KINDS.items()} == {name: name for name in KINDS}
    assert all(1 <= span.least <= span.most for span in PROTOCOLS.values())


@pytest.mark.parametrize(
    ("kinds", "policies", "agreed"),
    [
        (("both", "both", "both"), (Policy(), LOWER, Policy()), 2),
        (("before", "both", "both"), (Policy(), LOWER, LOWER), 1),
        (("both", "before", "before"), (LOWER, Policy(), LOWER), 1),
        (("after", "both", "both"), (LOWER, LOWER, Policy()), 2),
    ],
)
def test_sites_take_the_highest_protocol_that_all_of_them_speak(kinds, policies, agreed) -> None:
    sessions = open_all(signed_sites(), policies, kinds=kinds).sessions
    assert {session.protocol for session in sessions} == {agreed}
    assert len({session.session_id for session in sessions}) == 1
    assert len({tuple(session.protocols.items()) for session in sessions}) == 1


def test_a_lower_protocol_needs_the_word_of_the_policy_of_each_site_that_speaks_a_higher_one() -> None:
    for policies in ((Policy(), LOWER, Policy()), (LOWER, Policy(), LOWER), (Policy(), Policy(), Policy())):
        outcome = open_all(signed_sites(), policies, kinds=("before", "both", "both"))
        fails(outcome, ConfigurationError, "site-1 (VeilBoost 0.")
        text = str(next(error for error in outcome.errors if error is not None))
        assert "update VeilBoost at site-1" in text and "Policy key: least_protocol." in text
        assert "protocol 2" in text and "1 to 2" not in text


def test_a_protocol_that_a_release_no_longer_speaks_is_refused_whatever_policies_say() -> None:
    outcome = open_all(signed_sites(), [LOWER] * 3, kinds=("before", "both", "after"))
    fails(outcome, ConfigurationError, "and site-3 (VeilBoost 0.")


@pytest.mark.parametrize("seen_by", [{0, 2}, {0}, {0, 1, 2}])
@pytest.mark.parametrize("policy", [LOWER, dataclasses.replace(LOWER, unsigned_sessions=True)], ids=["signed", "not"])
@pytest.mark.parametrize("span", [Span(1, 1), Span(1, 3), Span(2, 2)])
def test_a_server_cannot_talk_sites_down_or_up(policy, span, seen_by) -> None:
    """Some or all sites are told that the second speaks something else."""
    sites, policies = signed_sites() if policy is LOWER else unsigned_sites(), [policy] * 3
    assert open_all(sites, policies, kinds=["both"] * 3).sessions[0].protocol == 2  # the control
    outcome = open_all(sites, policies, kinds=["both"] * 3, tamper=replace_hello(1, seen_by, protocols=span))
    fails(outcome, Exception if 1 in seen_by else AuthenticationError)


def test_a_server_that_could_not_follow_the_sites_is_refused_and_decides_nothing() -> None:
    for fits in (Span(1, 2), Span(2, 3), None):
        check_server(fits, 2, "both")
    with pytest.raises(
        ConfigurationError, match=r"server speaks protocol 1 of both jobs, .*agreed on 2: .* the server$"
    ):
        check_server(Span(1, 1), 2, "both")
    with pytest.raises(
        ConfigurationError, match=r"speaks protocol 3 to 4 of .*agreed on 2: update VeilBoost at the sites$"
    ):
        check_server(Span(3, 4), 2, "both")


def test_what_sites_say_is_in_the_transcript_that_they_sign() -> None:
    said = {}
    for policies in ([Policy()] * 3, [LOWER, Policy(), Policy()]):
        outcome = open_all(signed_sites(), policies, kinds=["both"] * 3)
        (spans,) = {tuple(session.protocols.values()) for session in outcome.sessions}
        said[spans] = outcome.relay.seen[HELLO]
    assert set(said) == {(Span(2, 2),) * 3, (Span(1, 2), Span(2, 2), Span(2, 2))}
    assert {Hello.unpack(one).protocols for one in said[(Span(2, 2),) * 3]} == {Span(2, 2)}


def test_the_policy_names_kinds_that_there_are_and_protocols_that_the_release_speaks(tmp_path) -> None:
    def policy(**entries: object) -> SitePolicy:
        return SitePolicy.from_dict({"least_protocol": entries}, workspace=tmp_path, site="site-1")

    assert spoken("both", policy(both=1).least_protocol) == (1, 2)
    assert spoken("both", policy(before=1).least_protocol) == spoken("after", policy(after=1).least_protocol) == (2, 2)
    assert policy(both=1).fingerprint() != policy(both=2).fingerprint() != policy().fingerprint()
    with pytest.raises(
        ConfigurationError, match=r"least_protocol has unknown fields: horizontl .did you mean horizontal"
    ):
        policy(horizontl=1)
    for wrong in (0, True, "1", None, 1 << 16):
        with pytest.raises(ConfigurationError, match=r"least_protocol\.both must be a whole number"):
            policy(both=wrong)
    with pytest.raises(
        PolicyRefusal, match=r"speaks 1\. Policy key: least_protocol\.before\. Remedy: update VeilBoost"
    ):
        spoken("before", policy(before=2).least_protocol)
    with pytest.raises(ConfigurationError, match="no protocol of toy jobs"):
        spoken("toy", {})
