"""``veilboost release``, what its decision binds, and what a policy that asks for one refuses."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.cli.main import main
from nvflare_plugins.dossier import release as dossier_release
from nvflare_plugins.dossier.decision import open_decision
from nvflare_plugins.dossier.release import DECISION
from nvflare_plugins.dossier.structure import _spent
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.evidence.format import canonical
from nvflare_plugins.pages.report import RELEASE_FACTS
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.scoring.rows import load_again
from nvflare_plugins.site.memory.registry import Registry, Wanted
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import ReleaseRules

LENIENT = {"max_share_in_small_groups": 1, "max_share_in_small_cells": 1, "min_leaf_rows": 0}
LENIENT |= {"min_degrees_of_freedom": -(10**6)}


def rules_file(folder: Path, rules: dict[str, object], name: str = "rules.json") -> Path:
    (folder / name).write_text(json.dumps(rules))
    return folder / name


def release(run: Path, *options: str) -> int:
    return main(["release", str(run), "--by", "Dr. Weber", *options])


def asks_for(run: Path, rules: dict[str, object]) -> None:
    """Have the site's policy ask for a decision under these rules."""
    path = run.parents[1] / "local" / "veilboost.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "release_rules": rules}))


def hands_on(run: Path, capsys, name: str = "m") -> str:
    """Try to export the model and to put it in use: both must end alike. Return the error, "" for none."""
    copy = run.parents[1] / f"{run.name}-{name}-copy.json"
    place = ["--workspace", str(run.parents[1]), "--site", "site-1"]
    capsys.readouterr()
    codes, errors = [], []
    for arguments in (["export", str(run / "model.json"), str(copy)], ["models", "add", name, run.name, *place]):
        codes.append(main(arguments))
        errors.append(capsys.readouterr().err.partition(": ")[2])
    assert codes in ([0, 0], [1, 1]) and errors[0] == errors[1] and copy.exists() is (codes[0] == 0)
    return errors[0]


def test_the_default_rules_refuse_and_name_measure_limit_and_remedy(run: Path, tmp_path: Path, capsys) -> None:
    rules = tmp_path / "default.json"
    assert main(["release", "--write-rules", str(rules)]) == 0
    assert json.loads(rules.read_text()) == {
        name: getattr(ReleaseRules(), name) for name in ReleaseRules.__dataclass_fields__
    }
    assert main(["release", "--write-rules", str(rules)]) == 1, "no file is written over"
    capsys.readouterr()
    assert release(run, "--rules", str(rules), "--json") == 3
    told = json.loads(capsys.readouterr().out)
    broken = [one for one in told["findings"] if not one["holds"]]
    assert not told["released"] and {one["rule"] for one in broken} >= {"max_share_in_small_groups"}
    assert all(one["measured"] and one["limit"] and one["remedy"] and one["words"] for one in broken)
    assert release(run, "--rules", str(rules)) == 3
    said = capsys.readouterr().out
    assert "BROKEN" in said and "REFUSED" in said and "other sites of the job hold the same model" in said
    for name in (DECISION, RELEASE_FACTS):
        assert stat.S_IMODE(os.stat(run / name).st_mode) == 0o600
    assert "120 rows" not in (run / DECISION).read_text() and "120 rows" in (run / RELEASE_FACTS).read_text()
    assert main(["verify", str(run / DECISION)]) == 1
    assert "NOT RELEASED: site-1 refused it: max_share_in_small_groups" in capsys.readouterr().out


def test_a_scorecard_is_a_copy(run: Path, tmp_path: Path, capsys) -> None:
    asks_for(run, LENIENT)
    errors = []
    for name, command in (("copy.json", "export"), ("card.csv", "scorecard")):
        assert main([command, str(run / "model.json"), str(tmp_path / name)]) == 1
        errors.append(capsys.readouterr().err.partition(": ")[2])
    assert errors[0] == errors[1] and not (tmp_path / "card.csv").exists()


