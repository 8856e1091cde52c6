"""Whole vertical jobs over the sites' own code: from policies and files to the parts of the model."""

from __future__ import annotations

import gc
import json
import stat
import threading
import time
import weakref

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobResult
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.growth.arithmetic import arithmetic_here
from nvflare_plugins.kinds.vertical import passive_party
from nvflare_plugins.kinds.vertical import site as vertical_site
from nvflare_plugins.kinds.vertical.active_party import ActiveSite
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, ActivePart, PassivePart, read_part
from nvflare_plugins.kinds.vertical.passive_party import PassiveSite
from nvflare_plugins.kinds.vertical.site import MASKED_MODEL
from nvflare_plugins.pooled.mediated.mediator import Mediator
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.wire.envelope import Kind
from tests.support import vertical_jobs
from tests.support.federation import Parties, SiteDied, dies_at, succeed
from tests.support.memories import memory_in
from tests.support.vertical_federation import first_difference
from tests.support.vertical_jobs import PARAMS, POLICY, central, federation, give_columns, job, merged, run, table

TRAIN, HELD = table(390).iloc[:300], table(390).iloc[300:]


@pytest.fixture
def parties(tmp_path) -> Parties:
    return federation(tmp_path)


def same(ours: bytes, theirs: xgb.Booster) -> bool:
    return first_difference(ours, bytes(theirs.save_raw("json"))) == ""


def nothing_written(parties: Parties, job_id: str = "job") -> bool:
    names = {ACTIVE_FILE, PASSIVE_FILE, "masked_model.json", "run.json", "report.html"}
    return not [
        path
        for site in parties.sites
        for path in parties.workspace(site).rglob("*")
        if path.name in names
        or ("partial" in path.name and path.suffix != ".jsonl" and job_id in str(path) and "evidence" not in str(path))
    ]


# -- what comes out ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, every_report) -> tuple[Parties, dict[str, JobResult]]:
    """Parties that have trained once, for tests that only read what came out."""
    parties = federation(tmp_path_factory.mktemp("trained"))
    return parties, succeed(run(parties, job(eval_data_set="held", evaluate_training=True)))


def test_the_parts_make_the_centralized_model(trained):
    parties, outcomes = trained
    assert len({outcome.hmac for outcome in outcomes.values()}) == 1
    assert all(outcome.summary == {"n_rounds": 4} for outcome in outcomes.values())
    reference = central(TRAIN, 4)
    model = merged(parties)
    assert same(model, reference)
    rows = xgb.DMatrix(HELD.drop(columns="y").to_numpy())
    ours = xgb.Booster(model_file=bytearray(model))
    ours.feature_names = ours.feature_types = None
    assert (ours.predict(rows) == reference.predict(rows)).all()


def test_every_party_keeps_its_part_and_no_other(trained):
    parties, _ = trained
    active = read_part(parties.run_folder("site-1") / ACTIVE_FILE, "site-1", ActivePart)
    assert [(p.site, p.aliases) for p in active.part.parties] == [("site-2", ("f0", "f1", "f2")), ("site-3", ("f0",))]
    for site in ("site-2", "site-3"):
        folder = parties.run_folder(site)
        part = read_part(folder / PASSIVE_FILE, site, PassivePart)
        assert part.identity == active.identity
        assert stat.S_IMODE((folder / PASSIVE_FILE).stat().st_mode) == 0o600
        assert not (folder / ACTIVE_FILE).exists() and not (folder / "masked_model.json").exists()


def test_run_records_and_reports_tell_stages_features_and_metrics(trained):
    parties, _ = trained
    active = json.loads((parties.run_folder("site-1") / "run.json").read_text())
    assert [row["round"] for row in active["rounds"]] == [0, 1, 2, 3]
    assert {"encrypt", "decrypt", "network", "grow"} <= set(active["rounds"][0]["stages"])
    assert active["rounds"][0]["metrics"]["eval-auc"] > 0.5
    passive = json.loads((parties.run_folder("site-2") / "run.json").read_text())
    assert "histogram" in passive["rounds"][0]["stages"] and not passive["rounds"][0]["metrics"]
    assert "f2" in json.dumps(passive["sections"]) and "c4" in json.dumps(passive["sections"])
    assert '"c4"' not in json.dumps(active)
    for site in parties.sites:
        html = (parties.run_folder(site) / "report.html").read_text()
        assert "Vertical federated XGBoost" in html
    lines = "\n".join(parties.said["site-1"])
    assert (
        "round 4 of 4, train-logloss" in lines
        and "eval-logloss" in lines
        and "round 4 of 4" in "\n".join(parties.said["site-2"])
    )


