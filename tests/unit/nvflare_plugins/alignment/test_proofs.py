"""Every step on the way back is proven: an honest chain is taken, any other is refused at any party and any step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.curve.equal_logarithms import PROOF_BYTES
from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.kinds.alignment import intersection as blinding
from nvflare_plugins.kinds.alignment.intersection import REFUSED, BlindingKey, Proofs, held_by, pack_block, unpack_chain
from tests.support.workers_here import workers_here

SIZE = 8
Chain = list[tuple[list[bytes], bytes]]


def parties(n: int, domain: bytes = b"test") -> list[Proofs]:
    keys = [BlindingKey(domain) for _ in range(n)]
    committed = tuple(key.commitment() for key in keys)
    return [Proofs(domain, committed, rank, key, OS_RANDOMNESS) for rank, key in enumerate(keys)]


def common_points(proofs: list[Proofs], n_points: int = 6) -> list[bytes]:
    points = BlindingKey(b"test").blind_items([b"%d" % n for n in range(n_points)])
    for one in proofs:
        points = one.key.blind(points)
    return points


def chain_of(proofs: list[Proofs], common: list[bytes], first: int, n_links: int, number: int = 0) -> bytes:
    chain, block = b"", common
    for step in range(n_links):
        chain = proofs[(first + step) % len(proofs)].extend(chain, first, number, block, SIZE)
        block = unpack_chain(chain, SIZE, step + 1)[-1][0]
    return chain


def packed(chain: Chain) -> bytes:
    return b"".join(pack_block(points, SIZE) + proof for points, proof in chain)


@given(st.integers(2, 4), st.data(), st.integers(0, SIZE), st.integers(0, 9))
@settings(max_examples=25)
def test_honest_chains_are_taken_and_end_with_one_key_less_for_each_step(n_parties, data, n_points, number):
    first, n_links = data.draw(st.integers(0, n_parties - 1)), data.draw(st.integers(1, n_parties - 1))
    proofs = parties(n_parties)
    common = common_points(proofs, n_points)
    chain = chain_of(proofs, common, first, n_links, number)
    block = proofs[(first + n_links) % n_parties].check(chain, first, number, common, SIZE, n_links)
    for step in range(n_links):
        block = proofs[(first + step) % n_parties].key.blind(block)
    assert block == common


def lies(proofs: list[Proofs], chain: Chain, link: int, common: list[bytes]) -> dict[str, Chain]:
    """Return what the parties of a chain could make of one of its links, together and without the other keys."""
    points, proof = chain[link]
    other, stranger = BlindingKey(b"other"), BlindingKey(b"test")
    before = chain[link - 1][0] if link else common
    foreign = other.blind_items([b"a", b"b", b"c", b"d", b"e", b"f"])
    made: dict[str, tuple[list[bytes], bytes]] = {
        "permuted": ([*points[1:], points[0]], proof),
        "one replaced": ([foreign[0], *points[1:]], proof),
        "all replaced": (foreign, proof),
        "duplicated": ([points[0], points[0], *points[2:]], proof),
        "not taken off": (before, proof),
        "put on again": (other.blind(points), proof),
        "another party's key": (proofs[link - 1].key.unblind(before), proof),
        "one more": ([*points, foreign[0]], proof),
        "one less": (points[1:], proof),
        "none": ([], proof),
        "neutral": ([bytes(32), *points[1:]], proof),
        "no element": ([b"\xff" * 32, *points[1:]], proof),
        "zeros as proof": (points, bytes(PROOF_BYTES)),
        "proof of another link": (points, chain[link - 1][1] if len(chain) > 1 else bytes(range(PROOF_BYTES))),
    }
    found = {name: [*chain[:link], one, *chain[link + 1 :]] for name, one in made.items()}
    # A party that has another key than it committed to, and proves that; and one whose proof is for another list.
    prover = (proofs[0].rank + link) % len(proofs)
    cheat = Proofs(proofs[0].domain, proofs[0].commitments, prover, stranger, OS_RANDOMNESS)
    for name, liar, blinded in (("key not committed to", cheat, before), ("another list", proofs[prover], foreign)):
        one = unpack_chain(liar.extend(b"", 0, 0, blinded, SIZE), SIZE, 1)[0]
        found[name] = [*chain[:link], one, *chain[link + 1 :]]
    return found


@pytest.mark.parametrize(
    ("n_parties", "n_links", "link"),
    [(n, links, link) for n in (2, 3, 4) for links, link in itertools.product(range(1, n), range(n)) if link < links],
)
def test_whatever_a_party_does_to_a_link_the_next_refuses_the_chain(n_parties, n_links, link):
    proofs = parties(n_parties)
    common = common_points(proofs)
    honest = chain_of(proofs, common, 0, n_links)
    next_one = proofs[n_links % n_parties]
    assert next_one.check(honest, 0, 0, common, SIZE, n_links)
    for name, lie in lies(proofs, unpack_chain(honest, SIZE, n_links), link, common).items():
        with pytest.raises(ProtocolError):
            next_one.check(packed(lie), 0, 0, common, SIZE, n_links)
            pytest.fail(name)


@pytest.mark.parametrize("n_parties", [2, 3, 4])
def test_a_chain_holds_at_its_own_place_of_its_own_session_only(n_parties):
    proofs = parties(n_parties)
    common, n_links = common_points(proofs), n_parties - 1
    chain = chain_of(proofs, common, 0, n_links, number=1)

    def refused(by: Proofs, first: int = 0, number: int = 1, listed: list[bytes] = common) -> None:
        with pytest.raises(ProtocolError) as error:
            by.check(chain, first, number, listed, SIZE, n_links)
        assert str(error.value) == REFUSED

    last = proofs[-1]
    assert last.check(chain, 0, 1, common, SIZE, n_links)
    refused(last, number=0)
    refused(last, first=1)
    refused(last, listed=common[::-1])
    of = {"domain": last.domain, "commitments": last.commitments}
    for changed in ({**of, "domain": b"another session"}, {**of, "commitments": last.commitments[::-1]}):
        refused(Proofs(rank=last.rank, key=last.key, randomness=OS_RANDOMNESS, **changed))


@pytest.mark.parametrize("cut", [-1, 1])
def test_a_chain_of_another_length_is_refused(cut):
    proofs = parties(2)
    common = common_points(proofs)
    chain = chain_of(proofs, common, 0, 1)
    for bad in (chain[:cut], chain + b"\0", b"", chain * 2):
        with pytest.raises(ProtocolError):
            proofs[1].check(bad, 0, 0, common, SIZE, 1)


@pytest.mark.parametrize("n_workers", [1, 2, 3])
@pytest.mark.parametrize("n_points", [0, 1, 6])
def test_workers_prove_and_check_the_same(monkeypatch: Any, n_workers: int, n_points: int) -> None:
    monkeypatch.setattr(blinding, "LEAST_POINTS", 0)
    proofs = parties(3)
    common = common_points(proofs, n_points)
    with workers_here(n_workers) as workers, held_by(proofs[1].key, workers) as spread:  # type: ignore[arg-type]
        spreading = Proofs(proofs[1].domain, proofs[1].commitments, 1, spread, OS_RANDOMNESS)
        chain = proofs[0].extend(b"", 0, 0, common, SIZE)
        own = spreading.check(chain, 0, 0, common, SIZE, 1)
        whole = spreading.extend(chain, 0, 0, own, SIZE)
        if n_points:
            with pytest.raises(ProtocolError, match=REFUSED):
                spreading.check(chain[:-1] + bytes([chain[-1] ^ 1]), 0, 0, common, SIZE, 1)
    assert proofs[2].key.blind(proofs[2].check(whole, 0, 0, common, SIZE, 2)) == proofs[2].key.blind(
        proofs[1].key.unblind(own)
    )
