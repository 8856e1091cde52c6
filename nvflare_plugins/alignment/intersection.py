"""The intersection of several parties' sets, by commutative blinding.

Each party has a secret key k_i, and tells all others k_i G before any list leaves: it commits to it. With m parties in
order of rank, and K for all keys together:

1. **Round.** Every set goes once round: its owner blinds and shuffles it, and so does each next party. After m - 1
   steps rank i holds the set of rank i + 1 under K, in an order that nobody knows.
2. **Compare.** Rank 0 hands its list to rank 1, which keeps the points that its own list has too, and hands those on,
   up to rank m - 1, which is left with the points of the ids that all parties have.
3. **Return.** These points go to all parties, each of which refuses any that the set that it holds lacks: else whoever
   calls points common could have others take their keys off any set. For each party j a copy goes round the others,
   who take their keys off, in the order of the list, and prove it (``proofs.py``): so nobody can have a key taken off
   other points, not even the parties before and after that one together. Party j gets k_j H(id) and finds its own rows.

What each party learns beyond the common ids (everyone honest but curious, see ``BlindingKey``):

* all parties: the sizes of all sets;
* ranks r and r + 1, for r from 1 to m - 2: how many ids ranks 1 to r + 1 have in common, but not which. With three
  parties ranks 1 and 2 learn how many ids they share with each other; with two nobody learns more than the above;
* the server: the largest set's size rounded up (to a power of two up to 65,536, to a multiple of that beyond), order
  and times of messages; from the times, roughly, the sizes.

A pairwise protocol would show one party all pairwise intersections, id by id. Parties that pool their keys and sets
learn what they have in common with each other anyway, and sizes of intersections with the others' sets; single ids
of an honest party outside the intersection stay hidden as long as its own key does.

A party that departs from this, or all but one together, learn more, and no more than this: the round blinds what they
send, as many points as all others' sets have ids, so that each lets them test one id of their choice against the honest
set. Shuffling does not hide from them which of these it was, and whoever compares lists need not keep to ``least``.
What they do not ask for by one of these points stays hidden, even where a dictionary holds all ids.

Cost: each id is blinded once by each party, each common id unblinded once for each party: with n ids each and c common
ones m n + (m - 1) c curve multiplications a party; proofs add some hundredths of one for each common id and link that a
party checks, of which there are m (m - 1) / 2.

Reference: the two-party case is the protocol of Meadows (1986) and Huberman, Franklin, Hogg (1999).
"""

from __future__ import annotations

from collections.abc import Sequence

from he_processors.errors import PolicyRefusal, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.alignment.blind_shard import SpreadKey, held_by
from nvflare_plugins.alignment.blinding import BlindingKey
from nvflare_plugins.alignment.lists import Lists, shuffled, tell_all
from nvflare_plugins.alignment.proofs import Proofs
from nvflare_plugins.cluster.workers import Workers


def intersect(
    lists: Lists,
    items: Sequence[bytes],
    sizes: Sequence[int],
    least: int,
    domain: bytes,
    randomness: RandomSource = OS_RANDOMNESS,
    workers: Workers | None = None,
) -> list[int]:
    """Return the positions of those items that every party has, in no particular order.

    Args:
        items: hashes of this party's ids under a key that all parties share; all different.
        sizes: number of items of each party, by rank.
        least: fewer common items end the job, and nobody learns which they are.
        domain: names this intersection, equal at all parties.
        workers: of this party, which blind in the place of its process; the result is the same.

    Raises:
        PolicyRefusal: fewer than ``least``.
        ProtocolError: a party did not keep to the protocol.
        WorkerFailure: a worker of this party is lost.
    """
    if len(items) != sizes[lists.channel.rank]:
        raise ValueError("sizes must give the number of this party's items")
    own = BlindingKey(domain, randomness)
    committed = tuple(tell_all(lists.channel, lists.session, own.commitment(), f"keys for {lists.purpose}"))
    own.decoded(committed)  # refuses what is no key's
    with held_by(own, workers) as key:
        proofs = Proofs(domain, committed, lists.channel.rank, key, randomness)
        return _Party(lists, items, sizes, least, key, randomness, proofs).run()


