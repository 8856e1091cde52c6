"""The protocol against plain sets; what each party gets to see; and parties that do not keep to it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from he_processors.curve.equal_logarithms import PROOF_BYTES
from he_processors.errors import AuthenticationError, ProtocolError
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.kinds.alignment import intersection
from tests.support.alignment import run_parties
from tests.support.examples import quick


def lists_in(part: bytes, size: int) -> list[list[bytes]]:
    """Return the lists of a part: one, or on the way back one for each step."""
    if len(part) == intersection.block_bytes(size):
        return [intersection.unpack_block(part, size)]
    return [
        points
        for points, _ in intersection.unpack_chain(
            part, size, len(part) // (intersection.block_bytes(size) + PROOF_BYTES)
        )
    ]


class Listener:
    """A session that passes a party's plaintext through a hook, in either direction."""

    def __init__(
        self, session: Any, on_seal: Callable[[bytes], bytes] = bytes, on_open: Callable[[bytes], Any] = bytes
    ) -> None:
        self._session, self._on_seal, self._on_open = session, on_seal, on_open

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def seal_for(self, rank: int, plaintext: bytes, purpose: str) -> bytes:
        return self._session.seal_for(rank, self._on_seal(plaintext), purpose)

    def open_of(self, rank: int, sealed: bytes, purpose: str) -> bytes:
        plaintext = self._session.open_of(rank, sealed, purpose)
        self._on_open(plaintext)
        return plaintext


def run(
    folder: Path,
    sets: list[list[bytes]],
    least: int = 1,
    listen: Callable[[int, Any], Any] = lambda r, s: s,
    **more: Any,
) -> list[Any]:
    def take_part(channel, session, policy):
        lists = intersection.Lists(channel, listen(channel.rank, session), "test", max(map(len, sets)))
        return sorted(intersection.intersect(lists, sets[channel.rank], [len(s) for s in sets], least, b"test"))

    return run_parties(folder, len(sets), take_part, **more)


