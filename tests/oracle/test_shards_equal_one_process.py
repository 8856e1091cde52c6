"""A site whose rows are in shards over workers trains the model that it would train in one process.

Private trees: the same bytes for any number of shards, because their sums are integers. Horizontal: the same bytes for
a fixed number of shards wherever they are. For another number the sums of float64 are rounded elsewhere, so that
structure must be equal and leaves may differ by two units of float32's last place (2e-7 of max(1, |leaf|)); on all of
these tables they do not differ at all. The oracle is centralized XGBoost on the pooled rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from dp_components.mechanisms import add_gaussian_noise
from he_processors.errors import ConfigurationError
from nvflare_plugins.data.labels import columns_of
from nvflare_plugins.pooled.job import HorizontalJob
from tests.support.federation import Federation, SiteDied, central_model, leaf_difference, succeed
from tests.support.horizontal_jobs import dies_after
from tests.support.private_federation import PrivateFederation, job_of
from tests.support.seeded_randomness import SeededRandomness
from tests.support.shards import in_shards

ROUNDS, MAX_BIN = 3, 32
LEAVES = 2e-7
LOGISTIC = {"objective": "binary:logistic"}


def table(n_rows: int = 900, seed: int = 5) -> pd.DataFrame:
    """Five columns, one of few values, 7 % missing; labels of two classes, counts and classes besides."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_rows, 5)).astype(np.float32)
    features[:, 4] = rng.integers(0, 3, n_rows)
    signal = features[:, 0] + features[:, 1] * features[:, 2] + 0.5 * features[:, 4] + rng.normal(size=n_rows)
    features[rng.random(features.shape) < 0.07] = np.nan
    frame = pd.DataFrame(features, columns=[f"x{i}" for i in range(5)])
    return frame.assign(
        y=(signal > 0.6).astype(np.float32),
        level=np.digitize(signal, [0.0, 1.0]).astype(np.float32),
        amount=np.abs(signal).astype(np.float32) + 0.1,
        days=np.where(signal > 0.6, 1, -1).astype(np.float32) * (np.abs(signal).astype(np.float32) + 0.1),
        w=rng.uniform(0.2, 3.0, n_rows).astype(np.float32),
    )


def train(
    folder: Path,
    params: dict[str, object],
    shards: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    label: str | dict[str, str] = "y",
    held_out: bool = False,
    **fields: object,
) -> Federation:
    folder.mkdir()
    federation = Federation(folder)
    names = [f"x{i}" for i in range(5)]
    keep = [*names, *columns_of(label), *(["w"] if "weight" in fields else [])]
    federation.give_data("train", table()[keep])
    federation.set_registry_keys()
    if held_out:
        federation.give_data("held_out", table(200, 6)[keep])
        fields |= {"eval_data_set": "held_out", "evaluate_training": True}
    job = HorizontalJob(
        "train", label, {"max_depth": 4, "max_bin": MAX_BIN, **params}, ROUNDS, profile="masks", **fields
    )
    with monkeypatch.context() as patch:
        in_shards(patch, shards)
        succeed(federation.run(job))
    return federation


