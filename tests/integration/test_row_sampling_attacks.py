"""Attacks on rows that are drawn, weighted or left out: they must not work, and each works without the defence.

The attacker is site-1: it knows the job, all code, its own rows and secret, and every pooled sum.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import ROWS_TEXT, DataRefusal, TooFewRows
from nvflare_plugins.growth.sampling import XGBoostRandom, sampled_rows
from nvflare_plugins.growth.site_sums import SiteSums
from nvflare_plugins.kinds.horizontal import site as site_module
from nvflare_plugins.pooled.mediated import engine as mediated
from nvflare_plugins.pooled.row_floors import TOO_FEW
from nvflare_plugins.wire.envelope import Kind, unpack
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.versions import installed_release
from tests.support.federation import Federation, succeed
from tests.support.horizontal_jobs import federate, job, spaced, table
from tests.support.row_draws import STRICT, names, weighted


def rows_by_public_seed(n_rows: int, fraction: float, seed: int, n_rounds: int) -> list[np.ndarray]:
    """Return the rows that stock XGBoost draws at a site, round by round; anyone can compute it."""
    twister = XGBoostRandom(seed)
    twister.draw()  # for the column sampler
    return [sampled_rows(n_rows, np.float32(fraction), twister.draw()) for _ in range(n_rounds)]


class _Eavesdropper:
    """Site-1's view: the pooled histogram of every root."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.roots: list[np.ndarray] = []
        honest, honest_pairs = ProtectedSums.sum, SiteSums.pairs

        def hear(channel, others):
            is_next = not self.roots or channel.moment.round >= len(self.roots)
            if channel.site == "site-1" and is_next:
                self.roots.append(others)

        def heard(sums, kind, values, *more):
            total = honest(sums, kind, values, *more)
            if kind is Kind.HISTOGRAM:
                hear(sums._channel, (total - values).reshape(-1, 2))  # without its own part
            return total

        def heard_pairs(sums, values, grid, **named):
            total, metrics = honest_pairs(sums, values, grid, **named)
            others = (total - values).reshape(-1, 2)[:-1]  # the last pair is the sum of all rows
            hear(sums._sums._channel, np.ldexp(others.astype(np.float64), [grid.g_exponent, grid.h_exponent]))
            return total, metrics

        monkeypatch.setattr(ProtectedSums, "sum", heard)
        monkeypatch.setattr(SiteSums, "pairs", heard_pairs)


def rows_as_a_histogram(rows: pd.DataFrame, inner_cuts: list[np.ndarray], hessian: float) -> np.ndarray:
    """Return the hessian sums per bin of a few rows without missing values. Each feature has two outer bins."""
    starts = np.cumsum([0] + [cuts.size + 2 for cuts in inner_cuts])
    sums = np.zeros(starts[-1])
    for start, cuts, name in zip(starts[:-1], inner_cuts, rows, strict=True):
        np.add.at(sums, start + np.searchsorted(cuts, rows[name].to_numpy(), side="right"), hessian)
    return sums


def single_rows_read_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str = "own") -> tuple[int, int]:
    """Return how often the attacker predicts one row of each other site, and how often he is right."""
    n_rounds, seed = 60, 3
    frame = table(500).dropna().head(300)
    n = len(frame) // 3
    ear = _Eavesdropper(monkeypatch)
    params = {"subsample": 0.01, "eta": 1e-9, "max_depth": 1, "max_bin": 16, "base_score": 0.5, "seed": seed}
    federation = federate(folder, frame, spaced(params, n_rounds, engine=engine), parts=np.split(np.arange(3 * n), 3))
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
    honest = mediated.train

    def by_xgboost(task, *rest):
        return honest(dataclasses.replace(task, params={**task.params, "subsample": 0.01}), *rest)

    monkeypatch.setattr(mediated, "train", by_xgboost)
    monkeypatch.setattr(site_module.TrainingAttempt, "_draws", lambda attempt: None)
    n_predicted, n_right = single_rows_read_by_name(tmp_path, monkeypatch, "xgboost")
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
    federation, frames = Federation.of(tmp_path, policy=STRICT, train=table(400)), []
    assert refused(federation.run(job({"subsample": 0.01, "eta": 1e-9}), frames=frames))
    kinds = sent_kinds(frames)
    assert Kind.EFFECTIVE_ROWS in kinds and not kinds & {Kind.HISTOGRAM, Kind.CUT_COUNTS, Kind.ROOT_SUM}
    # Nothing but a capped count was released: the job that was meant may follow.
    succeed(federation.run(spaced({"subsample": 0.5}, 1), "meant"))


