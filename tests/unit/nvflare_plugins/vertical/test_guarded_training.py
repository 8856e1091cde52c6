"""Whole trainings in which passive parties keep sums: what leaves, that training goes on, and who may not withhold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.kinds.vertical.key_owner import pair_format
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import RELEASED_SUMS, Memory
from tests.support.bin_attack import Tap
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.in_process_link import InProcessLink
from tests.support.vertical_federation import Joined, federate, first_difference, make_clear, make_paillier, trees

N_ROWS = 1500
FLOOR = 60
PARAMS = {"objective": "binary:logistic", "max_depth": 5, "max_bin": 32}


def data(widths=(3, 3)) -> Joined:
    rng = np.random.default_rng(2)
    features = rng.normal(size=(N_ROWS, sum(widths))).astype(np.float32)
    features[::9, -1] = np.nan
    signal = features[:, 0] * features[:, 3] + features[:, 4] - 0.5 * features[:, 1]
    label = (signal + rng.normal(size=N_ROWS) > 0).astype(np.float32)
    return Joined(features, label, widths, (features[:200], label[:200]))


def guard(folder, floor=FLOOR, max_sums=10**6, max_share=1e6, name="data", max_bits=10**6, **options) -> Guard:
    rules = VerticalRules(min_rows_per_node=floor, max_sums_per_row=max_sums, max_split_bits_per_row=max_bits)
    ids = [str(i) for i in range(N_ROWS)]
    return Guard(rules, ReleasedSums(Memory(folder, "site"), name), ids, max_share=max_share, **options)


def guarded(joined: Joined, num_rounds: int, guards: list[Guard], **params):
    tap = Tap(pair_format(N_ROWS), N_ROWS)
    listen = tap.listen if len(guards) == 1 else lambda link: link
    outcome = federate(
        joined,
        {**PARAMS, **params},
        num_rounds,
        scheme=lambda n_rows: (tap, ClearHistogramMaker),
        guards=guards,
        listen=listen,
        guarded=True,
    )
    tap.finish()
    return outcome, tap


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0},
        {"num_parallel_tree": 3, "subsample": 0.5},
        {"colsample_bytree": 0.5, "colsample_bynode": 0.6},
    ],
    ids=["depthwise", "lossguide", "forest", "columns"],
)
def test_no_released_set_and_no_difference_within_a_tree_is_below_the_floor(tmp_path, params):
    fraction = params.get("subsample", 1.0)
    outcome, tap = guarded(data(), 4, [guard(tmp_path, row_fraction=fraction)], **params)
    floor = FLOOR / fraction
    n_withheld = 0
    for tree in tap.trees:
        known = [frozenset(tree.nodes[0].tolist())]
        for rows in tree.nodes[1:]:
            child = frozenset(rows.tolist())
            parent = min((one for one in known if child < one), key=len)
            known += [child, parent - child]
        assert min(map(len, known)) >= floor
        assert all(len(a - b) >= floor or a <= b for a in known for b in known if a & b)
        n_withheld += len(known) < 5
    exposure = outcome.passives[0].guard.exposure()
    assert exposure.nodes_withheld > 0
    assert exposure.n_sums == 2 * sum(len(tree.nodes) for tree in tap.trees)
    assert outcome.passives[0].table  # it still wins splits
    # What the parties hold together is one model: the engine compared every tree with XGBoost's, and paths agree.
    merged = xgb.Booster(model_file=bytearray(outcome.merged()))
    joined = data()
    matrix = xgb.DMatrix(joined.features, feature_names=merged.feature_names)
    assert np.array_equal(merged.predict(matrix), outcome.predict(joined, 0))


def test_guards_that_withhold_nothing_change_nothing(tmp_path):
    joined = data((2, 2, 2))
    lenient = [guard(tmp_path, 1, name=str(i)) for i in range(2)]
    outcome, _ = guarded(joined, 4, lenient, min_child_weight=0.5)
    assert all(one.exposure().nodes_withheld == 0 for one in lenient)
    plain = federate(joined, {**PARAMS, "min_child_weight": 0.5}, 4)
    assert first_difference(outcome.merged(), plain.merged()) == ""


def test_under_encryption_the_same_sums_are_withheld_and_the_model_is_the_same(tmp_path):
    rng = np.random.default_rng(7)
    features = rng.normal(size=(200, 4)).astype(np.float32)
    joined = Joined(features, (features[:, 0] + features[:, 3] > 0).astype(np.float32), (2, 2))
    models = []
    for name, scheme in (("clear", make_clear), ("encrypted", make_paillier)):
        memory = Memory(tmp_path / name, "site")
        memory.secret(RELEASED_SUMS, bytes(32))  # the same keys of rows
        ledger = ReleasedSums(memory, "data")
        rules = VerticalRules(min_rows_per_node=40)
        one = Guard(rules, ledger, [str(i) for i in range(200)], max_share=1e6)
        outcome = federate(joined, {**PARAMS, "max_bin": 6}, 2, scheme=scheme, guards=[one], guarded=True)
        assert one.exposure().nodes_withheld
        models.append(outcome.merged())
    assert first_difference(*models) == ""


def test_a_party_that_gives_nothing_leaves_the_others_to_train_without_it(tmp_path):
    joined = data()
    closed = guard(tmp_path, floor=N_ROWS + 1)
    outcome, tap = guarded(joined, 3, [closed])
    assert not outcome.passives[0].table and not tap.trees
    alone = federate(joined, PARAMS, 3, own_rounds=3)
    assert first_difference(outcome.result.model, alone.result.model) == ""
    assert closed.exposure().nodes_withheld == 1  # it was not asked again
    three = data((2, 2, 2))
    outcome, _ = guarded(three, 3, [guard(tmp_path, floor=N_ROWS + 1), guard(tmp_path, 1, name="other")])
    assert not outcome.passives[0].table and outcome.passives[1].table


def test_a_party_at_its_cap_stops_in_the_middle_of_the_training(tmp_path):
    outcome, tap = guarded(data(), 6, [guard(tmp_path, max_sums=10)])
    used = {tree for tree, _ in outcome.passives[0].table}
    assert used and max(used) < 5 and len(trees(outcome.result.model)) == 6
    assert outcome.passives[0].guard.exposure().per_row_max <= 10
    again, tap = guarded(data(), 2, [guard(tmp_path, max_sums=10)])
    assert not tap.trees and not again.passives[0].table  # the next job gets nothing at all


def test_rows_are_divided_by_no_more_splits_than_the_cap(tmp_path, monkeypatch):
    """Counted from what leaves: the model's own splits show ordered bits, one for each row of their nodes."""
    shown = np.zeros(N_ROWS, dtype=int)
    honest = PassiveParty._splits

    def splits(self, request):
        answer = honest(self, request)
        for split in request.splits:
            shown[self._rows[split.node]] += 1
        return answer

    monkeypatch.setattr(PassiveParty, "_splits", splits)
    one = guard(tmp_path, floor=1, max_bits=4)
    outcome, tap = guarded(data(), 4, [one])
    assert shown.max() == 4 == one.exposure().split_bits_max and one.exposure().nodes_withheld
    assert one.exposure().split_bits_mean == pytest.approx(shown.mean())
    assert len(trees(outcome.result.model)) == 4
    again, tap = guarded(data(), 2, [guard(tmp_path, floor=1, max_bits=4)])
    assert not tap.trees and not again.passives[0].table  # the next job gets nothing at all