def overlapping(n_parties: int, seed: int, n: int = 30) -> list[list[bytes]]:
    source = random.Random(seed)
    pool = [b"item%d" % number for number in range(n)]
    return [source.sample(pool, source.randrange(n // 2, n)) for _ in range(n_parties)]


@pytest.mark.parametrize(
    ("n_parties", "seed"),
    quick(itertools.product((2, 3, 4, 5), range(3)), (2, 0), (3, 1), (3, 2), (4, 2), (5, 0)),
)
def test_every_party_finds_the_common_items(tmp_path, n_parties, seed):
    sets = overlapping(n_parties, seed)
    common = set.intersection(*map(set, sets))
    for own, found in zip(sets, run(tmp_path, sets), strict=True):
        assert [own[place] for place in found] == [item for item in own if item in common]


def test_blocks_do_not_change_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.intersection.BLOCK", 8)
    sets = overlapping(3, 9)
    common = set.intersection(*map(set, sets))
    assert [len(found) for found in run(tmp_path, sets)] == [len(common)] * 3


def test_all_or_one(tmp_path):
    pool = [b"item%d" % number for number in range(20)]
    assert run(tmp_path / "all", [pool, pool[::-1]]) == [list(range(20))] * 2
    assert run(tmp_path / "one", [[b"a", b"b"], [b"c", b"b"], [b"b"]]) == [[1], [1], [0]]


@pytest.mark.parametrize("n_parties", [2, 3])
def test_too_few_common_items_end_it_before_anyone_learns_which(tmp_path, n_parties):
    sets = [[b"item%d" % number for number in range(10)], [b"item%d" % number for number in range(6, 16)]] * 2
    seen: list[bytes] = []
    outcomes = run(
        tmp_path, sets[:n_parties], least=5, listen=lambda r, s: Listener(s, on_seal=lambda p: seen.append(p) or p)
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, PolicyRefusal)]
    assert len(refused) == 1 and "min_intersection" in str(refused[0])
    assert sum(isinstance(outcome, JobAborted) for outcome in outcomes) == n_parties - 1
    assert all("min_intersection" in str(outcome) for outcome in outcomes)
    assert not any(character.isdigit() for character in str(refused[0])), "it must not say how many"
    # Each party sent its part of the round, and some of the comparison; nothing went on its way back.
    assert len(seen) <= n_parties * (n_parties - 1) + (n_parties - 1)


def test_what_a_party_sees_matches_no_more_than_it_may_learn(tmp_path):
    """Equal points in two lists are all that a party without the others' keys can find: count them.

    Sets whose intersections all have different sizes, so that a size tells which intersection it belongs to.
    """
    n_of = {"abc": 8, "ab": 3, "ac": 5, "bc": 7, "a": 20, "b": 20, "c": 20}

    def make(*names: str) -> list[bytes]:
        return [f"{name}{number}".encode() for name in names for number in range(n_of[name])]

    sets = [make("abc", "ab", "ac", "a"), make("abc", "ab", "bc", "b"), make("abc", "ac", "bc", "c")]
    views: dict[int, list[frozenset[bytes]]] = {0: [], 1: [], 2: []}

    def listen(rank, session):
        def keep(plaintext: bytes) -> bytes:
            views[rank] += map(frozenset, lists_in(plaintext, 64))
            return plaintext

        return Listener(session, keep, keep)

    found = run(tmp_path, sets, listen=listen)
    assert [len(places) for places in found] == [8, 8, 8]
    learnt = {
        rank: {len(one & other) for one, other in itertools.combinations(set(lists), 2)}
        for rank, lists in views.items()
    }
    # 8 ids are common to all. Parties 1 and 2 share 8 + 7, and only they may know.
    assert learnt[0] == {0, 8}
    assert learnt[1] == {0, 8, 15}
    assert learnt[2] <= {0, 8, 15}


def test_lists_are_shuffled_before_they_leave_their_owner(tmp_path, monkeypatch):
    sets = overlapping(2, 4)
    keys: list[intersection.BlindingKey] = []
    received: dict[int, list[bytes]] = {}

    class Known(intersection.BlindingKey):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            keys.append(self)

    def listen(rank, session):
        def keep(plaintext: bytes) -> None:
            received.setdefault(
                rank, intersection.unpack_block(plaintext, (len(plaintext) - 4) // intersection.POINT_BYTES)
            )

        return Listener(session, on_open=keep)

    monkeypatch.setattr("nvflare_plugins.kinds.alignment.intersection.BlindingKey", Known)
    run(tmp_path, sets, listen=listen)
    for rank in (0, 1):
        in_order = [key.blind_items(sets[1 - rank]) for key in keys]
        assert sorted(received[rank]) in [sorted(points) for points in in_order]
        assert received[rank] not in in_order


# -- parties that do not keep to the protocol -------------------------------------------------------------------------


class Greedy(intersection._Party):
    """Calls what it holds of another party common, and reads what comes back with a dictionary of all possible ids."""

    named: frozenset[bytes] = frozenset()

    def _of_both(self, points: list[bytes], of_next: frozenset[bytes]) -> list[bytes]:
        return list(of_next)

    def _return(self, common: list[bytes]) -> list[bytes]:
        found = super()._return(common)
        blinded = dict(zip(self._key.blind_items(DICTIONARY), DICTIONARY, strict=True))
        self.named = frozenset(blinded[point] for point in found if point in blinded)
        return found


DICTIONARY = [b"%03d" % number for number in range(300)]


@pytest.mark.parametrize("n_true", [0, 1])
@pytest.mark.parametrize(("n_parties", "rank"), [(n, rank) for n in (2, 3, 4) for rank in range(1, n)])
def test_a_party_with_invented_ids_cannot_call_others_sets_common(tmp_path, monkeypatch, n_parties, rank, n_true):
    """The last of two named all ids of the other so, the middle of three all that the two others share."""
    greedy: list[Greedy] = []
    honest = intersection._Party

    def party(lists: intersection.Lists, *args: Any) -> intersection._Party:
        if lists.channel.rank != rank:
            return honest(lists, *args)
        greedy.append(Greedy(lists, *args))
        return greedy[0]

    monkeypatch.setattr("nvflare_plugins.kinds.alignment.intersection._Party", party)
    true, sets = DICTIONARY[100:140], [DICTIONARY[100:140]] * n_parties
    sets[rank] = true[:n_true] + [b"invented%d" % n for n in range(40 - n_true)]
    outcomes = run(tmp_path, sets)
    assert greedy[0].named <= set(true[:n_true]), "ids of other parties"
    assert all(isinstance(outcome, (ProtocolError, PolicyRefusal, JobAborted)) for outcome in outcomes)
    assert any("called ids common" in str(outcome) for outcome in outcomes) or not n_true


SETS = [[b"item%d" % number for number in range(16)]] * 3
LINK = intersection.block_bytes(16) + PROOF_BYTES


def lie(tmp_path, change: Callable[[list[bytes]], list[bytes]], at: int) -> list[Any]:
    """Let party 1 change the points of its ``at``-th block."""
    count = itertools.count()

    def on_seal(plaintext: bytes) -> bytes:
        if next(count) != at:
            return plaintext
        start, end = (len(plaintext) - LINK, len(plaintext) - PROOF_BYTES) if at in BACK else (0, len(plaintext))
        changed = intersection.pack_block(change(intersection.unpack_block(plaintext[start:end], 16)), 16)
        return plaintext[:start] + changed + plaintext[end:]

    outcomes = run(tmp_path, SETS, listen=lambda rank, s: Listener(s, on_seal) if rank == 1 else s)
    assert any(isinstance(outcome, ProtocolError) for outcome in outcomes)
    # Whoever has its own points by then hears of a lie on the last step when ``align`` compares results.
    may_end = (ProtocolError, JobAborted, list) if at == BACK[-1] else (ProtocolError, JobAborted)
    assert all(isinstance(outcome, may_end) for outcome in outcomes)
    return outcomes


ROUND, BACK = (0, 1), (3, 4)  # the blocks that party 1 sends: two in the round, one to compare, two on the way back


@pytest.mark.parametrize("at", [*ROUND, *BACK])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda points: points[1:], id="drops a point"),
        pytest.param(lambda points: [points[0], *points[:-1]], id="repeats a point"),
        pytest.param(lambda points: [b"\2" + b"\xff" * 31, *points[1:]], id="leaves the group"),
        pytest.param(lambda points: [b"\0" * 32, *points[1:]], id="sends the neutral element"),
    ],
)
def test_lists_that_change_on_their_way_are_noticed(tmp_path, change, at):
    lie(tmp_path, change, at)