def test_early_stopping_and_evaluation_are_those_of_centralized_training(parties):
    params = {**PARAMS, "eta": 1.0, "eval_metric": ["auc", "logloss"]}
    history: dict = {}
    reference = central(TRAIN, 40, params, held=HELD, early_stopping_rounds=3, evals_result=history)
    outcomes = succeed(run(parties, job(eval_data_set="held", early_stopping_rounds=3, num_rounds=40, params=params)))
    n_rounds = len(history["eval"]["auc"])
    assert n_rounds < 40 and outcomes["site-2"].summary == {"n_rounds": n_rounds}
    record = json.loads((parties.run_folder("site-1") / "run.json").read_text())
    assert record["best_round"] == reference.best_iteration
    for name in ("auc", "logloss"):
        np.testing.assert_allclose([row["metrics"][f"eval-{name}"] for row in record["rounds"]], history["eval"][name])
    assert same(merged(parties), reference)


def test_completely_secureboost_uses_own_columns_first(parties):
    succeed(run(parties, job(own_rounds=2)))
    active = read_part(parties.run_folder("site-1") / ACTIVE_FILE, "site-1", ActivePart).part
    trees = json.loads(active.booster)["learner"]["gradient_booster"]["model"]["trees"]
    features = [
        [f for f, child in zip(t["split_indices"], t["left_children"], strict=True) if child >= 0] for t in trees
    ]
    assert all(f < 2 for tree in features[:2] for f in tree) and any(f >= 2 for tree in features[2:] for f in tree)
    record = json.loads((parties.run_folder("site-2") / "run.json").read_text())
    assert len(record["rounds"]) == 4


def test_chosen_columns_weights_aliases_and_constraints(tmp_path):
    parties = Parties(tmp_path, 2, dict(POLICY))
    frame = TRAIN.assign(w=np.linspace(0.5, 2, 300).astype(np.float32))
    parties.give("site-1", "data", frame[["w", "c0", "c1", "y"]])
    parties.give("site-2", "data", frame[["c2", "c3", "c4"]], aliases={"c4": "income"})
    params = {**PARAMS, "monotone_constraints": {"site-2.income": 1, "c0": -1}}
    succeed(run(parties, job(weight="w", features={"site-1": ["c1", "c0"], "site-2": ["c4", "c2"]}, params=params)))
    active = read_part(parties.run_folder("site-1") / ACTIVE_FILE, "site-1", ActivePart).part
    assert active.columns == ("c1", "c0") and active.parties[0].aliases == ("income", "f1")


# -- continuing -------------------------------------------------------------------------------------------------------


def test_continuing_a_model_is_centralized_training_in_one_go(parties):
    succeed(run(parties, job(num_rounds=2), "first"))
    succeed(run(parties, job(num_rounds=3, initial_model="first"), "second"))
    assert same(merged(parties, "second"), central(TRAIN, 5))


def test_several_trees_a_round_continue_too(parties):
    params = {"objective": "multi:softprob", "num_class": 2, "num_parallel_tree": 2, "max_depth": 2, "max_bin": 8}
    succeed(run(parties, job(num_rounds=1, params=params), "first"))
    succeed(run(parties, job(num_rounds=2, params=params, initial_model="first", checkpoint_every=1), "second"))
    assert same(merged(parties, "second"), central(TRAIN, 3, params))


def dies_in_round(number: int):
    """The site's process ends in the middle of a round: questions of it were answered, and more were to come."""
    return dies_at(Kind.CONVERSATION, 4, number)


