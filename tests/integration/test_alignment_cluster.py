"""An alignment job with a party on real Dask workers: the same rows, nothing private written, a loss named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure
from nvflare_plugins.kinds.alignment import intersection as blinding
from nvflare_plugins.kinds.alignment.intersection import BlindingKey
from nvflare_plugins.kinds.alignment.job import FILE, load_alignment
from tests.support.local_cluster import local_cluster
from tests.unit.nvflare_plugins.alignment.test_site import places, run

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.slow
IDS = [[f"Müller-{number}" for number in range(300)], [f"Müller-{number}" for number in range(100, 400)]]


@pytest.fixture(autouse=True)
def _small_sets_go_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blinding, "LEAST_POINTS", 0)
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.LEAST_IDS", 0)


def written_by(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_rows_are_those_without_workers_and_nothing_private_is_written(tmp_path, monkeypatch) -> None:
    secrets: list[bytes] = []
    given = BlindingKey.for_workers

    def noted(self: BlindingKey) -> tuple[bytes, bytes]:
        secrets.append(given(self)[1])
        return given(self)

    monkeypatch.setattr(BlindingKey, "for_workers", noted)
    with local_cluster(2) as cluster:
        policy: dict[str, Any] = {"scheduler": cluster.address, "workers": 2, "deadline_s": 20, "sites": ["party-b"]}
        parties = places(tmp_path, IDS, cluster=policy)
        assert len({outcome.hmac for outcome in run(parties)}) == 1  # type: ignore[union-attr]
        seen = written_by(cluster.folder)
    for context, own in zip(parties, IDS, strict=True):
        found = load_alignment(context, "job-1", "people").positions
        assert [own[row] for row in found] == sorted(set(IDS[0]) & set(IDS[1]))
    assert b"Start worker at" in seen, "the control: what the workers wrote was looked at"
    assert len(secrets) == 1, "the control: one party's key went to its workers"
    planted = [secrets[0], secrets[0].hex().encode(), str(int.from_bytes(secrets[0], "little")).encode()]
    assert not [one for one in [*planted, "Müller".encode(), b"BlindShard"] if one in seen]


def test_a_worker_killed_while_sets_are_aligned_is_named(tmp_path, monkeypatch) -> None:
    with local_cluster(2) as cluster:
        whole = blinding.SpreadKey.blind

        def kill_then_blind(self: blinding.SpreadKey, points: list[bytes]) -> list[bytes]:
            os.kill(cluster.pids[1], signal.SIGKILL)
            return whole(self, points)

        monkeypatch.setattr(blinding.SpreadKey, "blind", kill_then_blind)
        policy = {"scheduler": cluster.address, "workers": 2, "deadline_s": 20, "sites": ["party-b"]}
        outcomes = run(places(tmp_path, IDS, cluster=policy))
    assert isinstance(outcomes[1], WorkerFailure) and "worker 1 of this site's cluster was lost" in str(outcomes[1])
    assert isinstance(outcomes[0], VeilBoostError)
    assert not list(tmp_path.rglob(FILE)), "no result is kept"
