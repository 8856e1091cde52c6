"""MACs on what a site gives to all others."""

from __future__ import annotations

import pytest

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.sum_tags import MAC_BYTES, PairMacs
from tests.support.he_toys import pair_secrets

PLACE = ("CLOSING", "finish:1", "PUBLIC", 7)


def make_sites(world: int = 3, session: bytes = b"s" * 32) -> list[PairMacs]:
    return [PairMacs(session, rank, pair_secrets(rank, world)) for rank in range(world)]


@pytest.mark.parametrize("content", [b"", b"x", b"content" * 1000])
def test_every_other_site_reads_what_was_sent(content):
    sites = make_sites()
    message = sites[1].append(content, PLACE)
    assert len(message) == len(content) + 3 * MAC_BYTES == len(content) + sites[1].size
    assert [sites[reader].check(1, message, PLACE) for reader in (0, 2)] == [content] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: bytes([m[0] ^ 1]) + m[1:],
        lambda m: m + b"\0",
        lambda m: m[:-1],
        lambda m: b"",
        lambda m: m[:5],
        lambda m: b"another content" + m[7:],
        lambda m: m[:7] + bytes(3 * MAC_BYTES),
        lambda m: m[:7] + m[7 + MAC_BYTES :] + m[7 : 7 + MAC_BYTES],
    ],
)
def test_what_was_changed_is_refused(change):
    sites = make_sites()
    message = change(sites[1].append(b"content", PLACE))
    with pytest.raises(AuthenticationError, match="the server or a site"):
        sites[0].check(1, message, PLACE)


@pytest.mark.parametrize("n", range(len(PLACE)))
def test_a_message_of_another_place_is_refused(n):
    sites = make_sites()
    message = sites[1].append(b"content", PLACE)
    other = [*PLACE]
    other[n] = 8 if n == 3 else "OTHER"
    with pytest.raises(AuthenticationError):
        sites[0].check(1, message, tuple(other))


def test_a_message_in_another_sites_name_or_attempt_is_refused():
    """Even by a third site that pools with the server: it lacks the key of the two."""
    sites = make_sites()
    message = sites[1].append(b"content", PLACE)
    for reader, sender in ((0, 2), (2, 0)):
        with pytest.raises(AuthenticationError):
            sites[reader].check(sender, message, PLACE)
    with pytest.raises(AuthenticationError):
        make_sites(session=b"t" * 32)[0].check(1, message, PLACE)
    reflected = sites[0].append(b"content", PLACE)
    with pytest.raises(AuthenticationError):
        sites[0].check(1, reflected, PLACE)


def test_nothing_works_after_the_session():
    sites = make_sites()
    message = sites[1].append(b"content", PLACE)
    sites[0].close()
    with pytest.raises(ProtocolError):
        sites[0].append(b"content", PLACE)
    with pytest.raises(ProtocolError):
        sites[0].check(1, message, PLACE)