def test_a_job_lost_in_round_6_of_8_resumes_after_the_fifth(parties):
    """By default every round is kept at every party, readable for its user alone; the model is the same to the byte."""
    succeed(run(parties, job(num_rounds=8), "whole"))
    lost = run(parties, job(num_rounds=8), "lost", tamper={"site-2": dies_in_round(5)}, notices_death=True)
    assert isinstance(lost["site-2"], SiteDied) and not list(parties.folder.rglob("lost/*model*"))
    for site in parties.sites:
        kept = parties.run_folder(site, "lost").glob("checkpoint-*")
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in kept}.get("checkpoint-5.json") == 0o600
    outcomes = succeed(run(parties, job(num_rounds=8, resume_from="lost"), "resumed"))
    assert outcomes["site-1"].summary == {"n_rounds": 8}
    assert any("resuming lost after 5 rounds" in line for line in parties.said["site-3"])
    masked = [(parties.run_folder("site-1", name) / MASKED_MODEL).read_bytes() for name in ("whole", "resumed")]
    assert masked[0] == masked[1] and merged(parties, "resumed") == merged(parties, "whole")
    assert same(merged(parties, "resumed"), central(TRAIN, 8))


def sums_by_row(parties: Parties, site: str) -> np.ndarray:
    """Return how many sums each row has taken part in, in the order in which rows first came."""
    return ReleasedSums(memory_in(parties.workspace(site), site), "data").read().sums


def test_caps_are_charged_once_for_rounds_that_are_not_done_again(tmp_path):
    """A resumed job charges what it releases: the round that was lost on the way, again, and those after it."""
    charged = {}
    for name, rounds, lost_in in (("three", 3, None), ("five", 5, None), ("lost", 5, 3)):
        parties = federation(tmp_path / name, n_rows=4000)  # nothing is withheld
        training = {"preset": "guarded", "num_rounds": rounds, "params": {**PARAMS, "max_depth": 2}}
        hooks = {} if lost_in is None else {"tamper": {"site-3": dies_in_round(lost_in)}, "notices_death": True}
        outcomes = run(parties, job(**training), "lost", **hooks)
        assert lost_in is None or isinstance(outcomes["site-3"], SiteDied)
        charged[name] = sums_by_row(parties, "site-2")
    succeed(run(parties, job(**training, resume_from="lost"), "resumed"))
    of_resumed = sums_by_row(parties, "site-2") - charged["lost"]
    assert (charged["lost"] >= charged["three"]).all() and (charged["lost"] < charged["five"]).all()
    np.testing.assert_array_equal(of_resumed, charged["five"] - charged["three"])


def test_rounds_without_a_question_keep_parties_together(parties, monkeypatch):
    """A fast active party that asks nothing for rounds must not leave the others' checkpoints behind."""
    honest = passive_party.PassiveSite._turned

    def slow(self, number):
        if self._start.context.site == "site-2":
            time.sleep(0.05)
            if number == 6:
                raise SiteDied
        honest(self, number)

    monkeypatch.setattr(passive_party.PassiveSite, "_turned", slow)
    lost = run(parties, job(num_rounds=9, own_rounds=9), "lost", notices_death=True)
    assert isinstance(lost["site-2"], SiteDied)
    monkeypatch.undo()
    succeed(run(parties, job(num_rounds=9, own_rounds=9, resume_from="lost"), "resumed"))
    assert any("resuming lost after 6 rounds" in line for line in parties.said["site-1"])


def test_early_stopping_goes_on_where_a_lost_job_stood(tmp_path):
    params = {**PARAMS, "eta": 1.0, "eval_metric": ["auc", "logloss"]}
    changes = {"eval_data_set": "held", "early_stopping_rounds": 3, "num_rounds": 40, "params": params}
    whole = federation(tmp_path / "whole")
    n_rounds = succeed(run(whole, job(**changes)))["site-1"].summary["n_rounds"]
    for lost in ({"tamper": {"site-2": dies_in_round(n_rounds - 2)}}, {"tamper": {"site-2": dies_at(Kind.CLOSING)}}):
        parties = federation(tmp_path / str(len(list(tmp_path.iterdir()))))
        assert isinstance(run(parties, job(**changes), "lost", notices_death=True, **lost)["site-2"], SiteDied)
        outcomes = succeed(run(parties, job(**changes, resume_from="lost"), "resumed"))
        assert outcomes["site-3"].summary == {"n_rounds": n_rounds}
        assert merged(parties, "resumed") == merged(whole)
        best = [
            json.loads((of.run_folder("site-1", name) / "run.json").read_text())["best_round"]
            for of, name in ((whole, "job"), (parties, "resumed"))
        ]
        assert best[0] == best[1]


