"""A party's columns: which it takes, what it calls them, which rows they are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.data.tabular_files import TabularFile
from nvflare_plugins.kinds.alignment.job import Alignment
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.party_data import PartyData, aliases_of, find_cut_points, load_party
from nvflare_plugins.kinds.vertical_inference.inference import load_rows
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy

FRAME = pd.DataFrame({"key": ["c", "a", "b"], "age": [1.0, np.nan, 3.0], "debt": [5, 6, 7], "y": [0, 1, 0]})


def load(tmp_path, site: str = "a", frame: pd.DataFrame = FRAME, **changes: object) -> PartyData:
    frame.to_csv(tmp_path / "d.csv", index=False)
    facts = {"path": "d.csv", "id": "key", "aliases": {"debt": "money"}}
    policy = SitePolicy.from_dict({"data_sets": {"d": facts}}, workspace=tmp_path, site=site)
    context = SiteContext(site, ("a", "b"), "job", b"", tmp_path, policy, Identity.unsigned(site))
    return load_party(VerticalJob.from_dict({"active": "a", "data_set": "d", "label": "y", **changes}), context)


def test_the_active_party_has_label_columns_and_ids(tmp_path):
    data = load(tmp_path)
    assert data.columns == ("age", "debt") and data.aliases == ("f0", "money")
    assert data.train.ids == (b"c", b"a", b"b") and data.train.row_ids() == ["c", "a", "b"]
    assert data.train.table.label.tolist() == [0, 1, 0]


def test_a_passive_party_has_neither_label_nor_its_name(tmp_path):
    data = load(tmp_path, "b", FRAME.drop(columns="y"))
    assert data.train.table.label.size == 0 and data.columns == ("age", "debt")
    with pytest.raises(ConfigurationError, match="label's name"):
        load(tmp_path, "b")


def test_columns_can_be_chosen_and_an_active_party_may_have_none(tmp_path):
    assert load(tmp_path, features={"a": ["debt"]}).columns == ("debt",)
    data = load(tmp_path, features={"a": []})
    assert data.columns == () and data.features()[0].shape == (0, 3)
    with pytest.raises(ConfigurationError, match="no feature columns"):
        load(tmp_path, "b", FRAME.drop(columns="y"), features={"b": []})
    with pytest.raises(ConfigurationError, match="id column"):
        load(tmp_path, features={"a": ["key"]})


def test_aligned_rows_are_the_common_ones_in_the_common_order(tmp_path):
    found = Alignment("d", np.array([1, 0]), 3, "", b"")
    data = load(tmp_path).aligned({"d": found})
    assert data.train.ids == (b"a", b"c") and data.train.table.label.tolist() == [1, 0]
    assert data.features()[0][1].tolist() == [6, 5]


def other_each_time(spec) -> pd.DataFrame:
    """A site's loader whose rows come in another order at every call, as those of a database may."""
    READINGS.append(spec.name)
    return FRAME.iloc[:: -1 if len(READINGS) % 2 else 1].drop(columns="y")


READINGS: list[str] = []


def check_pairs(features: np.ndarray, ids: tuple[bytes, ...]) -> None:
    assert dict(zip(ids, features[:, -1].tolist(), strict=True)) == {b"c": 5, b"a": 6, b"b": 7}


def test_rows_have_their_own_ids_though_two_readings_differ(tmp_path):
    facts = {"path": "d.csv", "id": "key", "loader": f"{__name__}:other_each_time"}
    policy = SitePolicy.from_dict({"data_sets": {"d": facts}}, workspace=tmp_path, site="b")
    context = SiteContext("b", ("a", "b"), "job", b"", tmp_path, policy, Identity.unsigned("b"))
    train = load_party(VerticalJob.from_dict({"active": "a", "data_set": "d", "label": "y"}), context).train
    check_pairs(train.table.features, train.ids)
    rows = load_rows(policy.data_set("d"), ("age", "debt"))
    check_pairs(rows.features, rows.ids)


def test_a_file_is_read_once(tmp_path, monkeypatch):
    readings = []
    honest = TabularFile.read

    def read(self, *columns, **options):
        readings.append(columns)
        return honest(self, *columns, **options)

    monkeypatch.setattr(TabularFile, "read", read)
    check_pairs(load(tmp_path).train.table.features, (b"c", b"a", b"b"))
    assert len(readings) == 1


def test_the_label_cannot_be_the_column_of_ids(tmp_path):
    with pytest.raises(ConfigurationError, match="column of ids"):
        load(tmp_path, label="key")


def test_aliases_must_differ():
    assert aliases_of({"x": "f1"}, ("x",)) == ("f1",)
    with pytest.raises(ConfigurationError, match="same alias"):
        aliases_of({"x": "f1"}, ("x", "y"))


# -- cuts and bins -----------------------------------------------------------------------------------------------------


def table(n_rows: int) -> np.ndarray:
    rng = np.random.default_rng(n_rows)
    features = rng.normal(size=(n_rows, 8)).astype(np.float32)
    features[:, 1] = rng.integers(0, 5, n_rows)
    features[:, 2], features[:, 3] = 3.0, np.nan
    features[:, 4] = np.exp(features[:, 4] * 8)
    features[:, 5] *= np.float32(1e20)
    features[:, 6] = -np.abs(features[:, 6])
    features[rng.random(features.shape) < 0.2] = np.nan
    return features


@pytest.mark.parametrize("max_bin", [2, 16, 256, 1024])
@pytest.mark.parametrize("n_rows", [3, 100, 5_000])
def test_cuts_are_those_of_centralized_training(n_rows, max_bin):
    features = table(n_rows)
    matrix = xgb.DMatrix(features, label=np.arange(n_rows) % 2)
    xgb.train({"tree_method": "hist", "max_bin": max_bin, "max_depth": 1}, matrix, 1)
    starts, values = matrix.get_quantile_cut()
    cuts = find_cut_points(features[:, 2:].T, max_bin)
    for feature in range(6):
        expected = values[starts[feature + 2] : starts[feature + 3]]
        np.testing.assert_array_equal([cuts.threshold(feature, b) for b in range(-1, expected.size - 1)], expected)


def test_bins_follow_the_thresholds():
    features = table(2_000)
    cuts = find_cut_points(features.T, 64)
    codes = cuts.codes(features.T)
    assert codes.dtype == np.uint8
    for feature in range(8):
        values, missing = features[:, feature], np.isnan(features[:, feature])
        n_bins = cuts.layout.n_bins[feature]
        np.testing.assert_array_equal(codes[feature] == n_bins, missing)
        for last in range(-1, n_bins):
            left = codes[feature].astype(int) <= last
            np.testing.assert_array_equal(left[~missing], values[~missing] < cuts.threshold(feature, last))


def test_many_bins_take_two_bytes():
    assert find_cut_points(table(5_000).T, 1024).codes(table(5_000).T).dtype == np.uint16


def test_infinite_values_are_refused_without_quoting_them():
    features = np.array([[1.0], [np.inf], [5.5]], dtype=np.float32)
    with pytest.raises(ConfigurationError) as caught:
        find_cut_points(features.T, 16)
    assert "5.5" not in str(caught.value)
