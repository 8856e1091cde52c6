"""Data sets that are never held whole, in kinds of job beside horizontal ones: results as of one held file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dp_components.events import GaussianEvent, Release
from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.passes import RowPasses
from tests.support.federation import Federation
from tests.support.private_federation import BUDGET, DATA, PrivateFederation, frame_of, job_of

EVENT = GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW)


def in_parts(sites: Federation, name: str) -> None:
    """Have every site read a data set of one file from a folder of three, in other row groups, instead."""
    for site in sites.sites:
        folder, file = sites.workspace(site) / "parts" / name, sites.workspace(site) / f"{name}.parquet"
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.read_parquet(file)
        for number, rows in enumerate(np.array_split(np.arange(len(frame)), 3)):
            frame.iloc[rows].to_parquet(folder / f"{number}.parquet", index=False, row_group_size=37)
        file.unlink()


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note who reads in passes."""
    reads: list[str] = []
    real = RowPasses._values

    def values(self: RowPasses, name: str, column: Any) -> Any:
        reads.append(name)
        return real(self, name, column)

    monkeypatch.setattr(RowPasses, "_values", values)
    return reads


# -- private trees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "dp_tr_newton_ih", "components": {"n_trees": 4}},
        {"method": "dp_gbm", "components": {"n_trees": 2}, "weight": "w", "max_weight": 2.0},
    ],
    ids=["default", "refined_candidates", "greedy"],
)
def test_private_trees_are_those_of_held_rows(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = frame_of(missing=True)
    frame["w"] = np.random.default_rng(1).uniform(0, 4, len(frame))
    frame["label"] = frame.label.where(np.arange(len(frame)) % 50 != 0)  # rows that are left out
    frame.loc[3, "x1"] = 1e40  # and a value that is clipped
    reads, models = noted_reads(monkeypatch), []
    for mode in ("file", "parts"):
        sites = PrivateFederation(tmp_path / mode, frame)
        path = f"{DATA}.parquet"
        if mode == "parts":
            in_parts(sites, DATA)
            path = f"parts/{DATA}"
        for site in sites.sites:
            sites.write_policy(site, data_sets={DATA: {"path": path, "privacy": BUDGET}})
        features = [f"x{i}" for i in range(4)] + ["colour"]
        job = job_of(trust="trusted_aggregator", features=features, structure_seed=5, **changes)
        sites.run_private(job, server_noise=lambda sums, *_: Release(np.asarray(sums), EVENT)).succeed()
        assert bool(reads) == (mode == "parts")
        models.append(sites.model())
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("memory", "components", "words"),
    [
        ("external", {}, r"a private training holds them.*memory \("),
        ("passes", {"grower": "xgboost", "interactions": "alternating"}, r"grower=xgboost.*memory \("),
    ],
)
def test_private_trees_that_need_all_rows_say_so(
    tmp_path: Path, memory: str, components: dict[str, Any], words: str
) -> None:
    sites = PrivateFederation(tmp_path)
    for site in sites.sites:
        held = {"path": f"{DATA}.parquet", "memory": memory, "privacy": BUDGET}
        sites.write_policy(site, data_sets={DATA: held})
    run = sites.run_private(job_of(components={"n_trees": 2, **components}))
    with pytest.raises(ConfigurationError, match=words):
        raise run.error("site-1")