def test_checkpoints_of_different_attempts_do_not_meet(parties):
    for name in ("one", "two"):
        run(parties, job(num_rounds=6), name, tamper={"site-3": dies_at(Kind.CONVERSATION, 31)}, notices_death=True)
    folder = parties.run_folder("site-2", "one")
    for path in folder.glob("checkpoint-*"):
        path.unlink()
    for path in parties.run_folder("site-2", "two").glob("checkpoint-*"):
        path.rename(folder / path.name)
    outcomes = run(parties, job(num_rounds=6, resume_from="one"), "resumed")
    assert all("no checkpoint of one is held by all sites" in str(outcome) for outcome in outcomes.values())


def test_parts_of_another_model_are_not_continued(parties):
    succeed(run(parties, job(num_rounds=1), "one"))
    succeed(run(parties, job(num_rounds=1), "two"))
    source = parties.run_folder("site-2", "two") / PASSIVE_FILE
    source.rename(parties.run_folder("site-2", "one") / PASSIVE_FILE)
    outcomes = run(parties, job(num_rounds=1, initial_model="one"), "three")
    assert "part of another model" in str(outcomes["site-1"]) or "part of another model" in str(outcomes["site-2"])


def test_a_model_of_other_classes_is_not_continued(parties):
    succeed(run(parties, job(num_rounds=1, label_classes=[0, 1]), "one"))
    succeed(run(parties, job(num_rounds=1, label_classes=[0, 1], initial_model="one"), "two"))
    for classes in ([1, 0], None):
        outcomes = run(
            parties, job(num_rounds=1, label_classes=classes, initial_model="one"), f"three-{classes is None}"
        )
        assert "trained with other label_classes" in str(outcomes["site-1"])


# -- rows -------------------------------------------------------------------------------------------------------------


