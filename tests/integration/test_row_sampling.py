"""Rows that take part: drawn in secret, equal to weights in centralized training, and attacks that must not work.

The attacker is site-1: it knows the job, all code, its own rows and secret, and every pooled sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError, JobAborted, PolicyRefusal
from nvflare_plugins.data_sets.table import load_table
from nvflare_plugins.failures import ROWS_TEXT, DataRefusal, TooFewRows
from nvflare_plugins.horizontal import site as site_module
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.horizontal.row_floors import TOO_FEW
from nvflare_plugins.horizontal.row_sampling import RowDraws
from nvflare_plugins.site.data_refusals import RefusalCount
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.vertical.active.xgboost_random import XGBoostRandom, sampled_rows
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.envelope import unpack
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.cuts import reference_table
from nvflare_plugins.xgb.versions import installed_release
from tests.support.federation import Federation, SiteDied, central_model, leaf_difference, succeed
from tests.support.horizontal_jobs import LOGISTIC, dies_after, federate, job, table

STRICT = {"min_effective_rows": 100, "min_rows_per_node": 4, "consents": {"exact_leaves": True}}
VARIANTS: dict[str, tuple[dict, dict]] = {
    "logistic": ({"subsample": 0.5}, {}),
    "weighted": ({"subsample": 0.7}, {"weight": "w"}),
    "scale_pos_weight": ({"subsample": 0.6, "scale_pos_weight": 3.0}, {}),
    "base_score": ({"subsample": 0.5, "base_score": 0.4}, {"weight": "w"}),
    "softprob": ({"subsample": 0.5, "objective": "multi:softprob", "num_class": 2}, {}),
    "squared_error": ({"subsample": 0.5, "objective": "reg:squarederror"}, {"weight": "w"}),
    "poisson": ({"subsample": 0.5, "objective": "count:poisson"}, {}),
    "dart_and_columns": (
        {"subsample": 0.5, "booster": "dart", "rate_drop": 0.5, "colsample_bytree": 0.6, "seed": 5},
        {},
    ),
}


def names(cases: dict, *slow: str) -> list:
    """Return the cases' names; some run with the slow tests only."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in cases]


def weighted(n_rows: int = 400) -> pd.DataFrame:
    return table(n_rows).assign(w=np.random.default_rng(2).uniform(0.2, 1.0, n_rows).astype(np.float32))


def draws_of(federation: Federation, training: HorizontalJob, data: str = "train") -> Callable[[int], np.ndarray]:
    """Return which of all rows, in the order of the sites, a round took: what only all sites together know."""
    fraction, sites = training.params["subsample"], []
    for site in federation.sites:
        policy = SitePolicy.load(federation.workspace(site), site)
        rows = load_table(
            policy.data_set(data), label=training.label, weight=training.weight, features=training.features
        )
        secret = Registry.open(policy).secret("row sampling", repr(fraction), *federation.sites)
        sites.append(RowDraws(secret, rows, fraction))
    return lambda number: np.concatenate([site.of_round(number) for site in sites])


def train_centrally(frame: pd.DataFrame, training: HorizontalJob, federation: Federation, job_id: str = "job"):
    """Train stock XGBoost on the pooled rows, whose weights are those of the drawn rows in each round."""
    features = frame.drop(columns=["y", *filter(None, [training.weight])])
    params = {**training.params, "tree_method": "hist", "nthread": 1}
    fraction, of_round = params.pop("subsample"), draws_of(federation, training)
    reference = xgb.QuantileDMatrix(reference_table(federation.cuts(job_id), {}), max_bin=params["max_bin"])
    true = np.ones(len(frame), np.float32) if training.weight is None else frame[training.weight].to_numpy()
    rows = xgb.QuantileDMatrix(features.to_numpy(np.float32), label=frame.y, ref=reference, max_bin=params["max_bin"])
    if training.weight is not None:
        rows.set_weight(true)
    if "base_score" not in params:
        estimate = xgb.train({**params, "booster": "gbtree"}, rows, 1)
        score = json.loads(estimate.save_config())["learner"]["learner_model_param"]["base_score"]
        params["base_score"] = json.loads(score) if score.startswith("[") else float(score)
    booster = xgb.Booster(params, [rows])
    shares = []
    for number in range(training.num_rounds):
        drawn = of_round(number)
        shares.append(drawn.mean())
        rows.set_weight(true * drawn)
        booster.update(rows, number)
    assert abs(np.mean(shares) - fraction) < 0.1
    booster.feature_names = list(features.columns)
    return booster


