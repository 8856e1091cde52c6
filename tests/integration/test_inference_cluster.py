"""A prediction whose alignment is blinded on a party's own Dask workers: the result is that without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nvflare_plugins.kinds.alignment import intersection as blinding
from nvflare_plugins.pages.run_record import RunRecord
from tests.integration.test_vertical_inference import SITES, make_case
from tests.support.federation import succeed
from tests.support.local_cluster import local_cluster

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture
def dask() -> Iterator[dict[str, Any]]:
    with local_cluster(2) as cluster:
        yield {"scheduler": cluster.address, "workers": 2, "deadline_s": 20}


def test_predictions_are_those_without_workers_and_the_record_says_who_blinded(
    tmp_path: Path, dask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spread: list[int] = []
    whole = blinding.SpreadKey._spread

    def noted(self: blinding.SpreadKey, method: str, values: list[bytes]) -> list[bytes]:
        spread.append(len(values))
        return whole(self, method, values)

    monkeypatch.setattr(blinding.SpreadKey, "_spread", noted)
    monkeypatch.setattr(blinding, "LEAST_POINTS", 0)
    found, notes = [], []
    for least in (1_000_000, 0):  # the second set is large enough
        monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.LEAST_IDS", least)
        case = make_case(tmp_path / str(least))
        for number, site in enumerate(SITES):
            path = case.parties.workspace(site) / "new.parquet"
            pd.read_parquet(path).drop(index=range(10 * number, 10 * number + 10)).to_parquet(path, index=False)
        case.parties.set_policy("site-2", cluster=dask)
        succeed(case.run(alignment="first"))
        found.append(pd.read_parquet(case.result("predictions.parquet")))
        notes.append(" ".join(RunRecord.read(case.parties.run_folder("site-2", "job")).notes))
        assert bool(spread) == (least == 0)
    pd.testing.assert_frame_equal(found[0], found[1])
    assert "was not used" in notes[0] and "blinded the ids" in notes[1] and "was not used" not in notes[1]
