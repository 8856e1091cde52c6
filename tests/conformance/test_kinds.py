"""What every kind of job owes to its user, run over the table of kinds."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.flare.kinds import KINDS, read_job
from nvflare_plugins.pages.report import build_summary
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.xgb.model_json import LEAST_XGBOOST, LEAST_XGBOOST_ATTRIBUTE, PART_ATTRIBUTE
from tests.conformance.kind_cases import CASES, DATA, ONE_OF_EACH, recipe_of_kind
from tests.support.examples import quick
from tests.support.flare_job import Finished, run_flare_job
from tests.support.scoring import check_covers_add_up

SITES = ("site-1", "site-2", "site-3")
# Consents without which a site would have refused the case of a kind.
_NEEDED = {
    "bagging": dict.fromkeys(SITES, ("share_own_trees",)),
    "profile": dict.fromkeys(SITES, ("feature_profile",)),
    "selection": dict.fromkeys(SITES, ("feature_profile", "tuning")),
    "tuning": dict.fromkeys(SITES, ("tuning",)),
    "vertical_tuning": {
        "site-1": ("plain_profile", "tuning"),
        "site-2": ("exact_bins", "plain_profile", "tuning"),
        "site-3": ("exact_bins", "plain_profile", "tuning"),
    },
    "vertical": {
        "site-1": ("plain_profile",),
        "site-2": ("exact_bins", "plain_profile"),
        "site-3": ("exact_bins", "plain_profile"),
    },
}
HUGE, DEEP = 10**400, [[[[[[[[[[1]]]]]]]]]]


def recipe_of(name: str, **changes: object):
    case = CASES[name]
    return case.recipe("job", **{**case.fields, **changes}, sites=list(SITES))


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(KINDS)
    assert all(case.recipe is recipe_of_kind(name) and case.recipe.kind == name for name, case in CASES.items())


@pytest.mark.parametrize("name", CASES)
def test_what_protects_a_job_is_explained(name: str) -> None:
    job = KINDS[name].job.from_dict(dict(CASES[name].fields))
    assert job.profile in THREAT_MODELS and THREAT_MODELS[job.profile].summary


# -- what a job may say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_job_survives_its_folder(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name)
    recipe.export(str(tmp_path))
    assert read_job(tmp_path / "job") == recipe.job == KINDS[name].job.from_dict(recipe.job.to_dict())
    assert not list(tmp_path.rglob("custom")), "no code travels with a job"
    meta = json.loads((tmp_path / "job" / "meta.json").read_text())
    assert meta["mandatory_clients"] == list(SITES) and meta["min_clients"] == len(SITES)


@pytest.mark.parametrize("name", CASES)
def test_a_job_folder_states_what_differs_from_the_defaults(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name)
    recipe.export(str(tmp_path))
    stated = json.loads(next(tmp_path.rglob("config_fed_server.json")).read_text())["workflows"][0]["args"]["job"]
    whole = recipe.job.to_dict()
    assert set(stated) < set(whole) and all(stated[field] == whole[field] for field in stated)
    assert set(CASES[name].least) <= set(stated)


@pytest.mark.parametrize("name", CASES)
def test_other_documents_are_no_jobs(name: str) -> None:
    read, least = KINDS[name].job.from_dict, CASES[name].least
    read(dict(least))
    for document in (None, [], "job", 7, {}, {**least, "surprise\x1b[2J": 1}):
        with pytest.raises(ConfigurationError) as refused:
            read(document)
        assert str(refused.value).isprintable()
    for field in least:
        with pytest.raises(ConfigurationError):
            read({**least, field: None})


@pytest.mark.parametrize("name", CASES)
def test_no_field_takes_what_no_field_can_be(name: str) -> None:
    read, least = KINDS[name].job.from_dict, CASES[name].least
    for field in dataclasses.fields(KINDS[name].job):  # type: ignore[arg-type]
        for value in (HUGE, float("nan"), float("inf"), DEEP, b"bytes", object(), {1: 2}, "\ud800"):
            with pytest.raises(ConfigurationError) as refused:
                read({**least, field.name: value})
            assert len(str(refused.value)) < 1000 and "4711" not in str(refused.value)


# -- what a job does --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CASES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Finished]:
    name = request.param
    parties = CASES[name].give(tmp_path_factory.mktemp(name))
    return name, run_flare_job(recipe_of(name), parties)


def test_a_job_ends_well_at_all_sites(finished: tuple[str, Finished]) -> None:
    name, run = finished
    assert run.reason is None, run.reason
    assert {report["status"] for report in run.reports.values()} == {"completed"}
    assert len({report["model_hmac"] for report in run.reports.values()}) == 1
    assert run.summary["status"] == "completed" and set(run.summary["sites"]) == set(SITES)
    written = [any((run.folder(site) / file).is_file() for file in CASES[name].results) for site in SITES]
    assert all(written) or (name in ("vertical_inference", "vertical_tuning") and written[0])


def test_a_finished_model_says_what_reads_it_and_has_covers_to_divide_by(finished: tuple[str, Finished]) -> None:
    for path in (path for site in SITES for path in finished[1].folder(site).glob("*model.json")):
        document = json.loads(path.read_bytes())
        if "learner" in document and PART_ATTRIBUTE not in document["learner"]["attributes"]:
            assert document["learner"]["attributes"][LEAST_XGBOOST_ATTRIBUTE] == LEAST_XGBOOST
            check_covers_add_up(document)


def test_a_log_has_a_line_for_a_round_and_none_for_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = run_flare_job(recipe_of("horizontal", num_rounds=10), CASES["horizontal"].give(tmp_path))
    assert run.reason is None, run.reason
    of_sites = [record.getMessage() for record in caplog.records if record.name.endswith("JobExecutor")]
    assert sum("round 10 of 10" in line for line in of_sites) == len(SITES)
    assert len(of_sites) < 30 * len(SITES) and sum(run.frames.values()) > 30 * len(SITES)


def test_every_site_keeps_a_record_and_a_report(finished: tuple[str, Finished]) -> None:
    name, run = finished
    for site in SITES:
        document = json.loads((run.folder(site) / "run.json").read_text())
        record = RunRecord.from_dict(document)
        assert (record.site, record.sites, record.job_id) == (site, SITES, "job")
        assert record.title and record.profile == KINDS[name].job.from_dict(dict(CASES[name].fields)).profile
        assert record.settings and record.traffic and record.versions["veilboost"]
        assert (run.folder(site) / record.evidence).is_file()
        assert "</html>" in (run.folder(site) / "report.html").read_text()


def test_a_record_says_when_on_what_and_under_which_policy(finished: tuple[str, Finished]) -> None:
    name, run = finished
    for site in SITES:
        record = RunRecord.from_dict(json.loads((run.folder(site) / "run.json").read_text()))
        assert datetime.fromisoformat(record.started) <= datetime.fromisoformat(record.finished)
        assert datetime.fromisoformat(record.started).utcoffset() == timedelta(0)
        assert record.policy_hash == run.log(site).session["policy_hash"]
        assert [one.name for one in record.data] == [DATA] and record.data[0].rows > 0 and record.data[0].columns
        assert record.consents == _NEEDED.get(name, {}).get(site, ()), name
        private = record.profile.startswith("dp_") and not (name == "federboost_vertical" and site == "site-1")
        assert [one.data_set for one in record.spending] == ([DATA] if private else [])
        assert all(one.spent is not None and one.spent > 0 for one in record.spending)
        page = build_summary(record, run.folder(site))
        assert f"{record.data[0].rows} rows of this site" in page


def test_what_a_site_counts_is_in_no_file_of_another(finished: tuple[str, Finished]) -> None:
    _, run = finished
    for site in SITES:
        others = {other: run.folder(other) / "run.json" for other in SITES if other != site}
        assert all(f'"site": "{site}"' not in path.read_text() for path in others.values())
    assert not list(run.evidence.rglob("*.html")) and not list(run.evidence.rglob("run.json"))


def test_the_evidence_of_all_verifies(finished: tuple[str, Finished]) -> None:
    _, run = finished
    found = verify([run.evidence])
    assert found.sound, found
    assert {path.name.split(".")[0] for path in run.evidence.iterdir()} == {"server", *SITES}
    for site in SITES:
        log = run.log(site)
        assert log.completed and log.session["sites"] == list(SITES)
        assert log.path.read_bytes() == next(run.evidence.glob(f"{site}.*")).read_bytes()


@pytest.mark.parametrize("finished", quick(CASES, *ONE_OF_EACH, "vertical_inference"), indirect=True)
def test_an_abort_in_the_middle_leaves_evidence_and_no_result(finished: tuple[str, Finished], tmp_path: Path) -> None:
    name, whole = finished
    middle = whole.frames[SITES[-1]] // 2
    run = run_flare_job(recipe_of(name), CASES[name].give(tmp_path), abort_after=middle)
    assert run.reason is not None and "aborted by an operator" in run.reason
    assert {report["status"] for report in run.reports.values()} == {"failed"}
    for site in SITES:
        log = run.log(site)
        assert not log.unfinished and log.end["status"] == "aborted" and log.end["reason"]
        assert not [file for file in CASES[name].results if (run.folder(site) / file).exists()]
        assert not (run.folder(site) / "run.json").exists()
    assert run.summary["status"] == "failed"


@pytest.mark.parametrize("name", quick(CASES, "bagging", "horizontal"))
def test_every_kind_runs_on_a_wheel_without_a_communicator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xgb, "__version__", "3.4.1")
    monkeypatch.setattr(xgb, "build_info", lambda: {"USE_FEDERATED": False})
    run = run_flare_job(recipe_of(name), CASES[name].give(tmp_path))
    assert run.reason is None, run.reason


def test_xgboost_is_refused_by_name_where_its_wheel_has_no_communicator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xgb, "__version__", "3.4.1")
    for engine in ({"engine": "xgboost"}, {"params": {"objective": "binary:logistic", "booster": "dart"}}):
        folder = tmp_path / next(iter(engine))
        folder.mkdir()
        case = CASES["horizontal"]
        recipe = case.recipe("job", **{**case.fields, **engine}, sites=list(SITES))
        run = run_flare_job(recipe, case.give(folder))
        words = r"site-\d: this site runs xgboost 3\.4\.1, which has no federated .* pip install"
        assert re.search(words, str(run.reason)), run.reason
        assert not [site for site in SITES if (run.folder(site) / "run.json").exists()]


@pytest.mark.parametrize("name", quick(CASES, *ONE_OF_EACH))
def test_an_unknown_wheel_stops_every_kind_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgb, "__version__", "3.5.0")
    run = run_flare_job(recipe_of(name), CASES[name].give(tmp_path))
    assert re.search(r"site-\d: this site runs xgboost 3\.5\.0, .* it knows 3\.2 to 3\.4: pip install", str(run.reason))


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_at_one_site_is_the_same_text_at_all(name: str, tmp_path: Path) -> None:
    parties = CASES[name].give(tmp_path)
    parties.set_policy("site-2", data_sets=None)
    run = run_flare_job(recipe_of(name), parties)
    own = run.reports["site-2"]["error"]
    assert run.reason == f"VeilBoost job failed: site-2: {own}" and DATA in own
    for site in ("site-1", "site-3"):
        assert run.reports[site]["error"] == f"site-2: {own}"
        assert run.log(site).end["reason"] == f"site-2: {own}"
    assert not [site for site in SITES if (run.folder(site) / "run.json").exists()]
