"""Planted defects, and how many seeds each survives: ``python -m tests.simulation.mutants [--most 60]``.

A simulation that finds nothing says something only if it finds these.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from dp_components.ledger import Ledger
from he_processors.sum_tags import SumTags
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.flare.attempt import ServerAttempt
from nvflare_plugins.flare.life_signs import LifeSigns
from nvflare_plugins.flare.transport import FrameServer, SiteTransport
from nvflare_plugins.flare.work import Watch
from nvflare_plugins.wire.additions import WordSum
from tests.simulation.run import simulate, undisturbed

Mutant = Callable[[], Any]


def _instead(place: type, name: str, what: Callable[..., Any]) -> Mutant:
    return lambda: patch.object(place, name, what)


def _nothing(*arguments: object, **named: object) -> None:
    """Do nothing."""


@contextmanager
def _resends_differ() -> Iterator[None]:
    send, count = SiteTransport._send_frame, [0]

    def again(self: SiteTransport, frame: bytes) -> None:
        count[0] += 1
        send(self, frame[:-1] + bytes([frame[-1] ^ (count[0] & 1)]))

    with patch.object(SiteTransport, "_send_frame", again):
        yield


@contextmanager
def _a_contribution_is_left_out() -> Iterator[None]:
    add, count = WordSum.add, [0]

    def most(self: WordSum, payload: bytes) -> None:
        count[0] += 1
        if count[0] % 40:
            add(self, payload)

    with patch.object(WordSum, "add", most):
        yield


@contextmanager
def _releases_are_not_charged() -> Iterator[None]:
    append = Ledger._append
    unless = lambda self, record: None if record.get("record") == "release" else append(self, record)  # noqa: E731
    with patch.object(Ledger, "_append", unless):
        yield


MUTANTS: dict[str, tuple[str, Mutant]] = {
    "a lost reply is not sent again": ("dpboost", _instead(FrameServer, "_answer_query", _nothing)),
    "a lost frame is not sent again": ("dpboost", _instead(SiteTransport, "_on_state", _nothing)),
    "the server waits for the dead": ("dpboost", _instead(ServerAttempt, "_is_silent", lambda self, site: False)),
    "sites wait for a dead server": (
        "dpboost",
        _instead(SiteTransport, "server_silent_s", property(lambda self: 0.0)),
    ),
    "nobody is forgiven a pause": (
        "dpboost",
        _instead(LifeSigns, "silent_s", lambda self, name: 1e9 if self.has_begun(name) else 0.0),
    ),
    "evidence has no end": ("bagging", _instead(EvidenceLog, "abandon", _nothing)),
    "frames sent again differ": ("dpboost", _resends_differ),
    "a contribution is left out of a sum": ("horizontal", _a_contribution_is_left_out),
    "releases are not charged": ("private_trees", _releases_are_not_charged),
    "tags are not compared": (
        "horizontal",
        _instead(SumTags, "_tags", lambda self, values, residues, label: np.zeros(2, dtype=np.uint64)),
    ),
    "the work goes on after its end": ("dpboost", _instead(Watch, "_reason_to_stop", lambda self, work: None)),
}


def survived(name: str, most: int) -> int | None:
    """Return how many seeds a planted defect survives; None if all."""
    kind, mutant = MUTANTS[name]
    undisturbed(kind)  # of the product, not of the mutant: it is kept
    for seed in range(most):
        with mutant():
            try:
                _, _, faults = simulate(kind, seed)
            except AssertionError as error:  # the scheduler's
                faults = [str(error)]
        if faults:
            return seed
    return None


def main() -> int:
    """Say of each planted defect which seed finds it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=60)
    most = parser.parse_args().most
    found = {}
    for name in MUTANTS:
        found[name] = survived(name, most)
        sys.stdout.write(f"{name}: {'survives' if found[name] is None else f'found by seed {found[name]}'}" + "\n")
    sys.stdout.write(
        json.dumps({"mutants": len(found), "survive": [name for name, seed in found.items() if seed is None]}) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
