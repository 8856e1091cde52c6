"""Tags of sums: what a server does to a sum is noticed, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors import field61, sum_tags
from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.field61 import MODULUS
from he_processors.key_agreement import derive_key
from he_processors.masks import MessageLabel
from he_processors.sum_tags import CAPACITY_BITS, LARGEST_SUM, N_TAGS, SumTags, random_flags
from tests.support.he_toys import pair_secrets

P = MODULUS
NONE = np.zeros(0, dtype=np.uint64)


def make_sites(world: int, session: bytes = b"session-" * 4) -> list[SumTags]:
    return [SumTags(session, rank, pair_secrets(rank, world), b"g" * 32) for rank in range(world)]


def label(n_values: int, counter: int = 0, kind: str = "HISTOGRAM", phase: str = "update:0") -> MessageLabel:
    return MessageLabel(counter, kind, phase, n_values)


def added(parts: list[np.ndarray]) -> np.ndarray:
    """Add residues as the server does."""
    total = parts[0]
    for part in parts[1:]:
        total = field61.add(total, part)
    return total


def integers(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def send(sites: list[SumTags], values: list[np.ndarray], of: MessageLabel, residues: np.ndarray = NONE):
    """Return what each site sends, and the true sum."""
    parts = [site.protect(own, residues, of) for site, own in zip(sites, values, strict=True)]
    return parts, np.sum(values, axis=0)


def assert_refused(sites: list[SumTags], total: np.ndarray, tags: np.ndarray, of: MessageLabel) -> None:
    for site in sites:
        with pytest.raises(AuthenticationError, match=rf"{of.kind} \({of.phase}\).*the server or a site"):
            site.open(total, tags, of)


@given(st.integers(1, 5), st.data())
def test_the_true_sum_is_accepted_and_residues_are_added(world, data):
    most = (1 << CAPACITY_BITS) // world
    one = st.integers(-most, most) | st.sampled_from([most, -most, 0])
    n = data.draw(st.integers(0, 40))
    values = integers(*(data.draw(st.lists(one, min_size=n, max_size=n)) for _ in range(world)))
    k = data.draw(st.integers(0, 3))
    residues = [
        np.array(data.draw(st.lists(st.integers(0, P - 1), min_size=k, max_size=k)), dtype=np.uint64)
        for _ in range(world)
    ]
    sites, of = make_sites(world), label(n)
    parts = [s.protect(x, y, of) for s, x, y in zip(sites, values, residues, strict=True)]
    assert all(part.size == k + N_TAGS for part in parts)
    for site in sites:
        opened = site.open(np.sum(values, axis=0), added(parts), of)
        assert opened.tolist() == [sum(int(y[i]) for y in residues) % P for i in range(k)]


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=20), st.data())
def test_any_change_of_the_sum_is_refused_at_every_site(values, data):
    sites, of = make_sites(3), label(len(values))
    parts, total = send(sites, integers(values, values, values), of)
    place = data.draw(st.integers(0, len(values) - 1))
    change = data.draw(st.integers(-(2**63), 2**63 - 1).filter(bool))
    changed = total.copy()
    changed[place] = (int(total[place]) + change + 2**63) % 2**64 - 2**63  # as words wrap
    assert_refused(sites, changed, added(parts), of)


@pytest.mark.parametrize("place", [0, 1023, 1024, 2999])
@pytest.mark.parametrize("change", [1, -1, 1 << 58, P, -P, 2 * P])
def test_one_grid_step_and_multiples_of_the_modulus_are_refused(place, change):
    sites, of = make_sites(2), label(3000)
    rng = np.random.default_rng(place)
    values = list(rng.integers(-(2**58), 2**58, size=(2, 3000)))
    parts, total = send(sites, values, of)
    total[place] += change
    assert_refused(sites, total, added(parts), of)


def test_without_the_check_of_the_range_a_multiple_of_the_modulus_would_pass(monkeypatch):
    """The control: no tag can tell it."""
    sites, of = make_sites(2), label(3)
    parts, total = send(sites, integers([1, 2, 3], [4, 5, 6]), of)
    total[1] += P
    assert_refused(sites, total, added(parts), of)
    combine = field61.combine
    monkeypatch.setattr(field61, "combine", lambda *arguments: (combine(*arguments)[0], True))
    assert sites[0].open(total, added(parts), of).size == 0


def test_sums_up_to_the_capacity_pass_and_those_beyond_half_the_modulus_do_not():
    assert 2**CAPACITY_BITS <= LARGEST_SUM < 2 ** (CAPACITY_BITS + 1)
    for largest in (LARGEST_SUM, LARGEST_SUM + 1, 2**60 + 5):
        for sign in (1, -1):
            [site] = make_sites(1)
            [part], total = send([site], integers([sign * largest, 0]), label(2))
            if largest == LARGEST_SUM:
                site.open(total, part, label(2))
            else:
                assert_refused([site], total, part, label(2))


ROWS = integers([5, -7, 0, 2**40], [1, 1, 1, 1], [-3, 9, 4, 0])


@pytest.mark.parametrize("attack", ["drop", "double", "scale", "negate", "flip", "no tags", "swapped tags", "zero"])
def test_attacks_on_contributions_are_refused(attack):
    """As under ``ckks``, where values have no masks: the server does to values what it likes, and to tags too."""
    sites, of = make_sites(3), label(4)
    parts, _ = send(sites, ROWS, of)
    values, tags = list(ROWS), list(parts)
    if attack == "drop":
        values, tags = values[:2], tags[:2]
    elif attack == "double":
        values, tags = [*values, values[0]], [*tags, tags[0]]
    total, tag = np.sum(values, axis=0), added(tags)
    if attack == "scale":
        total, tag = 2 * total, field61.add(tag, tag)
    elif attack == "negate":
        total, tag = -total, field61.residues(-tag.astype(np.int64))
    elif attack == "flip":
        tag = tag ^ np.array([1, 0], dtype=np.uint64)
    elif attack == "no tags":
        tag = np.zeros_like(tag)
    elif attack == "swapped tags":
        tag = tag[::-1].copy()
    elif attack == "zero":
        total = np.zeros_like(total)
    assert_refused(sites, total, tag, of)


@pytest.mark.parametrize("drop", [0, 1, 2])
def test_values_dropped_or_doubled_under_honest_tags_are_refused(drop):
    sites, of = make_sites(3), label(4)
    parts, total = send(sites, ROWS, of)
    assert_refused(sites, total - ROWS[drop], added(parts), of)
    assert_refused(sites, total + ROWS[drop], added(parts), of)


@pytest.mark.parametrize(
    "other",
    [{"counter": 1}, {"kind": "METRIC"}, {"phase": "update:1"}],
    ids=lambda other: next(iter(other)),
)
def test_a_sum_of_another_message_is_refused(other):
    """Replayed from another round, or another kind: the same numbers at another place."""
    sites, of = make_sites(3), label(4)
    parts, total = send(sites, ROWS, of)
    later = replace(of, **{"counter": 1, **other})
    send(sites, ROWS, later)
    assert_refused(sites, total, added(parts), later)


def test_a_sum_of_another_attempt_is_refused():
    of = label(4)
    parts, total = send(make_sites(3, b"first---" * 4), ROWS, of)
    sites = make_sites(3, b"second--" * 4)
    send(sites, ROWS, of)
    assert_refused(sites, total, added(parts), of)


def test_a_changed_residue_is_refused():
    sites, of = make_sites(3), label(2)
    flags = random_flags(np.array([True, False]))
    parts = [site.protect(x[:2], flags, of) for site, x in zip(sites, ROWS, strict=True)]
    total = np.sum(ROWS, axis=0)[:2]
    assert (sites[0].open(total, added(parts), of) != 0).tolist() == [True, False]
    for change in ([0, 1, 0, 0], [P - 1, 0, 0, 0]):
        changed = field61.add(added(parts), np.array(change, dtype=np.uint64))
        assert_refused(sites, total, changed, of)


def test_every_tag_alone_would_refuse():
    """Each of the two notices a change by itself: they have coefficients of their own."""
    sites, of = make_sites(2), label(2)
    parts, _ = send(sites, integers([1, 2], [3, 4]), of)
    other, wrong = send(make_sites(2), integers([1, 3], [3, 4]), of)
    for kept in (0, 1):
        mixed = added(parts)
        mixed[kept] = added(other)[kept]
        assert_refused(sites, wrong, mixed, of)
    sites[0].open(wrong, added(other), of)  # with both it is the other sum


def test_what_travels_is_uniform_and_no_two_messages_share_it():
    """Tags of zeros are zero: what is seen are masks alone, which all differ."""
    sites, zeros = make_sites(3), np.zeros(5, dtype=np.int64)
    seen: list[int] = []
    for counter in range(400):
        parts = [site.protect(zeros, NONE, label(5, counter)) for site in sites]
        seen += [int(word) for word in (*parts, added(parts)) for word in word]
    assert len(set(seen)) == len(seen) and max(seen) < P
    shares = np.unpackbits(np.array(seen, dtype=">u8").view(np.uint8)).reshape(-1, 64)[:, 3:].mean(axis=0)
    assert np.abs(shares - 0.5).max() * 2 * np.sqrt(len(seen)) < 8  # a fair coin is farther off once in 10^15 times


def test_a_counter_protects_once_and_not_after_the_session():
    [site] = make_sites(1)
    site.protect(ROWS[0], NONE, label(4))
    with pytest.raises(ProtocolError, match="only once"):
        site.protect(ROWS[0], NONE, label(4))
    site.close()
    with pytest.raises(ProtocolError, match="closed"):
        site.protect(ROWS[0], NONE, label(4, 1))


def test_residues_that_are_none_and_wrong_lengths_are_refused():
    [site] = make_sites(1)
    part = site.protect(ROWS[0], NONE, label(4))
    for bad in (P, 2**64 - 1):
        with pytest.raises(AuthenticationError, match="the server or a site has changed it"):
            site.open(ROWS[0], np.array([bad, part[1]], dtype=np.uint64), label(4))
    for total in (ROWS[0][:3], np.append(ROWS[0], 0)):
        with pytest.raises(ValueError):
            site.open(total, part, label(4))


def test_a_tag_is_the_sum_that_is_documented():
    """Against plain integers: r_i = s_b rho^(i mod m), values first, then residues in blocks of their own."""
    sites, of = make_sites(1), label(1500)
    values, residues = np.arange(-700, 800), np.array([3, P - 1], dtype=np.uint64)
    group = derive_key(b"g" * 32, b"session-" * 4, "sum-tags")
    key = derive_key(group, b"", "sum-tags/coefficients", 0, of.kind, of.phase, 1500, 2)
    drawn = sum_tags.uniform_residues(key, P, 2 * 4).reshape(2, 4)
    expected = []
    for rho, *scales in drawn.tolist():
        blocks = [values[:1024].tolist(), values[1024:].tolist(), residues.tolist()]
        rest = zip(scales, blocks, strict=True)
        expected.append(sum(s * sum(x * pow(rho, i, P) for i, x in enumerate(b)) for s, b in rest) % P)
    assert sites[0]._tags(values, residues, of)[0].tolist() == expected


def test_flags_add_up_to_zero_only_where_none_is_set():
    flags = [random_flags(np.array(row)) for row in ([True, False, False], [True, True, False])]
    assert (added(flags) != 0).tolist() == [True, True, False] and all((f < P).all() for f in flags)
    assert random_flags(np.array([True]))[0] != random_flags(np.array([True]))[0]


def test_a_change_behind_many_blocks_is_noticed(monkeypatch):
    """A message of 40 million values has as many blocks; a key gives more coefficients than are made at once."""
    monkeypatch.setattr(sum_tags, "_BLOCK", 1)
    sites, of = make_sites(2), label(40_000)
    values = [np.full(40_000, site, dtype=np.int64) for site in range(2)]
    parts, total = send(sites, values, of)
    sites[0].open(total, added(parts), of)
    total[-1] += 1
    assert_refused(sites, total, added(parts), of)