@pytest.mark.parametrize("name", names(VARIANTS, "scale_pos_weight", "squared_error", "poisson"))
def test_trees_equal_central_training_on_the_drawn_rows(tmp_path, name):
    params, fields = VARIANTS[name]
    frame = (weighted if fields else table)(400)
    if name == "softprob":  # two classes mirror each other: missing values that make no difference go either way
        frame = frame.dropna()
    training = job(params, **fields)
    federation = federate(tmp_path, frame, training)
    central = train_centrally(frame, training, federation)
    assert leaf_difference(federation.model(), central) <= 5e-7


def test_the_public_seed_decides_no_row(tmp_path):
    models = []
    for seed in (0, 7):
        federation = Federation(tmp_path / str(seed))
        federation.give_data("train", table(300))
        federation.set_registry_keys()
        succeed(federation.run(job({"subsample": 0.5, "seed": seed}, 2)))
        models.append(federation.model())
    assert models[0] == models[1]


def test_metrics_are_of_all_rows_at_their_true_weights(tmp_path):
    frame = weighted()
    training = job({"subsample": 0.3, "eval_metric": ["logloss", "error"]}, weight="w", evaluate_training=True)
    federation = federate(tmp_path, frame, training)
    booster = xgb.Booster({"nthread": 1, "eval_metric": ["logloss", "error"]}, model_file=bytearray(federation.model()))
    rows = xgb.DMatrix(frame.drop(columns=["y", "w"]), label=frame.y, weight=frame.w)
    stock = booster.eval(rows).split("\t")[1:]
    record = json.loads((federation.workspace("site-1") / "runs" / "job" / "run.json").read_text())
    ours = record["rounds"][-1]["metrics"]
    expected = {text.rpartition(":")[0].replace("eval", "train"): float(text.rpartition(":")[2]) for text in stock}
    assert ours == pytest.approx(expected, rel=1e-6)


def test_a_resumed_job_draws_the_same_rows(tmp_path):
    frame = table(300)
    training = job({"subsample": 0.4}, 6, checkpoint_every=2)
    whole = federate(tmp_path / "whole", frame, training)
    federation = Federation(tmp_path / "lost")
    federation.give_data("train", frame)
    federation.set_registry_keys()
    outcomes = federation.run(training, "lost", on_progress=dies_after("site-2", 5))
    assert isinstance(outcomes["site-2"], SiteDied)
    # A file written anew in another order holds the same rows.
    path = federation.workspace("site-3") / "train.parquet"
    pd.read_parquet(path).sample(frac=1, random_state=1).to_parquet(path, index=False)
    succeed(federation.run(HorizontalJob.from_dict({**training.to_dict(), "resume_from": "lost"})))
    difference = leaf_difference(federation.model(), xgb.Booster(model_file=bytearray(whole.model())))
    assert difference <= 5e-7  # float sums over rows in another order


def test_adaptive_leaves_survive_a_site_that_draws_no_row(tmp_path):
    """XGBoost mixes up the leaves at a site without rows: one always takes part."""
    parts = [np.arange(2), np.arange(2, 100), np.arange(100, 200)]
    for objective in ({"objective": "reg:absoluteerror"}, {"objective": "reg:quantileerror", "quantile_alpha": 0.3}):
        federate(tmp_path / objective["objective"][4:], table(200), job({**objective, "subsample": 0.1}), parts=parts)


def test_parallel_trees_with_sampled_rows_are_refused_before_anything_is_sent(tmp_path):
    federation, frames = Federation(tmp_path), []
    federation.give_data("train", table(90))
    outcomes = federation.run(job({"subsample": 0.5, "num_parallel_tree": 2}), frames=frames)
    assert any("num_parallel_tree" in str(error) for error in outcomes.values()) and not frames


# -- attacks
# ------------------------------------------------------------------------------------------------------------


