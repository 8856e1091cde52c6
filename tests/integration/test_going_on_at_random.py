"""Jobs of several attempts, drawn at random: a server that names the sites as it likes, and sites that die anywhere."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.kinds.horizontal import going_on
from nvflare_plugins.wire.envelope import Kind
from tests.integration.test_going_on import ALL, ROWS, TWO, Opened, going
from tests.integration.test_going_on import opened as opened
from tests.support.federation import Federation, SiteDied, dies_at

ROUNDS = 6
MOST_ATTEMPTS = 5


def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, tuple[str, ...]]]:
    """Note, beside what sites keep themselves, every state that one of them enters, and with whom."""
    notes: list[tuple[Path, str, tuple[str, ...]]] = []
    real, lock = going_on.Course.enter, threading.Lock()

    def enter(self: going_on.Course, model: bytes, sites: tuple[str, ...], n_done: int) -> None:
        real(self, model, sites, n_done)
        with lock:
            notes.append((self.path, going_on.state_of(model), sites))

    monkeypatch.setattr(going_on.Course, "enter", enter)
    return notes


def lying_server(rng: np.random.Generator, before: tuple[str, ...], dead: str | None) -> tuple[str, ...]:
    """Return the sites of the next attempt: those that are left, all again, or any that the server fancies."""
    choice = rng.integers(4)
    if choice == 0:
        return ALL
    if choice == 1:
        return tuple(sorted(map(str, rng.choice(ALL, size=int(rng.integers(2, 4)), replace=False))))
    left = tuple(site for site in before if site != dead)
    return left if len(left) > 1 else before


def play(folder: Path, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    federation = Federation(folder, 4, TWO)
    federation.give_data("train", ROWS)
    training = going({"subsample": 0.7} if seed % 3 == 0 else {}, ROUNDS)
    found, sites = [], ALL
    for number in range(1, MOST_ATTEMPTS + 1):
        dies = str(rng.choice(sites)) if number < MOST_ATTEMPTS else None
        kind = (Kind.HISTOGRAM, Kind.HISTOGRAM, Kind.MODEL_CHECK, Kind.CUT_COUNTS)[int(rng.integers(4))]
        kind = Kind.HISTOGRAM if number == 1 and seed % 8 else kind
        nth = int(rng.integers(1, 18)) if kind is Kind.HISTOGRAM else 1
        tamper = {} if dies is None else {dies: dies_at(kind, nth)}
        outcomes = federation.run(training, "job", number=number, sites=sites, tamper=tamper)
        found.append(outcomes)
        models = {(federation.workspace(s) / "runs/job/model.json").read_bytes() for s in done(outcomes)}
        assert len(models) <= 1, "the sites of an attempt ended with different models"
        if done(outcomes):
            break
        sites = lying_server(rng, sites, dies)
    return found


def done(outcomes: dict[str, Any]) -> list[str]:
    return [site for site, one in outcomes.items() if not isinstance(one, Exception)]


def check(folder: Path, seed: int, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> int:
    notes = entered(monkeypatch)
    attempts = play(folder, seed)
    for outcomes in attempts:
        assert all(
            isinstance(one, VeilBoostError | SiteDied) or site in done(outcomes) for site, one in outcomes.items()
        )
    with_whom: dict[tuple[Path, str], set[tuple[str, ...]]] = {}
    for path, state, sites in notes:
        with_whom.setdefault((path, state), set()).add(sites)
    assert all(len(sets) == 1 for sets in with_whom.values())
    assert not set(opened.found_by_subtraction())
    return len({sites for _, sites, _, _ in opened.sums.values()})


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_a_server_names_no_two_opened_sums_give_a_site_away(tmp_path, opened, monkeypatch, seed: int) -> None:
    check(tmp_path, seed, opened, monkeypatch)


@pytest.mark.slow
def test_many_courses_of_attempts(tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    n_sets = []
    for seed in range(3, 33):
        with monkeypatch.context() as patched:
            opened.sums.clear()
            n_sets.append(check(tmp_path / str(seed), seed, opened, patched))
    assert sum(n > 1 for n in n_sets) >= 8  # so many had sums opened over different sites at all
