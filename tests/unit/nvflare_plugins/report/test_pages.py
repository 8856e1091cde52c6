"""Pages and figures: whatever names hold is text on them, on all templates; nothing is loaded or evaluated."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost as xgb
from jinja2 import StrictUndefined, meta

from dp_components.accounting import PrivacyCost
from dp_components.events import NeighbouringRelation
from dp_components.ledger import Budget, JobSpending, LedgerHistory, LedgerIdentity
from nvflare_plugins.cli import drift
from nvflare_plugins.dossier import attacks
from nvflare_plugins.dossier.attacks import Attacked, AttackReport, Bound, Estimate, Reconstructed
from nvflare_plugins.dossier.parts import Facts, Part, as_json, build_cover
from nvflare_plugins.dossier.structure import Finding
from nvflare_plugins.evidence.audit import plugin_facts
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.pages import profile_page, runs_page, search_pages
from nvflare_plugins.pages.charts import Bar, environment, horizontal_bars, page, picture
from nvflare_plugins.pages.model_charts import RowFigures, beeswarm, class_figures, waterfall
from nvflare_plugins.pages.report import RELEASE_FACTS, build_report, build_summary, run_part
from nvflare_plugins.pages.run_record import (
    EVALUATION,
    TRAINING,
    Curve,
    DataFacts,
    PointCurve,
    ReportSection,
    RoundRow,
    RunRecord,
    Spending,
    TrafficRow,
)
from nvflare_plugins.site.profiles import Statement
from tests.support.evidence_attempts import Attempt
from tests.support.pages import Shape

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></svg></pre><b>",
    "{{7*7}}",
    '{% include "style.css" %}{# gone #}',
    "&lt;i&gt;&#60;i&#62;",
)
PLAIN = "a name"
TEXTS = ("summary", "server_alone", "one_site", "server_and_one_site", "all_but_one")
TAGS = """html head meta title style body main header footer section div h1 h2 h3 p span b i br code pre
 details summary caption ul li table tr th td svg g line rect circle polyline text"""
ATTRIBUTES = """lang charset name content http-equiv class style role aria-label viewbox width height
 x y x1 x2 y1 y2 cx cy r rx points fill stroke stroke-width text-anchor transform xmlns"""

SORTED = ("script thead tbody input label a", "id type value checked data-run data-value href")


def run_record(text: str, **changes: object) -> RunRecord:
    """Return a record that has something of all, and the text in all of it."""
    columns = tuple(f"{text} {n}" for n in range(50))
    facts = {
        "columns": columns,
        "missing": dict.fromkeys(columns, 3),
        "categories": {text: (text, "b")},
        "label": text,
        "label_classes": (text, "no"),
        "weight": text,
    }
    section = ReportSection(
        text,
        (text, f"with `{text}` as code"),
        (text, "b"),
        ((text, "c"),),
        ((text, 1.0, text),),
        (PointCurve(text, ((1.0, 0.5), (2.0, 0.25))),),
        text,
        text,
        ((0.0, 9, 2), (0.25, 4, 4), (0.625, 1, 8)),
    )
    values: dict[str, object] = {
        "job_id": text,
        "attempt": text,
        "site": text,
        "sites": (text, "site-2", text + "3"),
        "profile": text,
        "status": text,
        "params": {text: text, "max_depth": 3},
        "settings": {text: [text]},
        "cuts": {text: {text: 1}},
        "versions": {text: text, "veilboost": text},
        "rounds": tuple(
            RoundRow(
                i,
                2.0,
                {f"{text}-{text}": 0.5 + i / 10, "eval-auc": 0.75, "loss": float("nan")},
                {"xgboost": 0.5},
                (("encrypt", 0.0, 0.5), ("network", 0.5, 2.0)),
            )
            for i in range(3)
        ),
        "traffic": (TrafficRow(text, text, True, 5000, 10_000, 5, 0.5), TrafficRow("METRIC", "PLAIN", True, 1, 8, 8)),
        "registry": text,
        "model": "model.json",
        "evidence": "site-1.evidence.jsonl",
        "best_round": 1,
        "comparison": (Curve(f"central {text}", text, (0.5, 0.75)),),
        "notes": (text,),
        "title": text,
        "sections": (section,),
        "started": f"2026-11-22T10:00:00{text}",
        "finished": f"2026-11-22T11:00:00{text}",
        "policy_hash": text,
        "consents": (text, "exact_cuts"),
        "data": (
            DataFacts(text, TRAINING, 1234, **facts),
            DataFacts(text, EVALUATION, 56, **facts),
            DataFacts("other", text, 7),
        ),
        "statement": {"controller": text, "purpose": text},
        "spending": (Spending(text, 2.0, 1e-6, 0.75), Spending(text, 1.0, 1e-6)),
    }
    return RunRecord(**{**values, **changes})  # type: ignore[arg-type]


def findings(text: str) -> list[Finding]:
    return [Finding(text, text, text, text, holds, text, text) for holds in (True, False)]


def fill(folder: Path, text: str) -> Path:
    """Write the model and the evidence of a plugin's run, with the text wherever it may stand."""
    rows = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
    booster = xgb.train({"nthread": 1, "max_depth": 3}, xgb.DMatrix(rows, rows[:, 1] + rows[:, 2] ** 2), 2)
    document = json.loads(bytes(booster.save_raw("json")))
    document["learner"]["feature_names"] = [text, f"{text} 2", "c"]
    document["learner"]["feature_types"] = ["float"] * 3
    (folder / "model.json").write_text(json.dumps(document))
    digest = hashlib.sha256((folder / "model.json").read_bytes()).hexdigest()
    facts = {"file": "model.json", "model": digest, "released": False, "by": text, "time": text}
    (folder / RELEASE_FACTS).write_text(json.dumps(facts | {"findings": [asdict(one) for one in findings(text)]}))
    attempt = Attempt(folder, profile="plugin.toy")
    claims = plugin_facts("toy", text, text, Statement(**dict.fromkeys(TEXTS, text), notes=(text, text)))
    attempt.open_session(**{site: {"protection": claims, "policy_hash": "ab" * 32} for site in attempt.sites})
    log = attempt.logs["site-1"]
    log.content("sent", "site-2", Content.GRADIENTS, Protection.PAILLIER, 100)
    log.content("received", "site-2", Content.HISTOGRAMS, Protection.PAILLIER, 50)
    log.spend(text, text, 0.5, 1e-6)
    log.end("completed")
    attempt.close()
    return folder