def test_nothing_is_said_about_rows_below_a_withheld_node(tmp_path, monkeypatch):
    requests, withheld = [], []
    honest = InProcessLink._answer

    def answer(self, sent):
        reply = honest(self, sent)
        requests.append(sent)
        if isinstance(reply, messages.HistogramAnswer):
            withheld.extend((reply.tree, node) for node in reply.withheld)
        return reply

    monkeypatch.setattr(InProcessLink, "_answer", answer)
    outcome, _ = guarded(data(), 3, [guard(tmp_path)])
    passive = outcome.passives[0]
    assert withheld
    below = {(tree, node) for tree, node in passive.table if (tree, node) in withheld}
    assert not below
    # The party keeps no rows of nodes that are closed to it.
    assert not set(passive._rows) & {node for tree, node in withheld if tree == 2}


def changing(monkeypatch, change):
    honest = InProcessLink._answer
    monkeypatch.setattr(InProcessLink, "_answer", lambda self, sent: change(honest(self, sent)))


def keeps_all(answer):
    if not isinstance(answer, messages.HistogramAnswer):
        return answer
    return dataclasses.replace(answer, nodes=(), sums=b"", withheld=answer.nodes)


def keeps_another(answer):
    return dataclasses.replace(answer, withheld=(77,)) if isinstance(answer, messages.HistogramAnswer) else answer


