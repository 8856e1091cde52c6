"""Whole vertical jobs with parties on workers of their own: same models, resumed with others, lost ones named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure
from nvflare_plugins.kinds.alignment import intersection as blinding
from nvflare_plugins.kinds.alignment.job import FILE as ALIGNMENT_FILE
from nvflare_plugins.kinds.vertical import histogram_maker as passive
from nvflare_plugins.kinds.vertical import key_owner as owner
from nvflare_plugins.kinds.vertical import site as vertical_site
from nvflare_plugins.workers.workers import Workers
from tests.integration.test_vertical_jobs import dies_in_round, nothing_written, overlapping, same
from tests.support.examples import slow
from tests.support.federation import Parties, SiteDied, succeed
from tests.support.vertical_jobs import PARAMS, central, federation, job, merged, run, table
from tests.support.workers_here import workers_here

TRAIN = table(390).iloc[:300]
ADDRESS = "tcp://127.0.0.1:8786"


@pytest.fixture(autouse=True)
def _workers_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertical_site, "open_workers", lambda cluster: workers_here(cluster.workers))
    monkeypatch.setattr(passive, "GRADIENT_BLOCK_ROWS", 128)
    monkeypatch.setattr("nvflare_plugins.kinds.vertical.active_party.GRADIENT_BLOCK_ROWS", 128)
    monkeypatch.setattr(owner, "GRADIENT_BLOCK_ROWS", 128)
    monkeypatch.setattr(owner, "LEAST_ROWS", 32)


@pytest.fixture
def parties(tmp_path) -> Parties:
    found = federation(tmp_path)
    put_on(found, 2, 3)
    return found


def put_on(parties: Parties, n_active: int, n_passive: int) -> None:
    """Give site-1, the active party, and site-2 so many workers; 0 is none."""
    for site, n_workers in (("site-1", n_active), ("site-2", n_passive)):
        cluster = {"scheduler": ADDRESS, "workers": n_workers} if n_workers else None
        parties.set_policy(site, cluster=cluster, allowed_profiles=["plain", "paillier"], min_key_bits=2048)


def test_the_model_is_the_same_and_each_partys_report_says_what_its_workers_did(parties) -> None:
    succeed(run(parties, job(num_rounds=2)))
    assert same(merged(parties), central(TRAIN, 2))
    said = "\n".join(parties.said["site-2"])
    assert "3 workers of this site's cluster, each with 100 rows or one more" in said
    assert '"Workers"' in (parties.run_folder("site-2") / "run.json").read_text()
    assert "cluster" not in "\n".join(parties.said["site-3"])


def test_workers_blind_the_ids_of_a_trainings_alignment(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(blinding, "LEAST_POINTS", 0)
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.LEAST_IDS", 0)
    models, kept = [], []
    for n_workers in (0, 2, 3):
        found, common = overlapping(tmp_path / str(n_workers))
        put_on(found, n_workers, n_workers)
        succeed(run(found, job(alignment="first", num_rounds=2)))
        models.append(merged(found))
        kept.append([positions(found.run_folder(site) / ALIGNMENT_FILE) for site in found.sites])
        assert same(models[-1], central(common, 2))
        for site in ("site-1", "site-2"):
            report = (found.run_folder(site) / "run.json").read_text()
            # The active party connects to none under profile plain, which leaves them nothing to encrypt.
            assert ("blinded" in report) == (site == "site-2" and n_workers > 0)
    assert len(set(models)) == 1
    assert kept == [kept[0]] * 3


def positions(path: Path) -> dict[str, bytes]:
    with np.load(path) as content:
        return {name: content[name].tobytes() for name in content.files if name != "header"}


def test_what_workers_do_is_said_and_a_cluster_of_the_evaluation_set_is_left_aside(parties) -> None:
    for site, columns in zip(parties.sites, (["c0", "c1", "y"], ["c2", "c3", "c4"], ["c5"]), strict=True):
        own = {"cluster": {"scheduler": "tcp://127.0.0.1:9", "workers": 1}} if site == "site-2" else {}
        parties.give(site, "held", table(390).iloc[300:][columns], **own)
    succeed(run(parties, job(num_rounds=2, eval_data_set="held", evaluate_training=True)))
    said = "\n".join(parties.said["site-2"])
    assert re.search(
        r"workers in rounds 1 to 2 \(.* s\): 0 busy .* s \(.* %\), 100 rows held; 1 .*; the slowest is [012]", said
    )
    report = (parties.run_folder("site-2") / "run.json").read_text()
    assert "data set 'held' was not used" in report and "100 held" in report


def test_a_lost_job_goes_on_with_another_number_of_workers(parties) -> None:
    training = {"num_rounds": 4}
    succeed(run(parties, job(**training), "whole"))
    lost = run(parties, job(**training), "lost", tamper={"site-3": dies_in_round(2)}, notices_death=True)
    assert isinstance(lost["site-3"], SiteDied)
    put_on(parties, 0, 1)
    succeed(run(parties, job(**training, resume_from="lost"), "resumed"))
    assert merged(parties, "resumed") == merged(parties, "whole")


@pytest.mark.parametrize("preset", [*slow("exact"), "guarded"])
def test_presets_give_what_they_give_without_workers(tmp_path, preset) -> None:
    models = []
    for n_workers in (0, 1, 2, 3):
        found = federation(tmp_path / str(n_workers))
        put_on(found, n_workers, n_workers)
        succeed(run(found, job(preset=preset, num_rounds=2)))
        models.append(merged(found))
    assert len(set(models)) == 1


def test_sampled_rows_and_columns_are_those_of_the_centralized_model(parties) -> None:
    params = {**PARAMS, "subsample": 0.8, "colsample_bytree": 0.8}
    succeed(run(parties, job(num_rounds=2, params=params)))
    seed = json.loads((parties.run_folder("site-1") / "run.json").read_text())["params"]["seed"]
    assert same(merged(parties), central(TRAIN, 2, {**params, "seed": seed}))


class _LostAtSums:
    """A worker that is lost when sums are asked for."""

    def __init__(self, link) -> None:
        self._link = link

    def ask(self, function: str, *args):
        if function == "call" and args[0] == "sum_share":
            raise WorkerFailure("worker 1 of this site's cluster was lost; its log, or its machine's, says why")
        return self._link.ask(function, *args)


def test_a_lost_worker_ends_the_job_at_all_parties_and_is_named(parties, monkeypatch) -> None:
    def with_a_loss(cluster) -> Workers:
        workers = workers_here(cluster.workers)
        workers._links[1] = _LostAtSums(workers._links[1])  # type: ignore[index]
        return workers

    monkeypatch.setattr(vertical_site, "open_workers", with_a_loss)
    outcomes = run(parties, job())
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values()), outcomes
    assert "worker 1 of this site's cluster was lost" in str(outcomes["site-2"])
    assert nothing_written(parties)


def test_parties_on_workers_train_under_encryption(parties) -> None:
    parties.set_policy("site-3", min_key_bits=2048)
    params = {**PARAMS, "max_depth": 2, "max_bin": 8}
    succeed(run(parties, job(profile="paillier", key_bits=2048, num_rounds=1, params=params)))
    assert same(merged(parties), central(TRAIN, 1, params))


def test_fewer_rows_than_workers_are_refused_by_name(parties) -> None:
    put_on(parties, 0, 301)
    outcomes = run(parties, job())
    assert "worker 0 would have none" in str(outcomes["site-2"])
    assert nothing_written(parties)