def shifted(text: str) -> dict[str, object]:
    one = {
        "name": text,
        "index": 0.5,
        "by_chance": 0.01,
        "missing_before": 0.1,
        "missing_now": 0.2,
        "unknown": 7,
        "new_categories": {text: 6, "b": 1},
        "labels": [text, "b"],
        "before": [0.5, 0.5],
        "now": [0.25, 0.75],
    }
    calm = {**one, "index": 0.01, "unknown": 0, "new_categories": {}}
    return {
        "model": text,
        "job": text,
        "site": text,
        "threshold": 0.1,
        "training_rows": 1,
        "new_rows": 20,
        "scores": [calm],
        "features": [one, calm],
        "drifted": [text],
        "notes": [text],
    }


def ledger_of(text: str) -> LedgerHistory:
    cost = PrivacyCost(mu_squared=0.01)
    jobs = tuple(
        JobSpending(text, f"2026-11-0{n}T10:00:00+00:00", text, text, 1000, cost, None, ()) for n in range(1, 4)
    )
    identity = LedgerIdentity(text, text, NeighbouringRelation.ADD_OR_REMOVE_ROW)
    return LedgerHistory(identity, Budget(2.0, 1e-5, 0.5), jobs, cost, cost, cost)


def attacked(text: str) -> AttackReport:
    one = Estimate(0.6, 0.55, 0.65)
    found = (Attacked("loss", one, one), Attacked("reference", one, one))
    values = (Reconstructed(text, 4, one, one, 0.3, one),)
    bound = Bound(0.7, 0.1, 0.6, text)
    return AttackReport("", text, text, found, found, Attacked("none", one, one), bound, values, (0.5,), (text,))


def cover_of(text: str, folder: Path) -> str:
    job = {"number": 1, "is_this_job": True, "opened": text, "state": text, "releases": 1000, "spent_epsilon": None}
    ledger = {
        "data_set": text,
        "budget": {"epsilon": 1.0, "delta": 1e-6},
        "jobs": [{**job, "is_this_job": n == 44} for n in range(45)],
        "spent_epsilon": 0.5,
        "neighbouring": text,
        "rows_per_person": 2,
    }
    threats = {
        "summary": text,
        "claimed_by_plugin": True,
        "who_learns_what": [{"who": text, "learns": text}],
        "parties": 3,
    }
    policy = {"min_sites": text, "allowed_profiles": [text], "unsigned_peers": True, "consents": {text: [text], "b": 0}}
    models = [{"file": text, "sha256": text}, {"file": text, "commitment": text}]
    parts = (
        Part(text, {"models.json": as_json(models), "threats.json": as_json(threats)}, remark=text),
        Part(text, {"ledger.json": as_json([ledger]), "policy.json": as_json(policy)}),
        Part(text, {"bom.cdx.json": as_json({"components": [1, 2]}), **{f"{text} {n}": b"" for n in range(9)}}),
        Part(text, missing=text),
        Part(text, missing=text, is_due=False),
    )
    return build_cover(run_record(text), parts, Facts(text, text, True, datetime(2026, 11, 22, tzinfo=UTC)))