def gives_and_keeps(answer):
    return (
        dataclasses.replace(answer, withheld=answer.nodes) if isinstance(answer, messages.HistogramAnswer) else answer
    )


def test_exact_jobs_refuse_a_party_that_withholds(monkeypatch):
    changing(monkeypatch, keeps_all)
    with pytest.raises(ProtocolError, match="withheld"):
        federate(data(), PARAMS, 1)


@pytest.mark.parametrize("change", [keeps_another, gives_and_keeps])
def test_guarded_jobs_refuse_answers_about_other_nodes(monkeypatch, change):
    changing(monkeypatch, change)
    with pytest.raises(ProtocolError, match="other nodes"):
        federate(data(), PARAMS, 1, guarded=True)


def test_a_split_of_a_withheld_node_is_refused(tmp_path):
    joined = data()
    party = PassiveParty(
        [joined.part(1, joined.features).T], ["a", "b", "c"], 32, ClearHistogramMaker(), None, guard(tmp_path)
    )
    party.answer(
        messages.TreeGradients(0, messages.Bits.of(np.ones(3, dtype=bool)), np.zeros((N_ROWS, 2), "<i8").tobytes())
    )
    assert party.answer(messages.HistogramRequest(0, ())).nodes == (0,)
    few = messages.Bits.of(np.arange(N_ROWS) < 10)
    answer = party.answer(messages.HistogramRequest(0, (messages.NodePartition(0, 1, 2, few),)))
    assert (answer.nodes, answer.sums, answer.withheld) == ((), b"", (1,))
    for node in (0, 1, 2):
        with pytest.raises(ProtocolError):
            party.answer(messages.SplitRequest(0, (messages.OwnedSplit(node, 0, 3, False),)))
    for node in (1, 2):
        with pytest.raises(ProtocolError):
            party.answer(messages.HistogramRequest(0, (messages.NodePartition(node, 3, 4, few),)))


def test_too_many_bins_are_refused_before_anything_is_sent(tmp_path):
    with pytest.raises(PolicyRefusal, match="max_bins"):
        guarded(data(), 1, [guard(tmp_path)], max_bin=64)


def test_rare_categories_and_too_few_missing_ones_go_one_way_in_training_and_in_prediction(tmp_path):
    """Too few missing values count as a category in training: the owner keeps that category's side for them."""
    rng = np.random.default_rng(5)
    codes = rng.choice(6, size=N_ROWS, p=[0.3, 0.25, 0.2, 0.2, 0.03, 0.02])
    features = np.column_stack([rng.normal(size=N_ROWS), codes, rng.normal(size=N_ROWS)]).astype(np.float32)
    label = (np.isin(codes, [1, 3, 5]) ^ (features[:, 0] > 1)).astype(np.float32)
    features[:4, 1] = np.nan
    joined = Joined(features, label, (1, 2), categories={1: list("abcdef")})
    outcome = federate(joined, PARAMS, 3, guards=[guard(tmp_path)], guarded=True)
    splits = [s for passive in outcome.passives for s in passive.table.values() if s.categories is not None]
    assert splits and all((4 in s.categories) == (5 in s.categories) for s in splits)
    merged = xgb.Booster(model_file=bytearray(outcome.merged()))
    names = merged.feature_names
    np.testing.assert_array_equal(
        outcome.predict(joined, 0), merged.predict(joined.matrix(features, feature_names=names))
    )
    as_rare = features.copy()
    as_rare[:4, 1] = 5  # rare categories have the last bin
    leaves = [merged.predict(joined.matrix(x, feature_names=names), pred_leaf=True) for x in (features, as_rare)]
    np.testing.assert_array_equal(*leaves)