TRAININGS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "logistic": ({**LOGISTIC, "eval_metric": ["logloss", "error"]}, {"held_out": True}),
    "regression": ({"objective": "reg:gamma"}, {"label": "amount"}),
    "classes": ({"objective": "multi:softprob", "num_class": 3}, {"label": "level", "held_out": True}),
    "weights": ({**LOGISTIC, "min_child_weight": 2}, {"weight": "w", "held_out": True}),
    "lossguide": ({**LOGISTIC, "grow_policy": "lossguide", "max_leaves": 8, "max_depth": 0}, {}),
    "columns": ({**LOGISTIC, "colsample_bynode": 0.6, "seed": 7}, {}),
    "dart": ({**LOGISTIC, "booster": "dart", "rate_drop": 0.4}, {}),
    "vector_leaf": (
        {"objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree"},
        {"label": "level"},
    ),
    "rows": ({**LOGISTIC, "subsample": 0.5, "seed": 3}, {}),
    "weighed_rows": ({**LOGISTIC, "subsample": 0.5, "min_child_weight": 2}, {"weight": "w"}),
    "times": (
        {"objective": "survival:aft", "eval_metric": ["aft-nloglik"]},
        {"label": {"signed": "days"}, "held_out": True, "weight": "w"},
    ),
    "huber": ({"objective": "reg:pseudohubererror"}, {"label": "amount"}),
    "curves": ({**LOGISTIC, "eval_metric": ["auc", "logloss", "aucpr"]}, {"held_out": True, "weight": "w"}),
    "curves_of_classes": (
        {"objective": "multi:softmax", "num_class": 3, "eval_metric": ["auc", "aucpr"]},
        {"label": "level", "held_out": True},
    ),
    "median": ({"objective": "reg:absoluteerror"}, {"label": "amount", "held_out": True}),
    "weighed_median": ({"objective": "reg:absoluteerror", "min_child_weight": 2}, {"label": "amount", "weight": "w"}),
    "quantile": ({"objective": "reg:quantileerror", "quantile_alpha": 0.3}, {"label": "amount"}),
    "quantile_of_drawn_rows": (
        {"objective": "reg:quantileerror", "quantile_alpha": 0.9, "subsample": 0.4, "grow_policy": "lossguide"},
        {"label": "amount"},
    ),
    "dart_median": ({"objective": "reg:absoluteerror", "booster": "dart", "rate_drop": 0.4}, {"label": "amount"}),
    "stops_early": ({**LOGISTIC, "eta": 3.0}, {"held_out": True, "early_stopping_rounds": 1, "checkpoint_every": 1}),
}
SHARDS = {"one": {"site-2": 1}, "several": {"site-1": 3, "site-2": 2}}
QUICK = {"weighed_rows"}


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in TRAININGS]
)
def test_horizontal_model_and_metrics_are_those_of_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, fields = TRAININGS[name]
    alone = train(tmp_path / "alone", params, {}, monkeypatch, **fields)
    for which, shards in SHARDS.items():
        federation = train(tmp_path / which, params, shards, monkeypatch, **fields)
        if which == "one" or name == "vector_leaf":  # XGBoost cannot list trees of vector leaves
            assert federation.model() == alone.model()
        else:
            assert leaf_difference(federation.model(), xgb.Booster(model_file=bytearray(alone.model()))) <= LEAVES
        for site in federation.sites:
            ours, theirs = federation.record(site).rounds, alone.record(site).rounds
            assert [row.round for row in ours] == [row.round for row in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.metrics == pytest.approx(other.metrics, rel=1e-6)


def test_horizontal_model_is_that_of_centralized_xgboost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {**LOGISTIC, "max_depth": 4, "max_bin": MAX_BIN}
    federation = train(tmp_path / "shards", params, {"site-1": 3, "site-3": 2}, monkeypatch)
    frame = table()[[f"x{i}" for i in range(5)] + ["y"]]
    assert leaf_difference(federation.model(), central_model(frame, "y", params, federation.cuts(), ROUNDS)) <= LEAVES
    other = central_model(frame.iloc[1:], "y", params, federation.cuts(), ROUNDS)
    assert leaf_difference(federation.model(), other) > LEAVES  # a row less is seen


def test_a_fixed_number_of_shards_gives_the_same_bytes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {train(tmp_path / f"{i}", LOGISTIC, {"site-2": 3}, monkeypatch).model() for i in range(2)}
    assert len(models) == 1


def test_other_sites_see_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many messages of the same kinds and sizes, whether a site has shards or not."""
    seen = {}
    for name, shards in (("alone", {}), ("shards", {"site-1": 3})):
        federation = train(tmp_path / name, LOGISTIC, shards, monkeypatch)
        rows = {site: federation.record(site).traffic for site in federation.sites}
        seen[name] = {site: [(t.kind, t.codec, t.messages, t.bytes_in) for t in rows[site]] for site in rows}
    assert seen["alone"] == seen["shards"]


def test_leaves_are_counted_over_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree", "max_depth": 2}
    outcomes = {}
    for name, shards in (("alone", {}), ("shards", {"site-1": 2, "site-2": 3})):
        federation = Federation(tmp_path / name, policy={"min_rows_per_node": 40})
        federation.give_data("train", table()[[f"x{i}" for i in range(5)] + ["level"]])
        with monkeypatch.context() as patch:
            in_shards(patch, shards)
            for floor in (40, 400):
                federation.set_policies(min_rows_per_node=floor)
                job = HorizontalJob("train", "level", {"max_bin": MAX_BIN, **params}, 1, profile="masks")
                outcome = federation.run(job, f"job-{floor}")["site-1"]
                outcomes[name, floor] = str(outcome) if isinstance(outcome, Exception) else federation.model("job-40")
    assert outcomes["alone", 40] == outcomes["shards", 40]
    assert outcomes["alone", 400] == outcomes["shards", 400]
    assert "a leaf holds fewer than 400 rows" in str(outcomes["shards", 400])


@pytest.mark.parametrize(
    ("objective", "label"),
    [("binary:logistic", "y"), pytest.param("reg:absoluteerror", "amount", marks=pytest.mark.slow)],
)
def test_a_job_goes_on_from_its_checkpoint(
    objective: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: dict[str, object] = {"max_depth": 4, "max_bin": MAX_BIN, "objective": objective}
    whole = train(tmp_path / "whole", params, {"site-1": 2}, monkeypatch, label=label)
    (tmp_path / "parts").mkdir()
    federation = Federation.of(tmp_path / "parts", train=table()[[f"x{i}" for i in range(5)] + [label]])
    federation.set_registry_keys()

    with monkeypatch.context() as patch:
        in_shards(patch, {"site-1": 2})
        first = HorizontalJob("train", label, params, ROUNDS, profile="masks", checkpoint_every=1)
        assert isinstance(
            federation.run(first, on_progress=dies_after("site-1", 2), notices_death=True)["site-1"], SiteDied
        )
        again = HorizontalJob("train", label, params, ROUNDS, profile="masks", checkpoint_every=1, resume_from="job")
        succeed(federation.run(again, "again"))
    assert federation.model("again") == whole.model()
    assert [row.round for row in federation.record("site-1", "again").rounds] == [2]
    in_shards(monkeypatch, {"site-1": 3})
    succeed(federation.run(again, "other"))  # where the sites grow the trees, models do not depend on the workers
    assert federation.model("other") == whole.model()


def test_xgboost_goes_on_with_as_many_shards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation.of(tmp_path, train=table()[[f"x{i}" for i in range(5)] + ["y"]])
    federation.set_registry_keys()
    params = {**LOGISTIC, "max_bin": MAX_BIN}
    fields = {"profile": "masks", "checkpoint_every": 1, "engine": "xgboost"}

    with monkeypatch.context() as patch:
        in_shards(patch, {"site-1": 2})
        first = HorizontalJob("train", "y", params, ROUNDS, **fields)
        federation.run(first, on_progress=dies_after("site-1", 2), notices_death=True)
    in_shards(monkeypatch, {"site-1": 3})
    again = HorizontalJob("train", "y", params, ROUNDS, resume_from="job", **fields)
    other = federation.run(again, "other")["site-1"]
    assert isinstance(other, ConfigurationError) and "3 workers, and job job had 2" in str(other)


def test_leaves_are_quantiles_of_the_site_where_a_shard_draws_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site of three rows over five workers: XGBoost walks a tree in which it has no row in another order."""
    models = set()
    for name, shards in (("alone", {}), ("shards", {"site-1": 5, "site-2": 2})):
        federation = Federation(tmp_path / name)
        frame = table(400)[[*(f"x{i}" for i in range(5)), "amount"]]
        federation.give_data("train", frame, [np.arange(3), np.arange(3, 200), np.arange(200, 400)])
        federation.set_registry_keys()
        params = {"objective": "reg:quantileerror", "quantile_alpha": 0.7, "max_depth": 3, "subsample": 0.4}
        with monkeypatch.context() as patch:
            in_shards(patch, shards)
            succeed(
                federation.run(HorizontalJob("train", "amount", {**params, "max_bin": MAX_BIN}, 3, profile="masks"))
            )
        models.add(federation.model())
    assert len(models) == 1


@pytest.mark.parametrize(
    "fields", [pytest.param({}, marks=pytest.mark.slow), {"weight": "w"}], ids=["unweighted", "weighted"]
)
def test_shards_without_rows_add_nothing(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site of two rows over four workers, and one of none over two."""
    models = set()
    for name, shards in (("alone", {}), ("shards", {"site-1": 4, "site-4": 2})):
        federation = Federation(tmp_path / name, 4)
        frame = table(400)[[*(f"x{i}" for i in range(5)), "y", *(["w"] if fields else [])]]
        federation.give_data("train", frame, [np.arange(2), np.arange(2, 200), np.arange(200, 400), np.arange(0)])
        federation.give_data("held_out", frame, [np.arange(1), np.arange(200), np.arange(300), np.arange(3)])
        federation.set_registry_keys()
        params = {**LOGISTIC, "max_depth": 3, "max_bin": MAX_BIN, "subsample": 0.7, "eval_metric": ["logloss"]}
        job = HorizontalJob("train", "y", params, 2, profile="masks", eval_data_set="held_out", **fields)
        with monkeypatch.context() as patch:
            in_shards(patch, shards)
            succeed(federation.run(job))
        models.add(federation.model())
    assert len(models) == 1


def noise(seed: int):
    source = SeededRandomness(seed)
    return lambda sums, sensitivity, multiplier: add_gaussian_noise(sums, sensitivity, multiplier, source)


EIGHT = {"n_trees": 8}
PRIVATE: dict[str, dict[str, object]] = {
    "default": {},
    "xgboost": {"method": "dp_tr_newton", "components": {**EIGHT, "grower": "xgboost"}},
    "histogram": {"method": "feverless"},
    "partially_random": {"method": "dp_gbm"},
    "refined": {"method": "dp_tr_newton_ih"},
    "paid": {"components": {**EIGHT, "candidates": "mixed"}},
}


@pytest.mark.parametrize("name", ["default", *(pytest.param(one, marks=pytest.mark.slow) for one in list(PRIVATE)[1:])])
def test_private_trees_are_the_same_bytes_for_any_number_of_shards(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {}
    for number, shards in enumerate(({}, {"site-1": 2, "site-2": 1, "site-3": 5})):
        (tmp_path / f"{number}").mkdir()
        federation = PrivateFederation(tmp_path / f"{number}")
        job = job_of(trust="trusted_aggregator", **PRIVATE[name])
        with monkeypatch.context() as patch:
            in_shards(patch, shards)
            federation.run_private(job, server_noise=noise(3)).succeed()
        models[number] = federation.model()
        spent = [federation.record(site).spending for site in federation.sites]
        assert len({str(one) for one in spent}) == 1
    assert len(set(models.values())) == 1