def profile_of(text: str) -> profile_page.ProfileFacts:
    cells = tuple(profile_page.ProfiledCell(f"{text} {n}", (5, 10, 20), (0.5, -0.5, 0.25)) for n in range(3))
    several = tuple(
        profile_page.ProfiledFeature(f"{text} {n}", 3, (0.3, 0.2, 0.1), (0.4, 0.2, 0.1), (0.01, 0.01, 0.01), cells)
        for n in range(45)
    )
    return profile_page.ProfileFacts(text, text, text, 3, 1000, ((text, 1), ("b", 2), ("c", 3)), 5, several)


def shifts_of(text: str) -> list[profile_page.Shift]:
    return [profile_page.Shift(f"{text} {n}", index, ((text, 0.5, 0.25),)) for n, index in enumerate((0.3, 0.2, 0.01))]


def tuned(text: str, n_trials: int = 4) -> search_pages.TuningFacts:
    trials = tuple(
        search_pages.TunedTrial(
            n, (("eta", 0.01 * 10**n), (text, float(n)), ("b", f"{text} {n}")), 0.5 - n / 10, 0.1, (0.4, 0.6), 7
        )
        for n in range(3)
    )
    failed = search_pages.TunedTrial(3, ((text, 5.0),), float("nan"), float("nan"), (float("nan"),), 1)
    return search_pages.TuningFacts(
        text, text, text, text, True, 3, 2, (*trials, failed), f"first {text}\nsecond", n_trials, text
    )


def selected(text: str, n_shadows: int) -> search_pages.SelectionFacts:
    steps = [search_pages.SelectionStep(3 - n, 0.5 + n / 10, 0.01, (text,)) for n in range(3)]
    columns = tuple(
        search_pages.SelectedColumn(
            f"{text} {n}", n < 2, n or None, 0.5, 0.1, (0.3, 0.1, 0.01, n == 1), (n, text) if n_shadows else None
        )
        for n in range(3)
    )
    return search_pages.SelectionFacts(
        text, text, text, text, True, 3, 2, text, text, tuple(steps), 2, 1, columns, n_shadows, f"first {text}\nsecond"
    )


def compared(text: str) -> profile_page.Comparison:
    metrics = (
        profile_page.Compared(text, True, 0.7, 0.75, 0.9, 0.05, 0.15),
        profile_page.Compared(text, False, 0.7, None, 0.9, -0.05, 0.15),
    )
    curves = tuple((f"{text} {n}", ((1.0, 0.5), (2.0, 0.75))) for n in range(2))
    scores, names = [(0.0, 9, 2), (0.5, 4, 8)], [text, "b"]
    values, lists = np.array([[1.0, 0.0], [2.0, 1.0]]), {text: (text, "other")}
    rows = RowFigures(
        class_figures(scores, text),
        ((text, (1, 2)), ("b", (0, 3))),
        beeswarm(names, values - 1.5, values[:, ::-1], lists),
        waterfall(names, values[0], values[0, ::-1], 0.5, lists),
        text,
    )
    return profile_page.Comparison(text, text, text, 1, 400, 2, 3, metrics, text, curves, (text,), rows)


def checked(text: str) -> SimpleNamespace:
    found = {text: [text, "b"]}
    return SimpleNamespace(
        rows={text: 3, "b": 0}, problems=found, notes=found, united=[text], features=[text], left_out=[text]
    )


def runs_of(text: str) -> str:
    runs = [run_record(text, name=text), *(run_record(text, rounds=(), params={}) for _ in range(25))]
    found = [(run, runs_page.facts_of(run, text, [text])) for run in runs]
    return runs_page.runs_html(text, found, {text: "job/report.html"})


