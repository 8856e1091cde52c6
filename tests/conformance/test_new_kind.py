"""A new kind of job is one module and one row: this one is made here and runs from its plan to its report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import pytest

from he_processors.errors import ConfigurationError
from jobs import reference
from nvflare_plugins.attempt.job_context import JobDocument, JobResult, SiteContext
from nvflare_plugins.attempt.plan import Plan, Planner, PlanRequest
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.base.declared import Name, OneOf, Seconds, document
from nvflare_plugins.cli.main import main
from nvflare_plugins.data.table import load_table
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.flare.kinds import KINDS, JobKind, read_job
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.flare_boundary import CONTROLLER, EXECUTOR
from nvflare_plugins.site.policy_values import JobTerms
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.site.protocols import PROTOCOLS, Span
from tests.conformance.kind_cases import recipe_of_kind
from tests.golden.jobs import breast, rows_over_sites
from tests.support.flare_job import Finished, run_flare_job

REPOSITORY = Path(__file__).parents[2]
UNWRITTEN = JobKind.__dataclass_fields__["planner"].default

# -- the kind: its job, prepare, train --------------------------------------------------------------------------------


@document
class CountJob(JobDocument):
    """Count the rows of a data set over all sites."""

    KIND: ClassVar[str] = "count"
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


def plan(request: PlanRequest, job: CountJob) -> Plan:
    sent = request.sites * 8
    return Plan({"bytes_sent": sent}, f"{sent} bytes sealed, under {THREAT_MODELS[job.profile].summary}")


ROW = JobKind("count", CountJob, SitePart(prepare, train), planner=Planner(plan))


# -- what follows from the row ----------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Finished:
    monkeypatch.setitem(KINDS, ROW.name, ROW)
    monkeypatch.setitem(PROTOCOLS, ROW.name, Span(1, 1))
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


def test_its_plan_is_asked_through_its_row(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(finished.parties.folder / "exported" / "job")
    assert main(["plan", folder, "--sites", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bytes_sent": 32}
    assert main(["plan", folder]) == 0 and "24 bytes sealed, under Pairwise masks" in capsys.readouterr().out
    assert main(["plan", folder, "--workers", "2"]) == 1 and "belongs to plans of vertical" in capsys.readouterr().err


def test_a_kind_without_a_plan_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for reason, row in (("none has been written", replace(ROW, planner=UNWRITTEN)), ("x", replace(ROW, planner="x"))):
        monkeypatch.setitem(KINDS, ROW.name, row)
        JobRecipe("job", CountJob("rows", "y")).export(str(tmp_path / reason))
        assert main(["plan", str(tmp_path / reason / "job")]) == 1
        assert f"count jobs have no plan: {reason}" in capsys.readouterr().err


def test_its_fields_get_a_table_a_schema_and_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, ROW.name, ROW)
    page = reference.reference_page()
    assert "### count\n\n<!-- count, written by" in page and page.index("### count") < page.index("## Keys of the site")
    assert "count.json" in {path.name for path in reference.schemas()}
    made = recipe_of_kind("count")("job", data_set="rows", label="y", min_clients=4)
    assert (made.job, made.min_clients) == (CountJob("rows", "y"), 4)


# -- a profile is one row, and a processor of its sums ----------------------------------------------------------------

PROFILE = """
        ThreatModel(
            profile="toy",
            changed=TAGGED,
            summary="Toy masks.",
            server_alone="Sizes.",
            one_site="Sums.",
            server_and_one_site="Sums too.",
            all_but_one="The last one's.",
        ),
    )
}
"""
WHAT_FOLLOWS = """
import importlib.util, json, sys, pathlib
import nvflare_plugins.site as package
path = pathlib.Path(package.__file__).parent / "profiles.py"
spec = importlib.util.spec_from_file_location("nvflare_plugins.site.profiles", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = package.profiles = module
source = path.read_text(encoding="utf-8")
row = sys.argv[1]
assert source.count("\\n    )\\n}\\n") == 1
exec(compile(source.replace("\\n    )\\n}\\n", row), str(path), "exec"), module.__dict__)

from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.audit import threat_model
from nvflare_plugins.evidence.threat_model import is_horizontal, notes_for, protection_text
from nvflare_plugins.pooled import processors
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Codec
from nvflare_plugins.wire.profiles import MaskedSums
from jobs import reference
from tests.generated_tables import threats

of_toy = processors.SumProfile("toy", lambda c: MaskedSums(c.masks), module.THREAT_MODELS["toy"], Codec.MASKED)
processors.BUILT_IN["toy"] = of_toy
policy = SitePolicy.from_dict({"allowed_profiles": ["toy"]}, workspace=pathlib.Path("/x"), site="a")
assert policy.allowed_profiles == ("toy",)
assert "toy" not in SitePolicy.from_dict({}, workspace=pathlib.Path("/x"), site="a").allowed_profiles
assert HorizontalJob("d", "y", profile="toy").profile == "toy"
assert '"toy"' in reference.schemas()[reference.FOLDER / "schema" / "horizontal.json"]
assert "ckks, toy" in reference.reference_page()
assert "toy" in json.dumps(reference.policy_schema()["properties"]["allowed_profiles"])
assert is_horizontal("toy") and notes_for("toy") and threat_model("toy").rows()[0] == ("the server alone", "Sizes.")
assert "Toy" not in protection_text("toy", "HISTOGRAM", "MASKED", private=True)
assert "| `toy` |" in threats(module.profiles_of(module.Family.HORIZONTAL))
assert main(["plan", "--rows", "900", "--features", "2", "--bins", "16", "--depth", "2", "--profile", "toy"]) == 0
assert main(["site-setup", sys.argv[2], "--add-profile", "toy"]) == 0
assert "toy" in json.loads((pathlib.Path(sys.argv[2]) / "local" / "veilboost.json").read_text())["allowed_profiles"]
"""


def test_a_new_profile_is_one_row_and_its_processor(tmp_path: Path) -> None:
    """In a process of its own: what reads the rows does so when it is imported."""
    command = [sys.executable, "-c", WHAT_FOLLOWS, PROFILE, str(tmp_path / "workspace")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Toy masks." in done.stdout and "2 sites together" in done.stdout


def test_a_site_without_the_kind_says_which_it_has(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, ROW.name)
    with pytest.raises(ConfigurationError, match=f"no kind of job 'count'; there are {', '.join(sorted(KINDS))}"):
        read_job(finished.parties.folder / "exported" / "job")