def rows_by_public_seed(n_rows: int, fraction: float, seed: int, n_rounds: int) -> list[np.ndarray]:
    """Return the rows that stock XGBoost draws at a site, round by round; anyone can compute it."""
    twister = XGBoostRandom(seed)
    twister.draw()  # for the column sampler
    return [sampled_rows(n_rows, np.float32(fraction), twister.draw()) for _ in range(n_rounds)]


class _Eavesdropper:
    """Site-1's view: the pooled histogram of every root."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.roots: list[np.ndarray] = []
        honest = ProtectedSums.sum

        def heard(sums, kind, values, *more):
            total = honest(sums, kind, values, *more)
            is_next = not self.roots or sums._channel.moment.round >= len(self.roots)
            if kind is Kind.HISTOGRAM and sums._channel.site == "site-1" and is_next:
                self.roots.append((total - values).reshape(-1, 2))  # without its own part
            return total

        monkeypatch.setattr(ProtectedSums, "sum", heard)


def rows_as_a_histogram(rows: pd.DataFrame, inner_cuts: list[np.ndarray], hessian: float) -> np.ndarray:
    """Return the hessian sums per bin of a few rows without missing values. Each feature has two outer bins."""
    starts = np.cumsum([0] + [cuts.size + 2 for cuts in inner_cuts])
    sums = np.zeros(starts[-1])
    for start, cuts, name in zip(starts[:-1], inner_cuts, rows, strict=True):
        np.add.at(sums, start + np.searchsorted(cuts, rows[name].to_numpy(), side="right"), hessian)
    return sums


def single_rows_read_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how often the attacker predicts one row of each other site, and how often he is right."""
    n_rounds, seed = 60, 3
    frame = table(500).dropna().head(300)
    n = len(frame) // 3
    ear = _Eavesdropper(monkeypatch)
    params = {"subsample": 0.01, "eta": 1e-9, "max_depth": 1, "max_bin": 16, "base_score": 0.5, "seed": seed}
    federation = federate(folder, frame, job(params, n_rounds), parts=np.split(np.arange(3 * n), 3))
    guessed = rows_by_public_seed(n, 0.01, seed, n_rounds)
    single = [number for number in range(n_rounds) if guessed[number].sum() == 1]
    hits = 0
    for number in single:
        # With as many rows at both sites, the public seed draws the same positions at both.
        row = int(np.flatnonzero(guessed[number])[0])
        expected = rows_as_a_histogram(
            frame.iloc[[n + row, 2 * n + row]].drop(columns="y"), list(federation.cuts().of_feature), 0.25
        )
        hits += np.allclose(ear.roots[number][:, 1], expected)
    return len(single), hits


def test_nobody_knows_whose_rows_a_sampled_sum_holds(tmp_path, monkeypatch):
    """Sums of single rows, each known by name. By chance a round holds just the predicted two of 200 rows with 2e-5."""
    n_predicted, n_right = single_rows_read_by_name(tmp_path, monkeypatch)
    assert n_predicted >= 13
    assert n_right <= 3


@pytest.mark.skipif(not installed_release().sends_column_seed, reason="foretells draws as XGBoost 3.2 makes them")
def test_the_attack_works_on_rows_drawn_by_xgboost(tmp_path, monkeypatch):
    honest = site_module.train
    monkeypatch.setattr(site_module, "train", lambda params, *a, **k: honest({**params, "subsample": 0.01}, *a, **k))
    monkeypatch.setattr(site_module._Run, "_draws", lambda attempt: None)
    n_predicted, n_right = single_rows_read_by_name(tmp_path, monkeypatch)
    assert n_right == n_predicted >= 13


def people_read_in_full(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict]:
    """Return how many people's bins of all features, and label, two rounds of one job that differ by one row show."""
    frame = table(560).dropna().head(450).reset_index(drop=True)
    federation.give_data("train", frame)
    ear = _Eavesdropper(monkeypatch)
    params = {"subsample": 0.996, "eta": 1e-9, "max_depth": 1, "base_score": 0.5}
    outcomes = federation.run(job(params, 12))
    if not ear.roots:
        return 0, outcomes
    succeed(outcomes)
    cuts, people = list(federation.cuts().of_feature), set()
    most = max(ear.roots, key=lambda root: root[:, 1].sum())
    others = [
        (rows_as_a_histogram(frame.iloc[[row]].drop(columns="y"), cuts, 0.25), frame.y[row]) for row in range(150, 450)
    ]
    for root in ear.roots:
        difference = most - root
        for person, (bins, label) in enumerate(others):
            gradients = 2 * bins * (0.5 - label) / 0.5
            if np.allclose(difference[:, 1], bins, atol=1e-4) and np.allclose(difference[:, 0], gradients, atol=1e-4):
                people.add(person)
    return len(people), outcomes


