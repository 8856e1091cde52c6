"""In every kind of job: a server that changes what it hands on is noticed, and leaves no result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.envelope import Frame, Kind, Operation, pack_list, unpack_list
from tests.conformance.kind_cases import CASES, ONE_OF_EACH
from tests.conformance.test_kinds import SITES, recipe_of
from tests.support.examples import quick, slow
from tests.support.flare_job import Finished, run_flare_job

WITH_SUMS = ("horizontal", "private_trees")
SIGN = "the server"  # "or a site", unless it is a site's own part that comes back changed


class Lie:
    """Changes the answer of one exchange for all sites alike."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_meant: Callable[[Frame], bool]) -> None:
        self.told: Kind | None = None
        honest = Aggregator._results

        def results(server: Aggregator, first: Frame, exchange: object) -> object:
            payloads = honest(server, first, exchange)  # type: ignore[arg-type]
            if self.told is not None or not is_meant(first):
                return payloads
            self.told = first.kind
            return [self.change(first, bytes(payloads[0]))]

        monkeypatch.setattr(Aggregator, "_results", results)

    @staticmethod
    def change(first: Frame, payload: bytes) -> bytes:
        """Add one to the first value of a sum; put the first site's part in the place of the last one's."""
        if first.operation is Operation.SUM:
            return ((payload[0] + 1) % 256).to_bytes(1) + payload[1:]
        parts = unpack_list(payload, len(SITES))
        return pack_list([*parts[:-1], parts[0]])


def assert_noticed(run: Finished, name: str, lie: Lie) -> None:
    assert lie.told is not None and run.reason is not None
    assert f"{lie.told.name} (" in run.reason and SIGN in run.reason, run.reason
    assert {report["status"] for report in run.reports.values()} == {"failed"}
    for site in SITES:
        assert not [file for file in CASES[name].results if (run.folder(site) / file).exists()]


@pytest.mark.parametrize(
    "kind",
    [*slow(Kind.MODEL_CHECK), Kind.CLOSING],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("name", quick(CASES, *ONE_OF_EACH))
def test_a_changed_part_of_the_last_messages_is_noticed(name: str, kind: Kind, tmp_path: Path, monkeypatch) -> None:
    lie = Lie(monkeypatch, lambda first: first.kind is kind)
    assert_noticed(run_flare_job(recipe_of(name), CASES[name].give(tmp_path)), name, lie)


@pytest.mark.parametrize("name", quick(CASES, *ONE_OF_EACH))
def test_a_changed_part_of_the_first_message_of_a_session_is_noticed(name: str, tmp_path: Path, monkeypatch) -> None:
    lie = Lie(monkeypatch, lambda first: first.operation is Operation.GATHER and first.tail > 0)
    assert_noticed(run_flare_job(recipe_of(name), CASES[name].give(tmp_path)), name, lie)


@pytest.mark.parametrize("name", WITH_SUMS)
def test_a_changed_sum_is_noticed(name: str, tmp_path: Path, monkeypatch) -> None:
    lie = Lie(monkeypatch, lambda first: first.operation is Operation.SUM and first.n_values > 1)
    assert_noticed(run_flare_job(recipe_of(name), CASES[name].give(tmp_path)), name, lie)
