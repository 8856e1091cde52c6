"""What may befall a job, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

from he_processors.field61 import MODULUS
from nvflare_plugins.flare.timeouts import SILENCE_LIMIT_S
from nvflare_plugins.flare.transport import TOPIC_FRAME, TOPIC_REPLY
from nvflare_plugins.wire.additions import WordSum
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.envelope import Frame, Operation
from tests.simulation.world import SERVER, Delivery, Machines, World

SURVIVED_S = 45.0
"""A pause that every job survives: silence ends it after SILENCE_LIMIT_S, of which beats and questions take a part."""


@dataclass
class Lie:
    """A server that cheats in one sum, and tells all sites the same.

    Attributes:
        which: of the sums, or of the contributions to them.
        told: it came to that.
    """

    which: int
    how: str
    told: bool = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the server of this process cheat."""
        add, results = WordSum.add, Aggregator._results
        counts, earlier = [0, 0], []

        def added(total: WordSum, payload: bytes) -> None:
            counts[0] += total._n_values < total._total.size  # with tags: one that the server is not trusted with
            is_chosen = counts[0] == self.which and self.how in ("left out", "added twice") and not self.told
            self.told = self.told or is_chosen
            for _ in range({"left out": 0, "added twice": 2}[self.how] if is_chosen else 1):
                add(total, payload)

        def answered(server: Aggregator, first: Frame, exchange: object) -> list[bytes]:
            payloads = list(results(server, first, exchange))
            if first.operation is not Operation.SUM or not first.tail or self.told:
                return payloads
            counts[1] += 1
            words = np.frombuffer(bytes(payloads[0]), dtype="<u8").copy()
            before, earlier[:] = [one for one in earlier if one.size == words.size], [*earlier, words.copy()]
            if counts[1] < self.which or self.how in ("left out", "added twice"):
                return payloads
            if self.how == "off by a step":
                words[self.which % words.size] ^= 1
            elif self.how == "scaled":
                words *= np.uint64(2)
                words[first.n_values :] %= np.uint64(MODULUS)
            elif before:
                words = before[0]
            self.told = not np.array_equal(words, earlier[-1])
            return [words.tobytes()]

        with patch.object(WordSum, "add", added), patch.object(Aggregator, "_results", answered):
            yield


@dataclass
class Plan:
    """The faults of one run.

    Attributes:
        words: what happens, for people.
        is_harmless: the job must end as if nothing had happened.
        killed: machines that die, if they live so long.
        aborted_s: when an operator aborts the job.
        is_tampered: bytes are changed on their way, which only a hostile server or relay does.
    """

    seed: int
    words: list[str] = field(default_factory=list)
    is_harmless: bool = True
    is_tampered: bool = False
    killed: str | None = None
    aborted_s: float | None = None
    lost: float = 0.0
    doubled: float = 0.0
    longest_s: float = 0.05
    outages: list[tuple[str, float, float]] = field(default_factory=list)
    machines: Machines = field(default_factory=Machines)
    lie: Lie | None = None
    tampers: tuple[str, str, str, int, str] | None = None  # origin, target, topic, which of these, how

    def __post_init__(self) -> None:
        self._random = random.Random(f"network {self.seed}")
        self._n_seen = 0
        self._earlier: list[bytes] = []

    def __str__(self) -> str:
        return "; ".join(self.words) or "nothing happens"

    def fate(self, sent: Delivery) -> list[tuple[float, bytes | None]]:
        """Decide what becomes of a message."""
        payload = self._tampered(sent)
        for owner, start, end in self.outages:
            if owner in (sent.origin, sent.target) and start <= sent.seconds < end:
                return []
        copies = 1 + (self._random.random() < self.doubled) - (self._random.random() < self.lost)
        return [(self._random.uniform(0.0005, self.longest_s), payload) for _ in range(copies)]

    def _tampered(self, sent: Delivery) -> bytes | None:
        if self.tampers is None or sent.payload is None:
            return sent.payload
        origin, target, topic, which, how = self.tampers
        if (sent.origin, sent.target, sent.topic) != (origin, target, topic):
            return sent.payload
        self._n_seen += 1
        earlier, self._earlier = self._earlier, [*self._earlier, sent.payload]
        if self._n_seen != which or not sent.payload:
            return sent.payload
        if how == "replayed" and earlier:
            return self._random.choice(earlier)
        if how == "cut":
            return sent.payload[: self._random.randrange(len(sent.payload))]
        place = self._random.randrange(len(sent.payload))
        changed = bytes([sent.payload[place] ^ (1 << self._random.randrange(8))])
        return sent.payload[:place] + changed + sent.payload[place + 1 :]