def test_a_decision_binds_model_copy_rules_measures_and_evidence(run: Path, kit: Path, tmp_path: Path, capsys) -> None:
    rules, copy = rules_file(tmp_path, LENIENT), tmp_path / "copy.json"
    assert release(run, "--rules", str(rules)) == 0
    assert main(["export", str(run / "model.json"), str(copy)]) == 0
    bound = [run / "model.json", copy, rules, run / RELEASE_FACTS, run / "evidence" / "site-1.evidence.jsonl"]
    decision, root = str(run / DECISION), ["--root-ca", str(kit)]
    assert main(["verify", decision, *map(str, bound), *root]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "VERIFIED: the release of job job's model by site-1"
    assert "by Dr. Weber" in said and "binds     copy.json: its exported copy" in said
    assert main(["verify", decision]) == 3
    assert main(["verify", decision, "--job", "other", *root]) == 1
    assert main(["verify", decision, *root, "--json"]) == 0
    capsys.readouterr()
    reworded = rules_file(tmp_path, dict(reversed(LENIENT.items())), "reworded.json")
    assert main(["verify", decision, str(reworded), *root]) == 0, "rules are bound by their values"
    for path in bound[:-1]:
        other = tmp_path / f"other-{path.name}"
        other.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
        assert main(["verify", decision, str(other), *root]) == 1, path
        assert "does not bind" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one | {"by": "Dr. Other"},
        lambda one: one | {"model": "0" * 64},
        lambda one: one | {"released": False, "judged": [{**one["judged"][0], "holds": False}, *one["judged"][1:]]},
        lambda one: one | {"judged": one["judged"][:1]},
        lambda one: one | {"time": "2026-01-01T00:00:00Z"},
        lambda one: one | {"signature": "00"},
        lambda one: one | {"signature": None},
        lambda one: one | {"certificate": None, "signature": None, "more": 1},
        lambda one: one | {"released": 1},
        lambda one: one | {"judged": []},
        lambda one: one | {"judged": [{**one["judged"][0], "holds": False}]},
        lambda one: {name: value for name, value in one.items() if name != "facts"},
        lambda one: one | {"site": "../x"},
        lambda one: [one],
    ],
)
def test_a_changed_decision_does_not_verify(run: Path, kit: Path, tmp_path: Path, change: Callable, capsys) -> None:
    assert release(run, "--rules", str(rules_file(tmp_path, LENIENT))) == 0
    path = run / DECISION
    whole = json.loads(path.read_bytes())
    path.write_bytes(canonical(change(whole)))
    assert main(["verify", str(path), "--root-ca", str(kit)]) == 1
    asks_for(run, LENIENT)
    assert "does not count" in hands_on(run, capsys)
    for content in (b"", b"{}", json.dumps(whole).encode(), b"[" * 10_000, b"\xff"):
        with pytest.raises(ProtocolError):
            open_decision(content, FlareAuthority(None))


def test_a_policy_that_asks_for_a_decision_is_obeyed(run: Path, tmp_path: Path, capsys) -> None:
    assert hands_on(run, capsys, "before") == "", "none is asked for"
    asks_for(run, LENIENT)
    refused = hands_on(run, capsys)
    assert "and there is none. Policy key: release_rules. Remedy: `veilboost release" in refused
    (tmp_path / "link.json").symlink_to(run / "model.json")
    assert main(["export", str(tmp_path / "link.json"), str(tmp_path / "linked.json")]) == 1
    place = ["--workspace", str(run.parents[1]), "--site", "site-1"]
    assert main(["models", "rollback", "before", "1", *place]) == 1
    assert release(run, "--rules", str(rules_file(tmp_path, {**LENIENT, "min_leaf_rows": 10**6}))) == 3
    assert "other rules than those in force" in hands_on(run, capsys)
    asks_for(run, {**LENIENT, "min_leaf_rows": 10**6})
    assert "is a refusal: min_leaf_rows (at least 1,000,000 rows)" in hands_on(run, capsys)
    asks_for(run, LENIENT)
    assert release(run) == 0, "the policy's own rules"
    other = run.parent / "other"
    shutil.copytree(run, other)
    model = (other / "model.json").read_bytes()
    (other / "model.json").write_bytes(model.replace(b'"default_left":[0', b'"default_left":[1', 1))
    assert model != (other / "model.json").read_bytes()
    assert "is of another model, or the file has changed since" in hands_on(other, capsys)
    assert hands_on(run, capsys) == "" and main(["models", "rollback", "before", "1", *place]) == 0
    asks_for(run, {**LENIENT, "min_group_rows": 11})
    assert "other rules than those in force" in hands_on(run, capsys, "again")
    html = (run / "report.html").read_text()
    assert "May this model leave the site?" in html and "Dr. Weber" in html