@pytest.mark.parametrize("at", BACK)
def test_points_of_another_key_on_the_way_back_are_noticed(tmp_path, at):
    outcomes = lie(tmp_path, lambda points: intersection.BlindingKey(b"test").blind(points), at)
    assert any(str(outcome) == intersection.REFUSED for outcome in outcomes)


@pytest.mark.parametrize("plaintext", [b"", b"\0", b"x" * 100, b"\xff" * 516, bytes(10_000)])
def test_any_bytes_of_a_party_are_a_clear_error(tmp_path, plaintext):
    outcomes = run(tmp_path, SETS, listen=lambda rank, s: Listener(s, lambda p: plaintext) if rank == 1 else s)
    assert any(isinstance(outcome, ProtocolError) for outcome in outcomes)
    assert all(isinstance(outcome, (ProtocolError, JobAborted)) for outcome in outcomes)


def test_a_server_that_changes_a_sealed_block_is_noticed(tmp_path):
    count = itertools.count()

    def tamper(reply: bytes) -> bytes:
        return reply[:-20] + bytes([reply[-20] ^ 1]) + reply[-19:] if next(count) == 5 else reply

    outcomes = run(tmp_path, SETS, tamper_reply={"party-b": tamper})
    assert isinstance(outcomes[1], (AuthenticationError, ProtocolError))
    assert all(isinstance(outcome, Exception) for outcome in outcomes)


# -- on the way back, every step is proven ----------------------------------------------------------------------------


def on_the_way_back(n_parties: int) -> list[tuple[int, int, int]]:
    """Return each rank with each step that it takes and each link of the chain that it hands on then."""
    steps = itertools.product(range(n_parties), range(1, n_parties), range(n_parties - 1))
    return [(rank, step, link) for rank, step, link in steps if link < step]


POSITIONS = [(n, *position) for n in (2, 3, 4) for position in on_the_way_back(n)]
CHANGES: dict[str, Callable[[list[bytes], bytes], tuple[list[bytes], bytes]]] = {
    "permuted": lambda points, proof: ([points[1], points[0], *points[2:]], proof),
    "replaced": lambda points, proof: ([*intersection.BlindingKey(b"x").blind_items([b"a"]), *points[1:]], proof),
    "duplicated": lambda points, proof: ([points[0], points[0], *points[2:]], proof),
    "dropped": lambda points, proof: (points[1:], proof),
    "another key": lambda points, proof: (intersection.BlindingKey(b"x").blind(points), proof),
    "neutral": lambda points, proof: ([bytes(32), *points[1:]], proof),
    "outside the group": lambda points, proof: ([b"\2" + b"\xff" * 31, *points[1:]], proof),
    "no proof": lambda points, proof: (points, bytes(PROOF_BYTES)),
    "another proof": lambda points, proof: (points, proof[:-1] + bytes([proof[-1] ^ 1])),
}


