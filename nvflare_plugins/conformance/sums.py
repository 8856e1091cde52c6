"""The contract of a profile of horizontal sums.

The author of one subclasses it in a test file:

    from acme_veil import PROFILE
    from nvflare_plugins.conformance.sums import SumProfileContract

    class TestAcmeMasks(SumProfileContract):
        profile = PROFILE

and runs pytest. Real sessions are opened between threads, and the server's own code adds. What the contract cannot
tell is whether the statement is true: that masks are unpredictable, and that keys are used for nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, VeilBoostError
from he_processors.masks import MessageLabel
from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.pooled.processors import BUILT_IN, CheckedSums, SumProfile, check_plugin, open_processor
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Codec, Kind, Operation, Phase, TrainingStep, unpack
from nvflare_plugins.wire.profiles import WIDE_CAPACITY_BITS, SumProcessor

TIMEOUT_S = 120.0
_ATTEMPT = bytes(16)
_N = 4096  # words whose bits are counted
_SIGMAS = 8.0  # a fair coin is farther off once in 10^15 tests

Kinds = tuple[Kind, ...]
_KINDS: Kinds = (Kind.ROW_COUNT, Kind.HISTOGRAM, Kind.METRIC, Kind.LEAF_ROWS)


def require(holds: bool, what: str) -> None:  # noqa: FBT001 - what is checked is its subject
    """Fail a test of the contract. Raises: AssertionError."""
    if not holds:
        raise AssertionError(what)


class _Wire:
    """Hands a site's frames to the server of the same process, and keeps what it saw."""

    def __init__(self, server: Aggregator, site: str) -> None:
        self._server, self._site = server, site
        self.sent: list[bytes] = []
        self.received: list[bytes] = []

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for the answer."""
        answered = threading.Event()
        answers: list[bytes] = []
        self.sent.append(frame)

        def take(answer: bytes) -> None:
            answers.append(answer)
            answered.set()

        self._server.submit(self._site, frame, take)
        if not answered.wait(timeout_s):
            raise JobAborted("the server of the contract did not answer")
        self.received.append(answers[0])
        return answers[0]

    def abort(self, reason: str) -> None:
        """End the attempt for all sites."""
        self._server.abort(reason)

    def sums(self) -> list[tuple[bytes, bytes]]:
        """Return the payloads of all sums: what this site sent, and what the server answered."""
        pairs = [(unpack(sent), unpack(received)) for sent, received in zip(self.sent, self.received, strict=True)]
        return [(bytes(a.payload), bytes(b.payload)) for a, b in pairs if a.operation is Operation.SUM]


class Site:
    """One site of a federation in threads, its session open."""

    def __init__(self, profile: SumProfile, channel: Channel, session: Session, wire: _Wire) -> None:
        self.channel, self.session, self.wire = channel, session, wire
        self.processor: SumProcessor = open_processor(profile, channel, session)
        channel.moment = TrainingStep(Phase.UPDATE, 0)

    def label(self, n_values: int, kind: Kind = Kind.HISTOGRAM) -> MessageLabel:
        """Return the label of the next exchange."""
        return MessageLabel(self.channel.counter, kind.name, str(self.channel.moment), n_values)

    def sum(self, values: NDArray[np.int64], kind: Kind = Kind.HISTOGRAM, *, wide: bool = False) -> NDArray[np.int64]:
        """Return the sum over all sites, of which each calls this."""
        label = self.label(values.size, kind)
        payload = self.processor.protect(values, label, wide=wide)
        answer = self.channel.sum(kind, self.processor.codec, payload, values.size)
        return self.processor.reveal(answer, label, wide=wide)


def federate(profile: SumProfile, n_sites: int, part: Callable[[Site], Any]) -> tuple[list[Any], list[_Wire]]:
    """Let each of so many sites play its part. Returns: what each came to, and its wire; both in rank order.

    Raises:
        Exception: the first that a part ended with.
    """
    sites = tuple(f"site-{n + 1:03d}" for n in range(n_sites))
    server = Aggregator(sites, _ATTEMPT, TIMEOUT_S)
    server.add_by(profile.add)
    wires = {site: _Wire(server, site) for site in sites}
    results: dict[str, Any] = {}
    errors: list[BaseException] = []

    def take_part(site: str) -> None:
        try:
            policy = SitePolicy.from_dict({"unsigned_sessions": True}, workspace=Path(), site=site)
            channel = Channel(site, sites, "contract", _ATTEMPT, wires[site], TIMEOUT_S)
            session = open_session(channel, Identity.unsigned(site), policy, "horizontal", bytes(32))
            try:
                results[site] = part(Site(profile, channel, session, wires[site]))
            finally:
                session.close()
        except BaseException as error:  # the edge of the thread: the caller gets the first
            errors.append(error)
            server.abort(f"{site}: {type(error).__name__}")

    threads = [threading.Thread(target=take_part, args=(site,)) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[site] for site in sites], [wires[site] for site in sites]


def _sum_twice(values: NDArray[np.int64], site: Site) -> None:
    for _ in range(2):
        site.sum(values)


def _difference(one: bytes, other: bytes) -> bytes:
    difference: NDArray[np.uint64] = np.frombuffer(one, np.uint64) - np.frombuffer(other, np.uint64)
    return difference.tobytes()


class SumProfileContract:
    """What every profile must satisfy but ``plain``, which protects nothing.

    Attributes:
        profile: what is tested.
        n_sites: numbers of sites to try.
    """

    profile: ClassVar[SumProfile]
    n_sites: ClassVar[tuple[int, ...]] = (2, 3, 5)

    def _numbers(self, seed: int, n_values: int, bits: int, n_sites: int) -> NDArray[np.int64]:
        """Return one vector per site whose sums stay within the capacity. Shapes: result: int64[n_sites, n_values]."""
        most = (1 << bits) // n_sites
        return np.random.default_rng(seed).integers(-most, most, size=(n_sites, n_values), endpoint=True)

    def _check_sums(self, values: NDArray[np.int64], *, wide: bool = False, kinds: Kinds = (Kind.HISTOGRAM,)) -> None:
        sums, _ = federate(
            self.profile,
            len(values),
            lambda site: [site.sum(values[site.channel.rank], kind, wide=wide) for kind in kinds],
        )
        expected = values.sum(axis=0)
        for of_site in sums:
            for total in of_site:
                require(
                    total.dtype == np.int64 and np.array_equal(total, expected),
                    f"the sum of {values.shape[1]} {'wide ' if wide else ''}values over {len(values)} sites is wrong",
                )

    def test_it_says_what_it_is(self) -> None:
        """Name, codec, limits and statement are as a site wants them."""
        if self.profile is not BUILT_IN.get(self.profile.name):
            try:
                check_plugin(self.profile, self.profile.name)
            except ConfigurationError as error:
                raise AssertionError(str(error)) from None

    def test_sums_are_exact(self) -> None:
        """For any number of sites and values, in every kind of message, again and again."""
        for n_sites in self.n_sites:
            for n_values in (1, 2, 7, 300):
                values = self._numbers(n_sites, n_values, self.profile.capacity_bits, n_sites)
                self._check_sums(values, kinds=_KINDS)

    def test_sums_are_exact_up_to_the_capacity(self) -> None:
        """The largest sums that it promises, of either sign, and zeros."""
        for n_sites in self.n_sites:
            most = (1 << self.profile.capacity_bits) // n_sites
            self._check_sums(np.tile(np.array([most, -most, 0, 1, -1, most - 1]), (n_sites, 1)))

    def test_wide_sums_are_exact(self) -> None:
        """Wide messages reach to 2^59 whatever the capacity is."""
        for n_sites in self.n_sites:
            self._check_sums(self._numbers(n_sites, 50, WIDE_CAPACITY_BITS, n_sites), wide=True)

    def test_a_long_message_is_summed(self) -> None:
        """Longer than any piece in which frames travel."""
        self._check_sums(self._numbers(1, 70_001, self.profile.capacity_bits, 3))

    def test_the_server_reads_neither_contribution_nor_sum(self) -> None:
        """Of equal numbers at all sites nothing is to be seen, neither in what they send nor in what is added."""
        if self.profile.codec not in (Codec.PLUGIN, Codec.MASKED):
            return  # ciphertexts: their words have a form of their own
        for number in (0, 1, -1):
            _, wires = federate(self.profile, 3, partial(_sum_twice, np.full(_N, number, dtype=np.int64)))
            first, second = wires[0].sums()
            for wire in wires:
                for sent, _ in wire.sums():
                    self._check_uniform(sent, "what a site sends")
            self._check_uniform(first[1], "the sum that the server computes")
            for one, other in zip(first, second, strict=True):
                self._check_uniform(_difference(one, other), "the difference of two messages with equal values")

    @staticmethod
    def _check_uniform(payload: bytes, what: str) -> None:
        bits = np.unpackbits(np.frombuffer(payload, np.uint8)).reshape(-1, 64)
        shares = bits.mean(axis=0)
        worst = float(np.abs(shares - 0.5).max() * 2 * np.sqrt(len(bits)))
        require(worst < _SIGMAS, f"{what} is not uniform: one of its 64 bits is off by {worst:.0f} standard deviations")
        distinct = len(set(np.frombuffer(payload, "<u8").tolist()))
        require(distinct == len(bits), f"{what} repeats words")

    def test_no_two_sites_and_no_two_attempts_share_their_masks(self) -> None:
        """Else the difference of two messages would be that of their values."""
        if self.profile.codec not in (Codec.PLUGIN, Codec.MASKED):
            return
        zeros = np.zeros(_N, dtype=np.int64)
        seen: list[bytes] = []
        for _ in range(2):
            _, wires = federate(self.profile, 3, lambda site: site.sum(zeros))
            seen += [sent for wire in wires for sent, _ in wire.sums()]
        for place, one in enumerate(seen):
            for other in seen[:place]:
                self._check_uniform(_difference(one, other), "the difference of what two sites or attempts send")

    def test_a_message_is_protected_once(self) -> None:
        """A second protection under one label would reveal the difference of two messages: it must be refused."""

        def protect_twice(site: Site) -> bool:
            label = site.label(3)
            site.processor.protect(np.arange(3), label)
            try:
                again = site.processor.protect(np.arange(3) + 1, label)
            except VeilBoostError:
                return True
            return self.profile.codec in (Codec.BFV, Codec.CKKS) and bool(again)  # fresh randomness each time

        refused, _ = federate(self.profile, 2, protect_twice)
        require(all(refused), "a second message under one label was protected: it must be refused by a VeilBoostError")

    def test_malformed_sums_are_refused(self) -> None:
        """Bytes that no sum has end the job, and do not become numbers."""

        def read(site: Site) -> list[int]:
            label = site.label(4)
            payload = site.processor.protect(np.arange(4), label)
            accepted = []
            for broken in (b"", payload[:-1], payload + b"\0", payload[:-8]):
                try:
                    site.processor.reveal(broken, label)
                except VeilBoostError:
                    continue
                accepted.append(len(broken))
            return accepted

        accepted, _ = federate(self.profile, 2, read)
        require(not any(accepted), "bytes of a wrong length were read as a sum: raise a ProtocolError")

    def test_nothing_is_protected_after_the_session(self) -> None:
        """Keys die with their attempt."""
        if self.profile.codec in (Codec.BFV, Codec.CKKS):
            return  # fresh randomness each time, under a public key
        sites, _ = federate(self.profile, 2, lambda site: (site, site.sum(np.arange(3)))[0])
        for site in sites:
            try:
                site.processor.protect(np.arange(3), site.label(3))
            except VeilBoostError:
                continue
            raise AssertionError(
                "a message was protected after the session's end: take keys from the context each time"
            )

    def test_its_messages_are_words(self) -> None:
        """Of n values a plugin makes n words of 8 bytes, or bytes that its ``add`` adds, in both sizes of message."""
        if self.profile.codec not in (Codec.PLUGIN, Codec.PLUGIN_BYTES):
            return

        def protect(site: Site) -> bool:
            if not isinstance(site.processor, CheckedSums):
                return False
            for wide in (False, True):
                site.sum(np.arange(5), wide=wide)  # CheckedSums refuses what is no such message
            return True

        checked, _ = federate(self.profile, 2, protect)
        require(all(checked), "the processor of a plugin is not checked")
