"""Jobs with a finished vertical model over whole sites in one process: results, refusals, budgets, evidence."""

from __future__ import annotations

import dataclasses
import json
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, REFUSED
from nvflare_plugins.kinds.vertical_inference import site as inference_site
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.xgb.model_json import with_lists
from tests.support.federation import Parties, succeed
from tests.support.searching import found_every_time
from tests.support.vertical_federation import Joined, Outcome, central, federate
from tests.support.vertical_parts import parts_of, write_parts

SITES = ("site-1", "site-2", "site-3")
TRAINING = "training-1"
PARAMS = {
    "binary": {"objective": "binary:logistic", "max_depth": 3},
    "classes": {"objective": "multi:softprob", "num_class": 3, "max_depth": 3},
}


@dataclass
class Case:
    """Three parties with a trained model and new rows, and the model that centralized training gives."""

    parties: Parties
    rows: np.ndarray
    reference: xgb.Booster
    ids: list[str]

    def run(self, job_id: str = "job", **fields):
        return self.parties.run(run_inference, self.job(**fields), job_id)

    def job(self, **fields) -> InferenceJob:
        return InferenceJob(**{"model": TRAINING, "data_set": "new", **fields})

    def result(self, name: str, job_id: str = "job") -> Path:
        return self.parties.run_folder("site-1", job_id) / name

    def expected(self, **options) -> np.ndarray:
        return self.reference.predict(xgb.DMatrix(self.rows), **options)