def test_rounds_that_lack_few_rows_are_refused(tmp_path, monkeypatch):
    n_people, outcomes = people_read_in_full(Federation(tmp_path, policy=STRICT), monkeypatch)
    assert n_people == 0 and refused(outcomes)


def test_the_attack_works_where_few_rows_are_left_out(tmp_path, monkeypatch):
    federation = Federation(tmp_path, policy={**STRICT, "min_effective_rows": 1})
    federation.set_registry_keys()
    assert people_read_in_full(federation, monkeypatch)[0] >= 1


def refused(outcomes: dict) -> bool:
    return all(isinstance(outcome, TooFewRows) and str(outcome) == TOO_FEW for outcome in outcomes.values())


def sent_kinds(frames: list[tuple[str, bytes]]) -> set[Kind]:
    return {unpack(frame).kind for _, frame in frames}


def test_a_sample_of_few_rows_is_refused_before_a_tree_and_everywhere_alike(tmp_path):
    federation, frames = Federation(tmp_path, policy=STRICT), []
    federation.give_data("train", table(400))
    assert refused(federation.run(job({"subsample": 0.01, "eta": 1e-9}), frames=frames))
    kinds = sent_kinds(frames)
    assert Kind.EFFECTIVE_ROWS in kinds and not kinds & {Kind.HISTOGRAM, Kind.CUT_COUNTS, Kind.ROOT_SUM}
    # Nothing but a capped count was released: the job that was meant may follow.
    succeed(federation.run(job({"subsample": 0.5}), "meant"))


def test_the_same_rows_sampled_otherwise_are_changed_rows(tmp_path):
    federation = Federation(tmp_path, policy=STRICT)
    federation.give_data("train", table(400))
    changed = {"subsample": 0.7}
    succeed(federation.run(job(num_rounds=1), "all"))
    outcomes = federation.run(job(changed), "some")
    assert any("recompute_with_changes" in str(e) and isinstance(e, ConfigurationError) for e in outcomes.values())
    for site in federation.sites:
        federation.write_policy(site, consents={"recompute_with_changes": True})
    succeed(federation.run(job(changed, 1), "consented"))


