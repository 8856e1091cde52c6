"""Kinds that use no cluster, at a site whose policy names one: they run in the site's process, which says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nvflare_plugins.attempt.site_attempt import SitePart
from nvflare_plugins.kinds.bagging.training import run_bagging_site
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.kinds.profile.site import run_profile_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pooled.job import HorizontalJob
from tests.support import bagging
from tests.support.federation import Federation, Parties, succeed
from tests.support.horizontal_jobs import LOGISTIC, table

CLUSTER = {"scheduler": "tcp://127.0.0.1:9", "workers": 2}  # where nothing listens
POLICY = {
    "cluster": {**CLUSTER, "sites": ["site-1"]},
    "consents": {"share_own_trees": True, "feature_profile": True},
    "min_rows_per_node": 0,
}
KINDS: list[tuple[SitePart[Any], Any]] = [
    (run_bagging_site, bagging.job(num_rounds=1)),
    (run_profile_site, ProfileJob.from_dict({"data_set": "train", "label": "y"})),
]


def sites(folder: Path) -> Parties:
    parties = Parties(folder, 3, POLICY)
    for number, site in enumerate(parties.sites):
        parties.give(site, "train", bagging.rows(number, 900))
    return parties


@pytest.mark.parametrize(("kind", "job"), KINDS, ids=["bagging", "profile"])
def test_a_kind_without_use_for_a_cluster_runs_beside_it_and_says_so(
    tmp_path: Path, kind: SitePart[Any], job: Any
) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(kind, job))
    notes = [RunRecord.read(parties.run_folder(site)).notes for site in parties.sites]
    assert "data set 'train' was not used" in " ".join(notes[0])
    assert not any("cluster" in note for others in notes[1:] for note in others)


def test_a_training_whose_evaluation_set_has_another_cluster_is_refused_before_it_connects(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, train=table(120), eval=table(60))
    federation.set_registry_keys()
    sets: dict[str, Any] = {name: {"path": f"{name}.parquet"} for name in ("train", "eval")}
    sets["eval"]["cluster"] = {**CLUSTER, "scheduler": "tcp://127.0.0.1:10"}
    federation.set_policy("site-2", cluster=CLUSTER, data_sets=sets)
    outcomes = federation.run(HorizontalJob("train", "y", LOGISTIC, 1, eval_data_set="eval"))
    assert "data_sets.eval.cluster" in str(outcomes["site-2"])


@pytest.mark.parametrize(("kind", "job"), KINDS[1:], ids=["profile"])
def test_files_that_are_read_in_passes_are_so_in_the_sites_own_process(
    tmp_path: Path, kind: SitePart[Any], job: Any
) -> None:
    parties = sites(tmp_path)
    folder = parties.workspace("site-1") / "parts"
    folder.mkdir()
    shutil.move(parties.workspace("site-1") / "train.parquet", folder / "grün.parquet")
    parties.set_policy("site-1", data_sets={"train": {"path": "parts", "format": "parquet"}})
    succeed(parties.run(kind, job))
