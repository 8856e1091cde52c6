"""The report: complete, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.pages.report import build_report, feature_importance, write_report
from nvflare_plugins.pages.run_record import Curve, PointCurve, ReportSection, RoundRow, RunRecord, TrafficRow
from tests.support.evidence_attempts import Attempt
from tests.support.pages import Shape


@pytest.fixture(scope="module")
def model() -> bytes:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(200, 3)).astype(np.float32)
    matrix = xgb.DMatrix(features, features[:, 1] > 0, feature_names=["a", "needle", "c"])
    return bytes(xgb.train({"objective": "binary:logistic", "nthread": 1}, matrix, 2).save_raw("json"))


def run_record(**changes) -> RunRecord:
    record = RunRecord(
        job_id="job",
        attempt="a1",
        site="site-1",
        sites=("site-1", "site-2", "site-3"),
        profile="masks",
        params={"max_depth": 5},
        rounds=tuple(
            RoundRow(
                i, 0.5, {"eval-auc": 0.7 + i / 100, "eval-logloss": 0.5 - i / 100}, {"xgboost": 0.2, "network": 0.1}
            )
            for i in range(5)
        ),
        traffic=(TrafficRow("HISTOGRAM", "MASKED", True, 5, 1_500_000, 1_000, 0.3),),
        model="model.json",
        evidence="site-1.evidence.jsonl",
        comparison=(Curve("centralized XGBoost", "auc", (0.7, 0.8)),),
    )
    return dataclasses.replace(record, **changes)


@pytest.fixture
def folder(tmp_path, model):
    attempt = Attempt(tmp_path)
    attempt.open_session()
    attempt.round(0)
    attempt.finish()
    (tmp_path / "model.json").write_bytes(model)
    return tmp_path


def test_report_holds_every_part(folder):
    html = build_report(run_record(), folder)
    text = Shape(html).text
    for expected in (
        "Learning curve",
        "mean of the sites' local values",
        "centralized XGBoost",
        "Time per round",
        "1.5 MB out",
        "needle",
        "splits",
        "the server and one site",
        "W-1 sites together",
        "gradient histograms",
        "intact",
        "UNSIGNED",
        "max_depth",
        "pairwise masks",
    ):
        assert expected in text, expected


def test_report_needs_nothing_from_outside(folder):
    html = build_report(run_record(), folder)
    elements = Shape(html).elements
    assert not {"script", "img", "link", "iframe", "object", "base", "form"} & {tag for tag, *_ in elements}
    assert not {"src", "href", "xlink:href", "onload"} & {name for _, *names in elements for name in names}
    assert "://" not in html and "default-src 'none'" in html


def hostile_record(text: str) -> RunRecord:
    named = dict.fromkeys(("job_id", "site", "profile", "status", "registry", "name"), text)
    return run_record(
        **named,
        notes=(text,),
        params={text: text},
        cuts={"a": [text]},
        traffic=(TrafficRow(text, text, True, 1, 1, 1),),
        rounds=(RoundRow(0, 1.0, {f"{text}-{text}": 0.5}),),
        comparison=(Curve(text, text, (0.1,)),),
        sections=(ReportSection(text, (text,), (text,), ((text,),)),),
    )


def test_foreign_text_is_escaped(folder):
    elements = Shape(build_report(hostile_record("<script>alert(1)</script>"), folder)).elements
    assert "script" not in {tag for tag, *_ in elements}


def test_foreign_text_does_not_reorder_or_flood_the_page(folder):
    """Marks of writing direction turn "not signed" around; a lone surrogate could not even be written."""
    run = hostile_record("\u202e\u2066deifirev\x1b[2J\ud800\x00" + "x" * 100_000)
    page = build_report(run, folder)
    assert all(line.isprintable() for line in page.split("\n"))
    assert "x" * 5000 not in page
    run.write(folder)
    write_report(folder)


def test_plain_profile_is_marked_as_unprotected(folder):
    html = build_report(run_record(profile="plain", traffic=(TrafficRow("METRIC", "PLAIN", True, 1, 16, 16),)), folder)
    assert "chip bad'>profile plain" in html and "NONE: readable by the server" in html


@pytest.mark.parametrize("profile", ["masks", "bfv", "ckks", "plain"])
def test_every_profile_says_who_could_learn_what(folder, profile):
    text = Shape(build_report(run_record(profile=profile), folder)).text
    assert ("EVERY SITE'S CONTRIBUTIONS" in text) == (profile == "ckks")


def test_run_without_rounds_model_or_evidence_still_has_a_report(tmp_path):
    run = RunRecord("job", "a", "site-1", ("site-1",), "masks", status="aborted")
    text = Shape(build_report(run, tmp_path)).text
    assert "aborted" in text and "holds no evidence" in text


def test_key_figures_fit_what_was_run(folder):
    assert "1.5 MB</b><span>sent by this site in all" in build_report(run_record(), folder)
    assert "<span>rounds</span>" not in build_report(run_record(rounds=()), folder)
    unstaged = build_report(run_record(rounds=(RoundRow(0, 1.0, {}), RoundRow(1, 1.0, {}))), folder)
    assert "whole round 1 s" in unstaged


def test_missing_metric_values_leave_gaps(folder):
    rounds = (RoundRow(0, 1.0, {"eval-auc": None}), RoundRow(1, 1.0, {"eval-auc": 0.5}))
    assert "round 2: 0.5" in build_report(run_record(rounds=rounds), folder)


def test_tampered_evidence_is_called_broken(folder):
    path = folder / "site-1.evidence.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"n_values":4', b'"n_values":5', 1))
    assert "chip bad'>broken" in build_report(run_record(), folder)


def test_the_policy_under_which_a_site_took_part_is_shown(folder):
    session = read_log(folder / "site-1.evidence.jsonl").session
    assert f"policy at the time {session['policy_hash']}<" in build_report(run_record(), folder)


def test_aborted_evidence_is_not_called_intact(tmp_path):
    log = EvidenceLog(tmp_path / "site-1.evidence.jsonl", "site-1", "job", "a1", "masks")
    log.close()
    assert "chip warn'>not completed" in build_report(run_record(), tmp_path)


def test_feature_importance_finds_the_planted_feature(folder):
    gain, weight = feature_importance(folder / "model.json")
    assert max(gain, key=gain.get) == "needle" and weight["needle"] >= 1


def test_the_tip_of_a_bar_speaks_of_gains_only_where_there_are_some(folder):
    assert "needle: mean gain " in build_report(run_record(), folder)
    document = json.loads((folder / "model.json").read_text())
    for tree in document["learner"]["gradient_booster"]["model"]["trees"]:  # as a bagged model has them
        tree["loss_changes"] = [0.0] * len(tree["loss_changes"])
    (folder / "model.json").write_text(json.dumps(document))
    report = build_report(run_record(), folder)
    assert "mean gain" not in report and re.search(r"needle: \d+ splits?<", report)


def test_broken_model_file_does_not_prevent_the_report(folder):
    (folder / "model.json").write_text("{}")
    assert "no importance for this model" in build_report(run_record(), folder)


def test_command_line_rebuilds_the_file(folder, capsys):
    run_record().write(folder)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert re.match("<!doctype html>", (folder / "report.html").read_text())
    assert main(["report", str(folder / "nowhere")]) == 1
    with pytest.raises(ConfigurationError):
        write_report(folder / "nowhere")


def test_sections_of_a_kind_of_job_are_drawn_and_survive_the_file(folder):
    hostile = "<script>alert(1)</script>"
    section = ReportSection(
        "Own <section>",
        ("a paragraph",),
        ("name", hostile),
        (("x", hostile),),
        (("bar", 2.0, hostile),),
        (PointCurve(hostile, ((1.0, 0.1), (2.0, 0.2))),),
        "round",
        "epsilon",
    )
    run = run_record(title="Another kind of job", sections=(section,))
    run.write(folder)
    assert RunRecord.read(folder).sections == (section,)
    parsed = Shape(build_report(RunRecord.read(folder), folder))
    assert "script" not in {tag for tag, *_ in parsed.elements}
    for expected in ("Another kind of job", "Own <section>", "a paragraph", "epsilon"):
        assert expected in parsed.text


def test_contents_of_sealed_messages_are_listed(tmp_path):
    log = EvidenceLog(tmp_path / "site-1.evidence.jsonl", "site-1", "job", "a1", "paillier")
    for size in (100, 200):
        log.content("sent", "site-2", Content.GRADIENTS, Protection.PAILLIER, size)
    log.content("received", "site-2", Content.HISTOGRAMS, Protection.PAILLIER, 50)
    log.end("completed")
    log.close()
    text = Shape(build_report(run_record(profile="paillier", model=None), tmp_path)).text
    assert "gradient pairs of the rows" in text and "300 B" in text and "Paillier ciphertexts" in text
    assert "mean of the sites' local values" not in text  # the active party alone knows the metric


def test_rounds_count_from_one_as_in_the_log(folder):
    html = build_report(run_record(rounds=(RoundRow(0, 1.0, {"eval-auc": 0.5}), RoundRow(1, 1.0, {}))), folder)
    assert "round 1: 0.5" in html and "round 2: whole round 1 s" in html and "round 0" not in html


def test_a_single_round_that_was_not_measured_has_no_seconds(folder):
    html = build_report(run_record(rounds=(RoundRow(0, 0.0, {}),)), folder)
    assert "<span>round</span>" in html and "per round, median" not in html and "after the first" not in html


def test_code_in_texts_is_shown_as_code_and_nothing_else_becomes_markup(folder):
    section = ReportSection("Own", ("run `a <b>` here",), (), (), (), (), "round", "epsilon")
    html = build_report(run_record(profile="paillier", registry="same rows.", sections=(section,)), folder)
    assert "run <code>a &lt;b&gt;</code> here" in html and "the preset <code>exact</code>" in html
    assert "`" not in Shape(html).text and "<p>Same rows.</p>" in html


DAMAGED_FIELDS = {
    "traffic": [["HISTOGRAM", 1, [], {}, "x", None, "-"]],
    "rounds": [{"round": 0, "seconds": "x", "metrics": {"auc": "high"}, "stages": {}}],
    "sites": [{"a": 1}, 3],
    "profile": 3.5,
    "evidence": 5,
    "model": [],
}


@pytest.mark.parametrize("field", DAMAGED_FIELDS)
def test_a_damaged_record_is_no_traceback(field, tmp_path, capsys):
    run_record().write(tmp_path)
    document = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**document, field: DAMAGED_FIELDS[field]}))
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("veilboost report: ") and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
