"""Sites that die at each step of a job's end: all have the result then, or the job can be brought to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, PassivePart, read_part
from nvflare_plugins.kinds.vertical.site import MASKED_MODEL
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.envelope import Kind
from tests.support import vertical_jobs
from tests.support.examples import quick
from tests.support.federation import Federation, Parties, SiteDied, dies_at, succeed
from tests.support.federation import succeed as all_sites_of
from tests.support.horizontal_jobs import spaced
from tests.support.horizontal_jobs import table as rows
from tests.support.private_federation import PrivateFederation
from tests.support.private_federation import job_of as private_job

# Steps from the last round to the end: the site dies before it sends its part (at "tamper"), or before it reads the
# answer that the others have got (at "tamper_reply"). After the first CLOSING sites write, after the second they tidy.
STEPS = [
    (Kind.MODEL_CHECK, 1, "tamper"),
    (Kind.MODEL_CHECK, 1, "tamper_reply"),
    (Kind.CLOSING, 1, "tamper"),
    (Kind.CLOSING, 1, "tamper_reply"),
    (Kind.CLOSING, 2, "tamper"),
    (Kind.CLOSING, 2, "tamper_reply"),
]
PARTS = [
    (Kind.AGREEMENT, 3, "tamper"),
    (Kind.AGREEMENT, 3, "tamper_reply"),
]  # the commitments to the parts of a vertical model
LAST = STEPS[-1]


def checkpoints(folders: list[Path]) -> list[int]:
    return [len(list(folder.glob("checkpoint-*.json"))) for folder in folders]


# -- horizontal -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    federation = Federation(tmp_path_factory.mktemp("whole"))
    federation.give_data("train", rows(120))
    all_sites_of(federation.run(horizontal()))
    return federation.model()


def horizontal(**fields: object) -> HorizontalJob:
    return spaced({"max_depth": 2, "max_bin": 16}, 2, checkpoint_every=1, **fields)


@pytest.mark.parametrize(("kind", "nth", "hook"), quick(STEPS, *STEPS[1:3], LAST))
def test_a_horizontal_job_leaves_all_models_or_something_to_resume_from(tmp_path, whole, kind, nth, hook):
    federation = Federation(tmp_path)
    federation.give_data("train", rows(120))
    outcomes = federation.run(horizontal(), "lost", notices_death=True, **{hook: {"site-2": dies_at(kind, nth)}})
    assert isinstance(outcomes["site-2"], SiteDied)
    folders = [federation.workspace(site) / "runs" / "lost" for site in federation.sites]
    if (kind, nth, hook) == LAST:
        assert federation.model("lost") == whole
        return
    assert 0 not in checkpoints(folders)
    all_sites_of(federation.run(horizontal(resume_from="lost"), "resumed"))
    assert federation.model("resumed") == whole
    assert checkpoints([federation.workspace(site) / "runs" / "resumed" for site in federation.sites]) == [0, 0, 0]


# -- vertical ---------------------------------------------------------------------------------------------------------


def contents(parties: Parties, job_id: str) -> list[object]:
    """Return what the parts hold, without what names the job."""
    tables = [
        read_part(parties.run_folder(site, job_id) / PASSIVE_FILE, site, PassivePart).part.table
        for site in parties.sites[1:]
    ]
    return [
        (parties.run_folder("site-1", job_id) / MASKED_MODEL).read_bytes(),
        vertical_jobs.merged(parties, job_id),
        *tables,
    ]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> list[object]:
    parties = vertical_jobs.federation(tmp_path_factory.mktemp("parts"), n_rows=120)
    succeed(vertical_jobs.run(parties, vertical_jobs.job(num_rounds=2)))
    return contents(parties, "job")


@pytest.mark.parametrize(("kind", "nth", "hook"), quick([*PARTS, *STEPS], PARTS[1], *STEPS[1:3], LAST))
def test_a_vertical_job_leaves_all_parts_or_something_to_resume_from(tmp_path, parts, kind, nth, hook):
    victim = "site-3" if hook == "tamper" else "site-1"  # the active party, and a passive one
    parties = vertical_jobs.federation(tmp_path, n_rows=120)
    job = vertical_jobs.job(num_rounds=2)
    outcomes = vertical_jobs.run(parties, job, "lost", notices_death=True, **{hook: {victim: dies_at(kind, nth)}})
    assert isinstance(outcomes[victim], SiteDied)
    folders = [parties.run_folder(site, "lost") for site in parties.sites]
    if (kind, nth, hook) == LAST:
        names = (ACTIVE_FILE, PASSIVE_FILE, PASSIVE_FILE)
        assert all((folder / name).is_file() for folder, name in zip(folders, names, strict=True))
        return
    assert 0 not in checkpoints(folders)
    succeed(vertical_jobs.run(parties, vertical_jobs.job(num_rounds=2, resume_from="lost"), "resumed"))
    assert contents(parties, "resumed") == parts
    assert checkpoints([parties.run_folder(site, "resumed") for site in parties.sites]) == [0, 0, 0]


# -- private ----------------------------------------------------------------------------------------------------------


def test_a_private_job_stays_open_in_the_ledger_until_all_sites_have_the_model(tmp_path):
    federation = PrivateFederation(tmp_path)
    job = private_job(components={"n_trees": 2})
    lost = federation.run_private(job, "lost", tamper={"site-2": dies_at(Kind.CLOSING, 2)})
    assert isinstance(lost.error("site-2"), SiteDied)
    spent = {site: federation.ledger(site).job_spent("lost") for site in federation.sites}
    model = (federation.workspace("site-1") / "runs" / "lost" / "model.json").read_bytes()
    resumed = private_job(components={"n_trees": 2}, resume_from="lost")
    federation.run_private(resumed, "resumed").succeed()
    assert federation.model("resumed") == model
    assert spent == {site: federation.ledger(site).job_spent("lost") for site in federation.sites}