@pytest.mark.parametrize("suffix", ["json", "onnx"])
def test_a_model_that_takes_the_place_of_an_approved_one_after_the_check_is_not_copied(
    run: Path, tmp_path: Path, suffix: str, monkeypatch
) -> None:
    model, check = run / "model.json", dossier_release._check
    asks_for(run, LENIENT)
    assert release(run) == 0
    assert main(["export", str(model), str(tmp_path / f"before.{suffix}")]) == 0
    other = model.read_bytes().replace(b'"default_left":[0', b'"default_left":[1', 1)

    def swapped(*given: Any) -> None:
        check(*given)
        model.write_bytes(other)

    monkeypatch.setattr(dossier_release, "_check", swapped)
    assert main(["export", str(model), str(tmp_path / f"copy.{suffix}")]) == 0
    assert model.read_bytes() == other
    assert (tmp_path / f"copy.{suffix}").read_bytes() == (tmp_path / f"before.{suffix}").read_bytes()


def test_an_unsigned_decision_does_not_count_where_the_site_has_a_certificate(
    run: Path,
    tmp_path: Path,
    request,
    capsys,
) -> None:
    assert release(run, "--rules", str(rules_file(tmp_path, LENIENT))) == 0
    asks_for(run, LENIENT)
    assert main(["verify", str(run / DECISION)]) == 2
    root = request.getfixturevalue("kit")
    assert "is not signed" in hands_on(run, capsys)
    assert main(["verify", str(run / DECISION), "--root-ca", str(root)]) == 1
    assert release(run) == 0 and hands_on(run, capsys) == ""


def test_where_the_workspace_is_elsewhere_the_policy_of_the_run_counts(run: Path, tmp_path: Path, capsys) -> None:
    asks_for(run, LENIENT)
    kept = tmp_path / "kept" / "runs" / "job"
    shutil.copytree(run, kept)
    assert main(["export", str(kept / "model.json"), str(tmp_path / "1.json")]) == 0, "it was not asked for then"
    (kept / "policy.json").write_bytes(SitePolicy.load(run.parents[1], "site-1").allowed())
    assert main(["export", str(kept / "model.json"), str(tmp_path / "2.json")]) == 1
    assert release(kept) == 1 and "give --workspace" in capsys.readouterr().err
    assert release(kept, "--workspace", str(run.parents[1])) == 0
    assert main(["export", str(kept / "model.json"), str(tmp_path / "2.json")]) == 0


def _rows(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def changed(run: Path) -> None:
        path = run.parents[1] / "train.csv"
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_rows(lambda lines: lines[:-1]), "119 are there now"),
        (_rows(lambda lines: lines[:1]), "0 are there now"),
        (_rows(lambda lines: [line.replace("dose", "doses") for line in lines]), "dose"),
        (lambda run: (run.parents[1] / "train.csv").unlink(), "has no file at its path"),
        (lambda run: (run / "model.json").write_text("{"), "no JSON model of XGBoost"),
        (lambda run: (run / "model.json").unlink(), "there is no model"),
        (lambda run: replace(RunRecord.read(run), data=()).write(run), "no training rows"),
        (lambda run: asks_for(run, {"min_rows": 1}), "release_rules has unknown fields: min_rows"),
        (lambda run: (run / "run.json").unlink(), "holds no run.json"),
    ],
)
def test_what_cannot_be_judged_is_refused_and_nothing_is_written(
    run: Path, change, words: str, capsys, tmp_path
) -> None:
    rules = rules_file(tmp_path, LENIENT)
    change(run)
    assert release(run, "--rules", str(rules)) == 1
    assert words in capsys.readouterr().err and not (run / DECISION).exists()


def test_a_model_of_other_columns_is_refused(run: Path, tmp_path: Path, capsys) -> None:
    document = json.loads((run / "model.json").read_bytes())
    document["learner"]["feature_names"] = ["age", "dose", "elsewhere.x", "ward"]
    (run / "model.json").write_text(json.dumps(document))
    assert release(run, "--rules", str(rules_file(tmp_path, LENIENT))) == 1
    assert "has other columns than the run's training rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"min_group_row": 3}', "did you mean min_group_rows"),
        ('{"min_leaf_rows": 1, "min_leaf_rows": 2}', "each key once"),
        ("[]", "no JSON object"),
        ('{"max_share_certain": 2}', "must be a number from 0 to 1"),
    ],
)
def test_rules_are_a_closed_document(run: Path, tmp_path: Path, content: str, words: str, capsys) -> None:
    (tmp_path / "r.json").write_text(content)
    assert release(run, "--rules", str(tmp_path / "r.json")) == 1
    assert words in capsys.readouterr().err
    assert release(run) == 1 and "--write-rules" in capsys.readouterr().err
    assert main(["release", str(run), "--rules", str(tmp_path / "r.json")]) == 1
    assert "--by NAME" in capsys.readouterr().err
    assert main(["release", str(run), "--by", "a\nb", "--rules", str(rules_file(tmp_path, {}))]) == 1
    assert "by must be a non-empty line of text" in capsys.readouterr().err and not (run / DECISION).exists()


