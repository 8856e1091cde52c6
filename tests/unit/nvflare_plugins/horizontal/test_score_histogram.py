"""Metrics on the evaluation rows of all sites: right, of no bin with few rows, refused without consent."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from he_processors.errors import ConfigurationError
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.horizontal.site import edges_of
from nvflare_plugins.pooled.job import SCORE_BINS, HorizontalJob
from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe
from nvflare_plugins.wire.envelope import Kind, unpack
from tests.conformance.kind_cases import DATA
from tests.golden.jobs import breast, rows_over_sites
from tests.support.federation import Federation, succeed
from tests.support.flare_job import run_flare_job
from tests.support.horizontal_jobs import job, table

POOLED = {"eval_data_set": "held_out", "pooled_metrics": True}
TITLE = "Metrics on the evaluation rows of all sites"


def federation_of(folder: Path, held_out: pd.DataFrame, parts: list[np.ndarray] | None = None, **policy) -> Federation:
    consents = {"score_histogram": True, "plain_profile": True, "recompute_with_changes": True}
    federation = Federation.of(folder, policy={"consents": consents, **policy}, train=table(600))
    federation.set_registry_keys()
    federation.give_data("held_out", held_out, parts)
    return federation


def section_of(federation: Federation, site: str):
    return next(one for one in federation.record(site).sections if one.title == TITLE)


@given(
    labels=st.lists(st.booleans(), max_size=300),
    least=st.integers(1, 20),
    distinct=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_every_bin_holds_enough_of_both_classes(labels, least, distinct, seed) -> None:
    scores = np.random.default_rng(seed).integers(0, distinct, len(labels)).astype(np.float32) / np.float32(distinct)
    is_positive = np.array(labels, dtype=bool)
    edges = edges_of(scores, is_positive, least)
    assert edges.size < SCORE_BINS and (np.diff(edges) > 0).all()
    if edges.size:
        places = np.searchsorted(edges, scores, side="right")
        for of_class in (is_positive, ~is_positive):
            assert np.bincount(places[of_class], minlength=edges.size + 1).min() >= least
    # The control: where classes are many and scores differ, bins are made.
    if least <= 2 and distinct >= 40 and min(is_positive.sum(), (~is_positive).sum()) > 100:
        assert edges.size


@pytest.mark.parametrize("profile", ["masks", "plain", pytest.param("bfv", marks=pytest.mark.slow)])
def test_metrics_are_those_of_the_pooled_rows(profile: str, tmp_path: Path) -> None:
    held_out = table(3000, seed=3)
    federation = federation_of(tmp_path, held_out, allowed_profiles=[profile])
    succeed(federation.run(job(num_rounds=3, profile=profile, **POOLED)))
    section = section_of(federation, "site-1")
    assert section == section_of(federation, "site-3")
    scores = xgb.Booster(model_file=bytearray(federation.model())).predict(
        xgb.DMatrix(held_out.drop(columns="y").to_numpy(np.float32), feature_names=list(held_out)[:-1])
    )
    bounds = [tuple(map(float, pair)) for pair in re.findall(r"(\d+\.\d+) to (\d+\.\d+)", section.paragraphs[0])]
    for (low, high), exact in zip(
        bounds, (roc_auc_score(held_out.y, scores), average_precision_score(held_out.y, scores)), strict=False
    ):
        assert low - 1e-3 <= exact <= high + 1e-3 and high - low < 0.2
    middle = float(re.findall(r"\(([\d.]+) if rows", section.paragraphs[0])[0])
    assert middle == pytest.approx(roc_auc_score(held_out.y, scores), abs=0.01)
    counts = [int(row[1].replace(",", "")) for row in section.rows]
    assert sum(counts) == 3000 and len(counts) > 8
    for row, count in zip(section.rows, counts, strict=True):
        low, high = (float(text) for text in row[0].split(" to "))
        inside = (scores >= low - 1e-5) & (scores < high + 1e-5)
        assert abs(int(inside.sum()) - count) <= 3  # the table rounds its edges
        share = float(row[2])
        assert min(share, 1 - share) * count >= 10 - 1e-2, "k rows of each class"
    for site in federation.sites:
        assert "score_histogram" in federation.record(site).consents


def test_the_evidence_tells_of_the_counts_and_verifies(tmp_path: Path) -> None:
    parties = rows_over_sites(tmp_path, breast(4), DATA)
    for site in parties.sites:
        parties.set_policy(site, consents={**parties.policy_of(site)["consents"], "score_histogram": True})
    fields = {"label": "y", "params": {"objective": "binary:logistic", "max_depth": 2}, "num_rounds": 2}
    recipe = HorizontalXGBRecipe(
        "job", data_set=DATA, **fields, eval_data_set=DATA, pooled_metrics=True, tracking=False
    )
    run = run_flare_job(recipe, parties)
    assert run.reason is None and verify([run.evidence]).sound
    sent = [message for message in run.log("site-1").messages if message.kind == "SCORE_COUNTS"]
    assert sent and {message.codec for message in sent} == {"MASKED"}
    assert "AUC" in (run.folder("site-1") / "report.html").read_text()
    assert "AUC" not in str(run.summary) and "AUC" not in str(run.reports), "the server is told nothing"


def test_a_small_site_and_one_without_rows_take_part_alike(tmp_path: Path) -> None:
    held_out = table(500, seed=5)
    parts = [np.arange(490), np.arange(490, 500), np.arange(0)]
    federation = federation_of(tmp_path, held_out, parts, min_sites=1, max_colluders=0)
    federation.set_policies(consents={"score_histogram": True, "fewer_than_three_sites": True})
    succeed(federation.run(job(num_rounds=2, **POOLED)))
    assert sum(int(row[1]) for row in section_of(federation, "site-3").rows) == 500


def test_too_few_rows_anywhere_count_nothing(tmp_path: Path) -> None:
    federation = federation_of(tmp_path, table(120, seed=5))
    succeed(federation.run(job(num_rounds=2, min_rows_per_cut=40, **POOLED)))
    section = section_of(federation, "site-2")
    assert not section.rows and "with 40 rows of each class" in section.paragraphs[0]


def test_it_is_refused_without_consent_on_a_budget_and_where_it_means_nothing(tmp_path: Path) -> None:
    federation = federation_of(tmp_path, table(300, seed=5))

    def reason(asked: HorizontalJob) -> str:
        return str(federation.run(asked)["site-2"])

    federation.set_policy("site-2", consents={})
    assert "consents.score_histogram" in reason(job(num_rounds=2, **POOLED))
    budget = {"epsilon": 1.0, "delta": 1e-6}
    consents = {"score_histogram": True, "exact_use_of_budgeted_data": True}
    of_budget = {"held_out": {"path": "held_out.parquet", "privacy": budget}}
    federation.set_policy("site-2", consents=consents, data_sets=of_budget)
    assert "counts by scores are not charged" in reason(job(num_rounds=2, **POOLED))
    federation.set_policy("site-2", data_sets={"held_out": {"path": "held_out.parquet"}})
    assert "pooled_metrics is for objectives" in reason(job({"objective": "reg:squarederror"}, 2, **POOLED))
    with pytest.raises(ConfigurationError, match="eval_data_set"):
        job(pooled_metrics=True)


def test_the_server_cannot_tell_whose_edges_they_are(tmp_path: Path) -> None:
    federation = federation_of(tmp_path, table(500, seed=5), [np.arange(400), np.arange(400, 470), np.arange(470, 500)])
    frames: list[tuple[str, bytes]] = []
    succeed(federation.run(job(num_rounds=2, **POOLED), frames=frames))
    kinds = (Kind.AGREEMENT, Kind.SCORE_COUNTS)
    sizes = {
        site: [len(frame) for sender, frame in frames if sender == site and unpack(frame).kind in kinds]
        for site in federation.sites
    }
    assert all(len(of_site) > 4 for of_site in sizes.values())
    last = {site: tuple(of_site[-4:]) for site, of_site in sizes.items()}
    assert len(set(last.values())) == 1, last


def test_labels_between_the_classes_are_not_counted_as_one_of_them(tmp_path: Path) -> None:
    """binary:logistic takes shares as labels, and a row that is of class 1 by nine tenths is not of class 0."""
    held_out = table(600, seed=3)
    federation = federation_of(tmp_path, held_out.assign(y=held_out.y * 0.8 + 0.1))
    outcomes = federation.run(job(num_rounds=1, **POOLED))
    assert any("evaluation labels lie between them" in str(outcome) for outcome in outcomes.values()), outcomes
    without = {name: value for name, value in POOLED.items() if name != "pooled_metrics"}
    succeed(federation.run(job(num_rounds=1, **without), "without"))