def test_the_same_rows_sampled_otherwise_are_changed_rows(tmp_path):
    federation = Federation.of(tmp_path, policy=STRICT, train=table(400))
    changed = {"subsample": 0.7}
    succeed(federation.run(job(num_rounds=1), "all"))
    outcomes = federation.run(job(changed), "some")
    assert any("recompute_with_changes" in str(e) and isinstance(e, ConfigurationError) for e in outcomes.values())
    federation.set_policies(consents={"recompute_with_changes": True})
    succeed(federation.run(job(changed, 1), "consented"))


def test_a_repeated_job_draws_the_same_rows_and_shows_no_difference(tmp_path, monkeypatch):
    """Two jobs with fresh draws differ by what one of them lacks."""
    federation, ear = Federation.of(tmp_path, policy=STRICT, train=table(400)), _Eavesdropper(monkeypatch)
    params = {"subsample": 0.7, "eta": 1e-9, "base_score": 0.5}
    succeed(federation.run(spaced(params, 3), "first"))
    first, ear.roots = ear.roots, []
    succeed(federation.run(spaced({**params, "seed": 4, "reg_lambda": 2.0}, 3), "second"))
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
    succeed(federation.run(spaced({"scale_pos_weight": 3.0}, 1), "usual"))


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
    federation = Federation.of(tmp_path, policy=STRICT, train=weighted())
    one = (np.arange(300) == 150).astype(np.float32)
    federation.give_data("held_out", table(300, seed=9).assign(w=one))
    assert refused(federation.run(job(weight="w", eval_data_set="held_out")))


def test_metrics_of_a_few_evaluated_rows_are_refused(tmp_path):
    """Each metric is a sum over the evaluation set, after every round: over three rows it tells their labels."""
    federation, frames = Federation.of(tmp_path, policy=STRICT, train=table(400), held_out=table(3, seed=9)), []
    assert refused(federation.run(job(eval_data_set="held_out"), frames=frames))
    assert not sent_kinds(frames) & {Kind.HISTOGRAM, Kind.METRIC}


def test_other_weights_are_changed_rows(tmp_path):
    federation = Federation.of(tmp_path, policy=STRICT, train=weighted().assign(v=np.float32(1)))
    columns = ["f0", "f1"]
    succeed(federation.run(job(num_rounds=1, features=columns), "none"))
    for weight in ("w", "v"):
        outcomes = federation.run(job(features=columns, weight=weight), weight)
        assert any("recompute_with_changes" in str(error) for error in outcomes.values())


def test_other_sites_learn_no_more_of_a_refusal_than_the_fixed_text(tmp_path, monkeypatch):
    """One policy asks for more rows than there are: nobody can tell whose."""
    federation = Federation.of(tmp_path, policy=STRICT, train=table(400))
    federation.set_policy("site-2", min_effective_rows=5000)
    assert refused(federation.run(job()))


def test_what_every_site_counts_is_capped(tmp_path, monkeypatch):
    """A large site says only that it has enough."""
    counted, honest = [], ProtectedSums.sum_counts

    def heard(sums, kind, counts):
        if kind is Kind.EFFECTIVE_ROWS:
            counted.append(counts.tolist())
        return honest(sums, kind, counts)

    monkeypatch.setattr(ProtectedSums, "sum_counts", heard)
    federate(tmp_path, table(900), spaced({"subsample": 0.5}, 1), policy=STRICT)
    assert [counts[:2] for counts in counted] == [[1, 200]] * 3