NOW = datetime(2026, 11, 22, tzinfo=UTC)
PAGES: dict[str, tuple[str, Callable[[str, Path], str]]] = {
    "report": ("report.html", lambda text, folder: build_report(run_record(text), fill(folder, text))),
    "report of a plugin": (
        "report.html",
        lambda text, folder: build_report(run_record(text, profile="plugin.toy"), fill(folder, text)),
    ),
    "report without anything": (
        "report.html",
        lambda text, folder: build_report(RunRecord(text, text, text, (text,), "masks"), folder),
    ),
    "part of a notebook": (
        "part.html",
        lambda text, folder: run_part(run_record(text)) + run_part(RunRecord(text, text, text, (text,), "masks")),
    ),
    "summary": (
        "summary.html",
        lambda text, folder: build_summary(run_record(text, profile="plugin.toy"), fill(folder, text), [text, text]),
    ),
    "summary without anything": (
        "summary.html",
        lambda text, folder: build_summary(RunRecord(text, text, text, (text,), text), folder),
    ),
    "drift": ("drift.html", lambda text, folder: drift.build_page(shifted(text))),
    "ledger": ("ledger.html", lambda text, folder: runs_page.ledger_html([ledger_of(text)], text, NOW)),
    "local": ("local.html", lambda text, folder: profile_page.comparison_html(compared(text))),
    "profile": ("profile.html", lambda text, folder: profile_page.profile_html(profile_of(text))),
    "profile of a site": (
        "profile_local.html",
        lambda text, folder: profile_page.local_html(text, profile_of(text), 10, shifts_of(text)),
    ),
    "selection": ("selection.html", lambda text, folder: search_pages.selection_html(selected(text, 0))),
    "selection with shadows": ("selection.html", lambda text, folder: search_pages.selection_html(selected(text, 9))),
    "tuning": ("tuning.html", lambda text, folder: search_pages.tuning_html(tuned(text))),
    "tuning that runs": ("tuning.html", lambda text, folder: search_pages.tuning_html(tuned(text, 7))),
    "attacks": ("attacks.html", lambda text, folder: attacks.build_page(attacked(text), text, text)),
    "no attacks": ("attacks.html", lambda text, folder: attacks.build_page(AttackReport(text), text, text)),
    "structure": (
        "structure.html",
        lambda text, folder: page("structure.html", findings=findings(text), job_id=text, site=text, own_rules=False),
    ),
    "dossier": ("dossier.html", cover_of),
    "runs": ("runs.html", lambda text, folder: runs_of(text)),
    "check": ("check.html", lambda text, folder: page("check.html", check=checked(text))),
    "picture": ("figures.svg", lambda text, folder: picture(horizontal_bars([Bar(text, 1.0, text)]), text)),
}


@pytest.mark.parametrize("name", PAGES)
def test_whatever_a_name_holds_is_text_and_is_not_evaluated(name: str, tmp_path: Path) -> None:
    build = PAGES[name][1]
    expected = Shape(build(PLAIN, folder(tmp_path, "plain")))
    more = SORTED if name == "runs" else ("", "")
    assert {element[0] for element in expected.elements} <= {*TAGS.split(), *more[0].split()}
    allowed = {*ATTRIBUTES.split(), *more[1].split()}
    assert {attribute for element in expected.elements for attribute in element[1:]} <= allowed
    for number, text in enumerate(HOSTILE):
        found = Shape(build(text, folder(tmp_path, str(number))))
        assert found.elements == expected.elements, text
        assert text in found.text
        assert [value.replace(text, PLAIN) for value in found.values] == expected.values


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    return made


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_nothing_outside_of_itself(name: str, tmp_path: Path) -> None:
    html = PAGES[name][1](PLAIN, tmp_path).replace('xmlns="http://www.w3.org/2000/svg"', "")
    html = html.replace('href="job/report.html"', "")
    assert not re.search(r"://|url\(|@import|\b(src|href)\s*=", html)
    assert "default-src 'none'" in html or name in ("picture", "part of a notebook", "check")


def test_every_template_is_one_of_these_pages_or_part_of_one() -> None:
    templates, reached = environment(), {template for template, _ in PAGES.values()}
    waiting = list(reached)
    while waiting:
        source, _, _ = templates.loader.get_source(templates, waiting.pop())
        found = {one for one in meta.find_referenced_templates(templates.parse(source)) if one} - reached
        reached |= found
        waiting += found
    assert reached == set(templates.list_templates())


def test_templates_escape_everything_and_take_nothing_for_granted() -> None:
    templates = environment()
    assert templates.autoescape is True and templates.undefined is StrictUndefined
    for name in templates.list_templates():
        source, _, _ = templates.loader.get_source(templates, name)
        assert not re.search(r"\|\s*safe\b|autoescape|Markup|tojson|xmlattr|urlize", source), name
        assert not re.search(r"=[^\"'\s<>{}]*\{\{", re.sub(r"\{%.*?%\}", "", source)), f"{name}: quote attributes"
    with pytest.raises(AttributeError, match="'job_id' is undefined"):
        page("attacks.html", site="", report=AttackReport("none"), names={})


def test_the_page_of_runs_runs_the_one_script_that_it_names_and_no_other() -> None:
    html = runs_of("</script><script>alert(1)</script>")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    allowed = re.search(r"script-src 'sha256-([^']+)'\"", html)
    assert allowed is not None and base64.b64decode(allowed[1]) == hashlib.sha256(script.encode()).digest()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function|fetch|import", script)


def test_a_script_is_shown_line_by_line() -> None:
    html = search_pages.tuning_html(tuned(PLAIN))
    assert f"<pre>\nfirst {PLAIN}\nsecond\n</pre>" in html


def test_a_column_named_like_a_colour_of_the_style_is_a_name() -> None:
    drawn = picture(horizontal_bars([Bar("var(--none)", 1.0, "one")]), "caption")
    assert "var(--none)" in drawn and "var(--c" not in drawn