def test_training_rows_may_be_named_where_the_data_set_has_others(run: Path, tmp_path: Path, capsys) -> None:
    train = run.parents[1] / "train.csv"
    shutil.copy(train, tmp_path / "then.csv")
    train.write_text("\n".join(train.read_text().splitlines()[:50]) + "\n")
    rules = ["--rules", str(rules_file(tmp_path, LENIENT))]
    assert release(run, *rules) == 1 and "--data FILE" in capsys.readouterr().err
    assert release(run, *rules, "--data", str(tmp_path / "then.csv")) == 0
    assert release(run, *rules, "--data", str(tmp_path / "none.csv")) == 1


def test_as_many_rows_that_are_others_are_refused_where_the_site_remembers_the_job(
    run: Path, tmp_path: Path, capsys
) -> None:
    policy, record, train = SitePolicy.load(run.parents[1], "site-1"), RunRecord.read(run), run.parents[1] / "train.csv"
    facts, registry = record.data[0], Registry.open(policy)
    spec = policy.data_set(facts.name)
    entry = registry.reserve(
        Wanted(load_again(spec, facts, record), spec), job_id=record.job_id, sites=record.sites, parameters=b"{}"
    )
    registry.complete(entry, 1)
    rules = ["--rules", str(rules_file(tmp_path, LENIENT))]
    shutil.copy(train, tmp_path / "then.csv")
    assert release(run, *rules) == 0
    (run / DECISION).unlink()
    lines = train.read_text().splitlines(keepends=True)
    train.write_text("".join([*lines[:-1], lines[1]]))
    assert release(run, *rules) == 1 and not (run / DECISION).exists()
    assert "as many rows as the model was trained on at this site, and not the same" in capsys.readouterr().err
    assert release(run, *rules, "--data", str(tmp_path / "then.csv")) == 0


def test_a_private_model_is_judged_by_its_ledger(run: Path, tmp_path: Path, capsys) -> None:
    replace(RunRecord.read(run), profile="dp_distributed", evidence=None).write(run)
    rules = ["--rules", str(rules_file(tmp_path, {}))]
    assert release(run, *rules) == 3 and "nothing here accounts for it" in capsys.readouterr().out
    policy, row = SitePolicy.load(run.parents[1], "site-1"), NeighbouringRelation.ADD_OR_REMOVE_ROW
    event = GaussianEvent(10.0, row)
    ledger = Ledger.open(policy.ledgers, LedgerIdentity("site-1", "train", row), Budget(2, 1e-5), policy.ledger_heads)
    ledger.open_job("job", event)
    ledger.release("job", "sums", lambda: Release(np.array([1]), event))
    assert release(run, *rules) == 0
    assert "kept    Accounted privacy: epsilon 0.34" in capsys.readouterr().out
    assert release(run, "--rules", str(rules_file(tmp_path, {"max_epsilon": 0.1}))) == 3
    (run / DECISION).unlink()
    shutil.copy(run / "model.json", run / "refitted.json")
    assert release(run / "refitted.json", *rules) == 1 and not (run / DECISION).exists()
    assert "not the model that the private job has left" in capsys.readouterr().err


def test_a_later_attempts_evidence_does_not_say_all_that_was_spent(tmp_path: Path) -> None:
    spent = [SimpleNamespace(epsilon="0.5", delta="1e-6")]
    first, second = (SimpleNamespace(spends=spent, number=number) for number in (1, 2))
    assert _spent(SimpleNamespace(job_id="job"), [], first, 1e-5) == ((0.5, 1e-6), "as the evidence says")
    assert _spent(SimpleNamespace(job_id="job"), [], second, 1e-5) == (None, "")


def test_a_kit_of_another_site_is_refused(run: Path, kit: Path, tmp_path: Path) -> None:
    replace(RunRecord.read(run), site="site-2").write(run)
    assert release(run, "--rules", str(rules_file(tmp_path, LENIENT))) == 1
    with pytest.raises(VeilBoostError):
        open_decision((kit.parent / "rootCA.pem").read_bytes(), FlareAuthority(None))
