"""Buckets and splits on the wire, and the division of a model trained on buckets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.federboost_vertical import tables as buckets
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock, OwnedSplits, blocks_of, divide_model, joined
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters, train_on_buckets
from nvflare_plugins.kinds.vertical.model import mask_columns, merge

EDGES = (
    Candidates((np.array([0.2, 0.5, 0.8], np.float32), np.array([0.0], np.float32))),
    Candidates((np.linspace(-1, 1, 15).astype(np.float32),)),
)


def block(n_rows: int = 5) -> BucketBlock:
    rng = np.random.default_rng(1)
    return BucketBlock((4, 2), np.stack([rng.integers(0, 4, n_rows), rng.integers(0, 2, n_rows)]).astype(np.uint8))


def test_a_block_survives_the_wire() -> None:
    read = BucketBlock.from_bytes(block().to_bytes(), 5, 2)
    assert read.n_buckets == (4, 2)
    np.testing.assert_array_equal(read.ids, block().ids)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_block_or_refused(data: bytes) -> None:
    for read in (lambda: BucketBlock.from_bytes(data, 5, 2), lambda: OwnedSplits.from_bytes(data)):
        with contextlib.suppress(ProtocolError):
            read()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:-1],
        lambda d: d + b"\0",
        lambda d: b"X" + d[1:],
        lambda d: d[:4] + b"\2" + d[5:],
        lambda d: d[:-1] + b"\2",
        lambda d: d[:15] + b"\0" + d[16:],
    ],
)
def test_changed_blocks_are_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ProtocolError):
        BucketBlock.from_bytes(change(block().to_bytes()), 5, 2)


@pytest.mark.parametrize(("n_rows", "n_features"), [(4, 2), (6, 2), (5, 1), (5, 3)])
def test_blocks_of_other_shapes_are_refused(n_rows: int, n_features: int) -> None:
    with pytest.raises(ProtocolError):
        BucketBlock.from_bytes(block().to_bytes(), n_rows, n_features)


def test_many_features_travel_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BLOCK_BYTES", 20)
    assert blocks_of(7, 5) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert blocks_of(100, 2) == [slice(0, 1), slice(1, 2)] and blocks_of(7, 0) == [slice(0, 0)]
    whole = joined([block(), block()])
    assert whole.n_buckets == (4, 2, 4, 2) and whole.ids.shape == (4, 5)


def trained(n_rows: int = 3000) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, bytes]:
    """A model on one own column (with missing values) and three of two other parties, as buckets."""
    rng = np.random.default_rng(3)
    own = rng.random((1, n_rows)).astype(np.float32)
    own[0, rng.random(n_rows) < 0.1] = np.nan
    others = [rng.uniform(-0.5, 1.5, (2, n_rows)).astype(np.float32), rng.normal(size=(1, n_rows)).astype(np.float32)]
    others[0][1, rng.random(n_rows) < 0.2] = np.nan
    label = (np.nan_to_num(own[0]) + others[0][0] * others[1][0] > 0.5).astype(np.float32)
    blocks = [BucketBlock(tuple(n + 1 for n in e.counts), e.bin_rows(x)) for e, x in zip(EDGES, others, strict=True)]
    parameters = check_bucket_parameters({"objective": "binary:logistic", "max_depth": 4}, 16)
    return own, others, label, train_on_buckets(own, label, blocks, parameters, 12, cores=2)


def test_a_divided_model_predicts_true_values_as_the_trained_one_predicts_buckets() -> None:
    """The naive twin: put every row into its buckets, and let the model that was trained on buckets predict them."""
    own, others, label, model = trained()
    on_buckets = np.concatenate([own, *(e.bin_rows(x) for e, x in zip(EDGES, others, strict=True))]).T
    expected = xgb.Booster(model_file=bytearray(model)).predict(xgb.DMatrix(on_buckets.astype(np.float32)))
    assert np.mean((expected > 0.5) == label) > 0.85
    masked, splits = divide_model(model, 1, [2, 1])
    assert sum(len(s.entries) for s in splits) > 20 and all(len(s.entries) for s in splits)
    mask_columns(masked, 1, ["own", "b.f0", "b.f1", "c.f0"])  # refuses thresholds of others
    tables = [OwnedSplits.from_bytes(s.to_bytes()).private_table(e) for s, e in zip(splits, EDGES, strict=True)]
    merged = merge(masked, 1, [(1, tables[0]), (3, tables[1])])
    true_values = np.concatenate([own, *others]).T
    predicted = xgb.Booster(model_file=bytearray(merged)).predict(xgb.DMatrix(true_values))
    np.testing.assert_array_equal(predicted, expected)


def test_values_on_an_edge_stay_in_their_bucket() -> None:
    splits = OwnedSplits(np.array([[0, 0, 0, 1]], np.uint32))
    split = splits.private_table(EDGES[0])[0, 0]
    edge = EDGES[0].of_feature[0][1]
    values = np.array([edge, np.nextafter(edge, np.float32(9)), np.nan, -5], np.float32)
    assert split.goes_left(values).tolist() == [True, False, False, True]


@pytest.mark.parametrize("entries", [[[0, 0, 2, 0]], [[0, 0, 0, 3]], [[0, 1, 0, 0], [0, 1, 1, 0]]])
def test_impossible_splits_are_refused(entries: list[list[int]]) -> None:
    with pytest.raises(ProtocolError, match="cannot have"):
        OwnedSplits(np.array(entries, np.uint32)).private_table(EDGES[0])


def test_parameters_that_do_not_fit_buckets_are_refused() -> None:
    for wrong in ({"max_bin": 8}, {"monotone_constraints": [1]}, {"booster": "dart"}, {"objective": "survival:cox"}):
        with pytest.raises(ConfigurationError):
            check_bucket_parameters(wrong, 16)
    with pytest.raises(ConfigurationError, match="rank:ndcg is refused"):
        BucketJob("toy", "site-1", "label", params={"objective": "rank:ndcg"}, num_rounds=3, epsilon=4.0)