def with_ids(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(id=[f"p{number:05d}" for number in np.random.default_rng(1).permutation(len(frame))])


def test_ids_prove_the_order_of_rows(tmp_path):
    parties = Parties(tmp_path, 3, dict(POLICY))
    give_columns(parties, "data", with_ids(TRAIN), (2, 3, 1))
    succeed(run(parties, job(num_rounds=2)))
    assert same(merged(parties), central(TRAIN, 2))
    assert not any("on trust" in line for line in parties.said["site-1"])


def test_another_order_of_rows_is_refused_before_training(tmp_path):
    parties = Parties(tmp_path, 3, dict(POLICY))
    frame = with_ids(TRAIN)
    give_columns(parties, "data", frame, (2, 3, 1))
    swapped = frame.iloc[[1, 0, *range(2, 300)]]
    parties.give("site-3", "data", swapped[["id", "c5"]], id="id")
    outcomes = run(parties, job())
    assert all("align the rows first" in str(outcome) for outcome in outcomes.values())
    assert nothing_written(parties)


def test_other_row_counts_and_ids_at_some_parties_only_are_refused(tmp_path):
    parties = federation(tmp_path)
    parties.give("site-3", "data", TRAIN[["c5"]].iloc[:-1])
    assert "another number of rows" in str(run(parties, job())["site-1"])
    frame = with_ids(TRAIN)
    parties.give("site-3", "data", frame[["id", "c5"]], id="id")
    assert "all, or none" in str(run(parties, job(), "second")["site-1"])


def overlapping(folder) -> tuple[Parties, pd.DataFrame]:
    """Return parties that lack some rows each, in orders of their own, and the rows that all have."""
    parties = Parties(folder, 3, {**POLICY, "vertical": {"min_intersection": 50}})
    frame = with_ids(TRAIN)
    rng = np.random.default_rng(2)
    kept = [set(rng.permutation(300)[:260]) for _ in range(3)]
    for site, rows, columns in zip(parties.sites, kept, (["c0", "c1", "y"], ["c2", "c3", "c4"], ["c5"]), strict=True):
        part = frame.iloc[rng.permutation(sorted(rows))]
        parties.give(site, "data", part[["id", *columns]], id="id")
    return parties, frame.iloc[sorted(set.intersection(*kept))].sort_values("id")


def test_rows_are_aligned_first_and_again_from_what_was_found(tmp_path):
    parties, common = overlapping(tmp_path)
    succeed(run(parties, job(alignment="first", num_rounds=2), "one"))
    assert same(merged(parties, "one"), central(common, 2))
    succeed(run(parties, job(alignment="one", num_rounds=2), "two"))
    assert same(merged(parties, "two"), central(common, 2))


def test_rows_as_they_lay_in_the_file_are_let_go_once_they_are_aligned(tmp_path, monkeypatch):
    """They would be a second table in memory through the whole training."""
    (parties, _), loaded, kept = overlapping(tmp_path), [], []
    load, train = vertical_site.load_party, {kind: kind.run for kind in (ActiveSite, PassiveSite)}

    def noted(*arguments, **options):
        data = load(*arguments, **options)
        loaded.extend(weakref.ref(one.table.features) for one in data.sets)
        return data

    def run_of(kind):
        def looked_at(self):
            gc.collect()
            kept.append(sum(table() is not None for table in loaded))
            return train[kind](self)

        return looked_at

    monkeypatch.setattr(vertical_site, "load_party", noted)
    for kind in train:
        monkeypatch.setattr(kind, "run", run_of(kind))
    succeed(run(parties, job(alignment="first")))
    assert len(loaded) == len(kept) == len(parties.sites) and min(kept) == 0  # the last of them looks at all


def test_a_lost_job_that_aligned_first_resumes_with_the_rows_that_it_found(tmp_path):
    parties, common = overlapping(tmp_path)
    for site in parties.sites:  # a second alignment would need consent
        parties.set_policy(site, consents={"plain_profile": True, "exact_bins": True})
    changes = {"alignment": "first", "num_rounds": 6}
    lost = run(parties, job(**changes), "lost", tamper={"site-2": dies_at(Kind.CONVERSATION, 46)}, notices_death=True)
    assert isinstance(lost["site-2"], SiteDied)
    assert list(parties.run_folder("site-1", "lost").glob("checkpoint-*"))
    succeed(run(parties, job(**changes, resume_from="lost"), "resumed"))
    assert same(merged(parties, "resumed"), central(common, 6))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_policies_decide(tmp_path):
    parties = federation(tmp_path)
    parties.set_policy("site-2", consents={"plain_profile": True})
    outcomes = run(parties, job())
    assert isinstance(outcomes["site-2"], PolicyRefusal) and "consents.exact_bins" in str(outcomes["site-2"])
    assert isinstance(outcomes["site-1"], JobAborted) and "consents.exact_bins" in str(outcomes["site-1"])
    parties.set_policy("site-2", consents={"exact_bins": True})
    assert "consents.plain_profile" in str(run(parties, job(), "2")["site-2"])
    assert "min_key_bits" in str(run(parties, job(profile="paillier", key_bits=2048), "3")["site-2"])
    parties.set_policy("site-2", consents=POLICY["consents"])
    guarded = run(parties, job(preset="guarded", params={**PARAMS, "max_bin": 64}), "4")
    assert isinstance(guarded["site-2"], PolicyRefusal) and "vertical.max_bins" in str(guarded["site-2"])
    assert not [t for t in parties.transfers if t.frame.kind is Kind.CONVERSATION]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"active": "site-9"}, "not among the job's sites"),
        ({"features": {"site-9": ["a"]}}, "not a site of this job"),
        ({"label": "z"}, "no column 'z'"),
        ({"params": {**PARAMS, "booster": "dart"}}, "dart"),
        ({"params": {**PARAMS, "objective": "rank:ndcg", "eval_metric": "ndcg"}, "query": "q9"}, "no column 'q9'"),
        ({"params": {**PARAMS, "monotone_constraints": {"site-2.f9": 1}}}, "site-2.f9"),
        ({"initial_model": "none"}, "no part of the model"),
        ({"resume_from": "none"}, "no checkpoint of none"),
        ({"eval_data_set": "none"}, "no data set named 'none'"),
        ({"alignment": "first"}, "names no id column"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_work_is_refused_by_name_everywhere(parties, changes, said):
    outcomes = run(parties, job(**changes))
    errors = [outcome for outcome in outcomes.values() if not isinstance(outcome, JobAborted)]
    assert errors and all(isinstance(error, (ConfigurationError, PolicyRefusal)) for error in errors)
    assert all(said in str(outcome) for outcome in outcomes.values()), outcomes
    assert nothing_written(parties)


def test_changed_rows_need_consent(tmp_path):
    parties = federation(tmp_path)
    parties.set_policies(consents={"plain_profile": True, "exact_bins": True})
    succeed(run(parties, job(num_rounds=1), "one"))
    changed = TRAIN[["c2", "c3", "c4"]].copy()
    changed.iloc[0, 0] += 1
    parties.give("site-2", "data", changed)
    outcomes = run(parties, job(num_rounds=1), "two")
    assert isinstance(outcomes["site-2"], ConfigurationError) and "recompute_with_changes" in str(outcomes["site-2"])


def test_a_guarded_job_trains_and_keeps_sums_back(tmp_path):
    parties = federation(tmp_path, n_rows=1500)
    succeed(run(parties, job(preset="guarded", num_rounds=3)))
    record = json.loads((parties.run_folder("site-2") / "run.json").read_text())
    assert "nodes withheld" in json.dumps(record["sections"])
    assert len(merged(parties)) > 1000


# -- wheels ------------------------------------------------------------------------------------------------------------


HERE = arithmetic_here()
OTHER = "3.2" if HERE == "3.4" else "3.4"


def centralized() -> bytes:
    return bytes(central(table(390, 6).iloc[:300], 2).save_raw("json"))


def test_no_party_needs_a_communicator(tmp_path, monkeypatch):
    monkeypatch.setattr(xgb, "build_info", lambda: {"USE_FEDERATED": False})
    monkeypatch.setattr(xgb.collective, "init", lambda **args: pytest.fail("a communicator was opened"))
    monkeypatch.setattr(Mediator, "__enter__", lambda self: pytest.fail("XGBoost's messages were waited for"))
    parties = federation(tmp_path)
    succeed(run(parties, job(num_rounds=2, eval_data_set="held")))
    assert first_difference(merged(parties), centralized()) == ""


def test_parties_of_unlike_wheels_grow_trees_in_the_lowest_arithmetic(tmp_path, monkeypatch):
    this, real_run, real_versions = threading.local(), vertical_jobs.run_vertical_site, vertical_site.versions

    def named(job, context, *rest):
        this.site = context.site
        return real_run(job, context, *rest)

    def is_other() -> bool:
        return this.site == "site-2"

    monkeypatch.setattr(vertical_jobs, "run_vertical_site", named)
    monkeypatch.setattr(vertical_site, "arithmetic_here", lambda: OTHER if is_other() else HERE)
    mine = {"xgboost": f"{OTHER}.0"}
    monkeypatch.setattr(vertical_site, "versions", lambda: {**real_versions(), **(mine if is_other() else {})})
    parties = federation(tmp_path)
    succeed(run(parties, job(num_rounds=2)))
    part = read_part(parties.run_folder("site-1") / ACTIVE_FILE, "site-1", ActivePart).part
    lowest = min(HERE, OTHER)
    assert json.loads(part.booster)["version"][:2] == [int(number) for number in lowest.split(".")]
    assert all(f"XGBoost {lowest}" in "\n".join(parties.said[site]) for site in parties.sites)
    if lowest == HERE:
        assert first_difference(merged(parties), centralized()) == ""
