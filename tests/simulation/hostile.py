"""Servers and sites that cheat: what they may do, drawn by a plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from he_processors.errors import ProtocolError
from he_processors.field61 import MODULUS
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.transport import TOPIC_REPLY
from nvflare_plugins.kinds.horizontal import site as horizontal_site
from nvflare_plugins.wire.aggregation import Aggregator, WordSum
from nvflare_plugins.wire.envelope import Frame, FrameType, Operation, pack_list, unpack, unpack_list

WHILE_ADDING = {"left out": 0, "added twice": 2}
SUMS = (*WHILE_ADDING, "off by a step", "scaled", "replayed")
PARTS = ("a part is changed", "two parts change places", "a part is an earlier one")
CHANGES = ("changed by a bit", "cut", "replayed", "made longer", "garbage", "of another job")
FORGERIES = ("another rank", "another counter", "another attempt", "another size")
TERMS = ("another number", "another attempt", "a site less", "a field less", "another server")
REPORTS = ("another result", "changed evidence", "no report", "a summary that is none", "a failure")


@dataclass
class Lie:
    """A server that cheats once, in a sum or in what it hands on, and tells all sites the same or one site alone.

    Attributes:
        which: of the sums, of the contributions to them, or of what is handed on.
        how: one of SUMS and PARTS.
        victim: the only rank that is told; None for all.
        told: it came to that.
    """

    which: int
    how: str
    victim: int | None = None
    told: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum that is changed: sites must say so."""
        return self.how in SUMS

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the server of this process cheat."""
        add, results = WordSum.add, Aggregator._results
        n_added, n_sums, n_parts, sums, parts = 0, 0, 0, [], []

        def added(total: WordSum, payload: bytes) -> None:
            nonlocal n_added
            n_added += total._residues.size > 0  # with tags: one that the server is not trusted with
            is_chosen = n_added == self.which and self.how in WHILE_ADDING and not self.told
            self.told = self.told or is_chosen
            for _ in range(WHILE_ADDING[self.how] if is_chosen else 1):
                add(total, payload)

        def answered(server: Aggregator, first: Frame, exchange: object) -> Sequence[bytes]:
            nonlocal n_sums, n_parts
            payloads = list(results(server, first, exchange))
            if self.told or self.how in WHILE_ADDING:
                return payloads
            if first.operation is Operation.SUM and first.tail and self.is_sum:
                n_sums += 1
                true = np.frombuffer(bytes(payloads[0]), dtype="<u8")
                before = [one for one in sums if one.size == true.size]
                sums.append(true.copy())
                if n_sums >= self.which:
                    return self._told_to(server, payloads, self._other_sum(true.copy(), before, first).tobytes())
            if first.operation is Operation.GATHER and not self.is_sum:
                n_parts += 1
                found = unpack_list(bytes(payloads[0]), len(server._sites))
                before, parts[:] = list(parts), [*parts, found]
                if n_parts >= self.which:
                    return self._told_to(server, payloads, pack_list(self._other_parts(found, before)))
            return payloads

        with patch.object(WordSum, "add", added), patch.object(Aggregator, "_results", answered):
            yield

    def _told_to(self, server: Aggregator, payloads: list[bytes], lie: bytes) -> list[bytes]:
        self.told = lie != bytes(payloads[0])
        if self.victim is None:
            return [lie]
        return [lie if rank == self.victim else payloads[0] for rank in range(len(server._sites))]

    def _other_sum(self, words: np.ndarray, before: list[np.ndarray], first: Frame) -> np.ndarray:
        if self.how == "off by a step":
            words[self.which % words.size] ^= 1
        elif self.how == "scaled":
            words *= np.uint64(2)
            words[first.n_values :] %= np.uint64(MODULUS)
        elif before:
            words = before[0]
        return words

    def _other_parts(self, found: list[bytes], before: list[list[bytes]]) -> list[bytes]:
        parts = [bytes(part) for part in found]
        if self.how == "two parts change places":
            parts[0], parts[1] = parts[1], parts[0]
        elif self.how == "a part is an earlier one":
            earlier = [one[0] for one in before if len(one[0]) == len(parts[0])]
            parts[0] = bytes(earlier[-1]) if earlier else parts[0]
        elif parts[0]:
            place = self.which % len(parts[0])
            parts[0] = parts[0][:place] + bytes([parts[0][place] ^ 1]) + parts[0][place + 1 :]
        return parts


@dataclass
class Naming:
    """A server that says of sites that they are lost, or there, as it likes, each time that an attempt has ended."""

    dice: random.Random

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the server of this process lie."""
        wait = JobController._wait_for_return

        def named(
            this: JobController, attempt: Any, standing: Any, patience: Any, *rest: Any, **options: Any
        ) -> str | list[str]:
            ends = wait(this, attempt, standing, patience, *rest, **options)
            there = sorted(set(attempt.sites) - set(patience.presence.absent()))
            if isinstance(ends, str) or len(there) < 2 or self.dice.random() < 0.4:
                return ends
            return sorted(self.dice.sample(there, 2))

        with patch.object(JobController, "_wait_for_return", named):
            yield