@pytest.mark.parametrize("case", [(*position, name) for position, name in zip(POSITIONS, itertools.cycle(CHANGES))])
def test_what_a_party_does_to_a_chain_is_refused_by_the_next(tmp_path, case):
    n_parties, rank, step, link, name = case
    count = itertools.count()

    def on_seal(part: bytes) -> bytes:
        if len(part) != step * LINK or next(count):
            return part
        chain = intersection.unpack_chain(part, 16, step)
        chain[link] = CHANGES[name](*chain[link])
        return b"".join(intersection.pack_block(points, 16) + proof for points, proof in chain)

    outcomes = run(tmp_path, [SETS[0]] * n_parties, listen=lambda r, s: Listener(s, on_seal) if r == rank else s)
    assert isinstance(outcomes[(rank + 1) % n_parties], ProtocolError)
    assert all(isinstance(outcome, (ProtocolError, JobAborted, list)) for outcome in outcomes)


@pytest.mark.parametrize("n_parties", [2, 3])
def test_what_was_proven_in_another_session_is_refused(tmp_path, n_parties):
    """Points and proofs of an honest run, sent again at the same place of the next one."""
    kept: dict[tuple[int, int], bytes] = {}

    def replay(rank: int, session: Any) -> Any:
        def on_seal(part: bytes) -> bytes:
            place = rank, len(part) // LINK
            return kept.setdefault(place, part) if rank == 1 and len(part) % LINK == 0 else part

        return Listener(session, on_seal)

    sets = [SETS[0]] * n_parties
    assert run(tmp_path / "first", sets, listen=replay) == [list(range(16))] * n_parties
    assert any(str(outcome) == intersection.REFUSED for outcome in run(tmp_path / "second", sets, listen=replay))


@pytest.mark.parametrize("bad", [b"", bytes(32), b"\xff" * 32, bytes(33)])
def test_a_commitment_that_is_no_element_is_refused_before_any_list(tmp_path, bad):
    lists: list[bytes] = []

    class Uncommitted(Listener):
        def seal_to_all(self, plaintext: bytes, purpose: str) -> bytes:
            return self._session.seal_to_all(bad, purpose)

    def listen(rank: int, session: Any) -> Any:
        return Uncommitted(session) if rank else Listener(session, on_seal=lambda p: lists.append(p) or p)

    outcomes = run(tmp_path, SETS[:2], listen=listen)
    assert any(isinstance(outcome, ProtocolError) for outcome in outcomes) and not lists


@pytest.mark.parametrize("honest", range(3))
def test_two_of_three_cannot_have_the_third_take_its_key_off_what_they_choose(tmp_path, monkeypatch, honest):
    """They handed it points of its own set in the place of the common ones, and got hashes that a dictionary names."""
    own, common = [b"own%d" % n for n in range(8)], [b"item%d" % n for n in range(8)]
    sets = [common + own if rank == honest else common + [b"%d, %d" % (rank, n) for n in range(8)] for rank in range(3)]
    before, after = (honest - 1) % 3, (honest + 1) % 3
    stolen: list[bytes] = []
    seen: set[bytes] = set()

    def steal(plaintext: bytes) -> None:
        points = lists_in(plaintext, 16)
        if not stolen:
            stolen.extend(points[0][:8])
        seen.update(*points)

    real = intersection.Proofs.extend

    def extend(
        self: intersection.Proofs, chain: bytes, first: int, number: int, blinded: list[bytes], size: int
    ) -> bytes:
        if self.rank == before and first == before:
            return intersection.pack_block(stolen, size) + real(self, chain, first, number, stolen, size)[-PROOF_BYTES:]
        return real(self, chain, first, number, blinded, size)

    monkeypatch.setattr(intersection.Proofs, "extend", extend)
    listen = {after: lambda session: Listener(session, on_open=steal)}
    outcomes = run(tmp_path, sets, listen=lambda rank, session: listen.get(rank, lambda s: s)(session))
    assert len(stolen) == 8 and str(outcomes[honest]) == intersection.REFUSED
    hashes = curve_hashes(common + own)
    assert not seen & set(hashes)


def curve_hashes(items: list[bytes]) -> list[bytes]:
    """Return the hashes of items, under no key."""
    key = intersection.BlindingKey(b"test")
    return key.unblind(key.blind_items(items))