def plan_of(seed: int, sites: Sequence[str]) -> Plan:
    """Draw what befalls a job of these sites."""
    dice = random.Random(f"plan {seed}")
    plan = Plan(seed)
    if dice.random() < 0.6:
        _bad_network(plan, dice)
    choice = dice.random()
    if choice < 0.25:
        _pause(plan, dice, sites)
    elif choice < 0.42:
        _death(plan, dice, sites)
    elif choice < 0.52:
        _full_disk(plan, dice, sites)
    elif choice < 0.60:
        _long_silence(plan, dice, sites)
    elif choice < 0.67:
        _operator(plan, dice)
    elif choice < 0.82:
        _tampering(plan, dice, sites)
    elif choice < 0.97:
        _lie(plan, dice)
    return plan


def _bad_network(plan: Plan, dice: random.Random) -> None:
    plan.lost, plan.doubled = dice.choice([(0.0, 0.3), (0.05, 0.1), (0.15, 0.0), (0.25, 0.25)])
    plan.longest_s = dice.choice([0.05, 1.0, 6.0])
    plan.words.append(f"{plan.lost:.0%} lost, {plan.doubled:.0%} doubled, up to {plan.longest_s:g} s on the way")


def _pause(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    owner, start, seconds = dice.choice([*sites, SERVER]), dice.uniform(0, 3), dice.uniform(5, SURVIVED_S)
    if dice.random() < 0.5:
        plan.outages.append((owner, start, start + seconds))
        plan.words.append(f"{owner} is cut off from {start:.2f} s for {seconds:.0f} s")
    else:
        plan.machines.events.append((start, lambda world: world.scheduler.stall(owner, seconds)))
        plan.words.append(f"{owner} stands still from {start:.2f} s for {seconds:.0f} s")


def _death(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    owner = dice.choice([*sites, *sites, SERVER])
    plan.killed = owner
    if dice.random() < 0.5:
        moment = dice.uniform(0, 1.5) * (1 + 20 * plan.lost)
        plan.machines.events.append((moment, lambda world: world.kill(owner)))
        plan.words.append(f"{owner} dies at {moment:.3f} s")
    else:
        number = dice.randrange(1, 80)
        plan.machines.disk = lambda who, count: "die" if (who, count) == (owner, number) else None
        plan.words.append(f"{owner} dies at its disk's change {number}")


def _full_disk(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    owner, number = dice.choice([*sites, *sites, SERVER]), dice.randrange(1, 80)
    plan.machines.disk = lambda who, count: "full" if who == owner and count >= number else None
    plan.words.append(f"the disk of {owner} is full from its change {number} on")


def _long_silence(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    owner, start, seconds = dice.choice([*sites, SERVER]), dice.uniform(0, 2), dice.uniform(2, 5) * SILENCE_LIMIT_S
    plan.outages.append((owner, start, start + seconds))
    plan.words.append(f"{owner} is cut off from {start:.2f} s for {seconds:.0f} s")


def _operator(plan: Plan, dice: random.Random) -> None:
    plan.is_harmless = False
    moment = dice.uniform(0, 2) * (1 + 20 * plan.lost)

    def abort(world: World) -> None:
        world.signal.trigger(True)

    plan.aborted_s = moment
    plan.machines.events.append((moment, abort))
    plan.words.append(f"an operator aborts at {moment:.3f} s")


def _tampering(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless, plan.is_tampered = False, True
    site, how, which = dice.choice(sites), dice.choice(["changed by a bit", "cut", "replayed"]), dice.randrange(1, 60)
    ends = dice.choice([(site, SERVER, TOPIC_FRAME), (SERVER, site, TOPIC_REPLY)])
    plan.tampers = (*ends, which, how)
    plan.words.append(f"{ends[2]} {which} from {ends[0]} to {ends[1]} is {how}")


def _lie(plan: Plan, dice: random.Random) -> None:
    plan.is_harmless, plan.is_tampered = False, True
    how = dice.choice(["left out", "added twice", "off by a step", "scaled", "replayed"])
    plan.lie = Lie(dice.randrange(1, 12), how)
    plan.words.append(f"the server cheats: {how}, at {plan.lie.which}")