@dataclass
class Claim:
    """A site whose evidence names other sites than the attempt went on without.

    Attributes:
        liar: the site.
        named: whom it names; nobody if empty.
        owner: whose program runs now.
        told: it came to that.
    """

    liar: str
    named: tuple[str, ...]
    owner: Callable[[], str] = lambda: ""
    told: bool = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the site lie."""
        real = horizontal_site.named

        def claimed(sites: Sequence[str]) -> dict[str, str]:
            if self.owner() != self.liar or tuple(sites) == self.named:
                return real(sites)
            self.told = True
            return real(self.named)

        with patch.object(horizontal_site, "named", claimed):
            yield


@dataclass
class Tampering:
    """A relay, a server or a site that changes one message.

    Attributes:
        ends: origin, target and topic.
        which: of these messages.
        how: one of CHANGES, or of FORGERIES, which make a valid frame.
        told: it came to that.
    """

    ends: tuple[str, str, str]
    which: int
    how: str
    dice: random.Random
    told: bool = False

    def __post_init__(self) -> None:
        self._n_seen = 0
        self._earlier: list[tuple[str, bytes]] = []

    def payload(self, sent: Any) -> bytes | None:
        """Return what arrives in the place of a message."""
        if sent.payload is None or (sent.origin, sent.target, sent.topic) != self.ends:
            return sent.payload
        self._n_seen += 1
        earlier = list(self._earlier)
        self._earlier.append((sent.job_id, sent.payload))
        is_due = self._n_seen >= self.which and not self.told and bool(sent.payload)
        if not is_due:
            return sent.payload
        changed = self._changed(sent.job_id, sent.payload, earlier)
        self.told = changed != sent.payload
        return changed

    def _changed(self, job_id: str, payload: bytes, earlier: list[tuple[str, bytes]]) -> bytes:
        if self.how in FORGERIES:
            return self._forged(payload)
        if self.how in ("replayed", "of another job"):
            known = [one for job, one in earlier if (job == job_id) == (self.how == "replayed")]
            return self.dice.choice(known) if known else payload
        if self.how == "cut":
            return payload[: self.dice.randrange(len(payload))]
        if self.how == "made longer":
            return payload + bytes(self.dice.randrange(1, 40))
        if self.how == "garbage":
            return self.dice.randbytes(len(payload))
        place = self.dice.randrange(len(payload))
        return payload[:place] + bytes([payload[place] ^ (1 << self.dice.randrange(8))]) + payload[place + 1 :]

    def _forged(self, payload: bytes) -> bytes:
        try:
            frame = unpack(payload)
        except ProtocolError:  # a piece of a longer one
            return payload
        forgeries: dict[str, Callable[[], Frame]] = {
            "another rank": lambda: replace(frame, rank=(frame.rank + 1) % 3),
            "another counter": lambda: replace(frame, counter=frame.counter + self.dice.choice([1, 2, 1000])),
            "another attempt": lambda: replace(frame, attempt=self.dice.randbytes(len(frame.attempt))),
            "another size": lambda: replace(frame, n_values=frame.n_values + 1),
        }
        try:
            return bytes(forgeries[self.how]().pack())
        except (ProtocolError, ValueError):
            return payload


@dataclass
class Swap:
    """A server that answers an exchange with its own answer to an earlier one of the same kind and size.

    Attributes:
        which: number of the first exchange that may be answered so; of the later ones the first that has an earlier
            one like it.
        victim: the only site that is told; None for all.
        told: sites that have been, by job.
    """

    which: int
    victim: str | None = None
    told: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._answers: dict[tuple[str, str, int], tuple[tuple[object, ...], bytes]] = {}
        self._chosen: tuple[str, int, int] | None = None  # job, the exchange, and the one whose answer is given

    def payload(self, sent: Any) -> bytes | None:
        """Return what arrives in the place of a message."""
        if sent.payload is None or sent.topic != TOPIC_REPLY:
            return sent.payload
        try:
            frame = unpack(sent.payload)
        except ProtocolError:  # a piece of a longer one
            return sent.payload
        like, ends = (frame.type, frame.kind, frame.attempt, len(sent.payload)), (sent.job_id, sent.target)
        self._answers[*ends, frame.counter] = like, sent.payload
        if self._chosen is None and frame.counter >= self.which and frame.type is FrameType.RESULT:
            known = ((n, self._answers.get((*ends, n))) for n in range(frame.counter))
            before = [n for n, one in known if one is not None and one[0] == like and one[1] != sent.payload]
            self._chosen = (sent.job_id, frame.counter, before[-1]) if before else None
        if self._chosen is None or self._chosen[:2] != (sent.job_id, frame.counter):
            return sent.payload
        earlier = self._answers.get((*ends, self._chosen[2]))
        if self.victim not in (None, sent.target) or earlier is None or earlier[0] != like:
            return sent.payload
        self.told.add(ends)
        return earlier[1]


def other_terms(victim: str, how: str, dice: random.Random) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Return a server's task that is not the same for one site."""

    def told(site: str, task: dict[str, Any]) -> dict[str, Any]:
        if site != victim:
            return task
        task = copy.deepcopy(task)
        job = task["job"]
        if how == "another number":
            places = [(place, name) for place, name in _numbers(job)]
            place, name = dice.choice(places)
            place[name] += 1
        elif how == "a field less":
            del job[dice.choice(sorted(job))]
        elif how == "another attempt":
            task["attempt"] = dice.randbytes(len(task["attempt"]) // 2).hex()
        elif how == "a site less":
            task["sites"].remove(dice.choice(task["sites"]))
        else:
            task["server"] = "server.another"
        return task

    return told


def _numbers(document: Any) -> Iterator[tuple[Any, Any]]:
    for name, value in sorted(document.items()) if isinstance(document, dict) else enumerate(document):
        if isinstance(value, dict | list):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield document, name


def other_report(liar: str, how: str, dice: random.Random) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Return a site's report that says something else than what happened."""

    def reported(site: str, report: dict[str, Any]) -> dict[str, Any]:
        if site != liar or "status" not in report:
            return report
        if how == "another result":
            return {**report, "model_hmac": dice.randbytes(32).hex()}
        if how == "changed evidence":
            evidence = bytearray(report["evidence"])
            if evidence:
                evidence[dice.randrange(len(evidence))] ^= 1
            return {**report, "evidence": bytes(evidence)}
        if how == "no report":
            return {name: value for name, value in report.items() if name not in ("status", "error")}
        if how == "a summary that is none":
            return {**report, "summary": "[" * 100_000}
        return {**report, "status": "failed", "error": "nothing \x1b[31m worked\r\n" * 500}

    return reported