class _Party:
    """One party's state while the three phases last."""

    def __init__(
        self,
        lists: Lists,
        items: Sequence[bytes],
        sizes: Sequence[int],
        least: int,
        key: BlindingKey | SpreadKey,
        randomness: RandomSource,
        proofs: Proofs,
    ) -> None:
        self._lists, self._items, self._sizes = lists, items, sizes
        self._least, self._randomness = least, randomness
        self._rank, self._world = lists.channel.rank, lists.channel.world
        self._next, self._previous = (self._rank + 1) % self._world, (self._rank - 1) % self._world
        self._key, self._proofs = key, proofs
        self._order: list[int] = shuffled(range(len(items)), randomness)
        self._blinded: list[bytes] = []  # this party's items under its own key, in that order

    def run(self) -> list[int]:
        common = self._compare(self._round())
        position = dict(zip(self._blinded, self._order, strict=True))
        found = [position.get(point) for point in self._return(common)]
        if None in found:
            raise ProtocolError("the alignment returned points that are not this party's: some party used another key")
        return [place for place in found if place is not None]

    def _round(self) -> list[bytes]:
        """Blind all sets in passing; return the next party's under all keys."""
        items = [self._items[place] for place in self._order]
        held = self._lists.swap(items, (self._next,), self._previous, self._blind_own, self._key.blind)
        for step in range(1, self._world):
            owner = (self._rank - step) % self._world
            if len(held) != self._sizes[owner]:
                raise ProtocolError(f"the set of {self._lists.channel.sites[owner]} lost or gained ids on its way")
            held = self._shuffled(held)
            if step < self._world - 1:
                held = self._lists.swap(held, (self._next,), self._previous, change=self._key.blind)
        return held

    def _blind_own(self, items: list[bytes]) -> list[bytes]:
        points = self._key.blind_items(items)
        self._blinded += points
        return points

    def _compare(self, held: list[bytes]) -> list[bytes]:
        """Return the common points under all keys, which the last party finds and hands to all."""
        last, of_next = self._world - 1, frozenset(held)
        for receiver in range(1, self._world):
            sends, receives = self._rank == receiver - 1, self._rank == receiver
            points = self._lists.swap(
                held if sends else (), (receiver,) if sends else (), receiver - 1 if receives else None
            )
            if receives:
                held = self._shuffled(self._of_both(points, of_next))
                self._require_enough(held)
        others = [rank for rank in range(self._world) if rank != last]
        if self._rank == last:
            self._lists.swap(held, others, None)
            return held
        common = self._lists.swap((), (), last)
        if not of_next.issuperset(common):
            raise ProtocolError("a party called ids common that the next party by name does not have")
        self._require_enough(common)
        return common

    def _of_both(self, points: list[bytes], of_next: frozenset[bytes]) -> list[bytes]:
        return [point for point in points if point in of_next]

    def _return(self, common: list[bytes]) -> list[bytes]:
        """Take this key off the copies that pass on to their owners, proven; return this party's own copy."""
        size, n_blocks = self._lists.block, self._lists.n_blocks
        own = list[bytes]()
        for number in range(n_blocks):
            block = self._key.decoded(common[number * size : (number + 1) * size])
            held, chain = block, b""
            for step in range(1, self._world):  # a block goes all its way before the next: chains are held for one only
                first = (self._rank - step) % self._world
                chain = self._proofs.extend(chain, (first + 1) % self._world, number, held, size)
                chain = self._lists.exchange(chain, (self._next,), self._previous)
                held = self._proofs.check(chain, first, number, block, size, step)
                self._lists.on_block(number * (self._world - 1) + step, n_blocks * (self._world - 1))
            own += held
        return own

    def _require_enough(self, points: Sequence[bytes]) -> None:
        if len(points) < self._least:
            raise PolicyRefusal(
                "the parties have fewer rows in common than their policies ask for. Policy key: "
                "vertical.min_intersection. Check that all use the same kind of id."
            )

    def _shuffled(self, points: list[bytes]) -> list[bytes]:
        return shuffled(points, self._randomness)
