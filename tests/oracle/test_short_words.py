"""Histograms in words of 32 bits: the trees of centralized training, the same bytes at any number of sites, no wrap."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.session import compare_documents
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.growth import site_sums as grids
from nvflare_plugins.growth.site_sums import pair_grid
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.pooled import attempt as pooled_attempt
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Kind, unpack
from nvflare_plugins.wire.profiles import SHORT_BITS
from nvflare_plugins.wire.sums import Family
from tests.support.federation import Federation, SiteDied, central_model, succeed
from tests.support.horizontal_jobs import dies_after
from tests.support.shards import in_shards

_HISTOGRAMS = (Kind.HISTOGRAM, Kind.HISTOGRAM_METRIC)
FEATURES = [f"f{i}" for i in range(10)]
PARAMS = {"objective": "binary:logistic", "max_depth": 6, "max_bin": 64, "base_score": 0.5, "eval_metric": "logloss"}
FEW = {
    "consents": {"fewer_than_three_sites": True, "plain_profile": True, "second_quantile_search": True},
    "min_sites": 1,
    "max_colluders": 0,
}


def table(n_rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n_rows, len(FEATURES))).astype(np.float32)
    score = x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * np.sin(3 * x[:, 3]) + rng.normal(size=n_rows)
    return pd.DataFrame(x, columns=FEATURES).assign(label=(score > 0).astype(np.float32))


def job(profile: str = "masks", params: dict | None = None, **fields) -> HorizontalJob:
    fields = {"num_rounds": 3, "engine": "own", "word_bits": 32, **fields}
    return HorizontalJob("train", "label", {**PARAMS, **(params or {})}, profile=profile, **fields)


def federation(folder: Path, frame: pd.DataFrame, n_sites: int = 3, **policy: object) -> Federation:
    made = Federation(folder, n_sites, {**({} if n_sites > 2 else FEW), **policy})
    rows = np.random.default_rng(n_sites).permutation(len(frame))
    made.give_data("train", frame, np.array_split(rows, n_sites))
    made.set_registry_keys()
    return made


def histograms(frames: list[tuple[str, bytes]]) -> list[Frame]:
    read = [unpack(data) for _, data in frames]
    return [frame for frame in read if frame.kind is Kind.HISTOGRAM]


def structure(model: bytes | bytearray) -> list[tuple]:
    trees = json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]
    fields = ("left_children", "right_children", "split_indices", "default_left")
    inner = [[c for c, left in zip(t["split_conditions"], t["left_children"], strict=True) if left >= 0] for t in trees]
    return [(*(tuple(t[name]) for name in fields), tuple(cuts)) for t, cuts in zip(trees, inner, strict=True)]


# -- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finest", "bound"),
    [(None, 2e-5), (-12, 2e-4)],
    ids=["16 bits, as 20,000 rows have", "12 bits, the fewest that are not refused"],
)
def test_trees_are_those_of_centralized_training_and_scores_nearly(tmp_path, finest, bound):
    """Structure is equal; a probability is off by less than the bound, which 64-bit words keep below 1e-6."""
    frame = table(20_000)
    sites = federation(tmp_path, frame)
    succeed(sites.run(job(num_rounds=5, finest_exponent=finest)))
    central = central_model(frame, "label", PARAMS, sites.cuts(), 5)
    assert structure(sites.model()) == structure(central.save_raw("json"))
    matrix = xgb.DMatrix(frame[FEATURES], feature_names=None)
    own = xgb.Booster(model_file=bytearray(sites.model()))
    central.feature_names = own.feature_names
    assert np.abs(own.predict(matrix) - central.predict(matrix)).max() <= bound


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({}, {}),
        (
            {
                "objective": "multi:softprob",
                "num_class": 2,
                "base_score": None,
                "eval_metric": None,
                "grow_policy": "lossguide",
                "max_leaves": 8,
            },
            {},
        ),
        ({"subsample": 1.0, "colsample_bynode": 0.5, "eval_metric": ["auc", "logloss"]}, {"evaluate_training": True}),
    ],
    ids=["logistic", "classes, leaf by leaf", "columns drawn"],
)
def test_models_are_the_same_bytes_at_any_number_of_sites_and_in_any_words(tmp_path, params, fields):
    """On one grid the words of 64 bits hold the same integers: then not one bit of the model may differ."""
    frame, models = table(700), {}
    params = {name: value for name, value in {**PARAMS, **params, "max_bin": 16}.items() if value is not None}
    for profile, n_sites, bits in (
        ("plain", 1, 32),
        ("masks", 2, 32),
        ("masks", 3, 32),
        ("masks", 3, 64),
    ):
        sites = federation(tmp_path / f"{profile} {n_sites} {bits}", frame, n_sites)
        made = HorizontalJob(
            "train", "label", params, 2, profile, engine="own", word_bits=bits, finest_exponent=-12, **fields
        )
        succeed(sites.run(made))
        models[profile, n_sites, bits] = sites.model()
    assert len(set(models.values())) == 1
    finer = federation(tmp_path / "finer", frame)
    succeed(finer.run(HorizontalJob("train", "label", params, 2, "masks", engine="own", word_bits=32, **fields)))
    assert finer.model() not in models.values(), "the equality is not one of models that never change"


@pytest.mark.parametrize("profile", ["plain", "masks"])
def test_histograms_take_half_the_bytes_and_nothing_else_changes(tmp_path, profile):
    frame, sent = table(600), {}
    for bits in (32, 64):
        frames: list[tuple[str, bytes]] = []
        made = job(profile, word_bits=bits, evaluate_training=True, finest_exponent=-12)
        succeed(federation(tmp_path / str(bits), frame).run(made, frames=frames))
        sent[bits] = [unpack(data) for _, data in frames]
    short, long_ = ([f for f in sent[bits] if f.kind in _HISTOGRAMS] for bits in (32, 64))
    assert {f.codec for f in short} == {Codec.MASKED_32 if profile == "masks" else Codec.PLAIN_32}
    pairs = list(zip(short, long_, strict=True))
    assert pairs and all(len(a.payload) - a.tail == 4 * a.n_values for a in short)
    assert all((len(a.payload) - a.tail) * 2 == len(b.payload) - b.tail and a.tail == b.tail for a, b in pairs)
    others = [[(f.kind, f.codec, f.n_values) for f in sent[bits] if f.kind not in _HISTOGRAMS] for bits in (32, 64)]
    assert sorted(map(str, others[0])) == sorted(map(str, others[1]))


# -- what could wrap, or would keep too few bits ----------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 2, 1_000, 65_535, 65_536, 524_287])
@pytest.mark.parametrize("bounds", [(0, -2), (0, 0)])
def test_the_sum_of_all_rows_fits_a_signed_word_whoever_holds_them(n_rows, bounds):
    grid = pair_grid(*bounds, n_rows, SHORT_BITS, rows_are_exact=True, coarsest=0.0)
    assert not grid.wide and not grid.shift and grid.g_exponent <= -12
    for bound, exponent in ((grid.g_bound, grid.g_exponent), (grid.h_bound, grid.h_exponent)):
        largest = n_rows * int(np.rint(2.0 ** (bound - exponent)))  # every row at its bound
        assert largest < 1 << 31 and int(np.int64(-largest).astype(np.int32)) == -largest
        assert (n_rows + 1) * 4 * 2.0 ** (bound - exponent) > 1 << 31, "nor is the grid coarser than it must be"


@pytest.mark.parametrize(("g_bound", "n_rows"), [(0, 524_288), (1, 262_144), (4, 32_768), (20, 1), (0, 10**9)])
def test_rows_that_would_keep_too_few_bits_are_refused_with_the_remedy(g_bound, n_rows):
    with pytest.raises(ConfigurationError, match="Set word_bits to 64"):
        pair_grid(g_bound, -2, n_rows, SHORT_BITS, rows_are_exact=True, coarsest=0.0, finest=-2)
    assert pair_grid(g_bound, -2, n_rows, 59, rows_are_exact=True, coarsest=0.0).wide


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"objective": "reg:squarederror"}, "reg:squarederror with these parameters, whose rows have no common bound"),
        ({"objective": "count:poisson"}, "count:poisson"),
        ({"objective": "reg:absoluteerror"}, "reg:absoluteerror"),
        ({"scale_pos_weight": 100.0}, "binary:logistic with these parameters"),
        ({"booster": "dart"}, "is for trees that the sites grow, and they do not grow"),
    ],
)
def test_jobs_whose_rows_have_no_bound_are_refused_before_anything_is_sent(tmp_path, params, words):
    params = {"objective": "binary:logistic", "base_score": 0.5, "eval_metric": "rmse", **params}
    frames: list[tuple[str, bytes]] = []
    made = HorizontalJob("train", "label", params, 2, word_bits=32)
    outcomes = federation(tmp_path, table(200)).run(made, frames=frames)
    assert not frames
    for outcome in outcomes.values():
        assert isinstance(outcome, ConfigurationError) and words in str(outcome) and "word_bits to 64" in str(outcome)


def test_too_many_pooled_rows_are_refused_as_soon_as_they_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "_SHORT_STEP", -22)
    frames: list[tuple[str, bytes]] = []
    outcomes = federation(tmp_path, table(600)).run(job(), frames=frames)
    for outcome in outcomes.values():
        assert "is for fewer than 512 pooled rows here" in str(outcome) and "Set word_bits to 64" in str(outcome)
        assert "600" not in str(outcome), "the server reads it"
    kinds = [unpack(data).kind for _, data in frames]
    assert kinds.count(Kind.CUT_COUNTS) == 3 and kinds[-1] is Kind.CUT_COUNTS, "the one that counts the rows"
    succeed(federation(tmp_path / "fewer", table(500)).run(job()))


# -- rows that outgrow the grid ---------------------------------------------------------------------------------------


def narrow_bounds(monkeypatch: pytest.MonkeyPatch, gradient: float) -> None:
    """Have all sites agree on bounds that rows outgrow at once; no objective with bounds does so by itself."""
    true = pooled_attempt.row_bounds
    monkeypatch.setattr(
        pooled_attempt, "row_bounds", lambda *of: {**true(*of), Family.GRADIENTS: gradient, Family.HESSIANS: gradient}
    )


def test_rows_that_outgrow_the_grid_begin_their_tree_again_on_a_wider_one(tmp_path, monkeypatch):
    frame, frames = table(1_500), []
    usual = federation(tmp_path / "usual", frame)
    succeed(usual.run(job()))
    narrow_bounds(monkeypatch, 2.0**-8)
    sites = federation(tmp_path / "narrow", frame)
    succeed(sites.run(job(), frames=frames))
    asked = [frame for frame in histograms(frames) if frame.type is FrameType.RESCALE]
    assert asked and {frame.codec for frame in asked} == {Codec.MASKED_32}
    assert structure(sites.model()) == structure(usual.model())


def test_a_wider_grid_that_would_keep_too_few_bits_is_refused_before_its_first_sum(tmp_path, monkeypatch):
    """600 rows of gradients up to 1/2, and two bits of room: 2^(1 + 10 - 31) is the step that the sites agree on."""
    narrow_bounds(monkeypatch, 2.0**-8)
    monkeypatch.setattr(grids, "_SHORT_STEP", -21)
    frames: list[tuple[str, bytes]] = []
    outcomes = federation(tmp_path, table(600)).run(job(), frames=frames)
    assert all("Set word_bits to 64" in str(outcome) for outcome in outcomes.values())
    sent = histograms(frames)
    assert sent and any(frame.type is FrameType.RESCALE for frame in sent) and len({f.counter for f in sent}) == 1


def test_shards_of_a_site_grow_the_same_bytes_in_short_words(tmp_path, monkeypatch):
    whole, frames = federation(tmp_path / "whole", table(600)), []
    succeed(whole.run(job()))
    divided = federation(tmp_path / "divided", table(600))
    in_shards(monkeypatch, {"site-1": 2})
    succeed(divided.run(job(), frames=frames))
    assert {frame.codec for frame in histograms(frames)} == {Codec.MASKED_32}
    assert divided.model() == whole.model()


# -- one width for all, for the whole job -----------------------------------------------------------------------------


def test_a_site_that_would_use_other_words_is_refused_by_name():
    mine, theirs = (json.loads(json.dumps(job(word_bits=bits).to_dict())) for bits in (64, 32))
    with pytest.raises(ConfigurationError, match="site-2 has another value of 'word_bits' in the job than this site"):
        compare_documents("the job", mine, theirs, "site-2")


def test_a_tuning_has_no_words_of_32_bits():
    with pytest.raises(ConfigurationError, match=r"word_bits is refused in a tuning: .* in words of 64 bits"):
        TuningJob.from_dict({"data_set": "train", "label": "label", "trials": [{}, {"eta": 0.1}], "word_bits": 32})


def test_a_job_is_not_resumed_in_other_words(tmp_path):
    sites = federation(tmp_path, table(600))
    first = job(checkpoint_every=1)
    assert any(
        isinstance(one, SiteDied) for one in sites.run(first, "first", on_progress=dies_after("site-1", 2)).values()
    )
    other = HorizontalJob.from_dict({**first.to_dict(), "word_bits": 64, "resume_from": "first"})
    outcomes = sites.run(other, "other")
    assert all("cannot be resumed with another parameters" in str(one) for one in outcomes.values())
    assert any(isinstance(one, PolicyRefusal) for one in outcomes.values())
    succeed(sites.run(HorizontalJob.from_dict({**first.to_dict(), "resume_from": "first"}), "second"))
    whole = federation(tmp_path / "whole", table(600))
    succeed(whole.run(first))
    assert sites.model("second") == whole.model()


def test_registries_of_before_know_jobs_of_64_bits_as_they_were(tmp_path, monkeypatch):
    seen, reserve = [], pooled_attempt.reserve_together
    monkeypatch.setattr(
        pooled_attempt, "reserve_together", lambda *args: seen.append(json.loads(args[3])["job"]) or reserve(*args)
    )
    for bits in (32, 64):
        succeed(federation(tmp_path / str(bits), table(300)).run(job(word_bits=bits, num_rounds=1)))
    assert [job.get("word_bits") for job in seen] == [32] * 3 + [None] * 3