def test_a_repeated_job_draws_the_same_rows_and_shows_no_difference(tmp_path, monkeypatch):
    """Two jobs with fresh draws differ by what one of them lacks."""
    federation, ear = Federation(tmp_path, policy=STRICT), _Eavesdropper(monkeypatch)
    federation.give_data("train", table(400))
    params = {"subsample": 0.7, "eta": 1e-9, "base_score": 0.5}
    succeed(federation.run(job(params, 3), "first"))
    first, ear.roots = ear.roots, []
    succeed(federation.run(job({**params, "seed": 4, "reg_lambda": 2.0}, 3), "second"))
    assert len(first) == len(ear.roots) == 3
    for one, other in zip(first, ear.roots, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    columns = [name for name in table(4) if name not in ("y", "f3")]
    outcomes = federation.run(job(params, 3, features=columns), "other-columns")
    assert any("recompute_with_changes" in str(error) for error in outcomes.values())


WEIGHTS = {
    "two ones": lambda n: np.isin(np.arange(n), [150, 300]),
    "two large ones": lambda n: np.where(np.isin(np.arange(n), [150, 300]), 1.0, 1e-9),
    "one site": lambda n: np.arange(n) < n // 3,
    "two sites": lambda n: np.arange(n) < 2 * n // 3,
    "crumbs elsewhere": lambda n: np.where(np.arange(n) < n // 3, 1.0, 1e-4),
    "all zero": lambda n: np.zeros(n),
}


@pytest.mark.parametrize("name", names(WEIGHTS, "one site", "two sites", "all zero"))
def test_a_weight_column_singles_out_no_rows_and_no_site(tmp_path, name):
    federation, frames = Federation(tmp_path, policy=STRICT), []
    federation.give_data("train", table(600).assign(w=WEIGHTS[name](600).astype(np.float32)))
    assert refused(federation.run(job(weight="w"), frames=frames))
    assert not sent_kinds(frames) & {Kind.HISTOGRAM, Kind.CUT_COUNTS, Kind.WEIGHT_TOTAL}


def test_a_factor_for_rare_labels_is_a_weight(tmp_path):
    """Else a column of few ones, named as the label, picks out these rows."""
    federation, frames = Federation(tmp_path, policy=STRICT), []
    rare = np.isin(np.arange(600), range(0, 600, 120)).astype(np.float32)
    federation.give_data("train", table(600).assign(y=rare))
    assert refused(federation.run(job({"scale_pos_weight": 1e4}), frames=frames))
    assert not sent_kinds(frames) & {Kind.HISTOGRAM, Kind.CUT_COUNTS, Kind.WEIGHT_TOTAL}
    federation.give_data("train", table(600).assign(y=1 - rare))
    assert refused(federation.run(job({"scale_pos_weight": 1e-4}), "inverse"))
    succeed(federation.run(job({"scale_pos_weight": 3.0}), "usual"))


def test_a_site_that_lies_about_its_rows_gets_no_sums_over_single_ones(tmp_path, monkeypatch):
    """The sum of the counts does not protect from the one who counts."""
    honest = ProtectedSums.sum_counts

    def lying(sums, kind, counts):
        if kind is Kind.EFFECTIVE_ROWS and sums._channel.site == "site-1":
            counts[:2] = 3, 1000
        return honest(sums, kind, counts)

    monkeypatch.setattr(ProtectedSums, "sum_counts", lying)
    federation, frames = Federation(tmp_path, policy={**STRICT, "share_data_errors": False}), []
    federation.give_data("train", table(600).assign(w=(np.arange(600) == 300).astype(np.float32)))
    outcomes = federation.run(job(weight="w"), frames=frames)
    assert isinstance(outcomes["site-2"], DataRefusal) and str(outcomes["site-2"]) == ROWS_TEXT
    sent = [(site, frame) for site, frame in frames if site == "site-2"]
    assert not sent_kinds(sent) & {Kind.HISTOGRAM, Kind.CUT_COUNTS, Kind.WEIGHT_TOTAL}


def test_questions_about_weights_are_counted(tmp_path):
    """Every column may be named as the weight, and the registry forgets what it refused."""
    federation = Federation(tmp_path, policy={**STRICT, "data_refusals_per_month": 2})
    federation.give_data("train", table(600).assign(w=np.float32(0)))
    for number in range(2):
        assert refused(federation.run(job(weight="w"), f"job-{number}"))
    outcomes = federation.run(job(weight="w"), "late")
    assert all("data_refusals_per_month" in str(outcome) for outcome in outcomes.values())


def test_weights_of_an_evaluation_set_single_out_no_row_either(tmp_path):
    federation = Federation(tmp_path, policy=STRICT)
    federation.give_data("train", weighted())
    one = (np.arange(300) == 150).astype(np.float32)
    federation.give_data("held_out", table(300, seed=9).assign(w=one))
    assert refused(federation.run(job(weight="w", eval_data_set="held_out")))


def test_metrics_of_a_few_evaluated_rows_are_refused(tmp_path):
    """Each metric is a sum over the evaluation set, after every round: over three rows it tells their labels."""
    federation, frames = Federation(tmp_path, policy=STRICT), []
    federation.give_data("train", table(400))
    federation.give_data("held_out", table(3, seed=9))
    assert refused(federation.run(job(eval_data_set="held_out"), frames=frames))
    assert not sent_kinds(frames) & {Kind.HISTOGRAM, Kind.METRIC}


def test_other_weights_are_changed_rows(tmp_path):
    federation = Federation(tmp_path, policy=STRICT)
    federation.give_data("train", weighted().assign(v=np.float32(1)))
    columns = ["f0", "f1"]
    succeed(federation.run(job(features=columns), "none"))
    for weight in ("w", "v"):
        outcomes = federation.run(job(features=columns, weight=weight), weight)
        assert any("recompute_with_changes" in str(error) for error in outcomes.values())


def test_other_sites_learn_no_more_of_a_refusal_than_the_fixed_text(tmp_path, monkeypatch):
    """One policy asks for more rows than there are: nobody can tell whose."""
    federation = Federation(tmp_path, policy=STRICT)
    federation.give_data("train", table(400))
    federation.write_policy("site-2", min_effective_rows=5000)
    assert refused(federation.run(job()))


def test_what_every_site_counts_is_capped(tmp_path, monkeypatch):
    """A large site says only that it has enough."""
    counted, honest = [], ProtectedSums.sum_counts

    def heard(sums, kind, counts):
        if kind is Kind.EFFECTIVE_ROWS:
            counted.append(counts.tolist())
        return honest(sums, kind, counts)

    monkeypatch.setattr(ProtectedSums, "sum_counts", heard)
    federate(tmp_path, table(900), job({"subsample": 0.5}), policy=STRICT)
    assert [counts[:2] for counts in counted] == [[1, 200]] * 3


# -- floors
# -------------------------------------------------------------------------------------------------------------


def smallest_leaf(federation: Federation, frame: pd.DataFrame, job_id: str = "job") -> int:
    booster = xgb.Booster(model_file=bytearray(federation.model(job_id)))
    features = frame.drop(columns=[c for c in ("y", "w") if c in frame])
    leaf_of = booster.predict(xgb.DMatrix(features), pred_leaf=True).reshape(len(frame), -1).astype(int)
    return min(np.unique(column, return_counts=True)[1].min() for column in leaf_of.T)


def agreed(federation: Federation, job_id: str = "job") -> dict:
    return json.loads((federation.workspace("site-1") / "runs" / job_id / "run.json").read_text())


FLOORED = {
    "logistic": ({}, None),
    "scale_pos_weight": ({"scale_pos_weight": 5.0}, 5.0),
    "squared_error": ({"objective": "reg:squarederror"}, 4.0),
    "hinge": ({"objective": "binary:hinge"}, 4.0),
    "softprob": ({"objective": "multi:softprob", "num_class": 2}, 2.0),
    "lossguide": ({"objective": "reg:squarederror", "grow_policy": "lossguide", "max_leaves": 60, "max_depth": 0}, 4.0),
    "absolute_error": ({"objective": "reg:absoluteerror"}, 4.0),
    "sampled": ({"objective": "reg:squarederror", "subsample": 0.5}, 4.0),
}


@pytest.mark.parametrize(
    "name", names(FLOORED, "lossguide", "softprob", "hinge", "absolute_error", "scale_pos_weight", "sampled")
)
def test_no_node_holds_fewer_rows_than_the_sites_ask_for(tmp_path, name):
    params, raised = FLOORED[name]
    params, frame = {"max_depth": 8, "reg_lambda": 0.0, **params}, table(400)
    training = job(params, 2)
    free = federate(tmp_path / "free", frame, job({**params, "min_child_weight": 0.0}, 2))
    assert smallest_leaf(free, frame) < 4, "the test shows nothing"
    federation = federate(tmp_path / "floor", frame, training, policy=STRICT)
    if "subsample" not in params:
        assert smallest_leaf(federation, frame) >= 4
    record = agreed(federation)
    assert record["params"].get("min_child_weight") == raised
    assert any("min_child_weight" in note for note in record["notes"]) == (raised is not None)


def test_a_raised_parameter_is_what_centralized_training_equals(tmp_path):
    frame, params = table(400), {"objective": "reg:squarederror", "base_score": 0.5, "max_depth": 6}
    federation = federate(tmp_path, frame, job(params), policy=STRICT)
    settings = {**LOGISTIC, **params, "min_child_weight": agreed(federation)["params"]["min_child_weight"]}
    assert leaf_difference(federation.model(), central_model(frame, "y", settings, federation.cuts(), 4)) == 0.0
    federation.write_policy("site-3", min_rows_per_node=9)
    for site in federation.sites:
        federation.write_policy(site, consents={"recompute_with_changes": True})
    succeed(federation.run(job(params), "nine"))
    assert agreed(federation, "nine")["params"]["min_child_weight"] == 9.0


def test_a_smaller_child_weight_of_the_job_is_refused_with_the_number(tmp_path):
    federation, frames = Federation(tmp_path, policy=STRICT), []
    federation.give_data("train", weighted().assign(w=lambda f: f.w * 3))
    squared = {"objective": "reg:squarederror", "min_child_weight": 3.0}
    outcomes = federation.run(job(squared, features=["f0", "f1"]), frames=frames)
    assert any("at least 4," in str(e) and "min_rows_per_node" in str(e) for e in outcomes.values()) and not frames
    # With weights up to 3 each row may count 4 times as much.
    outcomes = federation.run(job({**squared, "min_child_weight": 15.0}, features=["f0", "f1"], weight="w"), "weights")
    assert all("at least 16," in str(error) for error in outcomes.values())
    succeed(federation.run(job({"objective": "reg:squarederror"}, features=["f0", "f1"], weight="w"), "left-out"))
    assert agreed(federation, "left-out")["params"]["min_child_weight"] == 16.0


def test_the_largest_value_of_a_column_is_not_told_by_a_smaller_child_weight(tmp_path):
    """The refusal held the power of two above the largest weight of all sites, for any column, as often as asked."""
    federation = Federation(tmp_path, policy={**STRICT, "share_data_errors": False, "data_refusals_per_month": 2})
    federation.give_data("train", weighted().assign(one=1.0, many=lambda f: f.w * 1000))
    squared, texts = {"objective": "reg:squarederror", "min_child_weight": 0.0}, []
    for number, column in enumerate(("one", "many", "w")):
        outcomes = federation.run(job(squared, features=["f0", "f1"], weight=column), f"job-{number}")
        texts.append({str(error) for error in outcomes.values() if not isinstance(error, JobAborted)})
    assert texts[:2] == [{ROWS_TEXT}] * 2
    assert texts[2] and all("has refused 2 jobs within a month" in text for text in texts[2])
    # None of them is remembered: the same rows may still be trained on, once the site has read its log.
    for site in federation.sites:
        RefusalCount(SitePolicy.load(federation.workspace(site), site)).reset("train")
    succeed(federation.run(job({"objective": "reg:squarederror"}, features=["f0", "f1"]), "later"))


UNBOUNDED = {
    "poisson": {"objective": "count:poisson"},
    "vector_leaf": {"objective": "multi:softprob", "num_class": 2, "multi_strategy": "multi_output_tree"},
    "squared_log_error": {"objective": "reg:squaredlogerror", "num_parallel_tree": 2},
}


@pytest.mark.parametrize("name", names(UNBOUNDED, "squared_log_error"))
def test_where_hessians_have_no_bound_leaves_are_counted(tmp_path, name):
    frame, params = table(400), UNBOUNDED[name]
    shallow = {**params, "max_depth": 1 if name == "vector_leaf" else 2, "min_child_weight": 12.0}
    federation = federate(tmp_path / "large", frame, job(shallow), policy=STRICT)
    assert smallest_leaf(federation, frame) >= 4
    assert any("counted" in note for note in agreed(federation)["notes"])
    small = Federation(tmp_path / "small", policy=STRICT)
    small.give_data("train", frame)
    outcomes = small.run(job({**params, "max_depth": 12, "min_child_weight": 0.0, "reg_lambda": 0.0}))
    assert all(isinstance(e, PolicyRefusal) and "min_rows_per_node" in str(e) for e in outcomes.values())
    assert not any((small.workspace(site) / "runs" / "job" / "model.json").exists() for site in small.sites)


@pytest.mark.parametrize(
    ("params", "num_rounds", "key"),
    [
        ({"max_bin": 2000}, 2, "max_bins"),
        ({"max_depth": 17}, 2, "max_depth"),
        ({}, 5001, "max_rounds"),
        ({"num_parallel_tree": 51}, 100, "max_rounds"),
        ({"grow_policy": "lossguide", "max_depth": 0, "max_leaves": 70_000}, 2, "max_depth"),
    ],
)
def test_jobs_beyond_the_sites_limits_are_refused_before_anything_is_sent(tmp_path, params, num_rounds, key):
    federation, frames = Federation(tmp_path), []
    federation.give_data("train", table(90))
    outcomes = federation.run(job(params, num_rounds), frames=frames)
    assert any(isinstance(e, PolicyRefusal) and f"Policy key: {key}." in str(e) for e in outcomes.values())
    assert not frames
