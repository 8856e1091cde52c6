"""A new kind of job is one module and one row: this one is made here and runs from its recipe to its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument, JobResult, SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.base.declared import Name, OneOf, Seconds, document
from nvflare_plugins.data.table import load_table
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.flare.kinds import KINDS, JobKind, read_job
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.flare_boundary import CONTROLLER, EXECUTOR
from nvflare_plugins.site.policy_values import JobTerms
from tests.golden.jobs import breast, rows_over_sites
from tests.support.flare_job import Finished, run_flare_job

# -- the kind: its job, prepare, train --------------------------------------------------------------------------------


@document
class CountJob(JobDocument):
    """Count the rows of a data set over all sites."""

    tracking: ClassVar[bool] = False

    data_set: Name
    label: Name
    profile: Annotated[str, OneOf("masks")] = "masks"
    deadline_s: Seconds = 0.0


def prepare(job: CountJob, context: SiteContext) -> int:
    spec = context.policy.check_job(JobTerms(job.profile, job.data_set), context.sites)
    return load_table(spec, label=job.label).n_rows


def train(attempt: SiteAttempt, n_rows: int) -> JobResult:
    counts = [int.from_bytes(count, "little") for count in attempt.gather_sealed("rows", n_rows.to_bytes(8, "little"))]
    total = str(sum(counts)).encode()
    hmac = attempt.conclude(total)
    (attempt.folder.path / "rows.txt").write_bytes(total)
    attempt.all_have_written()
    attempt.write_record("Rows of all sites", {}, None)
    return JobResult(hmac.hex(), "counted")


ROW = JobKind("count", CountJob, SitePart(prepare, train))


# -- what follows from the row ----------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Finished:
    monkeypatch.setitem(KINDS, ROW.name, ROW)
    recipe = JobRecipe("job", CountJob("rows", "y"))
    return run_flare_job(recipe, rows_over_sites(tmp_path, breast(2)))


def test_a_new_kind_runs_under_controller_and_executors(finished: Finished) -> None:
    assert finished.reason is None and finished.summary["status"] == "completed"
    found = verify([finished.evidence])
    assert found.sound, found
    for site in finished.parties.sites:
        assert (finished.folder(site) / "rows.txt").read_text() == "569"
        assert json.loads((finished.folder(site) / "run.json").read_text())["title"] == "Rows of all sites"
        assert "Rows of all sites" in (finished.folder(site) / "report.html").read_text()
        assert finished.log(site).completed


def test_its_job_folder_names_the_components_of_all_kinds(finished: Finished) -> None:
    folder = finished.parties.folder / "exported" / "job"
    server = json.loads(next(folder.rglob("config_fed_server.json")).read_text())["workflows"][0]
    client = json.loads(next(folder.rglob("config_fed_client.json")).read_text())["executors"][0]["executor"]
    assert (server["path"], server["args"]["kind"]) == (CONTROLLER, "count")
    assert client == {"path": EXECUTOR, "args": {"kind": "count"}}
    assert read_job(folder) == CountJob("rows", "y")
    allowed = json.loads((finished.parties.workspace("site-1") / "local" / "resources.json").read_text())
    assert client["path"] in allowed["class_allow_list"]


def test_a_site_without_the_kind_says_which_it_has(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, ROW.name)
    with pytest.raises(ConfigurationError, match=f"no kind of job 'count'; there are {', '.join(sorted(KINDS))}"):
        read_job(finished.parties.folder / "exported" / "job")
