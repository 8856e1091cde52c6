"""A party's columns: which it takes, what it calls them, which rows they are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.certificates import Identity
from nvflare_plugins.place import Place
from nvflare_plugins.site_policy import SitePolicy
from nvflare_plugins.vertical.alignment.result import Alignment
from nvflare_plugins.vertical.job import VerticalJob
from nvflare_plugins.vertical.party_data import PartyData, aliases_of, load_party

FRAME = pd.DataFrame({"key": ["c", "a", "b"], "age": [1.0, np.nan, 3.0], "debt": [5, 6, 7], "y": [0, 1, 0]})


def load(tmp_path, site: str = "a", frame: pd.DataFrame = FRAME, **changes: object) -> PartyData:
    frame.to_csv(tmp_path / "d.csv", index=False)
    facts = {"path": "d.csv", "id": "key", "aliases": {"debt": "money"}}
    policy = SitePolicy.from_dict({"data_sets": {"d": facts}}, workspace=tmp_path, site=site)
    place = Place(site, ("a", "b"), "job", b"", tmp_path, policy, Identity.unsigned(site))
    return load_party(VerticalJob.from_dict({"active": "a", "data_set": "d", "label": "y", **changes}), place)


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
    assert data.columns == () and data.features()[0].shape == (3, 0)
    with pytest.raises(ConfigurationError, match="no feature columns"):
        load(tmp_path, "b", FRAME.drop(columns="y"), features={"b": []})
    with pytest.raises(ConfigurationError, match="id column"):
        load(tmp_path, features={"a": ["key"]})


def test_aligned_rows_are_the_common_ones_in_the_common_order(tmp_path):
    found = Alignment("d", np.array([1, 0]), 3, "", b"")
    data = load(tmp_path).aligned({"d": found})
    assert data.train.ids == (b"a", b"c") and data.train.table.label.tolist() == [1, 0]
    assert data.features()[0][:, 1].tolist() == [6, 5]


def test_aliases_must_differ():
    assert aliases_of({"x": "f1"}, ("x",)) == ("f1",)
    with pytest.raises(ConfigurationError, match="same alias"):
        aliases_of({"x": "f1"}, ("x", "y"))
