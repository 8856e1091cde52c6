"""The intersection of several parties' sets, by commutative blinding, with a proof for each block of points."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import StaysInProcess
from he_processors.bignum.interface import rows_from_ints
from he_processors.curve import equal_logarithms
from he_processors.curve.equal_logarithms import PROOF_BYTES, WEIGHT_BYTES, draw_weights, hash_to_ristretto, holds
from he_processors.curve.interface import GROUP_ORDER, RISTRETTO_BYTES, SCALAR_BYTES, Points
from he_processors.curve.registry import open_curve
from he_processors.errors import ProtocolError, VeilBoostError
from he_processors.key_agreement import DOMAIN, encode_fields
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below, random_uint64
from nvflare_plugins.attempt.session import Session, tell_all
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.workers.shards import runs_of
from nvflare_plugins.workers.worker_connection import WorkerPart
from nvflare_plugins.workers.workers import TRIAL, Workers, begin, collect

# Blinding of ids with a secret key, by elliptic-curve Diffie-Hellman: k H(id), and the same with several keys.
#
# Blinding commutes: whoever blinds first, the result is k1 k2 ... km H(id). The group is ristretto255, whose order is a
# prime and whose elements have one encoding each: what is no such encoding is refused, and so is the neutral element,
# so that no list holds anything whose logarithm tells of a key. Arithmetic and hashing are those of
# ``he_processors.curve``. Sets of elements are compared exactly, so that the rate of false positives is that of a
# collision of hashes.
#
# NVFlare's own DH-PSI (openmined-psi, on P-256) is not used: it is for two parties at a time, so that one party of
# three learns every pairwise intersection; it loads the full set again when an intersection was empty; and it puts ids
# into the text of exceptions, which FLARE sends to the server.


POINT_BYTES = RISTRETTO_BYTES
_NEUTRAL = bytes(POINT_BYTES)
_SUITE = b"VeilBoost alignment, ristretto255_XMD:SHA-512_R255MAP_RO_, "


class Decoded(list[bytes]):
    """Points as bytes, and decoded: what is done to them next need not decode them again."""

    __slots__ = ("points",)
    points: Points


class BlindingKey(StaysInProcess):
    """A fresh secret key of one party for one intersection.

    Args:
        domain: names the intersection, equal at all its parties: ids hash to other elements under another.

    Security: under the decisional Diffie-Hellman assumption in ristretto255, with the hash as a random oracle, blinded
        ids of others look like random elements. The key never leaves the party, which is its process and, where it has
        workers, these (``BlindShard``), and is used for one intersection only.
    """

    def __init__(self, domain: bytes, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._hold(domain, 1 + random_below(GROUP_ORDER - 1, randomness))

    @classmethod
    def given(cls, domain: bytes, secret: bytes) -> BlindingKey:
        """Return the key that a party gave its worker, see ``for_workers``. Raises: ProtocolError, if it is none."""
        number = int.from_bytes(secret, "little")
        if len(secret) != SCALAR_BYTES or not 0 < number < GROUP_ORDER:
            raise ProtocolError("these bytes are no blinding key")
        key = cls.__new__(cls)
        key._hold(domain, number)
        return key

    def for_workers(self) -> tuple[bytes, bytes]:
        """Return domain and secret, for the party's own workers and nobody else."""
        return self._domain, self._secret.tobytes()

    def commitment(self) -> bytes:
        """Return secret G, which fixes the key and tells nothing that would help to find it."""
        return equal_logarithms.commitment(self._curve, self._number)

    def _hold(self, domain: bytes, secret: int) -> None:
        self._domain, self._tag = domain, _SUITE + domain
        self._curve = open_curve()
        self._number = secret
        self._secret = rows_from_ints([secret], SCALAR_BYTES)
        self._inverse = rows_from_ints([pow(secret, -1, GROUP_ORDER)], SCALAR_BYTES)

    def blind_items(self, items: Sequence[bytes]) -> list[bytes]:
        """Hash items to the group and blind them, in order."""
        return self._times(hash_to_ristretto(self._curve, items, self._tag), self._secret)

    def blind(self, points: Sequence[bytes]) -> list[bytes]:
        """Blind points further, in order. Raises: ProtocolError, if one is no element but the neutral one."""
        return self._times(self._read(points), self._secret)

    def unblind(self, points: Sequence[bytes]) -> list[bytes]:
        """Take this key's blinding off, in order. Raises: ProtocolError, as ``blind``."""
        return self._times(self._read(points), self._inverse)

    def decoded(self, points: Sequence[bytes]) -> list[bytes]:
        """Return the points, decoded. Raises: ProtocolError, as ``blind``."""
        if isinstance(points, Decoded):
            return points
        found = Decoded(points)
        found.points = self._read(points)
        return found

    def weigh(self, lists: Sequence[Sequence[bytes]], weights: NDArray[np.uint8]) -> list[bytes]:
        """Return for each list the sum of weight times point.

        Shapes: lists: n points each; weights: uint8[n, 16].

        Raises:
            ProtocolError: as ``blind``.
        """
        return equal_logarithms.weighted_sums(self._curve, [self._read(points) for points in lists], weights)

    def prove(self, transcript: bytes, blinded: bytes, randomness: RandomSource) -> bytes:
        """Prove that this key was taken off an element; see ``equal_logarithms.prove``."""
        return equal_logarithms.prove(self._curve, self._number, transcript, blinded, randomness)

    def _times(self, points: Points, scalar: NDArray[np.uint8]) -> list[bytes]:
        return points_of(self._curve.to_ristretto(self._curve.mul_by_each(points, scalar)[0]).tobytes())

    def _read(self, points: Sequence[bytes]) -> Points:
        if isinstance(points, Decoded):
            return points.points
        if all(len(point) == POINT_BYTES and point != _NEUTRAL for point in points):
            rows = np.frombuffer(b"".join(points), dtype=np.uint8).reshape(-1, POINT_BYTES)
            with suppress(ProtocolError):  # one message, whatever is wrong with it
                return self._curve.from_ristretto(rows)
        raise ProtocolError("a party sent something that is no element of the alignment's group")