@cache
def training(kind: str, seed: int) -> tuple[Joined, np.ndarray, Outcome, xgb.Booster]:
    """Return rows to train on, rows to predict, and the models of all parties and of XGBoost."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(700, 9)).astype(np.float32)
    features[rng.random(features.shape) < 0.1] = np.nan
    x = np.nan_to_num(features)
    score = x[:, 0] - x[:, 4] * x[:, 7] + x[:, 5]
    label = (score > 0 if kind == "binary" else np.digitize(score, [-0.7, 0.7])).astype(np.float32)
    joined = Joined(features[:500], label[:500], (3, 3, 3))
    return joined, features[500:], federate(joined, PARAMS[kind], 5), central(joined, PARAMS[kind], 5)


def make_case(
    folder: Path, kind: str = "binary", with_ids: bool = True, seed: int = 4, classes: Sequence[str | int] | None = None
) -> Case:
    joined, rows, outcome, reference = training(kind, seed)
    active, passive = parts_of(outcome)
    names = [*active.columns, *(f"{party.site}.{alias}" for party in active.parties for alias in party.aliases)]
    active = dataclasses.replace(active, booster=with_lists(active.booster, names, {}, classes))
    parties = Parties(folder, 3)
    named = {f"site-{i + 1}": part for i, part in enumerate((active, *passive.values()))}
    assert sorted(passive) == ["site-2", "site-3"]
    write_parts({site: parties.run_folder(site, TRAINING) for site in SITES}, named, "site-1", TRAINING)
    ids = [f"person-{i:04}" for i in range(len(rows))]
    for i, (site, part) in enumerate(named.items()):
        frame = pd.DataFrame(joined.part(i, rows), columns=list(part.columns))
        facts = {}
        if with_ids:
            frame["who"], facts = ids, {"id": "who"}
        parties.give(site, "new", frame, **facts)
    return Case(parties, rows, reference, ids)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def case(trained, tmp_path) -> Case:
    """A case of its own for every test, from one training."""
    folder = tmp_path / "sites"
    shutil.copytree(trained.parties.folder, folder)
    return Case(Parties(folder, 3), trained.rows, trained.reference, trained.ids)


def errors(outcomes) -> list[Exception]:
    return [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]


def only_error(outcomes, kind: type[Exception]) -> str:
    """Return the error that ended the job, where only some sites have it: the others hear of it."""
    found = sorted({str(error) for error in errors(outcomes) if isinstance(error, kind)})
    assert found and len(errors(outcomes)) == 3, outcomes
    return " ".join(found)


def test_predictions_equal_centralized_ones(case):
    outcomes = succeed(case.run(batch_rows=64))
    assert len({outcome.hmac for outcome in outcomes.values()}) == 1
    path = case.result("predictions.parquet")
    table = pd.read_parquet(path)
    assert list(table.columns) == ["row", "id", "margin", "prediction", "class"]
    np.testing.assert_array_equal(table["margin"].to_numpy(np.float32), case.expected(output_margin=True))
    np.testing.assert_array_equal(table["prediction"].to_numpy(np.float32), case.expected())
    np.testing.assert_array_equal(table["class"], case.expected() > 0.5)
    assert table["row"].tolist() == list(range(200)) and table["id"].tolist() == case.ids
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for site in SITES[1:]:
        names = {path.name for path in case.parties.run_folder(site).iterdir()}
        assert not [name for name in names if "predictions" in name or "importance" in name]


def test_csv_holds_the_same_bits_and_only_the_rows_asked_for(case):
    succeed(case.run(file_format="csv", rows=[30, 90], rounds=[1, 3]))
    table = pd.read_csv(case.result("predictions.csv"))
    expected = case.expected(iteration_range=(1, 3))[30:90]
    np.testing.assert_array_equal(table["prediction"].to_numpy(np.float32), expected)
    assert table["row"].tolist() == list(range(30, 90))


def test_rows_of_files_that_are_not_held_are_predicted_alike(case):
    for number, site in enumerate(SITES):
        sets = case.parties.policy_of(site)["data_sets"]
        own = pd.read_parquet(case.parties.workspace(site) / "new.parquet").sample(frac=1, random_state=number)
        (case.parties.workspace(site) / "parts").mkdir()
        for part, first in enumerate(range(0, len(own), 70)):
            path = case.parties.workspace(site) / "parts" / f"{part}.parquet"
            own.iloc[first : first + 70].to_parquet(path, index=False)
        case.parties.set_policy(site, data_sets={"new": {**sets["new"], "path": "parts"}})
    succeed(case.run(rows=[30, 90], alignment="first"))
    order = np.argsort(case.ids)  # of the canonical ids
    table = pd.read_parquet(case.result("predictions.parquet"))
    np.testing.assert_array_equal(table["margin"].to_numpy(np.float32), case.expected(output_margin=True)[order][30:90])
    assert table["id"].tolist() == [case.ids[row] for row in order[30:90]]
    [facts] = RunRecord.read(case.parties.run_folder("site-2")).data
    assert facts.rows == 60
    outcomes = case.run("more", rows=[30, 900], alignment="job")
    assert "rows that the data set does not have" in only_error(outcomes, ConfigurationError)


def test_probabilities_of_classes(tmp_path):
    case = make_case(tmp_path, "classes", with_ids=False)
    succeed(case.run())
    table = pd.read_parquet(case.result("predictions.parquet"))
    shown = table[["probability_0", "probability_1", "probability_2"]].to_numpy(np.float32)
    np.testing.assert_array_equal(shown, case.expected())
    np.testing.assert_array_equal(table["class"], case.expected().argmax(axis=1))
    assert "id" not in table.columns


def test_classes_have_the_names_that_the_training_declared(tmp_path):
    declared = ["=hi", "nein", "Größe"]
    case = make_case(tmp_path, "classes", with_ids=False, classes=declared)
    for site in SITES[1:]:
        case.parties.set_policy(site, consents={"explain": True})
    succeed(case.run())
    table = pd.read_parquet(case.result("predictions.parquet"))
    shown = table[[f"probability_{name}" for name in declared]].to_numpy(np.float32)
    np.testing.assert_array_equal(shown, case.expected())
    assert table["class"].tolist() == np.array(declared)[case.expected().argmax(axis=1)].tolist()
    succeed(case.run("explained", action="explain", rows=[10, 12], file_format="csv"))
    table = pd.read_csv(case.result("contributions.csv", "explained"))
    assert table["class"].tolist() == ["'=hi", "nein", "Größe"] * 2, "no formula for a spreadsheet"


@pytest.mark.parametrize("declared", [[30, 10], ["ja"], ["ja", "ja"]])
def test_classes_of_a_model_are_as_many_as_its_outputs(tmp_path, declared):
    case = make_case(tmp_path, classes=declared)
    outcomes = case.run()
    if declared == [30, 10]:
        succeed(outcomes)
        table = pd.read_parquet(case.result("predictions.parquet"))
        assert table["class"].tolist() == np.where(case.expected() > 0.5, 10, 30).tolist()
    else:
        assert "label classes that are not the 2 of its outputs" in only_error(outcomes, ConfigurationError)


def test_rows_are_aligned_first(case):
    """Each party lacks other rows and has its own order."""
    for i, site in enumerate(SITES):
        path = case.parties.workspace(site) / "new.parquet"
        frame = pd.read_parquet(path).drop(index=range(10 * i, 10 * i + 10)).sample(frac=1, random_state=i)
        frame.to_parquet(path, index=False)
    texts = {str(error) for error in errors(case.run("unaligned"))}
    assert all("align the rows first" in text for text in texts) and "person" not in str(texts)
    succeed(case.run(alignment="first"))
    table = pd.read_parquet(case.result("predictions.parquet"))
    assert table["id"].tolist() == case.ids[30:]
    np.testing.assert_array_equal(table["prediction"].to_numpy(np.float32), case.expected()[30:])


def test_rows_without_ids_cannot_be_aligned(tmp_path):
    case = make_case(tmp_path, with_ids=False)
    assert "data_sets.<name>.id" in only_error(case.run(alignment="first"), ConfigurationError)


def test_the_merged_model_is_the_centralized_one(case):
    for site in SITES[1:]:
        case.parties.set_policy(site, consents={"merge_model": True})
    succeed(case.run(action="merge", data_set=None))
    path = case.result("merged_model.json")
    booster = xgb.Booster(model_file=path)
    assert booster.feature_names[:4] == ["f0", "f1", "f2", "site-2.x0"]
    matrix = xgb.DMatrix(case.rows, feature_names=booster.feature_names)
    np.testing.assert_array_equal(booster.predict(matrix), case.expected())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["binary", "classes"])
def test_explanations_equal_centralized_ones(tmp_path, kind):
    case = make_case(tmp_path, kind)
    for site in SITES[1:]:
        case.parties.set_policy(site, consents={"explain": True})
    succeed(case.run(action="explain", rows=[10, 60]))
    table = pd.read_parquet(case.result("contributions.parquet"))
    expected = case.expected(pred_contribs=True)[10:60]
    shown = table[[name for name in table.columns if name.startswith("shap_") or name == "bias"]].to_numpy(np.float32)
    np.testing.assert_array_equal(shown, expected.reshape(-1, 10))
    assert ("class" in table.columns) == (kind == "classes")
    assert table["row"].iloc[0] == 10 and table["row"].iloc[-1] == 59


@pytest.mark.usefixtures("every_report")
def test_importance_is_in_a_file_and_in_the_report(case):
    succeed(case.run())
    table = pd.read_csv(case.result("importance.csv"), keep_default_na=False)
    gains = case.reference.get_score(importance_type="total_gain")
    assert sorted(table["total_gain"][table["total_gain"] > 0]) == sorted(gains.values())
    assert set(table["party"]) == {"", "site-2", "site-3"}
    report = case.result("report.html").read_text()
    assert "site-2.x1" in report and "Federated prediction" in report


@pytest.mark.parametrize(("action", "key"), [("merge", "consents.merge_model"), ("explain", "consents.explain")])
def test_one_owner_without_consent_is_enough(case, action, key):
    case.parties.set_policy("site-2", consents={"merge_model": True, "explain": True})
    outcomes = case.run(action=action, data_set=None if action == "merge" else "new")
    text = only_error(outcomes, PolicyRefusal)
    assert key in text and "site-3" in text
    assert not list(case.parties.run_folder("site-1").glob("m*.json"))


def test_budgets_of_rows_outlive_jobs(case):
    case.parties.set_policy("site-3", vertical={"predictions_per_row": 2})
    succeed(case.run("first", rows=[0, 50]))
    succeed(case.run("second", rows=[40, 80]))
    text = only_error(case.run("third", rows=[45, 60]), PolicyRefusal)
    assert "vertical.predictions_per_row" in text and "site-3" in text and "person" not in text
    assert not case.result("predictions.parquet", "third").exists()
    succeed(case.run("fourth", rows=[60, 100]))


@pytest.mark.parametrize("action", ["predict", "explain"])
def test_one_owners_refusal_spends_nothing_at_the_others(case, action):
    """Else whoever starts jobs could use up all budgets by means of the one that is spent."""
    for site in SITES[1:]:
        case.parties.set_policy(site, consents={"explain": True}, vertical={"predictions_per_row": 2})
    case.parties.set_policy("site-3", consents={"explain": True}, vertical={"predictions_per_row": 1})
    succeed(case.run("first", rows=[0, 10]))
    for number in range(2):
        only_error(case.run(f"again-{number}", action=action, rows=[0, 20]), PolicyRefusal)
    case.parties.set_policy("site-3", consents={"explain": True}, vertical={"predictions_per_row": 2})
    succeed(case.run("last", rows=[0, 10]))


def scoring(case, **rules) -> None:
    for site in SITES[1:]:
        case.parties.set_policy(
            site, consents={"scoring": True}, vertical={"predictions_per_row": 1, "min_intersection": 10, **rules}
        )


def test_standing_scoring_answers_again_for_nothing_and_other_values_up_to_a_cap(case):
    """In the place of a number of answers; what is on the record may be asked for as often as one likes."""
    scoring(case)
    for number in range(3):
        succeed(case.run(f"same-{number}", rows=[0, 30]))
    record = json.loads((case.parties.run_folder("site-2", "same-0") / "run.json").read_text())
    assert record["consents"] == ["scoring"]
    scoring(case, scoring_bits_per_row=1)
    succeed(case.run("on-the-record", rows=[0, 30]))
    text = only_error(case.run("new-rows", rows=[0, 31]), PolicyRefusal)
    assert "vertical.scoring_bits_per_row" in text and "person" not in text
    scoring(case)
    path = case.parties.workspace("site-2") / "new.parquet"
    frame = pd.read_parquet(path)
    frame.assign(**{frame.columns[0]: frame[frame.columns[0]].fillna(0) + 1}).to_parquet(path, index=False)
    scoring(case, scoring_rows_per_day=59)
    assert "scoring_rows_per_day" in only_error(case.run("moved", rows=[0, 30]), PolicyRefusal)
    scoring(case, scoring_rows_per_day=60)
    succeed(case.run("moved-allowed", rows=[0, 30]))


def test_a_standing_alignment_is_kept_refreshed_and_holds_returning_rows(case):
    scoring(case)
    case.parties.set_policy("site-1", consents={"scoring": True}, vertical={"min_intersection": 10})
    succeed(case.run("night-1", alignment="first", rows=[0, 20]))
    succeed(case.run("by-day", alignment="night-1", rows=[20, 40]))  # every job that aligns keeps it
    for site in SITES:  # rows come and go
        path = case.parties.workspace(site) / "new.parquet"
        pd.read_parquet(path).iloc[10:].to_parquet(path, index=False)
    again = case.run("too-soon", alignment="first")
    assert "scoring_alignments_per_day" in only_error(again, PolicyRefusal)
    rules = {"min_intersection": 10, "scoring_alignments_per_day": 2}
    for site in SITES:
        case.parties.set_policy(site, consents={"scoring": True}, vertical=rules)
    succeed(case.run("night-2", alignment="first", rows=[0, 20]))
    expected = case.expected()[10:30]
    found = pd.read_parquet(case.result("predictions.parquet", "night-2"))["prediction"].to_numpy(np.float32)
    assert np.array_equal(found, expected)


def test_budgets_follow_rows_into_other_positions(case):
    case.parties.set_policy("site-3", vertical={"predictions_per_row": 1})
    succeed(case.run("first", rows=[0, 10]))
    for site in SITES:
        path = case.parties.workspace(site) / "new.parquet"
        pd.read_parquet(path).iloc[::-1].to_parquet(path, index=False)
    succeed(case.run("second", rows=[0, 190]))
    only_error(case.run("third", rows=[190, 200]), PolicyRefusal)


def test_explanations_are_charged_too(case):
    for site in SITES[1:]:
        case.parties.set_policy(site, consents={"explain": True}, vertical={"predictions_per_row": 1})
    succeed(case.run("first", action="explain"))
    only_error(case.run("second"), PolicyRefusal)


def test_rows_of_one_job_are_limited(case):
    case.parties.set_policy("site-2", vertical={"predictions_per_job": 100})
    assert "vertical.predictions_per_job" in only_error(case.run(), PolicyRefusal)


def test_rows_whose_buckets_were_sent_are_refused(case):
    """Exact bits would undo what local privacy was paid for."""
    workspace = case.parties.workspace("site-2")
    SentRows(SitePolicy.load(workspace, "site-2")).note("earlier", [case.ids[7]])
    succeed(case.run("others", rows=[8, 100]))
    text = only_error(case.run("job", rows=[0, 8]), ConfigurationError)  # the parties of these tests share reasons
    assert "buckets" in text and "person" not in text


def test_unknown_rows_are_refused_without_numbers(case):
    outcomes = case.run(rows=[150, 201])
    texts = {str(error) for error in errors(outcomes) if type(error) is ConfigurationError}
    assert len(errors(outcomes)) == 3 and texts == {"the job asks for rows that the data set does not have"}


def test_other_rows_are_noticed_without_numbers(case):
    path = case.parties.workspace("site-2") / "new.parquet"
    frame = pd.read_parquet(path)
    for changed in (frame.iloc[:-1], frame.iloc[::-1]):
        changed.to_parquet(path, index=False)
        outcomes = case.run(f"job-{len(changed)}-{changed.index[0]}")
        assert len(errors(outcomes)) == 3
        for error in errors(outcomes):
            assert "200" not in str(error) and "199" not in str(error) and "person" not in str(error)


def test_parts_of_different_models_never_meet(case, tmp_path):
    other = make_case(tmp_path / "other", seed=9)
    shutil.copy(
        other.parties.run_folder("site-2", TRAINING) / PASSIVE_FILE,
        case.parties.run_folder("site-2", TRAINING) / PASSIVE_FILE,
    )
    outcomes = case.run()
    assert len(errors(outcomes)) == 3
    assert any("another model" in str(error) for error in errors(outcomes))


@pytest.mark.parametrize(("site", "name"), [("site-1", ACTIVE_FILE), ("site-3", PASSIVE_FILE)])
def test_a_site_without_its_part_says_so(case, site, name):
    (case.parties.run_folder(site, TRAINING) / name).unlink()
    text = only_error(case.run(), ConfigurationError)
    assert text.startswith(f"{site} holds no part of the model of job {TRAINING}: ") and "Remedy: " in text


def test_a_part_may_lie_in_the_input_folder(case):
    for site, name in zip(SITES, (ACTIVE_FILE, PASSIVE_FILE, PASSIVE_FILE), strict=True):
        part = json.loads((case.parties.run_folder(site, TRAINING) / name).read_bytes())
        case.parties.give_input(site, f"{TRAINING}.{site}.json", part)
        shutil.rmtree(case.parties.run_folder(site, TRAINING))
    succeed(case.run())
    np.testing.assert_array_equal(pd.read_parquet(case.result("predictions.parquet"))["prediction"], case.expected())


def test_an_absent_party_is_named(case):
    case.parties.n_sites = 2
    outcomes = case.run()
    assert {str(error) for error in errors(outcomes)} >= {"the model cannot be used without site-3"}


class Curious(inference_site.ConversationLink):
    """An active party that asks about a node twice."""

    def ask(self, request):
        super().ask(request)
        return super().ask(request)


def test_a_hostile_question_ends_the_job_with_the_fixed_error(case, monkeypatch):
    monkeypatch.setattr(inference_site, "ConversationLink", Curious)
    outcomes = case.run()
    found = {str(error) for error in errors(outcomes) if type(error) is ProtocolError}
    assert len(errors(outcomes)) == 3 and found == {REFUSED}
    assert not case.result("predictions.parquet").exists()


def test_evidence_of_all_sites_agrees_and_says_what_passed(case):
    for site in SITES[1:]:
        case.parties.set_policy(site, consents={"explain": True, "merge_model": True})
    for action, contents in (
        ("predict", {"DECISION_REQUEST", "DECISIONS"}),
        ("explain", {"POSITIONS"}),
        ("merge", {"THRESHOLDS"}),
    ):
        succeed(case.run(action, action=action, data_set=None if action == "merge" else "new"))
        logs = [path for site in SITES for path in (case.parties.run_folder(site, action) / "evidence").glob("*.jsonl")]
        assert len(logs) == 3
        noted = {json.loads(line).get("what") for path in logs for line in path.read_text().splitlines()} - {None}
        assert noted == contents
        failures = [failure for attempt in verify(logs).attempts for failure in attempt.failures]
        assert failures == ["the log of server is missing"]  # there is none in one process


def test_no_frame_holds_a_threshold_or_an_id(case):
    """The server sees sealed bytes."""
    forms: list[bytes] = []
    for site in SITES[1:]:
        part = json.loads((case.parties.run_folder(site, TRAINING) / PASSIVE_FILE).read_bytes())["part"]
        thresholds = [split[3] for split in part["splits"]]
        assert len(thresholds) > 3
        forms += [form for t in thresholds for form in (t.encode(), np.float32(t).tobytes())]

    def search(number: int) -> list[bytes]:
        case.parties.transfers.clear()
        succeed(case.run(f"job-{number}"))
        frames = [transfer.frame for transfer in case.parties.transfers]
        seen = b"".join(frame.payload for frame in frames)
        assert {frame.codec.name for frame in frames if frame.kind.private} == {"SEALED"} and len(seen) > 2_000
        assert b"person-" not in seen
        return [form for form in forms if form in seen]

    assert not found_every_time(search)
