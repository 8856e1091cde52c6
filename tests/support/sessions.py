"""Sessions between threads: a channel in memory, certificates as FLARE issues them, a server that may tamper."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from nvflare.lighter.utils import Identity as Subject
from nvflare.lighter.utils import generate_cert

from he_processors.errors import VeilBoostError
from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.envelope import Codec, Kind, pack_list, unpack_list
from tests.support.threads import in_threads

KIND, BINDING = "horizontal", b"b" * 32

Tamper = Callable[[int, int, list[bytes]], list[bytes]]
"""(exchange number, rank of the reader, contributions of all sites) -> what that site is given."""


@cache
def key_number(n: int) -> rsa.RSAPrivateKey:
    """Keys take long to make: one per number and test run."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@dataclass(frozen=True)
class Authority:
    """A project's root."""

    number: int = 100
    name: str = "project"

    @property
    def root(self) -> x509.Certificate:
        return _root(self.number, self.name)

    def issue(self, site: str, key: int, *, role: str | None = None, days: tuple[int, int] = (-1, 300), **more):
        """Issue a certificate with NVFlare's own function; ``more`` goes to it."""
        now = datetime.now(UTC)
        return generate_cert(
            Subject(site, "org", role),
            Subject(self.name),
            key_number(self.number),
            key_number(key).public_key(),
            not_valid_before=now + timedelta(days=days[0]),
            not_valid_after=now + timedelta(days=days[1]),
            **more,
        )

    def identity(self, site: str, key: int, certificate: x509.Certificate | None = None) -> Identity:
        certificate = certificate or self.issue(site, key)
        return Identity(site, (certificate,), self.root, frozenset({"server1"}), key_number(key))


@cache
def _root(number: int, name: str) -> x509.Certificate:
    now = datetime.now(UTC) - timedelta(days=2)
    return generate_cert(
        Subject(name),
        Subject(name),
        key_number(number),
        key_number(number).public_key(),
        ca=True,
        not_valid_before=now,
        not_valid_after=now + timedelta(days=360),
    )


@dataclass
class Policy:
    unsigned_sessions: bool = False
    unsigned_peers: bool = False
    pinned_fingerprints: Mapping[str, str] = field(default_factory=dict)
    least_protocol: Mapping[str, int] = field(default_factory=dict)

    def fingerprint(self) -> str:
        return sha256(repr(self).encode()).hexdigest()


class Relay:
    """The server: meets the sites exchange by exchange, keeps what it saw, may change what it hands on."""

    def __init__(self, world: int, tamper: Tamper | None = None):
        self.seen: list[list[bytes]] = []
        self._tamper = tamper
        self._world = world
        self._slots: dict[int, dict[int, bytes]] = {}
        self._stopped = False
        self._changed = threading.Condition()

    def meet(self, number: int, rank: int, payload: bytes) -> list[bytes]:
        """Wait for all sites. An exchange to which all have contributed ends well even if a site then gives up."""
        with self._changed:
            slots = self._slots.setdefault(number, {})
            slots[rank] = payload
            if len(slots) == self._world:
                self.seen.append([slots[r] for r in range(self._world)])
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(slots) == self._world or self._stopped, timeout=60):
                raise JobAborted("a site did not come")
            if len(slots) < self._world:
                raise JobAborted("another site gave up")
            replies = list(self.seen[number])
        return self._tamper(number, rank, replies) if self._tamper else replies

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class MemoryChannel:
    """The part of a channel that sessions use."""

    def __init__(self, relay: Relay, site: str, sites: Sequence[str], job_id: str = "job", attempt: str = "00" * 16):
        self.site, self.sites = site, tuple(sites)
        self.rank, self.world = self.sites.index(site), len(sites)
        self.job_id, self.attempt = job_id, attempt
        self.sent: list[tuple[Kind, Codec, bytes]] = []
        self._relay = relay

    def gather(self, kind: Kind, payload: bytes, codec: Codec = Codec.PUBLIC) -> list[bytes]:
        number = len(self.sent)
        self.sent.append((kind, codec, payload))
        return self._relay.meet(number, self.rank, payload)

    def broadcast(self, kind: Kind, payload: bytes | None, codec: Codec = Codec.SEALED) -> bytes:
        return self.gather(kind, payload or b"", codec)[0]

    def route(self, kind: Kind, parts: Sequence[bytes]) -> list[bytes]:
        received = self.gather(kind, pack_list(list(parts)), Codec.SEALED)
        return [unpack_list(message, self.world)[self.rank] for message in received]


@dataclass
class Outcome:
    """What happened at the sites, by rank: a result or the error that ended it."""

    results: list
    channels: list[MemoryChannel]
    relay: Relay

    @property
    def sessions(self) -> list[Session]:
        for result in self.results:
            if isinstance(result, BaseException):
                raise result
        return self.results

    @property
    def errors(self) -> list[BaseException | None]:
        """First causes only: None for sites that merely heard that another one gave up."""
        return [r if isinstance(r, VeilBoostError) and not isinstance(r, JobAborted) else None for r in self.results]


def names(world: int) -> list[str]:
    return [f"site-{i + 1}" for i in range(world)]


def run_at_all(relay: Relay, tasks: Sequence[Callable[[], object]]) -> list:
    """Run one task per site in threads; an error of one site releases the others."""
    results: list = [None] * len(tasks)

    def run(rank: int) -> None:
        try:
            results[rank] = tasks[rank]()
        except Exception as error:
            results[rank] = error
            relay.stop()

    in_threads(run, range(len(tasks)), 100)
    return results


def open_all(
    identities: Sequence[Identity],
    policies: Sequence[Policy] | None = None,
    *,
    tamper: Tamper | None = None,
    sites: Sequence[str] | None = None,
    bindings: Sequence[bytes] | None = None,
    attempts: Sequence[str] | None = None,
    kinds: Sequence[str] | None = None,
) -> Outcome:
    """Open a session at all sites at once. Args: kinds: of which each site speaks the protocols."""
    world = len(identities)
    sites = sites or names(world)
    policies = policies or [Policy() for _ in range(world)]
    relay = Relay(world, tamper)
    channels = [
        MemoryChannel(relay, site, sites, attempt=(attempts or ["00" * 16] * world)[rank])
        for rank, site in enumerate(sites)
    ]
    tasks = [
        lambda r=rank, kind=kind, binding=binding: open_session(channels[r], identities[r], policies[r], kind, binding)
        for rank, kind, binding in zip(
            range(world), kinds or [KIND] * world, bindings or [BINDING] * world, strict=True
        )
    ]
    return Outcome(run_at_all(relay, tasks), channels, relay)


def signed_sites(world: int = 3) -> list[Identity]:
    authority = Authority()
    return [authority.identity(site, rank) for rank, site in enumerate(names(world))]


def unsigned_sites(world: int = 3) -> list[Identity]:
    return [Identity.unsigned(site) for site in names(world)]