def points_of(joined: bytes) -> list[bytes]:
    """Return the points of which bytes were joined."""
    return [joined[start : start + POINT_BYTES] for start in range(0, len(joined), POINT_BYTES)]


# Blinding on a party's own workers: each multiplies a run of a block's ids or points, and runs are joined in order.
#
# The result is that of ``BlindingKey`` in one process, byte for byte: each element is multiplied by itself, and has one
# encoding.


PART = f"{__name__}:BlindShard"
METHODS = ("blind_items", "blind", "unblind")
LEAST_IDS = 50_000
"""A party blinds a set of fewer ids in its own process: to reach its workers takes longer than they save."""
LEAST_POINTS = 1_024
"""So few at a time, such as the end of a list, are not sent to workers either."""


class BlindShard(WorkerPart):
    """Blinds what a party sends it.

    Security: holds the party's blinding key of one intersection; sees keyed hashes of the party's ids (no id) and
        points of other parties that these have blinded. A party's workers are that party.
    """

    def __init__(self, domain: bytes, secret: bytes) -> None:
        """Args: of ``BlindingKey.for_workers``."""
        self._key = BlindingKey.given(domain, secret)

    def multiply(self, method: str, ends: NDArray[np.int64], joined: bytes) -> bytes:
        """Do to a run what a method of ``BlindingKey`` does.

        Args:
            method: one of ``METHODS``.
            ends: int64[n], where each of its values ends among the joined ones: Dask takes long over lists.

        Returns:
            The points, joined.

        Raises:
            ProtocolError: as that method.
        """
        if method not in METHODS:
            raise ProtocolError("a blinding key has no such method")
        stops = ends.tolist()
        values = [joined[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        return b"".join(getattr(self._key, method)(values))

    def weigh(self, joined: list[bytes], weights: NDArray[np.uint8]) -> list[bytes]:
        """Return for a run of each list the sum of weight times point, as ``BlindingKey.weigh``."""
        return self._key.weigh([points_of(points) for points in joined], weights)


class SpreadKey:
    """A blinding key whose multiplications the party's workers do; results and errors are those of ``BlindingKey``."""

    def __init__(self, key: BlindingKey, workers: Workers) -> None:
        self._key, self._workers = key, workers

    def blind_items(self, items: Sequence[bytes]) -> list[bytes]:
        """See ``BlindingKey``. Raises: WorkerFailure."""
        return self._key.blind_items(items) if self._is_small(items) else self._spread("blind_items", items)

    def blind(self, points: Sequence[bytes]) -> list[bytes]:
        """See ``BlindingKey``. Raises: ProtocolError, WorkerFailure."""
        return self._key.blind(points) if self._is_small(points) else self._spread("blind", points)

    def unblind(self, points: Sequence[bytes]) -> list[bytes]:
        """See ``BlindingKey``. Raises: ProtocolError, WorkerFailure."""
        return self._key.unblind(points) if self._is_small(points) else self._spread("unblind", points)

    def decoded(self, points: Sequence[bytes]) -> list[bytes]:
        """Return the points as they are: workers decode them."""
        return list(points)

    def weigh(self, lists: Sequence[Sequence[bytes]], weights: NDArray[np.uint8]) -> list[bytes]:
        """See ``BlindingKey``. Raises: ProtocolError, WorkerFailure."""
        if self._is_small(weights):
            return self._key.weigh(lists, weights)
        asked = [
            self._workers.call(number, "weigh", [b"".join(points[run]) for points in lists], weights[run])
            for number, run in enumerate(runs_of(len(weights), len(self._workers)))
        ]
        return [self._sum(parts) for parts in zip(*collect(asked), strict=True)]

    def _sum(self, parts: Sequence[bytes]) -> bytes:
        found = [part for part in parts if any(part)]  # the neutral element counts for nothing, and is not read
        return self._key.weigh([found], np.eye(1, WEIGHT_BYTES, dtype=np.uint8).repeat(len(found), axis=0))[0]

    def prove(self, transcript: bytes, blinded: bytes, randomness: RandomSource) -> bytes:
        """See ``BlindingKey``."""
        return self._key.prove(transcript, blinded, randomness)

    def _is_small(self, values: Sized) -> bool:
        return len(values) < LEAST_POINTS

    def _spread(self, method: str, values: Sequence[bytes]) -> list[bytes]:
        runs = runs_of(len(values), len(self._workers))
        asked = []
        for number, run in enumerate(runs):
            own = values[run]
            ends = np.cumsum([len(value) for value in own], dtype=np.int64)
            asked.append(self._workers.call(number, "multiply", method, ends, b"".join(own)))
            asked[-1].add_done_callback(self._workers.work[number].counting("blinded", len(own)))
        points = b"".join(collect(asked))
        if len(points) != len(values) * POINT_BYTES:
            raise ProtocolError("workers of this site have blinded another number of points than they were given")
        return points_of(points)


@contextmanager
def held_by(key: BlindingKey, workers: Workers | None) -> Iterator[BlindingKey | SpreadKey]:
    """Give workers the key while an intersection lasts, however it ends; without any, the party's own process does all.

    Raises:
        WorkerFailure: a worker is lost; the text has its number.
    """
    if workers is None:
        yield key
        return
    try:
        begin(workers, PART, [key.for_workers()] * len(workers))
        yield SpreadKey(key, workers)
    except BaseException:
        with suppress(VeilBoostError):  # after a lost worker the others let go when their lines end
            _let_go(workers)
        raise
    _let_go(workers)


def _let_go(workers: Workers) -> None:
    begin(workers, TRIAL, [()] * len(workers))  # in the place of the part


# Lists of points on their way between parties: in blocks, sealed, and always of the same length.
#
# In each step of the protocol a party may send one list to some parties and receive one from some party. Lists travel
# in blocks, so that memory, single messages and the silence between two messages stay bounded however long a list is.
# All blocks of an intersection have one size, chosen from the longest of the parties' sets: the server, which relays
# sealed blocks, cannot tell from their sizes how large a set or an intersection is.


BLOCK = 1 << 16
"""Points of one message: 2 MB, and half a second of blinding. Must be equal at all parties."""
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Lists:
    """Carries lists of points of one intersection; all parties make the same calls in the same order.

    Attributes:
        purpose: names the intersection; blocks of another one do not open.
        longest: size of the largest set of any party; no list is longer.
        on_block: called after every block with the number of the block and of all blocks of the step.
        record: takes note, for the evidence, of "sent" (before it is) or "received", the other party and the bytes.
    """

    channel: Channel
    session: Session
    purpose: str
    longest: int
    on_block: Callable[[int, int], None] = lambda number, of: None
    record: Callable[[str, str, int], None] = lambda direction, party, size_bytes: None

    @property
    def block(self) -> int:
        """Points of a block."""
        return min(BLOCK, 1 << (self.longest - 1).bit_length())

    @property
    def n_blocks(self) -> int:
        """Blocks of every list."""
        return -(-self.longest // self.block)

    def swap(
        self,
        outgoing: Sequence[Any],
        to: Collection[int],
        source: int | None,
        prepare: Callable[[list[Any]], list[bytes]] = list,
        change: Callable[[list[bytes]], list[bytes]] = list,
    ) -> list[bytes]:
        """Take one step.

        Args:
            outgoing: what to send to each party in ``to``.
            source: the party that sends a list to this one, if any.
            prepare: turns what goes out into points, block by block just before it is sent.
            change: what to do with received points, block by block. So no party is silent for longer than a block.

        Returns:
            The changed points that were received, in order; none if there is no source.

        Raises:
            ProtocolError: parts that nobody should have sent, or that are not blocks of different points.
        """
        block, n_blocks = self.block, self.n_blocks
        received: list[bytes] = []
        seen: set[bytes] = set()
        for number in range(n_blocks):
            own = prepare(list(outgoing[number * block : (number + 1) * block]))
            plain = self.exchange(pack_block(own, block) if to else b"", to, source)
            points = [] if source is None else unpack_block(plain, block)
            seen.update(points)
            received += change(points)
            if len(seen) != len(received) or len(received) > self.longest:
                raise ProtocolError("a party sent a list with repeated points, or a longer one than it may be")
            self.on_block(number + 1, n_blocks)
        return received

    def exchange(self, part: bytes, to: Collection[int], source: int | None) -> bytes:
        """Send one part to some parties; return that of ``source``, empty without one. Raises: ProtocolError."""
        sites, ranks = self.channel.sites, range(self.channel.world)
        for rank in to:
            self.record("sent", sites[rank], len(part))
        parts = [self.session.seal_for(rank, part, self.purpose) if rank in to else b"" for rank in ranks]
        received = self.channel.route(Kind.CONVERSATION, parts)
        for rank in ranks:
            if bool(received[rank]) != (rank == source):
                raise ProtocolError(f"{sites[rank]} is not in step with the alignment")
        if source is None:
            return b""
        plain = self.session.open_of(source, received[source], self.purpose)
        self.record("received", sites[source], len(plain))
        return plain


def block_bytes(size: int) -> int:
    """Return the length of a block of up to ``size`` points."""
    return _COUNT.size + size * POINT_BYTES


def pack_block(points: Sequence[bytes], size: int) -> bytes:
    """Return up to ``size`` points as bytes whose length depends on ``size`` alone."""
    content = _COUNT.pack(len(points)) + b"".join(points)
    return content.ljust(block_bytes(size), b"\0")


def unpack_block(data: bytes, size: int) -> list[bytes]:
    """Return the points of a block.

    Raises:
        ProtocolError: not exactly what ``pack_block`` makes.
    """
    if len(data) != block_bytes(size):
        raise ProtocolError("a block of the alignment has another size than agreed")
    n_points = _COUNT.unpack_from(data)[0]
    end = _COUNT.size + n_points * POINT_BYTES
    if n_points > size or data[end:].strip(b"\0"):
        raise ProtocolError("a block of the alignment holds something after its points")
    return [data[start : start + POINT_BYTES] for start in range(_COUNT.size, end, POINT_BYTES)]


def shuffled(values: Sequence[Any], randomness: RandomSource = OS_RANDOMNESS) -> list[Any]:
    """Return the values in a secret random order, so that their places say nothing about rows.

    Sorting by 128 random bits each: uniform but for a collision, whose chance is n^2 / 2^129.
    """
    high, low = random_uint64(len(values), randomness), random_uint64(len(values), randomness)
    return [values[place] for place in np.lexsort((low, high)).tolist()]


# Proofs on the way back: each party shows, block by block, that it took off the key that it committed to.
#
# The common points C go round once for each party. A block that has been with parties a, a + 1, ..., travels with the
# blocks after each of them and a proof for each (``he_processors.curve.equal_logarithms``). Whoever gets it checks the
# whole chain from its own copy of C before it takes off its key: a list in the place of C would have it unblind what
# others choose. Proofs hold for one place of one session: its domain, all commitments, prover, first party, block.


REFUSED = "a party's proof that it took off the key that it committed to, and no other, does not hold"


@dataclass(frozen=True, slots=True)
class Proofs:
    """Proves and checks the steps of one intersection.

    Attributes:
        domain: of the intersection; it is keyed by the session.
        commitments: to the parties' keys, by rank.
    """

    domain: bytes
    commitments: tuple[bytes, ...]
    rank: int
    key: BlindingKey | SpreadKey
    randomness: RandomSource

    def extend(self, chain: bytes, first: int, number: int, blinded: list[bytes], size: int) -> bytes:
        """Take this party's key off a block.

        Args:
            chain: what came with the block and has been checked; empty at the first party.
            first: rank of the first party of the chain.
            number: of the block, from 0.
            blinded: its points.
            size: of blocks.

        Returns:
            The chain with the unblinded block and its proof.
        """
        blinded = self.key.decoded(blinded)
        unblinded = self.key.unblind(blinded)
        transcript = self._transcript(self.rank, first, number, blinded, unblinded)
        total = self.key.weigh([blinded], draw_weights(transcript, len(blinded)))[0]
        return chain + pack_block(unblinded, size) + self.key.prove(transcript, total, self.randomness)

    def check(self, chain: bytes, first: int, number: int, common: list[bytes], size: int, n_links: int) -> list[bytes]:
        """Check every step of a chain, from the block of the common list on.

        Returns:
            The block after the last step.

        Raises:
            ProtocolError: it is malformed, or a proof does not hold.
        """
        block = self.key.decoded(common)
        for step, (points, proof) in enumerate(unpack_chain(chain, size, n_links)):
            if len(points) != len(common):
                raise ProtocolError("the common ids changed in number on their way back")
            unblinded, prover = self.key.decoded(points), (first + step) % len(self.commitments)
            transcript = self._transcript(prover, first, number, block, unblinded)
            weights = draw_weights(transcript, len(common))
            product, base = self.key.weigh([block, unblinded], weights)
            if not holds(open_curve(), transcript, self.commitments[prover], base, product, proof):
                raise ProtocolError(REFUSED)
            block = unblinded
        return block

    def _transcript(
        self, prover: int, first: int, number: int, blinded: Sequence[bytes], unblinded: Sequence[bytes]
    ) -> bytes:
        about = (self.domain, b"".join(self.commitments), prover, first, number)
        return hashlib.sha512(
            encode_fields(DOMAIN, "alignment, key taken off", *about, b"".join(blinded), b"".join(unblinded))
        ).digest()


def unpack_chain(data: bytes, size: int, n_links: int) -> list[tuple[list[bytes], bytes]]:
    """Return the block and the proof of each step. Raises: ProtocolError, if they are malformed."""
    link = block_bytes(size) + PROOF_BYTES
    if len(data) != n_links * link:
        raise ProtocolError("a block of the alignment has another size than agreed")
    links = [data[start : start + link] for start in range(0, len(data), link)]
    return [(unpack_block(one[:-PROOF_BYTES], size), one[-PROOF_BYTES:]) for one in links]


# The intersection of several parties' sets, by commutative blinding.
#
# Each party has a secret key k_i, and tells all others k_i G before any list leaves: it commits to it. With m parties
# in order of rank, and K for all keys together:
#
# 1. **Round.** Every set goes once round: its owner blinds and shuffles it, and so does each next party. After m - 1
# steps rank i holds the set of rank i + 1 under K, in an order that nobody knows. 2. **Compare.** Rank 0 hands its list
# to rank 1, which keeps the points that its own list has too, and hands those on, up to rank m - 1, which is left with
# the points of the ids that all parties have. 3. **Return.** These points go to all parties, each of which refuses any
# that the set that it holds lacks: else whoever calls points common could have others take their keys off any set. For
# each party j a copy goes round the others, who take their keys off, in the order of the list, and prove it
# (``Proofs``): so nobody can have a key taken off other points, not even the parties before and after that one
# together. Party j gets k_j H(id) and finds its own rows.
#
# What each party learns beyond the common ids (everyone honest but curious, see ``BlindingKey``):
#
# * all parties: the sizes of all sets; * ranks r and r + 1, for r from 1 to m - 2: how many ids ranks 1 to r + 1 have
# in common, but not which. With three parties ranks 1 and 2 learn how many ids they share with each other; with two
# nobody learns more than the above; * the server: the largest set's size rounded up (to a power of two up to 65,536, to
# a multiple of that beyond), order and times of messages; from the times, roughly, the sizes.
#
# A pairwise protocol would show one party all pairwise intersections, id by id. Parties that pool their keys and sets
# learn what they have in common with each other anyway, and sizes of intersections with the others' sets; single ids of
# an honest party outside the intersection stay hidden as long as its own key does.
#
# A party that departs from this, or all but one together, learn more, and no more than this: the round blinds what they
# send, as many points as all others' sets have ids, so that each lets them test one id of their choice against the
# honest set. Shuffling does not hide from them which of these it was, and whoever compares lists need not keep to
# ``least``. What they do not ask for by one of these points stays hidden, even where a dictionary holds all ids.
#
# Cost: each id is blinded once by each party, each common id unblinded once for each party: with n ids each and c
# common ones m n + (m - 1) c curve multiplications a party; proofs add some hundredths of one for each common id and
# link that a party checks, of which there are m (m - 1) / 2.
#
# Reference: the two-party case is the protocol of Meadows (1986) and Huberman, Franklin, Hogg (1999).


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
