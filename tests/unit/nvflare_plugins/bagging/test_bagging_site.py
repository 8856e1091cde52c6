"""One site of a bagging job: what it takes back when it fails, what it refuses, what its record says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.kinds.bagging import training as bagging_site
from nvflare_plugins.kinds.bagging.model import _NODE, LARGEST_LEAF, LeafOutOfRange, SharedTree, most_nodes
from nvflare_plugins.kinds.bagging.training import run_bagging_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.data_refusals import RefusalCount
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind
from tests.support import bagging
from tests.support.federation import Parties, succeed
from tests.support.memories import states


def remembered(parties: Parties) -> list[list[str]]:
    return [states(parties.workspace(site), site) for site in parties.sites]


def trees_sent(parties: Parties) -> bool:
    return any(transfer.frame.kind is Kind.OWN_TREES for transfer in parties.transfers)


@pytest.mark.parametrize(("step", "n_calls"), [("OwnRows", 0), ("grow", 0), ("grow", 3)])
def test_a_failure_before_the_first_tree_is_sent_leaves_no_run_behind(
    step: str, n_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three calls are the first round's: then trees have left, and the run is remembered."""
    real, calls = getattr(bagging_site, step), iter(range(n_calls))

    def failing(*arguments: object) -> object:
        if next(calls, None) is None:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(bagging_site, step, failing)
    parties = bagging.sites(tmp_path)
    outcomes = parties.run(run_bagging_site, bagging.job())
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert trees_sent(parties) == (n_calls > 0)
    assert remembered(parties) == [["reserved"] * (n_calls > 0)] * 3


@pytest.mark.parametrize("rate", [1e38, 1e32])
def test_a_leaf_that_cannot_be_added_up_is_not_sent(tmp_path: Path, rate: float) -> None:
    parties = bagging.sites(tmp_path)
    outcomes = parties.run(run_bagging_site, bagging.job(params={**bagging.PARAMS, "eta": rate}))
    reasons = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, ConfigurationError)]
    assert reasons and all("lower the job's learning_rate" in reason for reason in reasons), outcomes
    assert not trees_sent(parties)
    assert remembered(parties) == [[]] * 3


@pytest.mark.parametrize("rate", [1e-9, 1e9])
def test_large_and_small_steps_train(tmp_path: Path, rate: float) -> None:
    parties = bagging.sites(tmp_path)
    succeed(parties.run(run_bagging_site, bagging.job(params={**bagging.PARAMS, "eta": rate})))
    booster = xgb.Booster(model_file=bytearray(bagging.model(parties)))
    margins = booster.predict(xgb.DMatrix(bagging.rows(0, 120)[["a", "b", "c"]]), output_margin=True)
    assert np.isfinite(margins).all() and np.abs(margins).max() > 0


def test_columns_of_any_name_and_without_any_value_train(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path)
    for number, site in enumerate(parties.sites):
        frame = bagging.rows(number, 150).rename(columns={"a": "Größe", "b": "no values"})
        parties.give(site, "train", frame.assign(**{"no values": np.float32(np.nan)}))
    succeed(parties.run(run_bagging_site, bagging.job()))
    booster = xgb.Booster(model_file=bytearray(bagging.model(parties)))
    assert booster.feature_names == ["Größe", "no values", "c"]
    assert set(booster.get_score(importance_type="weight")) == {"Größe", "c"}


@pytest.mark.parametrize(("n_rows", "policy"), [(0, {}), (5, {"min_rows_per_node": 6}), (6, {"min_rows_per_node": 6})])
def test_a_site_with_fewer_rows_than_a_node_must_hold_takes_no_part(n_rows: int, policy: dict, tmp_path: Path) -> None:
    """The root is a node: a tree without a split would be a statistic of too few rows."""
    parties = bagging.sites(tmp_path, min_effective_rows=1, **policy)
    parties.give("site-2", "train", bagging.rows(1, 6).iloc[:n_rows].astype(np.float32))
    outcomes = parties.run(run_bagging_site, bagging.job(num_rounds=1))
    if n_rows == 6:
        succeed(outcomes)
        return
    assert isinstance(outcomes["site-2"], ConfigurationError), outcomes
    assert not trees_sent(parties)


