"""Gradients of ranking against the installed XGBoost's, to the last bit, and what they are computed from."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.growth import ranking
from nvflare_plugins.growth.arithmetic import arithmetic_of
from nvflare_plugins.growth.ranking import RANK_OBJECTIVES, PairRules, Queries, rank_gradients

_WHOLE = 2.0**40  # of lambda, beside which hessians vanish: leaves are gradients, times a power of two
_IS_DRAWN_BY_ROUND = not arithmetic_of(xgb.__version__).draws_pair_seeds


def of_xgboost(params, margins, labels, sizes, weights=None) -> np.ndarray:
    """Have XGBoost refresh a tree with a leaf for each row: its leaves tell gradients, its sums hessians."""
    table = np.arange(labels.size, dtype=np.float32)[:, None]
    own = {"max_depth": 40, "tree_method": "exact", "reg_lambda": 0, "min_child_weight": 0, "eta": 1, "base_score": 0}
    tree = xgb.train(own, matrix := xgb.DMatrix(table, label=7 * table[:, 0]), 1)
    leaves = tree.predict(matrix, pred_leaf=True).astype(int).ravel()
    ranked = xgb.DMatrix(table, label=labels, base_margin=margins, group=sizes, weight=weights)
    refresh = {"process_type": "update", "updater": "refresh", "reg_lambda": _WHOLE, "base_score": 0, "verbosity": 0}
    found = xgb.train({**refresh, "eta": 1, "disable_default_eval_metric": 1, **params}, ranked, 1, xgb_model=tree)
    fields = json.loads(found.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"][0]
    g = -np.array(fields["base_weights"], np.float32)[leaves].astype(np.float64) * _WHOLE
    return np.stack([g.astype(np.float32), np.array(fields["sum_hessian"], np.float32)[leaves]], axis=1)


def drawn_rows(name: str, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([[1, 2], rng.integers(1, 60, 30)])
    labels = rng.integers(0, 2 if name == "rank:map" else 5, sizes.sum()).astype(np.float32)
    numbers = np.repeat(np.arange(sizes.size), sizes)
    labels[numbers == 5] = 1  # no pair, and all relevant
    margins = rng.normal(size=labels.size).round(1).astype(np.float32) * np.float32(0.37)  # with ties
    return margins, labels, numbers, rng.gamma(1.0, size=sizes.size).astype(np.float32)


CASES = list(product(RANK_OBJECTIVES, ("topk", "mean"), (True, False), (True, False), (None, 3), (False, True)))


@pytest.mark.parametrize(("name", "method", "normalizes", "by_score", "n_pairs", "weighted"), CASES)
def test_gradients_are_those_of_xgboost(name, method, normalizes, by_score, n_pairs, weighted) -> None:
    params = {"objective": name, "lambdarank_pair_method": method, "lambdarank_normalization": normalizes}
    params |= {"lambdarank_score_normalization": by_score, "ndcg_exp_gain": by_score == weighted}
    params |= {"lambdarank_num_pair_per_sample": n_pairs} if n_pairs else {}
    margins, labels, numbers, weight = drawn_rows(name)
    sizes = np.bincount(numbers)
    expected = of_xgboost(params, margins, labels, sizes, weight if weighted else None)
    rules, queries = PairRules.of(params), Queries.of(numbers, weight[numbers] if weighted else None)
    found = rank_gradients(name, rules, queries, margins, labels, sizes.size)
    if method == "topk" or _IS_DRAWN_BY_ROUND:
        assert found.tobytes() == (expected + np.float32(0)).tobytes()
    largest = float(weight.max()) * queries.weight_norm if weighted else 1.0
    assert (np.abs(found).max(axis=0) <= np.array(rules.bounds(int(sizes.max()))) * largest).all()
    if method == "mean":  # the control: other pairs are other gradients
        assert (rank_gradients(name, rules, queries, margins, labels, sizes.size + 1) != found).any()


@pytest.mark.parametrize("method", ["topk", "mean"])
def test_rows_may_lie_in_any_order_and_queries_at_any_site(method, monkeypatch) -> None:
    """Of one query they keep theirs, which decides between equal scores; batches of queries do not matter."""
    margins, labels, numbers, _ = drawn_rows("rank:ndcg")
    rules = PairRules.of({"lambdarank_pair_method": method})
    expected = rank_gradients("rank:ndcg", rules, Queries.of(numbers, None), margins, labels, 9)
    mixed = np.argsort(np.random.default_rng(1).permutation(labels.size) // 3, kind="stable")
    mixed = mixed[np.argsort(numbers[mixed] % 4, kind="stable")]
    mixed = mixed[np.lexsort((mixed, np.random.default_rng(2).integers(0, 9, numbers.max() + 1)[numbers[mixed]]))]
    queries = Queries.of(numbers[mixed], None)
    found = rank_gradients("rank:ndcg", rules, queries, margins[mixed], labels[mixed], 9)
    assert np.array_equal(found, expected[mixed])
    first = int(numbers.max()) // 2
    monkeypatch.setattr(ranking, "_BATCH", 90)
    for begin, some in ((0, numbers < first), (first, numbers >= first)):
        part = Queries.of(numbers[some] - begin, None).among(begin, 0, 0.0)
        assert np.array_equal(rank_gradients("rank:ndcg", rules, part, margins[some], labels[some], 9), expected[some])


def test_draws_are_those_of_the_standard_library_where_some_are_thrown_away() -> None:
    below = np.array([2**30 + 1, 3, 2**30 + 1, 10, 2**30 + 1] * 20)
    seeds, numbers = np.repeat([1, 2**31 - 1, 7, 2**32 + 5], 25), np.tile(np.arange(25), 4)

    def one_by_one(seed: int) -> list[int]:
        state, found = seed % 2**32 % (2**31 - 1) or 1, []
        for n in below[:25].tolist():
            while True:
                state = state * 48271 % (2**31 - 1)
                if state - 1 < (2**31 - 3) // n * n:
                    break
            found.append((state - 1) // ((2**31 - 3) // n))
        return found

    expected = [draw for seed in (1, 2**31 - 1, 7, 2**32 + 5) for draw in one_by_one(seed)]
    assert ranking._draws(seeds, numbers, below).tolist() == expected


def test_a_site_without_rows_and_queries_without_pairs() -> None:
    nothing = Queries.of(np.zeros(0, np.int64), None)
    empty = np.zeros(0, np.float32)
    for method in ("topk", "mean"):
        rules = PairRules.of({"lambdarank_pair_method": method})
        assert rank_gradients("rank:ndcg", rules, nothing, empty, empty, 1).shape == (0, 2)
        alone = Queries.of(np.arange(3), None)
        assert not rank_gradients("rank:ndcg", rules, alone, *np.ones((2, 3), np.float32), 1).any()
    assert ranking.rank_parts("ndcg", 5, nothing, empty, empty, exp_gain=True) == (0.0, 0.0)
    assert nothing.have_pairs(empty).tolist() == []
    queries = Queries.of(np.array([0, 1, 0, 1, 2]), None)
    assert queries.have_pairs(np.array([1, 2, 1, 3, 5], np.float32)).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("method", ["topk", "mean"])
def test_a_metric_that_is_named_looks_at_32_places_and_xgboosts_own_choice_under_mean_at_all(method) -> None:
    """What MODEL.md says of jobs that name no metric."""
    rng, numbers = np.random.default_rng(1), np.repeat(np.arange(10), 36)
    labels, table = rng.integers(0, 2, 360).astype(np.float32), rng.normal(size=(360, 2))
    matrix, queries = xgb.DMatrix(table, label=labels, qid=numbers), Queries.of(numbers, None)
    params = {"objective": "rank:ndcg", "lambdarank_pair_method": method, "base_score": 0.0}
    for named, depth in (({"eval_metric": "ndcg"}, 32), ({}, 32 if method == "topk" else 36)):
        told: dict = {}
        booster = xgb.train(
            {**params, **named}, matrix, 1, evals=[(matrix, "t")], evals_result=told, verbose_eval=False
        )
        total, weight = ranking.rank_parts("ndcg", depth, queries, booster.predict(matrix), labels, exp_gain=True)
        assert next(iter(told["t"].values()))[-1] == pytest.approx(total / weight, abs=1e-6)