def test_the_record_states_this_sites_own_child_weight_and_step(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path)
    parties.set_policy("site-2", min_rows_per_node=30)
    parties.set_policy("site-3", min_rows_per_node=0)
    succeed(parties.run(run_bagging_site, bagging.job(num_rounds=1)))
    for site, weight in (("site-1", 1.0), ("site-2", 7.5), ("site-3", 1.0)):
        record = RunRecord.read(parties.run_folder(site))
        assert record.params["min_child_weight"] == weight
        assert any(f"min_child_weight is {weight:g} for this site's own trees" in note for note in record.notes)
        assert any("Each tree counts 1/3 of learning_rate" in note for note in record.notes)
        assert ("30 rows in every node" in " ".join(record.notes)) == (site == "site-2")


def test_a_job_whose_child_weight_undercuts_a_policy_is_refused(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path, min_rows_per_node=30)
    outcomes = parties.run(run_bagging_site, bagging.job(params={**bagging.PARAMS, "min_child_weight": 1e-9}))
    refusals = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, PolicyRefusal)]
    assert refusals and all("min_rows_per_node" in text and "at least 7.5" in text for text in refusals)
    assert not trees_sent(parties)


@pytest.mark.parametrize("is_hostile", [True, False])
def test_leaves_of_peers_do_not_use_up_a_sites_refusals(
    is_hostile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaves within the range add up: what they leave over is beyond it at a site that has done nothing.

    The control: where the steps of all sites are as large, it is the job's and the rows' doing, and counts somewhere.
    """
    real = bagging_site.grow

    def hostile(params: dict, matrix: xgb.DMatrix, number: int) -> SharedTree:
        tree = real(params, matrix, number)
        if is_hostile and matrix.num_row() > 120:  # all sites but the first
            tree.nodes["condition"][tree.nodes["left"] < 0] = 9.9e29
        return tree

    monkeypatch.setattr(bagging_site, "grow", hostile)
    parties = bagging.sites(tmp_path)
    params = {**bagging.PARAMS, "objective": "reg:squarederror", "eta": 0.9 if is_hostile else 1e9}
    outcomes = parties.run(run_bagging_site, bagging.job(params=params, num_rounds=20))
    policies = [SitePolicy.load(parties.workspace(site), site) for site in parties.sites]
    counts = [sum(RefusalCount(policy).counts().values()) for policy in policies]
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values()) and trees_sent(parties)
    if is_hostile:
        assert counts == [0, 0, 0] and "after the trees of other sites" in str(outcomes["site-1"])
        assert "own are out of range: site-2" in caplog.text
    else:
        assert sum(counts) > 0


# -- shared trees ------------------------------------------------------------------------------------------------------


DEPTH, N_FEATURES = 3, 4


def grown() -> tuple[xgb.Booster, xgb.DMatrix]:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(200, N_FEATURES)).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    matrix = xgb.DMatrix(values, label=np.nansum(values, axis=1))
    return xgb.train({"max_depth": DEPTH, "nthread": 1, "base_score": 0.0}, matrix, 1), matrix


def document(booster: xgb.Booster) -> dict:
    return json.loads(bytes(booster.save_raw("json")))


def tree() -> SharedTree:
    return SharedTree.of(document(grown()[0])["learner"]["gradient_booster"]["model"]["trees"][0])


def test_a_tree_scores_after_its_journey_as_before() -> None:
    booster, matrix = grown()
    whole = document(booster)
    model = whole["learner"]["gradient_booster"]["model"]
    shared = SharedTree.from_bytes(tree().to_bytes(DEPTH), DEPTH, N_FEATURES)
    model["trees"] = [shared.document(0, N_FEATURES)]
    again = xgb.Booster(model_file=bytearray(json.dumps(whole).encode()))
    assert np.array_equal(again.predict(matrix), booster.predict(matrix))
    assert len(shared.nodes) > 7


def test_statistics_of_rows_do_not_travel() -> None:
    """A tree whose statistics are other ones makes the same message."""
    original = document(grown()[0])["learner"]["gradient_booster"]["model"]["trees"][0]
    inner = [child >= 0 for child in original["left_children"]]
    changed = {
        **original,
        "sum_hessian": [7.0] * len(inner),
        "loss_changes": [7.0] * len(inner),
        "base_weights": [7.0] * len(inner),
    }
    assert original["sum_hessian"] != changed["sum_hessian"]
    assert SharedTree.of(original).to_bytes(DEPTH) == SharedTree.of(changed).to_bytes(DEPTH)


def test_every_message_of_a_depth_has_one_length() -> None:
    leaf = np.array([(-1, -1, 0, 0.5, 0)], _NODE)
    assert len(SharedTree(leaf).to_bytes(DEPTH)) == len(tree().to_bytes(DEPTH)) == 4 + 17 * most_nodes(DEPTH)


def test_the_protocol_states_the_size_of_a_tree() -> None:
    leaf = SharedTree(np.array([(-1, -1, 0, 0.5, 0)], _NODE))
    text = (Path(__file__).parents[4] / "nvflare_plugins" / "wire" / "PROTOCOL.md").read_text()
    assert all(f"{len(leaf.to_bytes(depth)):,} bytes at depth {depth}" in text for depth in (6, 12))


def damaged(**changes: tuple[int, float]) -> bytes:
    nodes = tree().nodes.copy()
    for field, (node, value) in changes.items():
        nodes[field][node] = value
    return SharedTree(nodes).to_bytes(DEPTH)


LEAF = int(np.flatnonzero(tree().nodes["left"] < 0)[0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        tree().to_bytes(DEPTH)[:-1],
        tree().to_bytes(DEPTH) + b"\0",
        tree().to_bytes(DEPTH)[:-1] + b"\1",
        bytes(4) + tree().to_bytes(DEPTH)[4:],
        b"\xff" * 4 + tree().to_bytes(DEPTH)[4:],
        b"\2\0\0\0" + tree().to_bytes(DEPTH)[4:],
        damaged(left=(0, 0)),
        damaged(left=(0, 2)),
        damaged(left=(0, 10_000)),
        damaged(right=(0, -1)),
        damaged(right=(0, -5)),
        damaged(right=(LEAF, 3)),
        damaged(left=(LEAF, -7)),
        damaged(feature=(0, N_FEATURES)),
        damaged(feature=(0, 2**32 - 1)),
        damaged(condition=(0, np.nan)),
        damaged(condition=(LEAF, np.inf)),
        damaged(condition=(0, -np.inf)),
        damaged(condition=(LEAF, np.nan)),
        damaged(condition=(LEAF, 1.1e30)),
        damaged(condition=(LEAF, -1.1e30)),
        damaged(default_left=(0, 2)),
    ],
    ids=range(23),
)
def test_what_is_no_tree_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        SharedTree.from_bytes(data, DEPTH, N_FEATURES)


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e-45, -1e9, LARGEST_LEAF])
def test_leaves_of_every_size_that_can_be_added_up_are_taken(value: float) -> None:
    read = SharedTree.from_bytes(damaged(condition=(LEAF, value)), DEPTH, N_FEATURES)
    assert read.nodes["condition"][LEAF] == np.float32(value)


def test_a_leaf_out_of_range_is_told_from_other_faults() -> None:
    with pytest.raises(LeafOutOfRange):
        SharedTree.from_bytes(damaged(condition=(LEAF, np.inf)), DEPTH, N_FEATURES)
    with pytest.raises(ProtocolError) as other:
        SharedTree.from_bytes(damaged(condition=(0, np.inf)), DEPTH, N_FEATURES)
    assert not isinstance(other.value, LeafOutOfRange)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    chain = np.array(
        [(1, 2, 0, 0.0, 0), (-1, -1, 0, 1.0, 0), (3, 4, 0, 0.0, 0), (-1, -1, 0, 1.0, 0), (-1, -1, 0, 1.0, 0)], _NODE
    )
    SharedTree.from_bytes(SharedTree(chain).to_bytes(2), 2, 1)
    deeper = np.concatenate([chain, np.array([(-1, -1, 0, 1.0, 0), (-1, -1, 0, 1.0, 0)], _NODE)])
    deeper[4] = (5, 6, 0, 0.0, 0)
    with pytest.raises(ProtocolError, match="deeper"):
        SharedTree.from_bytes(SharedTree(deeper).to_bytes(2), 2, 1)


@given(st.data())
def test_any_bytes_are_a_tree_or_refused(data: st.DataObject) -> None:
    message = bytearray(tree_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] = data.draw(st.integers(0, 255))
    try:
        read = SharedTree.from_bytes(bytes(message), DEPTH, N_FEATURES)
    except ProtocolError:
        return
    assert read.to_bytes(DEPTH) == bytes(message)


tree_bytes = tree().to_bytes(DEPTH)
